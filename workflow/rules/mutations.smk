# SPDX-License-Identifier: Apache-2.0
# Changed copies of all runs of a study, each refused by the scorer for its declared reasons, and one unchanged, accepted.


rule mutations:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        identity=expected_identity,
        beside_identity=beside_identity,
        plans=captured_plans,
        runs=all_runs,
        declared="fixtures/mutations.json",
    output:
        mutations=f"{STUDY}/mutations.json",
        manifest=f"{STUDY}/mutations.manifest.json",
    log:
        f"{STUDY_LOG}/mutations.log",
    benchmark:
        f"{STUDY_LOG}/mutations.benchmark.tsv"
    resources:
        **SHORT,
    params:
        fixture=subpath(input.spec, parent=True),
        out=subpath(output.mutations, parent=True),
        plans=plans_option,
        replicates=replicates,
        code=code("routeblock.route_block.scorer.mutations"),
    shell:
        "routeblock study-a mutate --fixture {params.fixture:q} --prediction {input.prediction:q} --identity {input.identity:q} {params.plans}"
        " --runs {params.out:q} --lane {wildcards.lane} --replicates {params.replicates} --declared {input.declared:q}"
        " --out {output.mutations:q} > {log:q} 2>&1"
