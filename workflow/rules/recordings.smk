# SPDX-License-Identifier: Apache-2.0
# Records of study B under protocols of their own: fresh data, and launches one by one. Each is judged by its protocol.


rule other_recorded:
    input:
        protocol=lambda w: grouped.RECORDINGS[w.recording].protocol,
        contents=lambda w: f"{grouped.RECORDINGS[w.recording].source}/contents.json",
        batches=lambda w: f"{grouped.RECORDINGS[w.recording].source}/cuda/gpu0/{w.kind}/batches.parquet",
        rest=lambda w: [
            f"{grouped.RECORDINGS[w.recording].source}/cuda/gpu0/{w.kind}/{name}"
            for name in ("comparisons.json", "fixtures.json", "run.json")
        ],
    output:
        multiext(
            "results/grouped_schedule/{recording}/gpu0/{kind}/",
            "batches.parquet",
            "comparisons.json",
            "fixtures.json",
            "run.json",
            "recorded.manifest.json",
        ),
    log:
        "results/logs/grouped_schedule/{recording}/{kind}.log",
    # No param: how many threads verify it makes no other result.
    threads: CONFIG.grouped_schedule.cpu_threads
    resources:
        **SHORT,
    params:
        code=code("routeblock.grouped_schedule.verification"),
        source=subpath(input.batches, parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "routeblock study-b recorded --source {params.source} --contents {input.contents:q} --protocol {input.protocol:q}"
        " --lane {wildcards.recording} --threads {threads} --out {params.out} 2> {log:q}"


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
