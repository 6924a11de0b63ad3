# SPDX-License-Identifier: Apache-2.0
"""The plug-in beside stand-ins for vllm and torch: when it replaces, what it returns, when vLLM's own path stays."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from routeblock.cuda import align
from routeblock.cuda.align_variants import Gpu
from routeblock.errors import InputError
from routeblock.moe.routing import align as reference
from routeblock.vllm_plugin import alignment as vllm_plugin
from routeblock.vllm_plugin import register
from routeblock.vllm_plugin.contract import CONTRACTS, LAST, NAME, contract

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ("Tensor", "int", "int", "Tensor", "Tensor", "Tensor", "Optional[Tensor]")
H200 = Gpu((9, 0), 232448)


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None = 0


@dataclass(frozen=True)
class Tensor:
    """A numpy array that says it lies on a device."""

    array: Any
    device: Device = Device("cuda")

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype}"

    def numel(self) -> int:
        return int(self.array.size)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array), self.device)

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def __getitem__(self, at: Tensor) -> Tensor:
        return Tensor(self.array[at.array], self.device)


def launch(_kernels: Any, variant: Any, problem: Any, wide: bool, arguments: tuple[Any, ...], workspace: Any) -> None:
    """What a launch writes, by the reference, through the pointers it is given."""
    assert workspace is None or workspace.numel() >= variant.workspace_ints(problem) > 0
    topk, expert_map, sorted_ids, expert_ids, total, routes, experts, block, size, blocks, inactive = arguments

    def at(pointer: int, count: int, kind: Any = ctypes.c_int32) -> Any:
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (count,))

    ids = at(topk, routes, ctypes.c_int64 if wide else ctypes.c_int32)
    local = at(expert_map, experts) if expert_map else np.arange(experts, dtype=np.int32)
    plan = reference(ids[:, None], experts, block, expert_map=local)
    out, owners = at(sorted_ids, size), at(expert_ids, blocks)
    out[:], owners[:] = problem.routes, inactive
    out[: plan.num_tokens_post_padded], owners[: plan.num_blocks] = plan.sorted_token_ids, plan.expert_ids
    at(total, 1)[0] = plan.num_tokens_post_padded


def own(
    topk_ids: Any,
    block_size: int,
    num_experts: int,
    expert_map: Any = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Any, Any, Any]:
    """vLLM's, as far as it matters here."""
    return ("vLLM's", block_size, num_experts)


@dataclass
class StandIn:
    """The module whose name is looked up, and the operator behind it."""

    marlin: ModuleType
    schema: SimpleNamespace
    log: pytest.LogCaptureFixture

    @property
    def said(self) -> list[str]:
        return [r.getMessage() for r in self.log.records]

    def call(self, *arguments: Any, **named: Any) -> Any:
        return self.marlin.fused_marlin_moe(*arguments, **named)


def later_own(
    topk_ids: Any,
    block_size: int,
    num_experts: int,
    expert_map: Any = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> tuple[Any, ...]:
    """vLLM's since 0.31."""
    return ("vLLM's", block_size, num_experts, return_scatter_idx)


VERSION = "0.24.0"
MARLIN, HUMMING = (module for _, module in CONTRACTS[2].modules)


def stand_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The modules of a version, each with vLLM's own alignment."""
    known = contract(version)
    assert known
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "vllm" else installed(name))
    for _, module in known.modules:
        names = module.split(".")
        for i in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:i]), ModuleType(".".join(names[:i])))
        sys.modules[module].__dict__[NAME] = later_own if len(known.parameters) > 6 else own


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[StandIn]:
    caplog.set_level(logging.INFO, "vllm.routeblock")
    stand_for(monkeypatch, VERSION)
    marlin: Any = sys.modules[MARLIN]
    exec("def fused_marlin_moe(*a, **k):\n    return moe_align_block_size(*a, **k)", marlin.__dict__)
    schema = SimpleNamespace(arguments=[SimpleNamespace(type=t) for t in SCHEMA], returns=[])
    torch: Any = ModuleType("torch")
    torch.int32 = "int32"
    torch.cuda = SimpleNamespace(is_current_stream_capturing=lambda: False)
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 0)
    torch.empty = lambda size, dtype, device: Tensor(np.full(size, -77, dtype), device)
    torch.ops = SimpleNamespace(
        _moe_C=SimpleNamespace(moe_align_block_size=SimpleNamespace(default=SimpleNamespace(_schema=schema)))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    for module in (align, vllm_plugin):
        monkeypatch.setattr(module, "prepare", lambda device: SimpleNamespace(gpu=H200))
    monkeypatch.setattr(align, "_launch", launch)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "1")
    vllm_plugin._declined.clear()
    yield StandIn(marlin, schema, caplog)
    vllm_plugin._declined.clear()


def test_the_entry_point_is_register() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, name = next(iter(points.values())).split(":")
    assert getattr(importlib.import_module(module), name) is register


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_it_is_off_unless_the_variable_is_1(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(vllm_plugin.VARIABLE)
    if value is not None:
        monkeypatch.setenv(vllm_plugin.VARIABLE, value)
    vllm_plugin.register()
    assert vllm.marlin.moe_align_block_size is own and vllm.said == []


def test_it_replaces_both_paths_once_and_says_one_line_each(vllm: StandIn) -> None:
    for _ in range(3):
        vllm_plugin.register()
    ours = vllm.marlin.moe_align_block_size
    assert isinstance(ours, vllm_plugin.CanonicalAlignment) and ours.own is own
    assert isinstance(getattr(sys.modules[HUMMING], NAME), vllm_plugin.CanonicalAlignment)
    assert ["canonical order" in line for line in vllm.said] == [True, True]
    assert "for Marlin" in vllm.said[0] and "for Humming" in vllm.said[1]


def routing(tokens: int, experts: int, dtype: Any = np.int32) -> Tensor:
    rng = np.random.default_rng(tokens)
    order = np.argsort(rng.random((tokens, experts)), axis=1)
    return Tensor(np.ascontiguousarray(order[:, :8], dtype))


@pytest.mark.parametrize("tokens", [1, 21, 4096, 16384])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("pad", [False, True])
def test_plans_are_the_reference_in_vllms_sizes(vllm: StandIn, tokens: int, dtype: Any, pad: bool) -> None:
    vllm_plugin.register()
    ids = routing(tokens, 100, dtype)
    sorted_ids, owners, total = vllm.call(ids, 16, 100, pad_sorted_ids=pad, ignore_invalid_experts=True)
    plan = reference(ids.array, 100, 16)
    used = int(total.array[0])
    assert used == plan.num_tokens_post_padded
    assert np.array_equal(sorted_ids.array[:used], plan.sorted_token_ids)
    assert np.array_equal(owners.array[: used // 16], plan.expert_ids)
    length = tokens * 8 + 100 * 15
    length = -(-length // 16) * 16 if pad else length
    length = min(length, tokens * 8 * 16) if tokens * 8 < 100 else length
    assert sorted_ids.array.shape == (length,) and owners.array.shape == (-(-length // 16),)
    assert (sorted_ids.array[used:] == tokens * 8).all()


def test_a_map_drops_routes_or_marks_blocks_as_vllm_does(vllm: StandIn) -> None:
    vllm_plugin.register()
    ids = routing(21, 16)
    held = np.where(np.arange(16) % 2, np.arange(16) // 2, -1).astype(np.int32)
    _, owners, total = vllm.call(ids, 8, 16, Tensor(held), ignore_invalid_experts=True)
    plan = reference(ids.array, 16, 8, expert_map=held)
    assert int(total.array[0]) == plan.num_tokens_post_padded
    assert np.array_equal(owners.array[: plan.num_blocks], plan.expert_ids)
    _, owners, total = vllm.call(ids, 8, 16, Tensor(held))
    plan = reference(ids.array, 16, 8)
    assert int(total.array[0]) == plan.num_tokens_post_padded
    assert np.array_equal(owners.array[: plan.num_blocks], held[plan.expert_ids])


def test_ids_with_strides_are_read_right(vllm: StandIn) -> None:
    vllm_plugin.register()
    ids = routing(21, 100)
    apart = Tensor(np.asfortranarray(ids.array))
    assert not apart.is_contiguous()
    got, want = (vllm.call(x, 8, 100, ignore_invalid_experts=True)[0].array for x in (apart, ids))
    assert np.array_equal(got, want)


def test_a_map_of_another_length_is_refused(vllm: StandIn) -> None:
    vllm_plugin.register()
    with pytest.raises(InputError, match="expert map of 127 entries"):
        vllm.call(routing(21, 128), 8, 128, Tensor(np.zeros(127, np.int32)), ignore_invalid_experts=True)


def no_kernels(device: int) -> Any:
    raise InputError("device 0 is sm_70", where="canonical alignment", limit="sm_75", way_out="another GPU")


@pytest.mark.parametrize(
    ("ids", "experts", "words"),
    [
        (Tensor(np.zeros((3, 8), np.int32), Device("cpu", None)), 128, "ids on cpu"),
        (Tensor(np.zeros((3, 8), np.uint32)), 128, "ids of uint32"),
        (Tensor(np.zeros((3, 8), np.int32)), 1025, "1025 experts, 1024 are the most"),
    ],
)
def test_a_call_it_cannot_serve_is_vllms_and_said_once(vllm: StandIn, ids: Tensor, experts: int, words: str) -> None:
    vllm_plugin.register()
    for _ in range(3):
        assert vllm.call(ids, 8, experts, ignore_invalid_experts=True) == ("vLLM's", 8, experts)
    assert len(vllm.said) == 3 and words in vllm.said[2]


def test_a_gpu_without_the_kernels_keeps_vllms_path(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "prepare", no_kernels)
    vllm_plugin.register()
    for _ in range(2):
        assert vllm.call(routing(1, 128), 8, 128) == ("vLLM's", 8, 128)
    assert len(vllm.said) == 3 and "device 0 is sm_70" in vllm.said[2]


def other_signature(vllm: StandIn) -> None:
    vllm.marlin.__dict__["moe_align_block_size"] = later_own


def other_operator(vllm: StandIn) -> None:
    vllm.schema.arguments.append(SimpleNamespace(type="Optional[Tensor]"))


def no_operator(vllm: StandIn) -> None:
    del sys.modules["torch"].ops._moe_C  # type: ignore[attr-defined]


def no_name(vllm: StandIn) -> None:
    del vllm.marlin.__dict__["moe_align_block_size"]


def no_module(vllm: StandIn) -> None:
    sys.modules[MARLIN] = None  # type: ignore[assignment]


def no_cuda_core(vllm: StandIn) -> None:
    sys.modules["cuda.core"] = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_signature, "is not the signature of this version"),
        (other_operator, "is not the operator of this version"),
        (no_operator, "the operator _moe_C::moe_align_block_size is not there"),
        (no_name, "has no moe_align_block_size"),
        (no_module, "does not import"),
        (no_cuda_core, "no cuda-core"),
    ],
)
def test_what_it_does_not_know_stays_and_is_said_once(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, change: Callable[[StandIn], None], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", ModuleType("cuda.core"))
    change(vllm)
    before = vllm.marlin.__dict__.get("moe_align_block_size")
    for _ in range(3):
        vllm_plugin.register()
    assert vllm.marlin.__dict__.get("moe_align_block_size") is before
    of_marlin = [line for line in vllm.said if "stays vLLM's own for Marlin" in line]
    assert len(of_marlin) == 1 and words in of_marlin[0]


FACTS = json.loads((ROOT / "fixtures/published/vllm_alignment.json").read_bytes())


@pytest.mark.parametrize("version", FACTS)
def test_the_contract_is_what_the_wheels_say(version: str) -> None:
    known, read = contract(version), FACTS[version]
    assert known
    assert [[name, "" if default is ... else repr(default)] for name, default in known.parameters] == read["function"]
    types = {"Tensor": "Tensor", "int": "int", "Tensor!": "Tensor", "Tensor?": "Optional[Tensor]"}
    arguments = read["schema"].removeprefix(f"{NAME}(").removesuffix(") -> ()").replace("(a!)", "").split(", ")
    assert tuple(types[argument.split()[0]] for argument in arguments) == known.operator
    places = {module for module in read["calls"] if re.search("marlin|humming", module)}
    assert {module for _, module in known.modules} == places
    for module in places:
        assert all(set(call) <= {"*", *(name for name, _ in known.parameters)} for call in read["calls"][module])


def test_every_version_of_the_table_was_read() -> None:
    read = {tuple(map(int, version.split(".")[:2])) for version in FACTS}
    assert read == {(0, minor) for minor in range(CONTRACTS[0].since[1], LAST[1] + 1)}


@pytest.mark.parametrize("version", ["0.20.2", "0.21.0", "0.33.0"])
def test_other_versions_are_replaced_where_they_look_the_name_up(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    stand_for(monkeypatch, version)
    known = contract(version)
    assert known
    if len(known.operator) > len(SCHEMA):
        vllm.schema.arguments.append(SimpleNamespace(type="Optional[Tensor]"))
    vllm_plugin.register()
    for _, module in known.modules:
        assert isinstance(getattr(sys.modules[module], NAME), vllm_plugin.CanonicalAlignment)


def test_a_call_that_asks_for_scatter_indices_and_cannot_be_served_is_vllms(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_for(monkeypatch, "0.33.0")
    vllm.schema.arguments.append(SimpleNamespace(type="Optional[Tensor]"))
    register()
    ours = getattr(sys.modules[HUMMING], NAME)
    ids = Tensor(np.zeros((3, 8), np.int32), Device("cpu", None))
    assert ours(ids, 8, 16, return_scatter_idx=True) == ("vLLM's", 8, 16, True)
    assert ours(ids, 8, 16) == ("vLLM's", 8, 16, False)


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "1.0.0", "dev"])
def test_a_version_that_nobody_read_is_named(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    vllm_plugin.register()
    assert vllm.marlin.moe_align_block_size is own
    assert len(vllm.said) == 1 and f"vllm {version} is not a version that was read, 0.20 to 0.33" in vllm.said[0]


def test_without_vllm_it_says_so(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    vllm_plugin.register()
    assert len(vllm.said) == 1 and "vllm is not installed" in vllm.said[0]


def test_many_routes_share_a_workspace_on_a_stream_and_a_graph_has_its_own(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_plugin, "_workspaces", {})
    torch, device = sys.modules["torch"], Device("cuda")
    first = vllm_plugin._workspace(device, 64)
    assert vllm_plugin._workspace(device, 32) is first
    larger = vllm_plugin._workspace(device, 128)
    assert larger.numel() == 128 and vllm_plugin._workspace(device, 64) is larger
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_current_stream_capturing=lambda: True))
    assert vllm_plugin._workspace(device, 64) is not larger
