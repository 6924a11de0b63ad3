# SPDX-License-Identifier: Apache-2.0
"""The fourth result of vLLM's alignment since 0.31: each route's own number, or -1 where it takes no slot."""

from __future__ import annotations

import torch

from routeblock.vllm_plugin.alignment import _scatter_index


def test_routes_that_take_no_slot_are_minus_one() -> None:
    ids = torch.tensor([[0, 3], [-1, 4], [2, 1]])
    assert _scatter_index(ids, 4, None).tolist() == [[0], [1], [-1], [-1], [4], [5]]
    held = torch.tensor([0, -1, -1, 1], dtype=torch.int32)
    found = _scatter_index(ids, 4, held)
    assert found.dtype == torch.int32 and found.tolist() == [[0], [1], [-1], [-1], [-1], [-1]]
