# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm_schemas import ALIGN, ALIGN_WITHOUT_MAP, GEMM_024, GEMM_033, GEMM_OLD

from routeblock.cuda import operators as vllm_ops
from routeblock.cuda.operators import (
    UINT4,
    UINT4B8,
    Argument,
    Value,
    bind,
    find_extension,
    padded_length,
    wheel_version,
)
from routeblock.errors import InputError


def arguments(schema: str) -> list[Argument]:
    inside = re.search(r"\((.*)\) ->", schema)
    assert inside is not None
    return [Argument(part.split("=")[0].split()[-1], "=" in part) for part in inside[1].split(",")]


class _Recorder:
    """An operator that notes what it is called with."""

    def __init__(self, schema: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self._schema = _Schema(schema)

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        return given


class _Schema:
    def __init__(self, text: str) -> None:
        self.name = "_moe_C::" + text.split("(")[0]
        self.text = text
        self.arguments = [_Argument(a) for a in arguments(text)]

    def __str__(self) -> str:
        return self.text


class _Argument:
    def __init__(self, argument: Argument) -> None:
        self.name = argument.name
        self._has_default = argument.has_default

    def has_default_value(self) -> bool:
        return self._has_default


def gemm_offer(**changes: Value) -> dict[str, Value]:
    """What `moe_gemm` offers, with its real keys: taken from a call that is recorded."""
    names = {vllm_ops.ALIASES.get(a.name, a.name) for a in arguments(GEMM_024)}
    loose = {"g_idx_or_none", "perm_or_none", "is_k_full", "b_bias_or_none", "a_scales", "global_scale"}
    return {n: Value(n, needed=n not in loose) for n in names} | changes


def test_ids_of_scalar_types_are_those_in_the_kernel_names_of_vllm_0_24() -> None:
    assert UINT4.id == 1125899906843648
    assert UINT4B8.id == 1125899907892224


@pytest.mark.parametrize("schema", [GEMM_024, GEMM_033], ids=["0.24", "0.33"])
def test_every_argument_of_a_known_schema_gets_its_value(schema: str) -> None:
    bound = bind(schema, arguments(schema), gemm_offer())
    assert list(bound) == [a.name for a in arguments(schema)]
    assert all(value == vllm_ops.ALIASES.get(name, name) for name, value in bound.items())


def test_an_argument_under_an_older_name_gets_its_value() -> None:
    schema = "f(int b_q_type_id, bool is_k_full, bool extra=False) -> ()"
    bound = bind(schema, arguments(schema), {"b_type_id": Value(7), "is_k_full": Value(True)})
    assert bound == {"b_q_type_id": 7, "is_k_full": True}


def test_an_unknown_argument_is_refused_with_schema_and_way_out() -> None:
    schema = GEMM_024.replace("int size_m", "int swizzle, int size_m")
    with pytest.raises(InputError, match="unknown argument 'swizzle'") as caught:
        bind(schema, arguments(schema), gemm_offer())
    assert schema in str(caught.value)
    assert "vllm 0.24.0" in caught.value.way_out


def test_an_unknown_argument_with_a_default_is_left_alone() -> None:
    schema = GEMM_024.replace("int blocks_per_sm", "int blocks_per_sm, bool swizzle=False")
    assert "swizzle" not in bind(schema, arguments(schema), gemm_offer())


def test_an_operator_that_cannot_take_a_launch_is_refused_only_when_one_is_asked_for() -> None:
    offer = gemm_offer(is_ep=Value(False, needed=False))
    with pytest.raises(InputError, match=r"no argument '(thread_k|thread_n|blocks_per_sm)'"):
        bind(GEMM_OLD, arguments(GEMM_OLD), offer)
    launch = ("thread_k", "thread_n", "blocks_per_sm")
    automatic = offer | {name: Value(-1, needed=False) for name in launch}
    assert not set(launch) & set(bind(GEMM_OLD, arguments(GEMM_OLD), automatic))


def test_an_expert_map_needs_an_alignment_that_takes_one() -> None:
    names = [vllm_ops.ALIASES.get(a.name, a.name) for a in arguments(ALIGN)]
    for given, fits in ((None, True), ("map", False)):
        offer = {n: Value(n) for n in names} | {"maybe_expert_map": Value(given, needed=given is not None)}
        assert bind(ALIGN, arguments(ALIGN), offer)["maybe_expert_map"] == given
        if fits:
            bind(ALIGN_WITHOUT_MAP, arguments(ALIGN_WITHOUT_MAP), offer)
        else:
            with pytest.raises(InputError, match="no argument 'maybe_expert_map'"):
                bind(ALIGN_WITHOUT_MAP, arguments(ALIGN_WITHOUT_MAP), offer)


def test_the_newer_name_of_the_extension_is_found_before_the_older(tmp_path: Path) -> None:
    for name in vllm_ops.MOE_EXTENSIONS[::-1]:
        (tmp_path / name).touch()
        assert find_extension(tmp_path) == (tmp_path / name).resolve()


@pytest.mark.parametrize("path", ["nothing.so", "."])
def test_a_path_without_an_extension_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no MoE extension of vLLM.*envs/cuda.txt"):
        find_extension(tmp_path / path)


def test_without_vllm_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_importer_cache", {})
    with pytest.raises(InputError, match=r"vllm is not installed.*envs/cuda.txt"):
        find_extension()


def test_an_installed_vllm_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    extension = package / vllm_ops.MOE_EXTENSIONS[1]
    extension.touch()
    metadata = tmp_path / "vllm-0.24.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_extension() == extension.resolve()
    assert wheel_version(find_extension()) == "0.24.0"
    assert wheel_version(tmp_path / "elsewhere" / "vllm" / "x.so") is None


def test_alignment_buffers_have_the_length_that_vllm_allocates() -> None:
    assert padded_length(168, 128, 8) == 168 + 128 * 7
    assert padded_length(8, 128, 8) == 64  # fewer routes than experts: a block each


def test_what_the_operator_refuses_becomes_one_line() -> None:
    class Refusing(_Recorder):
        def __call__(self, **given: Any) -> Any:
            raise RuntimeError("Invalid thread config: thread_k = 64\nfrom somewhere")

    with pytest.raises(InputError, match="Invalid thread config: thread_k = 64") as caught:
        vllm_ops._call(Refusing("f(int x) -> ()"), {"x": Value(1)})
    assert "somewhere" not in str(caught.value)
