# SPDX-License-Identifier: Apache-2.0
# Records of study B under protocols of their own: fresh data, and launches one by one. Each is judged by its protocol.


rule other_statistics:
    input:
        protocol=lambda w: grouped.RECORDINGS[w.recording].protocol,
        records=lambda w: [
            f"{folder}/{name}" for folder in grouped.other_records([w.recording]) for name in grouped.FILES
        ],
    output:
        statistics="results/grouped_schedule/{recording}/statistics/statistics.json",
        ratios="results/grouped_schedule/{recording}/statistics/ratios.parquet",
        manifest="results/grouped_schedule/{recording}/statistics/statistics.manifest.json",
    log:
        "results/logs/grouped_schedule/{recording}/statistics.log",
    resources:
        **SHORT,
    params:
        out=subpath(output.statistics, parent=True),
        code=code("routeblock.grouped_schedule.statistics"),
        records=lambda w: [f"--record {folder}" for folder in grouped.other_records([w.recording])],
        minimum_effect=CONFIG.grouped_schedule.minimum_effect,
    shell:
        "routeblock study-b statistics {params.records} --protocol {input.protocol:q}"
        " --minimum-effect {params.minimum_effect} --out {params.out:q} 2> {log:q}"


rule other_validation:
    input:
        protocol=lambda w: grouped.RECORDINGS[w.recording].protocol,
        records=lambda w: [
            f"{folder}/{name}" for folder in grouped.other_records([w.recording]) for name in grouped.FILES
        ],
        statistics="results/grouped_schedule/{recording}/statistics/statistics.json",
        ratios="results/grouped_schedule/{recording}/statistics/ratios.parquet",
    output:
        validation="results/grouped_schedule/{recording}/validation/validation.json",
        manifest="results/grouped_schedule/{recording}/validation/validation.manifest.json",
    log:
        "results/logs/grouped_schedule/{recording}/validation.log",
    resources:
        **SHORT,
    params:
        out=subpath(output.validation, parent=True),
        code=code("routeblock.grouped_schedule.study", "routeblock.timing.validation"),
        records=lambda w: [f"--record {folder}" for folder in grouped.other_records([w.recording])],
        minimum_effect=CONFIG.grouped_schedule.minimum_effect,
    shell:
        "routeblock study-b validate {params.records} --protocol {input.protocol:q}"
        " --minimum-effect {params.minimum_effect} --statistics {input.statistics:q} --out {params.out:q} 2> {log:q}"
