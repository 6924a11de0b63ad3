# SPDX-License-Identifier: Apache-2.0
"""Hostile versions of valid files: bytes changed blindly, and by somebody who knows the format."""

from __future__ import annotations

import json
import lzma
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json

Random = random.Random
Mutate = Callable[[bytes, Random], bytes]

DEEP = "deep"  # stands for a list nested deeper than Python's stack
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 2**64, 10**400, -(2**63), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "\ud800", "\0", "x" * 5000, "../../outside", "/etc/hostname", ".", "..", "a/../../b", "C:\\x",
    "routeblock.record.v1", "0" * 64, [], {}, [[]], {"": {}}, [0] * 3000, {str(i): i for i in range(500)}, DEEP,
)  # fmt: skip
WORDS = (0, 1, 7, 8, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def of_bytes(data: bytes, rng: Random) -> bytes:
    """One to four blind changes: bits, lengths, pieces left out, doubled, moved, filled, and the end cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        upto = min(len(out), at + rng.choice((1, 2, 4, 8, 16, 64, 1024)))
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord("{"), ord("0"), ord("\n")))
            case 2:
                size = rng.choice((1, 2, 4, 8))
                word = rng.choice(WORDS) % (1 << 8 * size)
                out[at : at + size] = word.to_bytes(size, rng.choice(("little", "big")))
            case 3:
                del out[at:upto]
            case 4:
                out[at:at] = out[at:upto]
            case 5:
                out[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
            case 6:
                del out[at:]
            case _:
                out[at:upto] = bytes([rng.choice((0, 0x20, 0xFF))]) * (upto - at)
    return bytes(out)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        found.append((value, key))
        _places(inner, found)
    return found


def of_document(value: Any, rng: Random) -> Any:
    """One to three changes of a JSON document, which is changed itself."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(value, [])
        if not places or rng.random() < 0.02:
            return deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(places)
        match rng.randrange(7):
            case 0 | 1:
                holder[key] = deepcopy(rng.choice(VALUES))
            case 2:
                del holder[key]
            case 3:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
            case 4 if isinstance(holder, dict):
                holder[rng.choice(("", "x", key + "x", "../x", "__metadata__"))] = holder.pop(key)
            case 5 if isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), deepcopy(holder[key]))
            case _ if isinstance(holder[key], int | float):
                holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], 2 * holder[key]))
            case _ if isinstance(holder[key], str):
                holder[key] = of_bytes(holder[key].encode(errors="replace"), rng).decode("latin-1")
            case _:
                holder[key] = [holder[key]]
    return value


def _keys(holder: Any) -> Any:
    return holder.keys() if isinstance(holder, dict) else range(len(holder))


def written(value: Any, rng: Random) -> bytes:
    """A document as JSON: mostly canonical, so that it comes past the first check."""
    try:
        text = canonical_json(value)
    except (InputError, ValueError, RecursionError):
        text = json.dumps(value).encode()  # NaN, half a pair of surrogates
    if rng.random() < 0.1:
        text = json.dumps(value, indent=1).encode()
    deep = rng.choice((900, 5000, 200_000))
    return text.replace(b'"deep"', b"[" * deep + b"]" * deep)


def of_json(data: bytes, rng: Random) -> bytes:
    """A JSON file."""
    return of_bytes(data, rng) if rng.random() < 0.2 else written(of_document(json.loads(data), rng), rng)


def of_lines(data: bytes, rng: Random) -> bytes:
    """A file of JSON lines."""
    if rng.random() < 0.2:
        return of_bytes(data, rng)
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            lines.append(lines[at])
        case 1:
            lines[at] = rng.choice((b"", b"null", b"[]", b"{}"))
        case _:
            lines[at] = written(of_document(json.loads(lines[at]), rng), rng)
    return b"".join(line + b"\n" for line in lines)


def of_safetensors(data: bytes, rng: Random) -> bytes:
    """A safetensors file: its header as a document, its header's length, its data."""
    choice = rng.random()
    if choice < 0.2:
        return of_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    text = json.dumps(of_document(header, rng) if choice < 0.8 else header).encode()
    deep = rng.choice((900, 200_000))
    text = text.replace(b'"deep"', b"[" * deep + b"]" * deep)
    text += b" " * (-len(text) % 8)
    stated = rng.choice(WORDS) if choice > 0.9 else len(text)
    return struct.pack("<Q", stated) + text + rest[: rng.choice((len(rest), len(rest), 0, len(rest) // 2))]


def of_store(data: bytes, rng: Random) -> bytes:
    """A tensor store: the safetensors file under its xz, and the index inside that."""
    if rng.random() < 0.15:
        return of_bytes(data, rng)
    inner = lzma.decompress(data)
    if rng.random() < 0.5:
        inner = of_safetensors(inner, rng)
    else:
        from safetensors.numpy import load, save

        entries = load(inner)
        index = written(of_document(json.loads(entries["index"].tobytes()), rng), rng)
        entries["index"] = np.frombuffer(index, np.uint8)
        if rng.random() < 0.2:
            entries.pop(rng.choice(sorted(entries)))
        inner = save(entries)
    return lzma.compress(inner, preset=0)


def of_npy(data: bytes, rng: Random) -> bytes:
    """An array of NumPy: the text of its header and its length."""
    if rng.random() < 0.3:
        return of_bytes(data, rng)
    length = int.from_bytes(data[8:10], "little")
    text, rest = data[10 : 10 + length].decode("latin-1"), data[10 + length :]
    size = rng.choice(WORDS)
    swaps = {
        "'<i4'": (
            "'|O'",
            "'<f8'",
            "'|S0'",
            "'<U4'",
            "[('a', '<i4')]",
            "'>i4'",
            "'|b1'",
            "'|V4'",
            "'<M8[s]'",
            "''",
            "5",
        ),
        "False": ("True", "None", "1", "'x'"),
        "(": (f"({size}, ", f"(-{size}, ", "(0, ", "((", "(" * 5000, "[", f"({size}, {size}, "),
        "shape": ("Shape", "descr"),
        "{": ("{" * 90, "-" * 9000 + "{", "lambda: {", "{**"),
    }
    old = rng.choice(sorted(swaps))
    new = text.replace(old, rng.choice(swaps[old]), 1)
    version = rng.choice((data[6:8], data[6:8], data[6:8], b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    width = 2 if version == b"\x01\x00" else 4
    stated = rng.choice((len(new), len(new), len(new), size)) % (1 << 8 * width)
    magic = rng.choice((data[:6], data[:6], data[:6], b"PK\x03\x04\x00\x00"))
    return magic + version + stated.to_bytes(width, "little") + new.encode("latin-1") + rest


def of_parquet(data: bytes, rng: Random) -> bytes:
    """A parquet table: other columns, types, empty cells, codecs, and its bytes, most of them in the footer."""
    if rng.random() < 0.6:
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        at = rng.choice((0, footer, footer, len(data) - 12))
        return data[:at] + of_bytes(data[at:], rng)
    table = pq.read_table(pa.BufferReader(data))
    name = rng.choice(table.column_names)
    index, column = table.column_names.index(name), table[name]
    match rng.randrange(9):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.append_column(rng.choice((name, "x", "routing")), column)
        case 2:
            values = column.to_pylist()
            table = table.set_column(index, name, [[None, *values[1:]] if values else values])
        case 3:
            other = rng.choice((pa.string(), pa.float64(), pa.int8(), pa.bool_(), pa.float16(), pa.large_string()))
            table = table.set_column(index, name, pa.array([None] * len(table), other))
        case 4:
            table = table.set_column(index, name, pa.array([[1, 2]] * len(table)))
        case 5:
            table = table.set_column(index, name, pa.nulls(len(table)))
        case 6:
            table = table.slice(0, rng.choice((0, 1)))
        case 7:
            table = table.set_column(index, name, column.dictionary_encode())
        case _:
            table = pa.concat_tables([table] * rng.choice((2, 50)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression=rng.choice(("zstd", "gzip", "snappy", "none")))
    return bytes(sink.getvalue())


def of_yaml(data: bytes, rng: Random) -> bytes:
    """A YAML file: lines doubled, left out, moved in; values of every kind that YAML knows."""
    if rng.random() < 0.2:
        return of_bytes(data, rng)
    lines = data.decode().splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")])
    key = lines[at].partition(":")[0]
    values = (
        "&a [*a]", "&a {b: *a}", "!!python/object/apply:os.system [ls]", "!!binary aGk=", "!!set {a, b}", "2020-01-01",
        "2020-99-99", "0x" + "f" * 9000, "1:2:3:4", ".nan", "-.inf", "1e999", "[" * 3000, "{[1, 2]: 3}", "{null: 1}",
        "~", "'\\ud800'", '"\\ud800"', "? x", "<<: {a: 1}", "!!omap [a: 1]", "!!timestamp x", "|", "@", "%", "`", "yes",
        "!!int x", "!!float x", "0b" + "1" * 20000, "9" * 5000, "!!pairs [a: 1]", "- a", "[]", "{}", "{1: 2}", "'x'",
        "!x y", "&a x\n" + key + "2: *a", "*missing", "{[]: 1}", "{? {a: 1} : 2}",
    )  # fmt: skip
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 2:
            lines[at] = " " * rng.randrange(5) + lines[at].lstrip()
        case _:
            lines[at] = f"{key}: {rng.choice(values)}"
    return "\n".join(lines).encode(errors="surrogatepass")


BY_SUFFIX: dict[str, Mutate] = {
    ".json": of_json,
    ".jsonl": of_lines,
    ".safetensors": of_safetensors,
    ".xz": of_store,
    ".npy": of_npy,
    ".parquet": of_parquet,
    ".yaml": of_yaml,
}
