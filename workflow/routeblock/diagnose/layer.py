# SPDX-License-Identifier: Apache-2.0
"""The layer that a question is about: its sizes and quantisation, from a model's config.json alone or from options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routeblock.errors import InputError
from routeblock.moe.marlin_launch import GROUPS, Gemm, Weights

GEMMS = ("w13", "w2")
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Layer:
    """One rank's share of an MoE layer: `intermediate` is that of the rank, `experts` are all of the model's. awq: the
    weights lie as AutoAWQ packs them; else as GPTQ or compressed-tensors.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weights: Weights
    awq: bool = True

    def gemm(self, name: str, tokens: int) -> Gemm:
        """N, K and routes of `w13` or `w2` at a number of tokens."""
        routes = tokens * self.top_k
        if name == "w13":
            return Gemm(2 * self.intermediate, self.hidden, routes)
        return Gemm(self.hidden, self.intermediate, routes)

    def document(self) -> dict[str, Any]:
        """The layer as JSON."""
        return {
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "experts": self.experts,
            "top_k": self.top_k,
            "dtype": self.weights.dtype,
            "group_size": self.weights.group_size,
            "zero_points": self.weights.zero_points,
            "layout": "AutoAWQ" if self.awq else "GPTQ or compressed-tensors",
        }


def _refuse(what: str, limit: str, way_out: str, where: str = "layer") -> InputError:
    return InputError(what, where=where, limit=limit, way_out=way_out)


def layer_from(config: Path | None, given: Mapping[str, Any], tensor_parallel: int = 1) -> Layer:
    """The layer of a `config.json` (its path or its folder's); a value that is `given` and not None takes its place.

    `given` may hold hidden, intermediate, experts, top_k, dtype, group_size, zero_points. Where no file says how the
    weights lie, zero points mean AutoAWQ's layout. Raises InputError for a value that neither says, and for sizes that
    the kernel does not take.
    """
    known = {name: value for name, value in given.items() if value is not None}
    values = {**(_read(config, known) if config is not None else {}), **known}
    for name in ("hidden", "intermediate", "experts", "top_k", "group_size", "zero_points", "dtype"):
        if name not in values:
            option = name.replace("_", "-")
            raise _refuse(
                f"no {option}", "the layer's sizes and quantisation are needed", f"give --model or --{option}"
            )
    layer = Layer(
        values["hidden"],
        values["intermediate"],
        values["experts"],
        values["top_k"],
        Weights(values["dtype"], values["zero_points"], values["group_size"]),
        values.get("awq", values["zero_points"]),
    )
    return _checked(layer, tensor_parallel)


def _checked(layer: Layer, tensor_parallel: int) -> Layer:
    group, whole = layer.weights.group_size, layer.intermediate
    if layer.weights.dtype not in DTYPES:
        raise _refuse(f"dtype {layer.weights.dtype}", f"the kernel takes {' and '.join(DTYPES)}", "give --dtype")
    if group not in GROUPS:
        raise _refuse(f"group size {group}", f"the kernel takes {', '.join(map(str, GROUPS))}", "check the checkpoint")
    if min(layer.hidden, whole, layer.experts, layer.top_k, tensor_parallel) < 1 or layer.top_k > layer.experts:
        raise _refuse(
            f"hidden {layer.hidden}, intermediate {whole}, {layer.experts} experts, top-{layer.top_k}, tensor parallel"
            f" {tensor_parallel}",
            "all from 1, top-k at most the experts",
            "check the sizes",
        )
    if layer.hidden % 128:
        raise _refuse(f"hidden {layer.hidden}", "W13's K and W2's N must be a multiple of 128", "check the sizes")
    least = max(64, group)
    if whole % tensor_parallel or whole // tensor_parallel % least:
        fits = [t for t in (1, 2, 4, 8) if whole % (t * least) == 0]
        raise _refuse(
            f"intermediate {whole} split in {tensor_parallel} = {whole / tensor_parallel:g}, with group size {group}",
            f"each rank's share must be a multiple of {least}",
            f"use --tp {' or '.join(map(str, fits))}" if fits else "use expert parallelism (--ep)",
        )
    return replace(layer, intermediate=whole // tensor_parallel)


def _read(config: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    # Imported here: a question with options alone needs no reader of checkpoints.
    from routeblock.checkpoint.folder import Folder
    from routeblock.checkpoint.model import CONFIG, Container, Quantization, read_model

    path = config / CONFIG if config.is_dir() else config
    if not path.is_file():
        raise _refuse("no such file", "a model's config.json is needed", "name the file or its folder", str(path))
    given, layout = None, {}
    if {"group_size", "zero_points"} <= known.keys():  # an unquantised model's file serves too
        given = Quantization(Container.AWQ, known["group_size"], known["zero_points"], ())
    model = read_model(Folder(path.parent, {CONFIG: path}, None), given)
    if given is None:
        layout = {"awq": model.quantization.container is Container.AWQ}
    return {
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "experts": model.num_experts,
        "top_k": model.top_k,
        "dtype": model.dtype,
        "group_size": model.quantization.group_size,
        "zero_points": model.quantization.zero_points,
        **layout,
    }
