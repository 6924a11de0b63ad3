# SPDX-License-Identifier: Apache-2.0
"""Study A's figures, each from what the workflow made: partition, differences, trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from routeblock.declared import by_name
from routeblock.errors import InputError
from routeblock.evidence.record import RECORD, TENSORS
from routeblock.figure_style import Drawn, Given, TableFigure, read_document, read_table
from routeblock.moe.launches import Launch
from routeblock.route_block.facts import HISTORIES
from routeblock.route_block.figures import differences as figure_differences
from routeblock.route_block.figures import partition as figure_partition
from routeblock.route_block.figures import trajectories as figure_trajectories
from routeblock.route_block.figures.differences import tensors_of
from routeblock.route_block.figures.partition import Cut, Plans
from routeblock.route_block.fixtures.fixture import PLANS, SPEC, TENSOR_FILES, captured_plans, load_fixture, pairs_of
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.paths import FIXTURE, RUN, STUDY, Source, Studies
from routeblock.route_block.prediction.predict import CAPTURED
from routeblock.route_block.prediction.predict import FORMAT as PREDICTION
from routeblock.route_block.scorer.score import FORMAT as SCORE

_PREDICTED = ("fixture", "point", "plan_source", "launches", "full_k_grid", "exchange", "arms")
_SCORED = ("fixture", "lane", "point", "plan_source", "status", "arms", "pairs", "relations")


Read = Callable[[Given], tuple[Callable[[], Figure], list[Path]]]


@dataclass(frozen=True)
class DocumentFigure(Drawn):
    """A figure of documents: what reads them, and where they lie."""

    reader: Read
    sources: tuple[Source, ...]

    @property
    def made_by(self) -> Read:
        """The function that reads the documents."""
        return self.reader

    def read(self, given: Given) -> tuple[Callable[[], Figure], list[Path]]:
        """From its documents."""
        return self.reader(given)


def partition(given: Given) -> tuple[Callable[[], Figure], list[Path]]:
    """Which tiles of both GEMMs are direct and which are split, and where do the exchanged routes stand?

    Which tiles of each GEMM keep all of K in one CUDA block and which are cut into slices that are added
    afterwards: one square per MoE block and N-tile, at the study's native grid and at the grid of cell ``full_k``.
    Marks show the blocks in which the exchanged routes stand under H0 and H1. **Computed** from the plans and
    launches of the frozen prediction, before any arithmetic; nothing here was measured.
    """
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
    """Which elements differ between the histories?

    Every element that differs in at least one bit between H0 and H1, by surface and row: rows are routes, for
    ``final`` tokens; the horizontal axis is the column of the element. Rows that the prediction allows to differ
    have a line, whether or not a bit differs on them; the number is how many elements do. The arms are ``native``,
    or ``replay`` where native alignment did not repeat itself. **Modelled** on ``twin-ampere``, **computed** on
    ``twin-hopper``, **recorded** from **observed** kernels on ``recorded-h200``. Published counts are of another
    checkpoint and not comparable.
    """
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
                way_out="see what routeblock study-a score says of it",
            )
        used += [source, *tensors_of(source, score["relations"][0]["reference"])]
        studies.append(figure_differences.read(score, source, counted))
    return lambda: figure_differences.draw(studies), used


# Replay stands for native where a GPU's own alignment did not repeat itself; the score says which it was.
_COMPARED = [RUN.replace("{cell}", cell).replace("{history}", h) for cell in ("native", "replay") for h in HISTORIES]

FIGURES: dict[str, DocumentFigure | TableFigure] = by_name(
    DocumentFigure(
        "partition",
        "Partition: tiles of both GEMMs by class",
        "Maps of MoE blocks against N-tiles for both GEMMs at two grids: which tiles are computed whole and which "
        "are split along K, with the blocks of the exchanged routes marked. Table geometry has the counts.",
        partition,
        (
            Source((f"{STUDY}/prediction.json",)),
            Source((f"{STUDY}/{PLANS}",), Studies.CAPTURED, option=""),
            Source(tuple(f"{FIXTURE}/{name}" for name in (SPEC, *TENSOR_FILES)), option="fixture", folder=True),
        ),
    ),
    TableFigure(
        "trajectories",
        "Trajectories: which cells and histories share bits",
        "For every study, cells and histories against surfaces: which results have equal bits. Table trajectories "
        "has the digests.",
        figure_trajectories.COLUMNS,
        figure_trajectories.draw,
    ),
    DocumentFigure(
        "differences",
        "Differences: elements that differ between H0 and H1",
        "For every study and surface, where in the rows of the routes elements differ between the two histories. "
        "Table differences has the counts.",
        differences,
        (
            Source((f"{STUDY}/score.json",)),
            Source(("results/tables/differences.parquet",), Studies.FIXTURE, option="table"),
            Source(tuple(f"{run}/{TENSORS}".replace("{n}", "1") for run in _COMPARED), Studies.RUN_HERE, option=""),
            Source(tuple(f"{run}/{RECORD}".replace("{n}", "1") for run in _COMPARED), Studies.RECORDED, option=""),
        ),
    ),
)
