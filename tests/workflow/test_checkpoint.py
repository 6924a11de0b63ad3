# SPDX-License-Identifier: Apache-2.0
"""The workflow on a checkpoint: manifest, fixture, and the cells that its fixture has exchange pairs for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkout import ROOT, Checkout

from routeblock.checkpoint.generator import Spec, generate
from routeblock.route_block.facts import CELLS

FIXTURE = "results/fixtures/checkpoint/fixture.json"
SCORE = "results/route_block/checkpoint/twin-ampere/published/stored/score.json"
PAIRED = Spec(layers=1, hidden=512, intermediate=384, experts=64, top_k=4, group_size=128)
# One block an expert at most: nothing to exchange across.
UNPAIRED = Spec(layers=1, hidden=128, intermediate=64, experts=64, top_k=2, group_size=32, skew=0.0)


@pytest.mark.parametrize(
    ("spec", "tokens", "missing"),
    [(PAIRED, "null", set()), (UNPAIRED, "[65, 66]", {"swap_within", "swap_across"})],
    ids=["with pairs", "without"],
)
def test_cells_without_a_pair_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Spec, tokens: str, missing: set[str]
) -> None:
    (tmp_path / "checkout").mkdir()
    checkout = Checkout.fresh(tmp_path / "checkout")
    shutil.copytree(ROOT / "fixtures", checkout.root / "fixtures")
    generate(checkout.root / "checkpoints" / "small", spec)
    checkout.edit("config.yaml", "name: published_geometry #", "name: checkpoint #")
    checkout.edit("config.yaml", "path: checkpoints/Qwen3-Coder-30B-A3B-Instruct-AWQ", "path: checkpoints/small")
    checkout.edit("config.yaml", "revision: c58857a7f41c0920f73d1b56678640f9c02017d7", "revision: null")
    checkout.edit("config.yaml", "layer: 6", "layer: 0")
    checkout.edit("config.yaml", "confirm: true", "confirm: false")
    if tokens != "null":
        checkout.edit("config.yaml", "token_ids: null", f"token_ids: {tokens}")
        text = (checkout.root / "config.yaml").read_text()
        start = text.index("prompt:")
        (checkout.root / "config.yaml").write_text(text[:start] + "prompt: null" + text[text.index("\n", start) :])
    checkout.run(FIXTURE)
    exchange = json.loads((checkout.root / FIXTURE).read_bytes())["exchange"]
    assert {f"swap_{k}" for k in ("within", "across") if exchange[k] is None} == missing
    jobs = checkout.would_run(monkeypatch, SCORE)
    assert {w["cell"] for name, w in jobs if name == "run"} == CELLS.keys() - missing
    assert not {"manifest", "checkpoint_fixture", "fixture"} & {name for name, _ in jobs}
