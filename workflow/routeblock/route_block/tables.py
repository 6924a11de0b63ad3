# SPDX-License-Identifier: Apache-2.0
"""Study A's tables: geometry, trajectories, relations, differences, mutations; several lanes and points in one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from routeblock import tables
from routeblock.errors import InputError
from routeblock.route_block import gpu_tables
from routeblock.tables import Column

Document = dict[str, Any]
Row = dict[str, Any]

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


def geometry(fixtures: Sequence[Document], published: Document) -> list[Row]:
    """Every geometric fact of each fixture: published (empty where the source does not print it), wanted, found."""
    told = published["geometry"]
    rows = []
    for fixture in fixtures:
        for fact in fixture["facts"]:
            name, found = fact["fact"], fact["found"]
            status = Comparison.NOT_PUBLISHED
            if name in told:
                status = Comparison.REPRODUCED if told[name] == found else Comparison.DIFFERS
            row = {"fixture": fixture["name"], "fact": name, "holds": fact["holds"], "status": str(status)}
            row |= {"wanted": _text(fact["wanted"]), "found": _text(found)}
            rows.append(row | ({"published": _text(told[name])} if name in told else {}))
    return rows


def trajectories(scores: Sequence[Document], _: Document) -> list[Row]:
    """Each cell and history with the digests of its surfaces; within a column of a lane, equal bits share a letter."""
    rows = []
    for score in scores:
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


def relations(scores: Sequence[Document], _: Document) -> list[Row]:
    """The seven relations: what became of each, on what that rests, and the comparisons it made."""
    rows = []
    for score in scores:
        for relation in score["relations"]:
            row = _where(score) | {name: relation[name] for name in ("number", "basis", "reference", "note")}
            row |= {"relation": relation["claim"], "status": relation["status"]}
            rows.append(row | {"compared": "; ".join(map(_clause, relation["clauses"]))})
    return rows


def studies(scores: Sequence[Document], _: Document) -> list[Row]:
    """What the verdict on each study rests on, and its relations counted by basis."""
    rows = []
    for score in scores:
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


def differences(scores: Sequence[Document], published: Document) -> list[Row]:
    """H0 beside H1 under the native plans, digests and relations: measured, published, and how the two compare."""
    return [_where(score) | row for score in scores for row in _differences(score, published)]


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


def prediction(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each grid and surface: rows predicted over all plans, rows whose bits changed, how large the sets were."""
    rows = []
    for document in documents:
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


def mutations(tried: Sequence[Document], _: Document) -> list[Row]:
    """Each mutation: what was changed, the reason declared beforehand, the reasons found."""
    rows = []
    for document in tried:
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


@dataclass(frozen=True)
class Table:
    """A table: the documents it is made from, its rows, columns, title and what a reader must know."""

    source: str
    rows: Callable[[Sequence[Document], Document], list[Row]]
    columns: tuple[Column, ...]
    title: str
    notes: str


TABLES = {
    "geometry": Table(
        "routeblock.fixture.v1",
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
    ),
    "studies": Table(
        "routeblock.score.v1",
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
    ),
    "trajectories": Table(
        "routeblock.score.v1",
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
    ),
    "relations": Table(
        "routeblock.score.v1",
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
    ),
    "differences": Table(
        "routeblock.score.v1",
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
    ),
    "mutations": Table(
        "routeblock.mutations.v1",
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
    ),
    "prediction": Table(
        "routeblock.random_plans.v1",
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
        "Predicted rows can differ, all others must not; for each plan the predicted routes equal those found by a "
        "walk over the CUDA blocks, and changed rows are among them (else a fault). Rows: routes, for `final` tokens. "
        "Share: of the predicted rows, how many did change in at least one bit.",
    ),
}

_GPU = (Column("lane"), Column("gpu"))
TABLES |= {
    "agreement": Table(
        "routeblock.agreement.v1",
        gpu_tables.agreement,
        (
            *(Column(name) for name in ("lane", "point", "plan_source", "architecture", "cell", "history", "surface")),
            Column("processes", "count"),
            Column("plans", "count"),
            Column("elements", "count"),
            Column("differing", "count"),
            Column("processes_that_differ", "count"),
        ),
        "Agreement: the twin against every surface that a GPU gave",
        "Each recorded run's plan and launch, recomputed on a CPU by the twin of that GPU's tensor cores and compared "
        "bit for bit. Elements: over all processes. Lane recorded-...: committed evidence, rebuilt and hashed again.",
    ),
    "census": Table(
        "routeblock.census_summary.v1",
        gpu_tables.census,
        (
            *_GPU,
            *(Column(name) for name in ("point", "order", "history")),
            *(Column(name, "count") for name in ("processes", "calls", "distinct_plans", "distinct_finals")),
            Column("processes_with_several_plans", "count"),
            Column("commonest_share", "number", ".3f"),
            Column("canonical_share", "number", ".3f"),
            Column("commonest_plan", format=".12"),
        ),
        "Census: plans and final outputs, native alignment and canonical order",
        "Every native call aligns anew, by vLLM's own operator, and runs the layer; canonical order is aligned once a "
        "process, on the host, so its one plan is by construction and its outputs are what was observed. Plans are "
        "counted by their fingerprint, in which the order inside a block does not count. Shares: of the calls, with "
        "the commonest plan and with the canonical one. Histories are separate processes; `both` counts over both.",
    ),
    "history": Table(
        "routeblock.native_summary.v1",
        gpu_tables.history,
        (
            *_GPU,
            Column("outcome"),
            *(Column(name, "count") for name in ("pairs", "calls", "distinct_h0", "distinct_h1", "distinct_both")),
            *(Column(name, "count") for name in ("processes_with_one_h0", "processes_with_one_h1")),
            *(Column(name, "number", ".3f") for name in ("statistic", "null_median", "null_95")),
            Column("p", "number", ".4f"),
            Column("permutations", "count"),
            Column("alpha", "number", "g"),
            Column("verdict"),
        ),
        "History: does it shift what native alignment gives?",
        "Processes under H0 and H1 by turns, each asking vLLM's own alignment on one routing and running the layer. "
        "Statistic: total variation between the outcomes of all calls under H0 and under H1, 0 equal, 1 without a "
        "common outcome. Null: labels exchanged inside pairs of neighbours, the unit being the process. Statistic, "
        "alpha and seed were committed before the recording; the verdict is that of the plans alone, other rows are "
        "descriptive. Calls: under each history. H1 is a composite treatment: which part of it acts is not shown, and "
        "one machine was recorded.",
    ),
    "repetition": Table(
        "routeblock.native_summary.v1",
        gpu_tables.repetition,
        (
            *_GPU,
            *(Column(name) for name in ("condition", "mode", "routing")),
            *(Column(name, "count") for name in ("experts", "routes", "processes", "calls")),
            *(Column(name, "count") for name in ("distinct_plans", "distinct_orders", "processes_with_one_plan")),
            Column("repeats", "flag"),
        ),
        "Repetition: when does native alignment repeat itself?",
        "Looked at without a hypothesis: every condition is listed, whatever came out. Orders: sorted_token_ids byte "
        "by byte; plans: their fingerprint, in which the order inside a block does not count. Repeats: one order in "
        "all calls of all processes, as far as these went; no promise of the kernel. Routing one_expert: so many "
        "routes of one expert.",
    ),
    "operator": Table(
        "routeblock.operator_summary.v1",
        gpu_tables.operator,
        (*_GPU, Column("check"), Column("cases", "count"), Column("differing", "count"), Column("says")),
        "Operator: launches, one group over K, a block without an expert",
        "Recorded with vLLM's own operator; outputs are computed again by the twin and compared by digest. A block of "
        "expert id -1 is refused by the twin: what the operator makes of it depends on what lies before the weights.",
    ),
    "probe_control": Table(
        "routeblock.probe_control.v1",
        gpu_tables.probe_control,
        (
            *_GPU,
            Column("sms", "count"),
            Column("plan"),
            *(Column(name, "count") for name in ("thread_k", "thread_n", "grid", "equal_surfaces")),
            Column("same", "flag"),
        ),
        "Probe control: grids that need no probe, with it and without",
        "Multiples of the SM count can be asked for without the grid probe. Same: all four surfaces are equal in every "
        "bit, and the probe recorded the grid asked for.",
    ),
    "versions": Table(
        "routeblock.versions.v1",
        gpu_tables.versions,
        (
            *(Column(name) for name in ("version", "gpu", "torch")),
            Column("compared", "count"),
            *(Column(f"same_{name}", "count") for name in ("g246", "g200", "auto")),
            *(Column(f"automatic_{gemm}") for gemm in ("w13", "w2")),
            Column("extension"),
            Column("extension_sha256", format=".12"),
        ),
        "Versions: vLLM's extension on the recorded layer",
        "Surfaces (four, in two arrival orders) with the bits of fixtures/golden, at launches asked for: (64, 128) on "
        "246 and on 200, and `auto`, the (128, 64) on 528 that vLLM 0.24.0 chooses. Automatic: what each version's "
        "own selector launched, read off the kernel.",
    ),
}


def write(name: str, sources: Sequence[Path], published: Path, out: Path, *, code: str) -> list[Path]:
    """Write the table `name` of `TABLES` to the folder `out`, sealed by `{name}.manifest.json`.

    `sources`: the fixture.json, score.json or mutations.json files it is made from, in the order of its rows. Raises
    InputError for an unknown name, and for a file that is another document, broken, or a score that is not sound.
    """
    table = tables.find(name, TABLES)
    told = _read(published, "routeblock.published_route_block.v1")
    documents = [_read(source, table.source) for source in sources]
    for source, document in zip(sources, documents, strict=True):
        if not document.get("sound", True):
            raise InputError(
                "these runs are not sound",
                where=str(source),
                limit="tables are made from evidence without a fault",
                way_out="see what routeblock score says of it",
            )
    rows = table.rows(documents, told)
    inputs = [*sources, published]
    return tables.write_sealed(
        out, name, table.columns, rows, title=table.title, notes=table.notes, inputs=inputs, code=code
    )


def _read(path: Path, format_: str) -> Document:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise InputError(f"not readable: {e}", where=str(path), limit="JSON", way_out="make it again") from e
    if not isinstance(document, dict) or document.get("format") != format_:
        raise InputError("another document", where=str(path), limit=f"format {format_}", way_out="name the right file")
    return document
