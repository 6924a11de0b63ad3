# SPDX-License-Identifier: Apache-2.0
"""The committed protocol says what the study promises, and its order is fair."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small import COMMITTED, protocol_file

from routeblock.alignment_cost import routings
from routeblock.alignment_cost.protocol import Campaign, Role, load, points
from routeblock.errors import InputError
from routeblock.timing.protocol import balanced

BOUND = [1, 2, 4, 8, 16, 21, 32, 64, 128, 256, 512, 1024, 4096, 16384]


def test_the_committed_protocol_binds_what_was_promised() -> None:
    protocol = load(COMMITTED)
    for campaign in Campaign:
        bound = [p for p in points(protocol, campaign) if p.role is Role.BOUND]
        assert [p.tokens for p in bound] == BOUND and {(p.experts, p.top_k) for p in bound} == {(128, 8)}
    reported = {(p.experts, p.top_k) for p in points(protocol, Campaign.OPERATOR) if p.role is Role.REPORTED}
    assert reported == {(8, 2), (64, 8), (256, 8), (128, 2)}
    assert (protocol.margins.operator, protocol.margins.layer) == (0.02, 0.005)
    assert [(t.up_to_tokens, t.ratio) for t in protocol.targets] == [(64, 0.7), (16384, 1.0)]


def test_every_series_stands_in_every_place_equally_often() -> None:
    protocol = load(COMMITTED)
    for repetitions in {p.repetitions for c in Campaign for p in points(protocol, c)}:
        places = Counter(
            (series.name, place)
            for r in range(repetitions)
            for place, series in enumerate(balanced(protocol.series, r))
        )
        assert set(places.values()) == {repetitions // len(protocol.series)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": "nativ"}, "series 'nativ' is there 0 times"),
        ({"margin": 0.1}, "margin: Extra inputs"),
        ({"margins": {"operator": 0.02}}, "margins.layer: Field required"),
        ({"series": [{"name": "native", "arm": "fast"}]}, "series.0.arm"),
    ],
)
def test_a_protocol_with_a_slip_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as e:
        load(protocol_file(tmp_path, **changes))
    assert words in str(e.value)


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    told = json.loads(COMMITTED.read_text())
    (tmp_path / "same.json").write_text(json.dumps(told, indent=1))
    (tmp_path / "other.json").write_text(json.dumps(told | {"seed": 1}))
    assert load(tmp_path / "same.json").digest() == load(COMMITTED).digest() != load(tmp_path / "other.json").digest()


def test_routings_are_distinct_experts_and_the_same_every_time() -> None:
    point = next(p for p in points(load(COMMITTED), Campaign.OPERATOR) if p.tokens == 21)
    drawn = routings.draw(point, 5)
    assert len(drawn) == 4 and all((d == e).all() for d, e in zip(drawn, routings.draw(point, 5), strict=True))
    assert all(len(set(row)) == 8 for d in drawn for row in d.tolist())
    assert len(set(routings.digests(point, 5))) == 4
