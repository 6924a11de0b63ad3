# SPDX-License-Identifier: Apache-2.0
"""What the Snakemake rules need from the package: which code each rule uses, and where given inputs lie.

The command line hands a rule's code digest to the function that seals. No study imports this module: a new entry in
`RULES` would then remake everything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from routeblock.evidence.digest import PACKAGE_ROOT, code_digest


@dataclass(frozen=True)
class Code:
    """The modules and further sources (paths inside the package) that a rule runs."""

    modules: tuple[str, ...]
    files: tuple[str, ...] = ()


# Each rule's own code, without the command line: a rule is made again when something here changes.
RULES: dict[str, Code] = {
    "environment": Code(("routeblock.environment",)),
}

# Inputs that are given and not produced, in the checkout.
GIVEN = ("config.yaml", "envs", "fixtures")


def code(rule: str) -> str:
    """The digest of the code that `rule` uses."""
    return code_digest(*RULES[rule].modules, files=RULES[rule].files)


def codes() -> dict[str, str]:
    """The digest of every rule's code."""
    return {rule: code(rule) for rule in RULES}


def given() -> list[Path]:
    """The checkout's given inputs, as seen from the working directory."""
    checkout = Path(os.path.relpath(PACKAGE_ROOT.parents[1]))
    return [checkout / name for name in GIVEN]
