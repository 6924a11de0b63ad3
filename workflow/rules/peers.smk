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
        code=code("routeblock.q6k_dispatch.reprove"),
    shell:
        "routeblock recorded-dispatch --source $(dirname {input.contents}) --protocol {input.protocol}"
        " --out $(dirname {output.manifest}) 2> {log}"


rule dispatch_statistics:
    input:
        protocol=fast_paths.PROTOCOL,
        record=rules.recorded_dispatch.output.record,
    output:
        statistics=f"{fast_paths.RESULTS}/statistics/statistics.json",
        manifest=f"{fast_paths.RESULTS}/statistics/statistics.manifest.json",
    log:
        "results/logs/q6k_dispatch/statistics.log",
    params:
        code=code("routeblock.q6k_dispatch.statistics"),
    shell:
        "routeblock dispatch-statistics --record $(dirname {input.record[0]}) --protocol {input.protocol}"
        " --out $(dirname {output.statistics}) 2> {log}"
