# SPDX-License-Identifier: Apache-2.0
"""The three questions about a fixture, from files to an answer: `explain`, `witness` and `identify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from routeblock.diagnose import explain as explaining
from routeblock.diagnose import identify as identifying
from routeblock.diagnose import witness as witnessing
from routeblock.diagnose.answer import Answer, Fact, Verdict
from routeblock.diagnose.fixture_runs import Layer, common_rows, named_run, parse_element
from routeblock.diagnose.layer_run import GEMMS
from routeblock.errors import InputError
from routeblock.evidence.tensors import load_tensors
from routeblock.moe.sources import Source
from routeblock.route_block.fixtures.fixture import captured_plans
from routeblock.twin.layer import SURFACES
from routeblock.twin.tensor_core import architecture_of


def explain(layer: Layer, first: str, second: str, element: str | None, surface: str | None) -> Answer:
    """Why an element differs between two runs; without one, the first that differs (on `surface`, if named)."""
    sides = named_run(layer, first), named_run(layer, second)
    if sides[0].run.name == sides[1].run.name:
        sides = sides[0], replace(sides[1], run=replace(sides[1].run, name=f"{sides[1].run.name} again"))
    runs = sides[0].run, sides[1].run
    if element is not None:
        name, row, column = parse_element(element)
        rows = sides[0].row(name, row), sides[1].row(name, row)
    else:
        found = explaining.first_difference(runs, lambda s: common_rows(s, *sides), surface)
        if found is None:
            return _alike(sides[0].facts + sides[1].facts, runs, surface)
        name, rows, column = found
    return explaining.answer(explaining.explain(runs, name, rows, column), sides[0].facts + sides[1].facts)


def _alike(facts: Sequence[Fact], runs: explaining.Runs, surface: str | None) -> Answer:
    looked = SURFACES if surface is None else (surface,)
    return Answer(
        "explain",
        Verdict.CANNOT_DIFFER,
        f"no element of {', '.join(looked)} differs between {runs[0].name} and {runs[1].name}",
        "both runs were computed by the twin and compared on bits",
        "nothing to cure",
        facts,
        {"differs": False, "surfaces": list(looked), "runs": [explaining.run_document(run) for run in runs]},
    )


def witness(layer: Layer, run: str, surface: str, element: str | None) -> Answer:
    """The smallest change of the run's plan that changes a surface or element of it."""
    named = named_run(layer, run)
    at = None
    if element is not None:
        surface, row, column = parse_element(element)
        at = named.row(surface, row), column
    found = witnessing.witness(named.run.inputs, named.run.plan, named.run.settings, surface, at)
    document = {"run": named.run.name, **witnessing.document(found, named.run.plan)}
    what = surface if at is None else f"{surface}[{at[0]}, {at[1]}]"
    visited = f"{found.classes} class{'' if found.classes == 1 else 'es'} of routes visited" + (
        f", {found.combinations} combinations of them" if found.combinations else ""
    )
    counts = (
        f"{found.exchanges} exchanges: {found.class_changing} give a route another class,"
        f" {found.changing} change {what}"
    )
    text = [counts, visited, f"minimality: {witnessing.minimality(found)}"]
    if found.pairs:
        pairs = " and ".join(f"routes {a} and {b}" for a, b in found.pairs)
        text += [f"elements that change: {', '.join(f'{n} {c}' for n, c in found.changed.items())}"]
        return Answer(
            "witness", Verdict.CAN_DIFFER, f"exchanging {pairs} changes {what}",
            "the exchange puts them into blocks whose tiles are cut elsewhere; recomputed over the whole layer",
            "canonical order, or a grid at which every tile is one slice", named.facts, document, text,
            _status(named.run.settings["w13"].architecture),
        )  # fmt: skip
    verdict = Verdict.CANNOT_DIFFER if found.complete else Verdict.CANNOT_SAY
    sentence = f"no legal plan changes {what}" if found.complete else f"no single exchange changes {what}"
    return Answer(
        "witness", verdict, sentence, f"proof by exhaustion: {visited}" if found.complete else counts,
        "nothing to cure" if found.complete else "name one element with --element", named.facts, document, text,
        _status(named.run.settings["w13"].architecture),
    )  # fmt: skip


def _status(architecture: str) -> str:
    return f"{architecture}: {architecture_of(architecture).status}"


def identify(
    layer: Layer,
    outputs: Path,
    surface: str,
    plan_names: Sequence[str],
    plans_file: Path | None,
    grids: Sequence[int],
    architectures: Sequence[str],
    progress: Callable[[float], None] | None = None,
) -> Answer:
    """Which launches and plans reproduce a surface of a file of tensors (w13, activation, w2, final)."""
    tensors = load_tensors(outputs)
    if surface not in tensors:
        raise InputError(
            f"it holds {', '.join(sorted(tensors)) or 'nothing'}",
            where=str(outputs),
            limit=f"the tensor {surface} is needed",
            way_out="name a surface that it holds with --surface",
        )
    known = dict(layer.fixture.plans)
    if plans_file is not None:
        known |= {f"captured {name}": plan for name, plan in captured_plans(layer.fixture, plans_file).items()}
    known["canonical"] = named_run(layer, "plan=canonical").run.plan
    unknown = [name for name in plan_names if name not in known]
    if unknown:
        raise InputError(
            f"plan {unknown[0]!r}", where="--plan", limit=", ".join(known), way_out="name plans that exist"
        )
    chosen = {name: known[name] for name in (plan_names or known)}
    plans = {n: p if n == "canonical" else layer.compact(p) for n, p in chosen.items()}
    given: dict[str, Any] = {name: tensors[name] for name in ("w13", "activation") if name in tensors}
    used = _given(surface, given)
    gemms = ("w13",) if surface in ("w13", "activation") else ("w2",) if used else GEMMS
    shapes = [layer.fixture.shape(gemm) for gemm in gemms]
    settings = identifying.settings(
        layer.fixture.spec["block_size"], shapes, tuple(sorted({*identifying.GRIDS, *grids})), architectures
    )
    candidates = [identifying.Candidate(plan, setting) for plan in plans for setting in settings]
    found = identifying.identify(layer.inputs, surface, tensors[surface], plans, candidates, used, progress)
    return _identified(found, candidates, surface, outputs, used, gemms)


def _given(surface: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The latest surface before the one asked for: W2 is computed from it."""
    if surface in ("w13", "activation"):
        return {}
    latest = next((name for name in ("activation", "w13") if name in tensors), None)
    return {latest: tensors[latest]} if latest else {}


def _identified(
    found: identifying.Identified,
    candidates: Sequence[identifying.Candidate],
    surface: str,
    outputs: Path,
    given: Mapping[str, Any],
    gemms: Sequence[str],
) -> Answer:
    excluded: dict[identifying.Contradiction, list[identifying.Candidate]] = {}
    for candidate, contradiction in found.excluded.items():
        excluded.setdefault(contradiction, []).append(candidate)
    document = {
        "surface": surface,
        "computed_from": sorted(given) or ["hidden"],
        "gemms": list(gemms),
        "candidates": len(candidates),
        "classes": found.classes,
        "rows_computed": found.rows_computed,
        "rows": found.rows,
        "reproduce": [c.document() for c in found.reproduce],
        "excluded": [
            {
                "row": c.row,
                "column": c.column,
                "given": f"0x{c.given:04x}",
                "computed": f"0x{c.computed:04x}",
                "candidates": [x.document() for x in those],
            }
            for c, those in sorted(excluded.items(), key=lambda item: (item[0].row, item[0].column, item[0].computed))
        ],
    }
    text = [
        f"{len(candidates)} candidates in {found.classes} classes; {found.rows_computed} rows computed"
        f" (brute force: {len(candidates) * found.rows})",
        *(["reproduce every element:"] if found.reproduce else []),
        *(f"  {line}" for line in _compact(found.reproduce)),
        "excluded, by the first element that contradicts them:",
        *(
            f"  {surface}[{c.row}, {c.column}] is 0x{c.given:04x}: {len(those)} give 0x{c.computed:04x},"
            f" such as {_words(those[0])}"
            for c, those in sorted(excluded.items(), key=lambda item: -len(item[1]))[:12]
        ),
        *([f"  and {len(excluded) - 12} more elements (all in the JSON)"] if len(excluded) > 12 else []),
    ]
    shared = "" if len(gemms) == 1 else "; one launch is taken for both GEMMs"
    facts = (Fact("outputs", str(outputs), Source.GIVEN, f"surface {surface}, from {', '.join(given) or 'hidden'}"),)
    if not found.reproduce:
        return Answer(
            "identify", Verdict.CANNOT_SAY, f"none of {len(candidates)} candidates gives {surface}",
            f"each is contradicted by an element{shared}", "name more grids (--grid), plans or architectures", facts,
            document, text,
        )  # fmt: skip
    return Answer(
        "identify", Verdict.FOUND,
        f"{len(found.reproduce)} of {len(candidates)} candidates give {surface}, bit for bit",
        f"every other one is contradicted by an element{shared}",
        "another surface, or another batch, may tell the remaining candidates apart" if len(found.reproduce) > 1
        else "nothing is left to tell apart", facts, document, text,
    )  # fmt: skip


def _words(candidate: identifying.Candidate) -> str:
    setting = candidate.setting
    launch = setting.launch
    return (
        f"({launch.thread_k}, {launch.thread_n}) grid {launch.grid}, {setting.architecture},"
        f" {'float32' if setting.fp32_reduce else 'dtype'} reduction{', full K' if setting.full_k else ''},"
        f" plan {candidate.plan}"
    )


def _compact(candidates: Sequence[identifying.Candidate]) -> list[str]:
    """Candidates that differ in their grids alone, in one line."""
    groups: dict[identifying.Candidate, list[int]] = {}
    for candidate in candidates:
        launch = candidate.setting.launch
        same = replace(candidate, setting=replace(candidate.setting, launch=launch._replace(grid=0)))
        groups.setdefault(same, []).append(launch.grid)
    return [
        _words(same).replace("grid 0", f"grid{'s' if len(g) > 1 else ''} {', '.join(map(str, g))}")
        for same, g in groups.items()
    ]
