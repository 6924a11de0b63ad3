# SPDX-License-Identifier: Apache-2.0
# Native alignment and the operator, from committed records: does history shift the plans, what does the operator take?

NATIVE_RECORD = "fixtures/recorded/native/h200"
OPERATOR_RECORD = "fixtures/recorded/operator/h200"


rule recorded_native:
    input:
        protocol="fixtures/protocols/native.json",
        record=multiext(f"{NATIVE_RECORD}/", "native.json", "plans.safetensors", "contents.json"),
        spec=FIXTURE_SPEC.format(fixture=RECORDED_FIXTURE),
        tensors=[path.format(fixture=RECORDED_FIXTURE) for path in FIXTURE_TENSORS],
        golden="results/twin/golden.json",
    output:
        summary="results/native/native.json",
        manifest="results/native/native.manifest.json",
    log:
        "results/logs/native/native.log",
    threads: workflow.cores
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        fixture=subpath(input.spec, parent=True),
        code=code("routeblock.route_block.native.evidence"),
    shell:
        "routeblock study-a recorded-native --source {params.source:q} --fixture {params.fixture:q}"
        " --protocol {input.protocol:q} --out {output.summary:q} > {log:q} 2>&1"


rule recorded_operator:
    input:
        record=multiext(f"{OPERATOR_RECORD}/", "operator.json", "contents.json"),
        golden="results/twin/golden.json",
    output:
        summary="results/native/operator.json",
        manifest="results/native/operator.manifest.json",
    log:
        "results/logs/native/operator.log",
    threads: workflow.cores
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        code=code("routeblock.route_block.gpu.operator_check"),
    shell:
        "routeblock study-a recorded-operator --source {params.source:q} --out {output.summary:q} > {log:q} 2>&1"
