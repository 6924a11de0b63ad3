# SPDX-License-Identifier: Apache-2.0
# What canonical alignment costs, from a committed record; a GPU records with `routeblock alignment record`.


rule recorded_alignment:
    input:
        protocol="fixtures/protocols/alignment_cost.json",
        contents=f"{alignment.RECORDED}/contents.json",
        record=[f"{alignment.RECORDED}/{name}" for name in alignment.FILES],
    output:
        record=[f"{alignment.RESULTS}/{name}" for name in alignment.FILES],
        manifest=f"{alignment.RESULTS}/recorded_alignment.manifest.json",
    log:
        "results/logs/alignment_cost/recorded.log",
    resources:
        **SHORT,
    params:
        source=subpath(input.contents, parent=True),
        out=subpath(output.manifest, parent=True),
        code=code("routeblock.alignment_cost.verification"),
    shell:
        "routeblock alignment recorded --source {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule alignment_statistics:
    input:
        protocol="fixtures/protocols/alignment_cost.json",
        record=rules.recorded_alignment.output.record,
    output:
        statistics=f"{alignment.RESULTS}/statistics/statistics.json",
        ratios=f"{alignment.RESULTS}/statistics/ratios.parquet",
        manifest=f"{alignment.RESULTS}/statistics/statistics.manifest.json",
    log:
        "results/logs/alignment_cost/statistics.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.statistics, parent=True),
        code=code("routeblock.alignment_cost.study", "routeblock.timing.statistics"),
    shell:
        "routeblock alignment statistics --record {params.source:q} --protocol {input.protocol:q}"
        " --out {params.out:q} 2> {log:q}"


rule validate_alignment:
    input:
        protocol="fixtures/protocols/alignment_cost.json",
        record=rules.recorded_alignment.output,
        statistics=rules.alignment_statistics.output.statistics,
        ratios=rules.alignment_statistics.output.ratios,
    output:
        validation=f"{alignment.RESULTS}/validation/validation.json",
        manifest=f"{alignment.RESULTS}/validation/validation.manifest.json",
    log:
        "results/logs/alignment_cost/validation.log",
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.validation, parent=True),
        code=code("routeblock.alignment_cost.study", "routeblock.timing.validation"),
    shell:
        "routeblock alignment validate --record {params.source:q} --protocol {input.protocol:q}"
        " --statistics {input.statistics:q} --out {params.out:q} 2> {log:q}"


rule alignment_mutations:
    input:
        protocol="fixtures/protocols/alignment_cost.json",
        declared="fixtures/record_edits.json",
        record=rules.recorded_alignment.output.record,
    output:
        mutations=f"{alignment.RESULTS}/mutations/mutations.json",
        manifest=f"{alignment.RESULTS}/mutations/mutations.manifest.json",
    log:
        "results/logs/alignment_cost/mutations.log",
    benchmark:
        "results/logs/alignment_cost/mutations.benchmark.tsv"
    resources:
        **SHORT,
    params:
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        out=subpath(output.mutations, parent=True),
        code=code(
            "routeblock.alignment_cost.study",
            "routeblock.alignment_cost.edits",
            "routeblock.alignment_cost.verification",
            "routeblock.timing.mutations",
        ),
    shell:
        "routeblock alignment mutate --record {params.source:q} --protocol {input.protocol:q}"
        " --declared {input.declared:q} --out {params.out:q} > {log:q} 2>&1"
