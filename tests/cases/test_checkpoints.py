# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as other tools write, copy and break them. README.md beside this file has the source of each case."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import (
    INDEX,
    add,
    configure,
    edit,
    hollow,
    quantise,
    read_shard,
    rename,
    shard_of,
    shards,
    write_shard,
)
from safetensors.numpy import save_file

from routeblock.checkpoint import families
from routeblock.checkpoint.families import Family
from routeblock.checkpoint.folder import open_folder
from routeblock.checkpoint.generator import Spec, drawn_weights, generate
from routeblock.checkpoint.inputs import stand_in_inputs
from routeblock.checkpoint.layer import open_checkpoint, read_layer
from routeblock.checkpoint.manifest import write_manifest
from routeblock.cli import main
from routeblock.errors import InputError

SMALL = Spec(layers=2, experts=6, top_k=2, hidden=128, intermediate=64, group_size=32)
COMPRESSED = replace(SMALL, layout="compressed")
PLAIN_1 = {"plain_layers": (1,)}
EXPERTS_OF_1 = [f"model.layers.1.mlp.experts.{e}.{p}" for e in range(6) for p in ("gate_proj", "up_proj", "down_proj")]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
SHORT = "model.layers.1.mlp.experts.3.up_proj.qweight"


def packed_bits(root: Path, spec: Spec, layer: int) -> bool:
    """Whether the layer is read, and has the bits that were drawn for it."""
    found, wanted = read_layer(open_checkpoint(root), layer), drawn_weights(spec)
    pairs = [(found.packed(e, p), wanted(layer, e, p)) for e in (0, 3) for p in ("gate_proj", "up_proj", "down_proj")]
    return all(
        a.qweight.tobytes() == b.qweight.tobytes() and a.scales.tobytes() == b.scales.tobytes() for a, b in pairs
    )


def refused(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `routeblock checkpoint check` says on stderr when it refuses a checkpoint for layer 1."""
    assert main(["checkpoint", "check", str(root), "--layer", "1", *arguments]) == 2
    said = capsys.readouterr().err
    assert "download" not in said.replace("an unfinished download", "").replace("finish the download", "")
    return said


# Which checkpoints are read, bit for bit: what is done to one, and the layers that are read or plain then.
Change = Callable[[Path], object]
READ: dict[str, tuple[Spec, Change, dict[int, bool]]] = {
    "2 an entry that ends with a dot": (
        replace(SMALL, **PLAIN_1),
        lambda root: quantise(root, modules_to_not_convert=["model.layers.1.", "lm_head", "mlp.gate."]),
        {0: True, 1: False},
    ),
    "2 a dot before the entry": (
        replace(SMALL, **PLAIN_1),
        lambda root: quantise(root, modules_to_not_convert=[".layers.1."]),
        {0: True, 1: False},
    ),
    "3 ignore names each Linear": (
        replace(COMPRESSED, **PLAIN_1),
        lambda root: quantise(root, ignore=["lm_head", *EXPERTS_OF_1]),
        {0: True, 1: False},
    ),
    "3 ignore has a pattern on Linears": (
        replace(COMPRESSED, **PLAIN_1),
        lambda root: quantise(root, ignore=["lm_head", r"re:.*layers\.1\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]),
        {0: True, 1: False},
    ),
    "3 targets are a pattern that misses a layer": (
        replace(COMPRESSED, **PLAIN_1),
        lambda root: quantise(
            root,
            ignore=["lm_head"],
            config_groups={"group_0": {**GROUP, "targets": [r"re:.*layers\.0\.mlp\.experts.*"]}},
        ),
        {0: True, 1: False},
    ),
    "3 targets name each Linear": (
        replace(COMPRESSED, **PLAIN_1),
        lambda root: quantise(
            root,
            ignore=[],
            config_groups={"g": {**GROUP, "targets": [n.replace("layers.1.", "layers.0.") for n in EXPERTS_OF_1]}},
        ),
        {0: True, 1: False},
    ),
    "3 several groups, one has the experts": (
        COMPRESSED,
        lambda root: quantise(
            root,
            config_groups={
                "attention": {
                    "targets": [r"re:.*self_attn.*"],
                    "weights": {**WEIGHTS, "num_bits": 8, "strategy": "channel", "group_size": None},
                    "input_activations": {"num_bits": 8},
                },
                "experts": {**GROUP, "targets": [r"re:.*mlp\.experts.*"], "format": "pack-quantized"},
            },
            format="mixed-precision",
        ),
        {0: True, 1: True},
    ),
    "3 a class beside a pattern": (
        COMPRESSED,
        lambda root: quantise(
            root,
            config_groups={
                "rest": {**GROUP, "weights": {**WEIGHTS, "num_bits": 8}},
                "experts": {**GROUP, "targets": [r"re:.*experts\.\d+.*"]},
            },
        ),
        {0: True, 1: True},
    ),
    "4 num_local_experts": (
        SMALL,
        lambda root: configure(root, "num_experts", num_local_experts=6),
        {0: True, 1: True},
    ),
    "4 num_experts in a Mixtral": (
        replace(SMALL, model_type="mixtral"),
        lambda root: configure(root, "num_local_experts", num_experts=6),
        {0: True, 1: True},
    ),
    "5 dtypes that are not known, beside the layer": (
        SMALL,
        lambda root: [
            add(shard_of(root, SHORT), f"visual.{dtype}", (dtype, [2, size], bytes(size)))
            for dtype, size in (("F8_E8M0", 32), ("F4", 16), ("F6_E2M3", 24), ("C64", 64))
        ],
        {0: True, 1: True},
    ),
    "6 a copy in another shard, the index names the right one": (
        SMALL,
        lambda root: [
            add(p, SHORT, ("I32", [128, 8], bytes(4096))) for p in shards(root) if p != shard_of(root, SHORT)
        ],
        {0: True, 1: True},
    ),
    "6 tensors that the index does not name": (
        SMALL,
        lambda root: [add(p, "left.over", ("F16", [2], bytes(4))) for p in shards(root)],
        {0: True, 1: True},
    ),
    "6 an expert's tensor that the index forgot": (
        SMALL,
        lambda root: edit(root / INDEX, lambda i: i["weight_map"].pop(SHORT)),
        {0: True, 1: True},
    ),
    "7 a Mixtral with mlp.experts.N.gate_proj": (
        replace(SMALL, model_type="mixtral"),
        lambda root: (
            [
                rename(root, rf"block_sparse_moe\.(experts\.\d+\.){a}\b", rf"mlp.\1{b}")
                for a, b in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
            ]
            + [rename(root, "block_sparse_moe.gate", "mlp.gate")]
        ),
        {0: True, 1: True},
    ),
    "7 a Qwen3 with block_sparse_moe.experts.N.w1": (
        SMALL,
        lambda root: (
            [
                rename(root, rf"mlp\.(experts\.\d+\.){b}\b", rf"block_sparse_moe.\1{a}")
                for a, b in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
            ]
            + [rename(root, r"mlp\.gate", "block_sparse_moe.gate")]
        ),
        {0: True, 1: True},
    ),
    "27 an entry without the prefix of a vision model": (
        replace(SMALL, prefix="model.language_model.", model_type="qwen3_5_moe_text", **PLAIN_1),
        lambda root: quantise(root, modules_to_not_convert=["model.layers.1.", "self_attn", "shared_expert"]),
        {0: True, 1: False},
    ),
    "28 GPTQModel's dynamic leaves a layer out": (
        replace(SMALL, **PLAIN_1),
        lambda root: quantise(
            root, modules_to_not_convert=None, dynamic={r"-:model\.layers\.1\..*": {}}, checkpoint_format="gemm"
        ),
        {0: True, 1: False},
    ),
    "29 AutoRound with AWQ's packing": (
        replace(SMALL, **PLAIN_1),
        lambda root: configure(
            root,
            quantization_config={
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_awq",
                "bits": 4,
                "group_size": 32,
                "sym": False,
                "data_type": "int",
                "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in EXPERTS_OF_1},
            },
        ),
        {0: True, 1: False},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_checkpoint_is_read_as_its_writer_means_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spec, change, layers = READ[name]
    root = generate(tmp_path / "c", spec)
    change(root)
    assert main(["checkpoint", "check", str(root)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    for layer, packed in layers.items():
        if packed:
            assert packed_bits(root, spec, layer)
        else:
            assert f"layers {layer}: plain F16 experts, " in said
            with pytest.raises(InputError, match=r"is plain F16; .*choose another layer"):
                read_layer(open_checkpoint(root), layer)


REFUSED: dict[str, tuple[Spec, Change, list[str]]] = {
    "3 no group reaches the experts": (
        replace(COMPRESSED, plain_layers=(0, 1)),
        lambda root: quantise(root, config_groups={"g": {**GROUP, "targets": [r"re:.*self_attn.*"]}}),
        ["config.json", "no expert is quantised", "re:.*self_attn.*"],
    ),
    "3 one projection is left out": (
        COMPRESSED,
        lambda root: quantise(root, ignore=[r"re:.*layers\.1\..*\.down_proj$"]),
        ["model.layers.1.mlp.experts.0.down_proj.weight_packed", "is quantised", "ignore lists", "down_proj$"],
    ),
    "3 experts of two schemes": (
        COMPRESSED,
        lambda root: quantise(
            root,
            config_groups={
                "a": {**GROUP, "targets": [r"re:.*\.down_proj"]},
                "b": {**GROUP, "weights": {**WEIGHTS, "group_size": 64}},
            },
        ),
        ["group size 32", "group size 64", "all experts need one scheme"],
    ),
    "4 two spellings that disagree": (
        SMALL,
        lambda root: configure(root, num_local_experts=8),
        ["num_experts is 6, num_local_experts is 8", "two names of one setting"],
    ),
    "5 an unknown dtype where the experts need one": (
        SMALL,
        lambda root: [
            add(p, SHORT.replace("qweight", "scales"), ("F8_E8M0", [4, 64], bytes(256)))
            for p in [shard_of(root, SHORT.replace("qweight", "scales"))]
        ],
        [SHORT.replace("qweight", "scales"), "is F8_E8M0 [4, 64]"],
    ),
    "6 no index, and a tensor in two shards": (
        SMALL,
        lambda root: [(root / INDEX).unlink(), add(shards(root)[0], SHORT, ("I32", [128, 8], bytes(4096)))],
        [SHORT, "is also in model-00001-of-00005.safetensors"],
    ),
    "7 experts under names that nobody knows": (
        SMALL,
        lambda root: rename(root, r"experts\.(\d+)\.(gate|up|down)_proj", r"experts.\1.ffn_\2"),
        ["mlp.experts.N.ffn_gate.qweight", "mlp.gate.weight", "layout in docs"],
    ),
    "7 a layer without experts": (
        SMALL,
        lambda root: rename(root, r"\.experts\.", ".specialists."),
        ["layer 1 has no expert tensors; ", "mlp.specialists.N.gate_proj.qweight"],
    ),
    "8 a file of an unfinished download": (
        SMALL,
        lambda root: (root / "model-00003-of-00005.safetensors.incomplete").write_bytes(b"x"),
        ["model-00003-of-00005.safetensors.incomplete", "an unfinished download", "remove it"],
    ),
    "9 tensors that are all zeros": (
        SMALL,
        lambda root: [hollow(p) for p in shards(root)],
        ["experts.0.gate_proj.qweight", "expert 0, gate_proj, are all 0", "publisher"],
    ),
    "9 scales that are all zeros": (
        SMALL,
        lambda root: [
            add(p, n, (t[0], t[1], bytes(len(t[2]))))
            for p in shards(root)
            for n, t in read_shard(p).items()
            if n.endswith("layers.1.mlp.experts.4.down_proj.scales")
        ],
        ["the scales of expert 4, down_proj, are all 0"],
    ),
    "11 actorder is dynamic": (
        COMPRESSED,
        lambda root: quantise(root, config_groups={"g": {**GROUP, "weights": {**WEIGHTS, "actorder": "dynamic"}}}),
        ["actorder 'dynamic'", "columns in their own order"],
    ),
    "11 actorder is nobody's": (
        COMPRESSED,
        lambda root: quantise(root, config_groups={"g": {**GROUP, "weights": {**WEIGHTS, "actorder": "nonsense"}}}),
        ["actorder 'nonsense'", "columns in their own order"],
    ),
    "34 quantised outputs": (
        COMPRESSED,
        lambda root: quantise(root, config_groups={"g": {**GROUP, "output_activations": {"num_bits": 8}}}),
        ["output_activations are quantised", "weight-only"],
    ),
    "34 weights quantised when the model runs": (
        COMPRESSED,
        lambda root: quantise(root, config_groups={"g": {**GROUP, "weights": {**WEIGHTS, "dynamic": True}}}),
        ["dynamic True for weights", "quantised once"],
    ),
    "34 weights in blocks": (
        COMPRESSED,
        lambda root: quantise(
            root, config_groups={"g": {**GROUP, "weights": {**WEIGHTS, "block_structure": [128, 128]}}}
        ),
        ["block_structure [128, 128] for weights", "in groups"],
    ),
    "35 compressed-tensors without zero points": (
        COMPRESSED,
        lambda root: quantise(root, config_groups={"g": {**GROUP, "weights": {**WEIGHTS, "symmetric": False}}}),
        ["weight_zero_point: is missing", "or set symmetric to true in config.json"],
    ),
    "35 AutoRound without zero points": (
        replace(SMALL, layout="awq-symmetric"),
        lambda root: quantise(root, quant_method="auto-round", packing_format="auto_round:auto_awq", sym=False),
        ["qzeros: is missing", "or set sym to true in config.json"],
    ),
    "35 another quant_method": (
        SMALL,
        lambda root: quantise(root, quant_method="gptq"),
        ["quant_method 'gptq'; awq, auto-round and compressed-tensors are read"],
    ),
    "35 an epsilon that is NaN": (
        SMALL,
        lambda root: configure(root, rms_norm_eps=float("nan")),
        ["rms_norm_eps is nan; a number from 0 to 1 is needed"],
    ),
    "12 a shard is a Git LFS pointer": (
        SMALL,
        lambda root: [p.write_bytes(POINTER) for p in shards(root)],
        ["model-00002-of-00005.safetensors", "a Git LFS pointer of 131 bytes", "git lfs pull"],
    ),
    "12 config.json is a Git LFS pointer": (
        SMALL,
        lambda root: (root / "config.json").write_bytes(POINTER),
        ["config.json", "Git LFS pointer"],
    ),
    "12 the index is a Git LFS pointer": (
        SMALL,
        lambda root: (root / INDEX).write_bytes(POINTER),
        [INDEX, "Git LFS pointer"],
    ),
    "1 norm_topk_prob is null": (
        SMALL,
        lambda root: configure(root, norm_topk_prob=None),
        ["norm_topk_prob is None", "true or false"],
    ),
    "28 GPTQModel's dynamic stores a layer otherwise": (
        SMALL,
        lambda root: quantise(root, dynamic={r"+:.*layers\.1\..*": {"bits": 8}}),
        ["bits 8", "4-bit weights are read"],
    ),
    "29 AutoRound with GPTQ's packing": (
        SMALL,
        lambda root: quantise(root, quant_method="auto-round", packing_format="auto_round:auto_gptq", sym=True),
        ["packing_format 'auto_round:auto_gptq'"],
    ),
    "30 a rotation of activations at run time": (
        COMPRESSED,
        lambda root: quantise(
            root,
            transform_config={
                "config_groups": {
                    "v": {
                        "type": "hadamard",
                        "apply": [
                            {"targets": ["Linear"], "location": "input", "ignore": "lm_head"},
                            {"targets": ["Linear"], "location": "weight_input", "inverse": True},
                        ],
                    }
                }
            },
        ),
        ["transform_config v changes the input of model.layers.", ".mlp.experts.0.", "run-time transforms"],
    ),
    "30 weights of which two in four are left out": (
        COMPRESSED,
        lambda root: quantise(root, sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ["sparsity_config of format 'sparse-24-bitmask'", "dense weights are read"],
    ),
}


def fill(root: Path, ending: str, change: Callable[[bytes], bytes]) -> None:
    """Change the data of every tensor whose name ends so."""
    for path in shards(root):
        tensors = read_shard(path).items()
        write_shard(path, {n: (t[0], t[1], change(t[2]) if n.endswith(ending) else t[2]) for n, t in tensors})


def fixture_says(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The line with which `checkpoint-fixture` refuses layer 1."""
    write_manifest(open_folder(root), tmp_path / "m", 1)
    out, files = tmp_path / "out" / "fixture", tmp_path / "m" / "files.json"
    command = ["checkpoint", "fixture", str(root), "--manifest", str(files), "--layer", "1", "--out", str(out)]
    assert main([*command, *(more or [word for token in "1234" for word in ("--token-id", token)])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not out.exists()
    return line


ONE = "layers.1.mlp.experts.4.down_proj."


@pytest.mark.parametrize(
    ("spec", "ending", "change", "words"),
    [
        (SMALL, ONE + "qweight", lambda b: b[: len(b) // 2] + bytes(len(b) // 2), "are all 0 in rows 32 to 63"),
        (COMPRESSED, ONE + "weight_packed", lambda b: b[:-1024] + bytes(1024), "are all 0 in columns 96 to 127"),
        (SMALL, ONE + "scales", lambda b: b[:-6] + bytes(6), "the scales of expert 4, down_proj, have 3 zeros"),
        (SMALL, ONE + "scales", lambda b: b"\x00\x7c" + b[2:], "hold an infinity or NaN"),
        (COMPRESSED, ONE + "weight_scale", lambda b: b[:-2] + b"\x00\x7e", "hold an infinity or NaN"),
    ],
    ids=["rows of weights", "columns of weights", "some scales", "an infinite scale", "a NaN"],
)
def test_an_expert_without_all_its_data_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spec: Spec,
    ending: str,
    change: Callable[[bytes], bytes],
    words: str,
) -> None:
    root = generate(tmp_path / "c", spec)
    fill(root, ending, change)
    (line,) = refused(root, capsys).splitlines()
    assert f"{ending}: " in line and words in line and ".safetensors: tensor model." in line
    captured = tmp_path / "captured.safetensors"  # the fixture stores every expert, whether a route uses it or not
    tensors = {"hidden": np.ones((3, 128), np.float16), "topk_ids": np.array([[0, 1], [2, 3], [4, 5]], np.int32)}
    save_file({**tensors, "topk_weights": np.full((3, 2), 0.5, np.float32)}, captured)
    assert fixture_says(root, tmp_path, capsys, "--captured", str(captured)) == line


def test_an_expert_whose_scales_are_equal_is_read(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)
    fill(root, ONE + "scales", lambda b: b[:2] * (len(b) // 2))
    assert main(["checkpoint", "check", str(root), "--layer", "1"]) == 0


@pytest.mark.parametrize(
    ("ending", "kept", "words"),
    [
        ("layers.1.mlp.gate.weight", 0, "is all 0; "),
        ("layers.1.mlp.gate.weight", 4, "is all 0 in the row of expert 4"),
        ("layers.1.post_attention_layernorm.weight", 0, "is all 0; "),
        ("embed_tokens.weight", 0, "is all 0 in the rows of these tokens"),
        ("embed_tokens.weight", 3, "is all 0 in the row of token 3"),
    ],
)
def test_a_router_norm_or_embedding_without_data_is_refused_where_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, kept: int, words: str
) -> None:
    root = generate(tmp_path / "c", SMALL)
    fill(root, ending, lambda b: b[: kept * 256] + bytes(len(b) - kept * 256))
    line = fixture_says(root, tmp_path, capsys)
    assert f"{ending} {words}" in line and ".safetensors: tensor model." in line


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.embed_tokens.weight",
        SHORT,
    ],
)
def test_a_tensor_that_its_index_s_shard_does_not_hold_is_read_from_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensor: str, copies: int
) -> None:
    root = generate(tmp_path / "c", SMALL)
    here = shard_of(root, tensor)
    third, second = [p for p in shards(root) if p != here][:2]
    if copies == 2:
        add(second, tensor, read_shard(here)[tensor])
    edit(root / INDEX, lambda i: i["weight_map"].update({tensor: third.name}))
    for line in (refused(root, capsys).strip(), fixture_says(root, tmp_path, capsys)):
        assert tensor in line and f"is in {third.name} by the index" in line
        assert here.name in line or second.name in line


def test_a_tensor_that_the_index_does_not_name_is_found_in_any_shard(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)
    here, name = shard_of(root, SHORT), SHORT.replace("qweight", "scales")
    tensors = read_shard(here)
    write_shard(here, {n: t for n, t in tensors.items() if n != name})
    write_shard(root / "extra.safetensors", {name: tensors[name], "z": ("F16", [1], b"\0\0")})
    edit(root / INDEX, lambda i: (i["weight_map"].pop(name), i["weight_map"].update(z="extra.safetensors")))
    assert main(["checkpoint", "check", str(root)]) == main(["checkpoint", "check", str(root), "--layer", "1"]) == 0
    assert packed_bits(root, SMALL, 1)


@pytest.mark.parametrize("more", [(), ("--confirm",)])
def test_a_lane_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    root = generate(tmp_path / "c", SMALL)
    line = fixture_says(root, tmp_path, capsys, "--token-id", "1", "--token-id", "2", "--point", "published:foo", *more)
    assert "lane 'foo' is not known" in line


def test_captured_inputs_that_are_no_file_are_refused_unopened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = generate(tmp_path / "c", SMALL)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path), str(tmp_path / "pipe")):
        assert f"{path}: not a regular file" in fixture_says(root, tmp_path, capsys, "--captured", path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_one_line_with_a_way_out_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spec, change, words = REFUSED[name]
    root = generate(tmp_path / "c", spec)
    change(root)
    lines = refused(root, capsys).splitlines()
    assert [line for line in lines if all(word in line for word in words)], lines
    with pytest.raises(InputError):
        layer = read_layer(open_checkpoint(root), 1)
        for expert in range(spec.experts):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                if fault := layer.data_fault(expert, projection):
                    raise fault
        if unfinished := open_folder(root).unfinished():
            raise unfinished[0]


def test_a_rotation_that_is_merged_into_the_weights_is_read(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", COMPRESSED)
    merged = {"type": "hadamard", "apply": [{"targets": [r"re:.*down_proj$"], "location": "weight_output"}]}
    elsewhere = {"type": "hadamard", "apply": [{"targets": [r"re:.*o_proj$"], "location": "input"}]}
    quantise(root, transform_config={"config_groups": {"R1": merged, "R2": elsewhere}})
    assert packed_bits(root, COMPRESSED, 1)


@pytest.mark.parametrize("index", [True, False])
def test_files_that_a_file_manager_left_are_no_part_of_a_checkpoint(tmp_path: Path, index: bool) -> None:
    root = generate(tmp_path / "c", SMALL)
    if not index:
        (root / INDEX).unlink()
    files, _ = write_manifest(open_folder(root), tmp_path / "clean", 1)
    for name in ("._model-00001-of-00005.safetensors", ".DS_Store", "Thumbs.db", "desktop.ini"):
        (root / name).write_bytes(b"\0\5\x16\7" + bytes(60))
    (root / "original").mkdir()
    (root / "original" / "._consolidated.safetensors").write_bytes(b"x")
    assert main(["checkpoint", "check", str(root), "--layer", "1"]) == 0
    assert packed_bits(root, SMALL, 1)
    again, _ = write_manifest(open_folder(root), tmp_path / "littered", 1)
    assert again.read_bytes() == files.read_bytes()


def test_original_weights_beside_numbered_shards_are_not_taken_for_shards(tmp_path: Path) -> None:
    root = generate(tmp_path / "c", SMALL)
    (root / INDEX).unlink()
    names = {SHORT.removeprefix("model."): np.zeros((128, 8), np.int32)}
    (root / "original").mkdir()
    for name in ("consolidated.safetensors", "original/consolidated.safetensors"):
        save_file(names, root / name)
    assert main(["checkpoint", "check", str(root), "--layer", "1"]) == 0
    assert packed_bits(root, SMALL, 1)


def test_a_missing_shard_is_noticed_without_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = generate(tmp_path / "c", SMALL)
    (root / INDEX).unlink()
    shards(root)[-1].unlink()
    assert "model-00005-of-00005.safetensors: no such file" in refused(root, capsys)


# Routing: what a family does where config.json says nothing.
@pytest.mark.parametrize(
    ("model_type", "prob", "divided"),
    [
        ("qwen3_vl_moe", "absent", True),
        ("qwen3_vl_moe_text", False, True),  # its router does not look at the key
        ("qwen3_next", "absent", True),
        ("qwen3_next", False, False),
        ("qwen3_omni_moe_text", "absent", True),
        ("qwen3_5_moe_text", "absent", True),
        ("mixtral", "absent", True),
        ("qwen2_moe", "absent", False),
        ("qwen3_moe", "absent", False),
        ("qwen3_moe", True, True),
        ("olmoe", "absent", False),
        ("jamba", True, False),
    ],
)
def test_top_k_weights_sum_to_one_where_the_family_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str, prob: object, divided: bool
) -> None:
    root = generate(tmp_path / "c", replace(SMALL, model_type=model_type))
    configure(root, "norm_topk_prob", **({} if prob == "absent" else {"norm_topk_prob": prob}))
    checkpoint = open_checkpoint(root)
    inputs = stand_in_inputs(checkpoint, read_layer(checkpoint, 1), token_ids=[1, 2, 3, 4, 5])
    sums = inputs.topk_weights.sum(axis=1)
    assert (np.abs(sums - 1) < 1e-6).all() == divided
    assert main(["checkpoint", "check", str(root)]) == 0
    assert f"weights {'' if divided else 'not '}divided by their sum" in capsys.readouterr().out


def test_a_default_that_nobody_knows_is_refused_and_never_taken_as_false(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = generate(tmp_path / "c", SMALL)
    monkeypatch.setitem(families.FAMILIES, "new_moe", Family("new_moe"))
    configure(root, "norm_topk_prob", model_type="new_moe")
    assert "norm_topk_prob is absent; the default of new_moe is not known" in refused(root, capsys)
    configure(root, norm_topk_prob=True)
    assert open_checkpoint(root).model.renormalise is True


@pytest.mark.parametrize(("model_type", "eps"), [("qwen3_moe", 1e-6), ("olmoe", 1e-5), ("mixtral", 1e-5)])
def test_an_absent_norm_epsilon_is_the_familys(tmp_path: Path, model_type: str, eps: float) -> None:
    root = generate(tmp_path / "c", replace(SMALL, model_type=model_type))
    configure(root, "rms_norm_eps")
    assert open_checkpoint(root).model.norm_eps == eps


# Which layers have experts, and how many: keys of other families. What is done to config.json, and what is read then.
KEYS: dict[str, tuple[Spec, dict[str, Any], tuple[int, ...], tuple[int, int]]] = {
    "23 Jamba counts by period and offset": (
        replace(SMALL, model_type="jamba"),
        {"expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 6},
        (1, 3, 5),
        (6, 2),
    ),
    "24 ERNIE 4.5 names everything moe_": (
        replace(SMALL, model_type="ernie4_5_moe"),
        {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2, "num_hidden_layers": 6},
        (1, 3),
        (6, 2),
    ),
    "25 MiMo-V2 marks layers in moe_layer_freq": (
        replace(SMALL, model_type="mimo_v2_flash"),
        {"moe_layer_freq": [0, 1, 1, 0], "num_hidden_layers": 4},
        (1, 2),
        (6, 2),
    ),
    "25 transformers 5 names layers dense and sparse": (
        replace(SMALL, model_type="glm4_moe"),
        {"mlp_layer_types": ["dense", "sparse", "dense"], "num_hidden_layers": 3, "first_k_dense_replace": 0},
        (1,),
        (6, 2),
    ),
    "26 Hunyuan gives one number a layer": (
        replace(SMALL, model_type="hunyuan_v1_moe"),
        {"num_experts": [6, 6], "moe_topk": [2, 2], "moe_intermediate_size": [64, 64]},
        (0, 1),
        (6, 2),
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_other_families_are_read(tmp_path: Path, name: str) -> None:
    spec, values, layers, counts = KEYS[name]
    root = generate(tmp_path / "c", spec)
    configure(root, **values)
    found = open_checkpoint(root).model
    assert found.moe_layers == layers and (found.num_experts, found.top_k) == counts


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_experts": [6, 8]}, r"num_experts is \[6, 8\]"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types of 1 entries"),
        ({"mlp_layer_types": ["dense", "moe"]}, "'sparse' or 'dense' for each of 2 layers"),
    ],
)
def test_lists_that_do_not_fit_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    root = generate(tmp_path / "c", SMALL)
    configure(root, **values)
    with pytest.raises(InputError, match=words):
        open_checkpoint(root)


def test_the_decoder_of_qwen3_omni_is_its_thinker_s(tmp_path: Path) -> None:
    spec = replace(SMALL, model_type="qwen3_omni_moe", prefix="thinker.model.")
    root = generate(tmp_path / "c", spec)

    def nest(config: dict[str, Any]) -> None:
        text = {k: config.pop(k) for k in list(config) if k not in ("model_type", "quantization_config")}
        config["thinker_config"] = {"text_config": {**text, "model_type": "qwen3_omni_moe_text"}}
        config["talker_config"] = {"text_config": {**text, "num_experts": 4}}

    edit(root / "config.json", nest)
    add(shards(root)[0], SHORT.replace("model.", "talker.model."), ("I32", [128, 8], bytes(4096)))
    assert packed_bits(root, spec, 1)


def test_quantisation_that_is_declared_for_the_text_model_alone_is_read(tmp_path: Path) -> None:
    spec = replace(COMPRESSED, model_type="kimi_k2", prefix="language_model.model.")
    root = generate(tmp_path / "c", spec)

    def nest(config: dict[str, Any]) -> None:
        text = {k: config.pop(k) for k in list(config)}
        config.update(model_type="kimi_k25", text_config=text, vision_config={"num_hidden_layers": 3})

    edit(root / "config.json", nest)
    assert packed_bits(root, spec, 1)


def test_minimax_m2_is_read_under_mixtral_s_names(tmp_path: Path) -> None:
    spec = replace(SMALL, model_type="minimax_m2")
    root = generate(tmp_path / "c", spec)
    assert packed_bits(root, spec, 1)
    assert open_checkpoint(root).model.renormalise is None  # sigmoid and a bias


# Captured routing.
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[0, 1], [2, 3], [-1, -1]], "topk_ids row 2, slot 0 is -1; experts are 0 to 5"),
        ([[0, 1], [2, 6], [4, 5]], "topk_ids row 1, slot 1 is 6; experts are 0 to 5"),
        (
            [[0, 1], [3, 3], [4, 5]],
            "topk_ids row 1, slot 1 is 3, as slot 0 is; the top-k experts of a token are distinct",
        ),
    ],
)
def test_padded_and_repeated_routes_are_refused_by_row_and_slot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: list[list[int]], words: str
) -> None:
    root = generate(tmp_path / "c", SMALL)
    write_manifest(open_folder(root), tmp_path / "m", 1)
    captured = tmp_path / "captured.safetensors"
    tensors = {
        "hidden": np.ones((3, 128), np.float16),
        "topk_ids": np.array(ids, np.int32),
        "topk_weights": np.full((3, 2), 0.5, np.float32),
    }
    save_file(tensors, captured)
    out = tmp_path / "out" / "fixture"
    command = ["checkpoint", "fixture", str(root), "--manifest", str(tmp_path / "m" / "files.json"), "--layer", "1"]
    assert main([*command, "--captured", str(captured), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{captured}: {words}" + line[len(f"{captured}: {words}") :]
    assert line.endswith("remove such rows from hidden, topk_ids and topk_weights")
    assert not out.exists()
