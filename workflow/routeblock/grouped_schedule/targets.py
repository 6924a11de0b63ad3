# SPDX-License-Identifier: Apache-2.0
"""Targets of study B: which devices, which records, which cubin, what tables are made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from routeblock.config import Config, GroupedLane
from routeblock.cuda.window import Settings
from routeblock.errors import InputError
from routeblock.grouped_schedule.figures import FIGURES
from routeblock.grouped_schedule.study import STUDY
from routeblock.grouped_schedule.tables import TABLES
from routeblock.target import Given, Target, from_tables

CATEGORY = "Study B: grouped schedules"
PROTOCOL = "fixtures/protocols/grouped_schedule.json"
PUBLISHED = "fixtures/published/grouped_schedule.json"
RESULTS = "results/grouped_schedule"
FILES = STUDY.files
_JUDGED = ("statistics", "validation")
DOCUMENTS = f"{RESULTS}/recorded-h200/documents"
RECORDED = Path("fixtures/recorded/grouped_schedule/h200")


@dataclass(frozen=True)
class Recording:
    """A committed record under a protocol of its own, and what it holds."""

    protocol: str
    source: Path
    kinds: tuple[str, ...]


# By the lane that each becomes. Their batches are judged by their own protocols, and stand in the same tables.
RECORDINGS = {
    "recorded-h200-fresh": Recording(
        "fixtures/protocols/grouped_fresh.json", RECORDED.with_name("h200-fresh"), ("confirmation",)
    ),
    "recorded-h200-stream": Recording(
        "fixtures/protocols/grouped_stream.json", RECORDED.with_name("h200-stream"), ("sweep", "confirmation")
    ),
}
# Every lane of committed batches.
RECORDED_LANES = {
    "recorded-h200": Recording(PROTOCOL, RECORDED, ("sweep", "confirmation", "beyond")),
    **RECORDINGS,
}
COUNTERS = Path("fixtures/recorded/grouped_counters/h200")
COUNTERS_PROTOCOL = "fixtures/protocols/grouped_counters.json"


def devices(lane: GroupedLane) -> list[str]:
    """The devices of a lane here: this CPU, the GPUs that the driver lists, or those whose records are committed."""
    if lane is GroupedLane.CPU:
        return ["cpu0"]
    if lane is GroupedLane.CUDA:
        # Without a driver the first GPU is asked for all the same: its job says in one line why it cannot run.
        return [f"gpu{i}" for i in range(len(_architectures()) or 1)]
    return sorted(p.name for p in RECORDED.glob("cuda/gpu*") if p.is_dir())


def records(config: Config) -> list[str]:
    """The folders of raw batches that the statistics read."""
    found = []
    for lane in config.grouped_schedule.lanes:
        kinds = ("sweep", "confirmation") if lane is GroupedLane.CPU else ("sweep", "confirmation", "beyond")
        found += [f"{RESULTS}/{lane}/{device}/{kind}" for device in devices(lane) for kind in kinds]
    return found


def others(config: Config) -> list[str]:
    """The lanes of `RECORDINGS`, where recorded evidence is asked for."""
    return list(RECORDINGS) if GroupedLane.RECORDED_H200 in config.grouped_schedule.lanes else []


def other_records(lanes: list[str]) -> list[str]:
    """The folders of raw batches of these recordings."""
    return [f"{RESULTS}/{lane}/gpu0/{kind}" for lane in lanes for kind in RECORDINGS[lane].kinds]


def other_files(config: Config) -> list[str]:
    """The files of these recordings, and what their own protocols make of them."""
    lanes = others(config)
    judged = [f"{RESULTS}/{lane}/{name}/{name}.json" for lane in lanes for name in _JUDGED]
    return [*judged, *(f"{folder}/{name}" for folder in other_records(lanes) for name in FILES)]


def other_bundled(config: Config) -> list[str]:
    """What a download has of these recordings beside `other_files`: protocols, ratios, seals."""
    lanes = others(config)
    found = [RECORDINGS[lane].protocol for lane in lanes]
    found += [f"{RESULTS}/{lane}/statistics/ratios.parquet" for lane in lanes]
    found += [f"{RESULTS}/{lane}/{name}/{name}.manifest.json" for lane in lanes for name in _JUDGED]
    return found + [f"{folder}/recorded.manifest.json" for folder in other_records(lanes)]


def counter_files(config: Config) -> list[str]:
    """The committed counters, their list of contents and their protocols, where recorded evidence is asked for."""
    if not others(config):
        return []
    return [*(f"{COUNTERS}/{name}" for name in ("counters.json", "contents.json")), COUNTERS_PROTOCOL, PROTOCOL]


def edited(config: Config) -> list[str]:
    """The records that declared edits are tried on: a sweep, which has floors, and what a GPU ran beyond it."""
    for lane in reversed(GroupedLane):
        if lane in config.grouped_schedule.lanes and (there := devices(lane)):
            kinds = ("sweep",) if lane is GroupedLane.CPU else ("sweep", "beyond")
            return [f"{RESULTS}/{lane}/{there[0]}/{kind}" for kind in kinds]
    return []


def record_files(config: Config) -> list[str]:
    """Every file of the records: equal in one of them, a record may differ in another."""
    return [f"{folder}/{name}" for folder in records(config) for name in FILES]


def record_seals(config: Config) -> list[str]:
    """The manifests of the records."""
    found = []
    for folder in map(Path, records(config)):
        recorded = folder.parts[2] == GroupedLane.RECORDED_H200
        found.append((folder / f"{'recorded' if recorded else folder.name}.manifest.json").as_posix())
    return found


def cubin(lane: str, device: str) -> list[str]:
    """The kernels that a device runs: a cubin for a GPU's architecture, none for a CPU."""
    if lane != GroupedLane.CUDA:
        return []
    found, index = _architectures(), int(device.removeprefix("gpu"))
    return [f"results/build/{found[index]}/q6k_schedules.cubin"] if index < len(found) else []


def _architectures() -> list[str]:
    from routeblock.cuda.telemetry import architectures

    try:
        return list(architectures())
    except InputError:
        return []


def recorded_documents() -> list[Path]:
    """The committed documents that no rule can make again: they are checked and copied before they are used."""
    return sorted(path for name in ("build", "sanitizer") for path in RECORDED.rglob(f"{name}.json"))


def identities(config: Config) -> list[str]:
    """The files that say which binaries ran, and what the sanitizer said of them."""
    found = []
    for lane in config.grouped_schedule.lanes:
        if lane is GroupedLane.CUDA:
            found += sorted({str(Path(path).with_name("build.json")) for d in devices(lane) for path in cubin(lane, d)})
            found += [f"{RESULTS}/cuda/{device}/sanitizer/sanitizer.json" for device in devices(lane)]
        if lane is GroupedLane.RECORDED_H200:
            found += [f"{DOCUMENTS}/{path.relative_to(RECORDED).as_posix()}" for path in recorded_documents()]
    return found


def sanitizers(config: Config) -> list[str]:
    """What compute-sanitizer said, of every GPU of the lanes."""
    return [path for path in identities(config) if path.endswith("/sanitizer.json")]


def bundled(config: Config) -> list[str]:
    """What the download holds."""
    tables = [f"results/tables/{name}.{suffix}" for name in TABLES for suffix in ("parquet", "csv", "md")]
    given = [PROTOCOL, PUBLISHED]
    given += [RECORDINGS[lane].protocol for lane in others(config)]
    made = [*records(config), f"{RESULTS}/statistics", f"{RESULTS}/validation"]
    made += [*other_records(others(config)), *(f"{RESULTS}/{lane}/{x}" for lane in others(config) for x in _JUDGED)]
    made += [str(COUNTERS / "counters.json"), COUNTERS_PROTOCOL] if others(config) else []
    return [*given, *identities(config), *made, *tables]


def window(config: Config, lane: str, device: str, kind: str) -> str:
    """What stands before a timed command: the guarded window that config.yaml asks for on this machine's GPUs."""
    options = Settings(**config.window.model_dump()).options()
    if lane != GroupedLane.CUDA or not options:
        return ""
    folder = f"{RESULTS}/{lane}/{device}"
    return f"routeblock gpu window {options} --yields {folder}/{kind} --out {folder}/window_{kind}.json --"


def threads(config: Config, lane: str) -> int:
    """Cores that a timed run holds: the threads of a CPU run, one for a GPU's host."""
    return config.grouped_schedule.cpu_threads if lane == GroupedLane.CPU else 1


def tables(config: Config) -> list[Target]:
    """Every table."""
    given = (
        Given("record", tuple(record_files(config)), folder=True),
        Given("statistics", (f"{RESULTS}/statistics/statistics.json",)),
        Given("validation", (f"{RESULTS}/validation/validation.json",)),
        Given("published", (PUBLISHED,)),
        Given("sanitizer", tuple(sanitizers(config))),
        Given("", tuple(f for f in other_files(config))),
        Given("other", tuple(f"{RESULTS}/{lane}/statistics/statistics.json" for lane in others(config))),
        Given("counters", tuple(counter_files(config)[:1]), folder=True),
        Given("", tuple(counter_files(config)[1:])),
    )
    mutations = Given("mutations", (f"{RESULTS}/mutations/mutations.json",))
    more = {"grouped_mutations": (*given, mutations)}
    return [Target(table, "study-b table", CATEGORY, more.get(name, given)) for name, table in TABLES.items()]


def figures() -> list[Target]:
    """Every figure."""
    return from_tables(FIGURES.values(), "workflow figure", CATEGORY)
