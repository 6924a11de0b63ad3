# SPDX-License-Identifier: Apache-2.0
"""Machines and checkouts as people have them: other line endings, a moved folder, no home, a reader that leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from routeblock.checkpoint.generator import Spec, generate
from routeblock.errors import InputError
from routeblock.evidence.line_endings import check_line_endings

ROOT = Path(__file__).parents[2]
SMALL = Spec(layers=1, experts=4, top_k=2, hidden=128, intermediate=64, group_size=32)
NOWHERE = "/proc/none"  # nobody, root neither, can make a folder there


def git(folder: Path, *arguments: str) -> str:
    """Git without the user's settings, converting line endings as it does on Windows."""
    settings = ["-c", "core.autocrlf=true", "-c", "core.safecrlf=false", "-c", "user.name=x", "-c", "user.email=x@y.z"]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *settings, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("pinned", [True, False])
def test_a_checkout_with_autocrlf_keeps_every_byte(tmp_path: Path, pinned: bool) -> None:
    files = ["fixtures/protocols/q6k_dispatch.json", "workflow/routeblock/cuda/grid_probe.c", "Makefile"]
    for name in [*files, *([".gitattributes"] if pinned else [])]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes() + (b"" if name == ".gitattributes" else b"\n"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    for name in files:
        (tmp_path / name).unlink()
    git(tmp_path, "checkout", "--", ".")
    kept = [(tmp_path / name).read_bytes() == (ROOT / name).read_bytes() + b"\n" for name in files]
    assert kept == [pinned] * len(files)  # without the attributes git changes them: the test can fail
    if pinned:
        check_line_endings(tmp_path / "fixtures", tmp_path / "workflow")
    else:
        with pytest.raises(InputError, match=r"q6k_dispatch\.json: its lines end in CR LF; .*git checkout -- "):
            check_line_endings(tmp_path / "fixtures", tmp_path / "workflow")


def set_up(folder: Path) -> str:
    """What `make setup` would do there."""
    done = subprocess.run(["make", "-n", "setup"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_moved_or_copied_checkout_makes_its_environment_again(tmp_path: Path) -> None:
    first = tmp_path / "it's the first"
    first.mkdir()
    for name in ("Makefile", "pyproject.toml", "envs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, first / name)
    for name in (".venv", ".venv-cuda"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", name], cwd=first, check=True)
    for name in (".venv/base.stamp", ".venv/dev.stamp"):
        (first / name).touch()
    assert "Nothing to be done" in set_up(first)
    copy = tmp_path / "a copy"
    shutil.copytree(first, copy, symlinks=True)
    assert "made in another folder, so made again: .venv .venv-cuda" in set_up(copy)
    assert "rm -rf .venv .venv-cuda" in set_up(copy) and "-m venv .venv" in set_up(copy)
    assert (copy / ".venv" / "base.stamp").exists()  # -n does nothing
    moved = first.rename(tmp_path / "moved")
    assert "-m venv .venv" in set_up(moved)


def command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`routeblock ...` in a process of its own, with this environment alone."""
    own = {"PYTHONPATH": str(ROOT / "workflow")} | (environment or {})
    return subprocess.run(
        [sys.executable, "-m", "routeblock", *arguments], env=own, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("environment", [{}, {"HOME": NOWHERE}, {"HOME": NOWHERE, "TMPDIR": NOWHERE}])
def test_commands_need_no_home(tmp_path: Path, environment: dict[str, str]) -> None:
    root = generate(tmp_path / "c", SMALL)
    done = command("checkpoint", "check", str(root), "--layer", "0", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    done = command("checkpoint", "manifest", str(root), "--out", str(tmp_path / "m"), environment=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_compiled_schedules_need_no_folder_for_their_cache(tmp_path: Path) -> None:
    """Neither a home, nor a place beside the source: numba raises if it is asked to cache and no folder takes it."""
    package = tmp_path / "routeblock"
    shutil.copytree(ROOT / "workflow" / "routeblock", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "grouped_schedule" / "__pycache__").touch()
    child = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "import routeblock.grouped_schedule.cpu, routeblock.twin.layer, routeblock.twin.jit as j; print(j.CACHED)"
    )
    environment = {"HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE, "PYTHONPATH": str(tmp_path)}

    def is_cached(temporary: str) -> str:
        words = [sys.executable, "-c", child, temporary]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert is_cached(NOWHERE) == "False"
    assert is_cached(str(tmp_path)) == "True"
    private = tmp_path / f"routeblock-{os.getuid()}"
    private.chmod(0o777)  # compiled code that others can write is not loaded
    assert is_cached(str(tmp_path)) == "False"


def test_a_checkout_that_takes_no_files_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".snakemake").touch()  # in the way, for root too
    own = {"PYTHONPATH": str(ROOT / "workflow"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-m", "routeblock", "recover", str(tmp_path / "results")],
        env=own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert ".snakemake: cannot be written" in done.stderr


GONE = 128 + signal.SIGPIPE


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "streams", "code"),
    [
        (["checkpoint", "check", "CHECKPOINT"], ">&-", 0),
        (["checkpoint", "check", "CHECKPOINT"], ">&- 2>&-", 0),
        (["checkpoint", "check", "CHECKPOINT"], "| true", GONE),
        (["checkpoint", "check", "CHECKPOINT"], "2>&1 | true", GONE),
        (["--help"], "| true", GONE),
        (["checkpoint", "--help"], "| true", GONE),
        (["checkpoint", "check", "CHECKPOINT/absent"], "2>&1 | true", 2),
        (["checkpoint", "check", "CHECKPOINT/absent"], "2>&-", 2),
        (["checkpoint", "check", "CHECKPOINT/absent"], "2>/dev/full", 2),
    ],
)
def test_a_reader_that_left_is_no_finding(
    tmp_path: Path, arguments: list[str], streams: str, code: int, unbuffered: str
) -> None:
    root = generate(tmp_path / "c", SMALL)
    words = [sys.executable, "-m", "routeblock", *(a.replace("CHECKPOINT", str(root)) for a in arguments)]
    redirected, _, reader = streams.partition("|")
    # The sub-shell waits until the reader has gone.
    inner = f'sleep 0.3; "$@" {redirected}; echo $? > {tmp_path}/code'
    script = f"({inner}) | true" if reader else f"({inner})"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow"), "PYTHONUNBUFFERED": unbuffered}
    subprocess.run(["sh", "-c", script, "sh", *words], env=environment, capture_output=True, timeout=120)
    assert (tmp_path / "code").read_text().strip() == str(code)


SNAKEFILE = """
rule all:
    input: "done"

rule first:
    output: "first"
    shell: "sleep 0.5; echo something; echo else >&2; touch {output}"

rule second:
    input: rules.first.output
    output: "done"
    shell: "echo something more; echo more >&2; touch {output}"
"""


@pytest.mark.parametrize("reader", ["true", "head -c 1", "cat"])
def test_a_workflow_and_its_jobs_go_on_when_the_reader_leaves(tmp_path: Path, reader: str) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    script = f'("$@" 2>&1; echo $? > code) | {reader}'
    words = [sys.executable, "-m", "routeblock.workflow_run", "--cores", "1", "--nocolor"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (tmp_path / "code").read_text().strip() == "0" and (tmp_path / "done").exists()
    if reader == "cat":
        assert "something more" in done.stdout and "2 of 3 steps" in done.stdout
