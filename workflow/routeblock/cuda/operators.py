# SPDX-License-Identifier: Apache-2.0
"""vLLM's MoE operators without vLLM: the extension is found, loaded with torch and called by the schema it registers.

Facts: the schemas and host code of vLLM 0.20 to 0.33 (csrc/moe, csrc/libtorch_stable/moe), its `scalar_type.py`, and
`moe_align_block_size` for the size of the alignment's buffers. torch is imported inside functions only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.awq import marlin_pack_zeros, marlin_permute_scales, marlin_repack_weights
from routeblock.moe.routing import AlignedPlan

MOE_EXTENSIONS = ("_moe_C_stable_libtorch.abi3.so", "_moe_C.abi3.so")  # since 0.24, and before
ACTIVATION_EXTENSIONS = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
GEMM, ALIGN, SILU = "_moe_C::moe_wna16_marlin_gemm", "_moe_C::moe_align_block_size", "_C::silu_and_mul"
EXTENSION_VARIABLE, ACTIVATION_VARIABLE = "ROUTEBLOCK_EXTENSION", "ROUTEBLOCK_ACTIVATION_EXTENSION"
MAX_BLOCKS_PER_SM = 4  # that the kernel's scratch buffer and locks are made for
AUTOMATIC = -1


@dataclass(frozen=True)
class ScalarType:
    """An integer type as vLLM's kernels name it: unsigned, `bits` wide, stored value minus `bias`."""

    name: str
    bits: int
    bias: int

    @property
    def id(self) -> int:
        """The 64-bit id, low bits first: exponent 8, mantissa 8, sign 1, bias 32, finite only 1, NaN form 8 (IEEE)."""
        value, offset = 0, 0
        for field, width in ((0, 8), (self.bits, 8), (0, 1), (self.bias, 32), (0, 1), (1, 8)):
            value |= (field & ((1 << width) - 1)) << offset
            offset += width
        return value


UINT4 = ScalarType("uint4", 4, 0)  # with zero points
UINT4B8 = ScalarType("uint4b8", 4, 8)  # the fixed zero point 8

# One operator argument under the names that versions give it.
ALIASES = {
    "b_q_type": "b_type_id",
    "b_q_type_id": "b_type_id",
    "is_full_k": "is_k_full",
    "num_tokens_post_padded": "num_tokens_past_padded",
    "num_tokens_post_pad": "num_tokens_past_padded",
    "c": "c_or_none",
    "b_zeros": "b_zeros_or_none",
    "g_idx": "g_idx_or_none",
    "perm": "perm_or_none",
    "expert_map": "maybe_expert_map",
    "result": "out",
}


@dataclass(frozen=True)
class Argument:
    """One argument of an operator's schema."""

    name: str
    has_default: bool


@dataclass(frozen=True)
class Value:
    """A value on offer for an argument. `needed`: an operator without such an argument cannot do what is asked."""

    value: Any
    needed: bool = True


def bind(schema: str, arguments: Iterable[Argument], offered: Mapping[str, Value]) -> dict[str, Any]:
    """Keyword arguments for an operator, by its own argument names.

    Raises InputError that names the schema when nothing is on offer for an argument without a default, and when there
    is no argument for a value that is needed.
    """

    def refuse(what: str) -> InputError:
        return InputError(
            f"{what} (schema: {schema})",
            where="vLLM operator",
            limit="schemas of vLLM 0.20 to 0.33 are known",
            way_out="use vllm 0.24.0, or add the argument to cuda/operators.py",
        )

    bound, used = {}, set()
    for argument in arguments:
        key = ALIASES.get(argument.name, argument.name)
        if key in offered:
            bound[argument.name] = offered[key].value
            used.add(key)
        elif not argument.has_default:
            raise refuse(f"unknown argument {argument.name!r}")
    for key, value in offered.items():
        if value.needed and key not in used:
            raise refuse(f"no argument {key!r}")
    return bound


def find_extension(path: Path | None = None, names: Sequence[str] = MOE_EXTENSIONS) -> Path:
    """The extension's file: `path` itself, one of `names` in the folder `path`, or in an installed vllm (not imported).

    Raises InputError when there is none.
    """
    if path is not None:
        candidates = [path / name for name in names] if path.is_dir() else [path]
        where = str(path)
    else:
        candidates, where = [folder / name for folder in _installed() for name in names], "vllm"
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise InputError(
        "no MoE extension of vLLM" if path is not None else "vllm is not installed for this Python",
        where=where,
        limit=f"a file {' or '.join(names)} is needed",
        way_out=f"install envs/cuda.txt, or name the file in {EXTENSION_VARIABLE}",
    )


def _installed() -> list[Path]:
    try:
        spec: importlib.machinery.ModuleSpec | None = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def wheel_version(extension: Path) -> str | None:
    """Version of the vllm distribution that the extension's folder belongs to, by the metadata beside it; else None."""
    for distribution in importlib.metadata.distributions(name="vllm", path=[str(extension.parent.parent)]):
        return distribution.version
    return None


@dataclass(frozen=True)
class DeviceWeights:
    """One GEMM's weights on the device, Marlin form, one row an expert in use.

    q int32 [E, K/16, 2N]; zeros int32 [E, groups, N/8] or None; scales [E, groups, N]; sizes N and K.
    """

    q: Any
    zeros: Any
    scales: Any
    n: int
    k: int

    @property
    def scalar_type(self) -> ScalarType:
        """uint4 with zero points, else uint4b8."""
        return UINT4B8 if self.zeros is None else UINT4

    def to(self, device: str) -> DeviceWeights:
        """The same weights on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return DeviceWeights(self.q.to(device), zeros, self.scales.to(device), self.n, self.k)


@dataclass(frozen=True)
class DevicePlan:
    """A plan in the alignment's own buffers: as long as vLLM makes them, sentinels and -1 beyond what is used."""

    sorted_token_ids: Any
    expert_rows: Any
    num_tokens_post_padded: Any
    block_size: int


def padded_length(routes: int, num_experts: int, block_size: int) -> int:
    """Length of `sorted_token_ids` that vLLM allocates for an alignment."""
    length = routes + num_experts * (block_size - 1)
    return min(routes * block_size, length) if routes < num_experts else length


def read_alignment(buffers: DevicePlan, routes: int) -> AlignedPlan:
    """The plan in an alignment's buffers, cut to num_tokens_post_padded; waits for torch's current stream."""
    used, b = int(buffers.num_tokens_post_padded.cpu()[0]), buffers.block_size
    ids, experts = to_host(buffers.sorted_token_ids)[:used], to_host(buffers.expert_rows)[: used // b]
    return AlignedPlan(ids, experts, used, b, routes)


def to_device(array: NDArray[Any], device: str) -> Any:
    """A numpy array as a torch tensor on `device`; bfloat16 arrays keep their bits."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array).to(device)


def to_host(tensor: Any) -> NDArray[Any]:
    """A torch tensor as a numpy array; bfloat16 becomes ml_dtypes.bfloat16, bit for bit."""
    import torch

    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return np.asarray(tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16))
    return np.asarray(tensor.cpu().numpy())


def load_weights(
    experts: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[Any]]], count: int, device: str
) -> DeviceWeights:
    """Pack experts one after the other into Marlin form on `device`; the host holds one expert at a time.

    experts: (q uint8 [K, N], zeros uint8 [groups, N] or None, scales [groups, N]) of `count` experts in the order of
    their rows. Raises InputError when their number or shapes differ.
    """
    import torch

    q = zeros = scales = None
    n = k = row = 0
    for row, (q_host, zeros_host, scales_host) in enumerate(experts):
        parts = [marlin_repack_weights(q_host), marlin_permute_scales(scales_host)]
        if zeros_host is not None:
            parts.append(marlin_pack_zeros(zeros_host))
        sent = [to_device(x, device) for x in parts]
        if row == 0:
            k, n = q_host.shape
            q, scales, *rest = (torch.empty((count, *x.shape), dtype=x.dtype, device=device) for x in sent)
            zeros = rest[0] if rest else None
        if q_host.shape != (k, n) or (zeros_host is None) != (zeros is None) or row >= count:
            raise _refuse_weights(f"expert {row}: {q_host.shape}, zero points {zeros_host is not None}", count, k, n)
        q[row], scales[row] = sent[0], sent[1]  # type: ignore[index]
        if zeros is not None:
            zeros[row] = sent[2]
    if row + 1 != count or q is None:
        raise _refuse_weights(f"{row + 1 if q is not None else 0} experts", count, k, n)
    return DeviceWeights(q, zeros, scales, n, k)


def _refuse_weights(what: str, count: int, k: int, n: int) -> InputError:
    return InputError(
        what,
        where="weights",
        limit=f"{count} experts of one shape ({k}, {n}), all with zero points or none",
        way_out="check the fixture",
    )


class VllmOperators:
    """The operators of one loaded extension.

    `moe`: the MoE extension's file; `activation`: the file with `silu_and_mul`, or None for the torch form. Raises
    InputError when torch is missing, a file does not load, or an operator is not registered.
    """

    def __init__(self, moe: Path, activation: Path | None = None, device: str = "cuda") -> None:
        self.device = device
        self.moe, self.activation = moe, activation
        _load(moe)
        if activation is not None:
            _load(activation)
        self._gemm, self._align = _operator(GEMM, moe), _operator(ALIGN, moe)
        self._silu = _operator(SILU, activation) if activation is not None else None

    @property
    def schemas(self) -> dict[str, str]:
        """The schema of each operator in use, as torch reports it."""
        found = {GEMM: self._gemm, ALIGN: self._align, **({SILU: self._silu} if self._silu else {})}
        return {name: str(op._schema) for name, op in found.items()}

    @property
    def forms(self) -> dict[str, str]:
        """Who computes activation and sum."""
        return {"activation": SILU if self._silu else "torch: silu in float32, round, times up", "sum": "torch.sum"}

    def device_plan(self, plan: AlignedPlan, expert_rows: NDArray[np.int32]) -> DevicePlan:
        """A plan with global expert ids, put where the alignment would have put it; experts become weight rows."""
        length = padded_length(plan.num_routes, expert_rows.size, plan.block_size)
        ids = np.full(length, plan.num_routes, np.int32)
        ids[: plan.num_tokens_post_padded] = plan.sorted_token_ids[: plan.num_tokens_post_padded]
        rows = np.full(-(-length // plan.block_size), -1, np.int32)
        rows[: plan.num_blocks] = expert_rows[plan.expert_ids[: plan.num_blocks]]
        if (rows[: plan.num_blocks] < 0).any():
            missing = int(plan.expert_ids[int(np.flatnonzero(rows[: plan.num_blocks] < 0)[0])])
            raise InputError(
                f"the plan uses expert {missing}",
                where="plan",
                limit=f"weights of {int((expert_rows >= 0).sum())} experts are loaded",
                way_out="use a plan of this fixture's routing",
            )
        total = np.array([plan.num_tokens_post_padded], np.int32)
        return DevicePlan(
            to_device(ids, self.device), to_device(rows, self.device), to_device(total, self.device), plan.block_size
        )

    def host_plan(self, placed: DevicePlan, expert_rows: NDArray[np.int32], num_routes: int) -> AlignedPlan:
        """The plan that lies in the buffers now, with global expert ids. Raises InputError if they hold no plan."""
        ids, rows = to_host(placed.sorted_token_ids), to_host(placed.expert_rows)
        used = int(to_host(placed.num_tokens_post_padded)[0])
        experts = np.full(int(expert_rows.max(initial=-1)) + 1, -1, np.int32)
        in_use = np.flatnonzero(expert_rows >= 0)
        experts[expert_rows[in_use]] = in_use
        held = rows[: max(used, 0) // placed.block_size]
        if not 0 <= used <= ids.size or used % placed.block_size or (held >= experts.size).any() or (held < -1).any():
            raise InputError(
                f"the plan's buffers hold {used} rows, experts in rows {held.min(initial=0)} to {held.max(initial=0)}",
                where="device",
                limit=f"whole blocks of {placed.block_size} up to {ids.size} rows; weights have {experts.size} rows",
                way_out="report this version of the extension: it wrote into its inputs",
            )
        expert_ids = np.where(held < 0, -1, experts[held]).astype(np.int32)
        return AlignedPlan(ids[:used], expert_ids, used, placed.block_size, num_routes)

    def native_align(self, topk_ids: Any, num_experts: int, block_size: int, expert_map: Any = None) -> AlignedPlan:
        """The plan that vLLM's own alignment makes.

        topk_ids: int32 device tensor [M, k]; expert_map: int32 device tensor [num_experts] or None. Returns the plan
        cut to num_tokens_post_padded, with the expert ids that the operator wrote.
        """
        buffers = self.alignment_buffers(topk_ids.numel(), num_experts, block_size)
        self.align_into(buffers, topk_ids, num_experts, expert_map)
        return read_alignment(buffers, topk_ids.numel())

    def alignment_buffers(self, routes: int, num_experts: int, block_size: int) -> DevicePlan:
        """Buffers for a plan, as long as vLLM makes them, uninitialised."""
        import torch

        def empty(size: int) -> Any:
            return torch.empty((size,), dtype=torch.int32, device=self.device)

        length = padded_length(routes, num_experts, block_size)
        return DevicePlan(empty(length), empty(-(-length // block_size)), empty(1), block_size)

    def align_into(self, buffers: DevicePlan, topk_ids: Any, num_experts: int, expert_map: Any = None) -> None:
        """Launch vLLM's alignment into `buffers` on torch's current stream; nothing waits for it."""
        _call(
            self._align,
            {
                "topk_ids": Value(topk_ids),
                "num_experts": Value(num_experts),
                "block_size": Value(buffers.block_size),
                "sorted_token_ids": Value(buffers.sorted_token_ids),
                "experts_ids": Value(buffers.expert_rows),
                "num_tokens_past_padded": Value(buffers.num_tokens_post_padded),
                "maybe_expert_map": Value(expert_map, needed=expert_map is not None),
            },
        )

    def moe_gemm(
        self,
        a: Any,
        weights: DeviceWeights,
        plan: DevicePlan,
        topk_weights: Any,
        *,
        top_k: int,
        multiply_topk_weights: bool,
        thread_k: int = AUTOMATIC,
        thread_n: int = AUTOMATIC,
        blocks_per_sm: int = AUTOMATIC,
        lock_sms: int,
        fp32_reduce: bool = True,
        out: Any = None,
        locks: Any = None,
    ) -> Any:
        """One launch of the packed GEMM; returns the output [rows of a * top_k, N], rows it did not write NaN.

        a: float16 or bfloat16 [M, K]; topk_weights float32 [M * top_k routes]; AUTOMATIC leaves the launch to the
        operator; `lock_sms`: the larger of the true and the answered SM count, for which locks are made. A caller that
        times the launch brings `out` and `locks` itself: int32 zeros [lock_sms * MAX_BLOCKS_PER_SM], which every launch
        leaves zero.
        """
        import torch

        if out is None:
            out = torch.full((a.shape[0] * top_k, weights.n), float("nan"), dtype=a.dtype, device=self.device)
        if locks is None:
            locks = torch.zeros((lock_sms * MAX_BLOCKS_PER_SM,), dtype=torch.int32, device=self.device)
        launch = {"thread_k": thread_k, "thread_n": thread_n, "blocks_per_sm": blocks_per_sm}
        return _call(
            self._gemm,
            {
                "a": Value(a),
                "c_or_none": Value(out),
                "b_q_weight": Value(weights.q),
                "b_bias_or_none": Value(None, needed=False),
                "b_scales": Value(weights.scales),
                "a_scales": Value(None, needed=False),
                "global_scale": Value(None, needed=False),
                "b_zeros_or_none": Value(weights.zeros, needed=weights.zeros is not None),
                "g_idx_or_none": Value(None, needed=False),
                "perm_or_none": Value(None, needed=False),
                "workspace": Value(locks),
                "sorted_token_ids": Value(plan.sorted_token_ids),
                "expert_ids": Value(plan.expert_rows),
                "num_tokens_past_padded": Value(plan.num_tokens_post_padded),
                "topk_weights": Value(topk_weights),
                "moe_block_size": Value(plan.block_size),
                "top_k": Value(top_k),
                "mul_topk_weights": Value(multiply_topk_weights),
                "is_ep": Value(False, needed=False),
                "b_type_id": Value(weights.scalar_type.id),
                "size_m": Value(a.shape[0]),
                "size_n": Value(weights.n),
                "size_k": Value(weights.k),
                "is_k_full": Value(True, needed=False),
                "use_atomic_add": Value(False),
                "use_fp32_reduce": Value(fp32_reduce),
                "is_zp_float": Value(False),
                **{name: Value(value, needed=value != AUTOMATIC) for name, value in launch.items()},
            },
        )

    def silu_and_mul(self, gate_up: Any) -> Any:
        """silu(gate) * up of [rows, 2I] -> [rows, I], by vLLM's operator or, without it, by torch (see `forms`)."""
        import torch

        half = gate_up.shape[1] // 2
        if self._silu is None:
            gate = torch.nn.functional.silu(gate_up[:, :half].float()).to(gate_up.dtype)
            return gate * gate_up[:, half:]
        out = torch.empty((gate_up.shape[0], half), dtype=gate_up.dtype, device=self.device)
        _call(self._silu, {"out": Value(out), "input": Value(gate_up)})
        return out

    def combine(self, routed: Any, tokens: int) -> Any:
        """Sum of routed rows [M * k, N] over k -> [M, N], by torch.sum as the fused path does."""
        import torch

        return torch.sum(routed.view(tokens, -1, routed.shape[1]), dim=1)


def _load(path: Path) -> None:
    import torch

    operators: Any = torch.ops
    try:
        operators.load_library(str(path.resolve()))
    except (OSError, RuntimeError) as e:
        reason = str(e).splitlines()[0]
        raise InputError(
            f"cannot be loaded with torch {torch.__version__}: {reason}",
            where=str(path),
            limit="the extension needs the CUDA runtime and, before 0.24, the very torch it was built for",
            way_out="install envs/cuda.txt",
        ) from e


def _operator(name: str, path: Path | None) -> Any:
    import torch

    namespace, operator = name.split("::")
    try:
        return getattr(getattr(torch.ops, namespace), operator).default
    except AttributeError as e:
        raise InputError(
            f"registers no {name}",
            where=str(path),
            limit="an extension of vLLM 0.20 to 0.33 is needed",
            way_out="install envs/cuda.txt, or name another file",
        ) from e


def _call(operator: Any, offered: Mapping[str, Value]) -> Any:
    """Call an operator by its schema; what its host code refuses becomes an InputError."""
    schema = operator._schema
    arguments = [Argument(a.name, a.has_default_value()) for a in schema.arguments]
    bound = bind(str(schema), arguments, offered)
    try:
        return operator(**bound)
    except RuntimeError as e:
        raise InputError(
            str(e).splitlines()[0],
            where=schema.name,
            limit="the operator refuses this call",
            way_out="choose another launch, or a shape that the kernel has",
        ) from e
