# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from drawn import layer, plans, run

from routeblock.diagnose.compare_trees import Comparison
from routeblock.diagnose.explain import Document, answer, explain, first_difference, onward
from routeblock.diagnose.explain_dot import dot
from routeblock.diagnose.explain_figure import draw
from routeblock.diagnose.layer_run import GEMMS, Run, Setting, bits
from routeblock.diagnose.summation_tree import Element, Form, Kind, Terms, build
from routeblock.errors import InputError
from routeblock.figure_style import look
from routeblock.moe.launches import Launch
from routeblock.moe.routing import align
from routeblock.twin.tensor_core import FLOAT16


def same_rows(runs: tuple[Run, Run]) -> Any:
    return lambda surface: [(r, r) for r in range(len(runs[0].surfaces[surface]))]


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run]:
    """Two plans of one routing at a grid that splits the last tiles."""
    rng = np.random.default_rng(77)
    inputs = layer(rng, tokens=24, top_k=4, experts=5, hidden=1024, intermediate=512, group_size=128)
    first, second = plans(inputs, 8, 3)
    return run(inputs, "first", first, Launch(64, 128, 45)), run(inputs, "second", second, Launch(64, 128, 45))


def elements_of(seed: int, first: Form, second: Form) -> Comparison:
    """Products whose second half nearly takes back the first: the sum is small, and roundings decide its bits."""
    rng = np.random.default_rng(seed)
    k = first.slices[-1][1] * first.thread_k
    a, w = rng.standard_normal((2, k))
    a[k // 2 :], w[k // 2 :] = a[: k // 2], -w[: k // 2] * (1 + 2.0**-7 * rng.standard_normal(k // 2))
    a, w = (x.astype(np.float16).astype(np.float32) for x in (a, w))
    terms = Terms(a, w, FLOAT16)
    return Comparison(Element(build(first), terms), Element(build(second), terms))


WHOLE, CUT = Form(64, ((0, 4),), 16, 25), Form(64, ((0, 2), (2, 4)), 16, 25)


def differing(first: Form, second: Form, count: int) -> list[Comparison]:
    found = (elements_of(seed, first, second) for seed in range(4000))
    return [c for c, _ in zip((c for c in found if not c.same_output), range(count), strict=False)]


def test_trees_part_at_the_first_step_behind_the_cut() -> None:
    parting = elements_of(1, WHOLE, CUT).parting()
    assert parting is not None and parting.first is not None and parting.second is not None
    comparison = elements_of(1, WHOLE, CUT)
    a, b = comparison.sides[0].tree.nodes[parting.first], comparison.sides[1].tree.nodes[parting.second]
    assert (a.kind, a.first, b.first) == (Kind.STEP, 128, 128) and a.operands and not b.operands
    assert all(n.stop <= 128 for i, n in enumerate(comparison.sides[0].tree.nodes) if i in comparison.shared())


def test_trees_of_equal_forms_do_not_part() -> None:
    comparison = elements_of(1, CUT, CUT)
    assert comparison.parting() is None and comparison.first_other_rounding() is None and comparison.same_output


def test_before_the_first_other_rounding_all_errors_are_equal() -> None:
    for comparison in differing(WHOLE, CUT, 5):
        found = comparison.first_other_rounding()
        assert found is not None and found.first is not None and found.second is not None
        end = comparison.sides[0].tree.nodes[found.first].first
        errors = [
            {n.first: e.addition(i).error for i, n in enumerate(e.tree.nodes) if n.kind == Kind.STEP and n.first < end}
            for e in comparison.sides
        ]
        assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WHOLE, CUT),
        (WHOLE, Form(128, ((0, 2),), 16, 25)),
        (WHOLE, Form(64, ((0, 4),), 8, 24)),
        (CUT, replace(CUT, rounds_between=True)),
    ],
    ids=["cut", "warps", "tensor core", "reduction"],
)
def test_the_difference_of_sums_is_that_of_rounding_errors(first: Form, second: Form) -> None:
    for seed in range(5):
        comparison = elements_of(seed, first, second)
        _, own, other = comparison.ledger()
        assert comparison.sides[0].total - comparison.sides[1].total == own - other


@pytest.mark.parametrize(("first", "second"), [(WHOLE, CUT), (Form(64, ((0, 4),), 8, 24), Form(128, ((0, 2),), 8, 24))])
def test_a_smallest_set_makes_outputs_equal_and_no_smaller_one_does(first: Form, second: Form) -> None:
    """Against plain search: every set of one and of two is recomputed, whatever the search may skip."""
    sizes = set()
    for comparison in differing(first, second, 12):
        found = comparison.smallest_set()
        a, b = comparison.outputs(found.members)
        assert a == b == found.output
        candidates = comparison.candidates()
        for size in (1, 2):
            plain = [c for c in combinations(candidates, size) if len(set(comparison.outputs(c))) == 1]
            if len(found.members) == size:
                assert found.smallest and found.alike == len(plain) and found.members in plain
                break
            assert not plain
        else:
            for member in found.members:
                left = [m for m in found.members if m != member]
                assert len(set(comparison.outputs(left))) == 2
        sizes.add(len(found.members))
    assert len(sizes) > 1


def test_an_operand_that_differs_is_found_and_replacing_results_cures_it() -> None:
    rng = np.random.default_rng(4)
    a, w = rng.standard_normal((2, 256)).astype(np.float16).astype(np.float32)
    changed = a.copy()
    changed[100], changed[200] = a[100] + 2, a[200] - 1
    comparison = Comparison(*(Element(build(CUT), Terms(x, w, FLOAT16), 60) for x in (a, changed)))
    parting = comparison.parting()
    assert parting is not None and parting.first == parting.second and parting.first is not None
    assert comparison.sides[0].tree.nodes[parting.first].first == 96
    assert [comparison.sides[0].tree.nodes[i].first for i in comparison.operand_nodes()] == [96, 192]
    assert comparison.with_results_of_the_first(comparison.operand_nodes()) == comparison.sides[0].output
    assert comparison.with_results_of_the_first([parting.first]) != comparison.sides[0].output


def origin(document: Document) -> Document:
    return dict(document["chain"][-1])


def test_an_element_of_w13_is_explained_down_to_the_cut(runs: tuple[Run, Run]) -> None:
    found = first_difference(runs, same_rows(runs), "w13")
    assert found is not None
    surface, rows, column = found
    document = explain(runs, surface, rows, column)
    link = origin(document)
    words = [int(bits(r.surfaces["w13"])[rows[0], column]) for r in runs]
    assert document["differs"] and [int(o["bits"], 16) for o in document["outputs"]] == words
    assert link["cause"] == "shape" and link["ledger"]["adds_up"] and link["smallest_set"]["makes_equal"]
    assert [int(link["rounding"][n]["output"]["bits"], 16) for n in ("first", "second")] == words
    a, b = link["sides"]
    assert a["slices"] != b["slices"] and a["block"] != b["block"]
    cuts = [s[0] * 64 for side in (a, b) for s in side["slices"][1:]]
    assert min(cuts) <= link["parting"][0]["k"][0] < min(cuts) + 64


@pytest.mark.parametrize("surface", ["activation", "w2", "final"])
def test_a_later_element_is_followed_back_to_w13(runs: tuple[Run, Run], surface: str) -> None:
    at_w2_alone = align(runs[0].inputs.topk_ids, 5, 8)
    assert np.array_equal(at_w2_alone.rows, runs[0].plan.rows)
    found = first_difference(runs, same_rows(runs), surface)
    assert found is not None
    document = explain(runs, *found)
    chain = [link["surface"] for link in document["chain"]]
    assert chain[0] == surface and chain in (
        ["activation", "w13"], ["w2"], ["w2", "activation", "w13"], ["final", "w2"],
        ["final", "w2", "activation", "w13"],
    )  # fmt: skip
    for link in document["chain"]:
        bit = [int(o["bits"], 16) for o in link["outputs"]]
        assert bit == [int(bits(r.surfaces[link["surface"]])[link["row"], link["column"]]) for r in runs]
        assert bit[0] != bit[1]
    assert answer(document).exit_code == 1


def test_one_element_alone_is_carried_on_by_computing_the_whole_layer(runs: tuple[Run, Run]) -> None:
    found = first_difference(runs, same_rows(runs), "w13")
    assert found is not None
    _, (row, _), column = found
    w13 = runs[0].surfaces["w13"].copy()
    w13[row, column] = runs[1].surfaces["w13"][row, column]
    other = replace(runs[0], given={"w13": w13})
    for step in onward(runs, "w13", (row, row), column):
        changed = np.flatnonzero(
            bits(other.surfaces[step["surface"]])[step["row"]] != bits(runs[0].surfaces[step["surface"]])[step["row"]]
        )
        assert step["columns_changed"] == len(changed) and step["columns"] == changed[:8].tolist()
    everywhere = [np.argwhere(bits(other.surfaces[s]) != bits(runs[0].surfaces[s])) for s in ("activation", "w2")]
    assert all({int(r) for r, _ in found} <= {row} for found in everywhere)


def test_two_causes_at_once_are_told_apart(runs: tuple[Run, Run]) -> None:
    """Another launch of W2 alone, and other operands from W13: each alone on the first run's side of the other."""
    first = runs[0]
    second = replace(
        runs[1],
        settings={"w13": runs[1].settings["w13"], "w2": Setting(Launch(128, 64, 45), "hopper")},
    )
    changed = np.argwhere(bits(first.surfaces["activation"]) != bits(second.surfaces["activation"]))
    seen = set()
    for row in sorted({int(r) for r, _ in changed})[:6]:
        for column in np.flatnonzero(bits(first.surfaces["w2"])[row] != bits(second.surfaces["w2"])[row])[:20]:
            document = explain((first, second), "w2", (row, row), int(column))
            link = document["chain"][0]
            assert not link["same_shape"] and not link["same_operands"]
            assert (len(document["chain"]) == 1) == link["alone"]["shape_changes_bits"]
            seen.add((link["alone"]["shape_changes_bits"], link["alone"]["operands_change_bits"]))
    assert len(seen) > 1


def test_other_tensor_cores_are_named_as_the_cause(runs: tuple[Run, Run]) -> None:
    second = replace(runs[0], settings=dict.fromkeys(GEMMS, Setting(Launch(64, 128, 45), "ampere")))
    both = runs[0], second
    found = first_difference(both, same_rows(both), "w13")
    assert found is not None
    document = explain(both, *found)
    assert "tensor cores" in answer(document).reason and origin(document)["smallest_set"]["makes_equal"]
    assert "group_before" in origin(document)["parting"][1]


def test_equal_elements_are_equal_by_construction_or_by_chance(runs: tuple[Run, Run]) -> None:
    same = explain((runs[0], runs[0]), "w13", (0, 0), 0)
    assert not same["differs"] and "by construction" in answer(same).reason and answer(same).exit_code == 0
    first, second = (bits(r.surfaces["w13"]) for r in runs)
    row = int(np.argwhere(first != second)[0][0])
    column = int(np.flatnonzero(first[row] == second[row])[0])
    chance = explain(runs, "w13", (row, row), column)
    assert not chance["differs"] and "not by construction" in answer(chance).reason


def test_the_text_prints_operands_and_results_as_bits(runs: tuple[Run, Run]) -> None:
    found = first_difference(runs, same_rows(runs), "final")
    assert found is not None
    document = explain(runs, *found)
    text = "\n".join(answer(document).lines())
    for addition in origin(document)["parting"]:
        assert addition["result"]["bits"] in text and addition["operands"][0]["bits"] in text
    assert all(o["bits"] in text for link in document["chain"] for o in link["outputs"])


def test_an_element_that_does_not_exist_is_refused(runs: tuple[Run, Run]) -> None:
    for bad in (("w13", (0, 0), 99999), ("final", (24, 24), 0), ("w14", (0, 0), 0)):
        with pytest.raises(InputError):
            explain(runs, *bad)


def test_dot_has_every_addition_and_every_product_once_a_tree(runs: tuple[Run, Run]) -> None:
    found = first_difference(runs, same_rows(runs), "w13")
    assert found is not None
    document = explain(runs, *found)
    text = dot(document)
    for side, tree in enumerate(origin(document)["trees"]):
        steps = [n for n in tree["nodes"] if n["operation"] == Kind.STEP]
        assert sorted(k for n in steps for k in range(*n["k"])) == list(range(1024))
        edges = [line for line in text.splitlines() if f"n{side}_" in line and "->" in line]
        assert len(edges) == len(tree["nodes"]) - 1 + len(steps)


def test_the_figure_ends_each_tree_on_its_side_of_the_boundary(runs: tuple[Run, Run]) -> None:
    found = first_difference(runs, same_rows(runs), "w13")
    assert found is not None
    document = explain(runs, *found)
    with look():
        figure = draw(document)
    drift = figure.axes[-1]
    ends = [float(np.asarray(line.get_ydata())[0]) for line in drift.lines if line.get_marker() == "o"]
    boundary = next(float(np.asarray(line.get_ydata())[0]) for line in drift.lines if line.get_linewidth() == 0.9)
    outputs = [float(o["number"]) for o in document["outputs"]]
    assert (ends[0] - boundary) * (ends[1] - boundary) <= 0
    assert (ends[0] < ends[1]) == (outputs[0] < outputs[1])
