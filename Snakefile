from snakemake.utils import min_version

min_version("9.0")


configfile: "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/environment.smk"
include: "workflow/rules/fixture.smk"
include: "workflow/rules/capture.smk"
include: "workflow/rules/prediction.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/runs.smk"
include: "workflow/rules/census.smk"
include: "workflow/rules/evidence.smk"


rule all:
    default_target: True
    input:
        rules.environment.output,
        expand(f"{RUN}/record.json", cell=CELLS, history=HISTORIES, n=range(1, CONFIG.replicates + 1), **STUDIES),
        expand(rules.control.output, **(STUDIES | dict(point=["published"], plan_source=["stored"]))),
