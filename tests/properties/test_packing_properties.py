# SPDX-License-Identifier: Apache-2.0
"""Every packing comes back in every bit, for any values. AWQ's and Marlin's packings: tests/moe/test_awq.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.evidence import packed
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.tensor_store import read_store, write_store
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.moe import q6k

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.int32, np.int64, np.uint8]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=8,
)


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)  # any bits: NaN payloads too


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2**32 - 1))
def test_blocks_of_q6_k_and_q8_1(lead: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*lead, q6k.Q6K_BYTES), np.uint8)
    assert np.array_equal(q6k.pack(q6k.unpack(blocks)), blocks)
    activations = rng.integers(0, 256, (*lead, q6k.Q8_1_BYTES), np.uint8)
    assert np.array_equal(q6k.pack_q8_1(q6k.unpack_q8_1(activations)), activations)


@settings(max_examples=60, deadline=None)
@given(st.lists(_arrays(), min_size=1, max_size=4))
def test_tensor_files_and_stores(arrays: list[np.ndarray[Any, Any]]) -> None:
    # A store knows an array by the digest of its bytes, so equal bytes are one array.
    by_digest = {sha256_array(x): x for x in arrays}
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(Path(folder) / "t.safetensors", by_digest)
        write_store(Path(folder) / "t.xz", by_digest)
        for found in (load_tensors(Path(folder) / "t.safetensors"), read_store(Path(folder) / "t.xz")):
            assert found.keys() == by_digest.keys()
            for digest, x in by_digest.items():
                assert (found[digest].dtype, found[digest].shape) == (x.dtype, x.shape)
                assert found[digest].tobytes() == x.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}\.json", fullmatch=True), JSON.filter(lambda x: x is not None)))
def test_folders_as_lines(documents: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as at:
        root = Path(at)
        (root / "in/a").mkdir(parents=True)
        for name, document in documents.items():
            (root / "in/a" / name).write_bytes(canonical_json(document))
        packed.write_lines(root / "lines.jsonl", packed.pack(root / "in", [*(root / "in/a").iterdir()], {}))
        for line in packed.read_lines(root / "lines.jsonl"):
            packed.unpack(line, {}, root / "out", where="here")
        found = {p.name: p.read_bytes() for p in (root / "out").rglob("*.json")}
        assert found == {name: canonical_json(document) for name, document in documents.items()}
