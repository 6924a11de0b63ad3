# SPDX-License-Identifier: Apache-2.0
"""The check of launches and predictions that was recorded on a GPU, held against this package on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.diagnose.gpu_check import PLANS, SHAPES, cases
from routeblock.errors import InputError
from routeblock.evidence.archive import CONTENTS, changed
from routeblock.moe.automatic_launch import FoundLaunch, derived_launch
from routeblock.moe.devices import device
from routeblock.moe.launches import Launch
from routeblock.moe.marlin_launch import Gemm, Weights, registers_for
from routeblock.moe.partition import BLOCK_SIZES
from routeblock.tables import Column, Row, Table, write_sealed

DIAGNOSIS, REGISTERS = "diagnosis.json", "registers.json"
FILES = (DIAGNOSIS, REGISTERS)


@dataclass(frozen=True)
class SeenLaunch:
    """One launch that the operator chose itself, with what the rule derives now."""

    weights: Weights
    block_size: int
    gemm: Gemm
    seen: tuple[Launch, ...]
    then: Launch | None
    derived: FoundLaunch


@dataclass(frozen=True)
class Recorded:
    """A recorded check: GPU and vLLM release, `diagnosis.json` and `registers.json` as they are."""

    source: Path
    gpu: str
    vllm: str
    document: dict[str, Any]
    registers: dict[str, Any]

    def launches(self) -> Iterator[SeenLaunch]:
        """Every launch that was read off."""
        gpu = device(self.gpu)
        for entry in self.document["launches"]:
            n, k, group, dtype, zero_points = entry["shape"]
            weights, gemm = Weights(dtype, zero_points, group), Gemm(n, k, entry["routes"])
            then = entry["derived"]
            yield SeenLaunch(
                weights, entry["block_size"], gemm, tuple(Launch(*x) for x in entry["seen"]),
                None if then is None else Launch(*then),
                derived_launch(gpu, self.vllm, weights, entry["block_size"], gemm),
            )  # fmt: skip


def read(source: Path) -> Recorded:
    """The record in a folder. Raises InputError if a file cannot be used or is not the committed one."""
    way_out = "restore the folder, or record again with tests/gpu/check_diagnosis.py and read_registers.py"
    other = changed((source / name for name in FILES if (source / name).is_file()), source / CONTENTS)
    if other:
        raise InputError(
            "not the bytes that were recorded", where=str(other[0]), limit=f"{CONTENTS} lists them", way_out=way_out
        )
    try:
        document, registers = (json.loads((source / name).read_bytes()) for name in FILES)
        found = Recorded(source, device(document["gpu"]).name, document["vllm"], document, registers["registers"])
        list(found.launches())
        _ = [(p["layer"], p["outside"], p["predicted"][1], p["changed"][1]) for p in document["predictions"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as e:
        raise InputError(
            f"not a recorded check: {type(e).__name__} {e}", where=str(source), limit=f"{' and '.join(FILES)} are"
            " needed", way_out=way_out,
        ) from e  # fmt: skip
    return found


def check(found: Recorded) -> list[str]:
    """What does not hold in a record, one line each: launches derived again, cases drawn and predicted rows counted
    again from the seed, registers compared with the committed table.
    """
    return [f"{found.source}: {line}" for part in (_launches, _predictions, _registers) for line in part(found)]


def _launches(found: Recorded) -> Iterator[str]:
    wanted = {(*shape[:5], shape[6] * shape[7], block) for shape in SHAPES for block in BLOCK_SIZES}
    seen = [(*e["shape"], e["routes"], e["block_size"]) for e in found.document["launches"]]
    if len(seen) != len(wanted) or set(seen) != wanted:
        yield f"launches of {len(set(seen))} shapes and block sizes; {len(wanted)} were to be recorded"
    for one in found.launches():
        if one.seen != (one.derived.launch,) or one.then != one.derived.launch:
            yield f"{one.gemm}, blocks of {one.block_size}: seen {one.seen}, derived {one.derived.launch}"


def _predictions(found: Recorded) -> Iterator[str]:
    told = found.document["predictions"]
    drawn = 0
    for i, case in enumerate(cases(PLANS)):
        drawn += 1
        home = case.base.block_of()
        counts = [0, 0]
        for plan in case.orders():
            for place, rows in enumerate(case.predicted(home, plan.block_of())):
                counts[place] += int(rows.sum())
        if i >= len(told):
            continue
        entry = told[i]
        mine = {"layer": case.layer.document(), "tokens": case.tokens, "launch": list(case.launch), "plans": case.plans,
                "predicted": counts}  # fmt: skip
        yield from (
            f"prediction {i}: {key} {entry[key]}, drawn again {mine[key]}" for key in mine if entry[key] != mine[key]
        )
        if entry["outside"] or any(c > p for c, p in zip(entry["changed"], entry["predicted"], strict=True)):
            yield f"prediction {i}: {entry['outside']} rows outside, {entry['changed']} of {entry['predicted']} changed"
    if len(told) != drawn:
        yield f"{len(told)} predictions; {drawn} were to be recorded"


def _registers(found: Recorded) -> Iterator[str]:
    table = registers_for(device(found.gpu).facts.kernel_target, found.vllm)
    if table is None or table[0].registers != found.registers:
        yield f"the registers are not those of moe/marlin_registers.json for vLLM {found.vllm}"


def prediction_rows(found: Recorded) -> list[Row]:
    """Do rows change on a GPU that were not predicted, and how many of the predicted do?

    Random legal plans against the canonical one, on the GPU; rows of both GEMMs over all plans.
    """
    return [
        {
            "gpu": found.gpu, "vllm": found.vllm, **{key: entry["layer"][key] for key in _LAYER},
            "tokens": entry["tokens"], "launch": "({}, {}), {}".format(*entry["launch"]), "plans": entry["plans"],
            "predicted_w13": entry["predicted"][0], "changed_w13": entry["changed"][0],
            "predicted_w2": entry["predicted"][1], "changed_w2": entry["changed"][1],
            "share_changed": sum(entry["changed"]) / sum(entry["predicted"]) if any(entry["predicted"]) else None,
            "outside": entry["outside"],
        }
        for entry in found.document["predictions"]
    ]  # fmt: skip


_LAYER = ("hidden", "intermediate", "experts", "top_k", "dtype", "group_size", "zero_points")
PREDICTION_CHECK = Table(
    "prediction_check",
    prediction_rows,
    (
        Column("gpu"), Column("vllm"), Column("hidden", "count"), Column("intermediate", "count"),
        Column("experts", "count"), Column("top_k", "count"), Column("dtype"), Column("group_size", "count"),
        Column("zero_points", "flag"), Column("tokens", "count"), Column("launch"), Column("plans", "count"),
        Column("predicted_w13", "count"), Column("changed_w13", "count"), Column("predicted_w2", "count"),
        Column("changed_w2", "count"), Column("share_changed", "number", ".3f"), Column("outside", "count"),
    ),
    "Predicted rows against a GPU",
    "`outside`: rows that changed and were not predicted. Predicted counts are drawn again from the seed; changed ones"
    " are as recorded.",
)  # fmt: skip


def write(source: Path, out: Path) -> list[str]:
    """Check the record in `source` and write its table to `out`, sealed; returns what does not hold, then unwritten."""
    found = read(source)
    wrong = check(found)
    if not wrong:
        inputs = [source / name for name in (*FILES, CONTENTS)]
        write_sealed(
            out, PREDICTION_CHECK, prediction_rows(found), inputs=inputs, modules=["routeblock.moe.marlin_launch"]
        )
    return wrong
