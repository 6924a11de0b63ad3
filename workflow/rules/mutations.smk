# Changed copies of all runs of a study, each refused by the scorer for its declared reasons, and one unchanged, accepted.


rule mutations:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        identity=expected_identity,
        plans=captured_plans,
        runs=all_runs,
        declared="fixtures/mutations.json",
    output:
        mutations=f"{STUDY}/mutations.json",
        manifest=f"{STUDY}/mutations.manifest.json",
    log:
        f"{STUDY_LOG}/mutations.log",
    params:
        plans=plans_option,
        replicates=replicates,
        code=code("routeblock.route_block.scorer.mutations"),
    shell:
        "routeblock mutate --fixture $(dirname {input.spec}) --prediction {input.prediction} --identity {input.identity} {params.plans}"
        " --runs $(dirname {output.mutations}) --lane {wildcards.lane} --replicates {params.replicates} --declared {input.declared}"
        " --out {output.mutations} > {log} 2>&1"
