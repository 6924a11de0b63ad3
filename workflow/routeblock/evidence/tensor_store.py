# SPDX-License-Identifier: Apache-2.0
"""Many tensors in little space: each distinct one once, by the SHA-256 of its bytes; one close to another as what
differs.

The file is a safetensors file under xz. A tensor stands in it as byte planes (all first bytes, all second bytes, ...);
a tensor close to a base as the bits of which elements differ and the planes of the exclusive-or of those.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.files import atomic_file

FORMAT = "routeblock.tensor_store.v1"
INDEX = "index"
MOST_DIFFERING = 0.5  # of the elements: beyond it a tensor is kept whole
# What a store may unpack to, and what its arrays may take: a fixed number of bytes and so many for each of the file's.
FREE_BYTES, EXPANSION = 16 << 20, 8
DICTIONARY_BYTES = 80 << 20  # of xz's memory; its preset 9, in which stores are written, takes 65 MiB


def write_store(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by digest (`sha256_array`); the same arrays give the same bytes."""
    index: dict[str, Any] = {}
    entries: dict[str, NDArray[np.uint8]] = {}
    whole: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for digest in sorted(tensors):
        x = tensors[digest]
        bases = whole.setdefault((x.dtype.name, x.shape), [])
        index[digest] = {"dtype": x.dtype.name, "shape": list(x.shape), "base": None}
        words = _words(x)
        differing = {base: int((words != _words(tensors[base])).sum()) for base in bases}
        nearest = min(differing, key=lambda base: differing[base], default=None)
        if nearest is not None and differing[nearest] <= MOST_DIFFERING * words.size:
            exclusive = words ^ _words(tensors[nearest])
            index[digest]["base"] = nearest
            entries[f"{digest}.where"] = np.packbits(exclusive != 0)
            entries[f"{digest}.xor"] = _planes(exclusive[exclusive != 0])
        else:
            bases.append(digest)
            entries[digest] = _planes(words)
    document = canonical_json({"format": FORMAT, "tensors": index})
    entries[INDEX] = np.frombuffer(document, np.uint8)
    data = save({name: np.ascontiguousarray(entries[name]) for name in sorted(entries)})
    with atomic_file(path) as temporary:
        temporary.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def read_store(path: Path) -> dict[str, NDArray[Any]]:
    """Every array by its digest. Raises InputError if the file is broken or an array does not have its digest."""

    def refuse(what: str) -> InputError:
        return InputError(what, where=str(path), limit="a whole tensor store is needed", way_out="restore the file")

    try:
        packed = path.read_bytes()
        most = FREE_BYTES + EXPANSION * len(packed)
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DICTIONARY_BYTES)
        data = unpacker.decompress(packed, most)
        if not unpacker.eof:
            raise refuse(f"unpacks to more than {most} bytes, or ends early")
        entries = load(data)
        document = json.loads(entries[INDEX].tobytes())
        if document["format"] != FORMAT:
            raise refuse(f"format {document['format']}")
        return dict(_rebuilt(document["tensors"], entries, refuse, most))
    except (lzma.LZMAError, SafetensorError, *UNREADABLE) as e:
        if isinstance(e, InputError):
            raise
        raise refuse(f"not readable: {type(e).__name__} {str(e)[:80]}") from e


def _rebuilt(
    index: Mapping[str, Any], entries: Mapping[str, Any], refuse: Any, most: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    words: dict[str, NDArray[Any]] = {}
    stated = sum(math.prod(entry["shape"]) * _dtype(entry["dtype"]).itemsize for entry in index.values())
    if stated > most:
        raise refuse(f"states arrays of {stated} bytes, beyond {most}")
    for digest, entry in sorted(index.items(), key=lambda item: item[1]["base"] is not None):
        dtype = _dtype(entry["dtype"])
        size = math.prod(entry["shape"])
        if entry["base"] is None:
            words[digest] = _unplaned(entries[digest], dtype.itemsize)
        else:
            words[digest] = words[entry["base"]].copy()
            differs = np.unpackbits(entries[f"{digest}.where"], count=size).astype(bool)
            words[digest][differs] ^= _unplaned(entries[f"{digest}.xor"], dtype.itemsize)
        x = words[digest].view(dtype).reshape(entry["shape"])
        if sha256_array(x) != digest:
            raise refuse(f"tensor {digest[:16]} is rebuilt to other bytes")
        yield digest, x


def _dtype(name: Any) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(name)
    return found


def _words(x: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


def _planes(words: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.dtype.itemsize).T)


def _unplaned(planes: NDArray[np.uint8], itemsize: int) -> NDArray[Any]:
    words: NDArray[Any] = np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(f"u{itemsize}").reshape(-1)
    return words
