# SPDX-License-Identifier: Apache-2.0
"""Compilation of the twin: numba, exact IEEE arithmetic, cached by the digest of the twin's own code.

numba keys its cache by the file a function stands in, not by what that function calls. Here the cache folder carries
the digest of the whole twin, so an edit anywhere in it can never meet machine code that was made before the edit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from routeblock.evidence.cache import cache_folder
from routeblock.evidence.digest import code_digest

F = TypeVar("F", bound=Callable[..., Any])


def _cache_folder() -> Path | None:
    given, own = os.environ.get("NUMBA_CACHE_DIR"), cache_folder()
    base = Path(given) if given else own / "numba" if own else None
    if base is None:
        return None
    folder = base / code_digest("routeblock.twin.layer", "routeblock.twin.weights")[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


_FOLDER = _cache_folder()
CACHED = _FOLDER is not None  # numba raises where it is asked to cache and no folder takes it
if CACHED:
    vars(numba.config)["CACHE_DIR"] = str(_FOLDER)


def jit(*, parallel: bool = False) -> Callable[[F], F]:
    """`numba.njit` without fast-math (no reassociation, no contraction), cached where a folder can be written."""
    decorate = numba.njit(parallel=parallel, cache=CACHED, error_model="numpy", fastmath=False, nogil=True)
    return cast(Callable[[F], F], decorate)


VECTOR_SETS = ("avx512f", "avx2", "avx", "sse2")  # the widest first


def vector_set() -> str:
    """The widest vector instructions that the twin is compiled for, or the architecture where it has none of these.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose others than this CPU's; the bits are the same with all.
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    enabled = set(str(features).split(","))
    return next((name for name in VECTOR_SETS if f"+{name}" in enabled), str(triple).partition("-")[0])


def _bitcast(source: types.Type, target: types.Type) -> Any:
    def cast_bits(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

        return target(source), generate

    return intrinsic(cast_bits)


float32_bits = _bitcast(types.float32, types.int32)
bits_float32 = _bitcast(types.int32, types.float32)
float64_bits = _bitcast(types.float64, types.int64)
bits_float64 = _bitcast(types.int64, types.float64)


# A slice of an array counts references, with an atomic operation each: in the innermost calls that cost more than the
# arithmetic. These give the address of a row and read and write through it; whoever calls them keeps the array alive.
def _address(typing_context: Any, array: Any, row: Any) -> Any:
    """The address of array[row], for any C-contiguous rows."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        offset = builder.mul(builder.extract_value(view.strides, 0), arguments[1])
        return builder.add(builder.ptrtoint(view.data, ir.IntType(64)), offset)

    return types.intp(array, types.intp), generate


address: Any = intrinsic(_address)


def _load(item: types.Type) -> Any:
    def load(typing_context: Any, base: Any, index: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.PointerType(context.get_value_type(item)))
            return builder.load(builder.gep(pointer, [arguments[1]], inbounds=True))

        return item(types.intp, types.intp), generate

    return intrinsic(load)


def _store(item: types.Type) -> Any:
    def store(typing_context: Any, base: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.PointerType(context.get_value_type(item)))
            builder.store(arguments[2], builder.gep(pointer, [arguments[1]], inbounds=True))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, item), generate

    return intrinsic(store)


load_float32, store_float32 = _load(types.float32), _store(types.float32)
load_int32, store_int32 = _load(types.int32), _store(types.int32)
load_int16, store_int16 = _load(types.int16), _store(types.int16)
load_uint8 = _load(types.uint8)
