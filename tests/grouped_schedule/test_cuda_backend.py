# SPDX-License-Identifier: Apache-2.0
"""What a batch on a GPU consists of, seen through a device that only notes what it is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import PLAN

from routeblock.cuda import launch
from routeblock.cuda.telemetry import State
from routeblock.grouped_schedule import cuda_backend, sanitizer_cases
from routeblock.grouped_schedule.campaigns import Mode
from routeblock.grouped_schedule.schedules import Family, Scope
from routeblock.timing.loop import Sample
from routeblock.timing.plan import Series


class Notes:
    """Stands for `cuda.launch.Gpu`: graphs are lists, a launch is a name, events are numbers."""

    stream = SimpleNamespace(sync=lambda: None)

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.built = 0

    def upload(self, array: Any) -> str:
        return "buffer"

    def allocate(self, size: int) -> str:
        return "buffer"

    def bind(self, kernel: str, grid: Any, block: Any, *arguments: Any) -> launch.Launch:
        return lambda where: where.append(kernel) if isinstance(where, list) else None

    def events(self, count: int) -> list[int]:
        return list(range(count))

    def mark(self, event: int) -> launch.Launch:
        return lambda where: where.append(f"event {event}")

    def graph(self, launches: list[launch.Launch]) -> Any:
        work: list[str] = []
        for each in launches:
            each(work)
        self.built += 1
        return SimpleNamespace(launch=lambda stream: self.ran.append(work))

    def microseconds(self, start: int, end: int) -> float:
        assert (start, end) == (0, 1)
        return 1600.0


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> cuda_backend.CudaBackend:
    made = object.__new__(cuda_backend.CudaBackend)
    made.gpu = Notes()  # type: ignore[assignment]
    made.kernels = {name: name for name in cuda_backend.KERNELS}
    made.nvml = SimpleNamespace(state=lambda: State(0, 1, 1980, 40))  # type: ignore[assignment]
    made._protocol, made._weights = PLAN, None
    fixture = sanitizer_cases.make("one sentinel", Family.INDEPENDENT)
    made.load(fixture, replace(sanitizer_cases.setup(fixture, 4), mode=Mode.GRAPH))
    return made


@pytest.mark.parametrize(
    ("arm", "scope", "work"),
    [
        ("job_major", Scope.INCLUSIVE, ["job_major"]),
        ("band32", Scope.INCLUSIVE, ["rank_sort", "grouped"]),
        ("band32", Scope.COMPUTE, ["grouped"]),
        ("serial_band32", Scope.INCLUSIVE, ["serial_sort", "grouped"]),
    ],
)
def test_a_batch_is_one_graph_with_its_events_inside(
    backend: cuda_backend.CudaBackend, arm: str, scope: Scope, work: list[str]
) -> None:
    """3 warm-ups, event, 16 launches, event: the host cannot come between."""
    (first,), (second,) = (backend.measure(Series(arm, arm), (scope,)) for _ in range(2))
    notes: Any = backend.gpu
    assert notes.ran == [[*work * 3, "event 0", *work * 16, "event 1"]] * 2 and notes.built == 1
    assert first == second == Sample(1600.0, 16)


def test_an_event_in_a_graph_is_recorded_by_the_device() -> None:
    calls: list[tuple[int, ...]] = []
    gpu: Any = object.__new__(launch.Gpu)
    external = SimpleNamespace(CU_EVENT_RECORD_EXTERNAL=SimpleNamespace(value=1))
    gpu._driver = SimpleNamespace(
        CUevent_record_flags=external, cuEventRecordWithFlags=lambda *given: calls.append(given) or (0,)
    )
    gpu.mark(SimpleNamespace(handle=7))(SimpleNamespace(stream=SimpleNamespace(handle=9)))
    assert calls == [(7, 9, 1)]
