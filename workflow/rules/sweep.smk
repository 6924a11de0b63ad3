# SPDX-License-Identifier: Apache-2.0
# Every schedule at every shape, one process a device; on a GPU also what the source did not measure.


rule sweep:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        cubin=lambda w: grouped.cubin(w.lane, w.device),
    output:
        multiext(
            "results/grouped_schedule/{lane}/{device}/sweep/",
            "batches.parquet",
            "comparisons.json",
            "fixtures.json",
            "run.json",
            "sweep.manifest.json",
        ),
    log:
        "results/logs/grouped_schedule/{lane}/{device}/sweep.log",
    wildcard_constraints:
        lane="cpu|cuda",
    # A timed CPU run shares its cores with no other job.
    threads: lambda w: grouped.threads(CONFIG, w.lane)
    resources:
        **LONG,
        gpu=lambda w: int(w.lane == "cuda"),
    params:
        code=code("routeblock.grouped_schedule.lanes"),
        window=lambda w: grouped.window(CONFIG, w.lane, w.device, "sweep"),
        out=subpath(output[0], parent=True),
        cubin=lambda w, input: [f"--cubin {path}" for path in input.cubin],
        # Apart from what depends on an input: that is no reason to run again.
        threads=lambda w: grouped.threads(CONFIG, w.lane),
    shell:
        "{params.window} routeblock study-b sweep --device {wildcards.device} --protocol {input.protocol:q} {params.cubin} --threads {params.threads}"
        " --out {params.out} 2> {log:q}"


rule beyond:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        cubin=lambda w: grouped.cubin("cuda", w.device),
    output:
        multiext(
            "results/grouped_schedule/cuda/{device}/beyond/",
            "batches.parquet",
            "comparisons.json",
            "fixtures.json",
            "run.json",
            "beyond.manifest.json",
        ),
    log:
        "results/logs/grouped_schedule/cuda/{device}/beyond.log",
    resources:
        **LONG,
        gpu=1,
    params:
        code=code("routeblock.grouped_schedule.lanes"),
        window=lambda w: grouped.window(CONFIG, "cuda", w.device, "beyond"),
        out=subpath(output[0], parent=True),
    shell:
        "{params.window} routeblock study-b beyond --device {wildcards.device} --protocol {input.protocol:q} --cubin {input.cubin:q}"
        " --out {params.out} 2> {log:q}"


rule sanitizer:
    input:
        protocol="fixtures/protocols/grouped_schedule.json",
        cubin=lambda w: grouped.cubin("cuda", w.device),
    output:
        report="results/grouped_schedule/cuda/{device}/sanitizer/sanitizer.json",
        manifest="results/grouped_schedule/cuda/{device}/sanitizer/sanitizer.manifest.json",
    log:
        "results/logs/grouped_schedule/cuda/{device}/sanitizer.log",
    resources:
        **LONG,
        gpu=1,
    params:
        out=subpath(output.report, parent=True),
        code=code("routeblock.grouped_schedule.sanitizer", "routeblock.grouped_schedule.sanitizer_cases"),
    shell:
        "routeblock study-b sanitize --device {wildcards.device} --protocol {input.protocol:q} --cubin {input.cubin:q}"
        " --out {params.out:q} 2> {log:q}"


# Each lane of committed batches is judged by the protocol that it was measured under.
rule recorded:
    input:
        protocol=lambda w: grouped.RECORDED_LANES[w.recording].protocol,
        contents=lambda w: f"{grouped.RECORDED_LANES[w.recording].source}/contents.json",
        batches=lambda w: f"{grouped.RECORDED_LANES[w.recording].source}/cuda/{w.device}/{w.kind}/batches.parquet",
        rest=lambda w: multiext(
            f"{grouped.RECORDED_LANES[w.recording].source}/cuda/{w.device}/{w.kind}/",
            "comparisons.json",
            "fixtures.json",
            "run.json",
        ),
    output:
        multiext(
            "results/grouped_schedule/{recording}/{device}/{kind}/",
            "batches.parquet",
            "comparisons.json",
            "fixtures.json",
            "run.json",
            "recorded.manifest.json",
        ),
    log:
        "results/logs/grouped_schedule/{recording}/{device}/{kind}.log",
    wildcard_constraints:
        recording="|".join(grouped.RECORDED_LANES),
    # No param: how many threads prove it makes no other result.
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


# What was built and what the sanitizer found stand in documents that nothing here can make again: no table before they are
# held against the recording machine's list. Where no record is committed there is nothing to check.
if grouped.recorded_documents():

    rule recorded_documents:
        input:
            contents=f"{grouped.RECORDED}/contents.json",
            documents=grouped.recorded_documents(),
        output:
            documents=[
                f"{grouped.DOCUMENTS}/{path.relative_to(grouped.RECORDED)}" for path in grouped.recorded_documents()
            ],
            manifest=f"{grouped.DOCUMENTS}/documents.manifest.json",
        log:
            "results/logs/grouped_schedule/recorded-h200/documents.log",
        localrule: True
        params:
            code=code("routeblock.grouped_schedule.documents"),
            source=subpath(input.contents, parent=True),
            out=subpath(output.manifest, parent=True),
        shell:
            "routeblock study-b recorded-documents --source {params.source} --contents {input.contents:q} --out {params.out} 2> {log:q}"
