# SPDX-License-Identifier: Apache-2.0
"""What a command of the alignment's cost cannot work with is told in one line with the way out, exit 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import COMMITTED, protocol_file, record_folder

from routeblock.alignment_cost.study import STUDY
from routeblock.cli import main
from routeblock.timing.record import BATCHES

RUN = "run.json"


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The one line that a command is refused with."""
    assert main(command) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "Traceback" not in told.err
    return told.err


def without_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch", None)


def without_core(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch", ModuleType("torch"))
    patch.setitem(sys.modules, "cuda.core", None)
    patch.setitem(sys.modules, "cuda", ModuleType("cuda"))


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    cuda: Any = ModuleType("cuda")
    cuda.core = ModuleType("cuda.core")
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    for module in (torch, cuda, cuda.core):
        patch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("command", ["alignment exactness", "alignment record"])
@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        (without_torch, "torch"),
        (without_core, "install envs/cuda.txt, and cuda-core as envs/cuda13.txt has it"),
        (without_gpu, "torch sees no GPU"),
    ],
)
def test_a_machine_that_cannot_record_is_told_what_it_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    lacks: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    monkeypatch.chdir(COMMITTED.parents[2])
    extension, out = tmp_path / "_moe_C.abi3.so", tmp_path / "out"
    extension.write_bytes(b"")
    monkeypatch.setenv("ROUTEBLOCK_EXTENSION", str(extension))
    lacks(monkeypatch)
    out.mkdir()
    (out / RUN).write_text("an earlier record")
    line = refused(capsys, *command.split(), "--out", str(out))
    assert words in line and line.startswith(f"{command}: ")
    assert [p.name for p in out.iterdir()] == [RUN]


def test_no_extension_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(COMMITTED.parents[2])
    monkeypatch.setenv("ROUTEBLOCK_EXTENSION", str(tmp_path / "gone.so"))
    assert "no MoE extension of vLLM" in refused(capsys, "alignment", "record", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A record, its protocol, statistics and edits."""
    base = tmp_path_factory.mktemp("sound")
    protocol = protocol_file(base)
    folder = record_folder(base / "record", protocol)
    common = ["--record", str(folder), "--protocol", str(protocol)]
    assert main(["alignment", "statistics", *common, "--out", str(base / "statistics")]) == 0
    statistics = str(base / "statistics/statistics.json")
    assert main(["alignment", "validate", *common, "--statistics", statistics, "--out", str(base / "validation")]) == 0
    (base / "none.json").write_text("{}")
    (base / "list.json").write_text("[]")
    return {
        "protocol": protocol,
        "record": folder,
        "statistics": base / "statistics/statistics.json",
        "mutations": base / "none.json",
        "validation": base / "validation/validation.json",
        "declared": COMMITTED.parents[1] / "record_edits.json",
        "source": folder,
    }


# Every option of every command that reads something.
COMMANDS = {
    "alignment recorded": ("source", "protocol"),
    "alignment statistics": ("record", "protocol"),
    "alignment validate": ("record", "statistics", "protocol"),
    "alignment mutate": ("record", "protocol", "declared"),
    "alignment table alignment_cost": ("record", "statistics", "validation"),
}


@pytest.mark.parametrize("bad", ["missing", "none.json", "list.json", "batches.parquet"])
@pytest.mark.parametrize(("command", "option"), [(c, o) for c, every in COMMANDS.items() for o in every])
def test_an_input_that_is_missing_or_something_else_is_told(
    sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str, bad: str
) -> None:
    base = sound["record"].parent
    other = base / "record" / bad if bad == BATCHES else base / bad
    given = sound | {option: other}
    out = tmp_path / "out"
    options = [part for name in COMMANDS[command] for part in (f"--{name}", str(given[name]))]
    line = refused(capsys, *command.split(), *options, "--out", str(out))
    assert str(other) in line or option in ("mutations", "validation"), line
    assert not out.exists()


@pytest.mark.parametrize("name", STUDY.files)
@pytest.mark.parametrize("command", ["alignment statistics", "alignment validate", "alignment table alignment_checks"])
def test_a_record_with_a_malformed_file_is_told(
    sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    for path in sound["record"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).write_text('{"checks": [{}], "tools": [3]}')
    options = {n: str(p) for n, p in (sound | {"record": folder}).items() if n in COMMANDS.get(command, ())}
    if command.startswith("alignment table"):
        options = {n: str(sound[n]) for n in ("statistics", "validation")} | {"record": str(folder)}
    command_line = [*command.split(), *(part for n, p in options.items() for part in (f"--{n}", p))]
    assert str(folder) in refused(capsys, *command_line, "--out", str(tmp_path / "out"))


def test_empty_cells_are_no_batches(sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    for path in sound["record"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    table = pq.read_table(folder / BATCHES)
    rows = table.to_pylist()
    rows[3]["tokens"] = None
    loose = pa.schema([f.with_nullable(True) for f in table.schema])
    pq.write_table(pa.Table.from_pylist(rows, schema=loose), folder / BATCHES)
    common = ["--record", str(folder), "--protocol", str(sound["protocol"]), "--out", str(tmp_path / "out")]
    assert "empty cells in column tokens" in refused(
        capsys, "alignment", "validate", *common, "--statistics", str(sound["statistics"])
    )
    refused(capsys, "alignment", "statistics", *common)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("seed",), -1, "seed"),
        (("seed",), 2**63, "seed"),
        (("bootstrap", "seed"), 2**63, "bootstrap.seed"),
        (("bootstrap", "confidence"), 1.5, "bootstrap.confidence"),
        (("warmups",), 0, "warmups"),
        (("acceptance", "extra_repetitions"), -1, "acceptance.extra_repetitions"),
        (("acceptance", "throttle_reasons"), ["heat"], "acceptance.throttle_reasons"),
    ],
)
def test_a_protocol_out_of_range_is_told(
    sound: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: tuple[str, ...],
    value: Any,
    words: str,
) -> None:
    told = json.loads(sound["protocol"].read_text())
    part = told
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(told))
    command = ["alignment", "statistics", "--record", str(sound["record"]), "--protocol", str(path)]
    assert words in refused(capsys, *command, "--out", str(tmp_path / "out"))


def test_a_table_that_does_not_exist_is_told(
    sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for n in COMMANDS["alignment table alignment_cost"] for part in (f"--{n}", str(sound[n]))]
    line = refused(capsys, "alignment", "table", "costs", *options, "--out", str(tmp_path))
    assert "no table is called 'costs'" in line


@pytest.mark.parametrize(
    "command",
    [
        ["study-a", "fixture", "--name", "published_geometry", "--out", "x"],
        ["study-a", "random-plans", "--fixture", "x", "--lane", "twin-hopper", "--out", "x"],
        ["checkpoint", "generate", "x"],
    ],
)
@pytest.mark.parametrize("seed", [2**63, 2**64, 10**40, -1])
def test_a_seed_beyond_64_bits_is_told(capsys: pytest.CaptureFixture[str], command: list[str], seed: int) -> None:
    assert "--seed" in refused(capsys, *command, "--seed", str(seed))


@pytest.mark.parametrize("option", ["statistics", "protocol"])
def test_a_document_nested_too_deep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sound: dict[str, Path], option: str
) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    given = {name: sound[name] for name in ("record", "statistics", "protocol")} | {option: deep}
    options = [word for name, path in given.items() for word in (f"--{name}", str(path))]
    assert refused(capsys, "alignment", "validate", *options, "--out", str(tmp_path / "out")).startswith(f"{deep}: ")
    assert not (tmp_path / "out").exists()
