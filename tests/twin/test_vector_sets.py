# SPDX-License-Identifier: Apache-2.0
"""The twin on CPUs without AVX-512 and without AVX2: numba's target is lowered, the recorded bits must come out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from routeblock.twin.jit import VECTOR_SETS

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
# The first recorded GEMMs: both dtypes, zero points, groups of 32, subnormals.
CHILD = """
import json, sys
from itertools import islice
from pathlib import Path
from routeblock.twin import jit, self_test
found = islice(self_test.gemms(Path(sys.argv[1])), 8)
print(json.dumps([jit.vector_set(), {c.name: [c.elements, c.differing] for c in found}]))
"""
# By CPU: what it is called, and the sets of instructions that it has not.
LOWERED = {"avx2": ("haswell", ("avx512", "avx10", "amx")), "sse2": ("nehalem", ("avx", "amx", "fma", "f16c", "vaes"))}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instructions")
@pytest.mark.parametrize("widest", LOWERED)
def test_a_cpu_with_fewer_vector_instructions_gives_the_recorded_bits(tmp_path: Path, widest: str) -> None:
    name, missing = LOWERED[widest]
    has = {feature: on and not feature.startswith(missing) for feature, on in llvm.get_host_cpu_features().items()}
    if not has[widest]:
        pytest.skip(f"this CPU has no {widest} itself")
    features = ",".join(("+" if on else "-") + feature for feature, on in sorted(has.items()))
    lowered = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(GOLDEN)], env=os.environ | lowered, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    used, found = json.loads(done.stdout)
    assert used == widest in VECTOR_SETS
    assert len(found) == 8 and all(elements and not differing for elements, differing in found.values()), found
