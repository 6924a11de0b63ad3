# SPDX-License-Identifier: Apache-2.0
"""Tensor files, read in a process of their own: nothing that another module imports may be needed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.evidence.tensors import load_tensors, save_tensors

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


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_a_dtype_that_numpy_has_not_is_refused(tmp_path: Path, dtype: str) -> None:
    header = json.dumps({"x": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(InputError, match="tensor 'x' cannot be read") as caught:
        load_tensors(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)
