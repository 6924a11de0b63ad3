# SPDX-License-Identifier: Apache-2.0
"""A committed record of native alignment, proved again on this CPU, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.archive import CONTENTS
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.tensors import load_tensors
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align, check_plan
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, SPEC, LayerFixture, load_fixture
from routeblock.route_block.native import history
from routeblock.route_block.native.process import PLANS, REPETITION
from routeblock.route_block.native.protocol import Protocol, load
from routeblock.route_block.native.record import FOLDER, FORMAT, RUN
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.runs.twin import compute
from routeblock.twin.weights import unpack

SUMMARY_FORMAT = "routeblock.native_summary.v1"
ARCHITECTURE = "hopper"  # of the GPU that recorded


class _FaultError(Exception):
    """The first thing of a record that is not as the protocol has it."""


def _expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise _FaultError(f"{what} is {found!r}, the protocol gives {wanted!r}")


def disagreements(source: Path, fixture: LayerFixture, protocol: Protocol) -> list[str]:
    """What of a record is not what the recording machine listed, what its protocol asks for, or what this CPU computes:
    one line each. Raises InputError if a file cannot be used.
    """
    wrong = [f"{path}: not the bytes that were recorded" for path in FOLDER.changed(source)]
    if wrong:
        return wrong
    document = read(source)
    try:
        _conforms(document, fixture, protocol)
        plans = list(_plans(source, document, fixture))
        finals = _finals(document)
        computed = _computed(fixture, plans, document["processes"][0]["launch"])
    except _FaultError as e:
        return [f"{source}: {e}"]
    except UNREADABLE as e:
        raise _unusable(source, e) from e
    return [
        f"{source}: plan {name[:16]} gave another final output than the twin computes"
        for name, mine in zip(document["plans"], computed, strict=True)
        if finals[name] != {mine}
    ]


def read(source: Path) -> dict[str, Any]:
    """The record's document. Raises InputError if it is none."""
    try:
        document = json.loads((source / RUN).read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        return dict(document)
    except UNREADABLE as e:
        raise _unusable(source, e) from e


def _unusable(source: Path, error: Exception) -> InputError:
    return InputError(
        f"not a record of native alignment: {type(error).__name__} {error}",
        where=str(source),
        limit=f"{RUN}, {PLANS} and {CONTENTS} of `routeblock study-a record-native`",
        way_out="restore the folder, or record again",
    )


def _conforms(document: dict[str, Any], fixture: LayerFixture, protocol: Protocol) -> None:
    _expect("protocol_sha256", document["protocol_sha256"], protocol.digest())
    _expect("fixture", document["fixture"], fixture.digest)
    processes = document["processes"]
    order = [*protocol.order(), *([REPETITION] * protocol.repetition.processes)]
    _expect("the order of processes", [p["what"] for p in processes], order)
    stamps = [p[name] for p in processes for name in ("began_ns", "ended_ns")]
    if stamps != sorted(stamps):
        raise _FaultError("two processes were on the GPU at once, or not in the order that is listed")
    plan, sizes = protocol.history, protocol.history.launch
    sms = int(document["identity"]["environment"]["sms"])
    for number, process in enumerate(processes):
        what = f"process {number}, {process['what']}"
        _expect(f"{what}: prelude", process["prelude"], process["what"] == "H1")
        if process["what"] == REPETITION:
            wanted = [c.name for c in protocol.repetition.conditions]
            _expect(f"{what}: conditions", [c["condition"] for c in process["conditions"]], wanted)
            seen = [(c[part], protocol.repetition.calls) for c in process["conditions"] for part in ("plans", "orders")]
        else:
            _expect(f"{what}: launch", process["launch"], [sizes.thread_k, sizes.thread_n, sms * sizes.blocks_per_sm])
            seen = [(process[part], plan.calls) for part in ("plans", "finals")]
        for told, calls in seen:
            _expect(f"{what}: calls", len(told["calls"]), calls)
            _expect(f"{what}: outcomes", sorted(set(told["calls"])), list(range(len(told["outcomes"]))))


def _plans(source: Path, document: dict[str, Any], fixture: LayerFixture) -> Iterator[AlignedPlan]:
    """The distinct plans, each legal for the routing and of its own fingerprint."""
    rows = load_tensors(source / PLANS)["sorted_token_ids"]
    spec = fixture.spec
    stable = align(fixture.topk_ids, spec["num_experts"], spec["block_size"])
    named = {name for p in document["processes"] if p["what"] != REPETITION for name in p["plans"]["outcomes"]}
    _expect("the set of stored plans", sorted(document["plans"]), sorted(named))
    for name, row in zip(document["plans"], rows, strict=True):
        plan = AlignedPlan(row, stable.expert_ids, row.size, spec["block_size"], stable.num_routes)
        check_plan(plan, fixture.topk_ids, spec["num_experts"], where=str(source / PLANS))
        _expect("a stored plan's fingerprint", plan.fingerprint(), name)
        yield plan


def _finals(document: dict[str, Any]) -> dict[str, set[str]]:
    """The final outputs that each plan gave, over all calls."""
    found: dict[str, set[str]] = {}
    for process in document["processes"]:
        if process["what"] != REPETITION:
            both = zip(history.outcomes(process, "plan"), history.outcomes(process, "final"), strict=True)
            for plan, final in both:
                found.setdefault(plan, set()).add(final)
    return found


def _computed(fixture: LayerFixture, plans: Sequence[AlignedPlan], launch: Sequence[int]) -> list[str]:
    weights = {gemm: unpack(fixture, gemm) for gemm in GEMMS}
    launches = dict.fromkeys(GEMMS, Launch(*launch))
    return [sha256_array(compute(fixture, weights, plan, launches, ARCHITECTURE)["final"]) for plan in plans]


def summary(document: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    """The test of history, and what each condition gave."""
    test = protocol.history.test
    under = [p for p in document["processes"] if p["what"] != REPETITION]
    rows = []
    for outcome in (test.primary, *test.descriptive):
        pairs = history.paired(under, outcome)
        found = history.shift(outcome, pairs, test)
        each = [[call for pair in pairs for call in pair[i]] for i in (0, 1)]
        rows.append(
            {
                **asdict(found),
                "pairs": len(pairs),
                "calls": len(each[0]),
                "distinct_h0": len(set(each[0])),
                "distinct_h1": len(set(each[1])),
                "distinct_both": len(set(each[0]) & set(each[1])),
                "processes_with_one_h0": sum(len(set(pair[0])) == 1 for pair in pairs),
                "processes_with_one_h1": sum(len(set(pair[1])) == 1 for pair in pairs),
                "permutations": test.permutations,
                "alpha": test.alpha,
                "verdict": _verdict(found.p, test.alpha) if outcome == test.primary else "descriptive",
            }
        )
    return {"history": rows, "repetition": list(_conditions(document, protocol))}


def _verdict(p: float, alpha: float) -> str:
    return "shifted" if p <= alpha else "no shift shown"


def _conditions(document: dict[str, Any], protocol: Protocol) -> Iterator[dict[str, Any]]:
    processes = [p["conditions"] for p in document["processes"] if p["what"] == REPETITION]
    for number, condition in enumerate(protocol.repetition.conditions):
        mine = [p[number] for p in processes]
        plans, orders = ({o for c in mine for o in c[part]["outcomes"]} for part in ("plans", "orders"))
        yield {
            "condition": condition.name,
            "mode": condition.mode,
            "routing": condition.routing,
            "experts": condition.experts,
            "routes": condition.routes or None,
            "processes": len(mine),
            "calls": sum(len(c["plans"]["calls"]) for c in mine),
            "distinct_plans": len(plans),
            "distinct_orders": len(orders),
            "processes_with_one_plan": sum(len(c["plans"]["outcomes"]) == 1 for c in mine),
            "repeats": len(orders) == 1,
        }


def write(out: Path, source: Path, fixture_folder: Path, protocol_path: Path, *, lane: str) -> list[str]:
    """Prove the record of `source` again and write its summary to the file `out`, sealed.

    Returns what `disagreements` finds; then nothing is written.
    """
    fixture, protocol = load_fixture(fixture_folder), load(protocol_path)
    wrong = disagreements(source, fixture, protocol)
    if wrong:
        return wrong
    document = read(source)
    write_json(
        out,
        {
            "format": SUMMARY_FORMAT,
            "lane": lane,
            "gpu": document["identity"]["environment"]["gpu"],
            "fixture": fixture.digest,
            "reproved": {"plans": len(document["plans"]), "finals": len(document["plans"])},
            **summary(document, protocol),
        },
    )
    seal(
        out.with_suffix(SUFFIX),
        rule="recorded_native",
        outputs=[out],
        inputs=[
            protocol_path,
            source / CONTENTS,
            *(source / name for name in FOLDER.files),
            *(fixture_folder / name for name in (SPEC, LAYER, INPUTS)),
        ],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return []
