# SPDX-License-Identifier: Apache-2.0
"""Why a record of timings, or its statistics, is refused. Each failure is one of these codes; none is a warning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

EDITS_FORMAT = "routeblock.record_edits.v1"  # of a mutations.json


class Reason(StrEnum):
    """Reason codes: of files, of documents, of batches, of statistics."""

    SEAL = "seal"
    """A file is not the one that was sealed or listed."""
    PROTOCOL = "protocol"
    """The record or the statistics carry the digest of another protocol."""
    BUILD = "build"
    """A library that was timed is none of the protocol's builds, or names another version than that build's."""
    KERNELS = "kernels"
    """The kernels whose bits were checked are not the kernels that were timed."""
    DEVICE = "device"
    """The GPU on which bits were checked is not the one that was timed."""
    BITS = "bits"
    """A check of bits reports a difference, or its result does not follow from its own numbers."""
    SANITIZER = "sanitizer"
    """A sanitizer tool found something."""
    PLAN_WRONG = "plan_wrong"
    """A check before timing reports a side as wrong."""
    PLANS = "plans"
    """Digests of inputs or outputs are not those that the protocol's seed gives here."""
    NOT_CHECKED = "not_checked"
    """A stage was timed without exactly one check before."""
    COUNTS = "counts"
    """run.json counts other batches than are there."""
    POINT_MISSING = "point_missing"
    """A stage of the protocol has no batches."""
    POINT_UNKNOWN = "point_unknown"
    """Batches or a check of no stage of the protocol."""
    CLOCK_UNKNOWN = "clock_unknown"
    """A batch on a clock that its stage does not have."""
    SERIES_MISSING = "series_missing"
    """A series of the protocol was left out of the record."""
    SERIES_UNKNOWN = "series_unknown"
    """A batch of no series of the stage."""
    REPETITION_MISSING = "repetition_missing"
    """A planned repetition has no batches."""
    REPETITION_UNKNOWN = "repetition_unknown"
    """A repetition beyond those planned."""
    ATTEMPT_MISSING = "attempt_missing"
    """An attempt before the last is missing, or a rejected batch was not timed again though it had to be."""
    ATTEMPT_UNPLANNED = "attempt_unplanned"
    """A batch was timed again after it was accepted, or beyond the attempts or retries allowed."""
    BATCH_MISSING = "batch_missing"
    """An attempt lacks a series on a clock."""
    BATCH_TWICE = "batch_twice"
    """An attempt has a series on a clock twice."""
    ORDER = "order"
    """Batches are not in the order in which the protocol times them."""
    POSITION = "position"
    """A series is not at the position that the protocol's order gives it."""
    DIRECTION = "direction"
    """A repetition ran in the other direction than the protocol's."""
    ROLE = "role"
    """A batch has another role than its stage."""
    BLOCK_SIZE = "block_size"
    """A block size that vLLM does not take at this point."""
    BASELINE = "baseline"
    """A batch names another baseline than its stage has."""
    ARM = "arm"
    """A batch's side is not that of its series."""
    VARIANT = "variant"
    """A batch names another kernel variant than its stage's check, or the check another than our table or plan."""
    CALLS = "calls"
    """A batch has another number of calls than the protocol gives."""
    WARMUPS = "warmups"
    """A batch had another number of warm-ups than the protocol gives."""
    TIME = "time"
    """A time that is not finite and above 0, or a time a call that is not the batch's by its calls."""
    STATE = "state"
    """The device's state differs inside an attempt, or is not a state."""
    ACCEPTANCE = "acceptance"
    """A batch is accepted with a reason, rejected without one, or rejected for no reason of the protocol."""
    SPLIT = "split"
    """A repetition is not accepted or rejected whole."""
    NOT_REJECTED = "not_rejected"
    """A batch was accepted that the protocol rejects, by the device's state or the check before timing."""
    REASON_NOT_SEEN = "reason_not_seen"
    """A batch was rejected for something that was not seen, or cannot be."""
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
