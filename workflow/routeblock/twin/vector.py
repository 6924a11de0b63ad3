# SPDX-License-Identifier: Apache-2.0
"""The tensor-core step on many columns at once, written in LLVM's vector instructions, which it turns into the host's.

A chunk is 32 columns: the low 16 and the high 16. Exponents travel as float32 exponent fields cut to 16 bits (biased by
127, times 128): those of column c and of column c + 16 share one 32-bit word, c's in the low half. So one 16-bit
operation serves both, and a shift or a mask turns them into float32 powers of two. A's exponents are unbiased, so that
a sum is again a biased exponent.

The functions work on addresses (see jit.py) of one chunk; whoever calls them keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16
CHUNK = 2 * LANES  # columns

# The step holds while nonzero products and accumulators stay within 2^-100 ... 2^100, and while A and B stay below
# 2^27: then a zero operand (A's field reads -254, B's biased field 0) never raises E above the floor.
EXPONENT_FLOOR, EXPONENT_CEILING, OPERAND_CEILING = -100, 100, 26
ZERO_FIELD = -254

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


def _vector(item: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(item, lanes)


def _all(item: ir.Type, value: Any, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(_vector(item, lanes), [value] * lanes)


class _Emitter:
    """The operations that the steps are written in. `at` is an address, `byte` a constant distance from it."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def _pointer(self, item: ir.Type, at: ir.Value, byte: int) -> ir.Value:
        return self.builder.inttoptr(self.builder.add(at, ir.Constant(_I64, byte)), ir.PointerType(item))

    def load(self, item: ir.Type, at: ir.Value, byte: int = 0) -> ir.Value:
        return self.builder.load(self._pointer(_vector(item), at, byte), align=1)

    def store(self, value: ir.Value, at: ir.Value, byte: int = 0) -> None:
        self.builder.store(value, self._pointer(value.type, at, byte), align=1)

    def splat(self, value: ir.Value) -> ir.Value:
        undefined = ir.Constant(_vector(value.type), ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, _all(_I32, 0))

    def load_splat(self, item: ir.Type, at: ir.Value, byte: int) -> ir.Value:
        return self.splat(self.builder.load(self._pointer(item, at, byte), align=4))

    def intrinsic(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [x.type for x in arguments]), name)
        return self.builder.call(function, arguments)

    def prefetch(self, at: ir.Value) -> None:
        """Into the first cache; a hint, of any address."""
        pointer = self.builder.inttoptr(at, ir.PointerType(_I8))
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_I32, x) for x in (0, 3, 1)))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.intrinsic(f"llvm.fma.v{LANES}f32", x.type, x, y, z)

    def floats(self, x: ir.Value) -> ir.Value:
        return self.builder.bitcast(x, _vector(_FLOAT))

    def words(self, x: ir.Value) -> ir.Value:
        return self.builder.bitcast(x, _vector(_I32))

    def halves(self, x: ir.Value) -> ir.Value:
        return self.builder.bitcast(x, _vector(_I16, CHUNK))

    def integers(self, x: ir.Value) -> ir.Value:
        """Toward zero."""
        return self.builder.fptosi(x, _vector(_I32))

    def maximum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed(">", x, y), x, y)

    def magnitude(self, x: ir.Value) -> ir.Value:
        negative = self.builder.icmp_signed("<", x, _all(_I32, 0))
        return self.builder.select(negative, self.builder.neg(x), x)

    def fields(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """The exponent fields of two float32 vectors, low ones in the low halves, as 16-bit integers."""
        low, high = self.words(low), self.words(high)
        low = self.builder.and_(self.builder.lshr(low, _all(_I32, 16)), _all(_I32, 0x7F80))
        return self.halves(self.builder.or_(low, self.builder.and_(high, _all(_I32, 0x7F800000))))

    def exponents(self, fields: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The fields of low and high columns where float32 has them."""
        words = self.words(fields)
        return self.builder.shl(words, _all(_I32, 16)), self.builder.and_(words, _all(_I32, 0xFFFF0000))


def _expand(subnormal: bool) -> Any:
    def expand(
        typing_context: Any, b: Any, b_exp: Any, pitch: Any, q: Any, q_pitch: Any, scale: Any, dropped: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            b, b_exp, pitch, q, q_pitch, scale, dropped = values
            e = _Emitter(builder)
            spread = builder.shl(ir.Constant(_I64, 1), dropped)
            more = e.splat(builder.sitofp(builder.add(spread, ir.Constant(_I64, 1)), _FLOAT))
            less = e.splat(builder.sitofp(builder.neg(spread), _FLOAT))
            scales = [e.load(_FLOAT, scale, 4 * LANES * part) for part in range(2)]
            offset = builder.add(scale, builder.mul(pitch, ir.Constant(_I64, 4)))
            offsets = [e.load(_FLOAT, offset, 4 * LANES * part) for part in range(2)]
            seen = _all(_I8, 0)
            for k in range(16):
                q_row = builder.add(q, builder.mul(q_pitch, ir.Constant(_I64, k)))
                e.prefetch(builder.add(q_row, builder.mul(q_pitch, ir.Constant(_I64, 16))))
                parts = []
                for part in range(2):
                    nibbles = e.load(_I8, q_row, LANES * part)
                    seen = builder.or_(seen, nibbles)
                    steps = builder.sitofp(builder.zext(nibbles, _vector(_I32)), _vector(_FLOAT))
                    exact = e.fma(steps, scales[part], offsets[part])
                    # x + 2^d x ends where the format ends, and 2^d x, whose last bit is even there, comes off exactly.
                    value = e.fma(exact, less, builder.fmul(exact, more))
                    if subnormal:
                        fixed = builder.fsub(builder.fadd(exact, _all(_FLOAT, 0.75)), _all(_FLOAT, 0.75))
                        small = e.intrinsic(f"llvm.fabs.v{LANES}f32", exact.type, exact)
                        value = builder.select(builder.fcmp_ordered("<", small, _all(_FLOAT, 2.0**-14)), fixed, value)
                    e.store(value, b, 4 * LANES * part)
                    parts.append(value)
                fields = e.fields(*parts)
                if subnormal:
                    lowest = e.maximum(fields, _all(_I16, (127 - 14) << 7, CHUNK))
                    fields = builder.select(builder.icmp_signed("==", fields, _all(_I16, 0, CHUNK)), fields, lowest)
                e.store(fields, b_exp)
                b = builder.add(b, builder.mul(pitch, ir.Constant(_I64, 4)))
                b_exp = builder.add(b_exp, builder.mul(pitch, ir.Constant(_I64, 2)))
            return builder.zext(e.intrinsic(f"llvm.vector.reduce.or.v{LANES}i8", _I8, seen), _I64)

        return types.int64(*[types.int64] * 7), generate

    return intrinsic(expand)


# expand_chunk(b, b_exp, pitch, q, q_pitch, scale, dropped_bits) -> the OR of all nibbles read.
#   One 16-deep step's weights, round(q * scale - zero * scale) as float32 to b, their exponent fields to b_exp; `pitch`
#   is the columns of a row of b and b_exp, q_pitch that of q. At `scale` stand the columns' scales, a row (pitch) on
#   their offsets, -zero * scale. Products of a 4-bit step and an 8- or 11-bit scale are exact in float32.
# The second form is for float16 results below 2^-14, which are fixed point.
expand_chunk, expand_chunk_subnormal = _expand(False), _expand(True)


def _accumulate(e: _Emitter, total: ir.Value, start: ir.Value, down: ir.Value) -> ir.Value:
    """(total + start) * down, toward zero to float32; the int32 sum does not overflow."""
    b = e.builder
    exact = b.add(total, start)
    nearest = b.sitofp(exact, _vector(_FLOAT))
    beyond = b.icmp_signed(">", e.magnitude(e.integers(nearest)), e.magnitude(exact))
    cut = b.add(e.words(nearest), b.sext(beyond, _vector(_I32)))
    return b.fmul(e.floats(cut), down)


def _accumulate_wide(e: _Emitter, total: ir.Value, start: ir.Value, down: ir.Value) -> ir.Value:
    """The same for sums beyond int32: float64 holds them, and dropping its low 29 bits is the cut."""
    b = e.builder
    double = _vector(_DOUBLE)
    value = b.fmul(b.fadd(b.sitofp(total, double), b.sitofp(start, double)), b.fpext(down, double))
    bits = b.and_(b.bitcast(value, _vector(_I64)), _all(_I64, -(1 << 29)))
    return b.fptrunc(b.bitcast(bits, double), _vector(_FLOAT))


def _step(group: int) -> Any:
    def step(typing_context: Any, acc: Any, b: Any, b_exp: Any, pitch: Any, a: Any, a_exp: Any, fraction: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            acc, b, b_exp, pitch, a, a_exp, fraction = values
            e = _Emitter(builder)
            fraction = builder.trunc(fraction, _I32)
            field = ir.Constant(_I32, 23)
            bias = e.splat(builder.shl(builder.add(fraction, ir.Constant(_I32, 254)), field))
            unit = e.splat(builder.shl(fraction, field))
            sums = [e.load(_FLOAT, acc, 4 * LANES * part) for part in range(2)]
            for first in range(0, 16, group):
                top = e.maximum(e.fields(*sums), _all(_I16, (EXPONENT_FLOOR + 127) << 7, CHUNK))
                for k in range(first, first + group):
                    row = builder.add(b_exp, builder.mul(pitch, ir.Constant(_I64, 2 * k)))
                    product = builder.add(e.halves(e.load(_I32, row)), e.halves(e.load_splat(_I32, a_exp, 4 * k)))
                    top = e.maximum(top, product)
                exponents = e.exponents(top)
                ups = [e.floats(builder.sub(bias, x)) for x in exponents]
                downs = [e.floats(builder.sub(x, unit)) for x in exponents]
                totals = [_all(_I32, 0)] * 2
                for k in range(first, first + group):
                    row = builder.add(b, builder.mul(pitch, ir.Constant(_I64, 4 * k)))
                    factor = e.load_splat(_FLOAT, a, 4 * k)
                    for part in range(2):
                        product = builder.fmul(e.load(_FLOAT, row, 4 * LANES * part), factor)
                        totals[part] = builder.add(totals[part], e.integers(builder.fmul(product, ups[part])))
                starts = [e.integers(builder.fmul(x, up)) for x, up in zip(sums, ups, strict=True)]
                parts = list(zip(totals, starts, downs, strict=True))
                if group == 8:  # 8 products below 2^26 and an accumulator below 2^25
                    sums = [_accumulate(e, *part) for part in parts]
                    continue
                # 16 products below 2^27 stay within int32; with the accumulator they need not. The two upper bits of
                # a sum beyond 2^30 differ.
                differ = [builder.xor(x, builder.add(x, x)) for x in totals]
                large = builder.icmp_signed("<", builder.or_(*differ), _all(_I32, 0))
                any_large = builder.icmp_unsigned("!=", builder.bitcast(large, _I16), ir.Constant(_I16, 0))
                with builder.if_else(any_large, likely=False) as (then, otherwise):
                    with then:
                        wide = [_accumulate_wide(e, *part) for part in parts]
                        wide_end = builder.block
                    with otherwise:
                        usual = [_accumulate(e, *part) for part in parts]
                        usual_end = builder.block
                sums = []
                for x, y in zip(wide, usual, strict=True):
                    merged = builder.phi(x.type)
                    merged.add_incoming(x, wide_end)
                    merged.add_incoming(y, usual_end)
                    sums.append(merged)
            for part in range(2):
                e.store(sums[part], acc, 4 * LANES * part)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return intrinsic(step)


# step_chunk16(acc, b, b_exp, pitch, a, a_exp, fraction_bits): one 16-deep tensor-core step of one row on a chunk; all
# 16 products are added at once. step_chunk8: eight, then eight. At a_exp stand 16 words with A's exponent field twice.
step_chunk16, step_chunk8 = _step(16), _step(8)
