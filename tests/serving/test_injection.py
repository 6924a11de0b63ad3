# SPDX-License-Identifier: Apache-2.0
"""Injected orders of arrival: legal plans, the words that name them, and that nothing is injected unless asked."""

from __future__ import annotations

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.moe.routing import align, check_plan
from routeblock.vllm_plugin.alignment import register
from routeblock.vllm_plugin.injection import VARIABLE, InjectedAlignment, arrivals


@pytest.mark.parametrize("word", ["canonical", "reversed", "random:0", "random:7"])
def test_every_order_gives_a_legal_plan(word: str) -> None:
    rng = np.random.default_rng(3)
    ids = np.stack([rng.choice(16, 4, replace=False) for _ in range(40)]).astype(np.int32)
    plan = InjectedAlignment(None, word).plan(ids, 8, 16)
    check_plan(plan, ids, 16, None, where="test")
    assert plan.fingerprint() == align(ids, 16, 8, arrivals(word, ids.size)).fingerprint()
    assert (plan.fingerprint() == align(ids, 16, 8).fingerprint()) == (word == "canonical")


def test_an_order_is_the_same_each_time_and_another_seed_is_another() -> None:
    one, again, other = (arrivals(word, 100) for word in ("random:1", "random:1", "random:2"))
    assert one is not None
    assert again is not None
    assert other is not None
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert sorted(one.tolist()) == list(range(100))


@pytest.mark.parametrize("word", ["", "random", "random:", "random:-1", "random:x", "sorted", "random:" + "9" * 30])
def test_another_word_is_one_line(word: str) -> None:
    with pytest.raises(InputError, match=VARIABLE):
        InjectedAlignment(None, word)


def test_nothing_is_registered_unless_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("ROUTEBLOCK_CANONICAL_ALIGNMENT", raising=False)
    register()
    assert not caplog.records
