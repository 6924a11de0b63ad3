# SPDX-License-Identifier: Apache-2.0
"""What is generated from the code is committed as it is generated."""

from __future__ import annotations

from pathlib import Path

from routeblock import generated

ROOT = Path(__file__).resolve().parent.parent


def test_the_committed_files_are_those_that_the_code_gives() -> None:
    wanted = generated.files(ROOT)
    folders = [ROOT / generated.SCHEMAS, ROOT / generated.CAPTIONS]
    paths = [ROOT / generated.README, *(path for folder in folders for path in folder.iterdir())]
    committed = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert committed == wanted, "run `routeblock workflow generate`"


def test_every_table_and_figure_has_a_question_and_a_caption() -> None:
    for declared in (*generated.TABLES.values(), *generated.FIGURES.values()):
        question, empty, *caption = declared.caption.rstrip().splitlines()
        assert question.endswith("?") and not empty and caption, declared.name
