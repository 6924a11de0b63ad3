# SPDX-License-Identifier: Apache-2.0
"""fixture.json and prediction.json with a field missing or of another type: one line, from every reader of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import SignatureLane, Study

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.route_block.fixtures.fixture import INPUTS, SPEC, load_fixture
from routeblock.route_block.prediction.predict import load_prediction
from routeblock.route_block.runs.negative_control import control
from routeblock.route_block.runs.run import run
from routeblock.route_block.scorer.inputs import read_study
from routeblock.route_block.scorer.score import judge

DEEP = b"[" * 100_000
ABSENT = object()


def put(path: Path, place: str, value: object) -> None:
    """Put a value at `place`, its keys apart by spaces, or take what stands there away."""
    document = json.loads(path.read_bytes())
    *above, last = place.split()
    at = document
    for key in above:
        at = at[int(key) if isinstance(at, list) else key]
    if value is ABSENT:
        del at[last]
    else:
        at[last] = value
    path.write_bytes(canonical_json(document))


def refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


FIXTURE_EDITS = [
    ("digests", {}, "digests: no SHA-256 of layer.safetensors"),
    ("digests layer.safetensors", 1, "digests.layer.safetensors"),
    ("exchange within", ABSENT, "exchange.within: field required"),
    ("exchange across", ABSENT, "exchange.across: field required"),
    ("exchange across", 1, "exchange.across"),
    ("exchange within", {"a": 1}, "exchange.within"),
    ("exchange within", [[], 1], "exchange.within.0"),
    ("exchange within", [1, 2, 3], "exchange.within"),
    ("exchange within", [0, 36], "route 36 of 36"),
    ("exchange why", 1, "exchange.why"),
    ("num_experts", 10**30, "num_experts"),
    ("hidden", 10**30, "hidden"),
    ("layer", 10**30, "layer"),
    ("experts", [1, 3, 4, 8], "below num_experts 8"),
    ("experts", [3, 1, 4, 7], "experts ascend"),
    ("block_size", 0, "block_size"),
    ("group_size", -2, "group_size"),
    ("tokens", 17, "one row for each of 17 tokens"),
    ("top_k", 3, "3 experts a token"),
]


@pytest.mark.parametrize(("place", "value", "match"), FIXTURE_EDITS)
def test_a_fixture_with_an_ill_typed_field_is_refused(study: Study, place: str, value: object, match: str) -> None:
    put(study.fixture / SPEC, place, value)
    refused(lambda: load_fixture(study.fixture), match)


def inputs_of(study: Study, **changes: Any) -> None:
    path = study.fixture / INPUTS
    save_tensors(path, load_tensors(path) | changes)
    put(
        study.fixture / SPEC,
        "digests",
        json.loads((study.fixture / SPEC).read_bytes())["digests"] | {INPUTS: sha256_file(path)},
    )


@pytest.mark.filterwarnings("error")
def test_inputs_of_another_dtype_or_shape_are_refused(study: Study) -> None:
    hidden = load_tensors(study.fixture / INPUTS)["hidden"]
    inputs_of(study, hidden=hidden.astype(np.complex64))
    refused(lambda: load_fixture(study.fixture), "dtypes complex64, int32, float32")
    inputs_of(study, hidden=hidden.reshape(-1))
    refused(lambda: load_fixture(study.fixture), "one row for each of 18 tokens")
    inputs_of(study, hidden=hidden, topk_ids=np.zeros((18, 0), np.int32))
    refused(lambda: load_fixture(study.fixture), "one row for each of 18 tokens")
    refused(lambda: read_study(study.fixture, study.prediction, study.identity), r"topk_ids \[18, 2\]")


LAUNCHES = [({}, "launches"), (1, "launches"), ({"w13": [64, 128, 4]}, "w2"), ({"w2": [64, 128, 4]}, "w13")]
PREDICTION_EDITS = [
    *(("launches", value, match) for value, match in LAUNCHES),
    ("launches w13", [64, 0, 4], "launches.w13.1"),
    ("launches w13", [64, 128], "launches.w13"),
    ("launches w13", [64, 128, 10**30], "launches.w13.2"),
    ("full_k_grid", "3", "full_k_grid"),
    ("full_k_grid", 0, "full_k_grid"),
    ("exchange", {}, "exchange.within"),
    ("exchange across", 1, "exchange.across"),
    ("arms", 1, "arms"),
    ("arms 0 fingerprint", ABSENT, "arms.0.fingerprint"),
    ("lane", ABSENT, "lane"),
    ("point", 1, "point"),
    ("plan_source", ABSENT, "plan_source"),
    ("fixture", 1, "fixture"),
]


@pytest.mark.parametrize(("place", "value", "match"), [*PREDICTION_EDITS, ("controls", [1], "controls.0")])
def test_a_run_and_the_control_refuse_an_ill_typed_prediction(
    study: Study, tmp_path: Path, place: str, value: object, match: str
) -> None:
    put(study.prediction, place, value)
    refused(lambda: load_prediction(study.prediction), match)
    refused(lambda: start(study, tmp_path / "run"), match)
    refused(lambda: control(study.fixture, study.prediction, "twin-hopper", tmp_path / "control.json"), match)
    assert not (tmp_path / "run").exists() and not (tmp_path / "control.json").exists()


def start(study: Study, out: Path) -> None:
    run(
        lane_name="twin-hopper", lane=SignatureLane(), fixture_folder=study.fixture, prediction_path=study.prediction,
        cell="native", history="H0", replicate=1, out=out,
    )  # fmt: skip


@pytest.mark.parametrize(("place", "value", "match"), PREDICTION_EDITS)
def test_the_scorer_refuses_an_ill_typed_prediction(study: Study, place: str, value: object, match: str) -> None:
    put(study.prediction, place, value)
    refused(lambda: read_study(study.fixture, study.prediction, study.identity), match)


@pytest.mark.parametrize("field", ["intermediate", "hidden", "block_size"])
def test_the_scorer_judges_a_fixture_of_absurd_sizes(study: Study, field: str) -> None:
    put(study.fixture / SPEC, field, 1)
    try:
        assert not judge(
            read_study(study.fixture, study.prediction, study.identity), study.runs, study.replicates
        ).document["sound"]
    except InputError as e:
        assert "\n" not in str(e)
    put(study.fixture / SPEC, field, 10**30)
    refused(lambda: read_study(study.fixture, study.prediction, study.identity), field)


@pytest.mark.parametrize("group_size", [0, 1, 7, -1, 1000])
def test_the_scorer_judges_another_group_size(study: Study, group_size: int) -> None:
    put(study.fixture / SPEC, "group_size", group_size)
    try:
        assert not judge(
            read_study(study.fixture, study.prediction, study.identity), study.runs, study.replicates
        ).document["sound"]
    except InputError as e:
        assert "\n" not in str(e)


def test_the_scorer_judges_launches_that_cut_nothing(study: Study) -> None:
    for launch in ([1, 1, 1], [7, 13, 5], [1 << 20, 1 << 20, 1 << 20]):
        study.edit_prediction(lambda document, launch=launch: document["launches"].update(w13=launch))
        assert study.reasons()


def test_deeply_nested_documents_are_refused(study: Study) -> None:
    (study.fixture / SPEC).write_bytes(DEEP)
    refused(lambda: load_fixture(study.fixture), "not a readable fixture")
    study.prediction.write_bytes(DEEP)
    refused(lambda: load_prediction(study.prediction), "not a readable prediction")


def test_a_run_with_a_tensor_of_eight_bits_is_unreadable(study: Study) -> None:
    path = study.runs / "native" / "H0" / "rep1" / "tensors.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["w13"].update(dtype="F8_E4M3", shape=[header["w13"]["data_offsets"][1] - header["w13"]["data_offsets"][0]])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert ("native/H0/rep1", "unreadable_tensors") in study.reasons()
