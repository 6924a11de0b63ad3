# SPDX-License-Identifier: Apache-2.0
"""What sound runs say: bit comparisons of all pairs of arms, the frozen prediction held against them, the relations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.route_block.scorer.audit import Audited, by_arm, load_surfaces
from routeblock.route_block.scorer.inputs import SURFACES, Arm, Study, bits
from routeblock.route_block.scorer.membership import HISTORIES

CLAIMED_AT = ("published", "auto")  # operating points for which the study's relations are claimed on all surfaces


class Status(StrEnum):
    """What became of a relation."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_INFORMATIVE = "not informative"


class Basis(StrEnum):
    """On what a relation rests."""

    BY_CONSTRUCTION = "by construction"
    """The arms are one plan on one grid, injected or replayed by a twin: nothing but determinism was tested."""
    COMPUTED = "computed"
    OBSERVED = "observed"


@dataclass(frozen=True)
class Judged:
    """An arm with its one outcome, or, for `native` on a GPU, with what its replicates gave."""

    arm: Arm
    runs: Sequence[Audited]
    surfaces: Mapping[str, NDArray[Any]]
    """Of the first replicate."""

    @property
    def is_reproducible(self) -> bool:
        """Whether all replicates have one outcome."""
        return len({run.outcome for run in self.runs}) == 1

    @property
    def first(self) -> Audited:
        """The replicate whose surfaces stand here."""
        return self.runs[0]

    def describe(self) -> dict[str, Any]:
        """The arm's entry in score.json."""
        outcomes = Counter(run.outcome for run in self.runs)
        record = self.first.record
        return {
            "cell": self.arm[0],
            "history": self.arm[1],
            "fingerprint": self.first.plan.fingerprint,
            "launches": {g: [m.thread_k, m.thread_n, m.launched] for g, m in sorted(record.grid.items())},
            "surfaces": dict(zip(SURFACES, self.first.outcome, strict=False)),
            "reproducible": self.is_reproducible,
            "outcomes": [
                {
                    "replicates": [run.key[2] for run in self.runs if run.outcome == outcome],
                    "surfaces": dict(zip(SURFACES, outcome, strict=False)),
                    "fingerprint": next(run.plan.fingerprint for run in self.runs if run.outcome == outcome),
                }
                for outcome in outcomes
            ],
        }


def judge_arms(runs: Path, audited: Sequence[Audited]) -> dict[Arm, Judged]:
    """Every arm with the raw surfaces of its first replicate."""
    return {arm: Judged(arm, group, load_surfaces(runs, group[0])) for arm, group in by_arm(audited).items()}


def compare(first: NDArray[Any], second: NDArray[Any]) -> dict[str, Any]:
    """How two surfaces differ in bits: elements, rows (routes, or tokens for `final`), max absolute difference."""
    differ = bits(first) != bits(second)
    a, b = first[differ].astype(np.float64), second[differ].astype(np.float64)
    return {
        "elements": int(differ.sum()),
        "rows": [int(r) for r in np.flatnonzero(differ.any(axis=1))],
        "max_abs_difference": float(np.abs(a - b).max()) if a.size else 0.0,
    }


def judge_pairs(study: Study, arms: Mapping[Arm, Judged]) -> list[dict[str, Any]]:
    """Every predicted pair beside what its raw tensors show, route by route.

    A pair with a `native` that used another plan than the predicted one, or more than one, is not judged (GPU only).
    """
    predicted = {(a.cell, a.history): a.fingerprint for a in study.prediction.arms}
    judged = []
    for pair in study.prediction.pairs:
        a, b = arms[pair.first], arms[pair.second]
        off = [
            "/".join(arm.arm)
            for arm in (a, b)
            if not arm.is_reproducible or arm.first.plan.fingerprint != predicted[arm.arm]
        ]
        found = {s: compare(a.surfaces[s], b.surfaces[s]) for s in SURFACES}
        outside = {s: sorted(set(found[s]["rows"]) - set(pair.rows[s])) for s in SURFACES}
        judged.append(
            {
                "first": list(pair.first),
                "second": list(pair.second),
                "must_coincide": pair.must_coincide,
                "predicted_rows": {s: pair.rows[s] for s in SURFACES},
                "found": found,
                "outside": {s: rows for s, rows in outside.items() if rows},
                "not_judged": f"{' and '.join(off)} used another plan than predicted" if off else None,
                "right": None if off else not any(outside.values()),
            }
        )
    return judged


@dataclass(frozen=True)
class Clause:
    """One comparison that a relation makes: two arms are equal, or differ, on some surfaces."""

    first: Arm
    second: Arm
    equal: bool
    surfaces: tuple[str, ...] = SURFACES


@dataclass(frozen=True)
class Relation:
    """One of the seven relations: its clauses for a reference cell, and what it needs to say anything."""

    number: int
    claim: str
    cells: tuple[str, ...]
    clauses: Callable[[Case], Iterator[Clause]]
    needs_two_plans: bool = False


@dataclass(frozen=True)
class Case:
    """What the clauses may look at: the reference cell of each history, and surfaces that must coincide."""

    study: Study
    reference: str
    same: Callable[[Arm, Arm], tuple[str, ...]] = field(repr=False)


def _other(history: str) -> str:
    return HISTORIES[1 - HISTORIES.index(history)]


def _differ(case: Case) -> Iterator[Clause]:
    yield Clause((case.reference, "H0"), (case.reference, "H1"), equal=False)


def _is_native(cell: str) -> Callable[[Case], Iterator[Clause]]:
    def clauses(case: Case) -> Iterator[Clause]:
        for history in HISTORIES:
            yield Clause((cell, history), (case.reference, history), equal=True)

    return clauses


def _is_other_native(cell: str) -> Callable[[Case], Iterator[Clause]]:
    def clauses(case: Case) -> Iterator[Clause]:
        for history in HISTORIES:
            yield Clause((cell, history), (case.reference, _other(history)), equal=True)

    return clauses


def _complete_opposite(case: Case) -> Iterator[Clause]:
    for clause in _is_other_native("swap_across")(case):
        # Stored plans differ in classes by this pair alone; captured ones need not: then the prediction decides.
        everywhere = case.study.prediction.point in CLAIMED_AT and case.study.prediction.plan_source == "stored"
        yield Clause(
            clause.first, clause.second, True, SURFACES if everywhere else case.same(clause.first, clause.second)
        )


def _same_at_full_k(case: Case) -> Iterator[Clause]:
    first, second = ("full_k", "H0"), ("full_k", "H1")
    yield Clause(first, second, True, ("w13",))
    if predicted := tuple(s for s in case.same(first, second) if s != "w13"):
        yield Clause(first, second, True, predicted)


def _third_trajectory(case: Case) -> Iterator[Clause]:
    yield Clause(("canonical", "H0"), ("canonical", "H1"), equal=True)
    for history in HISTORIES:
        yield Clause(("canonical", "H0"), (case.reference, history), equal=False, surfaces=("final",))


RELATIONS = (
    Relation(1, "native H0 and H1 differ on all four surfaces", (), _differ, needs_two_plans=True),
    Relation(2, "replay equals native", ("replay",), _is_native("replay")),
    Relation(3, "cross equals the other history's native", ("cross",), _is_other_native("cross"), needs_two_plans=True),
    Relation(4, "swap_within equals native", ("swap_within",), _is_native("swap_within")),
    Relation(
        5,
        "swap_across equals the other history's native",
        ("swap_across",),
        _complete_opposite,
        needs_two_plans=True,
    ),
    Relation(
        6,
        "full_k: H0 equals H1 at W13, and on every other surface that the prediction names",
        ("full_k",),
        _same_at_full_k,
        needs_two_plans=True,
    ),
    Relation(7, "canonical: H0 equals H1, its final differs from both natives", ("canonical",), _third_trajectory),
)


def judge_relations(study: Study, arms: Mapping[Arm, Judged]) -> list[dict[str, Any]]:
    """The seven relations, each with its status, what it rests on, and every clause with the surfaces found equal.

    Where a GPU's own alignment did not give the stored plans or did not repeat itself, `replay` stands for `native`:
    the injected cells do not depend on it.
    """
    natives = [arms["native", h] for h in HISTORIES]
    repeated = all(n.is_reproducible for n in natives)
    stored = all(n.first.plan.fingerprint == study.own[n.arm[1]].fingerprint for n in natives)
    reference = "native" if repeated and stored else "replay"
    note = ""
    if not repeated:
        note = "native is not reproducible on this machine; replay stands for it"
    elif not stored:
        note = "native used other plans than the injected ones; replay stands for it"
    must = {frozenset((p.first, p.second)): tuple(p.must_coincide) for p in study.prediction.pairs}
    case = Case(study, reference, lambda a, b: must[frozenset((a, b))])
    return [_judge(relation, case, arms, note) for relation in RELATIONS]


def _of_injected(claim: str) -> str:
    """The claim as it is tested where `replay` stands for `native`: of the injected plans, not of the native runs."""
    return "injected plans: " + claim.replace("natives", "replays").replace("native", "replay")


def _judge(relation: Relation, case: Case, arms: Mapping[Arm, Judged], note: str) -> dict[str, Any]:
    study = case.study
    missing = [cell for cell in relation.cells if (cell, "H0") not in arms]
    one_plan = study.own["H0"].fingerprint == study.own["H1"].fingerprint
    why = ""
    if missing:
        why = study.prediction.exchange.why or f"there is no pair for {missing[0]}"
    elif one_plan and relation.needs_two_plans:
        why = "both histories have one plan"
    elif relation.cells == (case.reference,):
        why = note
    elif relation.cells and relation.needs_two_plans and _one_trajectory(case.reference, arms):
        why = "both histories have one trajectory here: the claim could not fail"
    elif any(not c.surfaces for c in relation.clauses(case)):
        why = "by the prediction other routes change class too, so the exchange need not carry the trajectory over"
    elif any(not c.equal and set(c.surfaces) & set(case.same(c.first, c.second)) for c in relation.clauses(case)):
        why = study.spec.exchange.why or "by the prediction these arms cannot differ on every surface"
    clauses = [] if missing else [_found(clause, arms) for clause in relation.clauses(case)]
    holds = all(clause["holds"] for clause in clauses)
    # A GPU's own alignment was injected by nobody: equal to `native` is something observed.
    injected = study.is_twin or "native" not in {arm[0] for c in clauses for arm in (c["first"], c["second"])}
    constructed = injected and bool(clauses) and all(clause["one_computation"] for clause in clauses)
    about = _about_w2(study) if relation.number == 6 and not missing else ""
    basis = Basis.BY_CONSTRUCTION if constructed else Basis.COMPUTED if study.is_twin else Basis.OBSERVED
    return {
        "number": relation.number,
        "claim": relation.claim if case.reference == "native" else _of_injected(relation.claim),
        "status": str(Status.NOT_INFORMATIVE if why else Status.HOLDS if holds else Status.FAILS),
        "basis": str(basis),
        "reference": case.reference,
        "note": "; ".join(filter(None, (why or note, about))),
        "clauses": clauses,
    }


def _about_w2(study: Study) -> str:
    """What a reader of relation 6 must know of the second GEMM."""
    status = study.prediction.launch_status.get("w2", "not stated")
    w2 = f"full_k puts W2 on {study.prediction.full_k_grid} blocks too; W2's native launch is {status}"
    return f"published for W13 alone; {w2}"


def _one_trajectory(reference: str, arms: Mapping[Arm, Judged]) -> bool:
    first, second = (arms[reference, history].surfaces for history in HISTORIES)
    return all(np.array_equal(bits(first[s]), bits(second[s])) for s in SURFACES)


def _found(clause: Clause, arms: Mapping[Arm, Judged]) -> dict[str, Any]:
    a, b = arms[clause.first], arms[clause.second]
    equal = [s for s in clause.surfaces if np.array_equal(bits(a.surfaces[s]), bits(b.surfaces[s]))]
    return {
        "first": list(clause.first),
        "second": list(clause.second),
        "claim": "equal" if clause.equal else "differ",
        "surfaces": list(clause.surfaces),
        "equal": equal,
        "holds": len(equal) == (len(clause.surfaces) if clause.equal else 0),
        "one_computation": clause.equal
        and a.first.plan.digests == b.first.plan.digests
        and a.first.record.grid == b.first.record.grid,
    }
