# One process a run: seven cells x two histories x the replicates.


rule golden:
    input:
        golden="fixtures/golden",
    output:
        check="results/twin/golden.json",
        manifest="results/twin/golden.manifest.json",
    log:
        "results/logs/golden.log",
    threads: workflow.cores
    params:
        code=code("golden"),
    shell:
        "routeblock check-twin --golden {input.golden} --out {output.check} 2> {log}"


rule run:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        # The twin proves itself on recorded outputs before it is used.
        golden=ancient("results/twin/golden.json"),
    output:
        record=f"{RUN}/{RECORD}",
        tensors=f"{RUN}/{TENSORS}",
        telemetry=f"{RUN}/{TELEMETRY}",
        manifests=[f"{RUN}/{RECORD_MANIFEST}", f"{RUN}/{TELEMETRY_MANIFEST}"],
    log:
        f"{STUDY_LOG}/{{cell}}/{{history}}/rep{{n}}.log",
    # The order of the study, as far as free cores allow: replicate-major, the history order alternates.
    priority: lambda wildcards: -position(wildcards.cell, wildcards.history, int(wildcards.n))
    params:
        code=code("run"),
    shell:
        "routeblock run --fixture $(dirname {input.spec}) --prediction {input.prediction} --lane {wildcards.lane}"
        " --cell {wildcards.cell} --history {wildcards.history} --replicate {wildcards.n} --out $(dirname {output.record}) 2> {log}"
