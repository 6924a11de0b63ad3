# SPDX-License-Identifier: Apache-2.0
"""Unpacking of AWQ words into the byte-per-weight arrays that the twin computes with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from routeblock.twin.jit import jit


@jit(parallel=True)
def _unpack(words: Any, out: Any, first: int) -> None:
    for r in prange(words.shape[0]):
        for c in range(words.shape[1]):
            w, at = words[r, c], first + 8 * c
            # Nibble i holds column [0, 2, 4, 6, 1, 3, 5, 7][i] (see moe/awq.py).
            out[r, at] = w & 15
            out[r, at + 2] = (w >> 4) & 15
            out[r, at + 4] = (w >> 8) & 15
            out[r, at + 6] = (w >> 12) & 15
            out[r, at + 1] = (w >> 16) & 15
            out[r, at + 3] = (w >> 20) & 15
            out[r, at + 5] = (w >> 24) & 15
            out[r, at + 7] = (w >> 28) & 15


def unpack_into(words: NDArray[np.int32], out: NDArray[np.uint8], first_column: int) -> None:
    """Write the values of AWQ words [R, C] to out[:, first_column : first_column + 8 * C], uint8; see `moe.awq.pack_awq`."""
    _unpack(words, out, first_column)
