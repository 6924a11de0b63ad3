# The schedule fixed in advance against the control, alternating, on fresh data.


rule confirmation:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        cubin=lambda w: grouped.cubin(w.lane, w.device),
    output:
        multiext(
            "results/grouped_schedule/{lane}/{device}/confirmation/",
            "batches.parquet",
            "comparisons.json",
            "fixtures.json",
            "run.json",
            "confirmation.manifest.json",
        ),
    log:
        "results/logs/grouped_schedule/{lane}/{device}/confirmation.log",
    wildcard_constraints:
        lane="cpu|cuda",
    threads: lambda w: grouped.threads(CONFIG, w.lane)
    resources:
        gpu=lambda w: int(w.lane == "cuda"),
    params:
        code=code("confirmation"),
        out=subpath(output[0], parent=True),
        options=lambda w, input: grouped.options(CONFIG, input.cubin),
    shell:
        "routeblock confirm --device {wildcards.device} --protocol {input.protocol} {params.options}"
        " --out {params.out} 2> {log}"
