# SPDX-License-Identifier: Apache-2.0
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
        **LONG,
        gpu=lambda w: int(w.lane == "cuda"),
    params:
        code=code("routeblock.grouped_schedule.lanes"),
        window=lambda w: grouped.window(CONFIG, w.lane, w.device, "confirmation"),
        out=subpath(output[0], parent=True),
        cubin=lambda w, input: [f"--cubin {path}" for path in input.cubin],
        # Apart from what depends on an input: that is no reason to run again.
        threads=lambda w: grouped.threads(CONFIG, w.lane),
    shell:
        "{params.window} routeblock study-b confirm --device {wildcards.device} --protocol {input.protocol:q} {params.cubin} --threads {params.threads}"
        " --out {params.out} 2> {log:q}"
