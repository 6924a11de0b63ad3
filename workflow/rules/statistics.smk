# SPDX-License-Identifier: Apache-2.0
# Changes with intervals over every lane, recomputed by code of its own, and study B's tables.


rule statistics:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        records=grouped.record_files(CONFIG),
    output:
        statistics="results/grouped_schedule/statistics/statistics.json",
        ratios="results/grouped_schedule/statistics/ratios.parquet",
        manifest="results/grouped_schedule/statistics/statistics.manifest.json",
    log:
        "results/logs/grouped_schedule/statistics.log",
    resources:
        **SHORT,
    params:
        out=subpath(output.statistics, parent=True),
        code=code("routeblock.grouped_schedule.statistics"),
        records=[f"--record {folder}" for folder in grouped.records(CONFIG)],
        minimum_effect=CONFIG.grouped_schedule.minimum_effect,
    shell:
        "routeblock study-b statistics {params.records} --protocol {input.protocol:q}"
        " --minimum-effect {params.minimum_effect} --out {params.out:q} 2> {log:q}"


rule validate_timings:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        records=grouped.record_files(CONFIG),
        statistics=rules.statistics.output.statistics,
        ratios=rules.statistics.output.ratios,
    output:
        validation="results/grouped_schedule/validation/validation.json",
        manifest="results/grouped_schedule/validation/validation.manifest.json",
    log:
        "results/logs/grouped_schedule/validation.log",
    resources:
        **SHORT,
    params:
        out=subpath(output.validation, parent=True),
        code=code("routeblock.grouped_schedule.study", "routeblock.timing.validation"),
        records=[f"--record {folder}" for folder in grouped.records(CONFIG)],
        minimum_effect=CONFIG.grouped_schedule.minimum_effect,
    shell:
        "routeblock study-b validate {params.records} --protocol {input.protocol:q}"
        " --minimum-effect {params.minimum_effect} --statistics {input.statistics:q} --out {params.out:q} 2> {log:q}"


rule grouped_mutations:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        declared="fixtures/record_edits.json",
        records=[f"{folder}/{name}" for folder in grouped.edited(CONFIG) for name in grouped.FILES],
    output:
        mutations="results/grouped_schedule/mutations/mutations.json",
        manifest="results/grouped_schedule/mutations/mutations.manifest.json",
    log:
        "results/logs/grouped_schedule/mutations.log",
    # No param: how many threads verify it makes no other result.
    threads: CONFIG.grouped_schedule.cpu_threads
    resources:
        **SHORT,
    params:
        out=subpath(output.mutations, parent=True),
        code=code(
            "routeblock.grouped_schedule.study",
            "routeblock.grouped_schedule.edits",
            "routeblock.grouped_schedule.verification",
            "routeblock.timing.mutations",
        ),
        records=[f"--record {folder}" for folder in grouped.edited(CONFIG)],
        minimum_effect=CONFIG.grouped_schedule.minimum_effect,
    shell:
        "routeblock study-b mutate {params.records} --protocol {input.protocol:q} --declared {input.declared:q}"
        " --minimum-effect {params.minimum_effect} --threads {threads} --out {params.out:q} > {log:q} 2>&1"


rule bundle:
    input:
        readme="fixtures/bundles/grouped_schedule.md",
        protocol="fixtures/protocols/grouped_schedule.json",
        published="fixtures/published/grouped_schedule.json",
        identities=grouped.identities(CONFIG),
        records=grouped.record_files(CONFIG),
        seals=grouped.record_seals(CONFIG),
        others=grouped.other_files(CONFIG) + grouped.other_bundled(CONFIG),
        counters=grouped.counter_files(CONFIG),
        statistics=rules.statistics.output,
        validation=rules.validate_timings.output,
        tables=[f"results/tables/{name}.{suffix}" for name in grouped.TABLES for suffix in ("parquet", "csv", "md")],
    output:
        archive="results/bundle/grouped_schedule.tar.gz",
        manifest="results/bundle/bundle.manifest.json",
    log:
        "results/logs/bundle.log",
    localrule: True
    params:
        out=subpath(output.archive, parent=True),
        code=code("routeblock.grouped_schedule.bundle"),
        sources=[f"--source {path}" for path in grouped.bundled(CONFIG)],
    shell:
        "routeblock study-b bundle {params.sources} --readme {input.readme:q} --out {params.out:q} 2> {log:q}"
