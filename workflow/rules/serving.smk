# SPDX-License-Identifier: Apache-2.0
# vLLM itself: do completions repeat? From a committed record; a GPU records with `routeblock serving record`.


rule recorded_serving:
    input:
        protocol="fixtures/protocols/serving.json",
        contents=f"{serving.RECORDED}/contents.json",
        record=[f"{serving.RECORDED}/{name}" for name in serving.FILES],
    output:
        record=[f"{serving.RESULTS}/{name}" for name in serving.FILES],
        manifest=f"{serving.RESULTS}/recorded_serving.manifest.json",
    log:
        "results/logs/serving/recorded.log",
    resources:
        **SHORT,
    params:
        source=subpath(input.contents, parent=True),
        out=subpath(output.manifest, parent=True),
        code=code("routeblock.serving.verification"),
    shell:
        "routeblock serving recorded --source {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule serving_layer:
    input:
        protocol="fixtures/protocols/serving.json",
        record=rules.recorded_serving.output.record,
    output:
        layer=f"{serving.RESULTS}/layer/layer.json",
        manifest=f"{serving.RESULTS}/layer/layer.manifest.json",
    log:
        "results/logs/serving/layer.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.layer, parent=True),
        code=code("routeblock.serving.layer_check"),
    shell:
        "routeblock serving layer --record {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule serving_statistics:
    input:
        protocol="fixtures/protocols/serving.json",
        record=rules.recorded_serving.output.record,
    output:
        statistics=f"{serving.RESULTS}/statistics/statistics.json",
        ratios=f"{serving.RESULTS}/statistics/ratios.parquet",
        manifest=f"{serving.RESULTS}/statistics/statistics.manifest.json",
    log:
        "results/logs/serving/statistics.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.statistics, parent=True),
        code=code("routeblock.serving.study", "routeblock.timing.statistics"),
    shell:
        "routeblock serving statistics --record {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule validate_serving:
    input:
        protocol="fixtures/protocols/serving.json",
        record=rules.recorded_serving.output,
        statistics=rules.serving_statistics.output.statistics,
        ratios=rules.serving_statistics.output.ratios,
    output:
        validation=f"{serving.RESULTS}/validation/validation.json",
        manifest=f"{serving.RESULTS}/validation/validation.manifest.json",
    log:
        "results/logs/serving/validation.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.validation, parent=True),
        code=code("routeblock.serving.study", "routeblock.timing.validation"),
    shell:
        "routeblock serving validate --record {params.source:q} --protocol {input.protocol:q}"
        " --statistics {input.statistics:q} --out {params.out:q} 2> {log:q}"


rule serving_mutations:
    input:
        protocol="fixtures/protocols/serving.json",
        declared="fixtures/record_edits.json",
        record=rules.recorded_serving.output.record,
    output:
        mutations=f"{serving.RESULTS}/mutations/mutations.json",
        manifest=f"{serving.RESULTS}/mutations/mutations.manifest.json",
    log:
        "results/logs/serving/mutations.log",
    benchmark:
        "results/logs/serving/mutations.benchmark.tsv"
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.mutations, parent=True),
        code=code(
            "routeblock.serving.study",
            "routeblock.serving.edits",
            "routeblock.serving.verification",
            "routeblock.timing.mutations",
        ),
    shell:
        "routeblock serving mutate --record {params.source:q} --protocol {input.protocol:q}"
        " --declared {input.declared:q} --out {params.out:q} > {log:q} 2>&1"
