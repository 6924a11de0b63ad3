# SPDX-License-Identifier: Apache-2.0
"""A short run of every reader on hostile files (`make fuzz` runs longer), and files that are hostile by their size."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_readers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save

from routeblock import config
from routeblock.checkpoint.folder import open_folder
from routeblock.checkpoint.generator import Spec, generate
from routeblock.checkpoint.model import read_model
from routeblock.checkpoint.shards import read_header
from routeblock.diagnose import routings
from routeblock.errors import InputError
from routeblock.evidence import chain
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.files import DOCUMENT_BYTES, small_document
from routeblock.evidence.packed import read_lines
from routeblock.evidence.parquet import read_parquet
from routeblock.evidence.record import read_record
from routeblock.evidence.tensor_store import INDEX, read_store
from routeblock.route_block.runs.recorded import read_index
from routeblock.timing import validation

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"seconds": 4, "seed": 20251201, "cases": 60}


@pytest.mark.parametrize(
    "reader",
    ["tensor file", "configuration of a model", "sealed results", "configuration", "routing (npy)",
     "routing (parquet)", "plans", "packed evidence", "tensor store", "batches of grouped_schedule", "statistics"],
)  # fmt: skip
def test_a_reader_gives_a_result_or_a_refusal(reader: str) -> None:
    found = fuzz_readers.fuzz(reader, **SHORT)
    assert found["inputs"] >= 10 and found["read"] + found["refused"] == found["inputs"]
    assert found["first_faults"] == []


def _at(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def _is_modest(read: Callable[[], object], size: int, match: str) -> None:
    """Refused, with no more memory than the rule allows; measured as the peak of this process."""
    Path("/proc/self/clear_refs").write_text("5")
    before = fuzz_readers._memory("VmRSS")
    with pytest.raises(InputError, match=match):
        read()
    assert fuzz_readers._memory("VmHWM") - before <= fuzz_readers.FREE_BYTES + 32 * size


def test_a_process_that_dies_or_hangs_is_a_fault_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time\nhome = sys.argv[2]\nopen(home + '/now', 'w').write('7')\n"
        "time.sleep(60) if 'hang' in sys.argv else os.abort()\n"
    )
    monkeypatch.setattr(fuzz_readers, "__file__", str(worker))
    monkeypatch.setattr(fuzz_readers, "KILL_S", 0.3)
    for name, said in (("die", "the process died by -6"), ("hang", "still at it")):
        found = fuzz_readers.fuzz(name, 1, 0.2, 8)
        assert found["faults"] == 1 and found["first_faults"][0]["fault"].startswith(said)


def test_a_manifest_of_wrong_entries_is_refused_in_little_memory(tmp_path: Path) -> None:
    start = {"format": "routeblock.manifest.v1", "rule": "r", "parameters": {}, "code": "0" * 64, "inputs": []}
    many: list[dict[str, Any]] = [
        {**start, "outputs": [0] * 1_000_000},
        {**start, "outputs": [], **{f"k{i}": 0 for i in range(200_000)}},
        {**start, "outputs": [{f"k{i}": 0 for i in range(200_000)}]},
    ]
    for document in many:
        path = _at(tmp_path, "a.manifest.json", canonical_json(document))
        Path("/proc/self/clear_refs").write_text("5")
        before = fuzz_readers._memory("VmRSS")
        assert {f.kind for f in chain.verify(tmp_path)} == {chain.Kind.MALFORMED_MANIFEST}
        grown = fuzz_readers._memory("VmHWM") - before
        assert grown <= fuzz_readers.FREE_BYTES + 32 * path.stat().st_size


def test_a_document_of_fixed_fields_has_a_limit(tmp_path: Path) -> None:
    path = _at(tmp_path, "record.json", b"{" + b" " * DOCUMENT_BYTES + b"}")
    _is_modest(lambda: read_record(path), path.stat().st_size, "more than 524288 bytes")
    assert len(small_document(_at(tmp_path, "x", b"1" * DOCUMENT_BYTES))) == DOCUMENT_BYTES


def test_a_header_that_is_the_whole_file_is_refused_in_little_memory(tmp_path: Path) -> None:
    header = {f"{i:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(150_000)}
    text = json.dumps(header, separators=(",", ":")).encode()
    path = _at(tmp_path, "t.safetensors", len(text).to_bytes(8, "little") + text)
    _is_modest(lambda: read_header(path, "t"), 0, r"header of \d+ bytes in a file of")


def test_a_store_that_unpacks_to_more_than_its_file_gives_reason_for_is_refused(tmp_path: Path) -> None:
    path = _at(tmp_path, "t.xz", lzma.compress(bytes(100 << 20), preset=1))
    _is_modest(lambda: read_store(path), path.stat().st_size, "unpacks to more than")


def test_a_store_whose_index_states_more_than_that_is_refused(tmp_path: Path) -> None:
    base = np.zeros(8 << 20, np.uint8)
    digest = sha256_array(base)
    index = {digest: {"base": None, "dtype": "uint8", "shape": [base.size]}}
    index |= {f"{i:064x}": {"base": digest, "dtype": "uint8", "shape": [base.size]} for i in range(50)}
    document = canonical_json({"format": "routeblock.tensor_store.v1", "tensors": index})
    data = save({INDEX: np.frombuffer(document, np.uint8), digest: base})
    path = _at(tmp_path, "t.xz", lzma.compress(data, preset=1))
    _is_modest(lambda: read_store(path), path.stat().st_size, "states arrays of")


def test_a_dictionary_that_xz_states_is_not_allocated(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30, "preset": 0}]
    path = _at(tmp_path, "t.xz", lzma.compress(b"x", filters=filters))
    _is_modest(lambda: read_store(path), path.stat().st_size, "[Mm]emory")


def test_a_table_of_more_cells_than_its_file_gives_reason_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({f"slot{i}": np.zeros(4_000_000, np.int32) for i in range(2)}), path)
    _is_modest(lambda: routings.read(path, 8, 2), path.stat().st_size, "8000000 cells")


def test_a_text_repeated_in_a_table_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": pa.array(["x" * 100_000] * 5000).dictionary_encode()}), path)
    Path("/proc/self/clear_refs").write_text("5")
    before = fuzz_readers._memory("VmRSS")
    assert len(read_parquet(path)) == 5000
    assert fuzz_readers._memory("VmHWM") - before < fuzz_readers.FREE_BYTES


@pytest.mark.parametrize("shape", ["(1000000000000, 4)", "(4, " * 50 + ")", "(" * 3000 + "4, 4" + ")" * 3000])
def test_a_shape_that_an_array_states_is_not_allocated(tmp_path: Path, shape: str) -> None:
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path = _at(tmp_path, "r.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    _is_modest(lambda: routings.read(path, 8, 4), path.stat().st_size, r"a \.npy file of integers is needed")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, ">i2"])
def test_arrays_that_numpy_wrote_are_read(tmp_path: Path, order: Any, dtype: Any) -> None:
    ids = np.asarray(np.arange(40).reshape(10, 4) % 8, dtype, order=order)
    np.save(tmp_path / "r.npy", ids)
    assert np.array_equal(routings.read(tmp_path / "r.npy", 8, 4)[0].ids[0], ids)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("fixture: &a [*a]", "alias"),
        ("fixture: {[1, 2]: 3}", "line|plain"),
        ("fixture: {? {a: 1} : 2}", "line|plain"),
        (f"fixture: 0x{'f' * 9000}", "plain settings"),
        ("x: " + "y" * 200_000, "more than 100000 bytes"),
        ("\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]), "alias"),
    ],
)
def test_settings_that_stand_for_more_than_they_are_get_one_line(tmp_path: Path, line: str, match: str) -> None:
    path = _at(tmp_path, "config.yaml", line.encode())
    _is_modest(lambda: config.load(path), path.stat().st_size, match)


def _model(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Callable[[], object]:
    root = generate(tmp_path / "model", Spec(layers=1, hidden=128, intermediate=64, experts=2, top_k=1, shards=1))
    document = json.loads((root / "config.json").read_text())
    change(document)
    (root / "config.json").write_text(json.dumps(document))
    return lambda: read_model(open_folder(root))


def test_experts_that_a_configuration_states_are_not_listed(tmp_path: Path) -> None:
    read = _model(tmp_path, lambda c: c.update(num_hidden_layers=9000, num_experts=9000))
    _is_modest(read, 0, "9000 layers of 9000 experts")


@pytest.mark.parametrize("pattern", [r"(.*)*x", r"(a+b?)+$", ".*.*.*.*.*.*.*x", r"(?:a{1,9}){1,9}", "a" * 600])
def test_a_pattern_without_end_is_refused(tmp_path: Path, pattern: str) -> None:
    read = _model(tmp_path, lambda c: c["quantization_config"].update(dynamic={f"-:{pattern}": {}}))
    _is_modest(read, 0, "may take for ever to match")


@pytest.mark.parametrize("text", [b'{"comparisons":1e999,"disagreements":[]}', b"[" * 100_000, b'{"comparisons":"x"}'])
def test_numbers_and_depths_that_python_cannot_hold_are_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(InputError, match="no validation"):
        validation.must_agree(_at(tmp_path, "validation.json", text))
    with pytest.raises(InputError, match="not readable evidence"):
        read_index(_at(tmp_path, "evidence.json", text).parent)


@pytest.mark.parametrize(
    "change", [{"folder": 1}, {"tensors": {"t": {"a": 1}}, "sha256": {"t": "0"}}, {"sha256": {"t": 5}}, {"tensors": 5}]
)
def test_lines_of_other_types_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    line = {"folder": "a", "documents": {}, "tensors": {}, "sha256": {}, **change}
    with pytest.raises(InputError, match="not readable"):
        read_lines(_at(tmp_path, "lines.jsonl", canonical_json(line) + b"\n"))


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    from routeblock.figure_style import read_table

    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(InputError, match="two columns of one name"):
        read_table(tmp_path / "t.parquet", ["a"])
