# Fast paths for Q6_K x Q8_1 and their peers, from a committed record; a GPU records with `routeblock record-dispatch`.


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
    params:
        code=code("recorded_dispatch"),
    shell:
        "routeblock recorded-dispatch --source $(dirname {input.contents}) --protocol {input.protocol}"
        " --out $(dirname {output.manifest}) 2> {log}"


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
    params:
        code=code("dispatch_statistics"),
    shell:
        "routeblock dispatch-statistics --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --out $(dirname {output.statistics}) 2> {log}"


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
    params:
        code=code("validate_dispatch"),
    shell:
        "routeblock validate-dispatch --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --statistics {input.statistics} --out $(dirname {output.validation}) 2> {log}"


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
    params:
        code=code("dispatch_mutations"),
    shell:
        "routeblock mutate-dispatch --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --declared {input.declared} --out $(dirname {output.mutations}) > {log} 2>&1"


for name in fast_paths.TABLES:

    rule:
        name:
            f"table_{name}"
        input:
            protocol=fast_paths.PROTOCOL,
            record=rules.recorded_dispatch.output.record,
            statistics=rules.dispatch_statistics.output.statistics,
            validation=rules.validate_dispatch.output.validation,
            mutations=[rules.dispatch_mutations.output.mutations] if name == "dispatch_mutations" else [],
        output:
            tables=tables(name, FAST_PATHS),
            manifest=f"results/tables/{name}.manifest.json",
        log:
            f"results/logs/tables/{name}.log",
        params:
            code=code(f"table_{name}"),
            name=name,
            mutations=lambda w, input: [f"--mutations {path}" for path in input.mutations],
        shell:
            "routeblock dispatch-table {params.name} --record $(dirname {input.record[0]})"
            " --statistics {input.statistics} --validation {input.validation} {params.mutations}"
            " --protocol {input.protocol} --out $(dirname {output.manifest}) 2> {log}"
