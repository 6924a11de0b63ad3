# SPDX-License-Identifier: Apache-2.0
"""How the packed MoE kernel cuts a GEMM into tiles and slices ("data parallel, then two-tile stream-K").

Facts: the scheduling code of vLLM's Marlin MoE kernel, versions 0.20 to 0.33; recorded H200 outputs confirm the parts
that decide bits. Tiles are numbered block-major: tile = block * n_tiles + n_tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from routeblock.errors import InputError

BLOCK_SIZES = (8, 16, 32, 48, 64)
# (thread_k, thread_n) of the kernels that exist, by whether the block is small (8 and 16 rows).
THREAD_SIZES_SMALL = ((128, 64), (64, 128), (128, 128))
THREAD_SIZES_LARGE = ((64, 256), (64, 128), (128, 64))


def thread_sizes(block_size: int) -> tuple[tuple[int, int], ...]:
    """The (thread_k, thread_n) pairs that exist for a block size."""
    return THREAD_SIZES_SMALL if block_size <= 16 else THREAD_SIZES_LARGE


def operator_group(group_size: int, k: int) -> int:
    """The group that the operator sees: -1 (one scale per column) where K rows make one group.

    It looks at the number of groups, not at their size: recorded on an H200, vLLM 0.24.0, with and without zero points.
    """
    return -1 if group_size == k else group_size


@dataclass(frozen=True)
class Partition:
    """The cut of one GEMM.

    `tiles` tiles, of which the first `direct_tiles` keep all of K in one CUDA block; the K-tiles of the others form one
    line that is cut every `iters` K-tiles.
    """

    blocks: int
    n_tiles: int
    k_tiles: int
    grid: int
    tiles: int
    direct_tiles: int
    iters: int

    def slices(self, block: int, n_tile: int) -> list[tuple[int, int]]:
        """The slices of a tile as (first K-tile, one past the last), ascending."""
        if not (0 <= block < self.blocks and 0 <= n_tile < self.n_tiles):
            raise IndexError(f"tile ({block}, {n_tile}) of {self.blocks} blocks x {self.n_tiles} N-tiles")
        tile = block * self.n_tiles + n_tile
        if tile < self.direct_tiles:
            return [(0, self.k_tiles)]
        first = (tile - self.direct_tiles) * self.k_tiles
        cuts = range((first // self.iters + 1) * self.iters, first + self.k_tiles, self.iters)
        edges = [0, *(cut - first for cut in cuts), self.k_tiles]
        return list(pairwise(edges))

    def is_split(self, block: int, n_tile: int) -> bool:
        """Whether a tile has more than one slice."""
        return len(self.slices(block, n_tile)) > 1

    def signature(self, block: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The slices of all N-tiles of a block: two blocks with equal signatures are computed alike."""
        return tuple(tuple(self.slices(block, n)) for n in range(self.n_tiles))

    @property
    def is_single_slice(self) -> bool:
        """Whether no tile is split: no cut, or every cut at a tile's edge."""
        shared_length = (self.tiles - self.direct_tiles) * self.k_tiles
        return self.iters >= shared_length or self.iters % self.k_tiles == 0


def partition(
    blocks: int, n: int, k: int, thread_n: int, thread_k: int, grid: int, group_size: int, full_k: bool = False
) -> Partition:
    """Cut a GEMM of `blocks` route blocks, N columns and K rows of weights over `grid` CUDA blocks.

    group_size is the quantisation group along K, -1 for one scale per column; one group over all of K is cut as that.
    `full_k` is the batch-invariant mode of newer builds: every tile keeps full K. Raises InputError when the sizes do
    not divide.
    """
    if blocks < 0 or grid < 1:
        raise InputError(
            f"{blocks} blocks on a grid of {grid}",
            where="partition",
            limit="blocks from 0, grid from 1",
            way_out="check the plan and the launch",
        )
    if thread_n < 1 or thread_k < 16 or n % thread_n or k % thread_k or thread_k % 16:
        raise InputError(
            f"N={n}, K={k} with thread_n={thread_n}, thread_k={thread_k}",
            where="partition",
            limit="N must be a multiple of thread_n, K of thread_k, thread_k of 16",
            way_out="choose thread sizes that divide the shape",
        )
    if group_size != -1 and (group_size < 16 or group_size % 16 or k % group_size):
        raise InputError(
            f"group size {group_size} with K={k}",
            where="partition",
            limit="a multiple of 16 that divides K, or -1",
            way_out="check the quantisation settings",
        )
    group_size = operator_group(group_size, k)
    n_tiles, k_tiles = n // thread_n, k // thread_k
    tiles = blocks * n_tiles
    if full_k:
        shared = tiles if tiles <= grid else tiles % grid
        return Partition(blocks, n_tiles, k_tiles, grid, tiles, tiles - shared, k_tiles)
    shared = tiles
    if tiles > grid:
        shared = tiles % grid
        if 3 * shared <= grid:
            shared += grid
    iters = -(-k_tiles * shared // grid)
    group_steps, tile_steps = group_size // 16, thread_k // 16
    if group_size != -1 and group_steps >= tile_steps:
        multiple = group_steps // tile_steps
        iters = -(-iters // multiple) * multiple
    return Partition(blocks, n_tiles, k_tiles, grid, tiles, tiles - shared, max(iters, 1))
