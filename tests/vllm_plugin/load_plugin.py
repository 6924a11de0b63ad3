# SPDX-License-Identifier: Apache-2.0
"""Loads the plug-in by vLLM's own loader and holds what `fused_marlin_moe` then looks up; one process a case.

Run in an environment with vllm 0.24.0 by `make test-vllm`; no GPU is needed, and nothing runs on one. Where there is no
driver, vLLM does not load its MoE extension: then an empty library under the driver's name, of which the extension
needs no symbol to register its operators, lets this test load the real one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "ROUTEBLOCK_CANONICAL_ALIGNMENT"
DRIVER = "libcuda.so.1"


def register_operators() -> str:
    """Load vLLM's MoE extension; says with what driver."""
    import torch  # noqa: F401  (the extension links against it)
    import vllm

    told = "the driver of this machine"
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        told = "no driver: an empty library in its place"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / DRIVER
            subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{DRIVER}", "-o", path], check=True)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import vllm._moe_C_stable_libtorch  # noqa: F401

    return told


def loaded(case: str) -> None:
    """In a process of its own: what the name resolves to with the plug-in off, on, or on without the operator."""
    driver = register_operators() if case != "absent" else "extension not loaded"
    from vllm.plugins import load_general_plugins

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.routeblock").addHandler(handler)
    load_general_plugins()

    import torch
    from vllm.model_executor.layers.fused_moe import moe_align_block_size as vllms
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    from routeblock.vllm_plugin.alignment import CanonicalAlignment

    own = vllms.moe_align_block_size
    found = marlin_moe.fused_marlin_moe.__globals__["moe_align_block_size"]
    if case == "on":
        assert isinstance(found, CanonicalAlignment), lines
        assert found.own is own and lines and "canonical order" in lines[0], lines
    elif case == "off":
        assert found is own and lines == [], lines
    elif hasattr(torch.ops._moe_C, "moe_align_block_size"):
        print("absent: not run, this machine's driver lets vLLM load its extension")
        return
    else:
        assert found is own and lines and "is not there" in lines[0], lines
    print(f"{case} ({driver}): fused_marlin_moe aligns by {found!r}; said: {lines}")
    if case != "absent":
        print(f"{case}: {torch.ops._moe_C.moe_align_block_size.default._schema}")


def main() -> int:
    """Each case in its own process; exit code 1 if one fails."""
    from importlib.metadata import version

    assert version("vllm").startswith("0.24.0"), version("vllm")
    failed = 0
    for case in ("off", "on", "absent"):
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | (
            {VARIABLE: "1"} if case != "off" else {}
        )
        failed |= subprocess.run([sys.executable, __file__, case], env=environment).returncode
    print("failed" if failed else "vLLM's loader loads the plug-in; fused_marlin_moe resolves ours when it is on")
    return int(failed != 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        loaded(sys.argv[1])
    else:
        sys.exit(main())
