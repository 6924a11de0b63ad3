# SPDX-License-Identifier: Apache-2.0
"""The fast paths' tables: ours against every peer, counters, whose bits depend on the batch, the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from routeblock import tables
from routeblock.declared import by_name, find
from routeblock.q6k_dispatch.protocol import OURS, Protocol, load, shapes
from routeblock.q6k_dispatch.study import KEY, STUDY, key_of
from routeblock.tables import Column, Row, Share, Table, numbers
from routeblock.timing import edits_table as edited
from routeblock.timing import statistics
from routeblock.timing.plan import Key
from routeblock.timing.record import Record, usable
from routeblock.timing.statistics import Comparison
from routeblock.timing.validation import must_agree

_SHAPE = ("slots", "pool", "rows", "cols")
RESOURCES = ("issue", "dram", "l2", "shared", "alu", "fma", "tensor")


@dataclass(frozen=True)
class Evidence:
    """What tables are made from. edits: what became of the record's edited copies."""

    comparisons: Sequence[Comparison]
    found: Record
    protocol: Protocol
    edits: Sequence[Row] = ()

    def at(self, place: Key) -> dict[str, Comparison]:
        """The comparisons of a shape, by the series that ours is held against."""
        return {c.series: c for c in self.comparisons if tuple(getattr(c, n) for n in KEY) == place}

    @property
    def checks(self) -> dict[Key, Row]:
        """The check of every shape."""
        return {tuple(c[n] for n in KEY): c for c in self.found.run["checks"]}


def peers(given: Evidence) -> list[Row]:
    """Are the fast paths faster than vLLM's plug-in and llama.cpp?

    Microseconds of one call at every shape: the fast paths, the fastest peer, and their ratio with its interval and
    the A/A floor. Every side is charged with its own quantisation and grouping. Tuned shapes were used to choose
    launches, held-out ones were not. Beside it, the time that no call can go below. **Recorded** on an H200 under a
    protocol that was committed before.
    """
    run, protocol, rows = given.found.run, given.protocol, []
    for shape in shapes(protocol):
        check, others = given.checks[key_of(shape)], given.at(key_of(shape))
        floor = others[protocol.floor]
        best = next((c for c in others.values() if c.best), None)
        row: Row = dict(zip(KEY, key_of(shape), strict=True)) | {
            "n": floor.n,
            "best": best.series if best else _undecided(others, protocol),
            "reached": best.reached if best else None,
            "experts": check["distinct_experts"],
            "largest_group": check["largest_group"],
            "ours_us": floor.candidate_us,
        }
        if best:
            row |= {"best_us": best.baseline_us, **_ratio(best)}
        if floor.low is not None:
            row |= {f"floor_{name}": _ratio(floor)[name] for name in ("low", "high")}
        row |= {f"{name}_us": c.baseline_us for name, c in others.items() if c is not floor}
        level = "L2" if check["weight_bytes"] <= run["device"]["l2_bytes"] else "DRAM"
        row |= {"weight_mb": check["weight_bytes"] / 1e6, "level": level}
        if floor.candidate_us:
            row["of_rate"] = check["weight_bytes"] / run["ceilings"][level.lower()] * 1e6 / floor.candidate_us
            if limit := _limit(others, protocol):
                row |= {"limit": limit[1], "limit_us": limit[0], "of_limit": limit[0] / floor.candidate_us}
        rows.append(row)
    return rows


def _undecided(others: dict[str, Comparison], protocol: Protocol) -> str:
    """The peers without which no best one can be named."""
    few = [c for name in protocol.peers if (c := others[name]).baseline_us is None]
    return "undecided: " + ", ".join(f"{c.series} {c.n} of {c.planned}" for c in few)


def _ratio(c: Comparison) -> Row:
    numbers = {"ratio": c.change, "low": c.low, "high": c.high}
    return {name: None if value is None else 1 + value for name, value in numbers.items()}


def _limit(others: dict[str, Comparison], protocol: Protocol) -> tuple[float, str] | None:
    """The time that no call can go below, and the series that has it."""
    found = [(us, name) for name in protocol.limit.series if name in others and (us := others[name].baseline_us)]
    return max(found, default=None)


def counters(given: Evidence) -> list[Row]:
    """What binds the fast paths?

    Hardware counters, a shape and side a row: the time, what remains to the limit, what binds, what warps wait for,
    how busy issue, DRAM, L2, shared memory and pipes are, bytes moved. **Recorded** on an H200: counts by the
    profiler, times without.
    """
    run, plan = given.found.run, given.protocol.counters
    rows = []
    for counted in given.found.documents["counters"]["rows"]:
        place, time_us = tuple(counted[n] for n in KEY), counted["replay_us"]
        check = given.checks[place]
        # The profiler parts the kernels of a graph: shares of its time become shares of the time without it.
        stretch = counted["time_ns"] / plan.calls / 1e3 / time_us
        busy = {name: counted[f"{name}_percent"] * stretch for name in RESOURCES}
        idle = max(0.0, 100 - 100 * counted["cycles_active"] / counted["cycles"] * stretch)
        waits = _waits(counted["stalls"])
        row = {
            **{n: counted[n] for n in ("role", *_SHAPE, "side", "warps_active", "l2_hit_percent")},
            "replay_us": time_us,
            "weight_mb": check["weight_bytes"] / 1e6,
            "dram_mb": counted["dram_read_bytes"] / plan.calls / 1e6,
            "l2_mb": counted["l2_bytes"] / plan.calls / 1e6,
            "instructions": counted["instructions"] / plan.calls,
            **{f"{name}_percent": value for name, value in busy.items()},
            "idle_percent": idle,
            "waits": ", ".join(f"{name} {100 * share:.0f}" for name, share in waits[:3]),
            "binds": _binds(busy, idle, waits[0][0], plan.binds_from),
        }
        if counted["side"] in OURS:
            blocks = check["plan"]["slabs"] * check["distinct_experts"]
            row["blocks_per_sm"] = blocks / run["device"]["multiprocessors"]
            if limit := _limit(given.at(place), given.protocol):
                row |= {"limit_us": limit[0], "remains_us": time_us - limit[0]}
        rows.append(row)
    order = {key_of(shape): i for i, shape in enumerate(shapes(given.protocol))}
    sides = {side: i for i, side in enumerate(dict.fromkeys((*plan.everywhere, *plan.sides)))}
    return sorted(rows, key=lambda r: (order[tuple(r[n] for n in KEY)], sides[r["side"]]))


def _waits(stalls: dict[str, float]) -> list[tuple[str, float]]:
    """Reasons for which warps wait, the most frequent first, with their shares of all waiting."""
    waiting = {name: value for name, value in stalls.items() if name not in ("selected", "not_selected")}
    total = sum(waiting.values()) or 1.0
    return sorted(((name, value / total) for name, value in waiting.items()), key=lambda w: -w[1])


def _binds(busy: dict[str, float], idle: float, wait: str, least: float) -> str:
    """The busiest resource from `least` percent on; else the larger loss of issue slots: no warps, or a reason to
    wait."""
    most = max(busy, key=lambda name: busy[name])
    if busy[most] >= least:
        return most
    return "idle" if idle > 100 - idle - busy["issue"] else wait


def batch_bits(given: Evidence) -> list[Row]:
    """Whose bits depend on the batch?

    One token alone and first in batches of growing size: whether its output bytes stay the same, for the fast paths
    and for the peers. **Recorded** on an H200; samples of the fast paths are computed again here.
    """
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
    """What was checked beside the times of the fast paths?

    What was checked beside timing: bits against the CPU model, the bound against float64 dequantisation, refusals,
    sanitizer tools. **Recorded** on an H200.
    """
    run, counted = given.found.run, given.found.documents["counters"]
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
    lines = " / ".join(line.strip("= ") for line in counted["lines"])
    rows.append(_check("counters", len(counted["rows"]), counted["outcome"], lines))
    tools = given.found.documents["sanitizer"]["tools"]
    rows += [_check(t["tool"], None, t["outcome"], " / ".join(x.strip("= ") for x in t["lines"])) for t in tools]
    for kind, number in sorted(run["batches"].items()):
        series, outcome = kind.split(" ")
        rows.append(_check(f"batches: {series}", number, outcome, ""))
    return rows


def mutations(given: Evidence) -> list[Row]:
    """Is an edited record of the fast paths refused, for the declared reason?

    Edits of the fast paths' record, declared beforehand with the reasons for which each is to be refused, tried on
    copies of the **recorded** evidence: which check refused each, for which reasons, and whether the unchanged copy
    was accepted. Digests are left aside, since a forger writes them anew.
    """
    return edited.table(given.edits)


def _check(check: str, cases: int | None, outcome: str, detail: str) -> Row:
    return {"check": check, "cases": cases, "outcome": outcome, "detail": detail}


_COUNTS = tuple(Column(n, "count") for n in _SHAPE)
TABLES = by_name(
    Table(
        "peers",
        peers,
        (
            Column("role"),
            *_COUNTS,
            *(Column(n, "count") for n in ("experts", "largest_group", "n")),
            *numbers(("ours_us",), ".2f"),
            Column("best"),
            *numbers(("best_us",), ".2f"),
            *numbers(("ratio", "low", "high"), ".3f"),
            Column("reached", "flag"),
            *numbers(("floor_low", "floor_high"), ".3f"),
            *numbers((f"{n}_us" for n in ("dp4a", "tensor", "vllm_vec", "vllm_batched", "llama_cpp")), ".2f"),
            *numbers(("job_major_us", "band32_us"), ".2f"),
            *numbers(("weight_mb",), ".1f"),
            Column("level"),
            *numbers(("of_rate",), ".2f"),
            *numbers(("read_us", "empty_us"), ".2f"),
            Column("limit"),
            *numbers(("limit_us",), ".2f"),
            *numbers(("of_limit",), ".2f"),
        ),
        "Fast paths against their peers",
        "Microseconds of one call, medians over repetitions, float32 activations to float32 outputs: quantisation and "
        "grouping or alignment are in every time. best: the peer with the least time. ratio: ours to it, with its "
        "bootstrap interval; reached: the whole interval at or below the threshold, where it binds. floor: ours "
        "against itself. dp4a, tensor: one path alone. job_major, band32: study B's schedules behind a quantisation. "
        "tuned shapes were used to tune, held_out ones were not. of_rate: the used experts' weights, each once, over "
        "our time, as a fraction of the rate of a kernel that only reads: 25 MB from L2 for weights up to L2's size, "
        "2 GB from DRAM for more. read: one launch that reads as many bytes as those weights, and nothing else. "
        "empty: our launches, of a kernel that does nothing. limit: the longer of the two; of_limit: that over ours. "
        "Batches repeat one call on the same data, so what fits in L2 stays there, on every side alike. llama_cpp is "
        "timed on the host's clock by differences, the others by events in a graph.",
        share=Share(rows=22),
    ),
    Table(
        "counters",
        counters,
        (
            Column("role"),
            *_COUNTS,
            Column("side"),
            *numbers(("replay_us", "limit_us", "remains_us"), ".2f"),
            Column("binds"),
            Column("waits"),
            *numbers((f"{name}_percent" for name in ("idle", *RESOURCES)), ".0f"),
            *numbers(("blocks_per_sm", "warps_active"), ".1f"),
            *numbers(("weight_mb", "dram_mb", "l2_mb"), ".1f"),
            *numbers(("l2_hit_percent",), ".0f"),
            *numbers(("instructions",), ".3g"),
        ),
        "What binds: hardware counters",
        "auto, dp4a, tensor: a whole call of ours; read: the kernel that only reads as many bytes as the weights; else "
        "study B's product alone; each in a graph of 32, counted as one by ncu. ncu parts the kernels of a graph, so "
        "percentages are set against replay_us, the time of the same graph without it. limit_us: reading the weights "
        "or launching, whichever is longer, as in table peers; remains_us: the rest. binds: the busiest of issue, "
        "DRAM, L2, shared memory and pipes from 60 percent of its peak on. Below, nothing is used up, and the largest "
        "loss is named: idle, where SMs hold no warp (launches, uneven blocks, the end), or the reason for which most "
        "warps wait. waits: shares of all waiting. wait: a result of fixed latency; barrier: other warps of the block; "
        "long_scoreboard: memory behind L1, and copies of weights (inferred: waiting for their barrier counts as it); "
        "short_scoreboard: shared memory; math_pipe_throttle: a busy pipe. blocks_per_sm: blocks of threads with work, "
        "over SMs. warps_active: while there is one; registers allow our kernels 16. dram_mb, l2_mb: of a call, read "
        "from DRAM, through L2.",
        share=Share(rows=24),
    ),
    Table(
        "batch_bits",
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
    Table(
        "dispatch_checks",
        checks,
        (Column("check"), Column("cases", "count"), Column("outcome"), Column("detail")),
        "Fast paths: what was checked on the GPU",
        "Sampled outputs are computed again by the workflow. The sanitizer ran over every path at hostile sizes.",
    ),
    Table(
        "dispatch_mutations",
        mutations,
        edited.COLUMNS,
        "Edited copies of the fast paths' record, and why each is refused",
        edited.NOTES,
    ),
)


def write(
    name: str,
    out: Path,
    statistics_file: Path,
    folder: Path,
    validation: Path,
    protocol: Path,
    mutations_file: Path | None = None,
) -> list[Path]:
    """Write the table `name` of `TABLES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name or inputs that are not what they should be.
    """
    table = find(name, TABLES, "table")
    must_agree(validation)
    edits = edited.read(mutations_file) if mutations_file else []
    given = Evidence(statistics.read(statistics_file), STUDY.read(folder), load(protocol), edits)
    with usable(folder):
        rows = table.rows(given)
    inputs = [statistics_file, *([mutations_file] if mutations_file else []), validation, protocol]
    return tables.write_sealed(out, table, rows, inputs=[*inputs, *(folder / f for f in STUDY.files)])
