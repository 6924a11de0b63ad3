# SPDX-License-Identifier: Apache-2.0
"""Tables of the engine's record: do completions repeat, does the batch change them, what does a step cost?"""

from __future__ import annotations

import json
import statistics as plain
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock import tables
from routeblock.declared import by_name, find
from routeblock.serving import completions
from routeblock.serving.completions import Served, first_difference
from routeblock.serving.kinds import Alignment, Clock
from routeblock.serving.layer_capture import SURFACES
from routeblock.serving.protocol import Protocol, load
from routeblock.serving.verification import FILES, read_observed
from routeblock.tables import Column, Row, Table, numbers
from routeblock.timing import edits_table as edited
from routeblock.timing import statistics
from routeblock.timing.record import usable
from routeblock.timing.statistics import Comparison
from routeblock.timing.validation import must_agree

Output = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Evidence:
    """What tables are made from. edits: what became of the record's edited copies."""

    protocol: Protocol
    served: Sequence[Served]
    observed: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    layer: Mapping[str, Any]
    edits: Sequence[Row] = ()


def outputs(served: Iterable[Served]) -> dict[tuple[str, str, int], dict[tuple[int, int], list[Served]]]:
    """By mode, alignment and batch: by process and repeat, the completions in the order of the prompts."""
    found: dict[tuple[str, str, int], dict[tuple[int, int], list[Served]]] = defaultdict(lambda: defaultdict(list))
    for s in served:
        if not s.alone:
            found[(s.mode, s.alignment, s.batch)][(s.process, s.repeat)].append(s)
    for repeats in found.values():
        for batch in repeats.values():
            batch.sort(key=lambda s: s.prompt)
    return found


def bits(batch: Sequence[Served]) -> Output:
    """An output: tokens and log probabilities of every completion."""
    return tuple((s.tokens, s.logprobs) for s in batch)


def serving(given: Evidence) -> list[Row]:
    """Does vLLM give the same completions for the same batch again, and with canonical alignment?

    Greedy completions of the same prompts in the same batch, served again and again by vLLM itself: different outputs
    (tokens and log probabilities), completions whose *tokens* are others than in the first repeat, and where the first
    other token stands. **Recorded** on an H200, a generated model with random weights: that completions diverge is the
    finding; how often is this model's.
    """
    found = outputs(given.served)
    rows = []
    for mode in given.protocol.modes:
        for alignment in given.protocol.alignments:
            for batch in given.protocol.batches:
                rows.append(_serving(given, str(mode), str(alignment), batch, found[(mode, alignment, batch)]))
    return rows


def _serving(
    given: Evidence, mode: str, alignment: str, batch: int, repeats: Mapping[tuple[int, int], Sequence[Served]]
) -> Row:
    by_process: dict[int, set[Output]] = defaultdict(set)
    for (process, _), one in repeats.items():
        by_process[process].add(bits(one))
    reference = repeats[min(repeats)]
    others, firsts = [], []
    for place, one in repeats.items():
        if place == min(repeats):
            continue
        away = [first_difference(a.ids, b.ids) for a, b in zip(reference, one, strict=True)]
        others.append(sum(x is not None for x in away))
        firsts += [x for x in away if x is not None]
    return {
        "mode": mode,
        "alignment": alignment,
        "batch": batch,
        "tokens_seen": given.observed["padded"][str(batch)] if mode == "graphs" else batch,
        "processes": len(by_process),
        "repeats": len(repeats),
        "outputs": len(set.union(*by_process.values())),
        "token_outputs": len({tuple(s.tokens for s in one) for one in repeats.values()}),
        "outputs_of_a_process": max(map(len, by_process.values())),
        "outputs_in_every_process": len(set.intersection(*by_process.values())),
        "other_tokens_mean": plain.mean(others),
        "other_tokens_most": max(others),
        "first_other_token": min(firsts) + 1 if firsts else None,
        "first_other_token_median": plain.median(firsts) + 1 if firsts else None,
    }


def batch(given: Evidence) -> list[Row]:
    """Does a prompt get other tokens alone than in a batch, canonical order on?

    Each prompt of a batch served once more as a batch of its own, in the same process, with canonical alignment:
    what differs then does not come from alignment. Whether a tile is cut along K depends on how many tokens there
    are, and so do attention and the plain GEMMs; this table does not say which came first. **Recorded** on an H200.
    """
    rows = []
    for mode in given.protocol.modes:
        own = [s for s in given.served if (s.mode, s.alignment, s.process) == (mode, Alignment.CANONICAL, 1)]
        alone = {s.prompt: s for s in own if s.alone}
        for size in given.protocol.alone:
            together = [s for s in own if not s.alone and (s.batch, s.repeat) == (size, 0)]
            away = [x for s in together if (x := first_difference(alone[s.prompt].ids, s.ids)) is not None]
            rows.append(
                {
                    "mode": str(mode),
                    "batch": size,
                    "other_tokens": len(away),
                    "other_bits": sum(bits([alone[s.prompt]]) != bits([s]) for s in together),
                    "first_other_token": min(away) + 1 if away else None,
                    "first_other_token_median": plain.median(away) + 1 if away else None,
                }
            )
    return rows


def steps(given: Evidence) -> list[Row]:
    """What does a step of the engine cost with canonical alignment?

    Step times on the host's clock, canonical over native, one process that switches between the two repetition by
    repetition; native against itself beside. *non-inferior*: the whole interval lies at or below 1 plus the margin;
    *inferior*: above; *undecided*: neither. **Recorded** on an H200.
    """
    rows = []
    for c in given.comparisons:
        if c.alignment != Alignment.CANONICAL:
            continue
        row = {name: getattr(c, name) for name in ("mode", "batch", "clock", "n", "verdict")}
        row |= {"native_us": c.baseline_us, "canonical_us": c.candidate_us, "margin_percent": 100 * (c.threshold or 0)}
        for name, value in (("ratio", c.change), ("low", c.low), ("high", c.high)):
            row[name] = _ratio(value)
        for name, value in (("floor", c.floor_change), ("floor_low", c.floor_low), ("floor_high", c.floor_high)):
            row[name] = _ratio(value)
        rows.append(row)
    return rows


def _ratio(change: float | None) -> float | None:
    return None if change is None else 1 + change


def plans(given: Evidence) -> list[Row]:
    """How many plans does native alignment make for the first MoE layer of the same batch?

    Fingerprints of the first layer's plans (which routes share a block) at prefill and at the first decode step, in
    a process of its own, and the number of tokens that alignment saw. The first layer's routing is the same each
    time. **Recorded** on an H200.
    """
    rows = []
    for size in given.protocol.batches:
        for clock in Clock:
            seen = [p for p in given.observed["plans"] if (p["batch"], p["clock"]) == (size, clock)]
            rows.append(
                {
                    "batch": size,
                    "clock": str(clock),
                    "tokens": seen[0]["tokens"],
                    "block_size": seen[0]["block_size"],
                    "calls": len(seen),
                    "plans": len({p["fingerprint"] for p in seen}),
                }
            )
    return rows


def diverged(given: Evidence) -> list[Row]:
    """What share of completions has diverged, by the position of the token?

    Of all completions of a condition but those of its first repeat: the share whose tokens have left the first
    repeat's at or before a position. **Recorded** on an H200.
    """
    rows = []
    for (mode, alignment, size), repeats in outputs(given.served).items():
        reference = repeats[min(repeats)]
        away = [
            first_difference(a.ids, b.ids)
            for place, one in repeats.items()
            if place != min(repeats)
            for a, b in zip(reference, one, strict=True)
        ]
        for position in range(given.protocol.completion_tokens):
            count = sum(x is not None and x <= position for x in away)
            row = {"mode": mode, "alignment": alignment, "batch": size, "token": position + 1}
            rows.append(row | {"completions": len(away), "share": count / len(away)})
    return rows


def layer(given: Evidence) -> list[Row]:
    """Are the bits of the engine's first MoE layer the twin's?

    A plan of a given order of arrival is injected at vLLM's alignment; the first MoE layer's call of the first decode
    step is **recorded** on an H200 (inputs, plan, what each kernel wrote), and **computed again** here by the CPU twin
    from the same inputs, plan and weights.
    """
    return [
        {
            "arrivals": call["arrivals"],
            "batch": call["batch"],
            "plan": call["plan"][:12],
            "plan_as_injected": call["plan_as_injected"],
            "launch": " x ".join(map(str, call["launches"][surface if surface in call["launches"] else "w2"])),
            "surface": surface,
            "elements": call["elements"][surface],
            "differ": call["differ"][surface],
        }
        for call in given.layer["calls"]
        for surface in SURFACES
    ]


def mutations(given: Evidence) -> list[Row]:
    """Is an edited record of the engine refused, for the declared reason?

    Edits of the record, declared beforehand with the reasons for which each is to be refused, tried on copies of the
    **recorded** evidence. Digests are left aside, since a forger writes them anew.
    """
    return edited.table(given.edits)


_WHERE = (Column("mode"), Column("alignment"), Column("batch", "count"))
TABLES = by_name(
    Table(
        "serving",
        serving,
        (
            *_WHERE,
            *(Column(n, "count") for n in ("tokens_seen", "processes", "repeats", "outputs", "token_outputs")),
            *(Column(n, "count") for n in ("outputs_of_a_process", "outputs_in_every_process")),
            *numbers(("other_tokens_mean",), ".2f"),
            Column("other_tokens_most", "count"),
            Column("first_other_token", "count"),
            *numbers(("first_other_token_median",), "g"),
        ),
        "Do completions repeat?",
        "outputs: different ones among all repeats, by tokens and bits of log probabilities; token_outputs: by tokens "
        "alone. outputs_of_a_process: the most within one process; outputs_in_every_process: how many every process "
        "gave. other_tokens: completions of a batch whose tokens are not those of the first repeat, mean and most over "
        "the other repeats. first_other_token: counted from 1, the earliest and the median. tokens_seen: by alignment "
        "in a decode step; graphs pad. A model of random weights: rates are its own.",
    ),
    Table(
        "serving_batch",
        batch,
        (
            Column("mode"),
            *(Column(n, "count") for n in ("batch", "other_tokens", "other_bits", "first_other_token")),
            *numbers(("first_other_token_median",), "g"),
        ),
        "Alone and in the batch, canonical order on",
        "other_tokens: prompts of the batch whose completion has other tokens when served alone; other_bits: other "
        "tokens or log probabilities.",
    ),
    Table(
        "serving_steps",
        steps,
        (
            Column("mode"),
            Column("batch", "count"),
            Column("clock"),
            Column("n", "count"),
            *numbers(("native_us", "canonical_us"), ".0f"),
            *numbers(("ratio", "low", "high"), ".4f"),
            *numbers(("margin_percent",), "g"),
            Column("verdict"),
            *numbers(("floor", "floor_low", "floor_high"), ".4f"),
        ),
        "What a step costs",
        "Microseconds of one step, medians, on the host's clock. prefill: the step that takes all prompts of the "
        "batch; decode: all further steps. ratio: canonical to native, median over repetitions, with its bootstrap "
        "interval. floor: native against itself in the same place.",
    ),
    Table(
        "serving_plans",
        plans,
        (
            Column("batch", "count"),
            Column("clock"),
            *(Column(n, "count") for n in ("tokens", "block_size", "calls", "plans")),
        ),
        "Plans of the first MoE layer, native",
        "plans: different ones among the calls; the order of routes inside a block does not count.",
    ),
    Table(
        "serving_diverged",
        diverged,
        (*_WHERE, Column("token", "count"), Column("completions", "count"), *numbers(("share",), ".4f")),
        "Completions that have diverged, by token",
        "share: of the completions of all repeats but the first.",
    ),
    Table(
        "serving_layer",
        layer,
        (
            Column("arrivals"),
            Column("batch", "count"),
            Column("plan"),
            Column("plan_as_injected", "flag"),
            Column("launch"),
            Column("surface"),
            *(Column(n, "count") for n in ("elements", "differ")),
        ),
        "The engine's first MoE layer, and the twin",
        "differ: elements whose bits are not the twin's. plan: the first digits of its fingerprint, in which the order "
        "inside a block does not count, so two orders of arrival may share it. launch: thread_k x thread_n x grid, as "
        "recorded for this GPU and version; activation and final have none and show that of W2.",
    ),
    Table(
        "serving_mutations",
        mutations,
        edited.COLUMNS,
        "Edited copies of the record, and why each is refused",
        edited.NOTES,
    ),
)


def write(
    name: str,
    out: Path,
    statistics_file: Path,
    folder: Path,
    validation: Path,
    layer_file: Path,
    protocol: Path,
    mutations_file: Path | None = None,
) -> list[Path]:
    """Write the table `name` of `TABLES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name or inputs that are not what they should be.
    """
    table = find(name, TABLES, "table")
    must_agree(validation)
    edits = edited.read(mutations_file) if mutations_file else []
    served, observed = completions.read(folder / completions.TABLE), read_observed(folder)
    with usable(layer_file):
        captured = json.loads(layer_file.read_bytes())
    given = Evidence(load(protocol), served, observed, statistics.read(statistics_file), captured, edits)
    with usable(folder):
        rows = table.rows(given)
    inputs = [statistics_file, *([mutations_file] if mutations_file else []), validation, layer_file, protocol]
    return tables.write_sealed(out, table, rows, inputs=[*inputs, *(folder / f for f in FILES)])
