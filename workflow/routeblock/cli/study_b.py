# SPDX-License-Identifier: Apache-2.0
"""Commands of study B: sweep, confirmation, records, statistics, their recount, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import (
    EDITS,
    DeclaredEdits,
    MutationsFile,
    Out,
    ProtocolFile,
    Recomputed,
    ValidationFile,
    finish,
)

app = typer.Typer(help="Study B, grouped schedules: sweep, confirmation, statistics, recount, tables.")
PROTOCOL = Path("fixtures/protocols/grouped_schedule.json")
Records = Annotated[list[Path], typer.Option("--record", help="A folder of a sweep or confirmation; repeat it.")]
Device = Annotated[str, typer.Option(help="cpu0, or gpu0, gpu1, ... as the driver counts them.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of lane cpu.")]
MinimumEffect = Annotated[float, typer.Option(help="The smallest change that matters, as a fraction.")]
Cubin = Annotated[Path | None, typer.Option(help="A cubin of q6k_schedules for lane cuda.")]


@app.command("sweep")
def sweep(
    out: Out, device: Device, protocol: ProtocolFile = PROTOCOL, cubin: Cubin = None, threads: Threads = 2
) -> None:
    """Compare and time every schedule at every shape on one device, with A/A floors and the serial prototype."""
    _record("sweep", out, device, protocol, cubin, threads)


@app.command("confirm")
def confirm(
    out: Out, device: Device, protocol: ProtocolFile = PROTOCOL, cubin: Cubin = None, threads: Threads = 2
) -> None:
    """The schedule fixed in the protocol against the control, alternating, on fresh data, with A/A beside."""
    _record("confirmation", out, device, protocol, cubin, threads)


@app.command("beyond")
def beyond(out: Out, device: Device, cubin: Cubin, protocol: ProtocolFile = PROTOCOL) -> None:
    """Further campaigns on one GPU: L2 ratio, cold L2, warps in a block, launches one by one."""
    _record("beyond", out, device, protocol, cubin, 1)


@app.command("sanitize")
def sanitize(
    out: Out,
    device: Device,
    cubin: Annotated[Path, typer.Option(help="A cubin of q6k_schedules.")],
    protocol: ProtocolFile = PROTOCOL,
) -> None:
    """Run memcheck, synccheck and racecheck over hostile jobs. Exits 1 on a finding; refusals are recorded."""
    from routeblock.cuda.sanitizer import Outcome
    from routeblock.grouped_schedule import sanitizer

    reports = sanitizer.write(out, device, cubin, protocol)
    for found in reports:
        print(f"{found.tool}: {found.outcome}")
    if any(found.outcome is Outcome.FOUND for found in reports):
        raise typer.Exit(1)


@app.command("record")
def record_gpus(
    out: Out,
    protocol: ProtocolFile = PROTOCOL,
    sanitizer: Annotated[bool, typer.Option(help="Run compute-sanitizer too.")] = True,
) -> None:
    """Record every GPU of this machine without Snakemake: kernels, sweep, confirmation, the rest, one archive."""
    from routeblock.grouped_schedule import record_gpus

    print(record_gpus.run(out, protocol, sanitizer=sanitizer))


@app.command("record-counters")
def record_grouped_counters(
    out: Out,
    cubin: Annotated[Path, typer.Option(help="A cubin of q6k_schedules.")],
    protocol: ProtocolFile = PROTOCOL,
    counters: Annotated[Path, typer.Option(help="The committed protocol of the counting.")] = Path(
        "fixtures/protocols/grouped_counters.json"
    ),
) -> None:
    """Count DRAM bytes, L2 hits and issue of study B's schedules by ncu on the first GPU; a refusal is recorded."""
    from routeblock.grouped_schedule import counters as counting

    print(counting.write(out, protocol, counters, cubin))


@app.command("recorded")
def recorded(
    out: Out,
    source: Annotated[Path, typer.Option(help="A committed record.")],
    contents: Annotated[Path, typer.Option(help="The contents.json of the archive that it came in.")],
    lane: Annotated[str, typer.Option(help="The lane that it becomes.")] = "recorded-h200",
    protocol: ProtocolFile = PROTOCOL,
    threads: Threads = 2,
) -> None:
    """Verify a committed GPU record on this CPU: batches, fixtures, output bits. Exits 1 if something differs."""
    from routeblock.grouped_schedule import verification

    wrong = verification.write(out, source, lane, protocol, contents=contents, threads=threads)
    finish(wrong, "every batch, fixture and output is as it should be")


@app.command("recorded-documents")
def recorded_documents(
    out: Out,
    source: Annotated[Path, typer.Option(help="A committed record.")],
    contents: Annotated[Path, typer.Option(help="The contents.json of the archive that it came in.")],
) -> None:
    """Copy a record's build and sanitizer documents once they are those of the recording machine; else exit 1."""
    from routeblock.grouped_schedule import documents

    finish(documents.write(out, source, contents), "every document is the listed one")


@app.command("statistics")
def statistics(out: Out, record: Records, minimum_effect: MinimumEffect, protocol: ProtocolFile = PROTOCOL) -> None:
    """Changes with intervals and verdicts from raw batches. Exits 1 if the protocol's counts are not reached."""
    from routeblock.grouped_schedule import statistics as made

    wrong = made.write(out, record, protocol, minimum_effect=minimum_effect)
    finish(wrong, "every device reaches the protocol's counts")


@app.command("validate")
def validate_timings(
    out: Out,
    record: Records,
    statistics: Recomputed,
    minimum_effect: MinimumEffect,
    protocol: ProtocolFile = PROTOCOL,
) -> None:
    """Recount all statistics with code of its own. Exits 1 unless every value is exactly equal."""
    from routeblock.grouped_schedule.study import study
    from routeblock.timing import validation

    # Seals are left to `routeblock verify`: a record that is equal but for its manifest needs no second recount.
    number, wrong = validation.write(
        out,
        study(minimum_effect),
        statistics,
        record,
        protocol,
        rule="validate_timings",
        sealed=False,
    )
    finish(wrong, f"{number} comparisons recounted, all exactly equal")


@app.command("mutate")
def mutate_timings(
    out: Out,
    record: Records,
    minimum_effect: MinimumEffect,
    protocol: ProtocolFile = PROTOCOL,
    declared: DeclaredEdits = EDITS,
    threads: Threads = 2,
) -> None:
    """Edit copies of records, one each, and see them refused for the declared reasons; else exit 1."""
    from functools import partial

    from routeblock.grouped_schedule.edits import ROOM
    from routeblock.grouped_schedule.study import study
    from routeblock.grouped_schedule.verification import recompute
    from routeblock.timing import mutations

    again = partial(recompute, threads=threads)
    made = study(minimum_effect)
    entries = mutations.write(out, made, ROOM, record, protocol, declared, again, rule="grouped_mutations")
    finish(mutations.misjudged(entries), f"{len(entries)} copies judged as declared")


@app.command("table")
def grouped_table(
    name: Annotated[str, typer.Argument(help="A table's name, such as confirmation.")],
    out: Out,
    record: Records,
    statistics: Annotated[Path, typer.Option(help="The statistics.json.")],
    validation: ValidationFile,
    published: Annotated[Path, typer.Option(help="The published numbers.")] = Path(
        "fixtures/published/grouped_schedule.json"
    ),
    sanitizer: Annotated[list[Path] | None, typer.Option(help="A sanitizer.json; repeat it.")] = None,
    mutations: MutationsFile = None,
    other: Annotated[
        list[Path] | None,
        typer.Option(help="Records under their own protocol, with what it made of them; repeat."),
    ] = None,
    counters: Annotated[Path | None, typer.Option(help="A record of record-grouped-counters.")] = None,
) -> None:
    """Write one table of study B as .parquet, .csv and .md."""
    from routeblock.grouped_schedule import tables

    tables.write(
        name,
        out,
        statistics,
        record,
        published,
        validation,
        sanitizers=sanitizer or (),
        mutations_file=mutations,
        others=other or (),
        counters=counters,
    )


@app.command("bundle")
def grouped_bundle(
    out: Out,
    source: Annotated[list[Path], typer.Option(help="A file or folder to pack; repeat it.")],
    readme: Annotated[Path, typer.Option(help="Becomes README.md in the archive.")],
) -> None:
    """Pack study B's evidence into one archive whose bytes depend on the files alone."""
    from routeblock.grouped_schedule import bundle

    bundle.write(out, source, readme=readme)


def _record(rule: str, out: Path, device: str, protocol: Path, cubin: Path | None, threads: int) -> None:
    from routeblock.grouped_schedule import lanes

    lanes.run(rule, out, device, protocol, cubin=cubin, threads=threads)
