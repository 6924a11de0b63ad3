# SPDX-License-Identifier: Apache-2.0
"""Prediction, fixture and runs of study A: what is frozen, what is refused, and that bits follow."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.moe.launches import Launch
from routeblock.route_block import facts as cells
from routeblock.route_block.fixtures import published_geometry
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, PLANS, SPEC, LayerFixture, load_fixture, write_spec
from routeblock.route_block.operating_point import cut, full_k_grid, operating_point
from routeblock.route_block.prediction.freeze import freeze
from routeblock.route_block.prediction.predict import load_prediction, predict
from routeblock.route_block.runs.lanes import open_lane
from routeblock.route_block.runs.negative_control import control
from routeblock.route_block.runs.run import run

SEED = 20250314


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fixture")
    published_geometry.write(path, SEED)
    return path


@pytest.fixture(scope="module")
def fixture(folder: Path) -> LayerFixture:
    return load_fixture(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy", copy_function=os.link))


def rows(prediction: dict[str, object], first: tuple[str, str], second: tuple[str, str]) -> dict[str, object]:
    pairs = prediction["pairs"]
    assert isinstance(pairs, list)
    return next(p for p in pairs if (tuple(p["first"]), tuple(p["second"])) == (first, second))


def test_another_seed_is_another_layer_with_the_same_geometry(tmp_path: Path, fixture: LayerFixture) -> None:
    rng = np.random.Generator(np.random.PCG64([7, 0]))
    ids = published_geometry.draw_routing(rng)
    plans = published_geometry.draw_plans(rng, ids)
    assert not np.array_equal(ids, fixture.topk_ids)
    assert all(fact["holds"] for fact in published_geometry.facts(ids, plans))


def test_the_same_seed_is_the_same_fixture(folder: Path, tmp_path: Path) -> None:
    published_geometry.write(tmp_path, SEED)
    for name in (SPEC, LAYER, INPUTS, PLANS):
        assert sha256_file(tmp_path / name) == sha256_file(folder / name)


def test_only_51_and_86_change_signature_between_h0_and_h1(fixture: LayerFixture) -> None:
    for lane, point in (("twin-ampere", "published"), ("twin-hopper", "auto")):
        found = predict(fixture, lane, point, "stored", fixture.plans)
        native = rows(found, ("native", "H0"), ("native", "H1"))
        assert len(native["changed_memberships"]) == 20  # type: ignore[arg-type]
        assert native["changed_signature"]["w13"] == [51, 86]  # type: ignore[index]
        assert native["must_coincide"] == []
        for second in (("replay", "H0"), ("cross", "H1"), ("swap_within", "H0"), ("swap_across", "H1")):
            assert len(rows(found, ("native", "H0"), second)["must_coincide"]) == 4  # type: ignore[arg-type]
        assert "w13" in rows(found, ("full_k", "H0"), ("full_k", "H1"))["must_coincide"]  # type: ignore[operator]
        assert rows(found, ("native", "H0"), ("canonical", "H0"))["must_coincide"] == []


def test_the_full_k_grid_is_derived(fixture: LayerFixture) -> None:
    for point, lane, want in (
        ("published", "twin-ampere", 200),
        ("auto", "twin-hopper", 400),
        ("auto", "twin-ampere", 200),
    ):
        launch = operating_point(point, lane, fixture.spec).launches["w13"]
        assert full_k_grid(fixture.spec, 50, launch) == want
        assert cut(fixture.spec, "w13", 50, launch._replace(grid=want)).is_single_slice


def test_the_superseded_prediction_is_refused_before_arithmetic(folder: Path, tmp_path: Path) -> None:
    freeze(folder, "twin-ampere", "published", "stored", tmp_path / "superseded.json", superseded=True)
    assert control(folder, tmp_path / "superseded.json", "twin-ampere", tmp_path / "control.json")
    written = json.loads((tmp_path / "control.json").read_bytes())
    assert (written["claimed_single_slice"], written["single_slice"], written["split_tiles"]) == (True, False, 120)
    # A right prediction does start a run: the control can tell.
    freeze(folder, "twin-ampere", "published", "stored", tmp_path / "right.json")
    assert not control(folder, tmp_path / "right.json", "twin-ampere", tmp_path / "control2.json")


def test_order_of_the_study() -> None:
    order = list(cells.schedule(5))
    assert len(order) == 70
    assert [h for _, h, _ in order[::7]] == ["H0", "H1", "H1", "H0", "H0", "H1", "H1", "H0", "H0", "H1"]
    assert [cells.position(*place) for place in order] == list(range(70))


@pytest.fixture(scope="module")
def study(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every arm once on twin-hopper, and native H0 three times more on other thread counts."""
    out = tmp_path_factory.mktemp("study")
    freeze(folder, "twin-hopper", "published", "stored", out / "prediction.json")
    arms = [(cell, history, 2) for cell in cells.CELLS for history in cells.HISTORIES]
    for cell, history, replicate in [*arms, ("native", "H0", 1), ("native", "H0", 3), ("native", "H0", 4)]:
        run(
            lane_name="twin-hopper",
            lane=open_lane("twin-hopper"),
            fixture_folder=folder,
            prediction_path=out / "prediction.json",
            cell=cell,
            history=history,
            replicate=replicate,
            out=out / cell / history / f"rep{replicate}",
        )
    return out


def surfaces(study: Path, cell: str, history: str) -> dict[str, np.ndarray]:
    return load_tensors(study / cell / history / "rep2" / "tensors.safetensors")


def test_bits_follow_the_prediction_for_every_pair_of_arms(study: Path) -> None:
    prediction, _ = load_prediction(study / "prediction.json")
    assert len(prediction["pairs"]) == 91
    changed_somewhere = 0
    for pair in prediction["pairs"]:
        one, two = surfaces(study, *pair["first"]), surfaces(study, *pair["second"])
        for name in cells.SURFACES:
            changed = np.flatnonzero((one[name].view(np.uint16) != two[name].view(np.uint16)).any(axis=1)).tolist()
            assert set(changed) <= set(pair["rows"][name]), (pair["first"], pair["second"], name)
            assert not (changed and name in pair["must_coincide"])
            changed_somewhere += bool(changed)
    assert changed_somewhere > 100


def test_the_seven_relations_on_the_twin(study: Path) -> None:
    def bits(cell: str, history: str) -> list[bytes]:
        found = surfaces(study, cell, history)
        return [found[name].tobytes() for name in cells.SURFACES]

    h0, h1 = bits("native", "H0"), bits("native", "H1")
    assert all(a != b for a, b in zip(h0, h1, strict=True))
    assert (bits("replay", "H0"), bits("replay", "H1")) == (h0, h1)
    assert (bits("cross", "H0"), bits("cross", "H1")) == (h1, h0)
    assert (bits("swap_within", "H0"), bits("swap_within", "H1")) == (h0, h1)
    assert (bits("swap_across", "H0"), bits("swap_across", "H1")) == (h1, h0)
    assert bits("full_k", "H0")[0] == bits("full_k", "H1")[0]
    canonical = bits("canonical", "H0")
    assert canonical == bits("canonical", "H1")
    assert canonical[3] not in (h0[3], h1[3])


def test_the_thread_count_changes_no_bit_and_no_record(study: Path) -> None:
    records = {(study / "native" / "H0" / f"rep{n}" / "tensors.safetensors").read_bytes() for n in (1, 2, 3, 4)}
    assert len(records) == 1
    threads = [
        json.loads((study / "native" / "H0" / f"rep{n}" / "telemetry.json").read_bytes())["lane"]["threads"]
        for n in (1, 2, 3, 4)
    ]
    assert threads == [1, 2, 3, 4]


def attempt(folder: Path, prediction: Path, out: Path, **changes: object) -> None:
    arguments = {"lane_name": "twin-hopper", "cell": "native", "history": "H0", "replicate": 1} | changes
    lane = open_lane("twin-hopper")
    run(lane=lane, fixture_folder=folder, prediction_path=prediction, out=out, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cell": "nativ"}, "cell 'nativ'"),
        ({"history": "H2"}, "history 'H2'"),
        ({"replicate": 0}, "replicate 0"),
        ({"lane_name": "twin-ampere"}, "lane twin-hopper"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_and_writes_nothing(
    changes: dict[str, object], match: str, folder: Path, study: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=match):
        attempt(folder, study / "prediction.json", tmp_path / "run", **changes)
    assert not list(tmp_path.iterdir())


def test_a_prediction_of_other_plans_is_refused(folder: Path, study: Path, tmp_path: Path) -> None:
    document, _ = load_prediction(study / "prediction.json")
    document["arms"][0]["fingerprint"] = "0" * 64
    (tmp_path / "p.json").write_bytes(canonical_json(document))
    with pytest.raises(InputError, match="frozen prediction"):
        attempt(folder, tmp_path / "p.json", tmp_path / "run")


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # the copy is made of hard links
    path.write_bytes(data)


def test_an_edited_or_truncated_tensor_file_is_refused(copy: Path) -> None:
    data = (copy / LAYER).read_bytes()
    replace(copy / LAYER, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InputError, match="not those the fixture was made with"):
        load_fixture(copy)
    replace(copy / LAYER, data)
    replace(copy / PLANS, (copy / PLANS).read_bytes()[:100])
    with pytest.raises(InputError, match="not those the fixture was made with"):
        load_fixture(copy)
    with pytest.raises(InputError, match="not a readable tensor file"):
        load_fixture(copy, verify=False)


@pytest.mark.parametrize(("name", "bad"), [("hidden", np.nan), ("hidden", np.inf), ("topk_weights", np.nan)])
def test_nan_and_infinite_inputs_are_refused(copy: Path, name: str, bad: float) -> None:
    tensors = load_tensors(copy / INPUTS)
    tensors[name][3, 4] = bad
    (copy / INPUTS).unlink()
    save_tensors(copy / INPUTS, tensors)
    write_spec(
        copy, {k: v for k, v in json.loads((copy / SPEC).read_bytes()).items() if k not in ("format", "digests")}
    )
    with pytest.raises(InputError, match=f"{name} holds an infinity or NaN"):
        load_fixture(copy)


def test_a_stored_plan_that_drops_a_route_is_refused(copy: Path) -> None:
    tensors = load_tensors(copy / PLANS)
    ids = tensors["H0.sorted_token_ids"]
    ids[np.flatnonzero(ids == 51)] = ids[np.flatnonzero(ids == 22)]
    (copy / PLANS).unlink()
    save_tensors(copy / PLANS, tensors)
    write_spec(
        copy, {k: v for k, v in json.loads((copy / SPEC).read_bytes()).items() if k not in ("format", "digests")}
    )
    with pytest.raises(InputError, match=r"route 22 stands 2 times|route 51 stands 0 times"):
        load_fixture(copy)


def test_unknown_lane_and_point_are_refused(fixture: LayerFixture) -> None:
    with pytest.raises(InputError, match="lane 'twin-turing'"):
        predict(fixture, "twin-turing", "auto", "stored", fixture.plans)
    with pytest.raises(InputError, match="point 'fast'"):
        operating_point("fast", "twin-hopper", fixture.spec)
    assert Launch(64, 128, 246) == operating_point("published", "twin-hopper", fixture.spec).launches["w13"]
