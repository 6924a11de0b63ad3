# SPDX-License-Identifier: Apache-2.0
"""Which files a checkpoint has, its manifest and identity, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from routeblock.checkpoint.folder import Folder, open_folder
from routeblock.checkpoint.generator import Spec, generate
from routeblock.checkpoint.layer import open_checkpoint, read_layer
from routeblock.checkpoint.manifest import PUBLISHED, compare, hash_files, read_manifest, write_manifest
from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_json

REVISION = "0123456789abcdef0123456789abcdef01234567"
SMALL = Spec(layers=1, experts=4, top_k=2, hidden=128, intermediate=64, group_size=32)


def test_manifest_lists_every_file_with_its_own_digest(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)
    files, derived = write_manifest(open_folder(root, REVISION), tmp_path / "out", 0)
    manifest, identity = files.read_bytes(), json.loads(derived.read_bytes())
    assert canonical_json(json.loads(manifest)) == manifest
    entries = json.loads(manifest)["files"]
    assert len(entries) == PUBLISHED["files"] == 17
    assert entries == [
        {"path": p.name, "size": p.stat().st_size, "sha256": sha256(p.read_bytes()).hexdigest()}
        for p in sorted(root.iterdir(), key=lambda p: p.name)
    ]
    config = sha256((root / "config.json").read_bytes()).hexdigest()
    parts = {
        "manifest_sha256": sha256(manifest).hexdigest(),
        "config_sha256": config,
        "revision": REVISION,
        "layer": 0,
    }
    assert {k: identity[k] for k in parts} == parts
    assert identity["model_identity"] == sha256_json(parts)
    assert identity["published"]["comparison"] == "form not published"


@pytest.mark.parametrize("change", [{"revision": "f" * 40}, {"layer": 1}, {"config": True}])
def test_model_identity_depends_on_each_of_its_parts(tmp_path: Path, change: dict[str, object]) -> None:
    root = generate(tmp_path / "c", SMALL)
    _, first = write_manifest(open_folder(root, REVISION), tmp_path / "1", 0)
    if change.get("config"):
        (root / "config.json").write_text((root / "config.json").read_text() + " ")
    revision = str(change.get("revision", REVISION))
    _, second = write_manifest(open_folder(root, revision), tmp_path / "2", 1 if "layer" in change else 0)
    assert json.loads(first.read_bytes())["model_identity"] != json.loads(second.read_bytes())["model_identity"]


def test_hub_layout_has_the_same_manifest_as_the_plain_folder(tmp_path: Path) -> None:
    plain = generate(tmp_path / "c", SMALL)
    cache = tmp_path / "hub" / "models--A--B"
    snapshot = generate(cache, replace(SMALL, revision=REVISION))
    assert (snapshot / "config.json").is_symlink()
    for path in (snapshot, cache):
        folder = open_folder(path)
        assert folder.revision == REVISION
        assert hash_files(folder) == hash_files(open_folder(plain))
        assert read_layer(open_checkpoint(path), 0).dtype == "float16"
    with pytest.raises(InputError, match="revision " + "f" * 40):
        open_folder(snapshot, "f" * 40)
    with pytest.raises(InputError, match="no snapshot of revision"):
        open_folder(cache, "f" * 40)


def test_download_to_a_local_folder_tells_its_revision_and_keeps_its_bookkeeping_out(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)
    note = root / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{REVISION}\nabc\n1.0\n")
    folder = open_folder(root)
    assert folder.revision == REVISION
    assert len(folder.files) == 17


def test_damaged_blob_is_refused_by_its_name(tmp_path: Path) -> None:
    snapshot = generate(tmp_path / "models--A--B", replace(SMALL, revision=REVISION))
    blob = Path(os.path.realpath(snapshot / "README.md"))
    blob.write_text("something else\n")
    with pytest.raises(InputError, match=r"README\.md: SHA-256 is .* the hub stored it as blob"):
        hash_files(open_folder(snapshot))


@pytest.mark.parametrize("target", ["file outside", "folder outside", "nothing", "folder inside"])
def test_nothing_outside_the_folder_and_the_blobs_is_followed(tmp_path: Path, target: str) -> None:
    snapshot = generate(tmp_path / "models--A--B", replace(SMALL, revision=REVISION))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    where = {
        "file outside": outside / "secret.txt",
        "folder outside": outside,
        "nothing": snapshot / "absent",
        "folder inside": snapshot.parents[1] / "blobs",
    }[target]
    (snapshot / "link").symlink_to(where)
    with pytest.raises(InputError, match="link"):
        open_folder(snapshot)


def test_linked_shard_inside_the_folder_is_read(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)
    shard = root / "model-00001-of-00005.safetensors"
    (root / "store").mkdir()
    shard.rename(root / "store" / "x")
    shard.symlink_to("store/x")
    assert open_folder(root).files[shard.name] == root / "store" / "x"


def test_changed_missing_and_new_files_are_each_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = generate(tmp_path / "c", SMALL)
    files, _ = write_manifest(open_folder(root), tmp_path / "out", 0)
    entries = read_manifest(files)[1]
    assert compare(open_folder(root), entries) == []
    shard = root / "model-00002-of-00005.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (root / "merges.txt").unlink()
    (root / "new.txt").write_text("x")
    (root / "README.md").write_text("longer or shorter")
    found = [str(e) for e in compare(open_folder(root), entries)]
    for name, words in {
        shard.name: "SHA-256 is",
        "merges.txt": "no such file",
        "new.txt": "a new file",
        "README.md": "17 bytes",
    }.items():
        assert any(f"{name}: {words}" in line for line in found), name
    assert len(found) == 4
    assert main(["checkpoint", "check", str(root), "--manifest", str(files)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_file_that_grows_while_it_is_hashed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    folder = Folder(tmp_path, {"x": path}, None)
    fstat = os.fstat
    calls = []

    def growing(descriptor: int) -> os.stat_result:
        calls.append(descriptor)
        if len(calls) == 2:
            with path.open("ab") as f:
                f.write(b"more")
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", growing)
    with pytest.raises(InputError, match="changed while it was read"):
        hash_files(folder, workers=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_kill_while_hashing_leaves_no_manifest(tmp_path: Path, number: int) -> None:
    root = generate(tmp_path / "c", SMALL)
    with (root / "large.bin").open("wb") as f:
        f.truncate(64 << 30)  # a hole: takes no disk, and longer to hash than this test waits
    out = tmp_path / "out"
    command = [sys.executable, "-m", "routeblock", "checkpoint", "manifest", str(root), "--out", str(out)]
    # A shell's background job ignores SIGINT, and hands that down to every process below it.
    unignored = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=unignored)
    large = (root / "large.bin").stat()
    try:
        deadline = time.monotonic() + 60
        while not _has_open(process.pid, large.st_ino):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert not out.exists() or list(out.iterdir()) == []


def _has_open(pid: int, inode: int) -> bool:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        return any(d.exists() and d.stat().st_ino == inode for d in descriptors)
    except OSError:
        return False


@pytest.mark.parametrize("harm", ["truncated", "gone", "no header", "a stray one"])
def test_a_checkpoint_with_a_broken_shard_gets_no_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    root, out = generate(tmp_path / "c", SMALL), tmp_path / "out"
    shard = root / "model-00002-of-00005.safetensors"
    if harm == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif harm == "gone":
        shard.unlink()
    elif harm == "no header":
        shard.write_bytes((8).to_bytes(8, "little") + b"no json!")
    else:
        shard = root / "more" / "x.safetensors"
        shard.parent.mkdir()
        shard.write_bytes(b"x")
    assert main(["checkpoint", "manifest", str(root), "--out", str(out)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"{shard}: ") and told.err.count("\n") == 1
    assert not out.exists()


def test_a_snapshot_and_the_revision_are_not_followed_out_of_the_cache_entry(tmp_path: Path) -> None:
    cache, outside = tmp_path / "models--A--B", tmp_path / "outside"
    snapshot = generate(cache, replace(SMALL, revision=REVISION))
    (tmp_path / "link").symlink_to(cache)
    assert open_folder(tmp_path / "link").revision == REVISION
    main_ref = cache / "refs" / "main"
    main_ref.rename(outside)
    main_ref.symlink_to(outside)
    with pytest.raises(InputError, match=r"refs/main: a link to .*outside"):
        open_folder(cache)
    assert open_folder(cache, REVISION).revision == REVISION
    main_ref.unlink()
    generate(tmp_path / "plain", SMALL)
    for path in snapshot.iterdir():
        path.unlink()
    snapshot.rmdir()
    snapshot.symlink_to(tmp_path / "plain")
    for revision in (None, REVISION):
        with pytest.raises(InputError, match=rf"snapshots/{REVISION}: a link to .*plain"):
            open_folder(cache, revision)


def test_a_revision_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    generate(tmp_path / "c", replace(SMALL, revision=REVISION))
    (tmp_path / "c" / "refs" / "main").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"refs/main: cannot be read: .*; give the revision"):
        open_folder(tmp_path / "c")


@pytest.mark.parametrize("command", ["check", "manifest"])
def test_a_name_that_is_not_utf8_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    root = generate(tmp_path / "c", SMALL)
    Path(os.fsdecode(os.fsencode(root) + b"/n\xff")).write_bytes(b"x")
    out = ["--out", str(tmp_path / "out")] if command == "manifest" else []
    assert main(["checkpoint", command, str(root), *out]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "n\\udcff': a name that is not UTF-8" in line
    assert not (tmp_path / "out").exists()
