# SPDX-License-Identifier: Apache-2.0
"""Words of the engine's study: whose alignment, which mode, which clock, what a process does."""

from __future__ import annotations

from enum import StrEnum


class Alignment(StrEnum):
    """Whose alignment the engine runs."""

    NATIVE = "native"
    CANONICAL = "canonical"


class Mode(StrEnum):
    """How decode steps reach the GPU. Prefill is eager in both."""

    EAGER = "eager"
    GRAPHS = "graphs"


class Clock(StrEnum):
    """Which steps of a batch are timed, on the host's clock: a step ends when its tokens are on the host."""

    PREFILL = "prefill"
    DECODE = "decode"


class Kind(StrEnum):
    """What a process of the engine does."""

    REPEAT = "repeat"
    TIMED = "timed"
    OBSERVED = "observed"
    CAPTURED = "captured"
