# SPDX-License-Identifier: Apache-2.0
"""Write a large tensor file tensor by tensor: one in memory at a time, hashed while it is written."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CODES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int32": "I32", "int64": "I64", "uint8": "U8"}
_ITEM = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1}
PENDING = 16  # tensors that may wait for the disk


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when its turn comes: dtype as numpy names it, and the function that gives the array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _ITEM[_CODES[self.dtype]]


def stream_tensors(path: Path, tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file in the given order and return its SHA-256.

    Not atomic: the caller writes into a temporary folder or name. A tensor of another dtype or shape than it was
    announced with is a ValueError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for t in tensors:
        header[t.name] = {"dtype": _CODES[t.dtype], "shape": list(t.shape), "data_offsets": [place, place + t.nbytes]}
        place += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    pending: deque[Future[int]] = deque()
    with path.open("wb", buffering=0) as f, ThreadPoolExecutor(1) as writer:

        def put(data: memoryview | bytes) -> None:
            pending.append(writer.submit(_write, f, data))
            digest.update(data)
            if len(pending) > PENDING:
                pending.popleft().result()

        put(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            array = t.make()
            if array.dtype.name != t.dtype or array.shape != t.shape:
                raise ValueError(f"{t.name} is {array.dtype} {array.shape}, announced as {t.dtype} {t.shape}")
            put(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for future in pending:
            future.result()
    return digest.hexdigest()


def _write(f: Any, data: memoryview | bytes) -> int:
    done = 0
    while done < len(data):  # a raw write may take less than it is given
        done += f.write(memoryview(data)[done:])
    return done
