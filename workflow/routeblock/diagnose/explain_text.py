# SPDX-License-Identifier: Apache-2.0
"""An explanation as text: the chain from the element asked for to the first addition that rounds differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]


def lines(document: Document) -> list[str]:
    """The explanation for a reader."""
    found = ["runs"]
    for mark, run in zip("AB", document["runs"], strict=True):
        settings = "; ".join(
            f"{gemm} ({launch[0]}, {launch[1]}) grid {launch[2]} {s['architecture']}"
            + ("" if s["fp32_reduce"] else ", slices added in the output dtype")
            + (", full K" if s["full_k"] else "")
            for gemm, s in run["settings"].items()
            for launch in [s["launch"]]
        )
        found.append(f"  {mark} {run['name']}: {run['tokens']} tokens, blocks of {run['block_size']}; {settings}")
    for number, link in enumerate(document["chain"]):
        found += ["", f"{number + 1}. {_title(link)}", *(f"  {line}" for line in _link(link))]
    if document["onward"]:
        found += ["", "this element alone, on the later surfaces of A", *_steps(document["onward"])]
    if document.get("origin_alone"):
        found += ["", f"{_name(document['chain'][-1])} alone, on the later surfaces of A"]
        found += _steps(document["origin_alone"])
    return found


def _name(link: Document) -> str:
    return f"{link['surface']}[{link['row']}, {link['column']}]"


def _title(link: Document) -> str:
    values = [f"{mark} {o['bits']} = {o['number']}" for mark, o in zip("AB", link["outputs"], strict=True)]
    return f"{_name(link)}: {', '.join(values)}"


def _link(link: Document) -> Iterator[str]:
    if link["surface"] == "final":
        yield f"sum of {len(link['routes'])} routes; routes that differ: {_listed(link['differing_routes'])}"
        for route in link["routes"]:
            if route["first"]["bits"] != route["second"]["bits"]:
                yield f"slot {route['slot']}: A {_value(route['first'])}, B {_value(route['second'])}"
    elif link["surface"] == "activation":
        for name in ("gate", "up"):
            a, b = link[name]
            yield f"{name}: A {_value(a)}, B {_value(b)}" + ("" if a["bits"] != b["bits"] else " (equal)")
    else:
        yield from _gemm(link)


def _gemm(link: Document) -> Iterator[str]:
    yield f"token {link['token']}, slot {link['slot']}, expert {link['expert']}"
    for mark, side in zip("AB", link["sides"], strict=True):
        kind = "direct" if side["direct"] else "shared"
        slices = ", ".join(f"[{a}, {b})" for a, b in side["slices"])
        yield (
            f"{mark}: route {side['route']} in block {side['block']}, N-tile {side['n_tile']}, tile {side['tile']}"
            f" ({kind}); K-tiles {slices}"
        )
    if "alone" in link:
        alone = link["alone"]
        shape, operands = alone["shape_changes_bits"], alone["operands_change_bits"]
        yield f"the other shape alone {_changes(shape)}; the other operands alone {_changes(operands)}"
        if not shape and not operands:
            yield "only both together change the bits"
        yield f"below: {link['shown']}"
    if link["cause"] == "nothing":
        yield "both trees are the same on the same products"
        return
    if "parting" in link:
        yield (
            "the trees are equal up to here; they part at"
            if link["cause"] == "shape"
            else "first addition that differs"
        )
        yield from _two(link["parting"])
    if link.get("first_other_rounding") and link["first_other_rounding"] != link.get("parting"):
        yield "the first addition that rounds differently"
        yield from _two(link["first_other_rounding"])
    if link["cause"] == "operands":
        ks = link["differing_operands"]
        yield f"operands differ at {len(ks)} k: {_listed(ks)}"
        for name in ("replaced_first", "replaced_all"):
            yield f"{link[name]['what']}: {'equal bits' if link[name]['equal'] else 'still other bits'}"
    else:
        yield from _shape(link)
    yield from _rounding(link["rounding"])


def _two(pair: Sequence[Document | None]) -> Iterator[str]:
    for mark, addition in zip("AB", pair, strict=True):
        if addition is None:
            yield f"  {mark}: no such addition"
            continue
        if "group_before" in addition:
            yield from _addition(mark, addition["group_before"])
        yield from _addition(mark, addition)


def _addition(mark: str, addition: Document) -> Iterator[str]:
    yield f"  {mark}: {_where(addition)}"
    for operand in addition["operands"]:
        yield f"       {operand['bits']} = {operand['number']}  ({operand['what']})"
    if "products" in addition:
        cut = addition.get("terms_cut_to_multiples_of")
        yield (
            f"     + {addition['products']['sum']} = {addition['products']['number']}  (the products"
            + (f"; every term cut to a multiple of {cut})" if cut else ")")
        )
    yield f"     = {addition['result']['bits']} = {addition['result']['number']}  (exact {addition['exact']})"
    yield f"       rounding error {addition['error']}"


def _where(addition: Document) -> str:
    first, stop = addition["k"]
    place = f"{addition['operation']}, k {first} to {stop - 1}"
    if "k_tile" in addition:
        place += f", K-tile {addition['k_tile']}, step {addition['step']}"
    if "warp" in addition:
        place += f", warp {addition['warp']}"
    return place + f", slice {addition['slice']} of {addition['slices']}"


def _shape(link: Document) -> Iterator[str]:
    ledger = link["ledger"]
    counts = ledger["additions"]
    yield (
        f"{ledger['shared_additions']} additions are shared; A has {counts[0] - ledger['shared_additions']} others,"
        f" B {counts[1] - ledger['shared_additions']}"
    )
    sums = "equals" if ledger["adds_up"] else "DOES NOT EQUAL"
    yield f"sum of A - sum of B = {ledger['difference_of_sums']}, which {sums} the difference of their rounding errors"
    if "smallest_set" not in link:
        return
    found = link["smallest_set"]
    verified = "recomputed: equal bits" if found["makes_equal"] else "RECOMPUTED: NOT EQUAL"
    yield f"without {_counted(found['size'], 'rounding')} the bits are equal ({verified})"
    for member in found["members"][:6]:
        yield f"  {member['in']}: {_where(member)}"
        yield f"     {member['result']['bits']} = {member['result']['number']} replaced by {member['replaced_by']}"
    if found["size"] > 6:
        yield f"  and {found['size'] - 6} more (all in the JSON)"
    yield f"  {found['proven']}"


def _rounding(rounding: Document) -> Iterator[str]:
    yield f"rounding to {rounding['dtype']}"
    for mark, name in (("A", "first"), ("B", "second")):
        side = rounding[name]
        far = f", {side['beyond_boundary_in_ulp']} ulp from the boundary" if "beyond_boundary_in_ulp" in side else ""
        yield f"  {mark}: {_value(side['sum'])} -> {_value(side['output'])}{far}"
    if "boundary" in rounding:
        yield f"  the boundary between the two outputs is {rounding['boundary']}"


def _steps(steps: Sequence[Document]) -> list[str]:
    found = []
    for step in steps:
        count = step["columns_changed"]
        told = f"changes {count} of {step['of']} columns" if count else "is swallowed by rounding"
        listed = f" ({_listed(step['columns'], count)})" if count else ""
        asked = ""
        if "element_changes" in step:
            asked = "; the element asked for " + ("changes" if step["element_changes"] else "does not change")
        found.append(f"  {step['surface']} row {step['row']}: {told}{listed}{asked}")
    return found


def _value(value: Document) -> str:
    return f"{value['bits']} = {value['number']}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(values: Sequence[int], total: int | None = None) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown + (", ..." if (len(values) if total is None else total) > 8 else "")


def _changes(yes: bool) -> str:
    return "changes the bits" if yes else "does not change the bits"
