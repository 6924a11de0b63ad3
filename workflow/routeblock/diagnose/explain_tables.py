# SPDX-License-Identifier: Apache-2.0
"""Tables of what `explain`, `witness` and `identify` found: a row a link, a document, a group of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeblock.declared import by_name
from routeblock.diagnose.answer import load_answer
from routeblock.errors import InputError
from routeblock.tables import Column, Table, write_sealed

Row = dict[str, Any]
Answers = Sequence[tuple[str, dict[str, Any]]]  # where, and the document


def _explain(answers: Answers) -> list[Row]:
    """Where does a difference arise, and at which addition?"""
    rows = []
    for source, answer in answers:
        detail = answer["detail"]
        row: Row = {"source": source, "verdict": answer["verdict"], "status": answer["status"]}
        row |= dict(zip(("first", "second"), (run["name"] for run in detail["runs"]), strict=True))
        if "chain" in detail:
            for number, link in enumerate(detail["chain"]):
                rows.append(row | {"link": number + 1} | _link(link))
        else:
            rows.append(row)
    return rows


def _link(link: dict[str, Any]) -> Row:
    row = {name: link[name] for name in ("surface", "row", "column")}
    row |= {f"{side}_bits": out["bits"] for side, out in zip(("first", "second"), link["outputs"], strict=True)}
    if "sides" in link:
        row |= {"cause": link["cause"], "expert": link["expert"]}
        for side, facts in zip(("first", "second"), link["sides"], strict=True):
            row |= {f"{side}_block": facts["block"], f"{side}_tile": facts["tile"]}
            row[f"{side}_slices"] = len(facts["slices"])
    for name, key in (("parts_at_k", "parting"), ("rounds_differently_at_k", "first_other_rounding")):
        shown = next((a for a in link.get(key) or [] if a is not None), None)
        if shown is not None:
            row[name] = shown["k"][0]
    if "smallest_set" in link:
        row |= {"smallest_set": link["smallest_set"]["size"], "proven": link["smallest_set"]["proven"]}
    return row


def _witness(answers: Answers) -> list[Row]:
    """What is the smallest change of a plan that changes bits?"""
    rows = []
    for source, answer in answers:
        detail = answer["detail"]
        row: Row = {"source": source, "verdict": answer["verdict"], "status": answer["status"]}
        row |= {
            name: detail[name]
            for name in (
                "run", "surface", "exchanges", "exchanges_that_change_a_class", "exchanges_that_change_it",
                "classes_visited", "combinations_visited", "minimality",
            )
        }  # fmt: skip
        row["element"] = "" if detail["element"] is None else ":".join(map(str, detail["element"]))
        row["witness"] = " and ".join(f"{a} with {b}" for a, b in detail["witness"])
        row |= {f"{surface}_elements_changed": count for surface, count in detail["elements_changed"].items()}
        rows.append(row)
    return rows


def _identify(answers: Answers) -> list[Row]:
    """Which launches and plans reproduce an output?"""
    rows = []
    for source, answer in answers:
        detail = answer["detail"]
        base = {"source": source, "surface": detail["surface"]}
        rows += [base | candidate | {"reproduces": True, "candidates": 1} for candidate in detail["reproduce"]]
        for group in detail["excluded"]:
            where = {name: group[name] for name in ("row", "column", "given", "computed")}
            counted = {"reproduces": False, "candidates": len(group["candidates"])}
            rows.append(base | group["candidates"][0] | where | counted)
    return rows


def _columns(text: str) -> tuple[Column, ...]:
    """`name` is text, `name#` a count, `name?` a flag."""
    kinds = {"#": "count", "?": "flag"}
    return tuple(
        Column(word.rstrip("#?"), kinds.get(word[-1], "text"))  # type: ignore[arg-type]
        for word in text.split()
    )


TABLES = by_name(
    Table(
        "explain",
        _explain,
        _columns(
            "source verdict status first second link# surface row# column# first_bits second_bits cause expert#"
            " first_block# second_block# first_tile# second_tile# first_slices# second_slices# parts_at_k#"
            " rounds_differently_at_k# smallest_set# proven"
        ),
        "From an element back to the addition that rounds differently",
        "One row a link of the chain. smallest_set: roundings that, carried exactly, make the bits equal (recomputed).",
    ),
    Table(
        "witness",
        _witness,
        _columns(
            "source verdict status run surface element exchanges# exchanges_that_change_a_class#"
            " exchanges_that_change_it# classes_visited# combinations_visited# witness w13_elements_changed#"
            " activation_elements_changed# w2_elements_changed# final_elements_changed# minimality"
        ),
        "The smallest change of a plan that changes bits",
        "A witness is recomputed over the whole layer; without one, every class of every route was visited.",
    ),
    Table(
        "identify",
        _identify,
        _columns(
            "source surface reproduces? candidates# plan thread_k# thread_n# grid# reduction architecture full_k? row#"
            " column# given computed"
        ),
        "Which launches reproduce an output",
        "row, column: the first element, in this order, at which candidates compute other bits than were given; the"
        " launch is the first of so many candidates that it contradicts in the same way.",
    ),
)


def write(table: Table[Answers], sources: Sequence[Path], out: Path) -> None:
    """Write the table of the answers of one command, sealed. Raises InputError for the answer of another."""
    answers = []
    for path in sources:
        document = load_answer(path)
        if document["command"] != table.name:
            raise InputError(
                f"an answer of {document['command']}",
                where=str(path),
                limit=f"answers of {table.name}",
                way_out="name the table of that command",
            )
        answers.append(("/".join(path.parent.parts[-4:]), document))
    write_sealed(out, table, table.rows(answers), inputs=list(sources))
