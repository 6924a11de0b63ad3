# SPDX-License-Identifier: Apache-2.0
"""Small hostile jobs for every kernel of a cubin: what a sanitizer watches, and a check of bits besides.

The host refuses ids beyond the pool before a launch; here they reach the kernels, which must treat them as sentinels.
Run as `python -m routeblock.grouped_schedule.sanitizer_cases INDEX CUBIN PROTOCOL`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routeblock.grouped_schedule import fixture as fixtures
from routeblock.grouped_schedule.campaigns import WARPS, Campaign, Mode, Setup
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import POISON, Backend
from routeblock.grouped_schedule.protocol import Cell, load
from routeblock.grouped_schedule.schedules import ARMS, Arm, Family
from routeblock.moe import q6k, q6k_dot

SEED = 20250610


def _ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


# name: (ids, pool, rows, cols). Rows that no band or block divides, one block of columns, an odd number of blocks.
CASES = {
    "one sentinel": (_ids(2, 0, -1, 1, 2, 2, 0), 3, 37, 512),
    "no active job": (_ids(-1, -1, -1), 2, 5, 256),
    "far negative ids": (_ids(-(2**31), 1, -7, 0), 2, 33, 256),
    "ids beyond the pool": (_ids(3, 1, 2**31 - 1, 65_535, 0, 1), 3, 35, 768),
    "one job": (_ids(0), 1, 1, 256),
    "all of one expert": (_ids(*[1] * 41), 2, 66, 512),
    "more jobs than a sorting block": ((np.arange(77, dtype=np.int32) * 13) % 11 - 1, 10, 9, 256),
    "short last band": (_ids(1, 0, 1, -1), 2, 513, 256),
}


def make(name: str, family: Family) -> Fixture:
    """The fixture of a case, its ids unchecked. An odd number of slots gets one more for two tokens."""
    ids, pool, rows, cols = CASES[name]
    if family is Family.PAIRED and ids.size % 2:
        ids = np.concatenate([ids, ids[:1]])
    cell = Cell(family, ids.size, pool, rows, cols)
    weights = fixtures.weights(SEED, pool, rows, cols)
    activations = q6k.random_q8_1(np.random.PCG64(SEED), (ids.size, cols // q6k.Q8_1_VALUES))
    return Fixture(cell, SEED, ids, activations, weights, np.zeros((ids.size, 1), np.int32))


def expected(fixture: Fixture) -> NDArray[np.float32]:
    """Every output row by the definition in NumPy; rows without work keep the poison."""
    cell = fixture.cell
    out = np.full((cell.slots, cell.rows), POISON, np.uint32).view(np.float32)
    for job, expert in enumerate(fixture.ids.tolist()):
        if 0 <= expert < cell.pool:
            activations = np.broadcast_to(fixture.activations[job], (cell.rows, *fixture.activations.shape[1:]))
            out[job] = q6k_dot.dot(fixture.weights[expert], activations)
    return out


def setup(fixture: Fixture, warps: int) -> Setup:
    """A setup that only runs outputs."""
    return Setup(Campaign.SWEEP, fixture.cell, "", SEED, (), Mode.STREAM, warps)


def differences(backend: Backend, warps: tuple[int, ...] = WARPS) -> Iterator[str]:
    """The cases and arms whose output is not, bit for bit, the definition's."""
    for name in CASES:
        for family in Family:
            fixture = make(name, family)
            want = expected(fixture).view(np.uint32)
            for width in warps:
                backend.load(fixture, setup(fixture, width))
                for arm in _arms(family):
                    if not np.array_equal(backend.output(arm).view(np.uint32), want):
                        yield f"{name}, {family}, {arm.name}, {width} warps"


def _arms(family: Family) -> tuple[Arm, ...]:
    return tuple(arm for arm in ARMS if family is Family.PAIRED or not arm.fused)


def main(index: int, cubin: Path, protocol: Path) -> int:
    """Exit code 1 if an output differs."""
    from routeblock.grouped_schedule.cuda_backend import CudaBackend

    wrong = list(differences(CudaBackend(f"gpu{index}", index, cubin, load(protocol))))
    for line in wrong:
        print(line)
    print(f"{len(CASES)} cases, {len(wrong)} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
