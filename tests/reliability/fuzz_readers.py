# SPDX-License-Identifier: Apache-2.0
"""Hostile files for every reader: a result or an `InputError` and nothing else, in little time and memory.

PYTHONPATH=tests/route_block python tests/reliability/fuzz_readers.py --seconds 600 --seed 1 --out FILE

Each reader runs in a process of its own that is watched from outside, so that a crash and an endless loop are faults
of one input, too. Input number i of a reader follows from seed, reader and i alone: `--case i` makes it again.

Memory is the growth of the process's peak, and its address space is capped, so that what a file merely states is not
allocated even where it would never be touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from routeblock.errors import InputError
from routeblock.evidence.files import write_json

FORMAT = "routeblock.fuzzed_readers.v1"
HANG_S, KILL_S = 5.0, 30.0  # of processor time for one input; of the clock, before the process is taken for hung
FREE_BYTES = 64 << 20
SPACE_BYTES = 1 << 30  # of address space above what the process had: arenas of allocators are reserved, not used
# How many of an audited event's arguments name files.
NAMED = {"open": 1, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}
KEPT = 20  # faults of one reader that are written down


def watched_files() -> list[str]:
    """Names of files that this process opens or changes, from now on, as Python tells of them."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        count = {"open": 1, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}
        seen.extend(
            os.fsdecode(x) for x in arguments[: count.get(event, 0)] if isinstance(x, str | bytes | os.PathLike)
        )

    sys.addaudithook(hook)
    return seen


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    return 0


@contextmanager
def _space(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Worker:
    """One reader, its valid files in a folder, and what hostile ones did to it."""

    def __init__(self, name: str, seed: int, home: Path) -> None:
        from hostile import BY_SUFFIX
        from readers import READERS

        self.reader = next(r for r in READERS if r.name == name)
        self.seed, self.home = seed, home / "files"
        self.home.mkdir()
        self.reader.make(self.home)
        self.valid = {p: p.read_bytes() for p in sorted(self.home.rglob("*")) if p.is_file()}
        self.chosen = [p for p in self.valid if p.name.endswith(self.reader.suffix)]
        self.mutate = BY_SUFFIX[self.chosen[0].suffix]
        self.size = sum(map(len, self.valid.values()))
        for _ in range(2):  # what the first call imports and caches is no file's
            self.reader.read(self.home)
        self.opened = watched_files()

    def hostile(self, number: int) -> tuple[Path, bytes]:
        """The file that input `number` changes, and its bytes."""
        rng = random.Random(f"{self.seed} {self.reader.name} {number}")
        path = rng.choice(self.chosen)
        return path, self.mutate(self.valid[path], rng)

    def run(self, number: int) -> dict[str, Any]:
        """What one input did: outcome, fault if any, its bytes, seconds, memory."""
        path, data = self.hostile(number)
        path.write_bytes(data)
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        self.opened.clear()
        began, outcome, fault = time.process_time(), "read", ""
        try:
            with _space(SPACE_BYTES), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.reader.read(self.home)
        except InputError as e:
            outcome = "refused"
            if "\n" in str(e) or not str(e).strip():
                fault = f"a refusal of several lines: {e!r}"
        except BaseException as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            fault = f"{type(e).__name__}: {str(e)[:200]} ({Path(last.filename).name}, line {last.lineno})"
        seconds = time.process_time() - began
        opened = list(self.opened)
        grown = max(0, _memory("VmHWM") - before)
        allowed = FREE_BYTES + self.reader.factor * (self.size - len(self.valid[path]) + len(data))
        if seconds > HANG_S:
            fault = fault or f"took {seconds:.1f} s"
        if grown > allowed:
            fault = fault or f"took {grown >> 20} MB of memory, {allowed >> 20} are allowed"
        if outside := [name for name in opened if not self._inside(name)]:
            fault = fault or f"went to {outside[0]!r}"
        path.write_bytes(self.valid[path])
        for extra in {p for p in self.home.rglob("*") if p.is_file()} - self.valid.keys():
            extra.unlink()
        return {"outcome": outcome, "fault": fault, "bytes": len(data), "seconds": seconds, "grown": grown}

    def _inside(self, name: str) -> bool:
        at = os.path.realpath(name)
        package = Path(__file__).resolve().parents[2] / "workflow"
        return (
            Path(at).is_relative_to(self.home.resolve())
            or Path(at).is_relative_to(package)
            or at.startswith(("/proc/", "/sys/", "/dev/", "/etc/localtime", sys.prefix, sys.base_prefix))
            or "zoneinfo" in at
        )


def work(name: str, seed: int, first: int, seconds: float, cases: int, home: Path) -> None:
    """Run inputs from number `first` on for so many seconds, at most `cases`; notes go to files in `home`."""
    worker = Worker(name, seed, home)
    until = time.monotonic() + seconds
    with (home / "notes.jsonl").open("a") as notes, (home / "now").open("w") as now:
        for number in range(first, first + cases):
            if time.monotonic() > until:
                break
            now.seek(0)
            now.write(f"{number:12}")
            now.flush()
            notes.write(json.dumps({"number": number, **worker.run(number)}) + "\n")
            notes.flush()


def fuzz(name: str, seed: int, seconds: float, cases: int) -> dict[str, Any]:
    """Run one reader in processes of its own for so many seconds; the summary of what was found."""
    notes: list[dict[str, Any]] = []
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    until, first = time.monotonic() + seconds, 0
    while first < cases and (not notes or time.monotonic() < until):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            left = max(until - time.monotonic(), 0.5)
            mine = [sys.executable, __file__, "--work", folder, "--reader", name, "--first", str(first)]
            limits = ["--seed", str(seed), "--seconds", str(left), "--cases", str(cases - first)]
            log = home / "log"
            with log.open("wb") as err:
                process = subprocess.Popen([*mine, *limits], stdout=err, stderr=err, env=paths)
                ended = _watch(process, home)
            told = home / "notes.jsonl"
            notes += [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
            if not (home / "now").exists():
                raise RuntimeError(f"{name}: the worker did not start: {log.read_text(errors='replace')[-2000:]}")
            if not ended and process.returncode == 0:
                break
            at = int((home / "now").read_text().strip() or first)
            fault = ended or f"the process died by {process.returncode}: {log.read_text(errors='replace')[-300:]}"
            notes.append({"number": at, "outcome": "fault", "fault": fault, "bytes": 0, "seconds": 0.0, "grown": 0})
            first = at + 1
    faults = [n for n in notes if n["fault"]]
    return {
        "reader": name,
        "inputs": len(notes),
        "bytes": sum(n["bytes"] for n in notes),
        "read": sum(n["outcome"] == "read" for n in notes),
        "refused": sum(n["outcome"] == "refused" for n in notes),
        "slowest_s": round(max((n["seconds"] for n in notes), default=0), 3),
        "most_memory_mb": round(max((n["grown"] for n in notes), default=0) / 2**20, 1),
        "faults": len(faults),
        "first_faults": [{"case": n["number"], "fault": n["fault"]} for n in faults[:KEPT]],
    }


def _watch(process: subprocess.Popen[bytes], home: Path) -> str:
    """Wait for a worker; what was wrong if it hung on one input and was killed."""
    last, since = "", time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = home / "now"
        text = now.read_text() if now.exists() else "starting"
        if text != last:
            last, since = text, time.monotonic()
        elif time.monotonic() - since > KILL_S + 60 * (text == "starting"):
            process.kill()
            process.wait()
            return f"still at it after {KILL_S:.0f} s"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz readers and write what was found; 1 if anything was."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, required=True, help="for each reader")
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--cases", type=int, default=10**9, help="at most so many inputs for each reader")
    options.add_argument("--reader", action="append", help="this one alone")
    options.add_argument("--out", type=Path)
    options.add_argument("--case", type=int, help="keep this input of the reader in ./fuzzed and read it")
    options.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    if given.work:
        work(given.reader[0], given.seed, given.first, given.seconds, given.cases, given.work)
        return 0
    if given.case is not None:
        return _again(given.reader[0], given.seed, given.case)
    from readers import READERS

    names = given.reader or [r.name for r in READERS]
    rows = []
    for name in names:
        rows.append(fuzz(name, given.seed, given.seconds, given.cases))
        row = rows[-1]
        print(f"{name}: {row['inputs']} inputs, {row['refused']} refused, {row['faults']} faults", flush=True)
        for found in row["first_faults"]:
            print(f"    --case {found['case']}: {found['fault']}", flush=True)
    document = {"format": FORMAT, "seed": given.seed, "seconds": given.seconds, "readers": rows}
    if given.out:
        write_json(given.out, document)
    return int(any(row["faults"] for row in rows))


def _again(name: str, seed: int, number: int) -> int:
    home = Path("fuzzed")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    worker = Worker(name, seed, home)
    path, data = worker.hostile(number)
    path.write_bytes(data)
    print(f"{path}: {len(data)} bytes")
    worker.reader.read(worker.home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
