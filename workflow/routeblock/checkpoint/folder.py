# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint folder, plain or in the hub's cache layout, and nothing outside of it.

Facts: the hub's cache keeps `models--OWNER--NAME/{blobs,refs,snapshots/REVISION}`; a snapshot's files are links into
`blobs`, named by SHA-256 (large files) or by git's SHA-1. A download to a local folder keeps its bookkeeping below
`.cache/huggingface`, where each `*.metadata` begins with the revision.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from routeblock.errors import InputError

BOOKKEEPING = (".cache", ".git")  # folders of the download tools: no part of the published files
# What a file manager leaves behind (macOS puts an AppleDouble `._name` beside each file on a disk without attributes).
_LEFT_BY_FILE_MANAGERS = (".DS_Store", "Thumbs.db", "desktop.ini")
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")
# A way out where bytes are wrong and nobody here can say what they should be.
COMPARE = "compare its SHA-256 with the one that its publisher lists"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


def lfs_pointer(path: Path, data: bytes) -> InputError | None:
    """The error for a file that holds a Git LFS pointer instead of its content."""
    if not data.startswith(LFS_POINTER):
        return None
    return InputError(
        f"a Git LFS pointer of {len(data)} bytes" if len(data) < 1024 else "a Git LFS pointer",
        where=str(path),
        limit="it stands for a file that git-lfs has not fetched",
        way_out="run git lfs pull in the clone, or copy the file itself",
    )


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder: `files` maps each relative posix path, ascending, to the real file that holds its bytes."""

    root: Path
    files: Mapping[str, Path]
    revision: str | None

    def path(self, name: str, *, way_out: str = "name the folder that holds it, or copy it there") -> Path:
        """The real file of `name`; InputError if the folder has none."""
        if name not in self.files:
            raise InputError(
                "no such file", where=str(self.root / name), limit="the checkpoint needs it", way_out=way_out
            )
        return self.files[name]

    def unfinished(self) -> list[InputError]:
        """One error for each file that a download has not finished."""
        return [
            InputError(
                "an unfinished download",
                where=str(self.root / name),
                limit="a checkpoint is whole files",
                way_out="finish the download, or remove it if the file is there under its own name",
            )
            for name in self.files
            if name.endswith(UNFINISHED)
        ]


def open_folder(path: Path, revision: str | None = None) -> Folder:
    """List the files of a checkpoint at `path`: a plain folder, a snapshot of the hub's cache, or a whole cache entry.

    `revision` is the wanted commit; where the folder itself says which it is, the two must agree. Raises InputError for
    a missing folder, a link that leaves the folder and the hub's blobs, a broken link, a name that is not UTF-8, or
    another revision.
    """
    if not path.is_dir():
        raise InputError(
            "no such folder" if not path.exists() else "not a folder",
            where=str(path),
            limit="a checkpoint is a folder with config.json and safetensors files",
            way_out="name the folder that the download made",
        )
    root = _snapshot(path, revision)
    real = Path(os.path.realpath(root))
    allowed = [real]
    if real.parent.name == "snapshots" and (blobs := real.parents[1] / "blobs").is_dir() and not blobs.is_symlink():
        allowed.append(blobs)
    files = dict(sorted(_walk(root, real, allowed)))
    if not files:
        raise InputError(
            "no files", where=str(root), limit="a checkpoint is needed", way_out="name the folder that holds it"
        )
    found = real.name if len(allowed) > 1 else _downloaded_revision(real)
    if revision and found and revision != found:
        raise InputError(
            f"the folder holds revision {found}",
            where=str(root),
            limit=f"revision {revision} was asked for",
            way_out="name that revision's folder, or change the revision",
        )
    return Folder(root, files, revision or found)


def _snapshot(path: Path, revision: str | None) -> Path:
    """`path`, or the snapshot meant if it is a whole cache entry."""
    snapshots = path / "snapshots"
    if (path / "config.json").exists() or not snapshots.is_dir():
        return path
    names = sorted(p.name for p in snapshots.iterdir() if p.is_dir())
    wanted = revision or _main(path)
    name = names[0] if len(names) == 1 and not revision and wanted not in names else wanted
    if name is None or name not in names:
        raise InputError(
            f"no snapshot of revision {wanted}" if wanted else f"{len(names)} snapshots",
            where=str(snapshots),
            limit=f"there are {', '.join(names) or 'none'}",
            way_out="give the revision, or the snapshot's folder",
        )
    _stay_below(snapshots / name, Path(os.path.realpath(path)) / "snapshots", "move the snapshot into the cache entry")
    return snapshots / name


def _main(path: Path) -> str | None:
    """The revision that a cache entry calls main, or None."""
    main = path / "refs" / "main"
    if not main.is_file():
        return None
    _stay_below(main, Path(os.path.realpath(path)), "replace the link by the revision, or give the revision")
    try:
        return main.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as e:
        raise InputError(
            f"cannot be read: {(e.strerror if isinstance(e, OSError) else None) or e}",
            where=str(main),
            limit="it holds the revision's name",
            way_out="give the revision, or the snapshot's folder",
        ) from e


def _stay_below(path: Path, folder: Path, way_out: str) -> None:
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(folder):
        raise InputError(
            f"a link to {target}",
            where=str(path),
            limit="links are followed inside a cache entry only",
            way_out=way_out,
        )


def _walk(folder: Path, real_root: Path, allowed: list[Path], prefix: str = "") -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = prefix + entry.name
            if not _is_utf8(name):
                raise InputError(
                    "a name that is not UTF-8",
                    where=ascii(entry.path),
                    limit="a manifest lists every file by its name in UTF-8",
                    way_out="rename the file or remove it",
                )
            if entry.name.startswith("._") or entry.name in _LEFT_BY_FILE_MANAGERS:
                continue
            if entry.is_dir(follow_symlinks=False):
                if not (prefix == "" and entry.name in BOOKKEEPING):
                    yield from _walk(Path(entry.path), real_root, allowed, f"{name}/")
                continue
            target = Path(os.path.realpath(entry.path))
            if not any(target.is_relative_to(a) for a in allowed):
                raise InputError(
                    f"a link to {target}",
                    where=entry.path,
                    limit="links are followed inside the folder and into the hub's own blobs only",
                    way_out="copy the file into the folder",
                )
            try:
                mode = target.stat().st_mode
            except OSError as e:
                raise InputError(
                    f"cannot be read: {e.strerror or e}",
                    where=entry.path,
                    limit="every file of the checkpoint must be there",
                    way_out="finish the download or restore the file",
                ) from e
            if not stat.S_ISREG(mode):
                raise InputError(
                    "not a regular file",
                    where=entry.path,
                    limit="a checkpoint holds files, and folders that are no links",
                    way_out="remove it or replace it by a copy",
                )
            yield name, target


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _downloaded_revision(root: Path) -> str | None:
    """The commit that a download to a local folder noted down for config.json."""
    note = root / ".cache" / "huggingface" / "download" / "config.json.metadata"
    if note.is_symlink() or not note.is_file():
        return None
    first = note.read_text(encoding="utf-8", errors="replace").splitlines()[:1]
    return first[0].strip() if first and len(first[0].strip()) == 40 else None
