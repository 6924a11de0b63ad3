# SPDX-License-Identifier: Apache-2.0
"""The points of a survey as a table and a figure: share of routings against tokens, one line a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from routeblock.diagnose.survey import FORMAT
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.figure_style import read_document
from routeblock.tables import Column, Table, numbers, write_sealed

NAME = "survey"
_SHARES = ("can_share", "can_low", "can_high", "do_share", "do_low", "do_high")
COLUMNS = (
    *(Column("gpu"), Column("vllm"), Column("population"), Column("population_status"), Column("tokens", "count")),
    *(Column("block_size", "count"), Column("launch_w13"), Column("launch_w2"), Column("launch_status")),
    Column("routings", "count"), Column("can", "count"), *numbers(_SHARES[:3], ".4f"), Column("sample", "count"),
    Column("changed", "count"), *numbers(_SHARES[3:], ".4f"),
    *numbers(("w13_elements", "w2_elements"), ".1f"), Column("w13_ulps", "count"), Column("w2_ulps", "count"),
    Column("batch_can", "count"), *numbers(tuple(f"batch_{n}" for n in _SHARES[:3]), ".4f"),
    Column("batch_sample", "count"), Column("batch_changed", "count"),
    *numbers(("batch_w13_elements", "batch_w2_elements"), ".1f"),
)  # fmt: skip
KEYS = ("gpu", "vllm", "population", "tokens", "runs", "batches", "launches", "launch_status")
TITLE = "How often bits can change, and how often they do"
NOTES = (
    "`can`: routings in which a legal reorder moves a route between blocks that are cut differently (predicted)."
    " `batch_can`: routings whose first token is computed otherwise than alone. `sample`, `changed`: of those that can,"
    " how many the twin computed under two random orders (or in both batches), and how many of them changed a bit;"
    " `do_share` is the product, its bounds are the products of Wilson's 95% bounds. Elements are the mean of a sampled"
    " routing, ulps the most. Weights and inputs are drawn. Populations marked modelled are models, not observations."
)


def row(point: dict[str, Any]) -> dict[str, Any]:
    """A point as a row of the table."""
    runs, batches = point["runs"], point["batches"]
    found = {name: point[name] for name in ("gpu", "vllm", "population", "population_status", "tokens", "block_size")}
    found |= {f"launch_{gemm}": str(tuple(launch)) for gemm, launch in point["launches"].items()}
    found["launch_status"] = ", ".join(sorted(set(point["launch_status"].values())))
    found |= {"routings": runs["routings"], "can": runs["can"], "batch_can": batches["can"]}
    for prefix, part in (("", runs), ("batch_", batches)):
        found |= {
            f"{prefix}can_share": part["share"],
            f"{prefix}can_low": part["low"],
            f"{prefix}can_high": part["high"],
        }
        found |= {f"{prefix}{name}": part.get(name) for name in ("sample", "changed")}
        for gemm in ("w13", "w2"):
            found[f"{prefix}{gemm}_elements"] = part.get(gemm, {}).get("elements_of_a_routing")
    found |= {"do_share": runs.get("share_that_do"), "do_low": runs.get("do_low"), "do_high": runs.get("do_high")}
    found |= {f"{gemm}_ulps": runs.get(gemm, {}).get("ulps_at_most") for gemm in ("w13", "w2")}
    return found


def gather(points: Iterable[Path]) -> list[dict[str, Any]]:
    """How often can bits change, and how often do they?

    The rows of points, by population, GPU and tokens. InputError for a file that is no point.
    """
    rows = [row(read_document(path, FORMAT, KEYS)) for path in points]
    return sorted(rows, key=lambda r: (r["population"], r["gpu"], r["vllm"], r["tokens"]))


TABLE = Table(NAME, gather, COLUMNS, TITLE, NOTES)


def write(points: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Write the table and the figure `survey` to `out`, each sealed; returns the rows."""
    from routeblock import figure_style
    from routeblock.diagnose import survey_figure

    rows = gather(points)
    write_sealed(out, TABLE, rows, inputs=points)
    with figure_style.look():
        files = figure_style.save(survey_figure.survey(rows), out, NAME, title=TITLE)
    seal(
        out / f"figure_{NAME}{SUFFIX}", rule=f"figure_{NAME}", outputs=files, inputs=[out / f"{NAME}.parquet"],
        parameters={}, modules=[survey_figure.__name__],
    )  # fmt: skip
    return rows
