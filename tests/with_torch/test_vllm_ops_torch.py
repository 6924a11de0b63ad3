# SPDX-License-Identifier: Apache-2.0
"""What vllm_ops refuses once torch is there. Run by `make test-vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeblock.cuda import operators as vllm_ops
from routeblock.errors import InputError


def test_a_missing_operator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="registers no _moe_C::no_such_operator"):
        vllm_ops._operator("_moe_C::no_such_operator", tmp_path / "x.so")


def test_a_file_that_is_no_library_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "_moe_C.abi3.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(InputError, match="cannot be loaded with torch") as caught:
        vllm_ops.VllmOperators(broken)
    assert "\n" not in str(caught.value)


def test_weights_of_unequal_experts_are_refused() -> None:
    rng = np.random.default_rng(5)

    def expert(n: int) -> tuple[Any, Any, Any]:
        return rng.integers(0, 16, (128, n), np.uint8), None, np.ones((1, n), np.float16)

    with pytest.raises(InputError, match=r"expert 1: \(128, 64\)"):
        vllm_ops.load_weights([expert(128), expert(64)], 2, "cpu")
    with pytest.raises(InputError, match="1 experts"):
        vllm_ops.load_weights([expert(128)], 2, "cpu")
