# SPDX-License-Identifier: Apache-2.0
"""The twin against recorded outputs of the real kernels, bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_array
from routeblock.twin import self_test as golden
from routeblock.twin import self_test_inputs as golden_inputs

FOLDER = Path(__file__).parents[2] / "fixtures" / "golden"


def digest(*arrays: np.ndarray) -> str:
    h = hashlib.sha256()
    for a in arrays:
        h.update(np.ascontiguousarray(a).tobytes())
    return h.hexdigest()


def test_inputs_have_the_digests_of_the_recording() -> None:
    want = dict(line.split() for line in (FOLDER / "inputs.sha256").read_text().splitlines())
    found = {
        "routing": digest(*golden_inputs.layer_routing()),
        "hidden_states": digest(golden_inputs.layer_hidden()),
        "w13_e106": digest(*golden_inputs.layer_expert("w13", 106)),
        "w2_e106": digest(*golden_inputs.layer_expert("w2", 106)),
    }
    found |= {name: digest(*golden_inputs.case_inputs(name).arrays()) for name in golden_inputs.CASES}
    found |= {name: digest(*golden_inputs.corner_inputs(name).arrays()) for name in golden_inputs.CORNERS}
    found |= {f"combine{k}": digest(golden_inputs.combine_rows(k)) for k in (2, 4, 8)}
    assert found == want


@pytest.mark.parametrize("check", golden.CHECKS, ids=lambda check: check.__name__)
def test_every_recorded_bit_is_reproduced(check: object) -> None:
    found = list(check(FOLDER))  # type: ignore[operator]
    assert found
    assert [c for c in found if c.differing] == []


def test_every_recorded_array_and_digest_is_compared() -> None:
    stored = {}
    for path in FOLDER.glob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            stored[path.name] = len(arrays.files)
    compared = {check.__name__: len(list(check(FOLDER))) for check in (golden.gemms, golden.sums, golden.layer)}
    assert compared["gemms"] == 2 * (len(golden_inputs.CASES) + len(golden_inputs.CORNERS))
    assert compared["gemms"] + compared["sums"] == stored["h200_cases.npz"] + stored["h200_corners.npz"]
    digests = json.loads((FOLDER / "h200_sha256.json").read_bytes())
    assert compared["layer"] == len(digests) + stored["h200_grid246.npz"]


def test_a_changed_bit_in_a_recording_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(FOLDER, folder)
    with np.load(folder / "h200_cases.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name].copy() for name in stored.files}
    arrays["b16_f16_u4.st"][3, 5] ^= 1
    np.savez(folder / "h200_cases.npz", **arrays)
    differing = [c for c in golden.gemms(folder) if c.differing]
    assert [(c.name, c.differing) for c in differing] == [("gemm b16_f16_u4 stable", 1)]


def test_a_missing_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing"):
        golden.compare(tmp_path)


@pytest.mark.parametrize("kept", [0, 100, 2000])
@pytest.mark.parametrize(
    ("check", "file"),
    [
        (golden.tensor_core, "mma_m16n8k16.npz"),
        (golden.gemms, "h200_cases.npz"),
        (golden.activations, "h200_silu_and_mul.npz"),
        (golden.sums, "h200_corners.npz"),
        (golden.layer, "h200_grid246.npz"),
        (golden.layer, "h200_sha256.json"),
        (golden.packing, "packed_e106.json"),
        (golden.native_plan, "h200_native_plan.npz"),
    ],
)
def test_a_truncated_recording_is_refused(check: Any, file: str, kept: int, tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(FOLDER, folder)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: min(kept, len(data) // 2)])
    with pytest.raises(InputError, match=f"{file}: not a readable recording") as caught:
        list(check(folder))
    assert "\n" not in str(caught.value)


def test_a_recording_without_one_of_its_arrays_or_digests_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "h200_native_plan.npz", other=np.zeros(1))
    (tmp_path / "packed_e106.json").write_text("{}")
    for check, name in ((golden.native_plan, "sorted_token_ids"), (golden.packing, "w13.e106.awq_qweight")):
        with pytest.raises(InputError, match=f"it holds no {name}"):
            list(check(tmp_path))


def test_the_recorded_layer_is_not_the_same_in_both_orders() -> None:
    with np.load(FOLDER / "h200_grid246.npz", allow_pickle=False) as stored:
        assert sha256_array(stored["stable.fin"]) != sha256_array(stored["rev.fin"])
