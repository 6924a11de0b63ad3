# SPDX-License-Identifier: Apache-2.0
# One process a run: seven cells x two histories x the replicates.


rule golden:
    input:
        golden="fixtures/golden",
    output:
        check="results/twin/golden.json",
        manifest="results/twin/golden.manifest.json",
    log:
        "results/logs/golden.log",
    # First of all, and alone: it compiles the twin for the runs.
    priority: 1000
    threads: workflow.cores
    resources:
        **SHORT,
    params:
        code=code("routeblock.twin.self_test"),
    shell:
        "routeblock gpu check-twin --golden {input.golden:q} --out {output.check:q} 2> {log:q}"


# What is going to compute, written down and sealed before the first run, which has it as an input: the scorer asks no
# majority of runs who they were.
rule identity:
    output:
        identity=IDENTITY,
        manifest=IDENTITY.replace(".json", SUFFIX),
    log:
        "results/logs/identity/{lane}.log",
    wildcard_constraints:
        lane="twin-[a-z]+",
    resources:
        **SHORT,
    params:
        code=code(
            "routeblock.route_block.runs.identity",
            "routeblock.route_block.runs.run",
            "routeblock.route_block.runs.twin",
        ),
    shell:
        "routeblock study-a freeze-identity --lane {wildcards.lane} --out {output.identity:q} 2> {log:q}"


rule identity_cuda:
    input:
        probe="results/probe/grid_probe.so",
        interpreter=interpreter,
    output:
        identity=IDENTITY,
        manifest=IDENTITY.replace(".json", SUFFIX),
    log:
        "results/logs/identity/{lane}.log",
    wildcard_constraints:
        lane="cuda",
    resources:
        **LONG,
        gpu=1,
        gpu_queue=1,
    params:
        routeblock=routeblock,
        code=code("routeblock.route_block.runs.identity", "routeblock.route_block.runs.run", *CudaLane.modules),
    shell:
        "ROUTEBLOCK_PROBE={input.probe:q} {params.routeblock} study-a freeze-identity --lane {wildcards.lane} --out {output.identity:q} 2> {log:q}"


rule run:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        identity=IDENTITY,
    output:
        record=f"{RUN}/{RECORD}",
        tensors=f"{RUN}/{TENSORS}",
        telemetry=f"{RUN}/{TELEMETRY}",
        manifests=[f"{RUN}/{RECORD_MANIFEST}", f"{RUN}/{TELEMETRY_MANIFEST}"],
    log:
        f"{STUDY_LOG}/{{cell}}/{{history}}/rep{{n}}.log",
    benchmark:
        f"{STUDY_LOG}/{{cell}}/{{history}}/rep{{n}}.benchmark.tsv"
    wildcard_constraints:
        lane="twin-[a-z]+",
    # The order of the study, as far as free cores allow: replicate-major, the history order alternates.
    priority: lambda wildcards: -position(wildcards.cell, wildcards.history, int(wildcards.n))
    resources:
        runtime=2,
        mem_mb=1000,  # at most 10 s and 430 MB on 2 cores
    params:
        fixture=subpath(input.spec, parent=True),
        out=subpath(output.record, parent=True),
        code=code("routeblock.route_block.runs.run", "routeblock.route_block.runs.twin"),
    shell:
        "routeblock study-a run --fixture {params.fixture:q} --prediction {input.prediction:q} --identity {input.identity:q} --lane {wildcards.lane}"
        " --cell {wildcards.cell} --history {wildcards.history} --replicate {wildcards.n} --out {params.out:q} 2> {log:q}"


rule run_cuda:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        identity=IDENTITY,
        plans=captured_plans,
        probe="results/probe/grid_probe.so",
        interpreter=interpreter,
    output:
        record=f"{RUN}/{RECORD}",
        tensors=f"{RUN}/{TENSORS}",
        telemetry=f"{RUN}/{TELEMETRY}",
        manifests=[f"{RUN}/{RECORD_MANIFEST}", f"{RUN}/{TELEMETRY_MANIFEST}"],
    log:
        f"{STUDY_LOG}/{{cell}}/{{history}}/rep{{n}}.log",
    benchmark:
        f"{STUDY_LOG}/{{cell}}/{{history}}/rep{{n}}.benchmark.tsv"
    wildcard_constraints:
        lane="cuda",
    # Started in the order of the study, one study after the other; each waits for its predecessor once it has imported.
    priority: start_order
    resources:
        runtime=2,
        mem_mb=4000,  # recorded: at most 10 s, less the wait for the turn, and 2 GB
        gpu=1,
        gpu_queue=1,
        wait_s=CONFIG.cuda.wait_s,  # no param: how long to wait makes no other result
    params:
        fixture=subpath(input.spec, parent=True),
        out=subpath(output.record, parent=True),
        routeblock=routeblock,
        plans=plans_option,
        gpu=lambda wildcards: gpu_of(int(wildcards.n), CONFIG.cuda.gpus),
        after=after,
        code=code("routeblock.route_block.runs.run", *CudaLane.modules),
    shell:
        "ROUTEBLOCK_PROBE={input.probe:q} {params.routeblock} study-a run --fixture {params.fixture:q}"
        " --prediction {input.prediction:q} --identity {input.identity:q} {params.plans} --lane {wildcards.lane} --cell {wildcards.cell}"
        " --history {wildcards.history} --replicate {wildcards.n} --gpu {params.gpu} {params.after}"
        " --limit {resources.wait_s} --out {params.out:q} 2> {log:q}"
