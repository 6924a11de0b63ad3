# SPDX-License-Identifier: Apache-2.0
# The report: every table and figure, what they rest on, and how to rebuild one, in one file.


rule report:
    input:
        config=SETTINGS,
        environment=rules.environment.output,
        tables=[f"results/tables/{t.name}.{s}" for t in reported() for s in ("parquet", "csv", "md", "manifest.json")],
        figures=[f"results/figures/{t.name}.{s}" for t in FIGURES for s in ("svg", "png", "manifest.json")],
        captions=[f"workflow/report/table_{t.name}.rst" for t in reported()]
        + [f"workflow/report/figure_{t.name}.rst" for t in FIGURES],
        # The page prints the digests of manifests: one that changes while what it seals does not makes another page.
        seals=[
            *(seal for target in reported() for seal in target.seals),
            *STUDY_A.each(f"{STUDY}/prediction.manifest.json"),
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
    localrule: True
    params:
        out=subpath(output.report, parent=True),
        tables=[f"--table {t.name}" for t in reported()],
        figures=[f"--figure {t.name}" for t in FIGURES],
        code=code("routeblock.report.page"),
    shell:
        "routeblock report --config {input.config:q} --captions workflow/report {params.tables} {params.figures}"
        " --out {params.out:q} > {log:q} 2>&1"
