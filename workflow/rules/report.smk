# The report: every table and figure, what they rest on, and how to rebuild one, in one file.


rule report:
    input:
        config="config.yaml",
        environment=rules.environment.output,
        tables=[f"results/tables/{n}.{s}" for n in reported() for s in ("parquet", "csv", "md", "manifest.json")],
        figures=[f"results/figures/{n}.{s}" for n in named("figure_") for s in ("svg", "png", "manifest.json")],
        captions=[f"workflow/report/table_{n}.rst" for n in reported()]
        + [f"workflow/report/figure_{n}.rst" for n in named("figure_")],
        # The page prints the digests of manifests: one that changes while what it seals does not makes another page.
        seals=[
            *(seal for name in reported() for seal in seals_of(TABLE_SOURCES.get(name, []))),
            *each(f"{STUDY}/prediction.manifest.json"),
            rules.golden.output.manifest,
            *grouped.record_seals(CONFIG),
            rules.statistics.output.manifest,
            rules.validate_timings.output.manifest,
            rules.recorded_alignment.output.manifest,
            rules.alignment_statistics.output.manifest,
            rules.validate_alignment.output.manifest,
            rules.recorded_dispatch.output.manifest,
            rules.dispatch_statistics.output.manifest,
        ],
    output:
        report="reports/routeblock.html",
        manifest="reports/routeblock.manifest.json",
    log:
        "results/logs/report.log",
    params:
        tables=[f"--table {n}" for n in reported()],
        figures=[f"--figure {n}" for n in named("figure_")],
        code=code("report"),
    shell:
        "routeblock report --config {input.config} --captions workflow/report {params.tables} {params.figures}"
        " --out $(dirname {output.report}) > {log} 2>&1"
