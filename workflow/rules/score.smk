# SPDX-License-Identifier: Apache-2.0
# The verdict on all runs of a study, once the twin has proved itself on recorded outputs. No input here is `ancient`: while
# such an input is to be made again, Snakemake does not look at what else would make the job run.


rule score:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        identity=expected_identity,
        beside_identity=beside_identity,
        plans=captured_plans,
        runs=all_runs,
        golden="results/twin/golden.json",
    output:
        score=f"{STUDY}/score.json",
        manifest=f"{STUDY}/score.manifest.json",
    log:
        f"{STUDY_LOG}/score.log",
    resources:
        **SHORT,
    params:
        fixture=subpath(input.spec, parent=True),
        out=subpath(output.score, parent=True),
        plans=plans_option,
        replicates=replicates,
        code=code("routeblock.route_block.scorer.score"),
    shell:
        "routeblock study-a score --fixture {params.fixture:q} --prediction {input.prediction:q} --identity {input.identity:q} {params.plans}"
        " --runs {params.out:q} --lane {wildcards.lane} --replicates {params.replicates}"
        " --golden {input.golden:q} --out {output.score:q} > {log:q} 2>&1"
