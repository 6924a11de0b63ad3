# SPDX-License-Identifier: Apache-2.0
"""Why the scorer refuses evidence. Each failure is one of these codes; none is a warning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Reason codes, in the order in which the scorer checks."""

    MISSING_RUN = "missing_run"
    """A cell, history or replicate of the study has no run, or there is a symbolic link in it or on the way to it."""
    EXTRA_RUN = "extra_run"
    """A folder, record or symbolic link that is no run of the study."""
    UNREADABLE_RECORD = "unreadable_record"
    """record.json is missing, malformed or not canonical."""
    BROKEN_SEAL = "broken_seal"
    """A seal, of the record or of the telemetry, is missing, or is not of these files, this study and this code."""
    WRONG_PLACE = "wrong_place"
    """The record names another lane, point, plan source, cell, history or replicate than its prediction and folder."""
    WRONG_POSITION = "wrong_position"
    """The planned position is not that of the study's order."""
    WRONG_STATUS = "wrong_status"
    """The record does not call the results of its lane what the study calls them: modelled, computed, observed."""
    FIXTURE_DIGEST = "fixture_digest"
    """The record was made from another fixture."""
    PREDICTION_DIGEST = "prediction_digest"
    """The record was made from another prediction."""
    INPUT_DIGEST = "input_digest"
    """A tensor that went in is not the one on disk."""
    UNREADABLE_TENSORS = "unreadable_tensors"
    """tensors.safetensors is missing, truncated or malformed."""
    TENSOR_SET = "tensor_set"
    """A surface or a part of the plan is missing, or there is one more."""
    SURFACE_DTYPE = "surface_dtype"
    """A surface is not of the fixture's dtype, in the file or in the record."""
    SURFACE_SHAPE = "surface_shape"
    """A surface has not the fixture's shape, in the file or in the record."""
    SURFACE_HASH = "surface_hash"
    """The stated SHA-256 of a surface is not that of its raw bytes."""
    PLAN_DIGEST = "plan_digest"
    """A stated digest or count of the plan is not that of the stored plan."""
    ILLEGAL_PLAN = "illegal_plan"
    """The stored plan drops or repeats a route, has a sentinel before one, or has the wrong length."""
    EXPERT_BLOCK = "expert_block"
    """A block of the stored plan belongs to another expert than its routes."""
    ROUTE_MEMBERSHIP = "route_membership"
    """A route stands in another block than the intervention puts it into."""
    SLOT_ORDER = "slot_order"
    """The memberships are those asked for, the bytes of the injected plan are not."""
    TREATMENT_NOT_ASKED = "treatment_not_asked"
    """The treatment asked for is not that of the cell in the frozen prediction."""
    TREATMENT_NOT_CONSUMED = "treatment_not_consumed"
    """The treatment consumed, or the plan that the kernels used, is not that of the frozen prediction (of a native
    alignment on a GPU: not the plan stored beside it), or a recorded run claims a read-back that its evidence lacks."""
    GRID_NOT_PREDICTED = "grid_not_predicted"
    """The launch asked for is not that of the frozen prediction."""
    GRID_NOT_CONSUMED = "grid_not_consumed"
    """The grid that the launch really had, or the cut that the twin's loops went through, is not the one asked for."""
    IDENTITY_DIFFERS = "identity_differs"
    """Source, binary or environment is not the one expected, however many runs agree on it."""
    NOT_SEPARATE = "not_separate"
    """telemetry.json is malformed, or names the process and start of another run: one of them is a copy."""
    WRONG_ORDER = "wrong_order"
    """On a GPU: by its telemetry a run used the device before the run ahead of it in the planned order was done, has
    impossible times, or has another GPU than its replicate."""
    REPLICATES_DIFFER = "replicates_differ"
    """The replicates of a cell and history do not have one exact outcome."""
    NOT_FINITE = "not_finite"
    """A surface holds an infinity or NaN."""
    ACTIVATION_NOT_OF_W13 = "activation_not_of_w13"
    """The activation is not silu(gate) * up of the w13 stored beside it, bit for bit."""
    FINAL_NOT_OF_W2 = "final_not_of_w2"
    """The final surface is not the sum of the w2 stored beside it over each token's routes, bit for bit."""
    PREDICTION_MISMATCH = "prediction_mismatch"
    """The prediction is of another fixture, or its plans, pairs, launches or conclusions do not fit one another."""
    OPERATING_POINT = "operating_point"
    """The prediction's native launches, what they are called, its tensor cores or its control are not those of its
    point on the lane of the runs."""
    EXCHANGE_PAIR = "exchange_pair"
    """The exchange pairs, and with them the cells, are not those that the fixture or the captured plans give."""
    PREDICTION_FIELD = "prediction_field"
    """Another statement of the prediction (changed memberships, split routes ...) is not what plans and launches
    give."""
    PREDICTION_INCOMPLETE = "prediction_incomplete"
    """The prediction lacks an arm or a pair of arms, or has one more."""
    FULL_K_SPLIT = "full_k_split"
    """The predicted grid of full_k is not the one at which every W13 tile is one slice."""
    PREDICTION_ROWS = "prediction_rows"
    """The rows that can differ are not those that the plans and launches give, walked CUDA block by CUDA block."""
    PREDICTION_WRONG = "prediction_wrong"
    """Bits differ where the prediction says that they cannot."""
    RELATION_FAILED = "relation_failed"
    """A relation of the study fails on a twin at an operating point for which it is claimed."""


@dataclass(frozen=True)
class Finding:
    """One failure: which run (or file, or pair of arms), why, and what was found."""

    run: str
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.run}: {self.reason}: {self.detail}"
