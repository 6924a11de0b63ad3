# SPDX-License-Identifier: Apache-2.0
"""Why a record of the cost, or its statistics, is refused. Each failure is one of these codes; none is a warning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Reason codes: of files, of what a record says of itself, of its batches, of its statistics."""

    SEAL = "seal"
    """A file is not the one that was sealed or listed."""
    PROTOCOL = "protocol"
    """The record or the statistics carry the digest of another protocol."""
    BUILD = "build"
    """The extension is none of the protocol's builds, or names another version than that build's."""
    KERNELS = "kernels"
    """The kernels whose bits were checked are not the kernels that were timed."""
    DEVICE = "device"
    """The GPU on which bits were checked is not the one that was timed."""
    BITS = "bits"
    """The check of bits tells a difference."""
    SANITIZER = "sanitizer"
    """A sanitizer tool found something."""
    PLAN_WRONG = "plan_wrong"
    """An arm's plan at a point is not a legal one, or not the reference's."""
    PLANS = "plans"
    """The digests of a point's plans are not those that the protocol's seed gives."""
    NOT_CHECKED = "not_checked"
    """A point was timed without exactly one check before."""
    COUNTS = "counts"
    """run.json counts other batches than are there."""
    POINT_MISSING = "point_missing"
    """A point of the protocol has no batches."""
    POINT_UNKNOWN = "point_unknown"
    """Batches or a check of no point of the protocol."""
    CLOCK_UNKNOWN = "clock_unknown"
    """A batch on a clock that its campaign does not have."""
    SERIES_UNKNOWN = "series_unknown"
    """A batch of no series of the protocol."""
    REPETITION_MISSING = "repetition_missing"
    """A planned repetition has no batches."""
    REPETITION_UNKNOWN = "repetition_unknown"
    """A repetition beyond those planned."""
    ATTEMPT_MISSING = "attempt_missing"
    """A repetition lacks an attempt before its last, or was rejected and not timed again though it had to be."""
    ATTEMPT_UNPLANNED = "attempt_unplanned"
    """A repetition was timed again after it was accepted, or beyond the attempts or extra repetitions allowed."""
    BATCH_MISSING = "batch_missing"
    """An attempt lacks a series on a clock."""
    BATCH_TWICE = "batch_twice"
    """An attempt has a series on a clock twice."""
    ORDER = "order"
    """Batches do not stand in the order in which the protocol times them."""
    POSITION = "position"
    """A series stands where the protocol's rotation does not put it."""
    DIRECTION = "direction"
    """A repetition ran in the other direction than the protocol's."""
    ROLE = "role"
    """A batch calls its point bound or reported, and it is not."""
    BLOCK_SIZE = "block_size"
    """A block size that vLLM does not take at this point."""
    ARM = "arm"
    """A batch's arm is not that of its series."""
    VARIANT = "variant"
    """A batch names another kernel variant than its point's check, or the check another than the table of variants."""
    CALLS = "calls"
    """A batch has another number of calls than the protocol gives."""
    WARMUPS = "warmups"
    """A batch had another number of warm-ups than the protocol gives."""
    TIME = "time"
    """A time that is not finite and above 0, or a time a call that is not the batch's by its calls."""
    STATE = "state"
    """The device's state is not one over the batches of an attempt, or no state."""
    ACCEPTANCE = "acceptance"
    """A batch is accepted with a reason, rejected without one, or rejected for no reason of the protocol."""
    SPLIT = "split"
    """A repetition is not accepted or rejected whole."""
    NOT_REJECTED = "not_rejected"
    """A repetition was accepted that the protocol rejects, by what was seen of the device or found at the point."""
    REASON_NOT_SEEN = "reason_not_seen"
    """A repetition was rejected for something that was not seen, or cannot be."""
    COMPARISON_MISSING = "comparison_missing"
    """The statistics lack a comparison of the protocol."""
    COMPARISON_UNKNOWN = "comparison_unknown"
    """The statistics hold a comparison that the protocol does not have."""
    COMPARISON_TWICE = "comparison_twice"
    """The statistics hold a comparison twice."""
    VALUE = "value"
    """A value of the statistics is not exactly the one recomputed."""


@dataclass(frozen=True)
class Finding:
    """One failure: where, why, and what was found."""

    where: str
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}: {self.detail}"
