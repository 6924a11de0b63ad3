# SPDX-License-Identifier: Apache-2.0
"""What a call of the GPU alignment refuses, which variant serves what, and that the source compiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from routeblock.cuda import align, align_kernels
from routeblock.cuda.align_variants import MAX_EXPERTS, VARIANTS, Gpu, Kind, Problem, serving
from routeblock.errors import InputError

H200 = Gpu((9, 0), 227 * 1024)
TURING = Gpu((7, 5), 64 * 1024)
ADA = Gpu((8, 9), 99 * 1024)


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True)
class Tensor:
    """As much of a torch tensor as the checks look at."""

    shape: tuple[int, ...]
    dtype: str = "torch.int32"
    device: Device = Device("cuda", 0)
    contiguous: bool = True
    address: int = 1 << 20

    def numel(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    def is_contiguous(self) -> bool:
        return self.contiguous

    def stride(self) -> tuple[int, ...]:
        return (1, self.shape[0]) if not self.contiguous else (1,)

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 8 if self.dtype.endswith("64") else 4


IDS = Tensor((21, 8))
GOOD: dict[str, object] = {
    "topk_ids": IDS,
    "num_experts": 128,
    "block_size": 8,
    "sorted_token_ids": Tensor((1064,)),
    "expert_ids": Tensor((133,)),
    "num_tokens_post_padded": Tensor((1,)),
    "expert_map": Tensor((128,)),
}
MANY = {
    **GOOD,
    "topk_ids": Tensor((200_000,), "torch.int64"),
    "sorted_token_ids": Tensor((300_000,)),
    "expert_ids": Tensor((40_000,)),
}
CPU = Device("cpu")
REFUSED = {
    "short map": ({"expert_map": Tensor((127,))}, "expert map of 127 entries; one for each of the 128"),
    "wide map": ({"expert_map": Tensor((128,), "torch.int64")}, "expert_map of int64; int32"),
    "block size 0": ({"block_size": 0}, "block size 0; 1 or more"),
    "1025 experts": ({"num_experts": 1025}, "1025 experts; 1 to 1024"),
    "ids not contiguous": ({"topk_ids": replace(IDS, contiguous=False)}, "topk_ids with strides (1, 21); a contiguous"),
    "ids on the CPU": ({"topk_ids": replace(IDS, device=CPU)}, "topk_ids on cpu; a CUDA device"),
    "ids int16": ({"topk_ids": replace(IDS, dtype="torch.int16")}, "topk_ids of int16; int32 or int64"),
    "another device": ({"expert_ids": Tensor((133,), device=Device("cuda", 1))}, "expert_ids on cuda:1; cuda:0"),
    "small output": ({"sorted_token_ids": Tensor((1063,))}, "sorted_token_ids of 1063 entries; at least 1064"),
    "few blocks": ({"expert_ids": Tensor((132,))}, "expert_ids of 132 entries; at least 133"),
    "no total": ({"num_tokens_post_padded": Tensor((0,))}, "num_tokens_post_padded of 0 entries; at least 1"),
    "too many slots": ({"block_size": 2**30}, "routes in blocks of 1073741824; slots are counted in int32"),
}


class LaunchedError(Exception):
    """A launch was reached."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*arguments: object) -> None:
        raise LaunchedError(arguments)

    monkeypatch.setattr(align, "prepare", lambda device: SimpleNamespace(gpu=H200))
    monkeypatch.setattr(align, "_launch", launch)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_call_names_what_and_the_limit_and_launches_nothing(case: str) -> None:
    change, words = REFUSED[case]
    with pytest.raises(InputError) as e:
        align.moe_align_block_size(**{**GOOD, **change})
    assert words in str(e.value)


@pytest.mark.usefixtures("gpu")
def test_the_good_call_reaches_the_launch() -> None:
    with pytest.raises(LaunchedError):
        align.moe_align_block_size(**GOOD)


@pytest.mark.usefixtures("gpu")
def test_many_routes_need_the_callers_workspace() -> None:
    need = align.workspace_size(200_000, 128, 8, 0)
    assert need == 196 * 128
    for workspace, words in (
        (None, f"int32 [{need}]"),
        (Tensor((need - 1,)), f"at least {need}"),
        (Tensor((need,), address=4100), "a multiple of 16"),
        (Tensor((need,), device=CPU), "workspace on cpu"),
    ):
        with pytest.raises(InputError) as e:
            align.moe_align_block_size(**MANY, workspace=workspace)
        assert words in str(e.value)
    with pytest.raises(LaunchedError):
        align.moe_align_block_size(**MANY, workspace=Tensor((need,)))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "words"), [("fast", "variant 'fast'"), ("staged_512x1b", "512 routes")])
def test_a_variant_that_cannot_serve_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError) as e:
        align.moe_align_block_size(**MANY, variant=name)
    assert words in str(e.value)


@pytest.mark.parametrize("gpu", [H200, ADA, TURING], ids=lambda g: g.architecture)
def test_every_size_is_served_within_the_gpus_limits(gpu: Gpu) -> None:
    for routes in (0, 1, 8, 129, 513, 1025, 5000, 8192, 40_000, 131_072, 131_073, 10**6):
        for experts in (1, 8, 129, 512, MAX_EXPERTS):
            for block in (1, 8, 48, 64, 4096):
                v = serving(Problem(routes, experts, block), gpu)
                assert v.shared_bytes(Problem(routes, experts, block)) <= gpu.shared_bytes
                assert v.capacity is None or v.capacity >= routes
                assert v.kind is not Kind.CLUSTER or gpu is H200


@pytest.mark.parametrize("gpu", [H200, ADA, TURING], ids=lambda g: g.architecture)
def test_decode_sizes_take_one_launch_and_no_workspace(gpu: Gpu) -> None:
    for tokens in range(1, 129):
        problem = Problem(tokens * 8, 128, 8)
        v = serving(problem, gpu)
        assert v.launches == 1 and v.workspace_ints(problem) == 0


def test_every_variant_serves_something() -> None:
    sizes = [Problem(m * 8, e, 8) for m in (1, 65, 129, 257, 513, 1025, 2049, 20_000) for e in (128, MAX_EXPERTS)]
    assert {serving(size, gpu).name for size in sizes for gpu in (H200, ADA, TURING)} == set(VARIANTS)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_86", "sm_90"])
def test_the_source_compiles(architecture: str) -> None:
    cubin = align_kernels.compile_for(Gpu((int(architecture[3]), int(architecture[4:])), 0))
    names = [v.name for v in VARIANTS.values() if architecture == "sm_90" or v.kind is not Kind.CLUSTER]
    for name in names:
        assert name.encode() in cubin.code
