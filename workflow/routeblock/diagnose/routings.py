# SPDX-License-Identifier: Apache-2.0
"""Routings to ask about: read from a file, or drawn from a seed; cut into chunks of prefill, padded for graphs.

A routing is what one call of the layer gets: expert ids int32 [tokens, top_k]. Routings of one size lie in one array
[routings, tokens, top_k].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.parquet import read_parquet

TENSOR = "topk_ids"
GROUP_COLUMN = "routing"
MAGIC = b"\x93NUMPY"
HEADER_BYTES = 10_000  # NumPy's own limit
HEADER = re.compile(
    rb"\{'descr': '(?P<dtype>[<>|=][iu][1248])', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:\d{1,12}, ?)*\d{0,12})\), \}\s*"
)
_DRAWN_AT_ONCE = 1 << 24  # random numbers, 128 MiB


@dataclass(frozen=True)
class Routings:
    """Routings of one size, int32 [routings, tokens, top_k]; the first `own_tokens` are requests', the rest padding."""

    ids: NDArray[np.int32]
    own_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a routing, padding included."""
        return int(self.ids.shape[1])


def draw(tokens: int, top_k: int, experts: int, seed: int, count: int = 1) -> NDArray[np.int32]:
    """`count` routings with experts drawn uniformly, without repeats in a token: int32 [count, tokens, top_k].

    The first tokens of a longer draw are the tokens of a shorter one, so batches of one seed are prefixes of each other
    if `count` is 1.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    rows, found = count * tokens, []
    step = max(1, _DRAWN_AT_ONCE // experts)
    for first in range(0, rows, step):
        keys = rng.random((min(step, rows - first), experts), dtype=np.float32)
        found.append(np.argpartition(keys, top_k - 1, axis=1)[:, :top_k].astype(np.int32))
    return np.concatenate(found).reshape(count, tokens, top_k)


def read(path: Path, experts: int, top_k: int) -> list[Routings]:
    """The routings of a file, one entry a size.

    .npy: integers [tokens, top_k] or [routings, tokens, top_k]. .safetensors: the tensor `topk_ids`, or the only one,
    in either shape. .parquet: one row a token, one integer column a slot, in that order; a column `routing` numbers the
    routing that the token is of. Raises InputError for another form, and for ids that are no expert's.
    """
    if not path.is_file():
        raise _refuse(path, "no such file", "a routing is needed", "name its .npy, .safetensors or .parquet file")
    readers = {".npy": _npy, ".safetensors": _safetensors, ".parquet": _parquet}
    if path.suffix not in readers:
        raise _refuse(path, f"a {path.suffix or 'nameless'} file", f"{', '.join(readers)} are read", "convert it")
    arrays = readers[path.suffix](path)
    found: dict[int, list[NDArray[Any]]] = {}
    for array in arrays:
        whole = array[None] if array.ndim == 2 else array
        if whole.ndim != 3 or whole.dtype.kind not in "iu" or not whole.size or whole.shape[2] != top_k:
            raise _refuse(
                path,
                f"{array.dtype} {list(array.shape)}",
                f"integers [tokens, {top_k}] or [routings, tokens, {top_k}] are needed",
                "save the router's ids, or give --top-k",
            )
        if whole.min() < 0 or whole.max() >= experts:
            bad = int(whole.min()) if whole.min() < 0 else int(whole.max())
            raise _refuse(
                path, f"expert id {bad}", f"ids from 0 to {experts - 1}", "give --experts, or correct the file"
            )
        found.setdefault(whole.shape[1], []).append(whole.astype(np.int32))
    return [Routings(np.concatenate(parts), tokens) for tokens, parts in found.items()]


def chunked(routings: Sequence[Routings], chunk: int) -> list[Routings]:
    """Each routing cut into calls of `chunk` tokens, as chunked prefill cuts a prompt; the last one is what is left."""
    found: dict[int, list[NDArray[np.int32]]] = {}
    for some in routings:
        for first in range(0, some.tokens, chunk):
            part = some.ids[:, first : first + chunk]
            found.setdefault(part.shape[1], []).append(part)
    return [Routings(np.concatenate(parts), tokens) for tokens, parts in found.items()]


def padded(routings: Sequence[Routings], sizes: Sequence[int], experts: int, seed: int) -> list[Routings]:
    """Each routing padded to the smallest graph size that holds it; larger ones stay as they are, as graphs do.

    The padding's tokens are routed too, to experts that nobody here knows: they are drawn from `seed`.
    """
    found = []
    for some in routings:
        size = min((s for s in sizes if s >= some.tokens), default=some.tokens)
        if size > some.tokens:
            count, top_k = some.ids.shape[0], some.ids.shape[2]
            extra = draw(size - some.tokens, top_k, experts, seed, count)
            some = Routings(np.concatenate([some.ids, extra], axis=1), some.own_tokens)
        found.append(some)
    return found


def counts(ids: NDArray[np.int32], experts: int) -> NDArray[np.int64]:
    """Routes of each expert, int64 [routings, experts], for ids [routings, tokens, top_k]."""
    rows = ids.shape[0]
    flat = ids.reshape(rows, -1) + (np.arange(rows, dtype=np.int64) * experts)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * experts).reshape(rows, experts)


def _npy(path: Path) -> list[NDArray[Any]]:
    try:
        return [_array(path)]
    except UNREADABLE as e:
        raise _refuse(path, f"not readable: {e}", "a .npy file of integers is needed", "save it again") from e


def _array(path: Path) -> NDArray[Any]:
    """The array of a .npy file, in place: NumPy's own reader takes a header for Python and believes its shape."""
    with path.open("rb") as f:
        start = f.read(len(MAGIC) + 4)
        width = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(start[6:8])
        if not start.startswith(MAGIC) or width is None:
            raise ValueError("it does not begin as one")
        first = len(MAGIC) + 2 + width
        length = int.from_bytes(start[8:first], "little")
        f.seek(first)
        header = HEADER.fullmatch(f.read(min(length, HEADER_BYTES)))
        if header is None:
            raise ValueError(f"its header is not that of an array of integers: {start!r}"[:80])
    shape = tuple(int(n) for n in header["shape"].decode().replace(" ", "").split(",") if n)
    order: Any = "F" if header["fortran"] == b"True" else "C"
    return np.memmap(path, np.dtype(header["dtype"].decode()), "r", first + length, shape, order)


def _safetensors(path: Path) -> list[NDArray[Any]]:
    from routeblock.evidence.tensors import load_tensors

    tensors = load_tensors(path)
    if TENSOR in tensors:
        return [tensors[TENSOR]]
    if len(tensors) == 1:
        return [*tensors.values()]
    raise _refuse(
        path, f"tensors {', '.join(tensors) or 'none'}", f"one tensor, or one named {TENSOR}", f"name it {TENSOR}"
    )


def _parquet(path: Path) -> list[NDArray[Any]]:
    import pyarrow as pa

    try:
        table = read_parquet(path)
    except UNREADABLE as e:
        raise _refuse(path, f"not readable: {e}", "a parquet table is needed", "write it again") from e
    names = table.column_names
    slots = [name for name in names if name != GROUP_COLUMN]
    if len(set(names)) < len(names) or not slots or not all(pa.types.is_integer(f.type) for f in table.schema):
        raise _refuse(path, f"columns {', '.join(names) or 'none'}", "one integer column a slot", "write the ids alone")
    if empty := [name for name in names if table[name].null_count]:
        what, limit = f"empty cells in column {empty[0]}", "every token has an expert in each slot"
        raise _refuse(path, what, limit, "fill them")
    ids = np.stack([table[name].to_numpy() for name in slots], axis=1)
    if GROUP_COLUMN not in names:
        return [ids]
    number = table[GROUP_COLUMN].to_numpy()
    order = np.argsort(number, kind="stable")
    edges = np.flatnonzero(np.diff(number[order])) + 1
    return np.split(ids[order], edges)


def _refuse(path: Path, what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where=str(path), limit=limit, way_out=way_out)
