# SPDX-License-Identifier: Apache-2.0
"""Tensor files, read in a process of their own: nothing that another module imports may be needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from routeblock.evidence.tensors import save_tensors

READ = """
import sys
from pathlib import Path
from routeblock.evidence.tensors import load_tensors
x = load_tensors(Path(sys.argv[1]))["x"]
print(x.dtype, x.tobytes().hex())
"""


def test_bfloat16_is_read_by_a_process_that_reads_nothing_else(tmp_path: Path) -> None:
    x = np.arange(-3, 5).astype(ml_dtypes.bfloat16)
    save_tensors(tmp_path / "x.safetensors", {"x": x})
    done = subprocess.run([sys.executable, "-c", READ, tmp_path / "x.safetensors"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bfloat16", x.tobytes().hex()]
