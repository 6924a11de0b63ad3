# SPDX-License-Identifier: Apache-2.0
"""What stands where in the report: chapters, their figures and tables, and which rows of a long table come first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from routeblock.alignment_cost import figures as cost_figures
from routeblock.alignment_cost import tables as cost
from routeblock.figure_style import TableFigure
from routeblock.grouped_schedule import figures as grouped_figures
from routeblock.grouped_schedule import tables as grouped
from routeblock.q6k_dispatch import tables as fast_paths
from routeblock.route_block import gpu_tables as on_gpus
from routeblock.route_block import tables as study_a
from routeblock.route_block.figures import draw
from routeblock.route_block.figures.draw import DocumentFigure
from routeblock.serving import figures as serving_figures
from routeblock.serving import tables as serving
from routeblock.tables import Table


@dataclass(frozen=True)
class Chapter:
    """A part of the report: its figures and tables in the order of reading."""

    anchor: str
    title: str
    lead: str
    figures: tuple[DocumentFigure | TableFigure, ...]
    tables: tuple[Table[Any], ...]


CHAPTERS = (
    Chapter(
        "study-a",
        "Study A: does the block of a route decide the bits?",
        "A layer, its inputs, its routing and its weights are held fixed; only the 8-row block that a route lands in "
        "is changed, by injected plans. Every cell runs in processes of its own, under two histories, and a scorer "
        "that trusts no run compares raw bytes.",
        tuple(draw.FIGURES.values()),
        tuple(study_a.TABLES.values()),
    ),
    Chapter(
        "on-gpus",
        "Study A on GPUs: the twin, native alignment, versions",
        "What only a GPU can say: whether the CPU twin gives the kernel's bits, how many plans and outputs the native "
        "alignment gives, whether the grid probe changes anything, and what other versions of vLLM do.",
        (),
        tuple(on_gpus.TABLES.values()),
    ),
    Chapter(
        "cost",
        "What canonical alignment costs",
        "Times are ratios within one run, with the margins of a protocol that was committed before the recording.",
        tuple(cost_figures.FIGURES.values()),
        tuple(cost.TABLES.values()),
    ),
    Chapter(
        "serving",
        "In the engine: vLLM itself",
        "The same prompts in the same batch, served again and again by vLLM, unpatched and with canonical alignment; a "
        "model of random weights, so that completions diverge is a finding and how often is not.",
        tuple(serving_figures.FIGURES.values()),
        tuple(serving.TABLES.values()),
    ),
    Chapter(
        "study-b",
        "Study B: does a grouped schedule pay?",
        "Expert jobs of a Q6_K x Q8_1 layer, run in an order that groups them by expert in bands of rows. Every "
        "order must give the same bits, which table counts tells; the question is time, with the grouping charged.",
        tuple(grouped_figures.FIGURES.values()),
        tuple(grouped.TABLES.values()),
    ),
    Chapter(
        "fast-paths",
        "Beyond study B: fast paths, their peers, and what binds",
        "Kernels for the same expert jobs that read each expert's weights once, timed beside vLLM's plug-in and "
        "llama.cpp in one run, every side charged with its own quantisation and grouping.",
        (),
        tuple(fast_paths.TABLES.values()),
    ),
)
TABLES = {table.name: table for chapter in CHAPTERS for table in chapter.tables}
FIGURES = {figure.name: figure for chapter in CHAPTERS for figure in chapter.figures}

# A table of up to so many rows is shown whole.
WHOLE = 16


def formats(table: str) -> dict[str, str]:
    """How the values of a table's columns are shown; a table that is not known here has none."""
    return {column.name: column.format for column in TABLES[table].columns} if table in TABLES else {}


@dataclass(frozen=True)
class Tone:
    """How a word of a verdict is set, besides being written out."""

    words: frozenset[str] = field(default_factory=frozenset)
    name: str = ""


TONES = (
    Tone(
        frozenset({"holds", "reproduced", "holds on another fixture", "equal", "clean", "non-inferior", "faster"}),
        "good",
    ),
    Tone(
        frozenset({"fails", "differs", "different", "does not hold on this fixture", "inferior", "slower", "found"}),
        "bad",
    ),
    Tone(
        frozenset(
            {"not informative", "not comparable", "form not published", "not published", "undecided", "refused"}
            | {"by construction", "by the fixture's design"}
        ),
        "mute",
    ),
    Tone(frozenset({"inconsistent in source", "too few accepted", "exploratory"}), "warn"),
)
# Only in these columns is a word a verdict.
VERDICTS = frozenset({"status", "comparison", "verdict", "sort_verdict", "outcome"})


def tone(column: str, word: str) -> str:
    """The tone of a word in a column, empty for none."""
    return next((t.name for t in TONES if column in VERDICTS and word in t.words), "")
