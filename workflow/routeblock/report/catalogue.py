# SPDX-License-Identifier: Apache-2.0
"""What stands where in the report: chapters, their figures and tables, and which rows of a long table come first."""

from __future__ import annotations

from dataclasses import dataclass, field

from routeblock.alignment_cost import tables as alignment
from routeblock.grouped_schedule import tables as grouped
from routeblock.q6k_dispatch import tables as fast_paths
from routeblock.route_block import tables as route_block
from routeblock.tables import Column


@dataclass(frozen=True)
class Share:
    """The rows of a long table that are shown at once: those with these values, at most so many."""

    where: tuple[tuple[str, str], ...] = ()
    rows: int = 12


@dataclass(frozen=True)
class Chapter:
    """A part of the report: its figures and tables in the order of reading."""

    anchor: str
    title: str
    lead: str
    figures: tuple[str, ...]
    tables: tuple[str, ...]


CHAPTERS = (
    Chapter(
        "study-a",
        "Study A: does the block of a route decide the bits?",
        "A layer, its inputs, its routing and its weights are held fixed; only the 8-row block that a route lands in "
        "is changed, by injected plans. Every cell runs in processes of its own, under two histories, and a scorer "
        "that trusts no run compares raw bytes.",
        ("partition", "trajectories", "differences"),
        ("geometry", "studies", "relations", "trajectories", "differences", "mutations", "prediction"),
    ),
    Chapter(
        "on-gpus",
        "Study A on GPUs: the twin, native alignment, versions",
        "What only a GPU can say: whether the CPU twin gives the kernel's bits, how many plans and outputs the native "
        "alignment gives, whether the grid probe changes anything, and what other versions of vLLM do.",
        (),
        ("history", "repetition", "census", "agreement", "operator", "probe_control", "versions"),
    ),
    Chapter(
        "cost",
        "What canonical alignment costs",
        "Times are ratios within one run, with the margins of a protocol that was committed before the recording.",
        ("alignment_cost",),
        ("alignment_cost", "alignment_checks", "alignment_mutations"),
    ),
    Chapter(
        "study-b",
        "Study B: does a grouped schedule pay?",
        "Expert jobs of a Q6_K x Q8_1 layer, run in an order that groups them by expert in bands of rows. Every "
        "order must give the same bits, which table counts tells; the question is time, with the grouping charged.",
        ("confirmation", "discovery"),
        (
            "confirmation",
            "discovery",
            "beyond_study",
            "counts",
            "rejections",
            "positions",
            "cardinalities",
            "devices",
            "sanitizer",
            "grouped_mutations",
        ),
    ),
    Chapter(
        "fast-paths",
        "Beyond study B: fast paths, their peers, and what binds",
        "Kernels for the same expert jobs that read each expert's weights once, timed beside vLLM's plug-in and "
        "llama.cpp in one run, every side charged with its own quantisation and grouping.",
        (),
        ("peers", "counters", "batch_bits", "dispatch_checks", "dispatch_mutations"),
    ),
)
TABLES = tuple(name for chapter in CHAPTERS for name in chapter.tables)
FIGURES = tuple(name for chapter in CHAPTERS for name in chapter.figures)

# What a reader who does not see the drawing needs; its numbers stand in the tables of the same chapter.
FIGURE_ALT = {
    "partition": "Maps of MoE blocks against N-tiles for both GEMMs at two grids: which tiles are computed whole and "
    "which are split along K, with the blocks of the exchanged routes marked. Table geometry has the counts.",
    "trajectories": "For every study, cells and histories against surfaces: which results have equal bits. Table "
    "trajectories has the digests.",
    "differences": "For every study and surface, where in the rows of the routes elements differ between the two "
    "histories. Table differences has the counts.",
    "confirmation": "Forest plot of the change of time of band32 against the control on each device, with intervals, "
    "A/A floors and the published values. Table confirmation has the numbers.",
    "discovery": "Change of time of every schedule at every shape on each device. Table discovery has the numbers.",
    "alignment_cost": "Ratio of canonical to native alignment against the number of tokens, with intervals and floors. "
    "Table alignment_cost has the numbers.",
}

SHARES = {
    "discovery": Share((("schedule", "band32"), ("scope", "inclusive")), 40),
    "alignment_cost": Share((("role", "bound"), ("mode", "graph")), 32),
    "trajectories": Share(rows=14),
    "differences": Share((("quantity", "elements that differ"),), 32),
    "relations": Share(rows=14),
    "peers": Share(rows=22),
    "counters": Share(rows=24),
    "confirmation": Share((("scope", "inclusive"),), 12),
}
# A table of up to so many rows is shown whole.
WHOLE = 16

# Tables that a study may lack, why, and what makes them.
MISSING = {
    "prediction": ("200 random plans take minutes, so make study leaves them out", "make prediction"),
    "agreement": ("no lane of this study is on a GPU", "a lane recorded-h200 or cuda in config.yaml, then make study"),
    "census": ("no lane of this study is on a GPU", "a lane recorded-h200 or cuda in config.yaml, then make study"),
    "probe_control": (
        "no lane of this study is on a GPU",
        "a lane recorded-h200 or cuda in config.yaml, then make study",
    ),
    **dict.fromkeys(
        ("history", "repetition", "operator"),
        ("the lane recorded-h200 is not among the lanes", "a lane recorded-h200 in config.yaml, then make study"),
    ),
    "versions": ("no recorded evidence is in this checkout", "fixtures/recorded, then make study"),
}


def formats(table: str) -> dict[str, str]:
    """How the values of a table's columns are shown; a table that is not known here has none."""
    columns: tuple[Column, ...] = ()
    if table in route_block.TABLES:
        columns = route_block.TABLES[table].columns
    elif table in grouped.TABLES:
        columns = grouped.TABLES[table][1]
    elif table in alignment.TABLES:
        columns = alignment.TABLES[table][1]
    elif table in fast_paths.TABLES:
        columns = fast_paths.TABLES[table][1]
    return {column.name: column.format for column in columns}


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
