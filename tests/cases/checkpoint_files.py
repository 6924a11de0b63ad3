# SPDX-License-Identifier: Apache-2.0
"""Edits of generated checkpoints: configuration, index, names and shards, as other tools write and break them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
Tensor = tuple[str, list[int], bytes]  # dtype, shape, data


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON mapping."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def configure(root: Path, *absent: str, **values: Any) -> None:
    """Remove keys of config.json and set others."""

    def change(config: dict[str, Any]) -> None:
        for key in absent:
            del config[key]
        config.update(values)

    edit(root / "config.json", change)


def quantise(root: Path, **values: Any) -> None:
    """Set keys of quantization_config."""
    edit(root / "config.json", lambda c: c["quantization_config"].update(values))


def read_shard(path: Path) -> dict[str, Tensor]:
    """A shard's tensors in the order of their data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {
        name: (header[name]["dtype"], header[name]["shape"], data[start + a : start + b])
        for name, (a, b) in sorted(places.items(), key=lambda item: item[1])
    }


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A shard of these tensors, without gaps."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values()))


def shards(root: Path) -> list[Path]:
    """The shards, ascending."""
    return sorted(p for p in root.glob("*.safetensors") if not p.name.startswith("."))


def rename(root: Path, pattern: str, replacement: str) -> None:
    """Rename tensors in shards and index."""
    for path in shards(root):
        write_shard(path, {re.sub(pattern, replacement, n): t for n, t in read_shard(path).items()})
    if (root / INDEX).exists():
        edit(
            root / INDEX,
            lambda i: i.update(
                weight_map={re.sub(pattern, replacement, n): shard for n, shard in i["weight_map"].items()}
            ),
        )


def shard_of(root: Path, tensor: str) -> Path:
    """The shard that the index names for a tensor."""
    return root / str(json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"][tensor])


def add(path: Path, name: str, tensor: Tensor) -> None:
    """Put one more tensor into a shard, past the index."""
    write_shard(path, {**read_shard(path), name: tensor})


def hollow(path: Path) -> None:
    """Keep a shard's header and size, and turn its data into a hole."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    with path.open("wb") as f:
        f.write(data[:start])
        f.truncate(len(data))
