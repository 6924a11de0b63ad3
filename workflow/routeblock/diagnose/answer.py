# SPDX-License-Identifier: Apache-2.0
"""The form of every answer: verdict, reason and cure first, then the detail; each fact with where it comes from.

A command makes an `Answer` and gives it to `deliver`, which prints it (text, or JSON for programs), writes it sealed
where that is asked for, and returns the exit code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.moe.sources import Source

FORMAT = "routeblock.answer.v1"
STANDARD_OUTPUT = "-"


class Verdict(StrEnum):
    """What an answer comes to."""

    CANNOT_DIFFER = "cannot differ"
    FOUND = "found"
    CAN_DIFFER = "can differ"
    CANNOT_SAY = "cannot say"


# 2 is bad input, as everywhere; 3 is left out, as some shells and tools use it for usage.
EXIT_CODES = {Verdict.CANNOT_DIFFER: 0, Verdict.FOUND: 0, Verdict.CAN_DIFFER: 1, Verdict.CANNOT_SAY: 4}


@dataclass(frozen=True)
class Fact:
    """A value that the answer stands on. `value` is JSON; `basis` says from what it was read, or by which rule."""

    name: str
    value: Any
    source: Source
    basis: str

    def document(self) -> dict[str, Any]:
        """The fact as JSON."""
        return {"name": self.name, "value": self.value, "source": str(self.source), "basis": self.basis}


@dataclass(frozen=True)
class Answer:
    """An answer: `verdict`, and in one sentence each what it says, why, and what stops it.

    `detail` is the JSON for programs, `text` the lines for a reader. `status` is a word for how results were made, such
    as `modelled`, where that belongs beside the verdict.
    """

    command: str
    verdict: Verdict
    sentence: str
    reason: str
    cure: str
    facts: Sequence[Fact] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    text: Sequence[str] = ()
    status: str = ""

    @property
    def exit_code(self) -> int:
        """0 cannot differ (or found), 1 can differ, 4 cannot say."""
        return EXIT_CODES[self.verdict]

    def document(self) -> dict[str, Any]:
        """The answer as JSON; `text` is left out, since it only repeats `detail`."""
        return {
            "format": FORMAT,
            "command": self.command,
            "verdict": str(self.verdict),
            "status": self.status,
            "sentence": self.sentence,
            "reason": self.reason,
            "cure": self.cure,
            "facts": [fact.document() for fact in self.facts],
            "detail": dict(self.detail),
        }

    def lines(self) -> list[str]:
        """The answer for a reader: three lines, the facts with their sources, then the detail."""
        status = f" ({self.status})" if self.status else ""
        head = [
            f"verdict: {self.verdict}{status}: {self.sentence}",
            f"reason:  {self.reason}",
            f"cure:    {self.cure}",
        ]
        facts = [f"  {f.name}: {_shown(f.value)} [{f.source}: {f.basis}]" for f in self.facts]
        return [*head, *(["", "facts", *facts] if facts else []), *(["", *self.text] if self.text else [])]


def deliver(
    answer: Answer,
    *,
    json_to: str | None,
    out: Path | None,
    strict: bool,
    exit_zero: bool,
    inputs: Sequence[Path],
    parameters: Mapping[str, Any],
    modules: Sequence[str],
) -> int:
    """Print the answer, write what is asked for, return the exit code.

    json_to: `-` prints the JSON in place of the text, a path gets it as a file. out: the file of the JSON, sealed by a
    manifest beside it that names `inputs`, `parameters` and the `modules` whose code made it. strict: a fact that is
    assumed raises InputError and nothing is written. exit_zero: 0 whatever the verdict, for rules.
    """
    if strict:
        refuse_guesses(answer)
    document = answer.document()
    if out is not None:
        write_json(out, document)
        seal(
            out.with_suffix(SUFFIX),
            rule=answer.command,
            outputs=[out],
            inputs=inputs,
            parameters=parameters,
            modules=modules,
        )
    if json_to == STANDARD_OUTPUT:
        print(json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False))
    else:
        if json_to is not None:
            with atomic_file(Path(json_to)) as tmp:
                tmp.write_text(json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print("\n".join(answer.lines()))
    return 0 if exit_zero else answer.exit_code


def refuse_guesses(answer: Answer) -> None:
    """Raise InputError for the first fact that is assumed."""
    for fact in answer.facts:
        if fact.source is Source.ASSUMED:
            raise InputError(
                f"{fact.name} {_shown(fact.value)} is assumed: {fact.basis}",
                where=answer.command,
                limit="--strict takes facts that are recorded, published, derived or given",
                way_out="give the value by its option, or leave --strict out",
            )


def load_answer(path: Path) -> dict[str, Any]:
    """The document of an answer; InputError if it cannot be read or is of another form."""
    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
    except UNREADABLE as e:
        raise InputError(
            f"not a readable answer: {e}",
            where=str(path),
            limit="JSON that a command of this package wrote with --out",
            way_out="make it again with --out",
        ) from e
    return document


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
