# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from routeblock import config
from routeblock.config import Config, Lane, PlanSource, Point
from routeblock.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


def given() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "config.yaml").read_text())  # type: ignore[no-any-return]


def refused(change: dict[str, Any]) -> str:
    with pytest.raises(InputError) as e:
        config.check(given() | change, where="config.yaml")
    assert "\n" not in str(e.value)
    return str(e.value)


def test_the_given_config_is_the_published_study_on_both_twins_and_recorded() -> None:
    c = config.load(ROOT / "config.yaml")
    assert c.lanes == (Lane.TWIN_AMPERE, Lane.TWIN_HOPPER, Lane.RECORDED_H200)
    assert (c.points, c.plan_source, c.replicates) == ((Point.PUBLISHED,), (PlanSource.STORED,), 5)


def test_every_knob_is_in_the_given_config_with_a_comment() -> None:
    text = (ROOT / "config.yaml").read_text()
    assert list(given()) == list(Config.model_fields)
    for block in text.split("\n\n")[1:]:
        assert block.startswith("#")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"lane": ["cuda"]},
            "unknown key 'lane'; known keys are fixture, checkpoint, lanes, .*; did you mean 'lanes'?",
        ),
        ({"zzz": 1}, "unknown key 'zzz'; .*; use one of these"),
        ({"fixture": {"name": "published_geometry", "sede": 1}}, "unknown key 'fixture.sede'; .* 'seed'?"),
        ({"lanes": ["twin-hoper"]}, "unknown value \"twin-hoper\" of lanes.0; .*; did you mean 'twin-hopper'?"),
        ({"points": ["publish"]}, "did you mean 'published'?"),
        ({"plan_source": ["store"]}, "did you mean 'stored'?"),
        ({"fixture": {"name": "published", "seed": 1}}, "known values are published_geometry, checkpoint; did you"),
        ({"lanes": []}, "lanes is"),
        ({"lanes": ["cuda", "cuda"]}, "lists one value twice"),
        ({"lanes": "cuda"}, 'lanes is "cuda"'),
        ({"replicates": 0}, "replicates is 0; .* greater than or equal to 1"),
        ({"replicates": True}, "replicates is true"),
        ({"replicates": 2.5}, "replicates is 2.5"),
        ({"replicates": "5"}, 'replicates is "5"'),
        ({"fixture": {"name": "published_geometry", "seed": -1}}, "fixture.seed is -1"),
        ({"fixture": {"name": "published_geometry"}}, "key 'fixture.seed' is missing"),
        ({"fixture": None}, "fixture is null"),
    ],
)
def test_what_does_not_fit_is_named_with_the_nearest_that_would(change: dict[str, Any], says: str) -> None:
    assert re.search(says.replace("?", r"\?"), refused(change))


@pytest.mark.parametrize("settings", [None, [], "lanes", 3])
def test_settings_are_a_mapping(settings: Any) -> None:
    with pytest.raises(InputError, match="no settings"):
        config.check(settings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"replicates: 5\nreplicates: 6\n", "line 1: one key is given twice"),
        (b"lanes: [cuda\n", "line 2: "),
        (b"lanes: \xff\n", "can't decode"),
        (b"a: !!python/object:os.system x\n", "line 1: could not determine a constructor"),
        (b"[" * 5000, "config.yaml"),
        (b"", "no settings"),
    ],
)
def test_a_file_that_is_no_settings_is_one_line(tmp_path: Path, text: bytes, says: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(InputError, match=says) as e:
        config.load(tmp_path / "config.yaml")
    assert "\n" not in str(e.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        config.load(tmp_path / "none.yaml")
