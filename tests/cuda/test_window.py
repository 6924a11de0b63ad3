# SPDX-License-Identifier: Apache-2.0
"""Guarded windows: their order, what a failed check takes away, and processes that may stay by name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from routeblock.cuda import telemetry
from routeblock.cuda.window import Settings, failed, run


def measured(tmp_path: Path, settings: Settings, *, left: list[list[str]] | None = None) -> tuple[int, Any, list[str]]:
    """Run a command that writes a batch; `left`: what is on the GPUs at each look after it."""
    looks = iter(left or [[]])
    script = f"open({str(tmp_path / 'log')!r}, 'a').write('measure\\n'); open({str(tmp_path / 'batches')!r}, 'w')"
    out = tmp_path / "window.json"
    status = run(
        settings,
        [sys.executable, "-c", script],
        tmp_path / "batches",
        out,
        foreign=lambda: next(looks, ["x"]),
    )
    log = tmp_path / "log"
    return status, json.loads(out.read_bytes()), log.read_text().split() if log.exists() else []


def settings(tmp_path: Path, **changes: tuple[str, ...]) -> Settings:
    def say(word: str) -> tuple[str, ...]:
        return (f"echo {word} >> {tmp_path / 'log'}",)

    return Settings(**({name: say(name) for name in ("before", "check", "after")} | changes))


def test_steps_run_in_order_and_are_told(tmp_path: Path) -> None:
    status, told, log = measured(tmp_path, settings(tmp_path, resident=("vllm",)), left=[["vllm_engine"], []])
    assert status == 0 and (tmp_path / "batches").exists()
    assert log == ["before", "check", "measure", "check", "after"]
    assert [s["step"] for s in told["steps"]] == ["before", "check", "measure", "check_again", "cleanup", "after"]
    assert all(s["ok"] for s in told["steps"]) and told["resident"] == ["vllm"]
    assert (tmp_path / "window.manifest.json").is_file()


def test_a_window_that_is_not_drained_measures_nothing_and_is_opened_again(tmp_path: Path) -> None:
    status, told, log = measured(tmp_path, settings(tmp_path, check=("echo three requests; exit 1",)))
    assert (status, log) == (1, ["before", "after"])
    assert "check failed: echo three requests; exit 1: three requests" in failed(tmp_path / "w", told["steps"])


def test_work_that_arrived_meanwhile_yields_no_batches(tmp_path: Path) -> None:
    once = f"test ! -e {tmp_path / 'batches'}"
    status, told, log = measured(tmp_path, settings(tmp_path, check=(once,)))
    assert status == 1 and not (tmp_path / "batches").exists() and log == ["before", "measure", "after"]
    assert [s["step"] for s in told["steps"] if not s["ok"]] == ["check_again"]


def test_a_process_that_stays_yields_no_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routeblock.cuda.window.CLEANUP_LIMIT_S", 0.1)
    status, told, _ = measured(tmp_path, settings(tmp_path), left=[["python3"]])
    assert status == 1 and not (tmp_path / "batches").exists()
    assert [s["step"] for s in told["steps"] if not s["ok"]] == ["cleanup"]


def test_without_commands_there_is_no_window() -> None:
    assert Settings().options() == ""
    assert Settings(check=("a 'b'",), resident=("vllm",)).options() == """--check 'a '"'"'b'"'"'' --resident vllm"""


class Nvml:
    """Two processes besides this one."""

    NVMLError = RuntimeError
    names: ClassVar[dict[int, Any]] = {1: b"/usr/bin/vllm", 2: "/opt/other"}

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in (1, 2, os.getpid())]

    def nvmlSystemGetProcessName(self, pid: int) -> Any:  # noqa: N802
        return self.names[pid]

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("allowed", "processes", "reason"), [("", 3, True), ("vllm", 2, True), ("vllm,other", 1, False)]
)
def test_resident_processes_are_allowed_by_name(
    allowed: str, processes: int, reason: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_nvml", Nvml)
    monkeypatch.setenv(telemetry.RESIDENT_VARIABLE, allowed)
    seen = telemetry.Gpu("0").state()
    assert seen.compute_processes == processes
    assert telemetry.rejection(seen, ()) == ("other_process" if reason else "")
    assert telemetry.foreign(telemetry.resident()) == [n for n in ("vllm", "other") if n not in allowed.split(",")]
