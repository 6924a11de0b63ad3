# SPDX-License-Identifier: Apache-2.0
"""The reader against generated checkpoints: every layout, bit for bit, and every broken one in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from routeblock.checkpoint.families import FAMILIES, PROJECTIONS
from routeblock.checkpoint.generator import LAYOUTS, Spec, drawn_weights, generate
from routeblock.checkpoint.layer import PackedProjection, open_checkpoint, ranges, read_layer
from routeblock.checkpoint.quantization import Container, Names, Quantization
from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.moe.awq import marlin_pack_zeros, marlin_permute_scales, marlin_repack_weights, pack_awq

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden" / "packed_e106.json"
SMALL = Spec(experts=6, top_k=2, hidden=128, intermediate=64, group_size=32)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reader_gives_the_generated_weights_bit_for_bit(
    tmp_path: Path, layout: str, model_type: str, dtype: str
) -> None:
    spec = replace(SMALL, layout=layout, model_type=model_type, dtype=dtype)
    layer = read_layer(open_checkpoint(generate(tmp_path / "c", spec)), 1)
    weights = drawn_weights(spec)
    for expert in range(spec.experts):
        for projection in PROJECTIONS:
            found, wanted = layer.packed(expert, projection), weights(1, expert, projection)
            assert same_bits(found.qweight, wanted.qweight)
            assert (found.qzeros is None) == (wanted.qzeros is None) == (not LAYOUTS[layout].zero_points)
            assert found.qzeros is None or wanted.qzeros is None or same_bits(found.qzeros, wanted.qzeros)
            assert same_bits(found.scales, wanted.scales)


@pytest.mark.parametrize("prefix", ["model.", "model.model.", "model.language_model.", "language_model.model.", ""])
def test_any_decoder_prefix_is_read(tmp_path: Path, prefix: str) -> None:
    spec = replace(SMALL, prefix=prefix)
    layer = read_layer(open_checkpoint(generate(tmp_path / "c", spec)), 0)
    assert same_bits(layer.packed(5, "up_proj").qweight, drawn_weights(spec)(0, 5, "up_proj").qweight)


def test_modules_to_not_convert_counts_whole_path_components() -> None:
    names = Names(("model.layers.1", "gate", "mlp.shared_expert", "model.layers.5."))
    found = {
        "model.layers.1.mlp.experts.0.up_proj": "model.layers.1",
        "model.model.layers.1.mlp.experts.0.up_proj": "model.layers.1",
        "model.layers.10.mlp.experts.0.up_proj": None,
        "model.layers.2.mlp.gate": "gate",
        "model.layers.2.mlp.experts.0.gate_proj": None,
        "model.language_model.layers.5.mlp.experts.0.up_proj": "model.layers.5.",
        "model.layers.50.mlp.experts.0.up_proj": None,
    }
    assert {m: match and match[1] for m in found if (match := names.find(m)) or True} == found


def test_a_pattern_counts_from_the_start_of_the_name_and_only_in_compressed_tensors() -> None:
    module = "model.layers.3.mlp.experts.0.up_proj"
    q = Quantization(Container.COMPRESSED, 128, False, "ignore", Names(("re:.*layers.3.mlp.*",)))
    assert q.why_plain(module) == "ignore lists 're:.*layers.3.mlp.*'"
    assert Names(("re:layers.4.*",)).find(module) is None


def test_the_safetensors_library_reads_the_same_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(generate(tmp_path / "c", SMALL))
    layer = read_layer(checkpoint, 0)
    for shard in layer.shards():
        for name, values in load_file(checkpoint.folder.root / shard).items():
            assert same_bits(layer.catalogue.read(name), values)


def recipe(which: int, expert: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The recorded experts' inputs: values, zero points and scales of W13 (1) or W2 (2) as the recording drew them."""
    k, n = {1: (2048, 1536), 2: (768, 2048)}[which]
    rng = np.random.default_rng([which, expert, k, n])
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    zeros = rng.integers(5, 11, (k // 128, n), dtype=np.uint8)
    return q, zeros, (rng.random((k // 128, n)) * 0.006 + 0.002).astype(np.float16)


@pytest.mark.parametrize("layout", ["awq", "awq-fused", "compressed-asymmetric"])
def test_packing_digests_of_the_recorded_expert_come_out_of_a_checkpoint(tmp_path: Path, layout: str) -> None:
    def weights(layer: int, expert: int, projection: str) -> PackedProjection:
        columns = {"gate_proj": slice(0, 768), "up_proj": slice(768, 1536), "down_proj": slice(None)}[projection]
        q, zeros, scales = recipe(2 if projection == "down_proj" else 1, 106 + expert)
        return PackedProjection(pack_awq(q[:, columns]), pack_awq(zeros[:, columns]), scales[:, columns])

    spec = Spec(layout=layout, layers=1, hidden=2048, intermediate=768, experts=1, top_k=1, group_size=128)
    layer = read_layer(open_checkpoint(generate(tmp_path / "c", spec, weights)), 0)
    found = {}
    for gemm in ("w13", "w2"):
        q, zeros, scales = layer.gemm(0, gemm)
        assert zeros is not None
        found[f"{gemm}.e106.awq_qweight"] = pack_awq(q)
        found[f"{gemm}.e106.awq_qzeros"] = pack_awq(zeros)
        found[f"{gemm}.e106.marlin_qweight"] = marlin_repack_weights(q)
        found[f"{gemm}.e106.marlin_zeros"] = marlin_pack_zeros(zeros)
        found[f"{gemm}.e106.marlin_scales"] = marlin_permute_scales(scales)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {name: sha256(x.tobytes()).hexdigest() for name, x in found.items()} == {
        name: entry["sha256"] for name, entry in golden.items()
    }


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def rewrite_shard(root: Path, change: Callable[[dict[str, Any], str], None], tensor: str) -> str:
    """Rewrite the header of the shard that holds `tensor`, leaving its data; the shard's name."""
    index = json.loads((root / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shard = index["weight_map"][tensor]
    data = (root / shard).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header, tensor)
    text = json.dumps(header).encode()
    (root / shard).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return str(shard)


TENSOR = "model.layers.1.mlp.experts.3.up_proj.qweight"


def drop_tensor(root: Path) -> None:
    def change(header: dict[str, Any], tensor: str) -> None:
        header["unrelated"] = header.pop(tensor)

    rewrite_shard(root, change, TENSOR)


def drop_zero_points(root: Path) -> None:
    edit_json(root / "config.json", lambda c: c["quantization_config"].update(zero_point=True))


def truncate(root: Path) -> None:
    shard = sorted(root.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])


def remove_shard(root: Path) -> None:
    sorted(root.glob("*.safetensors"))[-1].unlink()


def outside_link(root: Path) -> None:
    (root / "README.md").unlink()
    (root / "README.md").symlink_to("/etc/hostname")


def reshape(root: Path) -> None:
    def change(header: dict[str, Any], tensor: str) -> None:
        header[tensor]["shape"] = header[tensor]["shape"][::-1]

    rewrite_shard(root, change, TENSOR)


def expert_too_many(root: Path) -> None:
    edit_json(root / "config.json", lambda c: c.update(num_experts=5))


def other_index(root: Path) -> None:
    name = "model.safetensors.index.json"
    other = "model-00001-of-00005.safetensors"
    edit_json(root / name, lambda i: i["weight_map"].update({TENSOR: other}))


def climbing_index(root: Path) -> None:
    name = "model.safetensors.index.json"
    edit_json(root / name, lambda i: i["weight_map"].update({TENSOR: "../x.safetensors"}))


def with_settings(**changes: Any) -> Callable[[Path], None]:
    return lambda root: edit_json(root / "config.json", lambda c: c["quantization_config"].update(changes))


BROKEN: dict[str, tuple[Spec, Callable[[Path], None], list[str], list[str]]] = {
    # name: checkpoint, what is done to it, further arguments, what the line must name
    "one expert's tensor missing": (SMALL, drop_tensor, [], [TENSOR, "is missing", "nothing is put in its place"]),
    "layer not converted": (
        replace(SMALL, plain_layers=(1,), dtype="bfloat16"),
        lambda root: None,
        [],
        [
            "model.layers.1.mlp.experts.0.gate_proj.weight is plain BF16",
            "modules_to_not_convert",
            "choose another layer",
        ],
    ),
    "plain layer that is not listed": (
        replace(SMALL, plain_layers=(1,)),
        with_settings(modules_to_not_convert=None),
        [],
        ["model.layers.1.mlp.experts.0.gate_proj.weight", "is not quantised", "modules_to_not_convert"],
    ),
    "packed layer that is listed": (
        SMALL,
        with_settings(modules_to_not_convert=["model.layers.1.mlp"]),
        [],
        ["model.layers.1.mlp.experts.0", "is quantised", "'model.layers.1.mlp'"],
    ),
    "intermediate 640 split in two": (
        replace(SMALL, intermediate=640, group_size=128, experts=2),
        lambda root: None,
        ["--tensor-parallel", "2"],
        ["640 split in 2 = 320", "group size 128", "use tensor parallel 1"],
    ),
    "zero points promised and missing": (
        replace(SMALL, layout="awq-symmetric"),
        drop_zero_points,
        [],
        ["model.layers.0.mlp.experts.0.gate_proj.qzeros", "is missing", "zero_point to false"],
    ),
    "zero points that should not be": (
        SMALL,
        with_settings(zero_point=False),
        [],
        ["qzeros", "holds zero points", "correct config.json"],
    ),
    "truncated shard": (
        SMALL,
        truncate,
        [],
        ["truncated", "ends at byte", "download model-00005-of-00005.safetensors"],
    ),
    "shard missing": (SMALL, remove_shard, [], ["model-00005-of-00005.safetensors", "no such file"]),
    "link that leaves the folder": (SMALL, outside_link, [], ["README.md", "/etc/hostname", "copy the file"]),
    "transposed tensor": (SMALL, reshape, [], [TENSOR, "I32 [8, 128]", "I32 [128, 8]"]),
    "more experts than configured": (SMALL, expert_too_many, [], ["belongs to expert 5", "has 5 experts"]),
    "index names another shard": (SMALL, other_index, [], [TENSOR, "model-00001-of-00005.safetensors by the index"]),
    "index names a path": (SMALL, climbing_index, [], ["../x.safetensors", "own folder"]),
    "8 bits": (SMALL, with_settings(bits=8), [], ["bits 8", "4-bit weights are read"]),
    "gemv packing": (SMALL, with_settings(version="gemv"), [], ["version 'gemv'", "gemm packing"]),
    "gptq": (SMALL, with_settings(quant_method="gptq"), [], ["quant_method 'gptq'"]),
    "another group size": (SMALL, with_settings(group_size=64), [], ["qzeros", "(and ", "I32 [2, 8]"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spec, damage, arguments, words = BROKEN[name]
    root = generate(tmp_path / "c", spec)
    damage(root)
    assert main(["checkpoint", "check", str(root), "--layer", "1", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    matching = [line for line in lines if all(word in line for word in words)]
    assert matching, lines
    assert all(line.startswith(str(tmp_path)) and line.count("; ") >= 2 for line in lines)


@pytest.mark.parametrize("name", sorted(set(BROKEN) - {"intermediate 640 split in two", "link that leaves the folder"}))
def test_broken_layer_is_never_read(tmp_path: Path, name: str) -> None:
    spec, damage, _, _ = BROKEN[name]
    root = generate(tmp_path / "c", spec)
    damage(root)
    with pytest.raises(InputError):
        read_layer(open_checkpoint(root), 1)


def test_whole_checkpoint_passes_and_everything_wrong_is_listed_in_one_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = generate(tmp_path / "c", replace(SMALL, layers=3, dense_layers=(2,)))
    assert main(["checkpoint", "check", str(root), "--layer", "1"]) == 0
    assert capsys.readouterr().err == ""
    drop_tensor(root)
    expert_too_many(root)
    truncate(root)
    assert main(["checkpoint", "check", str(root)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for words in ("truncated", f"{TENSOR}: is missing", "belongs to expert 5"):
        assert any(words in line for line in lines), words


def test_two_prefixes_for_one_layer_are_refused(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)

    def change(header: dict[str, Any], tensor: str) -> None:
        header[f"model.{tensor}"] = header.pop(tensor)

    rewrite_shard(root, change, TENSOR)
    with pytest.raises(InputError, match=r"layer 1 is found under 'model\.' and 'model\.model\.'"):
        read_layer(open_checkpoint(root), 1)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff" * 16, "allows"),
        (b"", "truncated"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a mapping"),
        (b'\x0f\0\0\0\0\0\0\0{"a":1,"a":2}  ', "twice"),
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, header: bytes, words: str) -> None:
    root = generate(tmp_path / "c", replace(SMALL, shards=1))
    (root / "model.safetensors").write_bytes(header)
    with pytest.raises(InputError, match=words):
        read_layer(open_checkpoint(root), 0)


def test_ranges_are_runs() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


@pytest.mark.parametrize("dtype", [["F16"], {"F16": 1}, None])
def test_a_dtype_that_is_no_text_is_refused(tmp_path: Path, dtype: object) -> None:
    root = generate(tmp_path / "c", SMALL)
    rewrite_shard(root, lambda header, tensor: header[tensor].update(dtype=dtype), TENSOR)
    with pytest.raises(InputError, match="has dtype"):
        read_layer(open_checkpoint(root), 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rms_norm_eps", value) for value in (None, "", True, -1e-6, float("nan"), 10**400)),
        *((key, 10**9) for key in ("num_experts", "num_hidden_layers", "hidden_size", "moe_intermediate_size")),
    ],
)
def test_a_number_that_no_model_has_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    root = generate(tmp_path / "c", SMALL)
    edit_json(root / "config.json", lambda c: c.update({key: value}))
    assert main(["checkpoint", "check", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{root}/config.json: {key} is ")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_generated_checkpoint_of_every_family_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    root = generate(tmp_path / "c", replace(SMALL, model_type=model_type))
    assert main(["checkpoint", "check", str(root)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-k 9 --experts 2", "top-k 9; there are 2 experts"),
        ("--dtype float32", "'float32' is not one of 'float16', 'bfloat16'"),
        ("--group-size 48", "group size 48; the kernel takes 32, 64, 128"),
        ("--plain-layer 99", "layer 99; layers are 0 to 1"),
        ("--hidden 64 --group-size 32", "hidden 64; a multiple of 128"),
        ("--intermediate 64", "intermediate 64; a multiple of 128"),
        ("--revision ../../../escaped", "revision '../../../escaped'; a plain name"),
        ("--revision .", "revision '.'; a plain name"),
        ("--revision=", "revision ''; a plain name"),
    ],
)
def test_what_is_generated_is_what_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert main(["checkpoint", "generate", str(tmp_path / "a" / "b" / "c"), *options.split()]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_one_group_over_k_is_reported_as_the_operator_sees_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank's share of W2 has 128 rows, which are one group of 128: one scale per column."""
    root = generate(tmp_path / "c", replace(SMALL, hidden=256, intermediate=256, group_size=128, experts=2))
    assert main(["checkpoint", "check", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("tensor parallel 1: W13 N=512, K=256, group 128; W2 N=256, K=256, group 128" in line for line in lines)
    assert any("tensor parallel 2: W13 N=256, K=256, group 128; W2 N=256, K=128, one scale per column" in line
               for line in lines)  # fmt: skip
