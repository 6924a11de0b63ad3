# The verdict on all runs of a study. The scorer is believed once it has refused what it should.


rule score:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        runs=all_runs,
        mutations=ancient(f"{STUDY}/mutations.json"),
    output:
        score=f"{STUDY}/score.json",
        manifest=f"{STUDY}/score.manifest.json",
    log:
        f"{STUDY_LOG}/score.log",
    params:
        replicates=CONFIG.replicates,
        code=code("score"),
    shell:
        "routeblock score --fixture $(dirname {input.spec}) --prediction {input.prediction}"
        " --runs $(dirname {output.score}) --replicates {params.replicates}"
        " --out {output.score} > {log} 2>&1"
