from snakemake.utils import min_version

min_version("9.0")


configfile: "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/environment.smk"


rule all:
    default_target: True
    input:
        rules.environment.output,
