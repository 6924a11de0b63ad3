# SPDX-License-Identifier: Apache-2.0
"""Tensor files: safetensors, written whole, read with one line of refusal when they are broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - with it NumPy knows bfloat16 by name, as the library asks for it
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file


def save_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write named arrays, atomically; equal arrays give equal bytes. Raises InputError if the disk does not take
    them.
    """
    with atomic_file(path) as temporary:
        # ascontiguousarray alone would give a single number an axis.
        arrays = {name: np.ascontiguousarray(tensors[name]).reshape(tensors[name].shape) for name in sorted(tensors)}
        save_file(arrays, temporary)
        temporary.chmod(0o644)  # the library makes it private


class TensorFile:
    """An open tensor file; a tensor is read when it is asked for."""

    def __init__(self, path: Path, handle: Any) -> None:
        self.path = path
        self._handle = handle
        self.names: list[str] = sorted(handle.keys())

    def read(self, name: str) -> NDArray[Any]:
        """One tensor; InputError if the file has none of that name, or one of a dtype that NumPy has not."""
        if name not in self.names:
            raise InputError(
                f"no tensor {name!r}",
                where=str(self.path),
                limit=f"it holds {len(self.names)} tensors, {', '.join(self.names[:3])} ...",
                way_out="make the file again",
            )
        try:
            return np.asarray(self._handle.get_tensor(name))
        except (AttributeError, TypeError, ValueError, SafetensorError) as e:  # the library asks NumPy for any dtype
            raise InputError(
                f"tensor {name!r} cannot be read: {str(e).splitlines()[0]}",
                where=str(self.path),
                limit="floats of 16 bits and more, and integers",
                way_out="make the file again",
            ) from e


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a tensor file; InputError if it is missing, truncated or malformed."""
    try:
        handle = safe_open(path, framework="np")
    except (OSError, SafetensorError) as e:
        raise InputError(
            f"not a readable tensor file: {str(e).splitlines()[0]}",
            where=str(path),
            limit="a whole safetensors file is needed",
            way_out="make the file again",
        ) from e
    with handle as opened:
        yield TensorFile(path, opened)


def load_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a small file, by name."""
    with open_tensors(path) as tensors:
        return {name: tensors.read(name) for name in tensors.names}
