# SPDX-License-Identifier: Apache-2.0
"""Inputs of a checkpoint's MoE layer: captured hidden states that somebody has, or a stand-in made on a CPU.

A stand-in is not what the model would compute: it takes the embeddings of a prompt straight to the layer's own norm and
its real router, past every layer before it. It is called `stand_in` wherever it is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from routeblock.checkpoint.folder import lfs_pointer
from routeblock.checkpoint.layer import Checkpoint, ExpertLayer
from routeblock.checkpoint.shards import shard_names
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_array, sha256_file
from routeblock.evidence.tensors import load_tensors

STAND_IN, CAPTURED = "stand_in", "captured"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Inputs:
    """hidden [M, hidden] of the layer's dtype, topk_ids int32 [M, k], topk_weights float32 [M, k], and where from."""

    hidden: NDArray[Any]
    topk_ids: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    source: dict[str, Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """float16 or bfloat16 as numpy has it."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def finite_in(x: NDArray[Any], dtype: str) -> bool:
    """Whether every value is finite once it is rounded to float16 or bfloat16."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.astype(numpy_dtype(dtype))).all())


def captured_inputs(path: Path, checkpoint: Checkpoint, layer: ExpertLayer) -> Inputs:
    """Inputs from a safetensors file: `hidden` [M, hidden], the input of the MoE block (after the layer's norm).

    With `topk_ids` [M, k] integers and `topk_weights` [M, k] the routing is taken as captured, without both it is the
    checkpoint's own router's. Raises InputError for other shapes or dtypes, infinities, NaN, or ids that do not fit.
    """

    def refuse(what: str, limit: str, way_out: str = "capture it again") -> InputError:
        return InputError(what, where=str(path), limit=limit, way_out=way_out)

    if path.exists() and not path.is_file():
        raise refuse("not a regular file", "captured inputs are a safetensors file", "name the file")
    if path.is_file():
        with path.open("rb") as f:
            if pointer := lfs_pointer(path, f.read(1024)):
                raise pointer
    tensors = load_tensors(path)
    unknown = sorted(tensors.keys() - {"hidden", "topk_ids", "topk_weights"})
    if unknown or "hidden" not in tensors or ("topk_ids" in tensors) != ("topk_weights" in tensors):
        raise refuse(
            f"tensors {', '.join(sorted(tensors))}",
            "hidden is needed, topk_ids and topk_weights may come with it, and nothing else",
            "name the tensors so",
        )
    hidden, model = tensors["hidden"], layer.model
    if hidden.ndim != 2 or hidden.shape[0] < 1 or hidden.shape[1] != model.hidden or hidden.dtype.name != layer.dtype:
        raise refuse(
            f"hidden is {hidden.dtype} {list(hidden.shape)}",
            f"this layer takes {layer.dtype} [tokens, {model.hidden}], unrounded as the kernel sees it",
        )
    if not np.isfinite(hidden.astype(np.float32)).all():
        raise refuse("hidden holds an infinity or NaN", "finite values are needed")
    source: dict[str, Any] = {"kind": CAPTURED, "file_sha256": sha256_file(path), "routing": CAPTURED}
    if "topk_ids" not in tensors:
        ids, weights = route(checkpoint, layer, hidden)
        return Inputs(hidden, ids, weights, {**source, "routing": "computed on a CPU by the checkpoint's router"})
    ids, weights = tensors["topk_ids"], tensors["topk_weights"]
    if ids.shape != weights.shape or ids.ndim != 2 or ids.shape[0] != hidden.shape[0]:
        raise refuse(f"topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}", "one row a token in each")
    if ids.shape[1] != model.top_k:
        raise refuse(f"{ids.shape[1]} experts a token", f"the checkpoint's config.json says {model.top_k}")
    checked = _checked_ids(ids, model.num_experts, refuse)
    if weights.dtype.name not in ("float32", "float16", "bfloat16"):
        raise refuse(f"topk_weights is {weights.dtype}", "float32, float16 or bfloat16")
    if not finite_in(weights.astype(np.float32), layer.dtype):
        raise refuse("topk_weights holds an infinity or NaN", f"finite values in {layer.dtype} are needed")
    return Inputs(hidden, checked.astype(np.int32), weights.astype(np.float32), source)


def _checked_ids(ids: NDArray[Any], num_experts: int, refuse: Callable[..., InputError]) -> NDArray[np.int64]:
    """`topk_ids` as int64 if every row names different experts of the layer."""
    drop = "remove such rows from hidden, topk_ids and topk_weights"
    if ids.dtype.kind not in "iu":
        raise refuse(f"topk_ids is {ids.dtype}", "integers are needed")
    outside = np.argwhere((ids < 0) | (ids >= num_experts))
    if outside.size:
        row, slot = (int(x) for x in outside[0])
        limit = f"experts are 0 to {num_experts - 1}; a padded row has no routing"
        raise refuse(f"topk_ids row {row}, slot {slot} is {int(ids[row, slot])}", limit, drop)
    checked: NDArray[np.int64] = ids.astype(np.int64)
    ordered = np.sort(checked, axis=1)
    twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if twice.size:
        row = int(twice[0])
        named = checked[row].tolist()
        slot = next(i for i, e in enumerate(named) if e in named[:i])
        what = f"topk_ids row {row}, slot {slot} is {named[slot]}, as slot {named.index(named[slot])} is"
        raise refuse(what, "the top-k experts of a token are distinct", drop)
    return checked


def stand_in_inputs(
    checkpoint: Checkpoint, layer: ExpertLayer, *, prompt: str | None = None, token_ids: list[int] | None = None
) -> Inputs:
    """A stand-in from the embeddings of `prompt` (by the checkpoint's tokenizer) or of `token_ids`.

    RMS norm and router as the family defines them: sums in float64 in a fixed order, rounded where the model rounds.
    Raises InputError for an empty prompt, ids outside the vocabulary, missing tensors, or a router of another kind.
    """
    if (prompt is None) == (token_ids is None):
        raise InputError(
            "a prompt and token ids" if prompt is not None else "neither a prompt nor token ids",
            where="stand_in inputs",
            limit="one of the two",
            way_out="give one",
        )
    ids = _tokenise(checkpoint, prompt) if prompt is not None else list(token_ids or ())
    embedded = _embed(checkpoint, layer, ids)
    with np.errstate(all="ignore"):
        hidden = _norm(embedded, layer, checkpoint.model.norm_eps)
    _must_be_finite(hidden, "hidden states after the layer's norm", checkpoint)
    topk_ids, topk_weights = route(checkpoint, layer, hidden)
    source = {
        "kind": STAND_IN,
        "hidden": "stand_in: embeddings through this layer's own norm, past every layer before it",
        "routing": "stand_in: the checkpoint's router on these hidden states, computed on a CPU",
        "prompt": prompt,
        "tokens": len(ids),
        "token_ids_sha256": sha256_array(np.asarray(ids, np.int32)),
    }
    if prompt is not None:
        source["tokenizer_sha256"] = sha256_file(checkpoint.folder.path(TOKENIZER))
    return Inputs(hidden, topk_ids, topk_weights, source)


def _tokenise(checkpoint: Checkpoint, prompt: str) -> list[int]:
    path = checkpoint.folder.path(TOKENIZER, way_out="give token ids instead of a prompt")
    with path.open("rb") as f:
        if pointer := lfs_pointer(checkpoint.folder.root / TOKENIZER, f.read(1024)):
            raise pointer
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise InputError(
            "the package tokenizers is not installed",
            where="stand_in inputs",
            limit="a prompt has to be cut into tokens",
            way_out="install envs/base.txt, or give token ids instead of a prompt",
        ) from e
    try:
        ids = list(Tokenizer.from_file(str(path)).encode(prompt, add_special_tokens=False).ids)
    except Exception as e:  # the library raises Exception itself
        raise InputError(
            f"no tokenizer: {str(e).splitlines()[0][:120]}",
            where=str(checkpoint.folder.root / TOKENIZER),
            limit="a tokenizer file is needed",
            way_out="give token ids instead of a prompt",
        ) from e
    return ids


def _embed(checkpoint: Checkpoint, layer: ExpertLayer, ids: list[int]) -> NDArray[Any]:
    """Embedding rows of the tokens, float32 [M, hidden]."""
    name = f"{layer.tensors.prefix}embed_tokens.weight"
    shards = [checkpoint.index[name]] if checkpoint.index and name in checkpoint.index else None
    catalogue = checkpoint.catalogue(shards or shard_names(checkpoint.folder.files, checkpoint.index))
    if shards and name not in catalogue.tensors:  # in another shard than the index says: reading it says so
        catalogue = checkpoint.catalogue(shard_names(checkpoint.folder.files, checkpoint.index))
    ref = catalogue.tensors.get(name)
    if (
        ref is None
        or len(ref.shape) != 2
        or ref.shape[1] != layer.model.hidden
        or ref.dtype not in ("F16", "BF16", "F32")
    ):
        raise InputError(
            f"no tensor {name}" if ref is None else f"tensor {name} is {ref.dtype} {list(ref.shape)}",
            where=str(checkpoint.folder.root),
            limit=f"a stand-in needs embeddings [vocabulary, {layer.model.hidden}] in floating point",
            way_out="give captured inputs instead",
        )
    outside = [t for t in ids if not 0 <= t < ref.shape[0]]
    if outside or not ids:
        raise InputError(
            f"token id {outside[0]}" if outside else "no tokens",
            where="stand_in inputs",
            limit=f"at least one token, ids from 0 to {ref.shape[0] - 1}",
            way_out="correct the token ids" if outside else "give a longer prompt",
        )
    rows = np.asarray(catalogue.read(name)[ids]).astype(np.float32)
    empty = np.flatnonzero(~rows.any(axis=1))
    if empty.size:
        what = "is all 0 in the rows of these tokens"
        raise catalogue.without_data(
            name, what if empty.size == len(ids) else f"is all 0 in the row of token {ids[empty[0]]}"
        )
    _must_be_finite(rows, f"embeddings of these tokens ({name})", checkpoint)
    return rows


def _must_be_finite(x: NDArray[Any], what: str, checkpoint: Checkpoint) -> None:
    if not np.isfinite(x).all():
        raise InputError(
            f"{what}: an infinity or NaN",
            where=str(checkpoint.folder.root),
            limit="finite values are needed",
            way_out="repair the checkpoint, or give other inputs",
        )


def _norm(x: NDArray[Any], layer: ExpertLayer, eps: float) -> NDArray[Any]:
    """RMS norm before the MoE block, rounded to the layer's dtype before and after the weights, as the family does."""
    dtype = numpy_dtype(layer.dtype)
    weights = layer.other(f"{layer.model.family.norm}.weight", (layer.model.hidden,)).astype(np.float64)
    wide = x.astype(np.float64)
    mean = np.array([math.fsum(row) for row in (wide * wide).tolist()]) / layer.model.hidden
    scaled = wide / np.sqrt(mean + eps)[:, None]
    offset = layer.model.family.norm_offset
    if offset:  # these families multiply in float32 and round once
        return (scaled * (weights + offset)).astype(np.float32).astype(dtype)
    return (scaled.astype(np.float32).astype(dtype).astype(np.float64) * weights).astype(np.float32).astype(dtype)


def route(
    checkpoint: Checkpoint, layer: ExpertLayer, hidden: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """topk_ids int32 and topk_weights float32 [M, k] of the layer's real router: softmax over all experts, then top-k.

    Logits are summed in float64 in ascending order and rounded to the layer's dtype; equal probabilities go to the
    lower expert id. Raises InputError for a family whose router is another, and for logits beyond the dtype.
    """
    model = layer.model
    if model.renormalise is None:
        raise InputError(
            f"the router of {model.model_type} is not a plain softmax and top-k",
            where=str(checkpoint.folder.root),
            limit="only that kind is computed here",
            way_out="give captured inputs with topk_ids and topk_weights",
        )
    gate = layer.router().astype(np.float64)
    _must_be_finite(gate, "weights of the router", checkpoint)
    wide = hidden.astype(np.float64)
    logits = np.zeros((hidden.shape[0], model.num_experts))
    for i in range(model.hidden):  # one product and one addition at a time: the same bits on every machine
        logits += wide[:, i, None] * gate[None, :, i]
    with np.errstate(over="ignore"):
        rounded = logits.astype(np.float32).astype(hidden.dtype).astype(np.float64)
    _must_be_finite(rounded, f"logits of the router in {hidden.dtype.name}", checkpoint)
    powers = np.exp(rounded - rounded.max(axis=1, keepdims=True))
    totals = np.array([math.fsum(row) for row in powers.tolist()])
    probabilities = (powers / totals[:, None]).astype(np.float32)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, : model.top_k].astype(np.int32)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if model.renormalise:
        total = np.zeros((weights.shape[0], 1), np.float32)
        for i in range(model.top_k):
            total += weights[:, i : i + 1]
        weights = weights / total
    return ids, weights
