# What canonical alignment costs, from a committed record; a GPU records with `routeblock record-alignment`.


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
    params:
        code=code("routeblock.alignment_cost.verification"),
    shell:
        "routeblock recorded-alignment --source $(dirname {input.contents}) --protocol {input.protocol}"
        " --out $(dirname {output.manifest}) 2> {log}"


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
    params:
        code=code("routeblock.alignment_cost.study", "routeblock.timing.statistics"),
    shell:
        "routeblock alignment-statistics --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --out $(dirname {output.statistics}) 2> {log}"


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
    params:
        code=code("routeblock.alignment_cost.study", "routeblock.timing.validation"),
    shell:
        "routeblock validate-alignment --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --statistics {input.statistics} --out $(dirname {output.validation}) 2> {log}"


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
    params:
        code=code(
            "routeblock.alignment_cost.study",
            "routeblock.alignment_cost.edits",
            "routeblock.alignment_cost.verification",
            "routeblock.timing.mutations",
        ),
    shell:
        "routeblock mutate-alignment --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --declared {input.declared} --out $(dirname {output.mutations}) > {log} 2>&1"
