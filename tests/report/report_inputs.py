# SPDX-License-Identifier: Apache-2.0
"""A small study to report on: sealed tables, a figure, captions and settings, with rows to change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from routeblock import tables
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.manifest import seal
from routeblock.report.catalogue import TABLES
from routeblock.report.page import Request
from routeblock.tables import Column

Row = dict[str, Any]
Rows = dict[str, list[Row]]

CODE = "0" * 64
HOPPER = "computed, by a twin that equals recorded H200 kernels"
STUDIES = (("twin-ampere", "modelled"), ("twin-hopper", HOPPER), ("recorded-h200", "observed"))
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="36pt" viewBox="0 0 72 36">'
    '<rect width="9" height="9"/></svg>'
)


def study_rows() -> Rows:
    """Rows of a study in which everything holds, without columns that no sentence reads."""
    where = [
        {
            "fixture": "published_geometry",
            "lane": lane,
            "arithmetic": word,
            "point": "published",
            "plan_source": "stored",
        }
        for lane, word in STUDIES
    ]
    relations = [
        w
        | {"number": n, "relation": f"claim {n}", "status": "holds", "reference": "native"}
        | {"basis": "by construction" if n in (2, 3) else "observed" if w["lane"] == "recorded-h200" else "computed"}
        for w in where
        for n in range(1, 8)
    ]
    differences = [
        w
        | {"quantity": "elements that differ", "surface": s, "arms": "native/H0, native/H1"}
        | {"published": "7", "measured": str(n), "measured_number": float(n), "comparison": "not comparable"}
        for w, counts in zip(where, ((15, 38), (17, 74), (6, 5)), strict=True)
        for s, n in zip(("w13", "final"), counts, strict=True)
    ]
    agreement = [
        {"lane": "recorded-h200", "cell": "native", "history": h, "surface": "w13", "elements": 500, "differing": 0}
        for h in ("H0", "H1")
    ]
    census = [
        {"lane": "recorded-h200", "gpu": "NVIDIA H200", "point": point, "order": order, "history": "both"}
        | {"processes": 10, "calls": 2000, "distinct_plans": plans, "distinct_finals": finals}
        for point, seen in (("auto", 43), ("published", 51))
        for order, plans, finals in (("native", seen, 10), ("canonical", 1, 1))
    ]
    cost = [
        {"campaign": campaign, "role": "bound", "experts": 128, "top_k": 8, "tokens": m, "mode": mode}
        | {"ratio": ratio, "verdict": None if mode == "host" else "non-inferior"}
        for campaign, mode, ratios in (
            ("operator", "graph", (0.15, 0.68)),
            ("layer", "graph", (0.94, 0.99)),
            ("operator", "host", (2.4, 3.4)),
        )
        for m, ratio in zip((1, 16384), ratios, strict=True)
    ]
    confirmation = [
        {"lane": lane, "device": device, "slots": slots, "pool": 32, "scope": "inclusive", "schedule": "band32"}
        | {"baseline": "job_major", "n": 12, "change_percent": change, "low_percent": change - 0.1}
        | {"high_percent": change + 0.1, "verdict": "slower", "clear_of_floor": True, "v100_gpu0_change": told}
        | {"v100_gpu1_change": told - 0.5, "mode": "stream" if lane.endswith("-stream") else "graph"}
        for lane, device, change in (
            ("recorded-h200", "gpu0", 4.31),
            ("recorded-h200", "gpu1", 2.72),
            ("recorded-h200-fresh", "gpu0", 4.31),
            ("recorded-h200-stream", "gpu0", 6.96),
            ("cpu", "cpu0", -9.0),
        )
        for slots, told in ((64, 0.66), (256, -4.21))
    ]
    for row in confirmation:
        if row["lane"] != "recorded-h200-stream":
            row |= {"v100_gpu0_change": None, "v100_gpu1_change": None}
    history = [
        {"lane": "recorded-h200", "gpu": "NVIDIA H200", "outcome": "plan", "pairs": 24, "calls": 4800, "alpha": 0.05}
        | {"distinct_h0": 20, "distinct_h1": 10, "distinct_both": 0, "statistic": 1.0, "null_median": 0.17, "p": 0.0001}
        | {"processes_with_one_h0": 0, "processes_with_one_h1": 0, "verdict": "shifted"}
    ]
    repetition = [
        {"lane": "recorded-h200", "gpu": "NVIDIA H200", "condition": name, "repeats": repeats}
        for name, repeats in (("as in the study", False), ("one warp of routes", True))
    ]
    beyond = [
        {"lane": "recorded-h200", "device": "gpu0", "campaign": "l2_ratio", "schedule": "band32", "scope": "inclusive"}
        | {"slots": slots, "change_percent": change, "low_percent": change - 0.1, "high_percent": change + 0.1}
        | {"verdict": "faster", "baseline": "job_major", "mode": "graph"}
        for slots, change in ((16, -11.5), (256, -15.0))
    ]
    discovery = [
        {"lane": lane, "device": "gpu0", "family": "independent", "slots": slots, "pool": 32, "mode": mode}
        | {"scope": "inclusive", "schedule": "band32", "baseline": "job_major", "change_percent": change}
        for lane, mode, slots, change in (
            ("recorded-h200", "graph", 16, 11.8), ("recorded-h200", "graph", 64, 4.3),
            ("recorded-h200-stream", "stream", 16, 28.3), ("cpu", "call", 16, 90.0),
        )
    ]  # fmt: skip
    counters = [
        {"kind": kind, "slots": slots, "schedule": "band32", "dram_read_mb": mb, "dram_read_change_percent": change}
        | {"time_change_percent": 0.5 if kind == "study" else change / 6}
        for kind, slots, mb, change in (
            ("study", 16, 0.6, 0.0), ("study", 256, 6.1, 249.0),
            ("l2_ratio", 16, 103.2, -5.4), ("l2_ratio", 256, 275.5, -85.6),
        )
    ]  # fmt: skip
    studies = [w | {"runs": 70, "plans_read_back": 70} for w in where]
    found = {
        "studies": studies,
        "relations": relations,
        "differences": differences,
        "agreement": agreement,
        "census": census,
    }
    found |= {"history": history, "repetition": repetition, "beyond_study": beyond, "schedule_counters": counters}
    found |= {"discovery": discovery}
    return found | {"alignment_cost": cost, "confirmation": confirmation}


def columns_of(name: str) -> Sequence[Column]:
    """The columns of a table of the studies; of another, as its rows have them."""
    return TABLES[name].columns


def write_table(results: Path, name: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[Column] = ()) -> None:
    """Write and seal a table."""
    folder = results / "tables"
    files = tables.write(folder, name, columns or columns_of(name), rows, title=f"Title of {name}", notes="A note.")
    manifest = folder / f"{name}.manifest.json"
    seal(
        manifest,
        rule=f"table_{name}",
        outputs=files,
        inputs=[results / "score.json"],
        parameters={},
        modules=["routeblock.errors"],
    )
    write_caption(results.parent / "captions", "table", name)


def write_caption(folder: Path, kind: str, name: str, text: str = "What *it* shows, in ``code``.\n") -> None:
    """Write a caption."""
    folder.mkdir(exist_ok=True)
    (folder / f"{kind}_{name}.rst").write_text(text, encoding="utf-8")


def write_figure(results: Path, name: str, svg: str = SVG) -> None:
    """Write and seal a figure."""
    folder = results / "figures"
    folder.mkdir(exist_ok=True)
    files = [folder / f"{name}.{suffix}" for suffix in ("svg", "png")]
    for path in files:
        path.write_text(svg, encoding="utf-8")
    manifest = folder / f"{name}.manifest.json"
    seal(manifest, rule=f"figure_{name}", outputs=files, inputs=[], parameters={}, modules=["routeblock.errors"])
    write_caption(results.parent / "captions", "figure", name)


def write_study(root: Path, rows: Rows) -> Request:
    """A sealed study below `root`, and the request to report on it."""
    results = root / "results"
    environment = results / "environment"
    environment.mkdir(parents=True)
    told = {"python": "3.11.7", "implementation": "CPython", "packages": {"numpy": "2.4.6", "x": None}}
    told |= {"system": {"name": "Linux", "release": "6", "libc": "glibc 2.36"}}
    told |= {"cpu": {"model": "A CPU", "machine": "x86_64", "count": 2, "flags": ["avx2"]}}
    (environment / "environment.json").write_bytes(canonical_json(told))
    (root / "config.yaml").write_text("lanes: [twin-hopper]\n", encoding="utf-8")
    for place, document in DOCUMENTS.items():
        path = results / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document), encoding="utf-8")
    settings, fixture, record = root / "config.yaml", results / "fixture" / "fixture.json", results / RECORD
    made_from = {environment / "environment.json": [settings], fixture: [settings], record: [fixture]}
    made_from[results / "score.json"] = [fixture, record]
    for path, inputs in made_from.items():
        rule = path.stem if path != record else "run"
        manifest = path.with_name(f"{path.stem}.manifest.json")
        seal(manifest, rule=rule, outputs=[path], inputs=inputs, parameters={}, modules=["routeblock.errors"])
    for name, content in rows.items():
        write_table(results, name, content)
    write_figure(results, "partition")
    return Request(results, root / "captions", root / "config.yaml", tuple(rows), ("partition",))


RECORD = "native/H0/rep1/record.json"
DOCUMENTS: dict[str, Row] = {
    "score.json": {
        "fixture": {"name": "published_geometry", "sha256": CODE},
        "lane": "twin-hopper",
        "point": "published",
        "plan_source": "stored",
        "prediction": "1" * 64,
        "runs": {"native/H0/rep1": CODE},
        "arms": [{"cell": "replay", "history": h, "fingerprint": h[1] * 64} for h in ("H0", "H1")],
    },
    "fixture/fixture.json": {
        "name": "published_geometry",
        "kind": "synthetic",
        "digests": {"layer.safetensors": "2" * 64},
        "source": {"seed": 7},
        "exchange": {"across": [51, 86], "within": [22, 28], "chosen": "by construction"},
        "tokens": 21,
        "top_k": 8,
    },
    RECORD: {
        "inputs": {"topk_ids": "3" * 64},
        "grid": {"w13": {"thread_k": 64, "thread_n": 128, "launched": 246}},
        "identity": {"source": "4" * 64, "binary": "5" * 64, "environment": {"gpu": "NVIDIA H200", "a": "<b>"}},
    },
}
