# SPDX-License-Identifier: Apache-2.0
"""AWQ checkpoint packing and Marlin packing of 4-bit weights, zero points and scales, and their inverses.

All arrays are those of one expert; K rows, N columns. Facts: vLLM's packing functions; their digests on a recorded
expert are in fixtures/golden/packed_e106.json.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError

AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the column that nibble i of an int32 holds, low nibble first
TILE = 16
RUN = 1024  # nibbles that the Marlin permutation works on: four 16 x 16 tiles


def _refuse(what: str, limit: str) -> InputError:
    return InputError(what, where="weight packing", limit=limit, way_out="check the tensor's layout")


def _pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """uint8 [R, C] of 0..15 -> int32 [R, C/8], low nibble first."""
    pairs = values[:, 0::2] | (values[:, 1::2] << 4)
    return np.ascontiguousarray(pairs).view(np.dtype("<i4"))


def _unpack_nibbles(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """int32 [R, C/8] -> uint8 [R, C], low nibble first."""
    pairs = np.ascontiguousarray(packed, dtype="<i4").view(np.uint8)
    out = np.empty((pairs.shape[0], 2 * pairs.shape[1]), np.uint8)
    np.bitwise_and(pairs, 15, out=out[:, 0::2])
    np.right_shift(pairs, 4, out=out[:, 1::2])
    return out


def _check_nibbles(values: NDArray[Any], multiple: int) -> None:
    if (
        values.dtype != np.uint8
        or values.ndim != 2
        or values.shape[1] % multiple
        or (values.size and values.max() > 15)
    ):
        raise _refuse(
            f"{values.dtype} {values.shape}, largest value {values.max() if values.size else 0}",
            f"uint8 of 0 to 15, two axes, columns a multiple of {multiple}",
        )


def _check_words(packed: NDArray[Any], multiple: int) -> None:
    if packed.dtype != np.int32 or packed.ndim != 2 or packed.shape[1] * 8 % multiple:
        raise _refuse(f"{packed.dtype} {packed.shape}", f"int32, two axes, {multiple} values to a row's unit")


def pack_awq(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Checkpoint form of weights [K, N] or zero points [K/group, N]: uint8 0..15 -> int32 [.., N/8]."""
    _check_nibbles(values, 8)
    rows, columns = values.shape
    return _pack_nibbles(values.reshape(rows, columns // 8, 8)[:, :, AWQ_ORDER].reshape(rows, columns))


def unpack_awq(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Inverse of `pack_awq`: int32 [R, N/8] -> uint8 [R, N]."""
    _check_words(packed, 8)
    out = np.empty((*packed.shape, 8), np.uint8)
    for nibble, column in enumerate(AWQ_ORDER):
        out[:, :, column] = (packed >> (4 * nibble)) & 15
    return out.reshape(packed.shape[0], -1)


@cache
def _weight_permutation() -> NDArray[np.int64]:
    """Source index of each of the 1,024 nibbles of a Marlin run."""
    order: list[int] = []
    for lane in range(32):
        column, pair = divmod(lane, 4)
        for tile in range(4):
            for half in (0, 8):
                order.extend(256 * tile + 16 * row + column + half for row in (2 * pair + d for d in (0, 1, 8, 9)))
    return np.array(order).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)


def marlin_repack_weights(q: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Marlin form of weights: uint8 [K, N] -> int32 [K/16, 2N]. K must be a multiple of 16, N of 64."""
    _check_nibbles(q, 64)
    k, n = q.shape
    if k % TILE:
        raise _refuse(f"K={k}", "K a multiple of 16")
    # A word holds the rows 2p, 2p+1, 2p+8, 2p+9 of two columns 8 apart. Axes: K-tile, row/8, p, row%2, run, tile,
    # column/8, column%8. Words are gathered in q's order, nibble by nibble, and put in Marlin's order once: much faster
    # than permuting nibbles.
    axes = q.reshape(k // TILE, 2, 4, 2, n // 64, 4, 2, 8)
    words = np.zeros((k // TILE, 4, n // 64, 4, 8), np.uint32)
    for nibble, (odd, column, row) in enumerate(np.ndindex(2, 2, 2)):
        words |= axes[:, row, :, odd, :, :, column, :].astype(np.uint32) << np.uint32(4 * nibble)
    return np.ascontiguousarray(words.transpose(0, 2, 4, 1, 3)).view(np.int32).reshape(k // TILE, 2 * n)


def marlin_unpack_weights(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Inverse of `marlin_repack_weights`: int32 [K/16, 2N] -> uint8 [K, N]."""
    _check_words(packed, RUN)
    k, n = packed.shape[0] * TILE, packed.shape[1] // 2
    runs = _unpack_nibbles(packed).reshape(-1, RUN)[:, np.argsort(_weight_permutation())]
    return np.ascontiguousarray(runs.reshape(k // TILE, n // TILE, TILE, TILE).transpose(0, 2, 1, 3)).reshape(k, n)


def _scale_order(groups: int) -> NDArray[np.int64]:
    """Column order of scales: of 64 columns with several groups, of 32 with one."""
    if groups > 1:
        order = np.add.outer(np.arange(8), 8 * np.arange(8))
    else:
        order = np.add.outer(2 * np.arange(4), np.array([0, 1, 8, 9, 16, 17, 24, 25]))
    return np.asarray(order.reshape(-1), np.int64)


def _reorder_columns(x: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    rows, columns = x.shape
    if columns % order.size:
        raise _refuse(f"{columns} columns", f"a multiple of {order.size}")
    return np.ascontiguousarray(x.reshape(rows, -1, order.size)[:, :, order]).reshape(rows, columns)


def marlin_permute_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """Marlin order of scales [groups, N], any dtype."""
    return _reorder_columns(scales, _scale_order(scales.shape[0]))


def marlin_unpermute_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """Inverse of `marlin_permute_scales`."""
    return _reorder_columns(scales, np.argsort(_scale_order(scales.shape[0])))


def marlin_pack_zeros(zeros: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Marlin form of zero points: uint8 [groups, N] -> int32 [groups, N/8]: the 64-column order, then the nibble
    order.
    """
    _check_nibbles(zeros, 64)
    return pack_awq(_reorder_columns(zeros, _scale_order(2)))


def marlin_unpack_zeros(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Inverse of `marlin_pack_zeros`: int32 [groups, N/8] -> uint8 [groups, N]."""
    _check_words(packed, 64)
    return _reorder_columns(unpack_awq(packed), np.argsort(_scale_order(2)))
