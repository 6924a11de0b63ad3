# SPDX-License-Identifier: Apache-2.0
"""The identity of a checkpoint: every file by size and SHA-256, and what is derived from that."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from routeblock.checkpoint.folder import Folder, open_folder
from routeblock.checkpoint.model import CONFIG
from routeblock.checkpoint.shards import read_header, read_index, shard_names
from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, sha256_bytes, sha256_json
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal

FORMAT = "routeblock.checkpoint_files.v1"
CHUNK = 4 << 20  # bytes read at a time by each worker
SHA256_HEX = 64

# What the source study prints for its checkpoint, and how it made these digests is not published.
PUBLISHED = {
    "checkpoint": "QuantTrio/Qwen3-Coder-30B-A3B-Instruct-AWQ",
    "revision": "c58857a7f41c0920f73d1b56678640f9c02017d7",
    "layer": 6,
    "files": 17,
    "manifest_sha256": "bf498217bf4da3d43864150212b630f08340d05e6922696dd7562539b11798e8",
    "model_identity": "94ab8051a1bfbb6671aebade458b55760ca2ab3432da057e385c4327ce4a286c",
    "comparison": "form not published",
}

Entry = dict[str, Any]


def hash_files(folder: Folder, workers: int | None = None) -> list[Entry]:
    """path, size and SHA-256 of every file, by path; read once, in parallel, with a progress bar on a terminal.

    Raises InputError if a file changes while it is read, cannot be read, or is a hub blob whose name is another
    SHA-256.
    """
    count = workers or min(4, os.cpu_count() or 1)
    sizes = {name: path.stat().st_size for name, path in folder.files.items()}
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        waiting.put(name)  # the largest first: a shard that starts last would run alone at the end
    done: SimpleQueue[Entry | BaseException] = SimpleQueue()
    stop, found = threading.Event(), []

    def work() -> None:
        with suppress(Empty):
            while not stop.is_set():
                name = waiting.get_nowait()
                try:
                    done.put(_hash(folder, name, advance, stop))
                except BaseException as e:
                    done.put(e)

    with _progress(sum(sizes.values())) as advance:
        try:
            # No pool: it would be waited for, and a signal that the main thread gets while it holds one of a pool's
            # locks would make that wait endless.
            for _ in range(min(count, len(sizes))):
                threading.Thread(target=work, daemon=True).start()
            for _ in sizes:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                found.append(result)
        finally:
            stop.set()
    return sorted(found, key=lambda entry: str(entry["path"]))


def _hash(folder: Folder, name: str, advance: Callable[[int], None], stop: threading.Event) -> Entry:
    path, shown = folder.files[name], str(folder.root / name)
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as f:
            before = os.fstat(f.fileno())
            buffer = memoryview(bytearray(min(CHUNK, max(before.st_size, 1))))
            while not stop.is_set() and (count := f.readinto(buffer)):
                digest.update(buffer[:count])
                size += count
                advance(count)
            after = os.fstat(f.fileno())
    except OSError as e:
        raise InputError(
            f"cannot be read: {e.strerror or e}",
            where=shown,
            limit="every file of the checkpoint is hashed",
            way_out="restore the file or its permissions",
        ) from e
    if size != before.st_size or (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise InputError(
            f"changed while it was read ({before.st_size} bytes, then {after.st_size}, {size} read)",
            where=shown,
            limit="files must not change while they are hashed",
            way_out="wait until the download has ended",
        )
    found = digest.hexdigest()
    if path.parent.name == "blobs" and len(path.name) == SHA256_HEX and path.name != found:
        raise InputError(
            f"SHA-256 is {found}",
            where=shown,
            limit=f"the hub stored it as blob {path.name}",
            way_out="delete the blob and download it again",
        )
    return {"path": name, "size": size, "sha256": found}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("hashing", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def document(entries: list[Entry]) -> bytes:
    """The manifest as canonical JSON; its SHA-256 identifies the checkpoint's bytes."""
    return canonical_json({"format": FORMAT, "files": entries})


def identity(manifest: bytes, revision: str | None, layer: int | None) -> dict[str, Any]:
    """Manifest and configuration by SHA-256, revision, layer, and the model identity made of these four."""
    entries = {e["path"]: e for e in json.loads(manifest)["files"]}
    if CONFIG not in entries:
        raise InputError(
            f"no {CONFIG}", where="manifest", limit="a checkpoint has one", way_out="name the checkpoint's own folder"
        )
    parts = {
        "manifest_sha256": sha256_bytes(manifest),
        "config_sha256": entries[CONFIG]["sha256"],
        "revision": revision,
        "layer": layer,
    }
    return {
        **parts,
        "model_identity": sha256_json(parts),
        "files": len(entries),
        "bytes": sum(e["size"] for e in entries.values()),
        "published": PUBLISHED,
    }


def write_manifest(folder: Folder, out: Path, layer: int | None) -> tuple[Path, Path]:
    """Write files.json (the manifest) and identity.json to `out`, each whole or not at all, and return their paths."""
    data = document(hash_files(folder))
    files, derived = out / "files.json", out / "identity.json"
    known = identity(data, folder.revision, layer)
    with atomic_file(files) as tmp:
        tmp.write_bytes(data)
    write_json(derived, known)
    return files, derived


def check_shards(folder: Folder) -> None:
    """Read the header of every safetensors file, and of every shard that the index names.

    Raises InputError for the first that is missing, truncated or malformed.
    """
    for unfinished in folder.unfinished():
        raise unfinished
    indexed = shard_names(folder.files, read_index(folder.root, folder.files))
    for name in sorted({*indexed, *(n for n in folder.files if n.endswith(".safetensors"))}):
        read_header(folder.path(name, way_out="add the shard"), name)


def seal_manifest(path: Path, out: Path, revision: str | None, layer: int | None) -> None:
    """Make and seal the manifest of the checkpoint at `path`.

    Raises InputError as `open_folder` and `hash_files` do, and, before anything is hashed, for a shard that is missing,
    truncated or malformed: an identity of half a download would be taken for the model's.

    The checkpoint is not an input of the seal: it lies outside the results, and the manifest lists it.
    """
    folder = open_folder(path, revision)
    check_shards(folder)
    made = write_manifest(folder, out, layer)
    parameters = {"revision": revision, "layer": layer}
    seal(
        out / "files.manifest.json", rule="manifest", outputs=made, inputs=[], parameters=parameters, modules=[__name__]
    )


def check_manifest(path: Path, revision: str | None, manifest: Path) -> list[InputError]:
    """Everything in which the checkpoint at `path` differs from a manifest, each file hashed."""
    return compare(open_folder(path, revision), read_manifest(manifest)[1])


def read_manifest(path: Path) -> tuple[bytes, Mapping[str, Entry]]:
    """A manifest's bytes and its entries by path. Raises InputError if it is not a manifest in canonical JSON."""
    try:
        data = path.read_bytes()
        value = json.loads(data)
        if value["format"] != FORMAT or canonical_json(value) != data:
            raise ValueError("not canonical")
        return data, {e["path"]: {"size": int(e["size"]), "sha256": str(e["sha256"])} for e in value["files"]}
    except UNREADABLE as e:
        raise InputError(
            f"not a manifest of a checkpoint: {e}",
            where=str(path),
            limit=f"{FORMAT} in canonical JSON",
            way_out="make it with routeblock checkpoint manifest",
        ) from e


def compare(folder: Folder, entries: Mapping[str, Entry], names: list[str] | None = None) -> list[InputError]:
    """What differs between the folder and a manifest; with `names` the other files are compared by size only."""

    def differs(name: str, what: str, limit: str) -> InputError:
        return InputError(
            what, where=str(folder.root / name), limit=limit, way_out="restore the file, or make the manifest again"
        )

    found = [differs(n, "no such file", "the manifest lists it") for n in sorted(entries.keys() - folder.files.keys())]
    found += [
        differs(n, "a new file", "the manifest does not list it") for n in sorted(folder.files.keys() - entries.keys())
    ]
    both = {n: p for n, p in folder.files.items() if n in entries}
    sizes = {n: p.stat().st_size for n, p in both.items()}
    resized = [n for n in both if sizes[n] != entries[n]["size"]]
    found += [differs(n, f"{sizes[n]} bytes", f"the manifest has {entries[n]['size']}") for n in resized]
    chosen = {n: p for n, p in both.items() if n not in resized and (names is None or n in names)}
    for entry in hash_files(Folder(folder.root, chosen, folder.revision)):
        if entry["sha256"] != entries[entry["path"]]["sha256"]:
            wanted = entries[entry["path"]]["sha256"]
            found.append(differs(entry["path"], f"SHA-256 is {entry['sha256']}", f"the manifest has {wanted}"))
    return found
