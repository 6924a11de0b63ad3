# SPDX-License-Identifier: Apache-2.0
"""Whether the frozen prediction is that of this fixture, these plans and this point: every field is worked out again.

The rows that can differ are a check of their own (`expected_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from routeblock.route_block.scorer.expected_rows import shape_of, slices_of
from routeblock.route_block.scorer.inputs import GEMMS, PREDICTION, SURFACES, Control, Exchange, Study
from routeblock.route_block.scorer.operating_points import (
    SUPERSEDED_GRID,
    Launch,
    architecture_of,
    gpu_of,
    native_launches,
)
from routeblock.route_block.scorer.reasons import Finding, Reason

# What a prediction over captured plans says of its pairs.
FROM_CAPTURED = "the captured plans: the fixture's pair where it serves, else the lowest routes that do"


def check_prediction(study: Study) -> Iterator[Finding]:
    """Whether the prediction is about this fixture and these plans, complete, and free of contradiction."""
    frozen = study.prediction

    def finding(reason: Reason, detail: str) -> Finding:
        return Finding(PREDICTION, reason, detail)

    if frozen.fixture != study.fixture_digest:
        yield finding(Reason.PREDICTION_MISMATCH, f"for fixture {frozen.fixture[:16]}, not {study.fixture_digest[:16]}")
    for history, plan in study.own.items():
        if frozen.plans.get(history) != plan.fingerprint:
            yield finding(Reason.PREDICTION_MISMATCH, f"plan of {history} is not the stored one")
    yield from _check_point(study)
    yield from _check_pairs(study)
    arms = study.arms
    listed = {(a.cell, a.history): a for a in frozen.arms}
    if listed.keys() != arms.keys() or len(frozen.arms) != len(arms):
        odd = sorted(listed.keys() ^ arms.keys()) or [("an arm", "twice")]
        yield finding(Reason.PREDICTION_INCOMPLETE, f"arms differ from the study's: {'/'.join(odd[0])}")
    for arm in sorted(listed.keys() & arms.keys()):
        if listed[arm].fingerprint != arms[arm].fingerprint:
            yield finding(Reason.PREDICTION_MISMATCH, f"plan of {'/'.join(arm)} is not what the intervention gives")
        if any(listed[arm].launches.get(g) != study.launch(arm[0], g) for g in GEMMS):
            yield finding(Reason.PREDICTION_MISMATCH, f"launch of {'/'.join(arm)} is not the cell's")
    wanted = {frozenset(pair) for pair in combinations(arms, 2)}
    pairs = [frozenset((p.first, p.second)) for p in frozen.pairs]
    if set(pairs) != wanted or len(pairs) != len(wanted):
        yield finding(Reason.PREDICTION_INCOMPLETE, f"{len(pairs)} pairs of arms; the study has {len(wanted)}")
    for pair in frozen.pairs:
        if pair.rows.keys() != set(SURFACES) or pair.must_coincide != [s for s in SURFACES if not pair.rows[s]]:
            yield finding(Reason.PREDICTION_MISMATCH, f"{pair.name}: must_coincide is not what rows say")
    yield from _check_full_k(study)


def _check_pairs(study: Study) -> Iterator[Finding]:
    """Stored plans have the fixture's pairs, captured ones those that they give: else a study could leave cells out.

    Any pair lies within one block, or across two of one expert.
    """
    frozen = study.prediction.exchange
    if study.prediction.plan_source == "stored":
        if frozen != study.spec.exchange:
            yield Finding(PREDICTION, Reason.EXCHANGE_PAIR, "exchange pairs are not the fixture's")
    elif frozen != (wanted := _captured_exchange(study)):
        odd = next(name for name in Exchange.model_fields if getattr(frozen, name) != getattr(wanted, name))
        detail = f"exchange: {odd} is {getattr(frozen, odd)!r}, the captured plans give {getattr(wanted, odd)!r}"
        yield Finding(PREDICTION, Reason.EXCHANGE_PAIR, detail)
    flat = study.topk_ids.reshape(-1)
    for name, pair in study.pairs.items():
        if pair is None:
            continue
        if not all(0 <= r < flat.size for r in pair) or pair[0] == pair[1] or flat[pair[0]] != flat[pair[1]]:
            detail = f"pair {name} {list(pair)}: not two routes of one expert"
            yield Finding(PREDICTION, Reason.PREDICTION_MISMATCH, detail)
            continue
        for history, plan in study.own.items():
            owners = plan.owners()
            if (owners[pair[0]] == owners[pair[1]]) != (name == "within"):
                detail = f"pair {name} {list(pair)} stands in blocks {[owners[r] for r in pair]} under {history}"
                yield Finding(PREDICTION, Reason.PREDICTION_MISMATCH, detail)


def _check_full_k(study: Study) -> Iterator[Finding]:
    _, thread_n, native = study.prediction.launches["w13"]
    tiles = int(study.own["H0"].expert_ids.size) * (2 * study.spec.intermediate // thread_n)
    if not tiles:
        detail = f"W13 has no tile of {thread_n} columns in {2 * study.spec.intermediate}"
        yield Finding(PREDICTION, Reason.PREDICTION_MISMATCH, detail)
        return
    # A grid that divides the tile count hands whole tiles to each CUDA block.
    wanted = max(d for d in range(1, min(tiles, native) + 1) if tiles % d == 0)
    if study.prediction.full_k_grid != wanted:
        detail = f"grid {study.prediction.full_k_grid}; the largest divisor of {tiles} tiles up to {native} is {wanted}"
        yield Finding(PREDICTION, Reason.FULL_K_SPLIT, detail)


def _captured_exchange(study: Study) -> Exchange:
    """The exchange pairs of captured plans: the fixture's where they serve, else the lowest that do, else none."""
    one, two = (plan.owners() for plan in study.own.values())
    members: dict[int, list[int]] = {}
    for route, expert in enumerate(study.topk_ids.reshape(-1).tolist()):
        members.setdefault(expert, []).append(route)
    serves: dict[str, Callable[[int, int], bool]] = {
        "within": lambda a, b: one[a] == one[b] and two[a] == two[b],
        "across": lambda a, b: one[a] != one[b] and (one[a], one[b]) == (two[b], two[a]),
    }
    pairs: dict[str, tuple[int, int] | None] = {}
    chosen, why = [], []
    for name, given in (("within", study.spec.exchange.within), ("across", study.spec.exchange.across)):
        legal = [p for routes in members.values() for p in combinations(routes, 2) if serves[name](*p)]
        kept = given is not None and ((min(given), max(given)) in legal)
        pairs[name] = given if kept else min(legal, default=None)
        if kept:
            chosen.append(f"{name} {study.spec.exchange.chosen or 'by the fixture'}")
        elif legal:
            chosen.append(f"{name} by search")
        else:
            why.append(f"no {name} pair in the captured plans")
    return Exchange.model_validate(
        {**pairs, "why": ", ".join(why), "chosen": ", ".join(chosen) or "none", "from": FROM_CAPTURED}
    )


def _check_point(study: Study) -> Iterator[Finding]:
    """Launches, what they are called, tensor cores and control are those of the point on the lane of the runs."""
    frozen, spec, environment = study.prediction, study.spec, study.identity.environment
    gpu = gpu_of(frozen.lane, environment)
    shapes = {gemm: shape_of(study, gemm) for gemm in GEMMS}
    native = native_launches(frozen.point, gpu, spec.block_size, spec.dtype, spec.group_size, shapes)
    if native is None:
        yield Finding(PREDICTION, Reason.OPERATING_POINT, f"no launches are known of point {frozen.point} on {gpu}")
        return
    controls = [_control(study, native["w13"][0])] if frozen.point == "published" else []
    for what, stated, found in (
        ("launches", frozen.launches, {gemm: launch for gemm, (launch, _) in native.items()}),
        ("launch_status", frozen.launch_status, {gemm: status for gemm, (_, status) in native.items()}),
        ("architecture", frozen.architecture, architecture_of(frozen.lane, environment)),
        ("controls", frozen.controls, controls),
    ):
        if stated != found:
            detail = f"{what}: {stated}; point {frozen.point} on {gpu or frozen.lane} has {found}"
            yield Finding(PREDICTION, Reason.OPERATING_POINT, detail)


def _control(study: Study, launch: Launch) -> Control:
    """The superseded prediction of the study, which looked single-slice with thread_k and thread_n swapped."""
    thread_k, thread_n, _ = launch
    right, swapped = (thread_k, thread_n, SUPERSEDED_GRID), (thread_n, thread_k, SUPERSEDED_GRID)
    blocks = int(study.own["H0"].expert_ids.size)
    split, claimed = (sum(len(s) > 1 for s in slices_of(study, "w13", blocks, at)) for at in (right, swapped))
    return Control(
        name=f"transposed_grid_{SUPERSEDED_GRID}",
        launch=right,
        claimed_single_slice=not claimed,
        single_slice=not split,
        split_tiles=split,
    )


def check_fields(study: Study) -> Iterator[Finding]:
    """What plans and launches give besides rows; call it on a consistent prediction."""
    frozen, arms = study.prediction, study.arms
    owners = {arm: plan.owners() for arm, plan in arms.items()}
    plans = len({plan.fingerprint for plan in study.own.values()})
    if frozen.informative != (plans > 1):
        detail = f"informative is {frozen.informative}, the histories have {plans} plan{'s' if plans > 1 else ''}"
        yield Finding(PREDICTION, Reason.PREDICTION_FIELD, detail)
    for arm in frozen.arms:
        at = arm.cell, arm.history
        split = {gemm: _split_blocks(study, gemm, arm.cell) for gemm in GEMMS}
        routes = {gemm: sum(owner in blocks for owner in owners[at]) for gemm, blocks in split.items()}
        for what, stated, found in (
            ("single_slice", arm.single_slice, {gemm: not blocks for gemm, blocks in split.items()}),
            ("split_routes", arm.split_routes, routes),
        ):
            if stated != found:
                detail = f"{what} of {'/'.join(at)} is {stated}, the CUDA blocks give {found}"
                yield Finding(PREDICTION, Reason.PREDICTION_FIELD, detail)
    for pair in frozen.pairs:
        changed = [r for r, (a, b) in enumerate(zip(owners[pair.first], owners[pair.second], strict=True)) if a != b]
        if pair.changed_memberships != changed:
            detail = f"{pair.name}: {len(pair.changed_memberships)} changed memberships, by the plans {len(changed)}"
            yield Finding(PREDICTION, Reason.PREDICTION_FIELD, detail)


def _split_blocks(study: Study, gemm: str, cell: str) -> set[int]:
    """The MoE blocks of which a GEMM cuts a tile in the launch of a cell."""
    blocks = int(study.own["H0"].expert_ids.size)
    tiles = slices_of(study, gemm, blocks, study.launch(cell, gemm))
    return {tile * blocks // len(tiles) for tile, pieces in enumerate(tiles) if len(pieces) > 1}
