# SPDX-License-Identifier: Apache-2.0
"""Numbers at the edge of a format, and maps of experts that are no maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from routeblock.checkpoint.folder import open_folder
from routeblock.checkpoint.generator import Spec, generate
from routeblock.checkpoint.manifest import write_manifest
from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.moe import q6k
from routeblock.moe.q6k_dot import dot
from routeblock.moe.routing import align


def block(largest: float) -> np.ndarray[Any, Any]:
    """256 activations, the largest of them given."""
    x = np.linspace(-0.5, 0.5, 256, dtype=np.float32) * np.float32(largest)
    x[[0, 32, 64, 96, 128, 160, 192, 224]] = largest
    return x


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("largest", [8_321_040.0, 1e7, 3e38])
def test_activations_whose_scale_float16_does_not_hold_are_refused(largest: float) -> None:
    with pytest.raises(InputError, match=r"below 8,321,040: .*float16 d is infinite"):
        q6k.quantize_q8_1(block(largest))


@pytest.mark.filterwarnings("error")
def test_activations_beyond_float32_are_refused_without_a_warning() -> None:
    with pytest.raises(InputError, match="finite values in whole blocks of 32 are needed"):
        q6k.quantize_q8_1(np.full(32, 1e300))


@pytest.mark.filterwarnings("error")
def test_the_largest_activations_that_fit_give_a_finite_dot_product() -> None:
    largest = float(np.nextafter(np.float32(8_321_040), np.float32(0)))
    activations = q6k.quantize_q8_1(block(largest))
    assert q6k.unpack_q8_1(activations).d.max() == 65504
    weights = q6k.random_q6k(np.random.PCG64(1), (1,))
    assert np.isfinite(dot(weights, activations)).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("largest", [6e-38, 3.7e-37, 1e-40, 1e-45, 0.0])
def test_activations_whose_scale_is_zero_give_zero_and_no_warning(largest: float) -> None:
    q, d, s = q6k.unpack_q8_1(q6k.quantize_q8_1(block(largest)))
    assert not d.any() and not s.any() and not q6k.dequantize_q8_1(q6k.quantize_q8_1(block(largest))).any()
    assert not q.any()  # 1 / d is beyond float32


@pytest.mark.filterwarnings("error")
def test_small_activations_keep_their_quants_while_the_inverse_scale_is_finite() -> None:
    q, d, _ = q6k.unpack_q8_1(q6k.quantize_q8_1(block(1e-30)))
    assert q.max() == 127 and not d.any()


IDS = np.array([[0, 2], [1, 3]])


@pytest.mark.parametrize(
    ("expert_map", "words"),
    [
        (np.array([0.0, -1.0, 1.0, -1.0]), "expert map of float64; integers are needed"),
        (np.array([0, -1, 0, -1]), "experts 0 and 2 the local id 0; one expert for each local id"),
        (np.array([0, -2, 1, -1]), "expert 1 the local id -2; a local id from 0, or -1"),
        (np.array([0, 1, -1]), r"expert map of shape \(3,\)"),
        (np.array([True, False, True, False]), "expert map of bool"),
    ],
)
def test_a_map_that_is_no_map_is_refused(expert_map: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        align(IDS, 4, 8, expert_map=expert_map)


def test_a_map_with_gaps_among_its_local_ids_is_one() -> None:
    assert align(IDS, 4, 8, expert_map=np.array([5, -1, 2, -1], np.int8)).expert_ids.tolist() == [5, 2]


@pytest.mark.parametrize("confirm", [True, False])
def test_a_fixture_whose_w13_leaves_float16_is_refused_where_the_twin_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], confirm: bool
) -> None:
    spec = Spec(layers=1, experts=4, top_k=2, hidden=128, intermediate=64, group_size=32)
    root = generate(tmp_path / "c", spec)
    write_manifest(open_folder(root), tmp_path / "m", 0)
    ids = np.array([[0, 1], [2, 3], [1, 2]], np.int32)
    inputs = {
        "hidden": np.full((3, 128), 30000, np.float16),
        "topk_ids": ids,
        "topk_weights": np.full((3, 2), 0.5, np.float32),
    }
    save_file(inputs, tmp_path / "captured.safetensors")
    command = ["checkpoint", "fixture", str(root), "--manifest", str(tmp_path / "m" / "files.json"), "--layer", "0"]
    command += ["--captured", str(tmp_path / "captured.safetensors"), "--out", str(tmp_path / "f")]
    code = main([*command, *(["--confirm"] if confirm else [])])
    said = capsys.readouterr().err
    if confirm:  # no expert has two blocks here: the twin looks all the same
        assert code == 2 and "fixture checkpoint at published:twin-ampere: w13 is " in said and "inf" in said
        assert "give other inputs" in said and not (tmp_path / "f").exists()
    else:
        assert code == 0
