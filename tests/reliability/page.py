# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md, from the results of long runs in fixtures/reliability and the properties in tests/.

python tests/reliability/page.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "fixtures/reliability", ROOT / "docs/reliability.md"
DEFAULT_EXAMPLES = 100  # hypothesis's own

Row = dict[str, Any]


def _result(name: str) -> Row:
    document: Row = json.loads((RESULTS / f"{name}.json").read_bytes())
    return document


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str]) -> str:
    right = ["left"] + ["right"] * (len(head) - 1)
    return tabulate(list(rows), list(head), tablefmt="github", colalign=right, disable_numparse=True)


def _examples(decorators: Sequence[ast.expr]) -> int | None:
    """The examples of a test by its decorators; None if it is no property."""
    calls = [d for d in decorators if isinstance(d, ast.Call) and isinstance(d.func, ast.Name)]
    if not any(c.func.id == "given" for c in calls if isinstance(c.func, ast.Name)):
        return None
    found = [k.value for c in calls for k in c.keywords if k.arg == "max_examples"]
    return next((v.value for v in found if isinstance(v, ast.Constant)), DEFAULT_EXAMPLES)  # type: ignore[return-value]


def properties() -> dict[str, list[int]]:
    """By file of tests/: the number of examples of each property in it."""
    found: dict[str, list[int]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        mine = [_examples(n.decorator_list) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        if counts := [n for n in mine if n is not None]:
            found[path.relative_to(ROOT).as_posix()] = counts
    return found


def _properties() -> str:
    found = properties()
    rows = [(f"`{name}`", len(counts), f"{sum(counts):,}") for name, counts in found.items()]
    rows.append(("all", sum(map(len, found.values())), f"{sum(map(sum, found.values())):,}"))
    return _table(rows, ("file", "properties", "examples a run"))


def _readers(told: Row) -> str:
    names = ("reader", "inputs", "bytes", "read", "refused", "slowest_s", "most_memory_mb", "faults")
    rows = [[f"{r[n]:,}" if isinstance(r[n], int) else r[n] for n in names] for r in told["readers"]]
    total = [sum(r[n] for r in told["readers"]) for n in ("inputs", "bytes", "read", "refused", "faults")]
    most = [max(r[n] for r in told["readers"]) for n in ("slowest_s", "most_memory_mb")]
    shown = [f"{n:,}" for n in total]
    rows.append(["all", *shown[:4], *most, shown[4]])
    head = ("reader", "inputs", "bytes", "read", "refused", "slowest, s", "most memory, MB", "faults")
    return _table(rows, head)


def _mutants(told: Row) -> str:
    rows = []
    for r in told["mutants"]:
        reasons = ", ".join(sorted(r["reasons"], key=lambda reason: (-r["reasons"][reason], reason))[:4])
        alone = r["by_chain_alone"], r["by_list_alone"]
        rows.append((r["record"], r["kind"], r["tried"], r["refused"], *alone, r["accepted"], reasons))
    names = ("tried", "refused", "by_chain_alone", "by_list_alone", "accepted")
    total = [f"{sum(r[n] for r in told['mutants']):,}" for n in names]
    rows.append(("all", "", *total, ""))
    head = (
        "record",
        "kind",
        "tried",
        "refused",
        "by `verify` alone",
        "by the list alone",
        "accepted",
        "reasons, most first",
    )
    align = ["left", "left", *["right"] * 5, "left"]
    return tabulate(rows, head, tablefmt="github", colalign=align, disable_numparse=True)


def _variations(told: Row) -> str:
    rows = [
        (v["record"], v["tried"], ", ".join(f"{k} {n}" for k, n in v["kinds"].items()), len(v["refused"]))
        for v in told["variations"]
    ]
    rows.append(("all", sum(r[1] for r in rows), "", sum(r[3] for r in rows)))
    return tabulate(
        rows, ("record", "tried", "kinds", "refused"), tablefmt="github", colalign=("left", "right", "left", "right")
    )


def _intervals(told: Row) -> str:
    rows = [
        (r["repetitions"], f"{r['confidence']:.0%}", f"{r['coverage']:.1%}", f"{r['standard_error']:.1%}", r["trials"])
        for r in told["rows"]
    ]
    return _table(rows, ("repetitions", "stated", "reached", "standard error", "simulated comparisons"))


def _growth(told: Row) -> str:
    rows = []
    for case in told["cases"]:
        sizes = ", ".join(f"{r['size']:,}" for r in case["rows"])
        times = ", ".join(f"{r['seconds']:.3g}" for r in case["rows"])
        memory = max(r["mb"] for r in case["rows"])
        rows.append((case["case"], f"{sizes} {case['unit']}", times, case["exponent"], memory))
    head = ("case", "sizes", "seconds", "exponent", "most memory, MB")
    return tabulate(
        rows, head, tablefmt="github", colalign=("left", "left", "left", "right", "right"), disable_numparse=True
    )


def _list_alone(told: Row) -> str:
    found: dict[str, set[str]] = {}
    for row in told["mutants"]:
        found.setdefault(row["record"], set()).update(row["places_by_list_alone"])
    lines = []
    for record, places in found.items():
        if places:
            tops = sorted({".".join(p.split(" of ")[0].split(".")[:3]) for p in places})
            lines.append(f"- {record}: {', '.join(f'`{p}`' for p in tops)}")
    return "\n".join(lines)


def text() -> str:
    """The page."""
    fuzzed, told, drawn, grown = (_result(name) for name in ("fuzzed_readers", "mutants", "intervals", "growth"))
    return f"""# How hard it is to break

`make reliability` writes this page from `fixtures/reliability`, where the commands that are named here leave their
results; nobody types a number. `make test` runs each of them for a moment, and every property.

## Properties

Each is tried on random examples by hypothesis: alignment, partition and packing (every route and every K-tile exactly
once, every packing's inverse, fingerprints equal exactly where block sets are), the twin (the order of routes inside a
block, plans of a tile in one slice, rows of zeros, the slow model of one tensor-core step), statistics and recount.

{_properties()}

## Intervals

`make intervals`: {drawn["resamples"]:,} resamples, log-normal times, a true change of {drawn["change"]:.0%},
seed {drawn["seed"]}. The percentile bootstrap of a median of few pairs holds the truth somewhat less often than
its name says; the protocols call their intervals descriptive.

{_intervals(drawn)}

## Readers

`make fuzz`: {fuzzed["seconds"]:g} seconds a reader, seed {fuzzed["seed"]}. Valid files are changed blindly, and by
somebody who knows the format. A fault is anything but a result or one line of refusal, more than 5 s, memory beyond
64 MB and 32 times the file (tensor files: 2 times), a file elsewhere, a crash. `read` counts inputs that gave a result,
which for sealed results, checkpoints and scored runs is a list of findings.

{_readers(fuzzed)}

## Mutants

`make mutants`: {told["each"]} of each kind on each record, seed {told["seed"]}, whatever follows from an edit
restated and sealed anew. Only edits that change meaning count: other canonical JSON, other bytes of a tensor, other
batches or another order of them. Of study A the runs are those of a small study without GEMMs; of timed studies the
committed records.

{_mutants(told)}

*By `verify` alone*: a field of a seal that the scorer does not need and `make verify` refuses. *By the list alone*:
nothing in a record contradicts the edit (other times that are as plausible, a driver's version), and only the list
that the recording machine made, `contents.json`, shows it. Who can rewrite that list too can forge these places:

{_list_alone(told)}

Legitimate variations: order of keys and white space, times and processes, another codec, a folder moved, files touched.

{_variations(told)}

## Growth

`make growth`: seconds of processor time at doubling sizes; the exponent is that of the last two doublings, 1 is linear.

{_growth(grown)}
"""


def main() -> int:
    """Write the page, or say whether it is as it would be written."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="write nothing; 1 if the page is another")
    if options.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != text())
    PAGE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
