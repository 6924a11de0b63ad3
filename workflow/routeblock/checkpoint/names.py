# SPDX-License-Identifier: Apache-2.0
"""What the name of a tensor says: which layer it belongs to, and which part of which expert's projection it is.

Names are recognised by their pattern, whatever the family: experts lie below a module called `experts`, by number or
stacked, and their projections are called gate_proj, up_proj and down_proj, w1, w3 and w2, or gate_up_proj.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from routeblock.checkpoint.families import MIXTRAL_PROJECTIONS, PROJECTIONS
from routeblock.checkpoint.quantization import DECODER_PREFIX

FUSED = "gate_up_proj"
PROJECTION_OF = {
    **{p: p for p in (*PROJECTIONS, FUSED)},
    **dict(zip(MIXTRAL_PROJECTIONS, PROJECTIONS, strict=True)),
}
_LAYER = re.compile(r"(?P<prefix>(?:\w+\.)*?)layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(
    r"(?P<module>(?:(?P<expert>\d+)\.)?(?P<projection>[a-z]\w*?))(?:[._](?P<part>PARTS))?".replace(
        "PARTS", "qweight|qzeros|scales|g_idx|bias|(?:weight_)?(?:packed|scale|zero_point|shape|g_idx)|weight"
    )
)


@dataclass(frozen=True)
class LayerName:
    """A tensor of a decoder layer: its name inside the layer, and if it lies below `experts`, in which block."""

    prefix: str
    layer: int
    rest: str
    block: str | None
    inside: str

    @property
    def module(self) -> str:
        """The path of the block's `experts`."""
        return f"{self.prefix}layers.{self.layer}.{self.block}.experts"


@dataclass(frozen=True)
class ExpertName:
    """Part `part` of a projection; `stored` is the projection's own name, `module` its path below `experts`."""

    expert: int | None
    projection: str
    stored: str
    module: str
    part: str


def layer_name(name: str) -> LayerName | None:
    """What a tensor of the decoder's layers is; None for any other."""
    match = _LAYER.fullmatch(name)
    if not match or not DECODER_PREFIX.fullmatch(match["prefix"]):
        return None
    block, found, inside = match["rest"].partition(".experts.")
    return LayerName(match["prefix"], int(match["layer"]), match["rest"], block if found else None, inside)


def expert_name(inside: str) -> ExpertName | None:
    """What a tensor below `experts` is; None if its name follows no known pattern."""
    match = _EXPERT.fullmatch(inside)
    if not match or match["projection"] not in PROJECTION_OF:
        return None
    stored, part = match["projection"], match["part"] or "weight"
    short = part if part == "weight" else part.removeprefix("weight_")
    expert = None if match["expert"] is None else int(match["expert"])
    return ExpertName(expert, PROJECTION_OF[stored], stored, match["module"], short)


def shapeless(name: str) -> str:
    """A name with its numbers left open, so that alike names are one."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name)
