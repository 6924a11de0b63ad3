# SPDX-License-Identifier: Apache-2.0
# Fast paths for Q6_K x Q8_1 and their peers, from a committed record; a GPU records with `routeblock fast-paths record`.


rule recorded_dispatch:
    input:
        protocol=fast_paths.PROTOCOL,
        contents=f"{fast_paths.RECORDED}/contents.json",
        record=[f"{fast_paths.RECORDED}/{name}" for name in fast_paths.FILES],
    output:
        record=[f"{fast_paths.RESULTS}/{name}" for name in fast_paths.FILES],
        manifest=f"{fast_paths.RESULTS}/recorded_dispatch.manifest.json",
    log:
        "results/logs/q6k_dispatch/recorded.log",
    resources:
        **SHORT,
    params:
        source=subpath(input.contents, parent=True),
        out=subpath(output.manifest, parent=True),
        code=code("routeblock.q6k_dispatch.verification"),
    shell:
        "routeblock fast-paths recorded --source {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule dispatch_statistics:
    input:
        protocol=fast_paths.PROTOCOL,
        record=rules.recorded_dispatch.output.record,
    output:
        statistics=f"{fast_paths.RESULTS}/statistics/statistics.json",
        ratios=f"{fast_paths.RESULTS}/statistics/ratios.parquet",
        manifest=f"{fast_paths.RESULTS}/statistics/statistics.manifest.json",
    log:
        "results/logs/q6k_dispatch/statistics.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.statistics, parent=True),
        code=code("routeblock.q6k_dispatch.study", "routeblock.timing.statistics"),
    shell:
        "routeblock fast-paths statistics --record {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule validate_dispatch:
    input:
        protocol=fast_paths.PROTOCOL,
        record=rules.recorded_dispatch.output,
        statistics=rules.dispatch_statistics.output.statistics,
        ratios=rules.dispatch_statistics.output.ratios,
    output:
        validation=f"{fast_paths.RESULTS}/validation/validation.json",
        manifest=f"{fast_paths.RESULTS}/validation/validation.manifest.json",
    log:
        "results/logs/q6k_dispatch/validation.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.validation, parent=True),
        code=code("routeblock.q6k_dispatch.study", "routeblock.timing.validation"),
    shell:
        "routeblock fast-paths validate --record {params.source:q} --protocol {input.protocol:q}"
        " --statistics {input.statistics:q} --out {params.out:q} 2> {log:q}"


rule dispatch_mutations:
    input:
        protocol=fast_paths.PROTOCOL,
        declared="fixtures/record_edits.json",
        record=rules.recorded_dispatch.output.record,
    output:
        mutations=f"{fast_paths.RESULTS}/mutations/mutations.json",
        manifest=f"{fast_paths.RESULTS}/mutations/mutations.manifest.json",
    log:
        "results/logs/q6k_dispatch/mutations.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.mutations, parent=True),
        code=code(
            "routeblock.q6k_dispatch.study",
            "routeblock.q6k_dispatch.edits",
            "routeblock.q6k_dispatch.verification",
            "routeblock.timing.mutations",
        ),
    shell:
        "routeblock fast-paths mutate --record {params.source:q} --protocol {input.protocol:q}"
        " --declared {input.declared:q} --out {params.out:q} > {log:q} 2>&1"
