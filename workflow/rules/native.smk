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
    params:
        code=code("routeblock.route_block.native.evidence"),
    shell:
        "routeblock recorded-native --source $(dirname {input.record[0]}) --fixture $(dirname {input.spec})"
        " --protocol {input.protocol} --out {output.summary} > {log} 2>&1"


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
    params:
        code=code("routeblock.route_block.gpu.operator_check"),
    shell:
        "routeblock recorded-operator --source $(dirname {input.record[0]}) --out {output.summary} > {log} 2>&1"
