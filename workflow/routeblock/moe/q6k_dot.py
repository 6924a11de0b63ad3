# SPDX-License-Identifier: Apache-2.0
"""The Q6_K x Q8_1 dot product as our kernels round it, in NumPy: the definition that GPU and CPU bits are held against.

A warp of 32 lanes shares a row. In every block of 256 weights a lane holds eight of them, four from each of two
groups of 32; products with int8 activations sum exactly in int32. Roundings, all float32 to nearest, in this order:
each four-term sum times its scale (an exact integer below 2**24) times the activation block's d; the sum of the two;
times the weight block's d; plus the lane's accumulator, block after block. Then the lanes add in halves: lane l takes
lane l + 16, then 8, 4, 2, 1. No operation is fused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routeblock.moe import q6k

LANES = 32


def dot(weights: NDArray[np.uint8], activations: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Row sums, float32 [...], of Q6_K rows uint8 [..., n, 210] with Q8_1 rows uint8 [..., 8 n, 36]."""
    q, scales, d = q6k.unpack(weights)
    a, a_d, _ = q6k.unpack_q8_1(activations)
    lead, n = d.shape[:-1], d.shape[-1]
    # Position 128 h + 64 p + 32 i + 4 k + b: lane 16 h + 8 i + k, part p, byte b.
    shape = (*lead, n, 2, 2, 2, 8, 4)
    products = (q.astype(np.int32) - 32).reshape(shape) * a.astype(np.int32).reshape(shape)
    sums = products.sum(axis=-1, dtype=np.int32)
    step = np.repeat(scales.reshape(*lead, n, 2, 2, 2, 2), 4, axis=-1).astype(np.int32)
    a_step = a_d.astype(np.float32).reshape(*lead, n, 2, 2, 2, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        parts = (sums * step).astype(np.float32) * a_step
        terms = (parts[..., 0, :, :] + parts[..., 1, :, :]) * d.astype(np.float32)[..., None, None, None]
        terms = terms.reshape(*lead, n, LANES)
        lanes = np.zeros((*lead, LANES), np.float32)
        for block in range(n):
            lanes = lanes + terms[..., block, :]
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0], np.float32)


def dequantized_dot(
    weights: NDArray[np.uint8], activations: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Row sums from the dequantised float32 values, in float64 [...], and how far `dot` may lie from them.

    The bound is the standard one for float32 to nearest: gamma(n + 10) times the sum of |weight * activation|, where
    n + 10 covers the roundings a term passes through in `dot` (n + 8) and in dequantisation (2). The float64 sum adds
    less than 2**-40 of that, counted as one rounding more. Underflow does not occur with the fixtures' scales.
    """
    w = q6k.dequantize(weights).astype(np.float64)
    x = q6k.dequantize_q8_1(activations).astype(np.float64).reshape(w.shape)
    terms = w * x
    roundings = (w.shape[-2] + 11) * 2.0**-24
    axes = (-2, -1)
    return terms.sum(axis=axes), np.abs(terms).sum(axis=axes) * roundings / (1 - roundings)
