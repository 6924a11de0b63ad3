# SPDX-License-Identifier: Apache-2.0
# What native alignment gives call by call and process by process, and the control of the grid probe.


rule census:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{POINT}/stored/prediction.json",
        probe="results/probe/grid_probe.so",
        interpreter=interpreter,
    output:
        census=f"{POINT}/census/{{history}}/process{{n}}.json",
        manifest=f"{POINT}/census/{{history}}/process{{n}}.manifest.json",
    log:
        f"{LANE_LOG}/{{point}}/census/{{history}}/process{{n}}.log",
    benchmark:
        f"{LANE_LOG}/{{point}}/census/{{history}}/process{{n}}.benchmark.tsv"
    wildcard_constraints:
        lane="cuda",
    resources:
        **LONG,
        gpu=1,
        gpu_queue=1,
    params:
        fixture=subpath(input.spec, parent=True),
        routeblock=routeblock,
        calls=CONFIG.cuda.census.calls,
        gpu=lambda wildcards: gpu_of(int(wildcards.n), CONFIG.cuda.gpus),
        code=code("routeblock.route_block.gpu.census", *CudaLane.modules),
    shell:
        "ROUTEBLOCK_PROBE={input.probe:q} {params.routeblock} study-a census --fixture {params.fixture:q}"
        " --prediction {input.prediction:q} --history {wildcards.history} --process {wildcards.n}"
        " --calls {params.calls} --gpu {params.gpu} --out {output.census:q} 2> {log:q}"


rule unassisted:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        probe="results/probe/grid_probe.so",
        interpreter=interpreter,
    output:
        assisted=f"{LANE}/probe_control/with_probe.json",
        unassisted=f"{LANE}/probe_control/without_probe.json",
        manifests=[f"{LANE}/probe_control/{way}_probe.manifest.json" for way in ("with", "without")],
    log:
        f"{LANE_LOG}/probe_control.log",
    wildcard_constraints:
        lane="cuda",
    resources:
        **LONG,
        gpu=1,
        gpu_queue=1,
    params:
        fixture=subpath(input.spec, parent=True),
        routeblock=routeblock,
        code=code("routeblock.route_block.gpu.unassisted", *CudaLane.modules),
    shell:
        "(ROUTEBLOCK_PROBE={input.probe:q} {params.routeblock} study-a unassisted --fixture {params.fixture:q}"
        " --out {output.assisted:q} && env -u ROUTEBLOCK_PROBE {params.routeblock} study-a unassisted"
        " --fixture {params.fixture:q} --out {output.unassisted:q}) 2> {log:q}"


rule census_summary:
    input:
        processes=processes,
    output:
        summary=f"{POINT}/census.json",
        manifest=f"{POINT}/census.manifest.json",
    log:
        f"{LANE_LOG}/{{point}}/census.log",
    localrule: True
    params:
        out=subpath(output.summary, parent=True),
        code=code("routeblock.route_block.gpu.census_summary"),
    shell:
        "routeblock study-a summarize-census {params.out:q}/census --lane {wildcards.lane}"
        " --out {output.summary:q} 2> {log:q}"


rule probe_control:
    input:
        lambda wildcards: "{}/probe_control/{}.json".format(
            LANE.format(**wildcards), "restored" if wildcards.lane in EVIDENCE else "without_probe"
        ),
    output:
        comparison=f"{LANE}/probe_control.json",
        manifest=f"{LANE}/probe_control.manifest.json",
    log:
        f"{LANE_LOG}/probe_control_comparison.log",
    localrule: True
    params:
        out=subpath(output.comparison, parent=True),
        code=code("routeblock.route_block.gpu.probe_comparison"),
    shell:
        "routeblock study-a compare-unassisted {params.out:q}/probe_control --lane {wildcards.lane}"
        " --out {output.comparison:q} > {log:q} 2>&1"


rule agreement:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/prediction.json",
        runs=all_runs,
        golden="results/twin/golden.json",
    output:
        agreement=f"{STUDY}/agreement.json",
        manifest=f"{STUDY}/agreement.manifest.json",
    log:
        f"{STUDY_LOG}/agreement.log",
    benchmark:
        f"{STUDY_LOG}/agreement.benchmark.tsv"
    wildcard_constraints:
        lane="cuda|recorded-[a-z0-9]+",
    threads: workflow.cores
    resources:
        **SHORT,
    params:
        fixture=subpath(input.spec, parent=True),
        out=subpath(output.agreement, parent=True),
        code=code("routeblock.route_block.gpu.agreement"),
    shell:
        "routeblock study-a agree --fixture {params.fixture:q} --prediction {input.prediction:q}"
        " --runs {params.out:q} --lane {wildcards.lane} --out {output.agreement:q} > {log:q} 2>&1"


rule versions:
    input:
        results=versions(),
        contents=f"{EVIDENCE['recorded-h200']}/versions.contents.json",
        golden="fixtures/golden/h200_sha256.json",
    output:
        versions="results/versions/versions.json",
        manifest="results/versions/versions.manifest.json",
    log:
        "results/logs/versions.log",
    localrule: True
    params:
        golden=subpath(input.golden, parent=True),
        results=lambda wildcards, input: [f"--from {result}" for result in input.results],
        code=code("routeblock.route_block.gpu.versions"),
    shell:
        "routeblock study-a compare-versions {params.results} --contents {input.contents:q} --golden {params.golden:q}"
        " --out {output.versions:q} 2> {log:q}"
