# SPDX-License-Identifier: Apache-2.0
from snakemake.utils import min_version

from routeblock.rule_code import readable

min_version("9.0")


configfile: readable("config.yaml")


include: "workflow/rules/common.smk"
include: "workflow/rules/environment.smk"
include: "workflow/rules/manifest.smk"
include: "workflow/rules/fixture.smk"
include: "workflow/rules/capture.smk"
include: "workflow/rules/prediction.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/runs.smk"
include: "workflow/rules/census.smk"
include: "workflow/rules/evidence.smk"
include: "workflow/rules/native.smk"
include: "workflow/rules/random_plans.smk"
include: "workflow/rules/mutations.smk"
include: "workflow/rules/score.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/sweep.smk"
include: "workflow/rules/confirmation.smk"
include: "workflow/rules/recordings.smk"
include: "workflow/rules/statistics.smk"
include: "workflow/rules/alignment_cost.smk"
include: "workflow/rules/peers.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/explain.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        rules.environment.output,
        STUDY_A.each(rules.score.output.score),
        [f"results/tables/{target.name}.md" for target in TABLES if target.name != "prediction"],
        # The study's own mistake, in its own geometry: other shapes need not split at that grid.
        expand(
            rules.control.output,
            **(
                STUDIES
                | dict(fixture=OWN_GEOMETRY, lane=STUDY_A.run_here, point=["published"], plan_source=["stored"])
            ),
        ),
        grouped.identities(CONFIG),
        [f"results/figures/{target.name}.svg" for target in FIGURES],
        rules.report.output,
        rules.bundle.output,
