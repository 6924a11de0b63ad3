# SPDX-License-Identifier: Apache-2.0
"""Targets of the questions about a layer: what config.yaml asks of which GPUs and routings, as parts of paths."""

from __future__ import annotations

from collections.abc import Iterable

from routeblock.config import Survey


def by_path(names: Iterable[str]) -> dict[str, str]:
    """Names of GPUs or populations by what stands for them in a path."""
    return {name.replace(" ", "-").replace(":", "-"): name for name in names}


def layer_options(survey: Survey) -> str:
    """The options of a command that describe the surveyed layer."""
    given = [f"--{key.replace('_', '-')} {value}" for key, value in survey.layer if key != "zero_points"]
    return " ".join([*given, "--zero-points" if survey.layer.zero_points else "--symmetric"])
