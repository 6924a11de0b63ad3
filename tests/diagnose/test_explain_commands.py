# SPDX-License-Identifier: Apache-2.0
"""explain, witness and identify as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from routeblock.cli import main
from routeblock.diagnose.fixture_runs import Layer, named_run, open_layer
from routeblock.errors import InputError
from routeblock.evidence.tensors import save_tensors
from routeblock.moe.sources import Source
from routeblock.route_block.fixtures.make import make

COMMANDS = ("explain", "witness", "identify")


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    make("published_geometry", 20250314, folder)
    return folder


@pytest.fixture(scope="module")
def layer(fixture: Path) -> Layer:
    return open_layer(fixture, "twin-hopper", "published")


@pytest.fixture(scope="module")
def outputs(fixture: Path, layer: Layer) -> Path:
    """W13 of H1 at the published launch on hopper."""
    run = named_run(layer, "plan=H1").run
    path = fixture / "outputs.safetensors"
    save_tensors(path, {"w13": run.surfaces["w13"]})
    return path


@pytest.fixture(scope="module")
def answers(fixture: Path, outputs: Path) -> Path:
    """All three answers, sealed."""
    out = fixture / "answers"
    commands: dict[str, list[object]] = {
        "explain": ["--dot", out / "trees.dot", "--svg", out / "trees.svg", "--element", "w13:51:48"],
        "witness": ["--surface", "w13"],
        "identify": ["--outputs", outputs, "--grid", 246, "--architecture", "hopper"],
    }
    for name, options in commands.items():
        arguments = [name, "--fixture", fixture, "--out", out / f"{name}.json", "--exit-zero", *options]
        assert main([str(a) for a in arguments]) == 0
    return out


def detail(answers: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((answers / f"{name}.json").read_bytes())["detail"])


def test_answers_are_sealed_and_drawn(answers: Path) -> None:
    assert all((answers / f"{name}.manifest.json").is_file() for name in COMMANDS)
    assert (answers / "trees.dot").read_text().startswith("digraph")
    assert "W13 element [51, 48]" in (answers / "trees.svg").read_text()


def test_identify_names_plan_and_launch(answers: Path) -> None:
    found = detail(answers, "identify")
    launches = [(c["plan"], c["thread_k"], c["thread_n"], c["grid"]) for c in found["reproduce"]]
    assert ("H1", 64, 128, 246) in launches and all(plan == "H1" for plan, *_ in launches)
    assert found["candidates"] == len(found["reproduce"]) + sum(len(g["candidates"]) for g in found["excluded"])


def test_tables_have_a_row_a_finding(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        command = ["diagnose", "table", name, "--from", str(answers / f"{name}.json"), "--out", str(answers / "tables")]
        assert main(command) == 0
        lines = (answers / "tables" / f"{name}.csv").read_text().splitlines()
        assert len(lines) > 1 and (answers / "tables" / f"{name}.manifest.json").is_file()
    assert main(["diagnose", "table", "witness", "--from", str(answers / "explain.json"), "--out", str(answers)]) == 2
    assert main(["diagnose", "table", "x", "--from", str(answers / "explain.json"), "--out", str(answers)]) == 2


def test_the_figure_has_the_same_bytes_each_time(answers: Path) -> None:
    for folder in ("a", "b"):
        assert main(["diagnose", "draw", "--from", str(answers / "explain.json"), "--out", str(answers / folder)]) == 0
    for name in ("explain.svg", "explain.png", "explain.dot"):
        assert (answers / "a" / name).read_bytes() == (answers / "b" / name).read_bytes()
    assert main(["diagnose", "draw", "--from", str(answers / "witness.json"), "--out", str(answers / "c")]) == 2


def test_exit_codes_say_whether_bits_can_differ(fixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--fixture", str(fixture)]
    assert main(["explain", *folder]) == 1
    text = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in text[:3]] == ["verdict", "reason", "cure"]
    assert main(["explain", *folder, "--first", "grid=200", "--second", "plan=H1,grid=200"]) == 0
    assert main(["witness", *folder, "--run", "plan=canonical,grid=200"]) == 0
    assert main(["witness", *folder, "--element", "w13:51:48", "--run", "plan=H0"]) in (0, 1)


def test_another_batch_is_compared_by_token(fixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--first", "plan=canonical", "--second", "tokens=3-6", "--point", "auto", "--json", "-"]
    code = main(["explain", "--fixture", str(fixture), *options])
    document = json.loads(capsys.readouterr().out)
    runs = document["detail"]["runs"]
    assert [run["tokens"] for run in runs] == [21, 4]
    if code == 1:
        element = document["detail"]["element"]
        k = 1 if element["surface"] == "final" else 8
        assert element["row"] - element["second_row"] == 3 * k


@pytest.mark.parametrize(
    "text",
    ["plan=H2", "grdi=200", "grid", "launch=64x128", "tokens=30", "tokens=0-3,plan=H0", "block=7", "reduction=x"],
)
def test_a_run_that_does_not_exist_is_refused(layer: Layer, text: str) -> None:
    with pytest.raises(InputError):
        named_run(layer, text)


def test_a_run_takes_what_it_names_and_the_rest_from_the_point(layer: Layer) -> None:
    run = named_run(layer, "plan=H1,w2=128x64x99,architecture=ampere,reduction=dtype,full_k").run
    assert [tuple(s.launch) for s in run.settings.values()] == [(64, 128, 246), (128, 64, 99)]
    assert all((s.architecture, s.fp32_reduce, s.full_k) == ("ampere", False, True) for s in run.settings.values())
    small = named_run(layer, "tokens=0-2+9,block=16,grid=50")
    assert small.tokens == (0, 1, 2, 9) and small.run.plan.block_size == 16 and small.row("w13", 75) == 27
    assert {f.source for f in small.facts} == {Source.GIVEN}


@pytest.mark.parametrize(
    "bad",
    [
        ["explain", "--element", "w13:51"],
        ["explain", "--element", "w13:51:9999", "--strict"],
        ["explain", "--second", "tokens=0-3", "--element", "w13:160:0"],
        ["explain", "--lane", "twin-volta"],
        ["witness", "--surface", "w14"],
        ["identify", "--outputs", "none.safetensors"],
        ["identify", "--outputs", "OUTPUTS", "--surface", "final"],
        ["identify", "--outputs", "OUTPUTS", "--plan", "H7"],
        ["identify", "--outputs", "OUTPUTS", "--architecture", "volta"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    fixture: Path, outputs: Path, capsys: pytest.CaptureFixture[str], bad: list[str]
) -> None:
    arguments = [str(outputs) if word == "OUTPUTS" else word for word in bad]
    assert main([arguments[0], "--fixture", str(fixture), *arguments[1:]]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
