# SPDX-License-Identifier: Apache-2.0
"""What a sanitizer's output means, and what NVML's answers mean. Outputs are restated in the tools' own form."""

from __future__ import annotations

import pytest

from routeblock.cuda import sanitizer, telemetry
from routeblock.cuda.sanitizer import Outcome
from routeblock.cuda.telemetry import State

DONE = "8 cases, 0 differences\n"


@pytest.mark.parametrize(
    ("tool", "exit_code", "output", "outcome"),
    [
        ("memcheck", 0, f"========= COMPUTE-SANITIZER\n{DONE}========= ERROR SUMMARY: 0 errors\n", Outcome.CLEAN),
        (
            "racecheck",
            0,
            f"{DONE}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            Outcome.CLEAN,
        ),
        ("memcheck", 86, f"{DONE}========= ERROR SUMMARY: 3 errors\n", Outcome.FOUND),
        ("memcheck", 1, "x\n8 cases, 2 differences\n========= ERROR SUMMARY: 0 errors\n", Outcome.FOUND),
        ("memcheck", 1, "========= Error: Device not supported\n", Outcome.REFUSED),
        ("memcheck", 0, "", Outcome.REFUSED),
        ("memcheck", 0, DONE, Outcome.FOUND),
    ],
)
def test_clean_needs_the_whole_run_and_the_summary(tool: str, exit_code: int, output: str, outcome: Outcome) -> None:
    assert sanitizer.judge(tool, exit_code, output).outcome is outcome


REASONS = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")


@pytest.mark.parametrize(
    ("mask", "expected"), [(0, False), (1, False), (4, True), (0x20, True), (2, False), (-1, False)]
)
def test_idle_is_no_throttling_and_unknown_is_not_hidden(mask: int, expected: bool) -> None:
    state = telemetry.seen(State(mask, 1, 1980, 40), State(mask, 1, 1980, 41))
    assert telemetry.throttled(state, REASONS) is expected
    assert state.clock_events == mask


def test_an_event_on_either_side_of_a_batch_counts() -> None:
    for before, after in ((0x40, 0), (0, 0x40), (-1, 0x40), (0x40, -1)):
        assert telemetry.throttled(telemetry.seen(State(before, 1, 0, 0), State(after, 2, 0, 0)), REASONS)


def test_the_protocol_names_known_reasons() -> None:
    assert set(REASONS) == set(telemetry.CLOCK_EVENTS)
