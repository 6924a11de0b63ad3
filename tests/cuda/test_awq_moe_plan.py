# SPDX-License-Identifier: Apache-2.0
"""How the layer's kernels are launched, and that they compile: without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from routeblock.cuda import awq_moe, nvrtc
from routeblock.cuda.awq_moe_plan import FORMS, SHARED_BYTES, SHARED_BYTES_SM, Sizes, blocks_bound, plan
from routeblock.errors import InputError
from routeblock.moe.routing import align

LAYER = Sizes(64, 8, 128, 2048, 768)


@pytest.mark.parametrize(("architecture", "kind"), [*zip(awq_moe.ARCHITECTURES, awq_moe.KINDS, strict=True)])
def test_the_layer_compiles(architecture: str, kind: str) -> None:
    cubin = awq_moe.compile_for(architecture, kind)
    assert nvrtc.cubin_architecture(cubin.code) == architecture
    assert not cubin.log


@pytest.mark.parametrize("architecture", SHARED_BYTES)
@pytest.mark.parametrize("tokens", [1, 4, 21, 64, 256, 1024, 16384])
def test_what_serves_a_size_fits_the_gpu(architecture: str, tokens: int) -> None:
    for group in (32, 64, 128, -1):
        chosen = plan(replace(LAYER, tokens=tokens, group_size=group), architecture=architecture)
        for launch in (chosen.w13, chosen.w2):
            assert launch.shared_bytes <= 1024 * SHARED_BYTES[architecture]
            assert launch.form.tokens == chosen.block_size and launch.grid >= 1


def test_forms_hold_as_many_blocks_of_threads_as_they_say() -> None:
    for form in FORMS.values():
        assert form.resident * (form.shared_bytes(LAYER, "w13") + 1024) <= 1024 * SHARED_BYTES_SM["sm_90"], form.name


def test_the_launch_follows_from_sizes_alone_and_no_grid_is_larger_than_the_work() -> None:
    one = plan(replace(LAYER, tokens=1))
    assert one == plan(replace(LAYER, tokens=1)) and one.block_size == 8
    assert one.w13.grid <= 8 * 12 and one.w2.grid <= 8 * 32


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_no_alignment_has_more_blocks_than_the_bound(block_size: int) -> None:
    rng = np.random.default_rng(0)
    for tokens in (1, 3, 17, 90):
        for spread in (1, 2, 6):
            sizes = Sizes(tokens, 2, 6, 64, 64, 32)
            ids = np.argsort(rng.random((tokens, 6)) ** spread, 1)[:, :2]
            assert align(ids, 6, block_size).num_blocks <= blocks_bound(sizes, block_size)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"intermediate": 96}, "intermediate size 96"),
        ({"hidden": 2000}, "hidden size 2000"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"group_size": 48}, "group size 48"),
        ({"group_size": 512}, "group size 512"),
        ({"tokens": 0}, "0 tokens"),
        ({"experts": 0}, "0 experts"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=f"{told}.*leave this layer to vLLM's path"):
        replace(LAYER, **change)  # type: ignore[arg-type]


def test_a_block_size_without_a_form_is_refused() -> None:
    with pytest.raises(InputError, match="blocks of 48 routes"):
        plan(LAYER, block_size=48)
