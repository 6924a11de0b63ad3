# SPDX-License-Identifier: Apache-2.0
"""Every reader of files that come from elsewhere: what it is given when all is well, and how it is called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from synthetic import Study, make_fixture, make_study

from routeblock import config
from routeblock.alignment_cost.edits import ROOM
from routeblock.alignment_cost.protocol import load as load_alignment_cost
from routeblock.alignment_cost.study import STUDY as ALIGNMENT_COST
from routeblock.checkpoint.folder import open_folder
from routeblock.checkpoint.generator import Spec, generate
from routeblock.checkpoint.manifest import read_manifest, write_manifest
from routeblock.checkpoint.model import read_model
from routeblock.checkpoint.preflight import preflight
from routeblock.checkpoint.shards import read_header
from routeblock.diagnose import routings
from routeblock.diagnose.answer import load_answer
from routeblock.evidence import archive, chain, packed
from routeblock.evidence.digest import sha256_array, sha256_file
from routeblock.evidence.manifest import seal
from routeblock.evidence.record import RECORD, read_record
from routeblock.evidence.tensor_store import read_store, write_store
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.figure_style import read_table
from routeblock.grouped_schedule.protocol import load as load_grouped_schedule
from routeblock.grouped_schedule.study import STUDY as GROUPED_SCHEDULE
from routeblock.q6k_dispatch.protocol import load as load_q6k_dispatch
from routeblock.q6k_dispatch.study import STUDY as Q6K_DISPATCH
from routeblock.report import table_view
from routeblock.route_block.fixtures.fixture import LayerFixture, captured_plans, load_fixture, plan_tensors
from routeblock.route_block.native import evidence as native
from routeblock.route_block.prediction.predict import load_prediction
from routeblock.route_block.runs.recorded import read_index
from routeblock.route_block.scorer.inputs import read_study
from routeblock.route_block.scorer.mutations import read_declared
from routeblock.route_block.scorer.score import judge
from routeblock.tables import Column, write
from routeblock.timing import statistics, validation
from routeblock.timing.mutations import read_declared as read_record_edits
from routeblock.timing.record import Study as TimedStudy

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "fixtures/recorded"
EVIDENCE = RECORDED / "h200-vllm0.24.0"
JSON_FACTOR, TENSOR_FACTOR = 32, 2


@dataclass(frozen=True)
class Reader:
    """make: fills a folder with valid files. read: reads them. Every file below the folder whose name ends in `suffix`
    is made hostile in turn. factor: of the files' bytes, what reading may take of memory beside a fixed share."""

    name: str
    suffix: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    factor: int = JSON_FACTOR


def _arrays(folder: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {"a": rng.standard_normal((16, 8)).astype(np.float16), "b": np.arange(5, dtype=np.int32)}
    save_tensors(folder / "t.safetensors", tensors)


def _copied(*files: Path) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for path in files:
            shutil.copy(path, folder / path.name)

    return make


def _checkpoint(folder: Path) -> None:
    generate(folder / "model", Spec(layers=2, hidden=128, intermediate=64, experts=2, top_k=1, shards=2))
    (folder / "model/tokenizer.json").unlink(missing_ok=True)


def _checkpoint_manifest(folder: Path) -> None:
    _checkpoint(folder)
    write_manifest(open_folder(folder / "model"), folder, None)
    shutil.rmtree(folder / "model")


def _sealed(folder: Path) -> None:
    (folder / "given.txt").write_text("given")
    (folder / "results/a").mkdir(parents=True)
    (folder / "results/a/made.txt").write_text("made")
    parameters = {"n": 1, "where": {"lane": "x"}}
    seal(
        folder / "results/a/made.manifest.json",
        rule="make",
        outputs=[folder / "results/a/made.txt"],
        inputs=[folder / "given.txt"],
        parameters=parameters,
        modules=["routeblock.errors"],
    )


IDS = np.random.default_rng(2).integers(0, 16, (3, 20, 4)).astype(np.int32)


def _parquet_routing(folder: Path) -> None:
    columns = {"routing": [r for r in range(3) for _ in range(20)]}
    columns |= {f"slot{i}": IDS[:, :, i].reshape(-1) for i in range(4)}
    pq.write_table(pa.table(columns), folder / "r.parquet")


def _routing(name: str) -> Callable[[Path], object]:
    return lambda folder: routings.read(folder / name, 16, 4)


def _write_store(folder: Path) -> None:
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 16, (40, 8), np.uint16)
    near = words.copy()
    near[7, 3] ^= 0x8000
    arrays = [words.view(np.float16), near.view(np.float16), np.arange(5, dtype=np.int32), np.zeros((0, 4), np.float32)]
    write_store(folder / "t.xz", {sha256_array(x): x for x in arrays})


def _study(folder: Path) -> Study:
    return make_study(folder / "study", replicates=1)


def _runs(folder: Path) -> None:
    """Two runs of a study; those that are not there are findings."""
    study = _study(folder)
    for path in [*study.runs.glob("*/*/*")]:
        if path.parent.parent.name not in ("native", "replay"):
            shutil.rmtree(path)


def _lines(folder: Path) -> None:
    study, tensors = _study(folder), {}
    lines = [*packed.pack(study.runs, sorted(study.runs.glob("native/*/rep1/*")), tensors)]
    shutil.rmtree(folder / "study")
    packed.write_lines(folder / "lines.jsonl", lines)
    write_store(folder / "t.xz", tensors)


_STORES: dict[Path, dict[str, Any]] = {}


def _unpacked(folder: Path) -> None:
    if folder not in _STORES:
        _STORES[folder] = read_store(folder / "t.xz")
    for line in packed.read_lines(folder / "lines.jsonl"):
        packed.unpack(line, _STORES[folder], folder / "out", where="lines.jsonl")


def _judged(folder: Path) -> object:
    study = Study(folder / "study", 1)
    return judge(read_study(study.fixture, study.prediction, study.identity), study.runs, 1)


def _plans(folder: Path) -> None:
    fixture = make_fixture(folder / "fixture")
    save_tensors(folder / "plans.safetensors", plan_tensors(fixture.plans))


_FIXTURES: dict[Path, LayerFixture] = {}


def _captured(folder: Path) -> object:
    if folder not in _FIXTURES:
        _FIXTURES[folder] = load_fixture(folder / "fixture")
    return captured_plans(_FIXTURES[folder], folder / "plans.safetensors")


def _timed(study: TimedStudy, source: Path) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        record = study.read(source)
        documents = json.loads(json.dumps(record.documents))
        study.write(folder, record.batches[:40], documents)

    return make


def _statistics(folder: Path) -> None:
    record = ALIGNMENT_COST.read(RECORDED / "alignment_cost/earlier")
    protocol = load_alignment_cost(ROOT / "fixtures/protocols/alignment_cost.json")
    pairs = ALIGNMENT_COST.pairs(protocol, record)[:4]
    found = statistics.comparisons(ALIGNMENT_COST.table.rows(record.batches), ALIGNMENT_COST.key, pairs, _fast())
    text = json.dumps({"protocol_sha256": "0" * 64, "comparisons": [c.row() for c in found]})
    (folder / "statistics.json").write_text(text)


def _fast() -> Any:
    from routeblock.timing.protocol import Bootstrap

    return Bootstrap(seed=1, resamples=10, confidence=0.9)


def _table(folder: Path) -> None:
    columns = (Column("lane"), Column("count", "count"), Column("change", "number"))
    rows = [{"lane": "a", "count": i, "change": i / 3} for i in range(10)]
    write(folder, "t", columns, rows, title="A table", notes="Of nothing.")


def _answer(folder: Path) -> None:
    text = {"format": "routeblock.answer.v1", "verdict": "holds", "facts": [{"name": "a", "value": 1}]}
    (folder / "answer.json").write_text(json.dumps(text))


def _validation(folder: Path) -> None:
    (folder / "validation.json").write_text(json.dumps({"comparisons": 3, "disagreements": []}))


def _contents(folder: Path) -> None:
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "contents.json").write_text(
        json.dumps({"LICENSE": {"size": 1, "sha256": sha256_file(folder / "LICENSE")}})
    )


PROTOCOLS = {
    "alignment_cost": load_alignment_cost,
    "grouped_schedule": load_grouped_schedule,
    "q6k_dispatch": load_q6k_dispatch,
}

READERS: tuple[Reader, ...] = (
    Reader("tensor file", ".safetensors", _arrays, lambda f: load_tensors(f / "t.safetensors"), TENSOR_FACTOR),
    Reader("shard header", ".safetensors", _arrays, lambda f: read_header(f / "t.safetensors", "t"), TENSOR_FACTOR),
    Reader("checkpoint config", ".json", _checkpoint, lambda f: preflight(f / "model", layer=1)),
    Reader("configuration of a model", "config.json", _checkpoint, lambda f: read_model(open_folder(f / "model"))),
    Reader("checkpoint shards", ".safetensors", _checkpoint, lambda f: preflight(f / "model", layer=1), TENSOR_FACTOR),
    Reader("checkpoint manifest", ".json", _checkpoint_manifest, lambda f: read_manifest(f / "files.json")),
    Reader(
        "sealed results", ".manifest.json", _sealed, lambda f: chain.verify(f / "results", sources=[f / "given.txt"])
    ),
    Reader("configuration", ".yaml", _copied(ROOT / "config.yaml"), lambda f: config.load(f / "config.yaml")),
    Reader("routing (npy)", ".npy", lambda f: np.save(f / "r.npy", IDS), _routing("r.npy")),
    Reader(
        "routing (tensors)", ".safetensors", lambda f: save_tensors(f / "r.safetensors", {"topk_ids": IDS}),
        _routing("r.safetensors"), TENSOR_FACTOR,
    ),
    Reader("routing (parquet)", ".parquet", _parquet_routing, _routing("r.parquet")),
    Reader("plans", "plans.safetensors", _plans, _captured, TENSOR_FACTOR),
    Reader(
        "fixture", "fixture.json", lambda f: make_fixture(f / "fixture"),
        lambda f: load_fixture(f / "fixture", verify=False),
    ),
    Reader(
        "fixture tensors", ".safetensors", lambda f: make_fixture(f / "fixture"),
        lambda f: load_fixture(f / "fixture", verify=False), TENSOR_FACTOR,
    ),
    Reader("prediction", "prediction.json", _study, lambda f: load_prediction(f / "study/runs/prediction.json")),
    Reader("record of a run", RECORD, _runs, lambda f: read_record(f / "study/runs/native/H0/rep1" / RECORD)),
    Reader("scored runs", ".json", _runs, _judged),
    Reader("scored tensors", "tensors.safetensors", _runs, _judged, TENSOR_FACTOR),
    Reader("packed evidence", ".jsonl", _lines, _unpacked),
    Reader("index of evidence", ".json", _copied(EVIDENCE / "evidence.json"), read_index),
    Reader("tensor store", ".xz", _write_store, lambda f: read_store(f / "t.xz")),
    Reader("contents of an archive", "contents.json", _contents, lambda f: archive.listed(f / "contents.json")),
    Reader("record of native alignment", ".json", _copied(RECORDED / "native/h200/native.json"), native.read),
    *(
        Reader(f"protocol of {name}", ".json", _copied(ROOT / f"fixtures/protocols/{name}.json"),
               lambda f, name=name, load=load: load(f / f"{name}.json"))
        for name, load in PROTOCOLS.items()
    ),
    *(
        Reader(f"{kind} of {study.name}", suffix, _timed(study, RECORDED / at), study.read)
        for study, at in (
            (ALIGNMENT_COST, "alignment_cost/earlier"),
            (GROUPED_SCHEDULE, "grouped_schedule/h200/cuda/gpu0/confirmation"),
            (Q6K_DISPATCH, "q6k_dispatch/h200"),
        )
        for kind, suffix in (("documents", ".json"), ("batches", ".parquet"))
    ),
    Reader("statistics", ".json", _statistics, lambda f: statistics.read(f / "statistics.json")),
    Reader("validation", ".json", _validation, lambda f: validation.must_agree(f / "validation.json")),
    Reader("table", ".parquet", _table, lambda f: (read_table(f / "t.parquet", ["lane"]), table_view.read(f, "t"))),
    Reader("answer", ".json", _answer, lambda f: load_answer(f / "answer.json")),
    Reader(
        "declared mutations", ".json", _copied(ROOT / "fixtures/mutations.json"),
        lambda f: read_declared(f / "mutations.json"),
    ),
    Reader(
        "declared record edits", ".json", _copied(ROOT / "fixtures/record_edits.json"),
        lambda f: read_record_edits(f / "record_edits.json", "alignment_cost", ROOM),
    ),
)  # fmt: skip
