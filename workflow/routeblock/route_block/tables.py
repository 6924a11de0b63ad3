# SPDX-License-Identifier: Apache-2.0
"""Study A's tables: geometry, trajectories, relations, differences, mutations; several lanes and points in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from routeblock.declared import by_name
from routeblock.route_block.document_tables import Document, Documents, DocumentTable, Evidence
from routeblock.route_block.paths import FIXTURE, STUDY, Source, Studies
from routeblock.tables import Column, Row, Share

FIXTURES = Documents("routeblock.fixture.v1", Source((f"{FIXTURE}/fixture.json",)))
SCORES = Documents("routeblock.score.v1", Source((f"{STUDY}/score.json",)))
MUTATIONS = Documents("routeblock.mutations.v1", Source((f"{STUDY}/mutations.json",)))
RANDOM_PLANS = Documents(
    "routeblock.random_plans.v1", Source(("results/random_plans/{fixture}/twin-hopper.json",), Studies.FIXTURE)
)

SURFACES = ("w13", "activation", "w2", "final")
COUNTED = ("w13", "w2", "final")
ASKED_ONLY = "asked, not read back"
QUANTITIES = ("elements", "rows", "max_abs_difference")


class Comparison(StrEnum):
    """How a measured value stands beside the published one."""

    REPRODUCED = "reproduced"
    """The same quantity, and independent of the checkpoint."""
    ELSEWHERE = "holds on another fixture"
    NOT_ELSEWHERE = "does not hold on this fixture"
    NOT_INFORMATIVE = "not informative"
    NOT_COMPARABLE = "not comparable"
    """It depends on the checkpoint, which this fixture is not."""
    FORM = "form not published"
    """A digest whose canonical form is not published."""
    INCONSISTENT = "inconsistent in source"
    DIFFERS = "differs"
    DESIGN = "by the fixture's design"
    """The fixture was made so that it is equal."""
    BY_CONSTRUCTION = "by construction"
    """A relation between runs of one plan on one grid: nothing but determinism was tested."""
    EXPLORATORY = "exploratory"
    """Another number of replicates than the protocol's."""
    NOT_PUBLISHED = "not published"


_WHERE = tuple(Column(name) for name in ("fixture", "lane", "arithmetic", "point", "plan_source", "evidence"))
_WHERE_NOTE = (
    "Arithmetic: modelled, computed (both on a CPU twin) or observed (on a GPU), as each lane's records say. Evidence: "
    "protocol (five exact outcomes of each cell and history) or exploratory."
)


def _where(score: Document) -> Row:
    where = {name: score[name] for name in ("lane", "point", "plan_source", "evidence")}
    return {**where, "fixture": score["fixture"]["name"], "arithmetic": score["status"]}


def geometry(given: Evidence) -> list[Row]:
    """Does the fixture have every published geometric fact?

    Each geometric fact of the fixture: what the source prints (``published``), what the fixture is to have
    (``wanted``) and what code found on the finished fixture (``found``). *Reproduced*: printed in the source,
    independent of the checkpoint, and found. *Not published*: a choice of this fixture or a consequence that the
    source does not print. **Computed.**
    """
    told = given.published["geometry"]
    rows = []
    for fixture in given.documents:
        for fact in fixture["facts"]:
            name, found = fact["fact"], fact["found"]
            status = Comparison.NOT_PUBLISHED
            if name in told:
                status = Comparison.REPRODUCED if told[name] == found else Comparison.DIFFERS
            row = {"fixture": fixture["name"], "fact": name, "holds": fact["holds"], "status": str(status)}
            row |= {"wanted": _text(fact["wanted"]), "found": _text(found)}
            rows.append(row | ({"published": _text(told[name])} if name in told else {}))
    return rows


def trajectories(given: Evidence) -> list[Row]:
    """Which cells and histories share bits?

    Each cell and history of each lane with the digests of its four surfaces; within a surface of one lane, point
    and plan source, equal bits share a letter. ``arithmetic`` says whether a lane is **modelled**, **computed** or
    **observed**; ``outcomes`` counts distinct results of the replicates, and ``reproducible`` is no where there are
    several.
    """
    rows = []
    for score in given.documents:
        letters: dict[str, dict[str, str]] = {surface: {} for surface in SURFACES}
        for arm in score["arms"]:
            row = _where(score) | {name: arm[name] for name in ("cell", "history", "reproducible")}
            row |= {f"{gemm}_grid": launch[2] for gemm, launch in arm["launches"].items()}
            row |= {"replicates": score["replicates"], "outcomes": len(arm["outcomes"]), "plan": arm["fingerprint"]}
            for surface in arm["surfaces"]:
                counts: Counter[str] = Counter()
                for outcome in arm["outcomes"]:
                    digest = outcome["surfaces"][surface]
                    letters[surface].setdefault(digest, _letter(len(letters[surface])))
                    counts[digest] += len(outcome["replicates"])
                several = [f"{letters[surface][digest]} x{n}" for digest, n in counts.most_common()]
                row[surface] = " + ".join(several) if len(counts) > 1 else letters[surface][next(iter(counts))]
                row[f"{surface}_sha256"] = " ".join(digest for digest, _ in counts.most_common())
            rows.append(row)
    return rows


def relations(given: Evidence) -> list[Row]:
    """Do the study's seven claims hold, and on what does each rest?

    The seven relations that the study claims: what became of each (*holds*, *fails*, *not informative* with its
    reason in ``note``) and on what that rests. ``basis``: *by construction* (one plan on one grid),
    *computed* (on a twin) or *observed* (on a GPU). ``reference`` is the cell that stands for ``native``.
    """
    rows = []
    for score in given.documents:
        for relation in score["relations"]:
            row = _where(score) | {name: relation[name] for name in ("number", "basis", "reference", "note")}
            row |= {"relation": relation["claim"], "status": relation["status"]}
            rows.append(row | {"compared": "; ".join(map(_clause, relation["clauses"]))})
    return rows


def studies(given: Evidence) -> list[Row]:
    """What was verified of each study (identity, order, plan, grid), and how many relations hold on which basis?

    What the verdict on each study rests on: when the identity of what computes was written down, by which stamps the
    order was verified, whether the plan was read back from the kernels, who reports the grid, how pairs were chosen;
    and its relations counted by basis, those that hold *by construction* apart.
    """
    rows = []
    for score in given.documents:
        row = _where(score) | {"replicates": score["replicates"], "order": score["order"]}
        row |= {"identity": score["identity"]["frozen"], "pairs": score["exchange"]["chosen"]}
        row |= {"grid": "; ".join(score["grids"]), "plan": "; ".join(f"{how}" for how in sorted(score["consumed"]))}
        row |= {"plans_read_back": sum(n for how, n in score["consumed"].items() if how != ASKED_ONLY)}
        row |= {"runs": len(score["runs"])}
        found = Counter((r["basis"], r["status"]) for r in score["relations"])
        for basis in ("computed", "observed", "by construction"):
            name = basis.replace(" ", "_")
            row |= {f"{name}_{said}": found[basis, status] for said, status in (("hold", "holds"), ("fail", "fails"))}
        row["not_informative"] = sum(n for (_, status), n in found.items() if status == "not informative")
        row["exploratory"] = sum(n for (_, status), n in found.items() if status.startswith("exploratory"))
        rows.append(row)
    return rows


def differences(given: Evidence) -> list[Row]:
    """How many elements and rows differ between the histories, measured and published?

    H0 beside H1: elements and rows that differ, the largest difference, digests and relations, ``measured`` beside
    ``published``. ``comparison`` says what the two may be compared for: *not comparable* depends on the checkpoint,
    which this fixture is not; *holds on another fixture* is a relation; *by the fixture's design* was made equal;
    *inconsistent in source* does not follow from the source's own data.
    """
    return [_where(score) | row for score in given.documents for row in _differences(score, given.published)]


def _differences(score: Document, published: Document) -> Iterator[Row]:
    reference = score["relations"][0]["reference"]
    natives = [[reference, "H0"], [reference, "H1"]]
    found = next(p["found"] for p in score["pairs"] if [p["first"], p["second"]] == natives)
    for told in published["native_difference"]:
        for quantity in QUANTITIES:
            measured, comparison, note = found[told["surface"]][quantity], Comparison.NOT_COMPARABLE, ""
            if quantity == "rows" and "inconsistent" in told:
                comparison, note = Comparison.INCONSISTENT, told["inconsistent"]
            elif quantity == "rows" and measured == told["rows"]:
                designed = score["exchange"]["chosen"] == "by construction"
                comparison = Comparison.DESIGN if designed else Comparison.ELSEWHERE
                note = "the fixture's author placed these routes; no finding" if designed else ""
            row = {"quantity": f"{quantity} that differ" if quantity != QUANTITIES[2] else quantity}
            row |= {"surface": told["surface"], "arms": f"{reference}/H0, {reference}/H1", "note": note}
            yield row | _both(told[quantity], measured, comparison)
    arms = {(arm["cell"], arm["history"]): arm for arm in score["arms"]}
    for told in published["digests"]:
        if arm := arms.get((told["cell"], told["history"])):
            row = {"quantity": "SHA-256", "surface": told["surface"], "arms": f"{told['cell']}/{told['history']}"}
            digests = {outcome["surfaces"][told["surface"]] for outcome in arm["outcomes"]}
            measured = next(iter(digests)) if len(digests) == 1 else f"{len(digests)} digests, see trajectories"
            yield row | _both(told["begins"], measured, Comparison.NOT_COMPARABLE)
    yield {"quantity": "fixture SHA-256"} | _both(
        published["identities"]["fixture"], score["fixture"]["sha256"], Comparison.FORM
    )
    became = {
        "holds": Comparison.ELSEWHERE,
        "fails": Comparison.NOT_ELSEWHERE,
        "not informative": Comparison.NOT_INFORMATIVE,
    }
    for relation in score["relations"]:
        if relation["number"] in published["relations"]:
            row = {"quantity": f"relation {relation['number']}", "note": f"{relation['claim']}; {relation['basis']}"}
            comparison = became.get(relation["status"], Comparison.EXPLORATORY)
            if (relation["status"], relation["basis"]) == ("holds", "by construction"):
                comparison = Comparison.BY_CONSTRUCTION
            yield row | _both("holds", relation["status"], comparison)


def prediction(given: Evidence) -> list[Row]:
    """Is the frozen prediction right on random plans, and not by predicting everything?

    Random legal plans at several grids against the prediction: rows predicted to be able to differ, rows whose bits
    did change, and how many predicted sets are empty, partial or full. ``faults`` counts, for these plans and grids
    on the twin, changed rows that were not predicted. **Computed** on ``twin-hopper``.
    """
    rows = []
    for document in given.documents:
        for grid in sorted({c["grid"] for c in document["comparisons"]}):
            plans = [c for c in document["comparisons"] if c["grid"] == grid]
            for surface in COUNTED:
                sizes = [c["predicted"][surface] for c in plans]
                changed = sum(c["changed"][surface] for c in plans)
                whole = plans[0]["total"][surface]
                rows.append(
                    {
                        "lane": document["lane"],
                        "grid": grid,
                        "surface": surface,
                        "plans": len(plans),
                        "empty_sets": sum(size == 0 for size in sizes),
                        "partial_sets": sum(0 < size < whole for size in sizes),
                        "full_sets": sum(size == whole for size in sizes),
                        "predicted_rows": sum(sizes),
                        "changed_rows": changed,
                        "share_changed": changed / sum(sizes) if sum(sizes) else None,
                        "faults": sum(len(c["faults"]) for c in plans),
                    }
                )
    return rows


def mutations(given: Evidence) -> list[Row]:
    """Does the scorer refuse every changed copy of the runs, each for the reasons declared beforehand?

    Changed copies of sound runs before the scorer: the reasons fixed beforehand (``declared``) and the reasons found.
    ``as_declared`` is yes where they agree and no other run is refused; the unchanged copy has to be accepted. Empty:
    the change is impossible there, and declared to be.
    """
    rows = []
    for document in given.documents:
        where = {name: document[name] for name in ("lane", "point", "plan_source")}
        for entry in document["mutations"]:
            row = where | {name: entry[name] for name in ("change", "as_declared", "note")}
            row |= {"mutation": entry["name"], "declared": ", ".join(entry["declared"]) or "accepted"}
            row["runs"] = entry["runs"] if isinstance(entry["runs"], str) else " ".join(entry["runs"])
            rows.append(row | {"found": ", ".join(entry["found"]) or "accepted"} | _impossible(entry))
    return rows


def _impossible(entry: Document) -> Row:
    return {"found": None} if entry["as_declared"] is None else {}


def _both(published: Any, measured: Any, comparison: Comparison) -> Row:
    row: Row = {"published": _text(published), "measured": _text(measured), "comparison": str(comparison)}
    for name, value in (("published", published), ("measured", measured)):
        if isinstance(value, int | float):
            row[f"{name}_number"] = float(value)
    return row


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"[{_text(v)}]" if isinstance(v, list) else _text(v) for v in value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"Z{index - 25}"


def _clause(clause: Document) -> str:
    sign = "=" if clause["claim"] == "equal" else "!="
    wrong = [s for s in clause["surfaces"] if (s in clause["equal"]) != (sign == "=")]
    holds = "" if not wrong else f", not on {' '.join(wrong)}"
    return f"{'/'.join(clause['first'])} {sign} {'/'.join(clause['second'])} on {' '.join(clause['surfaces'])}{holds}"


TABLES = by_name(
    DocumentTable(
        "geometry",
        geometry,
        (
            Column("fixture"),
            Column("fact"),
            Column("published"),
            Column("wanted"),
            Column("found"),
            Column("holds", "flag"),
            Column("status"),
        ),
        "Geometry: published facts on the fixture",
        "Found by code on the finished fixture. Reproduced: printed in the source, independent of the checkpoint, and "
        "found. Not published: a choice of this fixture or a consequence that the source does not print.",
        made_from=FIXTURES,
    ),
    DocumentTable(
        "studies",
        studies,
        (
            *_WHERE,
            Column("replicates", "count"),
            Column("runs", "count"),
            Column("identity"),
            Column("order"),
            Column("plan"),
            Column("plans_read_back", "count"),
            Column("grid"),
            Column("pairs"),
            *(
                Column(f"{basis}_{said}", "count")
                for basis in ("computed", "observed", "by_construction")
                for said in ("hold", "fail")
            ),
            Column("not_informative", "count"),
            Column("exploratory", "count"),
        ),
        "Studies: what each verdict rests on, and its relations by basis",
        "Identity: when source, binary and environment were written down; a run of another one is refused. Order: "
        "by which stamps the planned order was verified. Plan: from where the plan of the kernels was taken; what was "
        "asked for and not read back is not counted as consumed. Grid: who reports it. Pairs: how the exchanged routes "
        "were chosen. By construction: one plan on one grid, where nothing but determinism was tested. Exploratory: "
        f"relations judged on another number of replicates, counted nowhere else. {_WHERE_NOTE}",
        share=Share(rows=14),
        made_from=SCORES,
    ),
    DocumentTable(
        "relations",
        relations,
        (
            *_WHERE,
            Column("number", "count"),
            Column("relation"),
            Column("status"),
            Column("basis"),
            Column("reference"),
            Column("note"),
            Column("compared"),
        ),
        "Relations: what the study claims of trajectories",
        "Basis: by construction (one plan on one grid, so nothing was tested but determinism), computed "
        f"(on a twin) or observed (on a GPU). {_WHERE_NOTE}",
        share=Share(rows=14),
        made_from=SCORES,
    ),
    DocumentTable(
        "trajectories",
        trajectories,
        (
            *_WHERE,
            Column("cell"),
            Column("history"),
            *(Column(surface) for surface in SURFACES),
            Column("replicates", "count"),
            Column("outcomes", "count"),
            Column("reproducible", "flag"),
            Column("w13_grid", "count"),
            Column("w2_grid", "count"),
            Column("plan", format=".12"),
            *(Column(f"{surface}_sha256", format=".12") for surface in SURFACES),
        ),
        "Trajectories: bits of every surface by cell and history",
        "Equal bits share a letter within a surface of one lane, point and plan source. Where replicates differ, each "
        "letter has its number of replicates: not reproducible on this machine. Outcomes: distinct results of the "
        f"replicates. Digests and plan fingerprints are cut here, whole in the parquet and csv. {_WHERE_NOTE} "
        "On a twin `native` replays the stored plan: a CPU has no atomics race to observe.",
        share=Share(rows=14),
        made_from=SCORES,
    ),
    DocumentTable(
        "differences",
        differences,
        (
            *_WHERE,
            Column("quantity"),
            Column("surface"),
            Column("arms"),
            Column("published"),
            Column("measured"),
            Column("comparison"),
            Column("note"),
            Column("published_number", "number", "g"),
            Column("measured_number", "number", "g"),
        ),
        "Differences: H0 beside H1, measured and published",
        "Published on an RTX 3090 with a real checkpoint; measured on this fixture. Rows: routes, for `final` tokens. "
        f"Not comparable: depends on the checkpoint. {_WHERE_NOTE}",
        share=Share((("quantity", "elements that differ"),), 32),
        made_from=SCORES,
    ),
    DocumentTable(
        "mutations",
        mutations,
        (
            Column("lane"),
            Column("point"),
            Column("plan_source"),
            Column("mutation"),
            Column("runs"),
            Column("declared"),
            Column("found"),
            Column("as_declared", "flag"),
            Column("change"),
            Column("note"),
        ),
        "Mutations: changed copies of sound runs before the scorer",
        "Each is a copy of all runs of the study. Declared: the reason codes fixed beforehand, at the runs changed.",
        made_from=MUTATIONS,
    ),
    DocumentTable(
        "prediction",
        prediction,
        (
            Column("lane"),
            Column("grid", "count"),
            Column("surface"),
            Column("plans", "count"),
            Column("empty_sets", "count"),
            Column("partial_sets", "count"),
            Column("full_sets", "count"),
            Column("predicted_rows", "count"),
            Column("changed_rows", "count"),
            Column("share_changed", "number", ".3f"),
            Column("faults", "count"),
        ),
        "Prediction: random legal plans against the canonical one",
        "Predicted rows can differ, all others must not. A fault is a plan of these, at one of these grids, whose "
        "predicted routes are not those of a walk over the CUDA blocks, or of which the twin changed a row outside "
        "them. It was tried for these plans and grids alone. Rows: routes, for `final` tokens. "
        "Share: of the predicted rows, how many did change in at least one bit.",
        absent=("200 random plans take minutes, so make study leaves them out", "make prediction"),
        made_from=RANDOM_PLANS,
    ),
)
