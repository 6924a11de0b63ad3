# SPDX-License-Identifier: Apache-2.0
"""Q6_K and Q8_1 blocks against the `gguf` package and against themselves, on bits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize

from routeblock.errors import InputError
from routeblock.moe import q6k

# zero, -zero, smallest subnormal, largest subnormal, smallest normal, largest, infinities, quiet and signalling NaN
SPECIAL_D = [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE00]


def random_bytes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def assert_same_floats(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits wherever a value is a number; the same places are NaN (IEEE 754 leaves a NaN's payload open)."""
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def test_dequantize_equals_gguf_on_random_bytes() -> None:
    blocks = random_bytes(1, 4000, q6k.Q6K_BYTES)
    with np.errstate(all="ignore"):
        theirs = gguf_dequantize(blocks, gguf.GGMLQuantizationType.Q6_K)
    assert_same_floats(q6k.dequantize(blocks), theirs)


@pytest.mark.parametrize("d", SPECIAL_D)
def test_dequantize_equals_gguf_on_special_d(d: int) -> None:
    blocks = random_bytes(d, 64, q6k.Q6K_BYTES)
    blocks[:, 208:] = np.array([d], "<u2").view(np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf_dequantize(blocks, gguf.GGMLQuantizationType.Q6_K)
    assert_same_floats(q6k.dequantize(blocks), theirs)


def test_q8_1_is_q8_0_with_a_sum() -> None:
    """gguf has no Q8_1 dequantiser; without the sum field the block is a Q8_0 block."""
    blocks = random_bytes(2, 2000, q6k.Q8_1_BYTES)
    blocks[: len(SPECIAL_D), :2] = np.array(SPECIAL_D, "<u2").view(np.uint8).reshape(-1, 2)
    q8_0 = np.concatenate([blocks[:, :2], blocks[:, 4:]], axis=1)
    with np.errstate(all="ignore"):
        theirs = gguf_dequantize(q8_0, gguf.GGMLQuantizationType.Q8_0)
    assert_same_floats(q6k.dequantize_q8_1(blocks), theirs)


def test_pack_inverts_unpack_on_any_bytes() -> None:
    blocks = random_bytes(3, 7, 11, q6k.Q6K_BYTES)
    assert np.array_equal(q6k.pack(q6k.unpack(blocks)), blocks)
    blocks = random_bytes(4, 7, 11, q6k.Q8_1_BYTES)
    assert np.array_equal(q6k.pack_q8_1(q6k.unpack_q8_1(blocks)), blocks)


def test_every_weight_position_is_independent() -> None:
    """One weight set at a time: a permuted layout that pack and unpack share would still move it under gguf."""
    q = np.full((256, 256), 32, np.uint8)
    np.fill_diagonal(q, 63)
    scales = np.tile(np.arange(1, 17, dtype=np.int8), (256, 1))
    blocks = q6k.pack(q6k.Q6K(q, scales, np.ones(256, np.float16)))
    expected = np.diag(31.0 * np.repeat(np.arange(1, 17), 16)).astype(np.float32)
    assert np.array_equal(gguf_dequantize(blocks, gguf.GGMLQuantizationType.Q6_K), expected)
    assert np.array_equal(q6k.dequantize(blocks), expected)


def test_quantize_q8_1_equals_q8_0_and_carries_the_sum() -> None:
    x = np.random.default_rng(5).standard_normal((64, 96)).astype(np.float32)
    x[0, :32] = 0
    q, d, s = q6k.unpack_q8_1(q6k.quantize_q8_1(x))
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0).reshape(64, 3, 34)
    assert np.array_equal(d.view(np.uint16), np.ascontiguousarray(theirs[..., :2]).view("<u2")[..., 0])
    ours = q.astype(np.int16)
    # gguf rounds halves away from zero, we to even; no half occurs in this sample.
    assert np.array_equal(ours, theirs[..., 2:].view(np.int8))
    step = np.abs(x.reshape(64, 3, 32)).max(axis=-1) / np.float32(127)
    assert np.array_equal(s, (step * ours.sum(-1).astype(np.float32)).astype(np.float16))


def test_random_blocks_are_valid_and_repeatable() -> None:
    weights = q6k.random_q6k(np.random.PCG64(6), (3, 5, 2))
    assert weights.shape == (3, 5, 2, 210)
    assert np.array_equal(weights, q6k.random_q6k(np.random.PCG64(6), (3, 5, 2)))
    values = q6k.dequantize(weights)
    assert np.isfinite(values).all() and np.abs(values).max() <= 0.5
    activations = q6k.random_q8_1(np.random.PCG64(7), (4, 16))
    q, d, s = q6k.unpack_q8_1(activations)
    assert q.min() >= -127 and np.isfinite(d).all() and np.isfinite(s).all() and (d > 0).all()
    assert len(np.unique(weights[..., :208])) == 256


@pytest.mark.parametrize("cols", [0, -256, 255, 300])
def test_cols_must_be_whole_blocks(cols: int) -> None:
    with pytest.raises(InputError, match="multiple of 256"):
        q6k.blocks_per_row(cols)


def test_bad_fields_are_refused() -> None:
    good = q6k.unpack(random_bytes(8, 2, 210))
    with pytest.raises(InputError, match="6 bits"):
        q6k.pack(good._replace(q=good.q | np.uint8(64)))
    with pytest.raises(InputError, match="one float16 d"):
        q6k.pack(good._replace(d=good.d[:1]))
    with pytest.raises(InputError, match="whole blocks"):
        q6k.dequantize(random_bytes(9, 4, 209))
