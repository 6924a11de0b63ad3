# What native alignment gives call by call and process by process, and the control of the grid probe.

POINT = "results/route_block/{fixture}/{lane}/{point}"


rule census:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{POINT}/stored/prediction.json",
        probe="results/probe/grid_probe.so",
    output:
        census=f"{POINT}/census/{{history}}/process{{n}}.json",
        manifest=f"{POINT}/census/{{history}}/process{{n}}.manifest.json",
    log:
        "results/logs/route_block/{fixture}/{lane}/{point}/census/{history}/process{n}.log",
    wildcard_constraints:
        lane="cuda",
    resources:
        gpu=1,
        gpu_queue=1,
    params:
        routeblock=routeblock,
        calls=CONFIG.cuda.census.calls,
        code=code("census"),
    shell:
        "ROUTEBLOCK_PROBE={input.probe} {params.routeblock} census --fixture $(dirname {input.spec})"
        " --prediction {input.prediction} --history {wildcards.history} --process {wildcards.n}"
        " --calls {params.calls} --out {output.census} 2> {log}"


rule probe_control:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        probe="results/probe/grid_probe.so",
    output:
        assisted="results/route_block/{fixture}/{lane}/probe_control/with_probe.json",
        unassisted="results/route_block/{fixture}/{lane}/probe_control/without_probe.json",
        manifests=[
            f"results/route_block/{{fixture}}/{{lane}}/probe_control/{way}_probe.manifest.json"
            for way in ("with", "without")
        ],
    log:
        "results/logs/route_block/{fixture}/{lane}/probe_control.log",
    wildcard_constraints:
        lane="cuda",
    resources:
        gpu=1,
        gpu_queue=1,
    params:
        routeblock=routeblock,
        code=code("unassisted"),
    shell:
        "(ROUTEBLOCK_PROBE={input.probe} {params.routeblock} unassisted --fixture $(dirname {input.spec})"
        " --out {output.assisted} && env -u ROUTEBLOCK_PROBE {params.routeblock} unassisted"
        " --fixture $(dirname {input.spec}) --out {output.unassisted}) 2> {log}"
