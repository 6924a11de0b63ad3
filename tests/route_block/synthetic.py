# SPDX-License-Identifier: Apache-2.0
"""A small study without GEMMs: W13 and W2 whose bits are a function of each route's schedule signature alone.

That is what the study claims of the real layer, so the relations and the prediction hold of it, at a thousandth of the
cost. Activation and sum are the twin's, as the scorer works them out again. The runs are written by the real runner.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

from routeblock.evidence.digest import canonical_json, code_digest, sha256_file
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import (
    BY_LOOPS,
    READ_BACK,
    RECORD,
    RECORD_MANIFEST,
    TELEMETRY,
    TELEMETRY_MANIFEST,
    TENSORS,
)
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align, exchange
from routeblock.route_block import operating_point
from routeblock.route_block.facts import schedule
from routeblock.route_block.fixtures.fixture import LayerFixture, load_fixture, write_fixture
from routeblock.route_block.operating_point import GEMMS, LaneFacts, cut
from routeblock.route_block.prediction import predict
from routeblock.route_block.runs.identity import code_of
from routeblock.route_block.runs.lane import Computer, Outcome, Request
from routeblock.route_block.runs.run import run
from routeblock.route_block.scorer.audit import STATUS
from routeblock.route_block.scorer.inputs import FROZEN_BEFORE, read_study
from routeblock.route_block.scorer.mutations import seal_anew
from routeblock.route_block.scorer.score import Score, judge, score
from routeblock.twin.layer import combine, silu_and_mul

TOKENS, TOP_K, BLOCK, HIDDEN, INTERMEDIATE = 18, 2, 8, 128, 64
COUNTS = {1: 12, 3: 5, 4: 11, 7: 8}  # expert: routes; six blocks, of which expert 4 owns the fourth and the fifth
FOCUS, QUIET = 4, 1
LAUNCH = Launch(64, 128, 4)  # blocks 0 to 3 direct, 4 and 5 cut in two; on 3 CUDA blocks none is cut


def routing() -> NDArray[np.int32]:
    """topk_ids [18, 2]: the two fullest experts meet first, so that every token has two."""
    left, pairs = dict(COUNTS), []
    for _ in range(TOKENS):
        pair = sorted(left, key=lambda e: -left[e])[:TOP_K]
        for expert in pair:
            left[expert] -= 1
        pairs.append(pair)
    assert not any(left.values())
    return np.array(pairs, np.int32)


def make_fixture(folder: Path, *, pairs: bool = True, one_plan: bool = False, one_class: bool = False) -> LayerFixture:
    """A fixture folder; `pairs` False: without exchange pairs; `one_plan`: H1's plan is H0's;
    `one_class`: H1 differs from H0 between blocks of one class alone."""
    ids = routing()
    focus = [int(r) for r in np.flatnonzero(ids.reshape(-1) == FOCUS)]
    late = [focus[9], *focus[:2]]  # in block 4; canonical order puts the three last there
    others = [r for r in range(ids.size) if r not in focus]
    first = align(ids, 8, BLOCK, arrival=[*others[::-1], *(r for r in focus if r not in late), *late])
    across, within = (focus[5], focus[9]), (focus[3], focus[4])
    quiet = [first.members(b) for b in range(2)]
    moved = first if one_class else exchange(first, *across)
    second = first if one_plan else exchange(moved, quiet[0][0], quiet[1][0])
    spec = {
        "name": "small",
        "kind": "synthetic",
        "source": {"words": "test"},
        "layer": 0,
        "num_experts": 8,
        "experts": sorted(COUNTS),
        "tokens": TOKENS,
        "top_k": TOP_K,
        "block_size": BLOCK,
        "group_size": 32,
        "dtype": "float16",
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "exchange": {
            "within": list(within) if pairs else None,
            "across": list(across) if pairs else None,
            "chosen": "by construction",
            "from": "test",
            "why": "no expert has two blocks",
        },
        "facts": [{"fact": "valid routes", "wanted": 36, "found": 36, "holds": True}],
    }
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    inputs = {
        "hidden": rng.standard_normal((TOKENS, HIDDEN)).astype(np.float16),
        "topk_ids": ids,
        "topk_weights": np.full(ids.shape, 0.5, np.float32),
    }
    write_fixture(folder, spec, layer={"weights": np.arange(7)}, inputs=inputs, plans={"H0": first, "H1": second})
    return load_fixture(folder)


def _rows(surface: str, keys: list[Any], width: int) -> NDArray[np.float16]:
    drawn = [np.random.default_rng(crc32(repr((surface, key)).encode())).integers(-99, 99, width) for key in keys]
    return np.array(drawn, np.float16)


def following(w13: NDArray[Any], w2: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The four surfaces, activation and sum as they follow from w13 and w2."""
    final = combine(w2.reshape(TOKENS, TOP_K, -1))
    return {"w13": w13, "activation": silu_and_mul(w13), "w2": w2, "final": final}


class SignatureLane:
    """A lane without GEMMs: equal signatures give equal bits."""

    modules = ()

    def __init__(
        self, status: str = STATUS["twin-hopper"], native: Callable[[Request, AlignedPlan], AlignedPlan] | None = None
    ):
        self.status, self.native = status, native

    def prepare(self, fixture: LayerFixture) -> None:
        """Nothing to prepare."""

    def computer(self) -> Computer:
        return Computer("b" * 64, {"numpy": "2", "gpu": "NVIDIA H200", "compute_capability": "9.0"})

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        plan = request.plan
        if plan is None:
            plan = fixture.plans[request.history]
            plan = self.native(request, plan) if self.native else plan
        found, slices = {}, {}
        for gemm in GEMMS:
            launch = request.launches[gemm]
            partition = cut(fixture.spec, gemm, plan.num_blocks, launch)
            found[gemm] = predict.signatures(plan, partition, launch.thread_k)
            slices[gemm] = [partition.slices(*divmod(tile, partition.n_tiles)) for tile in range(partition.tiles)]
        w13 = list(enumerate(found["w13"]))
        w2 = [(key, found["w2"][key[0]]) for key in w13]
        return Outcome(
            surfaces=following(_rows("w13", w13, 2 * INTERMEDIATE), _rows("w2", w2, HIDDEN)),
            plan=plan,
            grids={g: request.launches[g].grid for g in GEMMS},
            prelude=self.status == "observed" and request.history == "H1",
            computer=self.computer(),
            consumption=READ_BACK if self.status == "observed" else BY_LOOPS,
            slices=None if self.status == "observed" else slices,
            telemetry={"gpu_uuid": "one"},
        )


class Study:
    """A fixture, its prediction and its runs in a folder."""

    def __init__(self, root: Path, replicates: int) -> None:
        self.fixture, self.runs = root / "fixture", root / "runs"
        self.prediction = self.runs / "prediction.json"
        self.identity = root / "identity.json"
        self.replicates = replicates

    @property
    def options(self) -> list[str]:
        """What `score` and `mutate` have to be given."""
        given = {"fixture": self.fixture, "prediction": self.prediction, "identity": self.identity, "runs": self.runs}
        return [part for name, path in given.items() for part in (f"--{name}", str(path))]

    def copy(self, root: Path) -> Study:
        """A copy to damage."""
        shutil.copytree(self.fixture.parent, root)
        return Study(root, self.replicates)

    def judge(self) -> Score:
        """The scorer's verdict."""
        return judge(read_study(self.fixture, self.prediction, self.identity), self.runs, self.replicates)

    def score(self, out: Path) -> Score:
        """The sealed verdict in a file."""
        return score(
            fixture=self.fixture,
            prediction=self.prediction,
            identity=self.identity,
            runs=self.runs,
            replicates=self.replicates,
            out=out,
        )

    def reasons(self) -> list[tuple[str, str]]:
        """(run, reason) of every finding."""
        return [(f.run, str(f.reason)) for f in self.judge().findings]

    def edit(self, run: str, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
        """Change the record of a run."""
        path = self.runs / run / RECORD
        record = json.loads(path.read_bytes())
        change(record)
        path.write_bytes(canonical_json(record))
        if seal:
            seal_anew(self.runs / run, RECORD_MANIFEST)
            if (self.runs / run / TELEMETRY).is_file():
                seal_anew(self.runs / run, TELEMETRY_MANIFEST)

    def edit_telemetry(self, run: str, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
        """Change the telemetry of a run."""
        path = self.runs / run / TELEMETRY
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(canonical_json(document))
        if seal:
            seal_anew(self.runs / run, TELEMETRY_MANIFEST)

    def edit_tensors(self, run: str, change: Callable[[dict[str, NDArray[Any]]], object]) -> None:
        """Change the tensors of a run, and seal it anew."""
        path = self.runs / run / TENSORS
        tensors = {name: x.copy() for name, x in load_tensors(path).items()}
        change(tensors)
        save_tensors(path, tensors)
        seal_anew(self.runs / run, RECORD_MANIFEST)

    def edit_prediction(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the prediction and make every run name the changed one."""
        before = json.loads(self.prediction.read_bytes())
        old = sha256_file(self.prediction)
        change(before)
        self.prediction.write_bytes(canonical_json(before))
        new = sha256_file(self.prediction)
        for path in self.runs.rglob(RECORD):
            for name in (RECORD, RECORD_MANIFEST):
                file = path.with_name(name)
                file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))
            for name in (RECORD_MANIFEST, TELEMETRY_MANIFEST):
                seal_anew(path.parent, name)


def write_identity(path: Path, lane: str) -> None:
    """What a study of `SignatureLane` is expected to have computed with, sealed."""
    lane_of_test = SignatureLane()
    computer, source = lane_of_test.computer(), code_digest(*code_of(lane_of_test))
    document = {
        "format": "routeblock.expected_identity.v1",
        "lane": lane,
        "source": source,
        "frozen": FROZEN_BEFORE,
    }
    path.write_bytes(canonical_json({**document, "binary": computer.binary, "environment": computer.environment}))
    seal_identity(path)


def seal_identity(path: Path) -> None:
    """Seal an identity document as it now is."""
    parameters = {"lane": json.loads(path.read_bytes())["lane"]}
    modules = code_of(SignatureLane())
    seal(path.with_suffix(SUFFIX), rule="identity", outputs=[path], inputs=[], parameters=parameters, modules=modules)


def make_study(
    root: Path,
    *,
    lane_name: str = "twin-hopper",
    lane: SignatureLane | None = None,
    replicates: int = 5,
    pairs: bool = True,
    one_plan: bool = False,
    one_class: bool = False,
) -> Study:
    """Write a whole study below `root`."""
    study = Study(root, replicates)
    fixture = make_fixture(study.fixture, pairs=pairs, one_plan=one_plan, one_class=one_class)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operating_point, "PUBLISHED", LAUNCH)
        tensor_cores = "ampere" if lane_name == "twin-ampere" else "hopper"
        patch.setattr(predict, "lane_facts", lambda _: LaneFacts("test", tensor_cores, "computed"))
        document = predict.predict(fixture, lane_name, "published", "stored", fixture.plans)
    study.runs.mkdir()
    study.prediction.write_bytes(canonical_json(document))
    write_identity(study.identity, lane_name)
    arms = {(a["cell"], a["history"]) for a in document["arms"]}
    for cell, history, replicate in schedule(replicates):
        if (cell, history) in arms:
            run(
                lane_name=lane_name,
                lane=lane or SignatureLane(),
                fixture_folder=study.fixture,
                prediction_path=study.prediction,
                cell=cell,
                history=history,
                replicate=replicate,
                out=study.runs / cell / history / f"rep{replicate}",
                identity_path=study.identity,
            )
    return study
