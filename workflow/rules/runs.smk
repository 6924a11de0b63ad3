# One process a run: seven cells x two histories x the replicates.


rule golden:
    input:
        golden="fixtures/golden",
    output:
        check="results/twin/golden.json",
        manifest="results/twin/golden.manifest.json",
    log:
        "results/logs/golden.log",
    params:
        code=code("golden"),
    threads: workflow.cores
    shell:
        "routeblock check-twin --golden {input.golden} --out {output.check} 2> {log}"


rule run:
    input:
        multiext("results/fixtures/{fixture}/", *FIXTURE_FILES),
        prediction=STUDY + "/prediction.json",
        # The twin proves itself before it is used.
        golden=ancient("results/twin/golden.json"),
    output:
        multiext(RUN + "/", *RUN_FILES),
    log:
        LOG + "/{cell}/{history}/rep{n}.log",
    params:
        code=code("run"),
    # The order of the study, as far as free cores allow: replicate-major, the history order alternates.
    priority: lambda wildcards: -position(wildcards.cell, wildcards.history, int(wildcards.n))
    shell:
        "routeblock run --fixture $(dirname {input[0]}) --prediction {input.prediction} --lane {wildcards.lane}"
        " --cell {wildcards.cell} --history {wildcards.history} --replicate {wildcards.n}"
        " --out $(dirname {output[0]}) 2> {log}"


STUDIES = dict(
    fixture=[str(CONFIG.fixture.name)],
    lane=[str(lane) for lane in CONFIG.lanes],
    point=[str(point) for point in CONFIG.points],
    plan_source=[str(source) for source in CONFIG.plan_source],
)
STUDY_RUNS = expand(
    RUN + "/record.json", cell=list(CELLS), history=HISTORIES, n=range(1, CONFIG.replicates + 1), **STUDIES
)
CONTROLS = expand(STUDY + "/control.json", **(STUDIES | dict(point=["published"])))
