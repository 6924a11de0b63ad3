# SPDX-License-Identifier: Apache-2.0
"""Targets of study A: which studies there are, where their files lie, what tables and figures are made from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from routeblock.config import Config, FixtureName, Lane, PlanSource
from routeblock.figure_style import TableFigure
from routeblock.route_block import gpu_tables, tables
from routeblock.route_block.facts import CELLS, HISTORIES, gpu_of, position
from routeblock.route_block.figures.draw import FIGURES
from routeblock.route_block.paths import Source, Studies
from routeblock.target import Given, Target, from_tables

CATEGORY = "Study A: route blocks"
PUBLISHED = "fixtures/published/route_block.json"
TABLES = tables.TABLES | gpu_tables.TABLES
# Committed evidence from a GPU, by lane; a study there has as many replicates as were recorded.
EVIDENCE = {str(Lane.RECORDED_H200): "fixtures/recorded/h200-vllm0.24.0"}
RECORDED_FIXTURE = FixtureName.PUBLISHED_GEOMETRY
Place = dict[str, str]


def recorded(evidence: Path) -> dict[str, int]:
    """The groups of committed evidence and the replicates that each has; none where there is no evidence."""
    if not (evidence / "evidence.json").is_file():
        return {}
    groups = json.loads((evidence / "evidence.json").read_bytes())["groups"]
    return {name: facts["runs"] // (len(CELLS) * len(HISTORIES)) for name, facts in groups.items()}


class StudyA:
    """The studies that config.yaml asks for: each a fixture on a lane, at a point, with plans from one source.

    Of recorded lanes these are all that was recorded, on its own fixture.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fixture = str(config.fixture.name)
        self.lanes = [str(lane) for lane in config.lanes]
        self.order = [(str(point), str(source)) for point in config.points for source in config.plan_source]
        self.recorded = {lane: recorded(Path(folder)) for lane, folder in EVIDENCE.items()}
        self.run_here = [lane for lane in self.lanes if lane not in EVIDENCE]
        self.on_gpu = [lane for lane in self.lanes if not lane.startswith("twin-")]
        self.places = [self._asked(lane, *study) for lane in self.run_here for study in self.order]
        for lane in self.lanes:
            groups = (group.split(".") for group, count in self.recorded.get(lane, {}).items() if count)
            self.places += [
                {"fixture": str(RECORDED_FIXTURE), "lane": lane, "point": point, "plan_source": source}
                for point, source in groups
            ]

    def _asked(self, lane: str, point: str, source: str) -> Place:
        return {"fixture": self.fixture, "lane": lane, "point": point, "plan_source": source}

    def of(self, which: Studies) -> list[Place]:
        """Some of the studies."""
        if which is Studies.FIXTURE:
            return [{"fixture": self.fixture}]
        if which is Studies.VERSIONS:
            return [{}] if versions() else []
        if which is Studies.NATIVE:
            return [{}] if Lane.RECORDED_H200 in self.config.lanes else []
        if which is Studies.CAPTURED:
            return [place for place in self.places if place["plan_source"] == PlanSource.CAPTURED]
        lanes: Mapping[Studies, Iterable[str]] = {
            Studies.ALL: self.lanes,
            Studies.ON_GPU: self.on_gpu,
            Studies.RUN_HERE: self.run_here,
            Studies.RECORDED: EVIDENCE,
        }
        return [place for place in self.places if place["lane"] in lanes[which]]

    def each(self, *patterns: str, of: Studies = Studies.ALL) -> list[str]:
        """The file of each study, lane or fixture that a pattern names, once."""
        return list(dict.fromkeys(pattern.format(**place) for pattern in patterns for place in self.of(of)))

    def given(self, source: Source) -> Given:
        """The files that a source stands for."""
        return Given(source.option, tuple(self.each(*source.paths, of=source.of)), source.folder)

    def tables(self) -> list[Target]:
        """Every table that these studies can fill: some need a GPU's studies or recorded versions."""
        published = Given("published", (PUBLISHED,))
        made = [
            Target(t, "study-a table", CATEGORY, (self.given(t.made_from.source), published)) for t in TABLES.values()
        ]
        return [target for target in made if target.given[0].files]

    def figures(self) -> list[Target]:
        """Every figure."""
        made = [
            *from_tables([f for f in FIGURES.values() if isinstance(f, TableFigure)], "workflow figure", CATEGORY),
            *(
                Target(f, "workflow figure", CATEGORY, tuple(map(self.given, f.sources)))
                for f in FIGURES.values()
                if not isinstance(f, TableFigure)
            ),
        ]
        return sorted(made, key=lambda target: list(FIGURES).index(target.name))

    def replicates(self, place: Mapping[str, str]) -> int:
        """How many processes each cell and history of a study has: those asked for, or those recorded."""
        groups = self.recorded.get(place["lane"])
        if groups is None:
            return self.config.replicates
        return groups.get(f"{place['point']}.{place['plan_source']}", 1)

    def start_order(self, place: Mapping[str, str], cell: str, history: str, n: int) -> int:
        """A priority: higher for what starts earlier.

        Study by study; in each the GPUs in turn, and on each GPU the order of the study.
        """
        study = self.order.index((place["point"], place["plan_source"]))
        gpus, one = self.config.cuda.gpus, len(CELLS) * len(HISTORIES)
        before = (n - 1) // gpus * one + position(cell, history, n) % one
        return (len(self.order) - study) * (self.config.replicates + 1) * one * gpus - (before * gpus + gpu_of(n, gpus))


def versions() -> list[str]:
    """The recorded results of several versions of vLLM's extension."""
    return [path.as_posix() for path in sorted(Path(EVIDENCE[Lane.RECORDED_H200], "versions").glob("*.json"))]
