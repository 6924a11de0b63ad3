# SPDX-License-Identifier: Apache-2.0
"""Unpacking of AWQ words into the byte-per-weight arrays that the twin computes with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from routeblock.twin.jit import jit


@jit()
def _unpack(words: Any, eights: Any, first: int) -> None:
    """Nibble i of a word goes to byte [0, 2, 4, 6, 1, 3, 5, 7][i] of eight: the low half to even bytes, the high to
    odd.
    """
    for r in range(words.shape[0]):
        for c in range(words.shape[1]):
            even, odd = np.uint64(words[r, c] & np.uint32(0xFFFF)), np.uint64(words[r, c] >> np.uint32(16))
            even = (even | (even << np.uint64(24))) & np.uint64(0x000000FF000000FF)
            odd = (odd | (odd << np.uint64(24))) & np.uint64(0x000000FF000000FF)
            even = (even | (even << np.uint64(12))) & np.uint64(0x000F000F000F000F)
            odd = (odd | (odd << np.uint64(12))) & np.uint64(0x000F000F000F000F)
            eights[r, first + c] = even | (odd << np.uint64(8))


def unpack_into(words: NDArray[np.int32], out: NDArray[np.uint8], first_column: int) -> None:
    """Write the values of AWQ words [R, C] to out[:, first_column : first_column + 8 * C], uint8 (see `moe.awq`).

    `out` is C-contiguous, its width and `first_column` multiples of 8.
    """
    _unpack(np.ascontiguousarray(words).view("<u4"), out.view("<u8"), first_column // 8)


Weights = tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[Any]]


class PackedProjection(Protocol):
    """One projection of one expert: qweight int32 [K, N/8], qzeros int32 [K/g, N/8] or None, scales [K/g, N]."""

    @property
    def qweight(self) -> NDArray[np.int32]:
        """Packed weights."""

    @property
    def qzeros(self) -> NDArray[np.int32] | None:
        """Packed zero points."""

    @property
    def scales(self) -> NDArray[Any]:
        """Scales."""


class PackedLayer(Protocol):
    """What is needed of a layer in AutoAWQ's form."""

    @property
    def experts(self) -> Sequence[int]:
        """Global ids of the experts in use."""

    def shape(self, gemm: str) -> tuple[int, int]:
        """(N, K) of `w13` or `w2`."""

    def packed(self, gemm: str) -> Iterable[Sequence[PackedProjection]]:
        """For each expert in use its projections, side by side."""


def unpack(layer: PackedLayer, gemm: str) -> Weights:
    """(q uint8 [E, K, N], zeros uint8 [E, K/g, N] or None, scales [E, K/g, N]) of the experts in use, gate before
    up.
    """
    n, k = layer.shape(gemm)
    experts = len(layer.experts)
    q = np.empty((experts, k, n), np.uint8)
    zeros: NDArray[np.uint8] | None = None
    scales: NDArray[Any] | None = None
    for row, projections in enumerate(layer.packed(gemm)):
        at = 0
        for packed in projections:
            groups, width = packed.scales.shape
            if scales is None:
                scales = np.empty((experts, groups, n), packed.scales.dtype)
                zeros = None if packed.qzeros is None else np.empty(scales.shape, np.uint8)
            unpack_into(packed.qweight, q[row], at)
            scales[row, :, at : at + width] = packed.scales
            if zeros is not None:
                assert packed.qzeros is not None
                unpack_into(packed.qzeros, zeros[row], at)
            at += width
    assert scales is not None
    return q, zeros, scales
