# SPDX-License-Identifier: Apache-2.0
"""The fast paths' tables: ours against every peer, counters, whose bits depend on the batch, the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock import tables
from routeblock.errors import InputError
from routeblock.evidence.manifest import seal
from routeblock.q6k_dispatch import fixture, record, statistics
from routeblock.q6k_dispatch.protocol import OURS, Matrix, Protocol, Role, load, shape_of
from routeblock.q6k_dispatch.record import Recorded
from routeblock.q6k_dispatch.statistics import Comparison
from routeblock.tables import Column

Row = dict[str, Any]
_SHAPE = ("slots", "pool", "rows", "cols")


@dataclass(frozen=True)
class Evidence:
    """What tables are made from."""

    comparisons: Sequence[Comparison]
    found: Recorded
    protocol: Protocol


def peers(given: Evidence) -> list[Row]:
    """Each shape once: our time, every other side's, the ratio to the best peer, and how near the limit it is."""
    run, rows = given.found.run, []
    checks = {(c["role"], *(c[n] for n in _SHAPE)): c for c in run["checks"]}
    for c in given.comparisons:
        check = checks[(c.role, *(getattr(c, n) for n in _SHAPE))]
        best, floor = c.ratios[c.best] if c.best else None, c.ratios[given.protocol.floor]
        row: Row = {name: getattr(c, name) for name in ("role", *_SHAPE, "n", "best", "reached")}
        row |= {
            "experts": check["distinct_experts"],
            "largest_group": check["largest_group"],
            "ours_us": c.candidate_us,
        }
        if best:
            row |= {"best_us": best.other_us, "ratio": best.ratio, "low": best.low, "high": best.high}
        if floor:
            row |= {"floor_low": floor.low, "floor_high": floor.high}
        names = [
            s.name for s in given.protocol.series if s.name not in (given.protocol.candidate, given.protocol.floor)
        ]
        row |= {f"{name}_us": r.other_us if (r := c.ratios[name]) else None for name in names}
        where = "L2" if check["weight_bytes"] <= run["device"]["l2_bytes"] else "DRAM"
        limit = check["weight_bytes"] / run["ceilings"][where.lower()] * 1e6
        row |= {"weight_mb": check["weight_bytes"] / 1e6, "limit": where, "limit_us": limit}
        rows.append(row | {"of_limit": limit / c.candidate_us if c.candidate_us else None})
    return rows


def counters(given: Evidence) -> list[Row]:
    """Each counted case: time, bytes, instructions, how busy each resource was, and which one binds."""
    least, rows = given.protocol.counters.binds_from, []
    weights: dict[tuple[int, ...], int] = {}
    for counted in given.found.counters["rows"]:
        shape = tuple(counted[n] for n in _SHAPE)
        if shape not in weights:
            of_role = shape_of(Matrix(**dict(zip(_SHAPE, shape, strict=True))), Role.TUNED, given.protocol)
            weights[shape] = fixture.make(of_role, given.protocol.seed).facts()["weight_bytes"]
        busy = {name: counted[f"{name}_percent"] for name in ("issue", "dram", "l2")}
        most = max(busy, key=lambda name: busy[name])
        rows.append(
            {
                **{
                    n: counted[n] for n in (*_SHAPE, "side", "kernel", "instructions", "warps_active", "l2_hit_percent")
                },
                "time_us": counted["time_ns"] / 1e3,
                "weight_mb": weights[shape] / 1e6,
                "dram_mb": counted["dram_read_bytes"] / 1e6,
                "l2_mb": counted["l2_bytes"] / 1e6,
                **{f"{name}_percent": value for name, value in busy.items()},
                "binds": most if busy[most] >= least else "waiting",
            }
        )
    return rows


def batch_bits(given: Evidence) -> list[Row]:
    """Each side and batch: whether the first token's outputs are those that it has alone."""
    alone = {b["side"]: b["sha256"] for b in given.found.run["batch_bits"] if b["tokens"] == 1}
    order = {side: i for i, side in enumerate(alone)}
    rows = [
        {
            "side": b["side"],
            "tokens": b["tokens"],
            "same_as_alone": b["sha256"] == alone[b["side"]],
            "same_as_auto": b["sha256"] == alone[OURS[0].value],
            "sha256": b["sha256"],
        }
        for b in given.found.run["batch_bits"]
    ]
    return sorted(rows, key=lambda r: (order[r["side"]], r["tokens"]))


def checks(given: Evidence) -> list[Row]:
    """What was checked on the GPU beside timing."""
    run, found = given.found.run, given.found
    device, told = run["device"], run["checks"]
    names = f"{device['architecture']}, driver {device['driver']}, CUDA {device['cuda']}, "
    names += ", ".join(f"{name} {digest}" for name, digest in run["cubin_sha256"].items())
    wrong = [c for c in told if c["wrong"]]
    unequal = [c for c in told if len({c["output_sha256"][s.value] for s in OURS}) != 1]
    rows = [
        _check("device", None, device["name"], names),
        _check("shapes", len(told), f"{len(wrong)} wrong", "; ".join(f"{c['slots']}/{c['pool']}" for c in wrong)),
        _check(
            "paths", 3 * len(told), f"{len(unequal)} different", "whole outputs of auto, dp4a and tensor, byte for byte"
        ),
        _check(
            "sampled outputs",
            sum(len(c["samples"]) for c in told),
            "equal",
            f"the model's bits; at most {max(c['furthest_of_bound'] for c in told):.3f} of the bound to float64",
        ),
    ]
    for side in sorted({name for c in told for name in c["peer_errors"]}):
        errors = [c["peer_errors"][side] for c in told if side in c["peer_errors"]]
        rows.append(
            _check(f"{side} against ours", len(errors), f"{max(errors):.1e}", "largest relative error (L2 norm)")
        )
    for name, digests in (("plug-in", run["peers"]["plugin"]), ("llama.cpp", run["peers"]["llama_cpp"])):
        rows.append(_check(name, None, "ran" if digests else "left out", ", ".join(map(" ".join, digests.items()))))
    rates = ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in run["ceilings"].items())
    rows.append(_check("reading alone", None, rates, given.protocol.ceilings.rule))
    lines = " / ".join(line.strip("= ") for line in found.counters["lines"])
    rows.append(_check("counters", len(found.counters["rows"]), found.counters["outcome"], lines))
    tools = found.sanitizer["tools"]
    rows += [_check(t["tool"], None, t["outcome"], " / ".join(x.strip("= ") for x in t["lines"])) for t in tools]
    for kind, number in sorted(run["batches"].items()):
        series, outcome = kind.split(" ")
        rows.append(_check(f"batches: {series}", number, outcome, ""))
    return rows


def _check(check: str, cases: int | None, outcome: str, detail: str) -> Row:
    return {"check": check, "cases": cases, "outcome": outcome, "detail": detail}


def _numbers(names: Iterable[str], form: str) -> tuple[Column, ...]:
    return tuple(Column(name, "number", form) for name in names)


_COUNTS = tuple(Column(n, "count") for n in _SHAPE)
Maker = Callable[[Evidence], list[Row]]
TABLES: dict[str, tuple[Maker, tuple[Column, ...], str, str]] = {
    "peers": (
        peers,
        (
            Column("role"),
            *_COUNTS,
            *(Column(n, "count") for n in ("experts", "largest_group", "n")),
            *_numbers(("ours_us",), ".2f"),
            Column("best"),
            *_numbers(("best_us",), ".2f"),
            *_numbers(("ratio", "low", "high"), ".3f"),
            Column("reached", "flag"),
            *_numbers(("floor_low", "floor_high"), ".3f"),
            *_numbers((f"{n}_us" for n in ("dp4a", "tensor", "vllm_vec", "vllm_batched", "llama_cpp")), ".2f"),
            *_numbers(("job_major_us", "band32_us"), ".2f"),
            *_numbers(("weight_mb",), ".1f"),
            Column("limit"),
            *_numbers(("limit_us",), ".2f"),
            *_numbers(("of_limit",), ".2f"),
        ),
        "Fast paths against their peers",
        "Microseconds of one call, medians over repetitions, float32 activations to float32 outputs: quantisation and "
        "grouping or alignment are in every time. best: the peer with the least time. ratio: ours to it, with its "
        "bootstrap interval; reached: the whole interval at or below the threshold, where it binds. floor: ours "
        "against itself. dp4a, tensor: one path alone. job_major, band32: study B's schedules behind a quantisation. "
        "tuned shapes were used to tune, held_out ones were not. limit_us: the time to read the used experts' weights "
        "once, at the rate of a kernel that only reads: from L2 where they fit there, else from DRAM; of_limit: that "
        "over ours. Batches repeat one call on the same data, so what fits in L2 stays there, on every side alike. "
        "llama_cpp is timed on the host's clock by differences, the others by events in a graph.",
    ),
    "counters": (
        counters,
        (
            *_COUNTS,
            Column("side"),
            Column("kernel"),
            *_numbers(("time_us",), ".1f"),
            *_numbers(("weight_mb", "dram_mb", "l2_mb"), ".1f"),
            *_numbers(("l2_hit_percent",), ".0f"),
            *_numbers(("instructions",), ".3g"),
            *_numbers(("issue_percent", "dram_percent", "l2_percent"), ".0f"),
            *_numbers(("warps_active",), ".1f"),
            Column("binds"),
        ),
        "What binds: hardware counters of the products",
        "Under ncu, the second of two runs; its replays can leave L2 colder and the time longer than in a graph. "
        "weight_mb: weights of the used experts, each once. dram_mb, l2_mb: bytes read from DRAM, bytes through L2. "
        "percent: of the peak rate over the kernel's time. binds: the busiest of issue, DRAM and L2 from 60 percent "
        "on; else warps wait, for memory, barriers or results. Quantisation and ranking are other kernels, not in it.",
    ),
    "batch_bits": (
        batch_bits,
        (
            Column("side"),
            Column("tokens", "count"),
            Column("same_as_alone", "flag"),
            Column("same_as_auto", "flag"),
            Column("sha256"),
        ),
        "Does the batch change a token's bits?",
        "The outputs of one token's experts, the token first in batches of so many. same_as_alone: its bytes in a "
        "batch of one, by the same side. vllm-gguf-plugin takes vllm_batched above 64 tokens and vllm_vec up to them; "
        "where their digests differ, its bits change there.",
    ),
    "dispatch_checks": (
        checks,
        (Column("check"), Column("cases", "count"), Column("outcome"), Column("detail")),
        "Fast paths: what was checked on the GPU",
        "Sampled outputs are computed again by the workflow. The sanitizer ran over every path at hostile sizes.",
    ),
}


def write(name: str, out: Path, statistics_file: Path, folder: Path, protocol: Path, *, code: str) -> list[Path]:
    """Write the table `name` of `TABLES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name or inputs that are not what they should be.
    """
    if name not in TABLES:
        raise InputError(
            f"no table is called {name!r}",
            where="tables",
            limit=f"known tables are {', '.join(TABLES)}",
            way_out="name one of them",
        )
    maker, columns, title, notes = TABLES[name]
    rows = maker(Evidence(statistics.read(statistics_file), record.read(folder), load(protocol)))
    files = tables.write(out, name, columns, rows, title=title, notes=notes)
    seal(
        out / f"{name}.manifest.json",
        rule=f"table_{name}",
        outputs=files,
        inputs=[statistics_file, protocol, *(folder / f for f in record.FILES)],
        parameters={},
        code=code,
    )
    return files
