# SPDX-License-Identifier: Apache-2.0
"""Where study A's results lie, as patterns with Snakemake's wildcards, and whose results a target is made from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

FIXTURE = "results/fixtures/{fixture}"
LANE = "results/route_block/{fixture}/{lane}"
POINT = f"{LANE}/{{point}}"
STUDY = f"{POINT}/{{plan_source}}"
RUN = f"{STUDY}/{{cell}}/{{history}}/rep{{n}}"
IDENTITY = "results/identity/{lane}/identity.json"
LANE_LOG = "results/logs/route_block/{fixture}/{lane}"
STUDY_LOG = f"{LANE_LOG}/{{point}}/{{plan_source}}"


class Studies(Enum):
    """Some of the studies (fixture, lane, point, plan source) that config.yaml asks for."""

    ALL = auto()
    ON_GPU = auto()
    """On this machine's GPU, or recorded."""
    RUN_HERE = auto()
    RECORDED = auto()
    CAPTURED = auto()
    """With plans that a GPU's own alignment made."""
    FIXTURE = auto()
    """The fixture of config.yaml alone, whatever the lanes."""
    NATIVE = auto()
    """Recorded of the native alignment and of the operator, where the recorded lane is asked for."""
    VERSIONS = auto()
    """One result over several versions of vLLM, where they were recorded."""


@dataclass(frozen=True)
class Source:
    """Files that a table or figure is made from, by the option of its command that names them."""

    paths: tuple[str, ...]
    of: Studies = Studies.ALL
    option: str = "from"
    """Empty for files that the command finds beside others."""
    folder: bool = False
    """The command is given their folders."""
