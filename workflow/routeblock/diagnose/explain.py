# SPDX-License-Identifier: Apache-2.0
"""Why one output element has other bits in two runs: the chain from that element back to the first addition that rounds
differently, and what becomes of the difference on its way to the output.

A run is a batch, a plan and a launch (`layer_run`). All numbers come from the twin and from exact integers
(`compare_trees`); each claim is recomputed, and the document says by what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.answer import Answer, Fact, Verdict
from routeblock.diagnose.compare_trees import Candidate, Comparison, SmallestSet
from routeblock.diagnose.layer_run import GEMMS, Run, bits, elements, only
from routeblock.diagnose.summation_tree import (
    STEP,
    Element,
    Kind,
    as_number,
    refuse_overflow,
)
from routeblock.errors import InputError
from routeblock.twin.layer import SURFACES, combine, silu_and_mul
from routeblock.twin.tensor_core import architecture_of

Document = dict[str, Any]
Runs = tuple[Run, Run]
Rows = tuple[int, int]  # of the element in the first and in the second run


def first_difference(
    runs: Runs, rows: Callable[[str], Sequence[Rows]], surface: str | None = None
) -> tuple[str, Rows, int] | None:
    """The first element (by surface, row, column) whose bits differ; `rows` pairs the rows of a surface in both runs.
    None if there is none.
    """
    for name in SURFACES if surface is None else (surface,):
        pairs = rows(name)
        first, second = (bits(run.surfaces[name][[pair[side] for pair in pairs]]) for side, run in enumerate(runs))
        found = np.argwhere(first != second)
        if len(found):
            return name, pairs[int(found[0][0])], int(found[0][1])
    return None


def exact_text(value: int, scale: int) -> str:
    """A value as what it is: hexadecimal where float64 holds it, else an integer times a power of two."""
    number = as_number(value, scale)
    if value == 0:
        return "0"
    if (abs(value) // (value & -value)).bit_length() <= 53:
        return re.sub(r"\.?0+p", "p", number.hex())
    zeros = (value & -value).bit_length() - 1
    return f"{value >> zeros} * 2^{zeros - scale}"


def single(value: int, scale: int) -> Document:
    """A float32 value: its bits and the number."""
    number = np.float32(as_number(value, scale))
    return {"bits": f"0x{int(number.view(np.uint32)):08x}", "number": f"{number:.9g}"}


def sixteen(x: NDArray[Any]) -> Document:
    """One 16-bit float of an array of one element."""
    return {"bits": f"0x{int(bits(x).reshape(-1)[0]):04x}", "number": f"{float(x.reshape(-1)[0]):.9g}"}


def _place(element: Element, index: int) -> Document:
    node, form = element.tree.nodes[index], element.tree.form
    place: Document = {"operation": str(node.kind), "k": [node.first, node.stop]}
    if node.kind == Kind.STEP:
        place |= {"k_tile": node.first // form.thread_k, "step": node.first % form.thread_k // STEP}
    if node.warp is not None:
        place["warp"] = node.warp
    return place | {"slice": node.slice, "slices": len(form.slices)}


def _operand_name(element: Element, index: int, position: int) -> str:
    node = element.tree.nodes[index]
    if not node.operands:
        return "accumulator, which starts at zero"
    below = element.tree.nodes[node.operands[position]]
    if node.kind == Kind.STEP:
        return f"accumulator of warp {node.warp} after k {below.stop - 1}"
    if node.kind == Kind.WARPS:
        return f"warp {below.warp}" if below.kind == Kind.STEP else f"sum of warps from {below.warp} on"
    return f"sum over k {below.first} to {below.stop - 1}"


def _addition(element: Element, index: int) -> Document:
    """One addition in numbers."""
    found, scale = element.addition(index), element.scale
    node = element.tree.nodes[index]
    operands: list[Document] = [
        {"what": _operand_name(element, index, i), **single(v, scale)} for i, v in enumerate(found.operands)
    ] or [{"what": _operand_name(element, index, 0), **single(0, scale)}]
    document = _place(element, index) | {"operands": operands}
    if node.kind == Kind.STEP:
        products = found.exact - sum(found.operands)
        document["products"] = {"sum": exact_text(products, scale), "number": f"{as_number(products, scale):.9g}"}
        if found.unit is not None:
            document["terms_cut_to_multiples_of"] = f"2^{found.unit}"
    return document | {
        "exact": exact_text(found.exact, scale),
        "result": single(found.result, scale),
        "error": exact_text(found.error, scale),
    }


def _both(comparison: Comparison, nodes: tuple[int | None, int | None]) -> list[Document | None]:
    """An addition in both trees; a 16-deep step in two groups is shown group by group."""
    shown: list[Document | None] = []
    for element, index in zip(comparison.sides, nodes, strict=True):
        if index is None:
            shown.append(None)
            continue
        node = element.tree.nodes[index]
        halves = [index]
        if node.kind == Kind.STEP and comparison.compares_whole_steps and node.first % STEP:
            halves = [index - 1, index]
        parts = [_addition(element, i) for i in halves]
        shown.append(parts[-1] if len(parts) == 1 else {**parts[-1], "group_before": parts[0]})
    return shown


def _member(comparison: Comparison, candidate: Candidate) -> Document:
    side = 0 if candidate[0] is not None else 1
    index = candidate[side]
    assert index is not None
    element = comparison.sides[side]
    found = element.addition(index)
    where = "both trees" if None not in candidate else ("first tree", "second tree")[side]
    return {
        "in": where,
        **_place(element, index),
        "result": single(found.result, element.scale),
        "replaced_by": exact_text(found.exact, element.scale),
    }


def _rounding(comparison: Comparison) -> Document:
    """The last rounding of both: sums, outputs, and the boundary between the outputs if they are neighbours."""
    sides = comparison.sides
    scale = sides[0].scale
    document: Document = {"dtype": sides[0].terms.operand.name}
    for name, element in zip(("first", "second"), sides, strict=True):
        document[name] = {"sum": single(element.total, scale), "output": sixteen(element.rounded())}
    low, high = sorted(e.output for e in sides)
    halfway = low + high
    neighbours = (
        abs(int(bits(sides[0].rounded())[0]) - int(bits(sides[1].rounded())[0])) == 1 and low * high >= 0 and halfway
    )
    if neighbours:
        document["boundary"] = exact_text(halfway, scale + 1)
        for name, element in zip(("first", "second"), sides, strict=True):
            distance = 2 * element.total - halfway
            ulp = single_ulp(element.total, scale)
            document[name]["beyond_boundary_in_ulp"] = f"{as_number(distance, scale + 1) / ulp:+g}"
    return document


def single_ulp(value: int, scale: int) -> float:
    """The distance of neighbours in float32 at a value."""
    return float(np.spacing(np.float32(abs(as_number(value, scale)))))


def _shape_cause(comparison: Comparison) -> Document:
    """Trees of other shapes over the same products: the account of all roundings, and a smallest set that decides."""
    scale = comparison.sides[0].scale
    shared, first, second = comparison.ledger()
    totals = [e.total for e in comparison.sides]
    ledger = {
        "shared_error": exact_text(shared, scale),
        "first_error": exact_text(first, scale),
        "second_error": exact_text(second, scale),
        "difference_of_sums": exact_text(totals[0] - totals[1], scale),
        "difference_of_errors": exact_text(first - second, scale),
        "adds_up": totals[0] - totals[1] == first - second,
        "shared_additions": len(comparison.shared()),
        "additions": [len(e.tree.nodes) - 1 for e in comparison.sides],
    }
    document: Document = {"ledger": ledger}
    if not comparison.same_output:
        found = comparison.smallest_set()
        outputs = comparison.outputs(found.members)
        document["smallest_set"] = {
            "members": [_member(comparison, m) for m in found.members],
            "size": len(found.members),
            "makes_equal": outputs[0] == outputs[1] == found.output,
            "output": exact_text(found.output, scale),
            "sets_tried": [{"size": size, "sets": count} for size, count in found.tried],
            "proven": _proven(found),
        }
    return document


def _proven(found: SmallestSet) -> str:
    """What is proven about the size of a set."""
    size, below = len(found.members), [str(s) for s, _ in found.tried if s < len(found.members)]
    none = f"no set of {' or '.join(below)} does" if below else ""
    if not found.smallest:
        return f"{none}, and no member of this one can be left out; sets in between were not all tried"
    if not found.alike:
        return f"smallest: {none}"
    return f"smallest: {none + '; ' if none else ''}{found.alike} of {found.tried[-1][1]} sets of {size} do"


def _operand_cause(comparison: Comparison) -> Document:
    """Trees of one shape over other products: which products differ, and what replacing results does."""
    first, second = (e.terms for e in comparison.sides)
    differs = np.flatnonzero((first.a != second.a) | (first.w != second.w))
    parting = comparison.parting()
    assert parting is not None and parting.first is not None
    nodes = comparison.operand_nodes()
    base = comparison.sides[0].output
    return {
        "differing_operands": [int(k) for k in differs],
        "replaced_first": {
            "what": "the second tree with the result of the first addition that differs taken from the first tree",
            "equal": comparison.with_results_of_the_first([parting.first]) == base,
        },
        "replaced_all": {
            "what": "the second tree with the results of all additions whose operands differ taken from the first tree",
            "additions": len(nodes),
            "equal": comparison.with_results_of_the_first(nodes or [parting.first]) == base,
        },
    }


def _tree(comparison: Comparison, side: int) -> Document:
    """A whole tree: nodes in an order in which operands come first, those that the other tree shares marked."""
    element = comparison.sides[side]
    shared = comparison.shared()
    common = set(shared) if side == 0 else set(shared.values())
    nodes = []
    for index, node in enumerate(element.tree.nodes):
        found = element.addition(index)
        nodes.append(
            {
                "operation": str(node.kind),
                "k": [node.first, node.stop],
                "slice": node.slice,
                "warp": node.warp,
                "operands": list(node.operands),
                "result": single(found.result, element.scale)["bits"],
                "error": exact_text(found.error, element.scale),
                "shared": index in common,
            }
        )
    exact = sum(element.terms.products(element.scale))
    return {"nodes": nodes, "exact_sum": exact_text(exact, element.scale), "thread_k": element.tree.form.thread_k}


def _side(run: Run, gemm: str, route: int, column: int) -> Document:
    setting, block = run.settings[gemm], int(run.blocks[route])
    cut, launch = run.cuts[gemm], setting.launch
    n_tile = column // launch.thread_n
    tile = block * cut.n_tiles + n_tile
    return {
        "run": run.name,
        "route": route,
        "block": block,
        "n_tile": n_tile,
        "tile": tile,
        "direct": tile < cut.direct_tiles,
        "launch": list(launch),
        "architecture": setting.architecture,
        "slices": [list(s) for s in cut.slices(block, n_tile)],
    }


def _gemm_link(gemm: str, runs: Runs, rows: Rows, column: int) -> tuple[Document, int | None]:
    """One element of a GEMM in both runs, and the k whose operand differs first where that is the cause."""
    sides = elements(gemm, column, runs, rows)
    for element in sides:
        refuse_overflow(element, f"explain {gemm} {rows[0]}:{column}")
    comparison = Comparison(*sides)
    inputs = runs[0].inputs
    document: Document = {
        "surface": gemm,
        "row": rows[0],
        "column": column,
        "token": rows[0] // inputs.top_k,
        "slot": rows[0] % inputs.top_k,
        "expert": int(inputs.topk_ids.reshape(-1)[rows[0]]),
        "sides": [_side(run, gemm, r, column) for run, r in zip(runs, rows, strict=True)],
        "outputs": [sixteen(run.surfaces[gemm][r, column]) for run, r in zip(runs, rows, strict=True)],
        "same_shape": comparison.same_shape,
        "same_operands": comparison.same_products,
        "same_tensor_core": len({_tensor_core(e) for e in sides}) == 1,
    }
    follow = None
    if not comparison.same_products and not comparison.same_shape:
        # Two causes at once: each alone, on the first run's side of the other.
        form_alone = Comparison(sides[0], Element(sides[1].tree, sides[0].terms, sides[0].scale))
        operands_alone = Comparison(sides[0], Element(sides[0].tree, sides[1].terms, sides[0].scale))
        document["alone"] = {
            "shape_changes_bits": not form_alone.same_output,
            "operands_change_bits": not operands_alone.same_output,
        }
        # Where neither alone does it, the operands are followed: they have a cause further back.
        comparison = operands_alone if form_alone.same_output else form_alone
        document["shown"] = "operands alone" if comparison is operands_alone else "shape alone"
    parting, rounding = comparison.parting(), comparison.first_other_rounding()
    document["rounding"] = _rounding(comparison)
    if parting is not None:
        document["parting"] = _both(comparison, (parting.first, parting.second))
    if rounding is not None:
        document["first_other_rounding"] = _both(comparison, (rounding.first, rounding.second))
    if comparison.same_products:
        document["cause"] = "shape" if not comparison.same_shape else "nothing"
        if parting is not None:
            document |= _shape_cause(comparison)
    else:
        document["cause"] = "operands"
        document |= _operand_cause(comparison)
        follow = document["differing_operands"][0]
    if follow is None or gemm == "w13":
        document["trees"] = [_tree(comparison, side) for side in range(2)]
    return document, follow


def _tensor_core(element: Element) -> tuple[int, int]:
    return element.tree.form.group, element.tree.form.fraction_bits


def _chain(runs: Runs, surface: str, rows: Rows, column: int) -> list[Document]:
    """From the element asked for back to the GEMM element at which the difference arises."""
    chain: list[Document] = []
    while True:
        if surface == "final":
            top_k = runs[0].inputs.top_k
            parts = [
                [run.surfaces["w2"][row * top_k + i, column] for i in range(top_k)]
                for run, row in zip(runs, rows, strict=True)
            ]
            differing = [i for i in range(top_k) if bits(parts[0][i]) != bits(parts[1][i])]
            chain.append(
                {
                    "surface": "final",
                    "row": rows[0],
                    "column": column,
                    "outputs": [sixteen(run.surfaces["final"][r, column]) for run, r in zip(runs, rows, strict=True)],
                    "differing_routes": [rows[0] * top_k + i for i in differing],
                    "routes": [{"slot": i, "first": sixteen(a), "second": sixteen(b)}
                               for i, (a, b) in enumerate(zip(*parts, strict=True))],
                }
            )  # fmt: skip
            if not differing:
                return chain
            surface, rows = "w2", (rows[0] * top_k + differing[0], rows[1] * top_k + differing[0])
        elif surface == "activation":
            half = runs[0].surfaces["activation"].shape[1]
            values = {
                name: [run.surfaces["w13"][r, c] for run, r in zip(runs, rows, strict=True)]
                for name, c in (("gate", column), ("up", half + column))
            }
            differing_parts = [name for name, (a, b) in values.items() if bits(a) != bits(b)]
            chain.append(
                {
                    "surface": "activation",
                    "row": rows[0],
                    "column": column,
                    "outputs": [
                        sixteen(run.surfaces["activation"][r, column]) for run, r in zip(runs, rows, strict=True)
                    ],
                    "differing": differing_parts,
                    **{name: [sixteen(x) for x in pair] for name, pair in values.items()},
                }
            )
            if not differing_parts:
                return chain
            surface, column = "w13", column if differing_parts[0] == "gate" else half + column
        else:
            link, follow = _gemm_link(surface, runs, rows, column)
            chain.append(link)
            if surface == "w13" or follow is None:
                return chain
            surface, column = "activation", follow


def onward(
    runs: Runs, surface: str, rows: Rows, column: int, asked: tuple[str, int, int] | None = None
) -> list[Document]:
    """What one element's second value, alone, changes on the later surfaces of the first run; `asked` is an element of
    them (surface, row, column) of which it says whether it changes.
    """
    run = runs[0]
    value = runs[1].surfaces[surface][rows[1], column]
    steps: list[Document] = []
    row, top_k = rows[0], run.inputs.top_k
    changed = run.surfaces[surface][row].copy()
    changed[column] = value
    if surface == "w13":
        changed = silu_and_mul(changed[None])[0]
        steps.append(_step(run, "activation", row, changed, asked))
    if surface in ("w13", "activation"):
        problem = run.problem("w2")
        a = problem.a.copy()
        a[row] = changed
        alone = only(run.plan, {row: int(run.blocks[row])})
        changed = replace(problem, a=a).compute(alone, run.settings["w2"])[row]
        steps.append(_step(run, "w2", row, changed, asked))
    if surface != "final":
        token = row // top_k
        rows_of_token = run.surfaces["w2"].reshape(*run.inputs.topk_ids.shape, -1)[token : token + 1].copy()
        rows_of_token[0, row % top_k] = changed
        steps.append(_step(run, "final", token, combine(rows_of_token)[0], asked))
    return steps


def _step(run: Run, surface: str, row: int, values: NDArray[Any], asked: tuple[str, int, int] | None) -> Document:
    before = run.surfaces[surface][row]
    columns = [int(c) for c in np.flatnonzero(bits(before) != bits(values))]
    step: Document = {"surface": surface, "row": row, "columns_changed": len(columns), "of": len(values)}
    step["columns"] = columns[:8]
    if asked is not None and asked[:2] == (surface, row):
        step["element_changes"] = asked[2] in columns
    return step


def explain(runs: Runs, surface: str, rows: Rows, column: int) -> Document:
    """The whole explanation of one element as a document: `chain`, from the element to the origin, and `onward`."""
    _check(runs, surface, rows, column)
    chain = _chain(runs, surface, rows, column)
    origin = chain[-1]
    outputs = chain[0]["outputs"]
    document: Document = {
        "element": {"surface": surface, "row": rows[0], "second_row": rows[1], "column": column},
        "runs": [run_document(run) for run in runs],
        "differs": outputs[0]["bits"] != outputs[1]["bits"],
        "outputs": outputs,
        "chain": chain,
    }
    document["onward"] = onward(runs, surface, rows, column) if document["differs"] else []
    if len(chain) > 1 and origin["surface"] in GEMMS:
        there = origin["row"]
        at = (there, there + (rows[1] - rows[0]) * (runs[0].inputs.top_k if surface == "final" else 1))
        document["origin_alone"] = onward(runs, origin["surface"], at, origin["column"], (surface, rows[0], column))
    return document


def run_document(run: Run) -> Document:
    """A run as JSON: its plan by fingerprint, its launches."""
    return {
        "name": run.name,
        "plan": run.plan.fingerprint(),
        "block_size": run.plan.block_size,
        "tokens": run.inputs.topk_ids.shape[0],
        "settings": {
            gemm: {
                "launch": list(s.launch),
                "architecture": s.architecture,
                "fp32_reduce": s.fp32_reduce,
                "full_k": s.full_k,
            }
            for gemm, s in run.settings.items()
        },
    }


def _check(runs: Runs, surface: str, rows: Rows, column: int) -> None:
    if surface not in SURFACES:
        raise InputError(f"surface {surface!r}", where="explain", limit=", ".join(SURFACES), way_out="name one of them")
    for run, row in zip(runs, rows, strict=True):
        shape = run.surfaces[surface].shape
        if not (0 <= row < shape[0] and 0 <= column < shape[1]):
            raise InputError(
                f"element {row}:{column} of {surface}",
                where=f"explain, run {run.name}",
                limit=f"rows 0 to {shape[0] - 1}, columns 0 to {shape[1] - 1}",
                way_out="name an element that exists",
            )
        if surface != "final" and run.blocks[row] < 0:
            raise InputError(
                f"route {row} takes no slot",
                where=f"explain, run {run.name}",
                limit="routes of local experts",
                way_out="choose another row",
            )


def answer(document: Document, facts: Sequence[Fact] = ()) -> Answer:
    """The answer for a reader: verdict, reason, cure, then the chain."""
    from routeblock.diagnose.explain_text import lines

    element, origin = document["element"], document["chain"][-1]
    where = f"{element['surface']}[{element['row']}, {element['column']}]"
    values = " and ".join(f"{o['bits']} ({o['number']})" for o in document["outputs"])
    if not document["differs"]:
        return Answer(
            "explain", Verdict.CANNOT_DIFFER, f"{where} is {document['outputs'][0]['bits']} in both runs",
            _why_not(origin), "nothing to cure", facts, document, lines(document), _status(document),
        )  # fmt: skip
    return Answer(
        "explain", Verdict.CAN_DIFFER, f"{where} is {values}", _why(origin), _cure(origin, document["runs"]), facts,
        document, lines(document), _status(document),
    )  # fmt: skip


def _status(document: Document) -> str:
    names = {s["architecture"] for run in document["runs"] for s in run["settings"].values()}
    return "; ".join(f"{n}: {architecture_of(n).status}" for n in sorted(names))


def _why_not(origin: Document) -> str:
    if origin.get("cause") == "nothing":
        return "both runs add the same products in the same order: equal by construction"
    if origin.get("cause") == "shape":
        return "the trees have other shapes, and their sums round to one output: equal here, not by construction"
    return "what differs below is swallowed by a later rounding: equal here, not by construction"


def _why(origin: Document) -> str:
    first, second = origin["sides"]
    gemm = origin["surface"].upper()
    tile = f"{gemm} element [{origin['row']}, {origin['column']}]"
    if not origin["same_tensor_core"]:
        return f"{tile} is computed by other tensor cores: {first['architecture']} and {second['architecture']}"
    if origin["cause"] == "operands":
        return f"{tile} has other operands at k {origin['differing_operands'][0]}"
    cuts = " and ".join(
        f"in {len(s['slices'])} slice{'s' if len(s['slices']) > 1 else ''} (block {s['block']}, tile {s['tile']})"
        for s in (first, second)
    )
    if first["launch"][0] != second["launch"][0]:
        return f"{tile} is added by {first['launch'][0] // 32} and {second['launch'][0] // 32} warps along K"
    return f"{tile} is summed {cuts}: the sums differ in their roundings and end on two sides of a rounding boundary"


def _cure(origin: Document, runs: Sequence[Document]) -> str:
    first, second = origin["sides"]
    if first["launch"] != second["launch"] or first["architecture"] != second["architecture"]:
        return "one launch on one architecture for both runs"
    if runs[0]["tokens"] != runs[1]["tokens"]:
        return "full K in both runs with one set of thread sizes: another batch moves the cuts"
    return "one plan for both runs (canonical order: expert, then route), or a grid at which every tile is one slice"
