# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from routeblock import cli
from routeblock.evidence.chain import seal
from routeblock.evidence.digest import canonical_json

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = dict(os.environ)
DISK_IS_FULL = (
    "routeblock: No space left on device; a disk with space that takes the output is needed;"
    " free space or choose another place\n"
)
GROUPS = {"": typer.main.get_group(cli.app).commands}
GROUPS |= {name: group.commands for name, group in GROUPS[""].items() if hasattr(group, "commands")}
COMMANDS = [[*group.split(), name] for group, commands in GROUPS.items() for name in commands]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "routeblock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **{"cwd": ROOT} | options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    root.mkdir()
    for name in ("a", "b"):
        (root / f"{name}.bin").write_text(name)
    outputs = [root / "a.bin", root / "b.bin"]
    seal(
        root / "x.manifest.json",
        rule="fixture",
        outputs=outputs,
        inputs=[],
        parameters={},
        modules=["routeblock.environment"],
    )
    return root


def test_help_of_every_command_loads_no_heavy_module() -> None:
    script = (
        "import sys; from routeblock.cli import main\n"
        f"for c in {COMMANDS!r}: assert main([*c, '--help']) == 0\n"
        "heavy = {'numba', 'pandas', 'numpy', 'scipy', 'rich', 'snakemake'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_says_what_it_does() -> None:
    assert all(command.help for commands in GROUPS.values() for command in commands.values())


def test_verify_holds(results: Path) -> None:
    done = run("verify", results)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{results}: every artifact fits its manifest\n"


def test_verify_names_the_first_and_counts_the_rest(results: Path) -> None:
    for name in ("a", "b"):
        (results / f"{name}.bin").write_text("?")
    done = run("verify", results)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{results}/a.bin: edited: ")
    assert done.stdout.endswith("(and 1 more; -v lists them)\n") and done.stdout.count("\n") == 1
    assert run("verify", results, "-v").stdout.count("\n") == 2


def test_verify_knows_the_present_code_of_a_rule(results: Path) -> None:
    manifest = results / "x.manifest.json"
    for code, status in (("", 0), ("0" * 64, 1)):
        told = json.loads(manifest.read_bytes())
        manifest.write_bytes(canonical_json(told | ({"code": code} if code else {})))
        assert run("verify", results).returncode == status
        assert run("verify", results, "--ignore-code").returncode == 0


def test_repair_then_verify_holds_no_edit(results: Path) -> None:
    (results / "a.bin").write_text("?")
    done = run("repair", results)
    assert (done.returncode, done.stdout) == (0, f"{results}: 3 files removed\n")
    assert list(results.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verfy"],
        ["verify"],
        ["verify", "--nope", "results"],
        ["verify", "/nowhere"],
        ["workflow", "generate", "/nowhere"],
        ["workflow", "environment", "--out"],
        ["workflow", "environment", "--out", "/dev/null/x"],
        ["workflow", "environment", "--out", "results/environment", "--pins", "/nowhere"],
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_a_full_disk_under_our_output_is_one_line(results: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "routeblock", "verify", str(results)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, DISK_IS_FULL)


def test_a_reader_that_goes_away_is_no_traceback(results: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "routeblock", "verify", str(results)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_terminated_process_leaves_no_half_written_file(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "from routeblock import cli\n"
        "def stuck(self, target):\n"
        "    print(self.stat().st_size > 0, flush=True); time.sleep(60)\n"
        "Path.replace = stuck\n"
        f"sys.exit(cli.main(['workflow', 'environment', '--out', sys.argv[1], '--pins', '{ROOT}/envs/base.txt']))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"True\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_the_system_refuses_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    source = tmp_path / "s"
    source.mkdir()
    for readme in ("nope", "loop", "file/x", "s"):
        done = run(
            "study-b", "bundle", "--source", "s", "--readme", readme, "--out", "o", cwd=tmp_path, env=ENVIRONMENT
        )
        assert (done.returncode, done.stdout) == (2, ""), readme
        assert done.stderr.startswith(f"{readme}: ") and done.stderr.count("; ") == 2 and done.stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_an_argument_that_is_not_utf8_is_one_line() -> None:
    done = run("checkpoint", "n\udcff")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "not UTF-8" in done.stderr


def test_a_path_that_the_terminal_cannot_show_is_shown_escaped(results: Path) -> None:
    moved = results.rename(results.with_name("hünï"))
    done = run("verify", moved, env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("h\\xfcn\\xef: every artifact fits its manifest\n")


@pytest.mark.parametrize("error", [EOFError("early"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")])
def test_a_file_that_ends_early_or_is_no_text_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("routeblock.environment.write", stop)
    assert cli.main(["workflow", "environment", "--out", "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.count("; ") == 2


@pytest.mark.parametrize("content", [b"", b"- 1", b"a: [", b"a: 1\na: 2", b"\xff", None])
def test_settings_are_checked_before_the_workflow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    assert cli.main(["workflow", "check-config", str(ROOT / "config.yaml")]) == 0
    settings = tmp_path if content is None else tmp_path / "config.yaml"
    if content is not None:
        settings.write_bytes(content)
    assert cli.main(["workflow", "check-config", str(settings)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(str(settings)) and told.err.count("\n") == 1
