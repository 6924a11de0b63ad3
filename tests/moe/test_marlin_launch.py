# SPDX-License-Identifier: Apache-2.0
"""The selection's rule against every launch that was read off or published, and the facts that it stands on."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from routeblock.errors import InputError
from routeblock.moe.automatic_launch import automatic_launch
from routeblock.moe.devices import CAPABILITIES, DEVICES, device
from routeblock.moe.kernels import Kernel, block_size_tokens, kernel_for
from routeblock.moe.launches import PUBLISHED_LAYER, SELECTED, Launch, SelectedLaunch
from routeblock.moe.marlin_launch import (
    GROUPS,
    Gemm,
    Weights,
    register_tables,
    registers_for,
    select,
    version_key,
)
from routeblock.moe.partition import BLOCK_SIZES, thread_sizes
from routeblock.moe.routing import block_size_for
from routeblock.moe.shared_memory import shared_memory
from routeblock.moe.sources import Source
from routeblock.twin.self_test_inputs import CASES

ROOT = Path(__file__).parents[2]
STUDY_BUILD = (
    "0.22.0"  # the study's commit lies beside this release; the registers of sm_80 are one table from 0.20.2 on
)
READ_OFF = [
    (entry, n, k)
    for entry in SELECTED
    if entry.status is not Source.ASSUMED
    for n, k in (PUBLISHED_LAYER if entry.n is None else ((entry.n, entry.k or 0),))
]


@pytest.mark.parametrize(("entry", "n", "k"), READ_OFF, ids=lambda x: getattr(x, "source", str(x)))
def test_the_rule_gives_every_launch_that_was_read_off(entry: SelectedLaunch, n: int, k: int) -> None:
    version = STUDY_BUILD if entry.gpu == "RTX 3090" else entry.version
    gpu = DEVICES[entry.gpu]
    table = registers_for(gpu.facts.kernel_target, version)
    assert table is not None
    weights = Weights(entry.dtype, entry.zero_points, entry.group_size or -1)
    for routes in (entry.routes, 168 + entry.routes, 32768):
        chosen = select(gpu, table[0], weights, entry.block_size, Gemm(n, k, routes))
        assert chosen is not None
        assert Launch(chosen.thread_k, chosen.thread_n, gpu.sms * chosen.blocks_per_sm) == entry.launch


def test_every_recorded_automatic_launch_of_the_evidence_is_in_the_table() -> None:
    evidence = ROOT / "fixtures/recorded/h200-vllm0.24.0"
    for path in sorted((evidence / "versions").glob("*.json")):
        document = json.loads(path.read_bytes())
        for gemm, (n, k) in zip(("w13", "w2"), PUBLISHED_LAYER, strict=True):
            (seen,) = document["automatic launch"][gemm]
            found = automatic_launch(DEVICES["H200"], path.stem, Weights("float16", True, 128), 8, Gemm(n, k, 168))
            assert (found.launch, found.source) == (Launch(*seen["launch"]), Source.RECORDED)
    automatic = [json.loads(line) for line in (evidence / "auto.stored.jsonl").open()]
    (prediction,) = (g["documents"]["prediction.json"] for g in automatic if "prediction.json" in g["documents"])
    assert prediction["launches"] == {"w13": [128, 64, 528], "w2": [128, 64, 528]}


def test_golden_cases_at_automatic_launches_are_in_the_table() -> None:
    names = {"f16": "float16", "bf16": "bfloat16"}
    for case in CASES.values():
        weights = Weights(names[case.dtype], case.has_zero_points, case.group_size)
        gemm = Gemm(case.n, case.k, case.tokens * case.top_k)
        found = automatic_launch(DEVICES["H200"], "0.24.0", weights, case.block_size, gemm)
        assert (found.launch, found.source) == (Launch(*case.launch), Source.RECORDED)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("A10", 216), ("RTX 3090", 246), ("RTX A6000", 252), ("L4", 174), ("RTX 4090", 384), ("L40S", 426)],
)
def test_gpus_that_run_the_sm_80_code_take_three_blocks_of_64_by_128(name: str, grid: int) -> None:
    found = automatic_launch(DEVICES[name], "0.24.0", Weights("float16", True, 128), 8, Gemm(1536, 2048, 168))
    assert (found.launch, found.source) == (Launch(64, 128, grid), Source.DERIVED)
    assert "registers" in found.basis


def test_the_choice_turned_on_an_h200_between_0_29_and_0_30_by_one_register() -> None:
    weights, gemm = Weights("float16", True, 128), Gemm(1536, 2048, 168)
    launches, registers = [], []
    for version in ("0.29.0", "0.30.0"):
        table = registers_for("sm_90", version)
        assert table is not None
        registers.append(table[0].get(weights, 8, 64, 128, 128))
        launches.append(automatic_launch(DEVICES["H200"], version, weights, 8, gemm).launch)
    assert launches == [Launch(128, 64, 528), Launch(64, 128, 528)]
    assert registers == [128, 127]  # 4 blocks of 128 threads fit with 127 registers, 3 with 128


def test_few_routes_lower_the_blocks_an_sm() -> None:
    weights = Weights("float16", True, 128)
    found = automatic_launch(DEVICES["RTX 4090"], "0.24.0", weights, 8, Gemm(512, 1024, 4))
    assert found.launch is not None
    assert found.launch.grid == 128  # 512 / 128 x 4 x 4 = 64 tiles at most: one block an SM


def test_the_cache_is_what_the_operator_counts() -> None:
    # By hand, (64, 128), block 8, group 128: activations 4 x 16 x 64 x 2, weights 4 x 64 x 128 / 2, scales 4 x 256,
    # zero points a quarter of them, ids 256.
    assert shared_memory(64, 128, 8, 128, True) == 8192 + 16384 + 1024 + 256 + 256
    assert shared_memory(64, 128, 8, 32, False) == 8192 + 16384 + 2048 + 256
    assert shared_memory(64, 256, 64, -1, False) == 4 * 64 * 64 * 2 + 64 * 264 * 2 + 2048 + 1024


def test_unopened_releases_are_assumed_and_missing_code_is_not_guessed() -> None:
    weights, gemm = Weights("float16", True, 128), Gemm(1536, 2048, 168)
    assert automatic_launch(DEVICES["RTX 3090"], "0.40.0", weights, 8, gemm).source is Source.ASSUMED
    found = automatic_launch(DEVICES["B200"], "0.33.0", weights, 8, gemm)
    assert found.launch is None
    assert found.basis.startswith("cannot derive")
    assert automatic_launch(DEVICES["RTX 5090"], "0.22.0", weights, 8, gemm).launch is None
    assert automatic_launch(DEVICES["RTX 5090"], "0.33.0", weights, 8, gemm).launch is not None


def test_the_register_tables_are_whole_and_do_not_overlap() -> None:
    tables = register_tables()
    for table in tables:
        for dtype in ("float16", "bfloat16"):
            for zero_points in (True, False):
                for block in BLOCK_SIZES:
                    for thread_k, thread_n in thread_sizes(block):
                        for group in GROUPS:
                            found = table.get(Weights(dtype, zero_points, group), block, thread_k, thread_n, group)
                            assert found is not None
                            assert 32 < found <= 255
        others = [t for t in tables if t is not table and t.target == table.target]
        first, last = version_key(table.first), version_key(table.last)
        assert all(version_key(t.last) < first or last < version_key(t.first) for t in others)


def test_kernel_names_are_read_as_the_recorded_launch_has_them() -> None:
    sys.path.insert(0, str(ROOT / "tests/gpu"))
    from read_registers import key

    document = json.loads((ROOT / "fixtures/recorded/h200-vllm0.24.0/versions/0.33.0.json").read_bytes())
    (seen,) = document["automatic launch"]["w13"]
    assert key(seen["kernel"]) == ("float16", "u4", 8, 64, 128, 128)
    assert key("_ZN4vllm3moe40lora_count") is None


def test_sms_are_cores_by_cores_an_sm() -> None:
    for gpu in DEVICES.values():
        cores = [int(w.replace(",", "")) for w in gpu.basis.replace(";", "").split() if "," in w and w[0].isdigit()]
        assert not cores or cores[0] == gpu.sms * CAPABILITIES[gpu.capability].cores_per_sm


def test_gpus_are_found_by_the_names_that_people_use() -> None:
    assert device("NVIDIA GeForce RTX 3090").name == device("rtx-3090").name == "RTX 3090"
    with pytest.raises(InputError, match="use H20 or H200"):
        device("H20O")


@pytest.mark.parametrize(
    ("gpu", "version", "invariant", "kernel"),
    [
        ("RTX 3090", "0.20.2", True, Kernel.MARLIN),
        ("H200", "0.24.0", False, Kernel.MARLIN),
        ("H200", "0.24.0", True, Kernel.REFUSED),
        ("H200", "0.27.1", True, Kernel.EMULATION),
        ("L40S", "0.31.0", True, Kernel.HUMMING_INVARIANT),
        ("H200", "0.31.0", False, Kernel.MARLIN),
        ("H200", "0.32.0", False, Kernel.HUMMING),
        ("B200", "0.33.0", False, Kernel.MARLIN),
        ("RTX 4090", "0.33.0", False, Kernel.MARLIN),
        ("RTX 4090", "0.33.0", True, Kernel.HUMMING_INVARIANT),
    ],
)
def test_each_release_runs_the_kernel_that_its_files_choose(
    gpu: str, version: str, invariant: bool, kernel: Kernel
) -> None:
    assert kernel_for(DEVICES[gpu], version, invariant).kernel is kernel


@pytest.mark.parametrize(
    ("gpu", "version", "invariant", "kernel"),
    [
        ("L40S", "0.31.0", False, Kernel.MARLIN),
        ("L40S", "0.26.0", True, Kernel.EMULATION),
        ("L40S", "0.27.0", True, Kernel.TRITON),
        ("H200", "0.31.0", True, Kernel.TRITON),
        ("H200", "0.33.0", True, Kernel.HUMMING_INVARIANT),
        ("B200", "0.31.0", False, Kernel.FLASHINFER),
    ],
)
def test_other_layouts_than_autoawqs_reach_other_kernels(
    gpu: str, version: str, invariant: bool, kernel: Kernel
) -> None:
    assert kernel_for(DEVICES[gpu], version, invariant, awq=False).kernel is kernel


def test_a_backend_can_be_forced_and_a_release_that_was_not_opened_says_so() -> None:
    h200 = DEVICES["H200"]
    assert kernel_for(h200, "0.33.0", False, "marlin").kernel is Kernel.MARLIN
    assert kernel_for(h200, "0.33.0", True, "marlin").kernel is Kernel.REFUSED
    assert not kernel_for(h200, "0.34.0", False).opened
    assert kernel_for(h200, "0.26.0", True, "humming").kernel is Kernel.REFUSED
    with pytest.raises(InputError, match=r"from 0\.25 on"):
        kernel_for(h200, "0.24.0", False, "humming")
    with pytest.raises(InputError, match=r"releases from 0\.20\.2"):
        kernel_for(h200, "0.11.0", False)


def test_expert_parallelism_changes_the_block_size_until_0_25_and_hardly_from_0_26_on() -> None:
    sizes = {
        version: [block_size_for(block_size_tokens(version, 128, 128, local), 4, local) for local in (128, 16, 8)]
        for version in ("0.25.0", "0.26.0")
    }
    assert sizes == {"0.25.0": [8, 48, 64], "0.26.0": [8, 8, 8]}


def test_a_table_entry_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEVICES["H200"].sms = 133  # type: ignore[misc]
