# SPDX-License-Identifier: Apache-2.0
"""The form of every answer: what is printed, what is written, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from routeblock.diagnose.answer import Answer, Fact, Verdict, deliver, load_answer
from routeblock.errors import InputError
from routeblock.moe.sources import Source, weakest

MODULES = ("routeblock.diagnose.answer",)


def answer(verdict: Verdict = Verdict.CAN_DIFFER, source: Source = Source.RECORDED) -> Answer:
    fact = Fact("grid", 528, source, "an H200")
    return Answer("predict", verdict, "3 routes", "they straddle", "canonical order", (fact,), {"routes": 3}, ("rows",))


def give(answer: Answer, *, json_to: str | None = None, out: Path | None = None, strict: bool = False) -> int:
    return deliver(
        answer, json_to=json_to, out=out, strict=strict, exit_zero=False, inputs=(), parameters={}, modules=MODULES
    )


@pytest.mark.parametrize(("verdict", "code"), [*zip(Verdict, (0, 0, 1, 4), strict=True)])
def test_the_verdict_is_the_exit_code(verdict: Verdict, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert give(answer(verdict)) == code
    first = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in first[:3]] == ["verdict", "reason", "cure"]
    assert first[0] == f"verdict: {verdict}: 3 routes"
    assert "  grid: 528 [recorded: an H200]" in first


def test_json_replaces_the_text_and_equals_the_sealed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answer.json"
    assert give(answer(), json_to="-", out=out) == 1
    assert json.loads(capsys.readouterr().out) == load_answer(out)
    assert json.loads(out.with_suffix(".manifest.json").read_bytes())["outputs"][0]["path"] == "answer.json"


def test_strict_refuses_a_guess_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="grid 528 is assumed: an H200"):
        give(answer(source=Source.ASSUMED), out=tmp_path / "answer.json", strict=True)
    assert not [*tmp_path.iterdir()]


def test_a_file_of_another_form_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": "other"}')
    with pytest.raises(InputError, match="not of format"):
        load_answer(tmp_path / "a.json")


def test_an_answer_is_no_better_than_its_weakest_fact() -> None:
    assert weakest(Source.RECORDED, Source.DERIVED, Source.PUBLISHED) is Source.DERIVED
    assert weakest(Source.DERIVED, Source.ASSUMED) is Source.ASSUMED
