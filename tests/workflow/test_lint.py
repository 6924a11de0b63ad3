# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from lint import remaining

WAIVED = """Lints for rule environment (line 4, /x/environment.smk):
    * Specify a conda environment or container for each rule.:
      This way, the used software for each specific step is documented, and the
      Also see:
      https://snakemake.readthedocs.io/en/latest/snakefiles/deployment.html#running-jobs-in-containers

"""
LOG = """    * No log directive defined:
      Without a log directive, all output will be printed to the terminal.
"""


def test_the_conda_lint_alone_leaves_nothing() -> None:
    assert remaining(WAIVED + WAIVED) == []


def test_another_lint_beside_it_stays() -> None:
    assert remaining(WAIVED.rstrip("\n") + "\n" + LOG) == [
        "rule environment (line 4, /x/environment.smk): No log directive defined"
    ]


@pytest.mark.parametrize(
    "report", ["SyntaxError in file Snakefile, line 3:\n", "config.yaml: unknown key 'x'\n", "      loose body\n"]
)
def test_a_linter_that_could_not_read_the_rules_is_no_pass(report: str) -> None:
    assert remaining(report) == [report.rstrip("\n")]
