# SPDX-License-Identifier: Apache-2.0
"""The three sentences: each must change with the rows that it is made from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from report_inputs import Row, Rows, study_rows

from routeblock.errors import InputError
from routeblock.report.answer import Cited, answer


def sentences(rows: Rows) -> list[str]:
    return [s.text for s in answer(rows)]


def changed(name: str, change: Callable[[Row], Row | None]) -> Rows:
    """The study with the rows of one table changed, or left out where `change` gives None."""
    rows = study_rows()
    rows[name] = [new for row in rows[name] if (new := change(dict(row))) is not None]
    return rows


def status_of(lane: str, numbers: tuple[int, ...], status: str) -> Callable[[Row], Row]:
    return lambda r: r | ({"status": status} if r["lane"] == lane and r["number"] in numbers else {})


ALONE = "; placement is shown as the cause for these alone. Of these, yes: "
ON_TWIN = f"What is shown is the effect of injected plans, on the CPU twin{ALONE}"


def test_where_everything_holds_each_sentence_says_so_with_the_counts_of_the_rows() -> None:
    mechanism, history, cure, schedule = sentences(study_rows())
    assert mechanism == (
        f"What is shown is the effect of injected plans{ALONE}in 3 of 3 studies the plans were "
        "drawn by the fixture's author; two routes exchanged over a block boundary carried the layer to "
        "the other history's bits, and two exchanged inside a block changed none, in 3 of 3 studies "
        "(twin-ampere 1 of 1 modelled, twin-hopper 1 of 1 computed, recorded-h200 1 of 1 observed), where"
        " 6 to 17 elements of W13 and 5 to 74 of the final output differ; of 21 relations 5 hold as "
        "modelled, 5 as computed, 5 as observed, 6 by construction alone, 0 fail and 0 are not informative; the twin "
        "gives each of 1,000 elements from a GPU bit for bit."
    )
    assert cure == (
        "Canonical order stops it, within the margins fixed in advance: on one routing (NVIDIA H200) "
        "4,000 calls of the native alignment gave 43 to 51 plans and 10 final outputs at each of 2 "
        "launches, and 4,000 calls in canonical order gave 1 plan (by construction) and 1 final output at each of 2 "
        "launches; replayed from a graph, the alignment alone is non-inferior at 2 of 2 sizes, and the "
        "whole layer is non-inferior at 2 of 2 sizes, with the ratios in the table alone; enqueued from "
        "Python without a graph, the alignment as recorded took more host time than the native at 2 of 2 sizes."
    )
    assert schedule == (
        "It depends on the shape: band32 against job_major at the study's own shapes is slower in 4 of 4 on "
        "recorded-h200 gpu0 and gpu1, replayed from a graph (+2.72% to +4.31%), slower in 2 of 2 on "
        "recorded-h200-fresh gpu0, replayed from a graph (+4.31%), slower in 2 of 2 on recorded-h200-stream gpu0, "
        "launched one by one (+6.96%); the seeds of recorded-h200-fresh and recorded-h200-stream had been used by no "
        "record; launched one by one, as the published study was timed, it is +6.96%, and published for two V100s: "
        "-4.71% to +0.66%; at 16 slots (independent jobs) the change depends on the mode: replayed from a graph "
        "+11.80% on recorded-h200, launched one by one +28.30% on recorded-h200-stream; where the weights keep the "
        "ratio to L2 that they had on a V100, with "
        "more columns, it is faster in 2 of 2 cases, with changes of -15.00% to -11.50%, without an A/A floor; "
        "counters: at the study's shapes a call of it reads 0.6 MB to 6.1 MB from DRAM (+0% at 16 slots, +249% at 256 "
        "slots against the control); at the other ratio its DRAM reads change by -5% at 16 slots, -86% at 256 slots, "
        "so what makes it faster there was not isolated."
    )
    assert history == (
        "Yes, on one machine and one routing: NVIDIA H200: plans under the two histories are 1.00 apart in total "
        "variation, labels exchanged between neighbouring processes put them 0.17 apart (p = 0.0001, "
        "alpha 0.05, fixed before), with 20 and 10 distinct plans and 0 in common; the native alignment "
        "gave one plan throughout in 0 of 48 processes; it repeated itself under 1 of 2 conditions that "
        "were looked at; H1 is a composite treatment, and which part of it acts is not shown."
    )


def test_every_number_of_a_sentence_is_cited_from_a_table() -> None:
    failing = changed("relations", status_of("recorded-h200", (4, 6), "fails"))
    for sentence in (*answer(study_rows()), *answer(failing)):
        for part in sentence.parts:
            if isinstance(part, Cited):
                assert part.table in study_rows()
            else:
                assert not [w for w in part.replace("(", " ").split() if w[0].isdigit()], part


def test_exploratory_relations_are_counted_apart_and_support_no_answer() -> None:
    text = sentences(changed("relations", lambda r: r | {"status": "exploratory (2 of 5): holds"}))[0]
    assert text.startswith("These tables cannot tell: ") and "0 of 3 studies" in text
    assert (
        "0 hold as modelled, 0 as computed, 0 as observed, 0 by construction alone, 0 fail and 0 are not informative, "
        "and 21 " in text
    )


def test_plans_that_were_not_read_back_are_said_to_be_what_was_asked_for() -> None:
    assert "read back" not in sentences(study_rows())[0]
    text = sentences(changed("studies", lambda r: r | {"plans_read_back": 0 if r["lane"] == "recorded-h200" else 70}))[
        0
    ]
    assert "in 1 of 3 studies the plan is the one asked for, not one read back from the kernels" in text


@pytest.mark.parametrize("number", [1, 4, 5])
def test_a_failing_relation_of_the_mechanism_takes_the_yes_away_and_is_named(number: int) -> None:
    text = sentences(changed("relations", status_of("recorded-h200", (number,), "fails")))[0]
    assert text.startswith("Not everywhere: ")
    assert "in 2 of 3 studies" in text and "recorded-h200 0 of 1 observed" in text
    assert f"4 as observed, 6 by construction alone, 1 fails ({number} on recorded-h200 published stored)" in text


def test_a_failing_relation_elsewhere_is_named_too() -> None:
    text = sentences(changed("relations", status_of("twin-ampere", (6,), "fails")))[0]
    assert "1 fails (6 on twin-ampere published stored)" in text


def test_where_the_mechanism_fails_in_every_study_the_answer_is_no() -> None:
    text = sentences(changed("relations", lambda r: r | {"status": "fails"}))[0]
    assert text.startswith("No: ") and "0 of 3 studies" in text and "0 by construction alone, 21 fail (" in text


def test_what_is_not_informative_is_no_yes() -> None:
    text = sentences(changed("relations", lambda r: r | {"status": "not informative"}))[0]
    assert text.startswith("These tables cannot tell: ") and "0 of 3 studies" in text
    assert "0 by construction alone, 0 fail and 21 are not informative" in text
    some = sentences(changed("relations", status_of("recorded-h200", (5,), "not informative")))[0]
    assert some.startswith(ON_TWIN) and "2 of 3 studies" in some


def test_without_a_lane_on_a_gpu_nothing_counts_as_observed() -> None:
    rows = study_rows()
    for name in ("relations", "differences"):
        rows[name] = [r for r in rows[name] if r["lane"] != "recorded-h200"]
    del rows["agreement"], rows["census"]
    mechanism, _, cure, _ = sentences(rows)
    assert mechanism.startswith(ON_TWIN) and mechanism.endswith("nothing of this was observed on a GPU.")
    assert cure.startswith("Not observed on a GPU here: no call of the native alignment was counted, and no call in ")


def test_no_differing_element_is_told_where_nothing_is_shown_and_refused_where_relation_1_holds() -> None:
    def none(r: Row) -> Row:
        return r | {"measured": "0", "measured_number": 0.0}

    rows = changed("differences", none)
    with pytest.raises(InputError, match="no element differs where relation 1 is said to hold"):
        answer(rows)
    rows["relations"] = [r | {"status": "not informative"} for r in rows["relations"]]
    assert "studies (" in sentences(rows)[0] and "), and 0 elements of W13 and 0 of the final" in sentences(rows)[0]


def test_a_study_without_its_counts_is_not_given_those_of_others() -> None:
    rows = changed("differences", lambda r: None if r["lane"] == "twin-ampere" else r)
    assert "with no count of elements that differ for some of them" in sentences(rows)[0]


def test_one_differing_bit_of_the_twin_is_said() -> None:
    rows = changed("agreement", lambda r: r | {"differing": 1 if r["history"] == "H1" else 0})
    assert "the twin differs from the GPU in 1 of 1,000 elements, so it does not stand for it" in sentences(rows)[0]


def test_canonical_order_with_two_outputs_does_not_stop_it() -> None:
    rows = changed("census", lambda r: r | ({"distinct_finals": 2} if r["order"] == "canonical" else {}))
    text = sentences(rows)[2]
    assert (
        text.startswith("Canonical order does not stop it: ") and "1 plan (by construction) and 2 final outputs" in text
    )


def test_native_alignment_with_one_output_leaves_nothing_to_stop() -> None:
    text = sentences(changed("census", lambda r: r | {"distinct_finals": 1}))[2]
    assert text.startswith("There was nothing to stop: ")


@pytest.mark.parametrize("verdict", ["inferior", "undecided"])
def test_one_size_beyond_its_margin_is_counted(verdict: str) -> None:
    def beyond(r: Row) -> Row:
        hit = (r["campaign"], r["tokens"], r["mode"]) == ("layer", 1, "graph")
        return r | ({"verdict": verdict, "ratio": 1.5} if hit else {})

    text = sentences(changed("alignment_cost", beyond))[2]
    assert text.startswith("Canonical order stops it, but not everywhere within the margins ")
    assert f"{verdict} at 1 of 2 sizes, non-inferior at 1 of 2 sizes" in text or (
        f"non-inferior at 1 of 2 sizes, {verdict} at 1 of 2 sizes" in text
    )
    assert "1.50" not in text


def test_without_times_the_cost_is_called_not_measured() -> None:
    text = sentences(changed("alignment_cost", lambda r: None))[2]
    assert text.startswith("Canonical order stops it, at a cost not measured here: ")
    assert text.endswith("the alignment alone was not timed, and the whole layer was not timed.")


@pytest.mark.parametrize(
    ("verdict", "lead"),
    [
        ("faster", "Yes, in these cases: "),
        ("slower", "It depends on the shape: "),
        ("undecided", "Undecided: "),
        ("too few accepted", "Not answered: "),
    ],
)
def test_the_verdicts_of_study_b_decide_its_lead(verdict: str, lead: str) -> None:
    text = sentences(changed("confirmation", lambda r: r | {"verdict": verdict}))[3]
    assert text.startswith(lead) and f"{verdict} in 2 of 2 on recorded-h200-stream gpu0" in text
    assert f"{verdict} in 4 of 4 on recorded-h200 gpu0 and gpu1" in text


def test_mixed_verdicts_depend_and_noise_is_counted() -> None:
    def some(r: Row) -> Row:
        return r | ({"verdict": "faster", "change_percent": -3.0, "clear_of_floor": False} if r["slots"] == 64 else {})

    text = sentences(changed("confirmation", some))[3]
    assert text.startswith("It depends: ") and "faster in 2 of 4 and slower in 2 of 4 on recorded-h200 gpu0" in text
    assert "4 of these not clear of the A/A floor" in text and "-3.00% to +6.96%" in text


def test_an_estimate_that_was_not_made_is_not_said() -> None:
    rows = changed("confirmation", lambda r: r | {"change_percent": None, "verdict": "too few accepted"})
    assert "replayed from a graph (no estimate of a change)" in sentences(rows)[3]


def test_with_captured_plans_relations_1_and_5_are_said_as_they_stand() -> None:
    def captured(r: Row) -> Row:
        status = {5: "not informative", 1: "holds" if r["lane"] == "recorded-h200" else "not informative"}
        found = {"status": status[r["number"]]} if r["number"] in status else {}
        return r | found | {"plan_source": "captured"} if r["lane"] != "twin-ampere" else r

    rows = changed("relations", captured)
    rows["differences"] = [
        r | {"plan_source": "captured"} if r["lane"] != "twin-ampere" else r for r in rows["differences"]
    ]
    assert (
        "with captured plans relation 5 (the exchange over a boundary) is not informative in 2 of 2 studies, and "
        "relation 1 (the histories differ) holds in 1 of 2" in sentences(rows)[0]
    )


def test_a_schedule_that_reads_less_and_is_no_faster_in_its_replay_is_said_with_its_timed_interval() -> None:
    rows = study_rows()
    rows["schedule_counters"].append(
        {"kind": "l2_ratio", "slots": 256, "schedule": "band128", "dram_read_mb": 277.5}
        | {"dram_read_change_percent": -85.5, "time_change_percent": 0.5}
    )
    said = "yet band128 at 256 slots took +0.5% in the one replay beside its counters, which has no interval, with -86%"
    assert said in sentences(rows)[3] and "was timed at" not in sentences(rows)[3]
    rows["beyond_study"].append(rows["beyond_study"][-1] | {"schedule": "band128", "change_percent": -14.6})
    assert "where recorded-h200 gpu0 was timed at -14.60% [-15.10, -14.90]" in sentences(rows)[3]


def test_one_mode_is_no_comparison_of_modes() -> None:
    assert "depends on the mode" not in sentences(changed("discovery", lambda r: r | {"mode": "graph"}))[3]


def test_a_cpu_does_not_answer_study_b() -> None:
    text = sentences(changed("confirmation", lambda r: r if r["lane"] == "cpu" else None))[3]
    assert text == "Not measured on a GPU here: no confirmation on a GPU is among these tables."


def test_without_any_table_each_sentence_says_that_it_cannot_tell() -> None:
    leads = [s.lead for s in answer({})]
    observed = "Not observed on a GPU here: "
    assert leads == ["These tables cannot tell: ", observed, observed, "Not measured on a GPU here: "]
