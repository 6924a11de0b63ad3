# SPDX-License-Identifier: Apache-2.0
"""Study A's figures, each from what the workflow made: partition, differences, trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from routeblock import figure_style
from routeblock.errors import InputError
from routeblock.figure_style import TableFigure, read_document, read_table
from routeblock.moe.launches import Launch
from routeblock.route_block.figures import differences as figure_differences
from routeblock.route_block.figures import partition as figure_partition
from routeblock.route_block.figures import trajectories as figure_trajectories
from routeblock.route_block.figures.differences import tensors_of
from routeblock.route_block.figures.partition import Cut, Plans
from routeblock.route_block.fixtures.fixture import PLANS, SPEC, captured_plans, load_fixture, pairs_of
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.prediction.predict import CAPTURED
from routeblock.route_block.prediction.predict import FORMAT as PREDICTION
from routeblock.route_block.scorer.score import FORMAT as SCORE

_PREDICTED = ("fixture", "point", "plan_source", "launches", "full_k_grid", "exchange", "arms")
_SCORED = ("fixture", "lane", "point", "plan_source", "status", "arms", "pairs", "relations")


@dataclass(frozen=True)
class Given:
    """What a figure is made from: documents in the order of its panels, fixture folders, and the table beside."""

    documents: Sequence[Path]
    fixtures: Sequence[Path] = ()
    table: Path | None = None


@dataclass(frozen=True)
class DocumentFigure:
    """A figure of documents: its title, and what gives the drawing and every file it was made from."""

    title: str
    read: Callable[[Given], tuple[Callable[[], Figure], list[Path]]]


def partition(given: Given) -> tuple[Callable[[], Figure], list[Path]]:
    """From predictions and their fixtures; captured plans lie beside their prediction. Equal cuts are drawn once."""
    known = {f.digest: f for f in map(load_fixture, given.fixtures)}
    used = [*given.documents, *(path for f in given.fixtures for path in (f / SPEC, f / PLANS))]
    cuts: dict[tuple[object, ...], Cut] = {}
    for source in given.documents:
        told = read_document(source, PREDICTION, _PREDICTED)
        if (fixture := known.get(told["fixture"])) is None:
            raise InputError(
                f"it is of fixture {told['fixture'][:12]}",
                where=str(source),
                limit="a prediction of one of the fixtures given",
                way_out="name its folder with --fixture",
            )
        plans = fixture.plans
        if told["plan_source"] == CAPTURED:
            used.append(source.with_name(PLANS))
            plans = captured_plans(fixture, used[-1])
        launches = {g: Launch(*told["launches"][g]) for g in GEMMS}
        mine = Plans(told["plan_source"], plans, pairs_of(told["exchange"]))
        at = Cut(told["point"], fixture.spec, launches, told["full_k_grid"], [mine])
        figure_partition.check_split_routes(told, at, mine)
        key = (told["fixture"], told["point"], *launches.values(), told["full_k_grid"])
        before = cuts.get(key)
        if before is None:
            cuts[key] = at
        elif mine.source not in {p.source for p in before.used}:
            cuts[key] = replace(before, used=[*before.used, mine])
    return lambda: figure_partition.draw(list(cuts.values())), used


def differences(given: Given) -> tuple[Callable[[], Figure], list[Path]]:
    """From scores, the raw surfaces that they compared, and the table `differences`, which has to agree."""
    if given.table is None:
        raise InputError(
            "no table",
            where="figure differences",
            limit="it shows what the table counts",
            way_out="name it with --table",
        )
    counted = read_table(given.table, figure_differences.COLUMNS)
    used, studies = [given.table], []
    for source in given.documents:
        score = read_document(source, SCORE, _SCORED)
        if not score["relations"]:
            raise InputError(
                "these runs are not sound",
                where=str(source),
                limit="figures are made from evidence without a fault",
                way_out="see what routeblock score says of it",
            )
        used += [source, *tensors_of(source, score["relations"][0]["reference"])]
        studies.append(figure_differences.read(score, source, counted))
    return lambda: figure_differences.draw(studies), used


FIGURES: dict[str, DocumentFigure | TableFigure] = {
    "partition": DocumentFigure("Partition: tiles of both GEMMs by class", partition),
    "differences": DocumentFigure("Differences: elements that differ between H0 and H1", differences),
    "trajectories": TableFigure(
        "Trajectories: which cells and histories share bits", figure_trajectories.COLUMNS, figure_trajectories.draw
    ),
}


def write(name: str, given: Given, out: Path, *, code: str) -> list[Path]:
    """Write the figure `name` of `FIGURES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name, and for a document or a table that is not what it should be.
    """
    figure = figure_style.find(name, FIGURES)
    if isinstance(figure, TableFigure):
        return figure_style.write_from_table(name, {name: figure}, given.documents, out, code=code)
    draw, used = figure.read(given)
    return figure_style.write(name, figure.title, draw, out, inputs=used, code=code)
