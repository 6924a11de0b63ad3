# SPDX-License-Identifier: Apache-2.0
"""Where a fact comes from: the mark that every launch, device and kernel carries into every output."""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """Where a fact comes from."""

    RECORDED = "recorded"  # read off a running kernel
    PUBLISHED = "published"  # printed by its maker or by a study
    DERIVED = "derived"  # computed from other facts by a stated rule
    GIVEN = "given"  # by whoever asks
    ASSUMED = "assumed"  # none of these: a guess


# The weakest mark of several: an answer is no better than the weakest fact that it stands on.
_STRENGTH = (Source.ASSUMED, Source.DERIVED, Source.GIVEN, Source.PUBLISHED, Source.RECORDED)


def weakest(*sources: Source) -> Source:
    """The mark of what rests on facts with these marks."""
    return min(sources, key=_STRENGTH.index)
