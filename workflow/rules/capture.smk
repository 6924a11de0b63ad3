# SPDX-License-Identifier: Apache-2.0
# Captured plans: vLLM's own alignment in one process per history, frozen by hash before any run.


rule capture:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        probe="results/probe/grid_probe.so",
        interpreter=interpreter,
    output:
        plans=f"{STUDY}/capture/{{history}}/plans.safetensors",
        capture=f"{STUDY}/capture/{{history}}/capture.json",
        telemetry=f"{STUDY}/capture/{{history}}/telemetry.json",
        manifests=[f"{STUDY}/capture/{{history}}/{name}.manifest.json" for name in ("capture", "telemetry")],
    log:
        f"{STUDY_LOG}/capture/{{history}}.log",
    benchmark:
        f"{STUDY_LOG}/capture/{{history}}.benchmark.tsv"
    wildcard_constraints:
        lane="cuda",
        plan_source="captured",
    resources:
        **LONG,
        gpu=1,
        gpu_queue=1,
    params:
        fixture=subpath(input.spec, parent=True),
        out=subpath(output.capture, parent=True),
        routeblock=routeblock,
        code=code("routeblock.route_block.gpu.captures", *CudaLane.modules),
    shell:
        "ROUTEBLOCK_PROBE={input.probe:q} {params.routeblock} study-a capture --fixture {params.fixture:q}"
        " --history {wildcards.history} --out {params.out:q} 2> {log:q}"


rule captured_plans:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        captures=expand(f"{STUDY}/capture/{{history}}/capture.json", history=HISTORIES, allow_missing=True),
    output:
        plans=f"{STUDY}/plans.safetensors",
        document=f"{STUDY}/plans.json",
        manifest=f"{STUDY}/plans.manifest.json",
    log:
        f"{STUDY_LOG}/plans.log",
    wildcard_constraints:
        lane="cuda",
        plan_source="captured",
    localrule: True
    params:
        fixture=subpath(input.spec, parent=True),
        captures=lambda wildcards, input: [f"--from {Path(capture).parent}" for capture in input.captures],
        code=code("routeblock.route_block.gpu.captures"),
    shell:
        "routeblock study-a freeze-plans --fixture {params.fixture:q} {params.captures} --out {output.plans:q} 2> {log:q}"
