# SPDX-License-Identifier: Apache-2.0
"""The twin against every recorded output in fixtures/golden, bit for bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.moe import awq
from routeblock.moe.routing import AlignedPlan, align, check_plan
from routeblock.twin import self_test_inputs as inputs
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import combine, moe_layer, silu_and_mul
from routeblock.twin.tensor_core import mma_m16n8k16

SURFACES = {"w13": "w13", "activation": "act", "w2": "w2", "final": "fin"}  # ours to the recording's
LAYER_LAUNCHES = {"g246": (64, 128, 246), "g200": (64, 128, 200), "auto": (128, 64, 528)}


class Comparison(NamedTuple):
    """One recorded output: how many of its elements (for digests: 0 or 1) the twin does not reproduce."""

    name: str
    elements: int
    differing: int


def _bits(name: str, ours: NDArray[Any], recorded: NDArray[Any]) -> Comparison:
    mine, theirs = np.ascontiguousarray(ours), np.ascontiguousarray(recorded)
    if mine.shape != theirs.shape or mine.dtype.itemsize != theirs.dtype.itemsize:
        return Comparison(name, theirs.size, theirs.size)
    unsigned = f"u{theirs.dtype.itemsize}"
    return Comparison(name, theirs.size, int((mine.view(unsigned) != theirs.view(unsigned)).sum()))


def _broken(path: Path, error: Exception) -> InputError:
    found = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(
        f"not a readable recording: {found}",
        where=str(path),
        limit="all recorded files are needed, whole",
        way_out="restore the folder",
    )


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a recorded .npz. Raises InputError if it is damaged, FileNotFoundError if it is missing."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return _Recorded(path, {name: stored[name] for name in stored.files})
    except FileNotFoundError:
        raise
    except (AttributeError, BadZipFile, EOFError, KeyError, OSError, TypeError, ValueError, zlib.error) as e:
        raise _broken(path, e) from e


def _digests(path: Path) -> dict[str, Any]:
    """What a recorded .json says. Raises as `_arrays` does."""
    try:
        return _Recorded(path, dict(json.loads(path.read_bytes())))
    except (RecursionError, TypeError, ValueError) as e:
        raise _broken(path, e) from e


class _Recorded(dict[str, Any]):
    """A recording by name; InputError for one that its file does not hold."""

    def __init__(self, path: Path, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise _broken(self.path, ValueError(f"it holds no {name}"))


def tensor_core(folder: Path) -> Iterator[Comparison]:
    """All m16n8k16 vectors."""
    stored = _arrays(folder / "mma_m16n8k16.npz")
    for architecture in ("ampere", "hopper"):
        for short, dtype in inputs.DTYPES.items():
            a, b, c, d = (stored[f"{architecture}_{short}_{x}"] for x in "abcd")
            ours = [mma_m16n8k16(a[i].view(dtype), b[i].view(dtype), c[i], architecture) for i in range(len(a))]
            yield _bits(f"mma {architecture} {short}", np.stack(ours), d)


def gemms(folder: Path) -> Iterator[Comparison]:
    """All recorded single GEMMs, in both orders."""
    for file, cases, draw in (
        ("h200_cases.npz", inputs.CASES, inputs.case_inputs),
        ("h200_corners.npz", inputs.CORNERS, inputs.corner_inputs),
    ):
        stored = _arrays(folder / file)
        for name, case in cases.items():
            drawn, dtype = draw(name), inputs.DTYPES[case.dtype]
            thread_k, thread_n, grid = case.launch
            for order, short in inputs.ORDERS.items():
                arrival = inputs.arrival(order, drawn.ids.size)
                ours = moe_gemm(
                    drawn.x.astype(dtype),
                    drawn.q,
                    drawn.z if case.has_zero_points else None,
                    drawn.s.astype(dtype),
                    align(drawn.ids, case.experts, case.block_size, arrival),
                    top_k=case.top_k,
                    architecture="hopper",
                    thread_k=thread_k,
                    thread_n=thread_n,
                    grid=grid,
                    group_size=case.group_size,
                    fp32_reduce=case.fp32_reduce,
                )
                yield _bits(f"gemm {name} {order}", ours, stored[f"{name}.{short}"])


def one_group(folder: Path) -> Iterator[Comparison]:
    """GEMMs whose group is all of K, in two orders each, by digest."""
    stored = _digests(folder / "h200_one_group.json")
    for number, case in inputs.ONE_GROUP.items():
        drawn, random_order = inputs.one_group_inputs(number)
        dtype, (thread_k, thread_n, grid) = inputs.DTYPES[case.dtype], case.launch
        for short, arrival in (("st", None), ("rnd", random_order)):
            ours = moe_gemm(
                drawn.x.astype(dtype), drawn.q, drawn.z if case.has_zero_points else None, drawn.s.astype(dtype),
                align(drawn.ids, case.experts, case.block_size, arrival), top_k=case.top_k, architecture="hopper",
                thread_k=thread_k, thread_n=thread_n, grid=grid, group_size=case.group_size,
            )  # fmt: skip
            differs = sha256_array(ours) != stored[f"{number}.{short}"]
            yield Comparison(f"gemm with one group over K {number} {short}, digest", 1, int(differs))


def activations(folder: Path) -> Iterator[Comparison]:
    """silu for every bit pattern of both dtypes, and silu_and_mul of random pairs."""
    stored = _arrays(folder / "h200_silu_and_mul.npz")
    for short, dtype in inputs.DTYPES.items():
        gates = np.arange(65536, dtype=np.uint16).view(dtype)[:, None]
        ours = silu_and_mul(np.concatenate([gates, np.ones_like(gates)], axis=1))[:, 0]
        yield _bits(f"silu {short}", ours, stored[f"silu_{short}"])
        gate, up, out = (stored[f"pair_{x}_{short}"] for x in "guo")
        yield _bits(f"silu_and_mul {short}", silu_and_mul(np.concatenate([gate, up], axis=1).view(dtype)), out)


def sums(folder: Path) -> Iterator[Comparison]:
    """torch.sum and vLLM's moe_sum over the top-k routes."""
    stored = _arrays(folder / "h200_corners.npz")
    for top_k in (2, 4, 8):
        for short, dtype in inputs.DTYPES.items():
            rows = inputs.combine_rows(top_k).astype(dtype)
            yield _bits(f"torch.sum k={top_k} {short}", combine(rows), stored[f"sum{top_k}_{short}"])
            form = combine(rows, "each") if top_k == 4 else combine(rows, "fp32")
            yield _bits(f"moe_sum k={top_k} {short}", form, stored[f"moe_sum{top_k}_{short}"])


def layer(folder: Path) -> Iterator[Comparison]:
    """The whole layer at three launches, in both orders."""
    stored = _arrays(folder / "h200_grid246.npz")
    digests = _digests(folder / "h200_sha256.json")
    ids, weights = inputs.layer_routing()
    experts = sorted(set(ids.reshape(-1).tolist()))
    rows = np.full(inputs.EXPERTS, -1, np.int32)
    rows[experts] = np.arange(len(experts), dtype=np.int32)
    w13, w2 = (inputs.layer_weights(gemm, experts) for gemm in ("w13", "w2"))
    for point, launch in LAYER_LAUNCHES.items():
        for order in inputs.ORDERS:
            arrival = inputs.arrival(order, ids.size)
            plan = align(ids, inputs.EXPERTS, inputs.BLOCK, arrival, expert_map=rows)
            surfaces = moe_layer(
                inputs.layer_hidden(), ids, weights, w13, w2, plan,
                architecture="hopper", w13_launch=launch, w2_launch=launch, group_size=inputs.GROUP,
                expert_map=rows,
            )  # fmt: skip
            for surface, theirs in SURFACES.items():
                differs = sha256_array(surfaces[surface]) != digests[f"{point}.{order}.{theirs}"]
                yield Comparison(f"layer {point} {order} {surface}, digest", 1, int(differs))
                if point == "g246":
                    yield _bits(f"layer {point} {order} {surface}", surfaces[surface], stored[f"{order}.{theirs}"])


def packing(folder: Path) -> Iterator[Comparison]:
    """Expert 106 in AWQ and Marlin packing."""
    stored = _digests(folder / "packed_e106.json")
    for gemm in ("w13", "w2"):
        q, z, s = inputs.layer_expert(gemm, 106)
        ours = {
            "awq_qweight": awq.pack_awq(q),
            "awq_qzeros": awq.pack_awq(z),
            "marlin_qweight": awq.marlin_repack_weights(q),
            "marlin_scales": awq.marlin_permute_scales(s),
            "marlin_zeros": awq.marlin_pack_zeros(z),
        }
        for name, x in ours.items():
            found = {"shape": list(x.shape), "dtype": x.dtype.name, "sha256": sha256_array(x)}
            same = found == stored[f"{gemm}.e106.{name}"]
            yield Comparison(f"packing {gemm} {name}", 1, int(not same))


def native_plan(folder: Path) -> Iterator[Comparison]:
    """The recorded native plan is legal, and its fingerprint is not the stable one."""
    stored = _arrays(folder / "h200_native_plan.npz")
    ids, _ = inputs.layer_routing()
    sorted_ids, experts = stored["sorted_token_ids"], stored["expert_ids"]
    plan = AlignedPlan(sorted_ids, experts, sorted_ids.size, inputs.BLOCK, ids.size)
    check_plan(plan, ids, inputs.EXPERTS, where="recorded native plan")
    same = plan.fingerprint() == align(ids, inputs.EXPERTS, inputs.BLOCK).fingerprint()
    yield Comparison("native plan legal and not the stable one", 1, int(same))


CHECKS = (tensor_core, gemms, one_group, activations, sums, layer, packing, native_plan)


def compare(folder: Path) -> list[Comparison]:
    """Every comparison. Raises InputError if a recorded file is missing or damaged."""
    try:
        return [c for check in CHECKS for c in check(folder)]
    except FileNotFoundError as e:
        raise InputError(
            f"{e.filename} is missing",
            where=str(folder),
            limit="all recorded files are needed",
            way_out="restore the folder",
        ) from e


def check(folder: Path, out: Path) -> list[str]:
    """Write every comparison to the file `out`, sealed; the names of those that differ."""
    found = compare(folder)
    rows = [{"name": c.name, "elements": c.elements, "differing": c.differing} for c in found]
    write_json(out, {"format": "routeblock.golden.v1", "comparisons": rows})
    seal(
        out.with_suffix(".manifest.json"),
        rule="golden",
        outputs=[out],
        inputs=[folder],
        parameters={},
        modules=[__name__],
    )
    return [c.name for c in found if c.differing]
