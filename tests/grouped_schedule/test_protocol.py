# SPDX-License-Identifier: Apache-2.0
"""The committed protocol gives the published counts, and only a protocol is accepted as one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from routeblock.errors import InputError
from routeblock.grouped_schedule import campaigns, protocol
from routeblock.grouped_schedule.campaigns import Campaign, Place, Planner
from routeblock.timing.plan import Stage

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "fixtures/protocols/grouped_schedule.json"
PLAN = protocol.load(FILE)
ON_GPU = Planner(PLAN, Place("cuda", "gpu0", 60 * 2**20))


def counts(stages: list[Stage], campaign: Campaign) -> tuple[int, int]:
    """Comparisons and batches of a campaign."""
    mine = [s for s in stages if s.shape.campaign is campaign]
    batches = sum(len(s.order(r)) * len(PLAN.scopes) for s in mine for r in range(PLAN.repetitions))
    return sum(len(s.shape.compared) for s in mine), batches


def test_the_published_counts_come_out() -> None:
    stages = [*ON_GPU.stages("sweep"), *ON_GPU.stages("confirmation")]
    assert counts(stages, Campaign.SWEEP) == (68, 1632)
    assert counts(stages, Campaign.CONFIRMATION) == (12, 96)
    expected = PLAN.expected_per_device
    assert (expected.sweep_comparisons, expected.sweep_batches) == (68, 1632)
    assert (expected.confirmation_comparisons, expected.confirmation_batches) == (12, 96)


def test_two_devices_give_the_published_totals() -> None:
    published = json.loads((ROOT / "fixtures/published/grouped_schedule.json").read_text())["counts"]
    assert published.pop("devices") == 2
    assert published == {name: 2 * value for name, value in PLAN.expected_per_device.model_dump().items()}


def test_confirmation_alternates_and_is_balanced() -> None:
    stage = next(s for s in ON_GPU.confirmation() if s.shape.campaign is Campaign.CONFIRMATION)
    firsts = [stage.order(r)[0].name for r in range(12)]
    assert firsts == ["job_major", "band32"] * 6


def test_sweep_rotates_and_reverses() -> None:
    orders = [protocol.rotated(("a", "b", "c", "d"), r) for r in range(4)]
    assert orders == [("a", "b", "c", "d"), ("a", "d", "c", "b"), ("c", "d", "a", "b"), ("c", "b", "a", "d")]


def test_sweep_is_not_balanced_over_positions() -> None:
    """As the source says of its own: six arms see three positions each."""
    seen = Counter(
        (arm, position) for r in range(12) for position, arm in enumerate(protocol.rotated(tuple("abcdef"), r))
    )
    assert {arm: sorted(p for a, p in seen if a == arm) for arm in "ab"} == {"a": [0, 2, 4], "b": [1, 3, 5]}


def test_confirmation_uses_other_data_than_the_sweep() -> None:
    assert PLAN.confirmation.seed != PLAN.sweep.seed


def test_columns_keep_a_v100s_ratio() -> None:
    assert campaigns.ratio_cols(PLAN, 6 * 2**20) == PLAN.cols
    assert campaigns.ratio_cols(PLAN, 60 * 2**20) == 5120
    assert campaigns.ratio_cols(PLAN, 1) == 256


def test_digest_follows_every_value(tmp_path: Path) -> None:
    told = json.loads(FILE.read_text())
    told["bootstrap"]["seed"] += 1
    (tmp_path / "p.json").write_text(json.dumps(told))
    assert protocol.load(tmp_path / "p.json").digest() != PLAN.digest()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"extra": 1}, "extra"),
        ({"repetitions": "many"}, "repetitions"),
        ({"confirmation": {**json.loads(FILE.read_text())["confirmation"], "candidate": "band33"}}, "band33"),
    ],
)
def test_what_is_no_protocol_is_refused_in_one_line(tmp_path: Path, edit: dict[str, object], message: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(json.loads(FILE.read_text()) | edit))
    with pytest.raises(InputError, match=message) as e:
        protocol.load(tmp_path / "p.json")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputError, match="not a protocol"):
        protocol.load(tmp_path / "p.json")
