# SPDX-License-Identifier: Apache-2.0
"""The committed record of native alignment, the test of history on data whose answer is known, and edited records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from routeblock.evidence.digest import canonical_json, sha256_bytes
from routeblock.route_block.fixtures.fixture import LayerFixture, load_fixture
from routeblock.route_block.fixtures.make import make
from routeblock.route_block.native import evidence, history
from routeblock.route_block.native.protocol import load
from routeblock.route_block.native.record import RUN

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "fixtures" / "recorded" / "native" / "h200"
PROTOCOL = load(ROOT / "fixtures" / "protocols" / "native.json")
TEST = PROTOCOL.history.test


@pytest.fixture(scope="module")
def published_fixture(tmp_path_factory: pytest.TempPathFactory) -> LayerFixture:
    folder = tmp_path_factory.mktemp("fixture") / "published_geometry"
    make("published_geometry", 20250314, folder)
    return load_fixture(folder)


def drawn(rng: np.random.Generator, shares: list[list[float]]) -> list[list[str]]:
    """Processes that each draw 200 outcomes with shares of their own."""
    return [[str(x) for x in rng.choice(len(share), 200, p=share)] for share in shares]


def test_processes_that_differ_among_themselves_are_no_shift() -> None:
    """The unit is the process: calls within one are alike, and 9,600 of them are no 9,600 observations."""
    rng = np.random.default_rng(4)
    rejected = 0
    for _ in range(60):
        calls = drawn(rng, rng.dirichlet(np.full(4, 0.3), 48).tolist())
        pairs = list(zip(calls[::2], calls[1::2], strict=True))
        rejected += history.shift("plan", pairs, TEST.model_copy(update={"permutations": 199})).p <= TEST.alpha
    assert rejected <= stats.binom.ppf(0.999, 60, TEST.alpha)


def test_a_shift_of_the_shares_is_found() -> None:
    rng = np.random.default_rng(5)
    calls = drawn(rng, [[0.7, 0.2, 0.1], [0.2, 0.2, 0.6]] * 24)
    assert history.shift("plan", list(zip(calls[::2], calls[1::2], strict=True)), TEST).p == 1 / 10000


def test_the_statistic_and_p_are_those_of_scipy() -> None:
    rng = np.random.default_rng(6)
    calls = drawn(rng, rng.dirichlet(np.full(3, 1.0), 12).tolist())
    pairs = list(zip(calls[::2], calls[1::2], strict=True))
    ours = history.shift("plan", pairs, TEST)
    shares = history.distributions(calls)

    def statistic(sign: Any) -> float:
        return float(np.abs((np.asarray(sign)[:, None] * (shares[::2] - shares[1::2])).mean(0)).sum() / 2)

    exact = stats.permutation_test(
        (np.ones(6),), statistic, permutation_type="samples", alternative="greater", vectorized=False
    )
    assert ours.statistic == pytest.approx(exact.statistic, abs=1e-12)
    assert ours.p == pytest.approx(exact.pvalue, abs=0.02)


def test_the_record_shows_what_the_readme_says_of_it() -> None:
    found = evidence.summary(evidence.read(RECORD), PROTOCOL)
    plan = found["history"][0]
    assert (plan["pairs"], plan["calls"], plan["verdict"]) == (24, 4800, "shifted")
    assert plan["distinct_both"] == 0 and plan["statistic"] == pytest.approx(1) and plan["p"] == 1 / 10000
    assert plan["processes_with_one_h0"] == plan["processes_with_one_h1"] == 0
    repeats = {row["condition"] for row in found["repetition"] if row["repeats"]}
    assert repeats == {
        "64 experts, fewer than 1,024 routes",
        "one warp of routes",
        "one warp of routes, graph",
    }
    assert len(found["repetition"]) == len(PROTOCOL.repetition.conditions)


def swapped(document: dict[str, Any]) -> None:
    document["processes"][0], document["processes"][1] = document["processes"][1], document["processes"][0]


def overlapping(document: dict[str, Any]) -> None:
    document["processes"][3]["began_ns"] = document["processes"][2]["ended_ns"] - 1


def without_prelude(document: dict[str, Any]) -> None:
    document["processes"][1]["prelude"] = False


def shorter(document: dict[str, Any]) -> None:
    document["processes"][5]["plans"]["calls"].pop()


def renamed(document: dict[str, Any]) -> None:
    document["plans"][0] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (swapped, "the order of processes"),
        (overlapping, "two processes were on the GPU at once"),
        (without_prelude, "prelude is False"),
        (shorter, "calls is 199"),
        (renamed, "the set of stored plans"),
    ],
)
def test_an_edited_record_is_refused(
    edit: Callable[[dict[str, Any]], None], says: str, tmp_path: Path, published_fixture: LayerFixture
) -> None:
    """With its list of contents made to fit."""
    folder = tmp_path / "h200"
    shutil.copytree(RECORD, folder)
    document = json.loads((folder / RUN).read_bytes())
    edit(document)
    data = canonical_json(document)
    (folder / RUN).write_bytes(data)
    contents = json.loads((folder / "contents.json").read_bytes())
    assert evidence.disagreements(folder, published_fixture, PROTOCOL)[0].endswith("not the bytes that were recorded")
    contents[RUN] = {"sha256": sha256_bytes(data), "size": len(data)}
    (folder / "contents.json").write_bytes(canonical_json(contents))
    wrong = evidence.disagreements(folder, published_fixture, PROTOCOL)
    assert len(wrong) == 1 and says in wrong[0]
