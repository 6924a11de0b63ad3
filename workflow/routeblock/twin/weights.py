# SPDX-License-Identifier: Apache-2.0
"""Unpacking of AWQ words into the byte-per-weight arrays that the twin computes with."""

from __future__ import annotations

from typing import Any

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
