# SPDX-License-Identifier: Apache-2.0
"""The m16n8k16 tensor-core instruction with float32 accumulation, bit for bit.

For every group of L consecutive products: each product and the accumulator are cut, toward zero, to a multiple of
2^(E-F), E being the largest exponent among them, where a product's exponent is the sum of its operands' exponents; the
exact sum is converted to float32 toward zero. L and F follow the published bit-accurate model (arXiv 2511.10909);
Hopper was also compared with kernels recorded on an H200. Ampere and Ada are modelled only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.twin.jit import (
    bits_float64,
    float32_bits,
    float64_bits,
    jit,
)


@dataclass(frozen=True)
class TensorCore:
    """How one generation of tensor cores adds: `group` products at once (L), `fraction_bits` kept below E (F)."""

    name: str
    group: int
    fraction_bits: int
    status: str


ARCHITECTURES = {
    t.name: t
    for t in (
        TensorCore("ampere", 8, 24, "modelled"),
        TensorCore("ada", 8, 24, "modelled"),
        TensorCore("hopper", 16, 25, "a model that gave the bits of every H200 output compared with it"),
    )
}


@dataclass(frozen=True)
class OperandType:
    """A 16-bit operand format as float32 arithmetic sees it."""

    dtype: np.dtype[Any]
    name: str
    dropped_bits: int  # float32 fraction bits that the format does not have
    min_exponent: int  # of normal numbers; subnormals keep it, with a significand below 1
    largest: float


FLOAT16 = OperandType(np.dtype(np.float16), "float16", 13, -14, 65504.0)
BFLOAT16 = OperandType(np.dtype(ml_dtypes.bfloat16), "bfloat16", 16, -126, 255 * 2.0**120)
OPERAND_TYPES = {t.dtype: t for t in (FLOAT16, BFLOAT16)}

ZERO_EXPONENT = -15000  # of a zero operand: a sum of two stays below every real exponent


def architecture_of(name: str) -> TensorCore:
    """The table entry of an architecture; InputError if there is none."""
    if name not in ARCHITECTURES:
        raise InputError(
            f"architecture {name!r} is not known",
            where="tensor core",
            limit=f"known are {', '.join(ARCHITECTURES)}",
            way_out="choose one of them",
        )
    return ARCHITECTURES[name]


def operand_type_of(dtype: Any, where: str) -> OperandType:
    """The operand format of a dtype; InputError unless float16 or bfloat16."""
    found = OPERAND_TYPES.get(np.dtype(dtype))
    if found is None:
        raise InputError(
            f"dtype {np.dtype(dtype).name}",
            where=where,
            limit="the kernel takes float16 or bfloat16",
            way_out="convert the array first",
        )
    return found


@jit()
def exponent_of(value: Any, min_exponent: Any) -> Any:
    """Exponent of a float32 that holds a narrower format: not below the format's minimum; a zero gives
    ZERO_EXPONENT.
    """
    bits = float32_bits(value) & 0x7FFFFFFF
    if bits == 0:
        return ZERO_EXPONENT
    exponent = (bits >> 23) - 127
    return exponent if exponent > min_exponent else min_exponent


@jit()
def toward_zero_float32(units: Any, exponent: Any) -> Any:
    """units * 2^exponent converted to float32 toward zero, subnormal results included; units an int64 below 2^40."""
    value = np.float64(units) * 2.0**exponent
    magnitude = abs(value)
    if magnitude < 2.0**-126:
        steps = np.int64(magnitude * 2.0**149)
        magnitude = np.float64(steps) * 2.0**-149
    else:
        magnitude = bits_float64(float64_bits(magnitude) & np.int64(-536870912))
    return np.float32(magnitude if units >= 0 else -magnitude)


@jit()
def dot_general(acc: Any, a: Any, b: Any, start: int, stop: int, fraction_bits: int, min_exponent: Any) -> Any:
    """One group of products [start, stop) added to `acc`, for every finite operand; scalar, used where vectors cannot
    go.
    """
    top = exponent_of(acc, -126)
    for k in range(start, stop):
        e = exponent_of(a[k], min_exponent) + exponent_of(b[k], min_exponent)
        top = max(top, e)
    if top < -1000:
        return np.float32(0.0)
    scale = 2.0 ** (fraction_bits - top)
    units = np.int64(np.float64(acc) * scale)
    for k in range(start, stop):
        units += np.int64(np.float64(a[k]) * np.float64(b[k]) * scale)
    return toward_zero_float32(units, top - fraction_bits)


@jit()
def _mma(a: Any, b: Any, c: Any, group: int, fraction_bits: int, min_exponent: int) -> Any:
    d = np.empty_like(c)
    for n in range(b.shape[1]):
        column = b[:, n].copy()
        for m in range(a.shape[0]):
            acc = c[m, n]
            for start in range(0, a.shape[1], group):
                acc = dot_general(acc, a[m], column, start, start + group, fraction_bits, min_exponent)
            d[m, n] = acc
    return d


def mma_m16n8k16(a: NDArray[Any], b: NDArray[Any], c: NDArray[np.float32], architecture: str) -> NDArray[np.float32]:
    """D = A*B + C of one m16n8k16 instruction with float32 accumulation.

    a [16, 16] and b [16, 8], both float16 or both bfloat16; c float32 [16, 8]; architecture a key of `ARCHITECTURES`.
    Returns float32 [16, 8]. An exact zero is +0 (not recorded on hardware). Raises InputError for other shapes or
    dtypes, and for infinities and NaN, whose results nobody has recorded.
    """
    core = architecture_of(architecture)
    operand = operand_type_of(a.dtype, "mma operand A")
    if b.dtype != a.dtype or c.dtype != np.float32 or a.shape != (16, 16) or b.shape != (16, 8) or c.shape != (16, 8):
        raise InputError(
            f"A {a.dtype} {a.shape}, B {b.dtype} {b.shape}, C {c.dtype} {c.shape}",
            where="mma_m16n8k16",
            limit="A [16, 16] and B [16, 8] of one dtype, C float32 [16, 8]",
            way_out="pass whole fragments",
        )
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    for name, x in (("A", wide_a), ("B", wide_b), ("C", c)):
        if not np.isfinite(x).all():
            raise InputError(
                f"operand {name} holds an infinity or NaN",
                where="mma_m16n8k16",
                limit="only finite operands are recorded",
                way_out="remove them first",
            )
    d = _mma(wide_a, wide_b, np.ascontiguousarray(c), core.group, core.fraction_bits, operand.min_exponent)
    return np.asarray(d, dtype=np.float32)
