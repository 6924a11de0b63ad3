# SPDX-License-Identifier: Apache-2.0
"""How many registers does each kernel of vLLM's packed MoE operator take? Makes `moe/marlin_registers.json`.

    python tests/gpu/read_registers.py cubins EXTENSION OUT.json --target sm_80 --tool CUOBJDUMP
    python tests/gpu/read_registers.py ptxas EXTENSION OUT.json --target sm_90 --tool CUOBJDUMP --ptxas PTXAS
    python tests/gpu/read_registers.py driver EXTENSION OUT.json --tool CUOBJDUMP

`cubins`: of code in the extension, without a GPU. `ptxas`: of its PTX, compiled by the ptxas of a CUDA release, without
a GPU. `driver`: of its PTX, compiled by this machine's driver, read by cuFuncGetAttribute; up to a minute a module.
The tables of the same target in `moe/marlin_registers.json` are compared: prints each kernel that differs, exits 1 if
no table equals. CUOBJDUMP and PTXAS come with the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvcc.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.moe.marlin_launch import GROUPS, as_document, register_tables
from routeblock.moe.shared_memory import STAGES

Key = tuple[str, str, int, int, int, int]

# vLLM's scalar type ids, as they stand in the kernels' names.
DTYPES = {1125899906910725: "float16", 1125899906909960: "bfloat16"}
WEIGHTS = {1125899906843648: "u4", 1125899907892224: "u4b8"}
KERNEL = re.compile(
    r"_ZN16marlin_moe_wna166MarlinIL"
    r"l(?P<a>\d+)ELl(?P<b>\d+)ELl(?P<c>\d+)ELl(?P<s>\d+)E"
    r"Li\d+ELi(?P<m>\d+)ELi(?P<n>\d+)ELi(?P<k>\d+)ELb(?P<eight>\d)ELi(?P<stages>\d+)ELi(?P<group>n?\d+)ELb(?P<float>\d)E"
)
NUM_REGS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS


def key(name: str) -> Key | None:
    """What a kernel's mangled name says: dtype, weight type, block size, thread_k, thread_n, group; None: not ours."""
    found = KERNEL.match(name)
    if found is None:
        return None
    value = {part: int(text.replace("n", "-")) for part, text in found.groupdict().items()}
    if value["a"] not in DTYPES or value["b"] not in WEIGHTS or not value["a"] == value["c"] == value["s"]:
        return None
    if value["float"] or value["stages"] != STAGES:
        return None
    block = 8 if value["eight"] else 16 * value["m"]
    group = 16 * value["group"] if value["group"] > 0 else value["group"]
    dtype, weights = DTYPES[value["a"]], WEIGHTS[value["b"]]
    return dtype, weights, block, 16 * value["k"], 16 * value["n"], group


def of_cubins(extension: Path, target: str, tool: str) -> Iterator[tuple[str, int]]:
    """(kernel, registers) of the code for `target`."""
    listing = subprocess.run([tool, "-res-usage", str(extension)], check=True, capture_output=True, text=True).stdout
    arch = name = ""
    for line in listing.splitlines():
        if found := re.match(r"arch = (\S+)", line):
            arch = found[1]
        elif found := re.match(r" Function (\S+):", line):
            name = found[1]
        elif (found := re.match(r"\s+REG:(\d+)", line)) and arch == target and name:
            yield name, int(found[1])
            name = ""


def modules(extension: Path, folder: Path, tool: str) -> list[Path]:
    """The PTX modules of the extension that hold kernels of ours."""
    command = [Path(tool).absolute(), "-xptx", "all", extension.absolute()]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    names = re.compile(r"\.entry\s+(\w+)")
    return [p for p in sorted(folder.glob("*.ptx")) if any(key(name) for name in names.findall(p.read_text()))]


def of_ptxas(module: Path, target: str, ptxas: str) -> list[tuple[str, int]]:
    """(kernel, registers) of one PTX module, compiled for `target`."""
    command = [ptxas, f"-arch={target}", "-v", str(module), "-o", "/dev/null"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    pairs = re.findall(r"Compiling entry function '(\S+)'.*?Used (\d+) registers", report, re.DOTALL)
    return [(name, int(registers)) for name, registers in pairs]


def of_driver(module: Path) -> list[tuple[str, int]]:
    """(kernel, registers) of one PTX module, compiled by the driver for the first GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if (code := getattr(cuda, name)(*arguments)) != 0:
            sys.exit(f"{name} gave {code}")

    device, context, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    text = module.read_bytes() + b"\0"
    call("cuModuleLoadData", ctypes.byref(handle), ctypes.c_char_p(text))
    found = []
    for name in re.findall(r"\.entry\s+(\w+)", text.decode()):
        if key(name):
            function, registers = ctypes.c_void_p(), ctypes.c_int()
            call("cuModuleGetFunction", ctypes.byref(function), handle, name.encode())
            call("cuFuncGetAttribute", ctypes.byref(registers), NUM_REGS, function)
            found.append((name, registers.value))
    return found


def main() -> int:
    """Read, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=("cubins", "ptxas", "driver"))
    parser.add_argument("extension", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--tool", default="cuobjdump")
    parser.add_argument("--ptxas", default="ptxas")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        if asked.how == "cubins":
            pairs = list(of_cubins(asked.extension, asked.target, asked.tool))
        else:
            found = modules(asked.extension, Path(folder), asked.tool)
            work = (lambda m: of_ptxas(m, asked.target, asked.ptxas)) if asked.how == "ptxas" else of_driver
            pairs = [pair for part in pool.map(work, found) for pair in part]
    registers = {key(name): count for name, count in pairs if key(name)}
    document = as_document(registers)
    write_json(
        asked.out,
        {"how": asked.how, "target": asked.target, "extension": sha256_file(asked.extension), "registers": document},
    )
    print(f"{len(registers)} kernels of {asked.extension.name} for {asked.target}, by {asked.how}: {asked.out}")
    equal = 0
    for table in (t for t in register_tables() if t.target == asked.target):
        away = [
            (dtype, weights, block, threads, group, known[i], have[i])
            for dtype, kinds in table.registers.items()
            for weights, blocks in kinds.items()
            for block, kernels in blocks.items()
            for threads, known in kernels.items()
            if (have := document.get(dtype, {}).get(weights, {}).get(block, {}).get(threads))
            for i, group in enumerate(GROUPS)
            if known[i] != have[i]
        ]
        print(f"table {table.first} to {table.last}: {len(away)} kernels differ" + "".join(f"\n  {a}" for a in away))
        equal += not away
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
