# SPDX-License-Identifier: Apache-2.0
"""Q6_K weight blocks and Q8_1 activation blocks: pack, unpack, dequantise, random valid blocks.

A Q6_K block is 210 bytes for 256 weights: `ql` 128 bytes (low nibbles), `qh` 64 bytes (upper two bits), 16 int8 scales
(one per 16 weights), float16 `d`; weight = d * scale * (q - 32) with q in 0..63. A Q8_1 block is 36 bytes for 32
activations: float16 `d`, float16 `s` = d * sum(q), 32 int8 `q`; activation = d * q. `s` serves formats with a minimum;
Q6_K does not use it. Source of the layout: ggml's block_q6_K and block_q8_1 (facts only), checked against the `gguf`
package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError

Q6K_WEIGHTS = 256
Q6K_BYTES = 210
Q6K_GROUP = 16  # weights per scale
Q8_1_VALUES = 32
Q8_1_BYTES = 36
_D_LIMIT = np.float32(65520)  # what float16 rounds to infinity
Q8_1_LIMIT = 65_520 * 127

_QL, _QH, _SCALES, _D = slice(0, 128), slice(128, 192), slice(192, 208), slice(208, 210)

Bytes = NDArray[np.uint8]


class Q6K(NamedTuple):
    """The fields of Q6_K blocks: q uint8 [..., 256] in 0..63, scales int8 [..., 16], d float16 [...]."""

    q: NDArray[np.uint8]
    scales: NDArray[np.int8]
    d: NDArray[np.float16]


class Q81(NamedTuple):
    """The fields of Q8_1 blocks: q int8 [..., 32], d float16 [...], s float16 [...] (d times the sum of q)."""

    q: NDArray[np.int8]
    d: NDArray[np.float16]
    s: NDArray[np.float16]


def _expect(array: NDArray[Any], name: str, dtype: type[np.generic], last: int) -> None:
    if array.dtype != dtype or array.ndim == 0 or array.shape[-1] != last:
        raise InputError(
            f"{name} is {array.dtype} {array.shape}",
            where="moe.q6k",
            limit=f"{np.dtype(dtype)} with a last axis of {last} is needed",
            way_out="pass whole blocks",
        )


def blocks_per_row(cols: int) -> int:
    """Q6_K blocks in a row of `cols` weights. Raises InputError unless `cols` is a positive multiple of 256."""
    if cols <= 0 or cols % Q6K_WEIGHTS:
        raise InputError(
            f"cols is {cols}",
            where="moe.q6k",
            limit=f"a row holds whole Q6_K blocks of {Q6K_WEIGHTS} weights",
            way_out=f"take a positive multiple of {Q6K_WEIGHTS}",
        )
    return cols // Q6K_WEIGHTS


def pack(fields: Q6K) -> Bytes:
    """Pack fields into Q6_K blocks, uint8 [..., 210]. Raises InputError on a wrong shape or dtype or a q above 63."""
    q, scales, d = fields
    _expect(q, "q", np.uint8, Q6K_WEIGHTS)
    _expect(scales, "scales", np.int8, Q6K_WEIGHTS // Q6K_GROUP)
    if q.max(initial=0) > 63:
        raise InputError(f"q holds {q.max()}", where="moe.q6k.pack", limit="q has 6 bits", way_out="keep q in 0..63")
    if d.dtype != np.float16 or not q.shape[:-1] == scales.shape[:-1] == d.shape:
        raise InputError(
            f"d is {d.dtype} {d.shape} beside q {q.shape} and scales {scales.shape}",
            where="moe.q6k.pack",
            limit="one float16 d per block is needed",
            way_out="give the three fields the same leading shape",
        )
    blocks = np.empty((*d.shape, Q6K_BYTES), np.uint8)
    # Weight 128 h + 32 j + l: nibble j // 2 of ql[64 h + 32 (j % 2) + l], bit pair j of qh[32 h + l].
    quarters = q.reshape(*d.shape, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    blocks[..., _QL] = (low[..., :2, :] | low[..., 2:, :] << 4).reshape(*d.shape, 128)
    pairs = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    blocks[..., _QH] = pairs.reshape(*d.shape, 64)
    blocks[..., _SCALES] = scales.view(np.uint8)
    blocks[..., _D] = np.ascontiguousarray(d).astype("<f2")[..., None].view(np.uint8)
    return blocks


def unpack(blocks: Bytes) -> Q6K:
    """Split Q6_K blocks, uint8 [..., 210], into their fields: the inverse of `pack`, for any bytes."""
    blocks = np.asarray(blocks)
    _expect(blocks, "blocks", np.uint8, Q6K_BYTES)
    lead = blocks.shape[:-1]
    ql = blocks[..., _QL].reshape(*lead, 2, 2, 32)
    qh = blocks[..., _QH].reshape(*lead, 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=-2)
    high = qh >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    d = np.ascontiguousarray(blocks[..., _D]).view("<f2")[..., 0].astype(np.float16)
    scales = np.ascontiguousarray(blocks[..., _SCALES]).view(np.int8)
    return Q6K((low | high << 4).reshape(*lead, Q6K_WEIGHTS), scales, d)


def dequantize(blocks: Bytes) -> NDArray[np.float32]:
    """Weights of Q6_K blocks, uint8 [..., 210] -> float32 [..., 256]: (d * scale) * (q - 32), each product rounded."""
    q, scales, d = unpack(blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        step = d.astype(np.float32)[..., None] * scales.astype(np.float32)
        centred = (q.astype(np.int8) - np.int8(32)).astype(np.float32)
        weights = step[..., None] * centred.reshape(*step.shape, Q6K_GROUP)
    return np.asarray(weights.reshape(q.shape), np.float32)


def pack_q8_1(fields: Q81) -> Bytes:
    """Pack fields into Q8_1 blocks, uint8 [..., 36]. Raises InputError on a wrong shape or dtype."""
    q, d, s = fields
    _expect(q, "q", np.int8, Q8_1_VALUES)
    if d.dtype != np.float16 or s.dtype != np.float16 or not q.shape[:-1] == d.shape == s.shape:
        raise InputError(
            f"d is {d.dtype} {d.shape} and s is {s.dtype} {s.shape} beside q {q.shape}",
            where="moe.q6k.pack_q8_1",
            limit="one float16 d and one float16 s per block are needed",
            way_out="give the three fields the same leading shape",
        )
    blocks = np.empty((*d.shape, Q8_1_BYTES), np.uint8)
    blocks[..., 0:2] = np.ascontiguousarray(d).astype("<f2")[..., None].view(np.uint8)
    blocks[..., 2:4] = np.ascontiguousarray(s).astype("<f2")[..., None].view(np.uint8)
    blocks[..., 4:] = q.view(np.uint8)
    return blocks


def unpack_q8_1(blocks: Bytes) -> Q81:
    """Split Q8_1 blocks, uint8 [..., 36], into their fields: the inverse of `pack_q8_1`, for any bytes."""
    blocks = np.asarray(blocks)
    _expect(blocks, "blocks", np.uint8, Q8_1_BYTES)
    halves = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float16)
    return Q81(np.ascontiguousarray(blocks[..., 4:]).view(np.int8), halves[..., 0], halves[..., 1])


def dequantize_q8_1(blocks: Bytes) -> NDArray[np.float32]:
    """Activations of Q8_1 blocks, uint8 [..., 36] -> float32 [..., 32]: d * q."""
    q, d, _ = unpack_q8_1(blocks)
    with np.errstate(invalid="ignore"):
        return np.asarray(d.astype(np.float32)[..., None] * q.astype(np.float32), np.float32)


def quantize_q8_1(x: NDArray[np.float32]) -> Bytes:
    """Q8_1 blocks, uint8 [..., n / 32, 36], of float32 [..., n]: d = max|x| / 127, q = x * (1 / d) to nearest, ties to
    even.

    A block whose 1 / d is beyond float32 has q = 0: its d is 0 as a float16, so all its activations are 0 anyway. Its s
    is infinite where d times the sum of q is beyond float16, as ggml's is: no Q6_K product reads it.
    Raises InputError unless n is a multiple of 32, every value is finite, and every d stays finite as a float16.
    """
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        x = np.asarray(x, np.float32)
    if x.ndim == 0 or x.shape[-1] % Q8_1_VALUES or not np.isfinite(x).all():
        raise InputError(
            f"activations of shape {x.shape}",
            where="moe.q6k.quantize_q8_1",
            limit=f"finite values in whole blocks of {Q8_1_VALUES} are needed",
            way_out="pad the last axis, or clean the values",
        )
    groups = x.reshape(*x.shape[:-1], -1, Q8_1_VALUES)
    largest = np.abs(groups).max(axis=-1)
    step = largest / np.float32(127)
    if (step >= _D_LIMIT).any():
        raise InputError(
            f"an activation of {largest.max():,.9g}",
            where="moe.q6k.quantize_q8_1",
            limit=f"below {Q8_1_LIMIT:,}: beyond it the block's float16 d is infinite, and every dot product NaN",
            way_out="scale the activations down",
        )
    with np.errstate(over="ignore"):
        inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    inverse[~np.isfinite(inverse)] = 0
    q = np.clip(np.rint(groups * inverse[..., None]), -127, 127).astype(np.int8)
    with np.errstate(over="ignore"):
        s = (step * q.sum(axis=-1, dtype=np.int32).astype(np.float32)).astype(np.float16)
        return pack_q8_1(Q81(q, step.astype(np.float16), s))


def _random_bytes(bits: np.random.PCG64, count: int) -> Bytes:
    # NumPy keeps the raw stream of a bit generator stable between versions; it does not promise that for `Generator`.
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def _random_scale(bits: np.random.PCG64, count: int, exponent: int) -> NDArray[np.float16]:
    """`count` positive float16 in [2**exponent, 2**(exponent + 1)), the mantissa uniform."""
    mantissa = _random_bytes(bits, 2 * count).view("<u2") & 0x3FF
    return np.asarray(mantissa | (exponent + 15) << 10, "<u2").view("<f2").astype(np.float16)


def random_q6k(bits: np.random.PCG64, shape: tuple[int, ...]) -> Bytes:
    """Random valid Q6_K blocks, uint8 [*shape, 210]: any q and scales, d in [2**-14, 2**-13).

    Weights then lie within +-0.5. Reads the raw stream of `bits` only, so a seed gives the same blocks everywhere.
    """
    count = int(np.prod(shape, dtype=np.int64))
    blocks = _random_bytes(bits, count * Q6K_BYTES).reshape(count, Q6K_BYTES)
    blocks[:, _D] = _random_scale(bits, count, -14).astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(*shape, Q6K_BYTES)


def random_q8_1(bits: np.random.PCG64, shape: tuple[int, ...]) -> Bytes:
    """Random valid Q8_1 blocks, uint8 [*shape, 36]: q in -127..127, d in [2**-7, 2**-6), s = d * sum(q)."""
    count = int(np.prod(shape, dtype=np.int64))
    q = np.maximum(_random_bytes(bits, count * Q8_1_VALUES).view(np.int8), -127).reshape(count, Q8_1_VALUES)
    d = _random_scale(bits, count, -7)
    s = (d.astype(np.float32) * q.sum(axis=-1, dtype=np.int32).astype(np.float32)).astype(np.float16)
    return pack_q8_1(Q81(q, d, s)).reshape(*shape, Q8_1_BYTES)
