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
    address,
    bits_float32,
    bits_float64,
    float32_bits,
    float64_bits,
    jit,
    load_float32,
    load_int16,
    load_int32,
    store_float32,
    store_int16,
    store_int32,
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
        TensorCore("hopper", 16, 25, "modelled, and equal to recorded H200 kernels"),
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

ZERO_EXPONENT = -15000  # of a zero operand in int16: a sum of two stays below every real exponent, without overflow
# The vector path holds while nonzero products and accumulators stay within 2^-100 ... 2^100, and while A stays below
# 2^27, so that a zero weight, whose biased exponent reads 0, never raises E above the floor.
EXPONENT_FLOOR, EXPONENT_CEILING, A_CEILING = -100, 100, 26
FLOOR_BIASED = np.int16(EXPONENT_FLOOR + 127)


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


# The vector path. Rows are addresses (see jit.py). Exponents are int16 and biased by 127 on B's side and in the
# accumulator, unbiased on A's: their sum is the biased exponent of the product. Every step is a loop over columns that
# the compiler turns into vector instructions.


@jit()
def exponents8(columns: int, top: int, start: int, b_exp: Any, h: int, a: int) -> None:
    """top[c] = max(start[c], a[i] + b_exp[h+i, c]) for i in 0..7; `top` must not overlap the others."""
    e0 = address(b_exp, h + 0)
    e1 = address(b_exp, h + 1)
    e2 = address(b_exp, h + 2)
    e3 = address(b_exp, h + 3)
    e4 = address(b_exp, h + 4)
    e5 = address(b_exp, h + 5)
    e6 = address(b_exp, h + 6)
    e7 = address(b_exp, h + 7)
    a0 = load_int16(a, 0)
    a1 = load_int16(a, 1)
    a2 = load_int16(a, 2)
    a3 = load_int16(a, 3)
    a4 = load_int16(a, 4)
    a5 = load_int16(a, 5)
    a6 = load_int16(a, 6)
    a7 = load_int16(a, 7)
    for c in range(columns):
        t = load_int16(start, c)
        v = np.int16(load_int16(e0, c) + a0)
        t = v if v > t else t
        v = np.int16(load_int16(e1, c) + a1)
        t = v if v > t else t
        v = np.int16(load_int16(e2, c) + a2)
        t = v if v > t else t
        v = np.int16(load_int16(e3, c) + a3)
        t = v if v > t else t
        v = np.int16(load_int16(e4, c) + a4)
        t = v if v > t else t
        v = np.int16(load_int16(e5, c) + a5)
        t = v if v > t else t
        v = np.int16(load_int16(e6, c) + a6)
        t = v if v > t else t
        v = np.int16(load_int16(e7, c) + a7)
        t = v if v > t else t
        store_int16(top, c, t)


@jit()
def products8(columns: int, total: int, top: int, fraction_bits: Any, b: Any, h: int, a: int) -> None:
    """total[c] = sum over i in 0..7 of trunc(a[i] * b[h+i, c] * 2^(F - E)), int32, E from the biased top[c].

    A product is below 2^(E+2), so its integer is below 2^(F+2), and the sum of 16 of them below 2^31.
    """
    bias = np.int32(254 + fraction_bits)
    b0 = address(b, h + 0)
    b1 = address(b, h + 1)
    b2 = address(b, h + 2)
    b3 = address(b, h + 3)
    b4 = address(b, h + 4)
    b5 = address(b, h + 5)
    b6 = address(b, h + 6)
    b7 = address(b, h + 7)
    a0 = load_float32(a, 0)
    a1 = load_float32(a, 1)
    a2 = load_float32(a, 2)
    a3 = load_float32(a, 3)
    a4 = load_float32(a, 4)
    a5 = load_float32(a, 5)
    a6 = load_float32(a, 6)
    a7 = load_float32(a, 7)
    for c in range(columns):
        s = bits_float32(np.int32(np.int32(bias - np.int32(load_int16(top, c))) << 23))
        store_int32(
            total,
            c,
            np.int32(
                np.int32((load_float32(b0, c) * a0) * s)
                + np.int32((load_float32(b1, c) * a1) * s)
                + np.int32((load_float32(b2, c) * a2) * s)
                + np.int32((load_float32(b3, c) * a3) * s)
                + np.int32((load_float32(b4, c) * a4) * s)
                + np.int32((load_float32(b5, c) * a5) * s)
                + np.int32((load_float32(b6, c) * a6) * s)
                + np.int32((load_float32(b7, c) * a7) * s)
            ),
        )


@jit()
def accumulate(columns: int, acc: int, acc_exp: int, total: int, other: int, top: int, fraction_bits: Any) -> None:
    """acc[c] = toward-zero float32 of (total[c] + other[c] + acc[c] cut to 2^(E-F)); acc_exp[c] its biased exponent."""
    bias = np.int32(254 + fraction_bits)
    for c in range(columns):
        e = np.int32(load_int16(top, c))
        up = bits_float32(np.int32(np.int32(bias - e) << 23))
        down = bits_float32(np.int32(np.int32(e - np.int32(fraction_bits)) << 23))
        products = np.int32(load_int32(total, c) + load_int32(other, c))
        units = np.float64(products) + np.float64(np.int32(load_float32(acc, c) * up))
        # float64 holds the sum exactly; dropping its low 29 bits is the conversion toward zero, in float32's normal
        # range.
        value = np.float32(bits_float64(float64_bits(units * np.float64(down)) & np.int64(-536870912)))
        store_float32(acc, c, value)
        exponent = np.int16(np.int32(float32_bits(value) >> 23) & np.int32(255))
        store_int16(acc_exp, c, exponent if exponent > FLOOR_BIASED else FLOOR_BIASED)


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
