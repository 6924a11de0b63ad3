# SPDX-License-Identifier: Apache-2.0
"""The record of one run: what was asked, what was consumed, what came out. Deterministic; times stand in telemetry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import small_document

FORMAT: Literal["routeblock.record.v1"] = "routeblock.record.v1"
RECORD, TENSORS, TELEMETRY = "record.json", "tensors.safetensors", "telemetry.json"
RECORD_MANIFEST, TELEMETRY_MANIFEST = "record.manifest.json", "telemetry.manifest.json"

# Beside evidence that was recorded elsewhere and unpacked here: the digest of every file.
RESTORED = "restored.json"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Tensor(_Model):
    """A stored tensor: dtype as safetensors names it, shape, SHA-256 of its C-contiguous bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Sha256


class PlanUsed(_Model):
    """The plan that the GEMMs read."""

    fingerprint: Sha256
    """Of the mode identity: order inside a block does not count."""
    sorted_token_ids: Sha256
    """Of the bytes: order inside a block counts."""
    expert_ids: Sha256
    num_tokens_post_padded: int
    block_size: int
    num_routes: int


class Treatment(_Model):
    """What was to be done to the plan, or what was done: the intervention, its pair, and the plan's bytes."""

    intervention: str
    pair: tuple[int, int] | None
    prelude: bool
    """Whether H1's three tensors are allocated first; a CPU has no device to allocate on and says no."""
    sorted_token_ids: Sha256 | None
    """None where the alignment of the lane itself decides."""


class TreatmentMarker(_Model):
    """The intervention that was asked for and the one consumed."""

    asked: Treatment
    consumed: Treatment


class LaunchMarker(_Model):
    """One GEMM's thread sizes, the grid asked for, and the grid that the launch really had."""

    thread_k: int
    thread_n: int
    asked: int
    launched: int


class Identity(_Model):
    """What computed: source (code digest of the runner), binary (of what did the arithmetic), environment."""

    source: Sha256
    binary: Sha256
    environment: dict[str, str]


# Where the plan of a record comes from. Records made before there was a `consumption` hold what was asked for.
READ_BACK, BY_LOOPS = "read back from the device", "returned by the twin's loops"


class Consumption(_Model):
    """What the kernels used, reported by them and not by who started them."""

    source: str
    sorted_token_ids: Sha256
    expert_ids: Sha256
    num_tokens_post_padded: int
    slices: dict[str, Sha256] | None
    """Of each GEMM, the canonical JSON of every tile's slices as [first K-tile, one past the last]; None on a GPU,
    whose launched grids stand in `grid`."""


class Record(_Model):
    """record.json of one run."""

    format: Literal["routeblock.record.v1"]
    lane: str
    point: str
    plan_source: str
    cell: str
    history: str
    replicate: Annotated[int, Field(ge=1)]
    position: Annotated[int, Field(ge=0)]
    """Planned place in the order of the study, from 0."""
    status: str
    """How its results are to be called: modelled, computed, observed."""
    fixture: Sha256
    prediction: Sha256
    inputs: dict[str, Sha256]
    """Of the tensors that went in."""
    plan: PlanUsed
    treatment: TreatmentMarker
    grid: dict[str, LaunchMarker]
    surfaces: dict[str, Tensor]
    identity: Identity
    consumption: Consumption | None = None
    """None in records made before it was read back: their plan is the one asked for."""


def write_record(path: Path, record: Record) -> None:
    """Write the canonical JSON of a record to a path inside a folder that is being made."""
    path.write_bytes(canonical_json(record.model_dump(mode="json")))


def read_record(path: Path) -> Record:
    """Read a record. Raises InputError if it is missing or malformed."""
    try:
        return Record.model_validate_json(small_document(path))
    except UNREADABLE as e:
        why = e.errors(include_url=False)[0]["msg"] if isinstance(e, ValidationError) else str(e)
        raise InputError(
            f"not a readable record: {why}",
            where=str(path),
            limit=f"canonical JSON of {FORMAT}",
            way_out="run the cell again (routeblock study-a run)",
        ) from e


def restored_list(folder: Path) -> list[Path]:
    """The list beside unpacked evidence in `folder`, for the seal of what is made from it; empty if made here."""
    path = folder / RESTORED
    return [path] if path.exists() else []
