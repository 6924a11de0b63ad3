# SPDX-License-Identifier: Apache-2.0
"""The survey: populations, what is predicted and what the twin computes of it, the table and its figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeblock.cli import main
from routeblock.diagnose.batches import first_token_differs, sweep
from routeblock.diagnose.classes import Classes, run_to_run
from routeblock.diagnose.engine import Engine
from routeblock.diagnose.layer import Layer
from routeblock.diagnose.populations import population, routings_of
from routeblock.diagnose.routings import counts, draw
from routeblock.diagnose.survey import Plan, interval, parted_experts, survey_point
from routeblock.diagnose.twin_sample import Sample, ulps
from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import Launch
from routeblock.moe.marlin_launch import Weights
from routeblock.moe.routing import align

SMALL = Layer(512, 128, 72, 2, Weights("float16", True, 64))
GPU = DEVICES["RTX 3090"]


def test_zipf_prefers_some_experts_and_exponent_zero_none() -> None:
    shares = {}
    for name in ("zipf:0", "zipf:1.5"):
        ids = routings_of(population(name), 200, 2, 16, 20, 3)
        whole = np.sort(counts(ids, 16), axis=1)[:, ::-1].mean(axis=0)
        shares[name] = whole[0] / whole.sum()
        assert all(len(set(token)) == 2 for token in ids[0].tolist())
    assert shares["zipf:0"] < 0.1 < 0.25 < shares["zipf:1.5"]


def test_tokens_of_a_topic_go_together() -> None:
    def agreement(name: str) -> float:
        ids = routings_of(population(name), 300, 1, 64, 10, 5)[:, :, 0]
        return float(np.mean([(row[:, None] == row[None, :]).mean() for row in ids]))

    assert agreement("topics:1:2") > 2 * agreement("topics:16:2") > 2 * agreement("uniform")


def test_a_files_windows_are_successive_tokens(tmp_path: Path) -> None:
    ids = draw(50, 2, 16, 1)[0]
    np.save(tmp_path / "a.npy", ids)
    chosen = population("file", tmp_path / "a.npy")
    assert chosen.status == "given"
    starts = {ids[s : s + 8].tobytes() for s in range(43)}
    assert all(window.tobytes() in starts for window in routings_of(chosen, 8, 2, 16, 20, 1))
    with pytest.raises(InputError, match="windows of 51 tokens"):
        routings_of(chosen, 51, 2, 16, 1, 1)


@pytest.mark.parametrize("name", ["poisson", "zipf", "zipf:x", "zipf:-1", "topics:4", "file", "uniform:1"])
def test_unknown_populations_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="write it as zipf:1"):
        population(name)


@pytest.mark.parametrize("tokens", [2, 9, 40, 130])
def test_the_first_token_differs_where_its_class_does(tokens: int) -> None:
    engine = Engine(SMALL, GPU, "0.24.0")
    ids = routings_of(population("zipf:1"), tokens, 2, 72, 40, tokens)
    found = first_token_differs(engine, ids, counts(ids, 72))
    for row in range(40):
        swept = sweep(engine, ids[row], 0, [1, tokens])
        assert swept is not None
        assert bool(found[row]) == (swept.classes == 2)


def test_rows_computed_alone_are_the_rows_of_the_whole_plan() -> None:
    rng = np.random.default_rng(2)
    ids = routings_of(population("zipf:1.2"), 60, 2, 72, 1, 8)[0]
    launches = {"w13": Launch(64, 128, 37), "w2": Launch(64, 128, 37)}
    plan = align(ids, 72, 8, rng.permutation(ids.size))
    parted = parted_experts(counts(ids[None], 72)[0], 8, Classes(SMALL, launches))
    assert parted
    everything = Sample(SMALL, "ampere", 60, range(72), 4)
    alone = Sample(SMALL, "ampere", 60, parted, 4)
    for gemm, (q, zeros, scales) in everything.parts.items():
        alone.parts[gemm] = q[parted], None if zeros is None else zeros[parted], scales[parted]
    whole, some = everything.rows(plan, launches), alone.rows(plan, launches)
    mine = np.isin(ids.ravel(), parted)
    for gemm in ("w13", "w2"):
        assert np.array_equal(whole[gemm][mine], some[gemm][mine])
        assert some[gemm][mine].any()
        assert not some[gemm][~mine].any()
    first = alone.rows(align(ids, 72, 8), launches, first_blocks=True)
    complete = everything.rows(align(ids, 72, 8), launches)
    own = [s for s in range(2) if ids[0, s] in parted]
    assert all(np.array_equal(first["w2"][s], complete["w2"][s]) for s in own)


def test_a_point_counts_what_can_and_what_does() -> None:
    engine = Engine(SMALL, GPU, "0.24.0")
    point = survey_point(engine, population("zipf:1"), 120, Plan(200, 4, 1e12, 1))
    ids = routings_of(population("zipf:1"), 120, 2, 72, 200, 1)
    launches = engine.launches_at(120)
    assert launches is not None
    runs = run_to_run(counts(ids, 72), engine.block_size_at(120), Classes(SMALL, launches))
    assert point["runs"]["can"] == int(runs.can_differ.sum()) > 0
    assert point["runs"]["sample"] == 4
    assert 0 < point["runs"]["changed"] <= 4
    assert point["runs"]["do_low"] <= point["runs"]["share_that_do"] <= point["runs"]["do_high"]
    assert point["runs"]["w13"]["ulps_at_most"] > 0
    assert point["batches"]["changed"] <= point["batches"]["sample"] <= 4


def test_a_fixed_order_cannot_change_bits_between_runs() -> None:
    layer = Layer(512, 128, 16, 2, Weights("float16", True, 64))
    point = survey_point(Engine(layer, GPU, "0.24.0"), population("zipf:2"), 120, Plan(50, 2, 1e9, 1))
    assert point["runs"]["can"] == 0


def test_a_kernel_without_a_twin_is_not_surveyed() -> None:
    with pytest.raises(InputError, match="Humming"):
        survey_point(Engine(SMALL, DEVICES["H200"], "0.33.0"), population("uniform"), 4, Plan(1, 0, 0, 1))


def test_wilsons_interval_and_ulps() -> None:
    assert interval(0, 0) == (0.0, 1.0)
    assert interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    values = np.array([0.0, -0.0, 1.0, -1.0], np.float16).view(np.uint16)
    assert ulps(values[:1], values[1:2]) == 0
    assert ulps(values[2:3], values[2:3] + np.uint16(3)) == 3
    assert ulps(np.array([1], np.uint16), np.array([0x8001], np.uint16)) == 2


def test_points_become_one_table_one_figure_and_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden 512 --intermediate 128 --experts 72 --top-k 2 --group-size 64 --zero-points --dtype float16"
    points = []
    for gpu, tokens in (("RTX 3090", 16), ("RTX 3090", 120), ("L40S", 120)):
        out = tmp_path / f"{gpu}-{tokens}.json"
        options = ["--gpu", gpu, "--vllm", "0.24.0", "--tokens", str(tokens), "--population", "zipf:1"]
        limits = ["--routings", "100", "--sample", "0", "--out", str(out)]
        assert main(["diagnose", "survey-point", *sizes.split(), *options, *limits]) == 0
        points.append(str(out))
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        assert main(["survey", *points, "--out", str(folder), "--json", "-"]) == 1
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.split("\n{")[0].rstrip() or "{}")
    assert answer["command"] == "survey"
    assert [p["tokens"] for p in answer["detail"]["points"]] == [120, 16, 120]
    names = {p.name for p in folders[0].iterdir()}
    assert {"survey.parquet", "survey.md", "survey.svg", "survey.png", "survey_answer.json"} <= names
    for name in names:
        if not name.endswith("manifest.json"):
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert (folders[0] / "survey.svg").read_text().count("between runs") >= 1
    assert main(["survey", str(folders[0] / "survey_answer.json"), "--out", str(tmp_path / "x")]) == 2
