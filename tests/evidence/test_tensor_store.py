# SPDX-License-Identifier: Apache-2.0
"""Each distinct tensor once, bit for bit: NaN payloads, negative zeros, bfloat16 and what differs in few elements."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from routeblock.errors import InputError
from routeblock.evidence import tensor_store
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.tensor_store import INDEX, read_store, write_store

Arrays = dict[str, NDArray[Any]]


def by_digest(*arrays: NDArray[Any]) -> Arrays:
    return {sha256_array(x): x for x in arrays}


def some() -> Arrays:
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 16, (40, 8), np.uint16)
    near = words.copy()
    near[7, 3] ^= 0x8000
    near[9] ^= 0x0101
    odd = np.array([0x7E01, 0xFE55, 0x8000, 0x0001], np.uint16)  # NaN payloads, -0, a subnormal
    return by_digest(
        words.view(np.float16),
        near.view(np.float16),
        words.view(ml_dtypes.bfloat16)[:20],
        odd.view(np.float16),
        np.arange(-5, 5, dtype=np.int32),
        np.zeros((0, 4), np.float16),
        np.array([], np.int32),
    )


def entries(path: Path) -> Arrays:
    found: Arrays = load(lzma.decompress(path.read_bytes()))
    return found


def rewrite(path: Path, found: Arrays) -> None:
    path.write_bytes(lzma.compress(save(found)))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "tensors.xz"
    write_store(path, some())
    return path


def test_every_array_comes_back_in_every_bit(store: Path) -> None:
    given, found = some(), read_store(store)
    assert found.keys() == given.keys()
    for digest, x in given.items():
        assert (found[digest].dtype, found[digest].shape) == (x.dtype, x.shape)
        assert found[digest].tobytes() == x.tobytes()


def test_the_same_arrays_give_the_same_file_in_any_order(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.xz"
    write_store(other, dict(reversed(some().items())))
    assert other.read_bytes() == store.read_bytes()


def test_a_tensor_close_to_a_base_is_kept_as_what_differs(store: Path) -> None:
    index = json.loads(entries(store)[INDEX].tobytes())["tensors"]
    based = [digest for digest, entry in index.items() if entry["base"]]
    assert len(based) == 1  # of the two large ones, either
    kept = entries(store)
    assert based[0] not in kept
    assert np.unpackbits(kept[f"{based[0]}.where"]).sum() == 9 and kept[f"{based[0]}.xor"].size == 2 * 9
    assert sha256_array(read_store(store)[based[0]]) == based[0]


def test_a_tensor_unlike_any_other_is_kept_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    unlike = by_digest(*(rng.integers(0, 1 << 16, 400, np.uint16).view(np.float16) for _ in range(3)))
    write_store(tmp_path / "s.xz", unlike)
    assert entries(tmp_path / "s.xz").keys() == {INDEX, *unlike}


@pytest.mark.parametrize("kind", ["xor", "where", "base"])
def test_one_changed_bit_of_any_entry_is_refused(store: Path, kind: str) -> None:
    found = entries(store)
    index = json.loads(found[INDEX].tobytes())["tensors"]
    digest = next(d for d, entry in index.items() if entry["base"])
    name = {"xor": f"{digest}.xor", "where": f"{digest}.where", "base": index[digest]["base"]}[kind]
    changed = found[name].copy()
    changed.reshape(-1)[0] ^= 1
    rewrite(store, {**found, name: changed})
    with pytest.raises(InputError, match=r"rebuilt to other bytes|not readable"):
        read_store(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(format="routeblock.tensor_store.v2"),
        lambda index: next(iter(index["tensors"].values())).update(shape=[1]),
        lambda index: next(iter(index["tensors"].values())).update(base="0" * 64),
        lambda index: index["tensors"].update({"0" * 64: {"base": None, "dtype": "int32", "shape": [1]}}),
    ],
    ids=["format", "shape", "base that is not there", "tensor that is not there"],
)
def test_an_index_that_does_not_fit_is_refused_in_one_line(store: Path, change: Any) -> None:
    found = entries(store)
    index = json.loads(found[INDEX].tobytes())
    change(index)
    rewrite(store, {**found, INDEX: np.frombuffer(canonical_json(index), np.uint8)})
    with pytest.raises(InputError, match="restore the file") as refused:
        read_store(store)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b"x" + b[1:], lambda b: b[:99] + b[98:]])
def test_a_damaged_file_is_refused_in_one_line(store: Path, damage: Any) -> None:
    store.write_bytes(damage(store.read_bytes()))
    with pytest.raises(InputError) as refused:
        read_store(store)
    assert "\n" not in str(refused.value)


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_store, "FREE_BYTES", 100)
    monkeypatch.setattr(tensor_store, "EXPANSION", 0)
    with pytest.raises(InputError, match="unpacks to more than 100 bytes"):
        read_store(store)
