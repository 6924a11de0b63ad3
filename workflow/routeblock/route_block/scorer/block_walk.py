# SPDX-License-Identifier: Apache-2.0
"""An enumerator that walks the CUDA blocks of a launch one by one, written apart from `moe.partition`.

It keeps what a CUDA block of the kernel keeps (its place on the line of K-tiles, the tile it stands in, what is left of
its share) and notes which K-tiles of which tile each block computes. It shares no code with the predictor, which it
checks: only the plan is common to both. The scorer uses it too (`expected_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from numpy.typing import NDArray

Work = tuple[int, int, int]  # tile, first K-tile, one past the last


class Plan(Protocol):
    """What is needed of an alignment plan: sorted_token_ids int32 [rows], the sentinel being `num_routes`."""

    @property
    def sorted_token_ids(self) -> NDArray[Any]:
        """The route of each row."""

    @property
    def num_tokens_post_padded(self) -> int:
        """Rows in use."""

    @property
    def block_size(self) -> int:
        """Rows of a block."""

    @property
    def num_routes(self) -> int:
        """Routes of the plan."""


def walk(tiles: int, k_tiles: int, grid: int, group_size: int, thread_k: int) -> Iterator[Work]:
    """What the CUDA blocks compute, block by block: whole tiles in rounds, then each block's share of the rest."""
    whole = 0
    if tiles > grid:
        rounds, rest = divmod(tiles, grid)
        # A short rest would leave most blocks idle: it is shared out together with the last full round.
        whole = (rounds - 1 if 3 * rest <= grid else rounds) * grid
    for block in range(grid):
        for tile in range(block, whole, grid):
            yield tile, 0, k_tiles
    remaining = (tiles - whole) * k_tiles
    share = remaining // grid + (1 if remaining % grid else 0)
    if group_size >= thread_k and group_size != k_tiles * thread_k:  # one group over K is one scale a column
        # A share ends where a quantisation group ends.
        in_group = group_size // thread_k
        while share % in_group:
            share += 1
    for block in range(grid):
        left, place = share, block * share
        while left > 0 and place < remaining:
            tile, inside = divmod(place, k_tiles)
            take = min(left, k_tiles - inside)
            yield whole + tile, inside, inside + take
            place, left = place + take, left - take


def slices_by_tile(
    tiles: int, k_tiles: int, grid: int, group_size: int, thread_k: int
) -> list[frozenset[tuple[int, int]]]:
    """For each tile the K-ranges that CUDA blocks compute of it."""
    found: list[set[tuple[int, int]]] = [set() for _ in range(tiles)]
    for tile, first, stop in walk(tiles, k_tiles, grid, group_size, thread_k):
        found[tile].add((first, stop))
    return [frozenset(pieces) for pieces in found]


def routes_computed_differently(
    first: Plan, second: Plan, n: int, k: int, thread_k: int, thread_n: int, grid: int, group_size: int
) -> list[int]:
    """Routes whose tiles the CUDA blocks cut differently under two plans of one routing, ascending."""
    n_tiles = n // thread_n
    cuts: list[dict[int, list[frozenset[tuple[int, int]]]]] = []
    for plan in (first, second):
        active = plan.num_tokens_post_padded // plan.block_size
        pieces = slices_by_tile(active * n_tiles, k // thread_k, grid, group_size, thread_k)
        of_route: dict[int, list[frozenset[tuple[int, int]]]] = {}
        for place in range(plan.num_tokens_post_padded):
            route = int(plan.sorted_token_ids[place])
            if route < plan.num_routes:
                block = place // plan.block_size
                of_route[route] = pieces[block * n_tiles : (block + 1) * n_tiles]
        cuts.append(of_route)
    return [r for r in range(first.num_routes) if cuts[0].get(r) != cuts[1].get(r)]
