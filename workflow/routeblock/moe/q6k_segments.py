# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of q6k_dispatch.cu in NumPy, bit for bit, and how far it may lie from the dequantised product.

Both paths of the kernel add in this order, whatever the batch: a row is cut into segments of two Q6_K blocks; in a
block the sum of each 32 products, scales included, is an exact integer; t = fma(sum, activation d, t) over the eight of
them, p = fma(t, weight d, p) over the blocks of a segment, and the segments are added from the first on. (The kernel
holds 4 times the integers and a quarter of d: powers of two, so the same roundings.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routeblock.moe import q6k

SEGMENT_BLOCKS = 2
# Roundings that a product passes through before the segments are added: fma with the activation's d (at most 8), fma
# with the weight block's d (at most 2).
_ROUNDINGS_IN_SEGMENT = 10
_DEQUANTISED = 3  # w = (d * scale) * (q - 32) and x = d * q are rounded too: two and one
_F32 = np.float32


def fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """a * b + c rounded once to float32, for finite values without underflow.

    The product is exact in float64. Its sum with c is rounded to odd there, so that rounding it again gives what one
    rounding would (Boldo and Melquiond, 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    # Away from zero where the error has the sum's sign, towards zero otherwise: the neighbour that is odd.
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & even, bits + step, bits).view(np.float64)
    return odd.astype(_F32)


def dot(weights: NDArray[np.uint8], activations: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Row sums, float32 [...], of Q6_K rows uint8 [..., n, 210] with Q8_1 rows uint8 [..., 8 n, 36]."""
    q, scales, d = q6k.unpack(weights)
    a, a_d, _ = q6k.unpack_q8_1(activations)
    lead, n = d.shape[:-1], d.shape[-1]
    x = a.astype(np.int32).reshape(*a.shape[:-2], n, 8, 2, 16)
    products = (q.astype(np.int32) - 32).reshape(*lead, n, 8, 2, 16) * x
    groups = products.sum(axis=-1, dtype=np.int32) * scales.astype(np.int32).reshape(*lead, n, 8, 2)
    sums = groups.sum(axis=-1, dtype=np.int32).astype(_F32)
    step = np.broadcast_to(a_d.astype(_F32).reshape(*a_d.shape[:-1], n, 8), sums.shape)
    t = np.zeros((*lead, n), _F32)
    for j in range(8):
        t = fma(sums[..., j], step[..., j], t)
    total: NDArray[np.float32] | None = None
    for first in range(0, n, SEGMENT_BLOCKS):
        p = np.zeros(lead, _F32)
        for block in range(first, min(first + SEGMENT_BLOCKS, n)):
            p = fma(t[..., block], d[..., block].astype(_F32), p)
        total = p if total is None else total + p
    assert total is not None
    return np.asarray(total, _F32)


def bound(
    weights: NDArray[np.uint8], activations: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Row sums of the dequantised float32 values, in float64 [...], and how far `dot` may lie from them.

    gamma(k) times the sum of |weight * activation|, k the roundings that a term passes through: 10 in its segment, one
    for every further segment, 3 in dequantisation, and one for the float64 sum, which is less. Integers are exact: 32
    products of at most 32 * 127, times a scale of at most 128, stay below 2**24. Underflow aside.
    """
    w = q6k.dequantize(weights).astype(np.float64)
    x = q6k.dequantize_q8_1(activations).astype(np.float64)
    x = x.reshape(*x.shape[:-2], *w.shape[-2:])
    terms = w * x
    segments = -(-w.shape[-2] // SEGMENT_BLOCKS)
    roundings = (_ROUNDINGS_IN_SEGMENT + segments - 1 + _DEQUANTISED + 1) * 2.0**-24
    axes = (-2, -1)
    return terms.sum(axis=axes), np.abs(terms).sum(axis=axes) * roundings / (1 - roundings)
