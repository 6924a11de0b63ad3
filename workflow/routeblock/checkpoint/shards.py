# SPDX-License-Identifier: Apache-2.0
"""Safetensors shards: headers checked against the file, tensors as views of a memory map.

The safetensors library reads these files too, but it names neither the tensor nor the byte at which a file breaks, and
gives copies where a layer of 300 MB is best left in the page cache. Format: 8 bytes little-endian header length, JSON
header, data; every tensor's place is [start, stop) in the data, without gaps.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from routeblock.checkpoint.folder import COMPARE, LFS_POINTER, lfs_pointer
from routeblock.errors import UNREADABLE, InputError

HEADER_LIMIT = 100_000_000  # bytes, the format's own limit
# Beyond that it may be an eighth of its file: as objects it takes some 16 times its bytes, and data are read in place.
SMALL_HEADER, HEADER_SHARE = 4_000_000, 8
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies: the shard's name, and bytes [start, stop) of the file."""

    shard: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path, shard: str) -> dict[str, TensorRef]:
    """The tensors of a safetensors file by name. Raises InputError where the file is truncated or malformed."""

    def refuse(what: str, limit: str, way_out: str = COMPARE) -> InputError:
        return InputError(what, where=str(path), limit=limit, way_out=way_out)

    again = f"download {shard} again"  # its size is wrong
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        start = f.read(len(LFS_POINTER))
        if pointer := lfs_pointer(path, start + f.read(1024)):
            raise pointer
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or (length <= HEADER_LIMIT and 8 + length > size):
            raise refuse(f"truncated: {size} bytes", "the header does not fit", again)
        if length > HEADER_LIMIT:
            raise refuse(f"header of {length} bytes", f"safetensors allows {HEADER_LIMIT}")
        if length > max(SMALL_HEADER, size // HEADER_SHARE):
            limit = f"at most {SMALL_HEADER}, or an eighth of the file"
            raise refuse(f"header of {length} bytes in a file of {size}", limit)
        f.seek(8)
        raw = f.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
    except UNREADABLE as e:
        raise refuse(f"the header is not JSON: {e}", "a safetensors header is a JSON mapping") from e
    if not isinstance(header, dict):
        raise refuse("the header is not a mapping", "a safetensors header is a JSON mapping")
    header.pop("__metadata__", None)
    tensors = {name: _ref(shard, name, entry, 8 + length, refuse) for name, entry in header.items()}
    place = 8 + length
    for ref in sorted(tensors.values(), key=lambda r: (r.start, r.stop)):
        if ref.start != place:
            raise refuse(f"tensor {ref.name} starts at byte {ref.start}", f"the one before ends at {place}")
        if ref.stop > size:
            raise refuse(f"truncated: {size} bytes", f"tensor {ref.name} ends at byte {ref.stop}", again)
        place = ref.stop
    if place != size:
        raise refuse(f"{size} bytes", f"its tensors end at {place}", again)
    return tensors


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _ref(shard: str, name: str, entry: Any, base: int, refuse: Any) -> TensorRef:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = [*shape, start, stop]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in whole):
            raise ValueError("sizes and offsets are whole numbers from 0")
    except UNREADABLE as e:
        raise refuse(f"header entry of tensor {name} is malformed", "dtype, shape and data_offsets are needed") from e
    if not isinstance(dtype, str):
        raise refuse(f"tensor {name} has dtype {dtype}"[:200], "a dtype is a text")
    # A tensor of another dtype (F4, F8_E8M0, C64 ...) is listed by its place; one that is read needs a known dtype.
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise refuse(f"tensor {name} has {stop - start} bytes", f"{dtype} {list(shape)} takes another number")
    return TensorRef(shard, name, dtype, shape, base + start, base + stop)


@dataclass
class Catalogue:
    """The tensors of some shards by name, and their maps, opened when a tensor is first asked for."""

    paths: Mapping[str, Path]
    tensors: Mapping[str, TensorRef]
    index: Mapping[str, str] | None = None
    _maps: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def misplaced(self, name: str) -> InputError | None:
        """The error for a tensor that the index puts into a shard that does not hold it."""
        ref = self.tensors[name]
        indexed = (self.index or {}).get(name, ref.shard)
        if indexed == ref.shard:
            return None
        return InputError(
            f"tensor {name} is in {indexed} by the index",
            where=str(self.paths[ref.shard]),
            limit="it lies here and not there; the index decides which shard a tensor comes from",
            way_out=f"correct {INDEX}",
        )

    def without_data(self, name: str, what: str) -> InputError:
        """The error for a tensor whose data a sparse or broken copy left out."""
        return InputError(
            f"tensor {name} {what}",
            where=str(self.paths[self.tensors[name].shard]),
            limit="trained weights are not; a sparse or broken copy is all zeros",
            way_out=COMPARE,
        )

    def read(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor in the page cache, little-endian; it may be unaligned."""
        ref = self.tensors[name]
        if fault := self.misplaced(name):
            raise fault
        if ref.dtype not in DTYPES:
            raise InputError(
                f"tensor {name} has dtype {ref.dtype}"[:200],
                where=str(self.paths[ref.shard]),
                limit=f"tensors that are used are {', '.join(DTYPES)}",
                way_out="choose a checkpoint of another dtype",
            )
        if ref.shard not in self._maps:
            self._maps[ref.shard] = np.memmap(self.paths[ref.shard], dtype=np.uint8, mode="r")
        return self._maps[ref.shard][ref.start : ref.stop].view(DTYPES[ref.dtype]).reshape(ref.shape)


def chosen(
    headers: Mapping[str, Mapping[str, TensorRef]], index: Mapping[str, str] | None, root: Path
) -> tuple[dict[str, TensorRef], list[InputError]]:
    """One tensor of each name among some shards' headers, and an error for each name that leaves the choice open.

    The index decides which shard a tensor comes from; a copy elsewhere is not the checkpoint's. A tensor that the index
    does not name is found where it lies, as the engines do that read whole shards; in two shards it is left out. One
    that the index puts where it does not lie is listed by its place, so that `Catalogue.misplaced` can name both.
    """
    found: dict[str, list[TensorRef]] = {}
    for header in headers.values():
        for name, ref in header.items():
            found.setdefault(name, []).append(ref)
    tensors, faults = {}, []
    for name, refs in found.items():
        indexed = index is not None and name in index
        if len(refs) == 1 or indexed:
            tensors[name] = next((r for r in refs if index and r.shard == index.get(name)), refs[0])
        elif index is None:
            tensors[name] = refs[0]
            faults.append(
                InputError(
                    f"tensor {name} is also in {refs[0].shard}",
                    where=str(root / refs[1].shard),
                    limit="without an index a tensor is in one shard",
                    way_out="remove the shard that does not belong to the checkpoint",
                )
            )
    return tensors, faults


def read_index(root: Path, files: Mapping[str, Path]) -> dict[str, str] | None:
    """The index's map from tensor to shard; None if the folder has no index. Raises InputError for a broken one."""
    if INDEX not in files:
        return None

    def refuse(what: str, limit: str) -> InputError:
        return InputError(what, where=str(root / INDEX), limit=limit, way_out=COMPARE)

    data = files[INDEX].read_bytes()
    if pointer := lfs_pointer(root / INDEX, data):
        raise pointer
    try:
        index = json.loads(data, object_pairs_hook=_without_repeats)
        weight_map = index["weight_map"]
        names = {str(k): str(v) for k, v in weight_map.items()}
    except UNREADABLE as e:
        raise refuse(f"without a weight_map: {e!r}"[:200], "a safetensors index is needed") from e
    for tensor, shard in names.items():
        if "/" in shard or "\\" in shard or "\0" in shard or shard in {"", ".", ".."}:
            raise refuse(f"tensor {tensor} is in {shard!r}", "shards are files of the checkpoint's own folder")
    return names


def shard_names(files: Mapping[str, Path], index: Mapping[str, str] | None) -> list[str]:
    """The shards of a checkpoint: what the index names, else model.safetensors, else a numbered set (whole, so that a
    missing one is noticed), else every safetensors file in the folder itself.
    """
    if index is not None:
        return sorted(set(index.values()))
    if SINGLE in files:
        return [SINGLE]
    here = [name for name in files if name.endswith(".safetensors") and "/" not in name and not name.startswith(".")]
    sets: dict[tuple[str, str], set[str]] = {}
    for name in here:
        if numbered := _NUMBERED.fullmatch(name):
            sets.setdefault((numbered["stem"], numbered["count"]), set()).add(name)
    if len(sets) != 1:
        return here
    ((stem, count),) = sets
    return [f"{stem}-{i:0{len(count)}d}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
