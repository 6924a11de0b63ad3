# The verdict on all runs of a study. The scorer is believed once it has refused what it should.


rule score:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        plans=captured_plans,
        runs=all_runs,
        mutations=ancient(f"{STUDY}/mutations.json"),
    output:
        score=f"{STUDY}/score.json",
        manifest=f"{STUDY}/score.manifest.json",
    log:
        f"{STUDY_LOG}/score.log",
    params:
        plans=plans_option,
        replicates=replicates,
        code=code("score"),
    shell:
        "routeblock score --fixture $(dirname {input.spec}) --prediction {input.prediction} {params.plans}"
        " --runs $(dirname {output.score}) --lane {wildcards.lane} --replicates {params.replicates}"
        " --out {output.score} > {log} 2>&1"
