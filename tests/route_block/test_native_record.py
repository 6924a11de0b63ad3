# SPDX-License-Identifier: Apache-2.0
"""The recording of native alignment: turns, order and what is refused, with a stand-in for its processes."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from routeblock.errors import InputError
from routeblock.evidence.gpu_record import plain
from routeblock.evidence.tensors import load_tensors
from routeblock.route_block.native import record
from routeblock.route_block.native.protocol import load

PROTOCOL = Path(__file__).parents[2] / "fixtures" / "protocols" / "native.json"
CHILD = """#!{python} -IS
import json, struct, sys, time
what, out = sys.argv[5], sys.argv[-1]
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit(0)
began = time.time_ns()
if {fails}:
    print("native: no GPU here", file=sys.stderr)
    sys.exit(2)
told = {{"what": what, "identity": {{"binary": {binary}}}, "began_ns": began}}
told["plans"] = {{"outcomes": [what + "x", "y"]}}
head = json.dumps({{"sorted_token_ids": {{"dtype": "I32", "shape": [2, 8], "data_offsets": [0, 64]}}}}).encode()
with open(out + "/plans.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(head)) + head + bytes(64))
with open(out + "/result.json", "w") as f:
    f.write(json.dumps(dict(told, ended_ns=time.time_ns())))
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    extension = tmp_path / "_moe_C.abi3.so"
    extension.write_bytes(b"")
    monkeypatch.setenv(record.EXTENSION_VARIABLE, str(extension))
    monkeypatch.setattr(record, "load_fixture", lambda folder: SimpleNamespace(digest="d"))
    plan = json.loads(PROTOCOL.read_bytes())
    plan["history"]["pairs"], plan["repetition"]["processes"] = 20, 1
    path = tmp_path / "native.json"
    path.write_text(json.dumps(plan))
    return path


def child(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False, binary: str = "1") -> None:
    script = folder / "child"
    script.write_text(CHILD.format(python=sys.executable, fails=fails, binary=binary))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(record.sys, "executable", str(script))


def test_processes_take_turns_in_the_order_of_the_protocol(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(tmp_path, monkeypatch)
    record.write(tmp_path / "out", tmp_path, small, progress=lambda line: None)
    told = plain(tmp_path / "out" / record.RUN)
    assert [p["what"] for p in told["processes"]] == [*load(small).order(), "repetition"]
    assert [p["what"] for p in told["processes"][:4]] == ["H0", "H1", "H1", "H0"]
    stamps = [t for p in told["processes"] for t in (p["began_ns"], p["ended_ns"])]
    assert stamps == sorted(stamps)
    assert told["plans"] == ["H0x", "y", "H1x"]
    assert load_tensors(tmp_path / "out" / record.PLANS)["sorted_token_ids"].shape == (3, 8)
    assert (tmp_path / "out" / record.FOLDER.archive).is_file()


def test_a_process_that_fails_ends_the_recording_with_its_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(tmp_path, monkeypatch, fails=True)
    with pytest.raises(InputError, match="no GPU here"):
        record.write(tmp_path / "out", tmp_path, small, progress=lambda line: None)
    assert not (tmp_path / "out" / record.RUN).exists()


def test_processes_of_two_binaries_are_no_record(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, monkeypatch, binary="began")
    with pytest.raises(InputError, match="several identities"):
        record.write(tmp_path / "out", tmp_path, small, progress=lambda line: None)
