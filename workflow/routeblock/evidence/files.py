# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json

TEMPORARY_SUFFIX = ".routeblock-tmp"

# A document of a fixed number of fields has a few thousand bytes. A model that refuses one may note every field that
# is wrong, which takes some hundred times the document: so a document of this kind has a limit.
DOCUMENT_BYTES = 512 << 10

# These say that a disk cannot take more, whichever call met them and whether or not they name a file.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})

_WAYS_OUT = {
    errno.ENOSPC: "free space there or choose another folder",
    errno.EDQUOT: "free space within the quota or choose another folder",
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another folder",
    errno.EROFS: "choose a folder on a writable disk",
    errno.EACCES: "change its permissions or choose another folder",
    errno.EPERM: "change its permissions or choose another folder",
    errno.ENOTDIR: "move the file that stands where a folder is needed or choose another folder",
    errno.EEXIST: "move the file that stands where a folder is needed or choose another folder",
    errno.EISDIR: "move the folder that stands where a file is needed or choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
}


# Another process put its own there, or took the old one away, between two steps of a replacement.
_OVERTAKEN = frozenset({errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY})
_TRIES = 100


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name is what a killed process left of an atomic write."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path` to write to; it becomes `path` at the end, or vanishes on an error.

    Parent folders are made. Raises `InputError` if the disk or the folder does not take the file.
    """
    path = _named(path)
    with _temporary(path, lambda tmp: tmp.unlink(missing_ok=True)) as tmp:
        yield tmp
        tmp.replace(path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path` to fill; it becomes `path` at the end, or vanishes on an error.

    A folder already there is replaced if every entry of it is an entry of the new one too, that is if it is empty
    or an earlier result of the same kind. Raises `InputError` if it holds anything else, if this process runs in it,
    and if the disk or the parent folder does not take the new one.
    """
    path = _named(path)
    if _is_here(path):  # replaced, it would leave this process and its shell in no folder
        raise InputError(
            "the command runs in this folder",
            where=str(path),
            limit="the result replaces a folder as a whole",
            way_out="name a new folder, or start from the folder above",
        )
    with _temporary(path, lambda tmp: shutil.rmtree(tmp, ignore_errors=True)) as tmp:
        if _is_no_folder(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        tmp.mkdir()
        yield tmp
        _swap(tmp, path)


def _is_here(path: Path) -> bool:
    # One look, as below.
    try:
        return path.samefile(Path())
    except OSError:
        return False


def _is_no_folder(path: Path) -> bool:
    # One look: between two, another process may have taken a folder away to put its own there.
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False


def write_json(path: Path, value: Any) -> None:
    """Write the canonical JSON of `value`, as `atomic_file` does."""
    with atomic_file(path) as tmp:
        tmp.write_bytes(canonical_json(value))


def small_document(path: Path) -> bytes:
    """The bytes of a document of a fixed number of fields. Raises OSError, and ValueError beyond `DOCUMENT_BYTES`."""
    with path.open("rb") as f:
        data = f.read(DOCUMENT_BYTES + 1)
    if len(data) > DOCUMENT_BYTES:
        raise ValueError(f"more than {DOCUMENT_BYTES} bytes")
    return data


def writable_folder(path: Path) -> None:
    """Make the folder if need be, and try that it takes a file. Raises `InputError` if it does not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise _unwritable(path, e) from e


def _swap(new: Path, path: Path) -> None:
    # A process that a killed workflow left behind may do the same: whoever comes last stays, whole.
    for attempt in range(_TRIES):
        try:
            _move_in(new, path)
            return
        except OSError as e:
            if e.errno not in _OVERTAKEN or attempt == _TRIES - 1:
                raise


def _move_in(new: Path, path: Path) -> None:
    old = None
    if path.is_dir() and (entries := {p.name for p in path.iterdir()}):
        others = sorted(entries - {p.name for p in new.iterdir()})
        if others:
            raise InputError(
                f"the folder holds other files, {others[0]!r} first",
                where=str(path),
                limit="only an empty folder or an earlier result of the same kind is replaced",
                way_out="name another folder or empty this one",
            )
        old = _beside(path)
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if old is not None and not path.exists():
            old.rename(path)
        raise
    finally:
        if old is not None and old.is_symlink():
            old.unlink()
        elif old is not None:
            shutil.rmtree(old, ignore_errors=True)


def _named(path: Path) -> Path:
    """`path` by a name of its own, where it is `.` or ends in `..`. Raises `InputError` for the root of a disk."""
    # Path.absolute() would keep the two dots.
    named = Path(os.path.abspath(path)) if path.name in ("", "..") else path  # noqa: PTH100
    if not named.name:
        raise InputError(
            "has no name",
            where=str(path),
            limit="a result is written beside its place and then gets its name",
            way_out="name a file or folder below it",
        )
    return named


def _beside(path: Path) -> Path:
    # The same parent: a rename stays on one disk, and relative paths written from there stay true.
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


@contextmanager
def _temporary(path: Path, remove: Callable[[Path], None]) -> Iterator[Path]:
    tmp = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield tmp
    except BaseException as e:
        with suppress(OSError):  # e.g. the parent is a file: then nothing was written there
            remove(tmp)
        if isinstance(e, OSError) and _is_about(e, tmp, path):
            raise _unwritable(path, e) from e
        raise


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot be written: {error.strerror or error}",
        where=str(path),
        limit="a result needs a folder with space and write permission",
        way_out=_WAYS_OUT.get(error.errno or 0, "choose another folder"),
    )


def _is_about(error: OSError, *targets: Path) -> bool:
    """Whether the error comes from writing the targets, and not from an input that the same block reads."""
    if error.errno in _DISK:
        return True
    named = [Path(os.fsdecode(n)) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)]
    return any(n.is_relative_to(t) or t.is_relative_to(n) for n in named for t in targets)
