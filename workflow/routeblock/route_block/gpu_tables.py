# SPDX-License-Identifier: Apache-2.0
"""Rows of the tables that only a GPU can fill: agreement, census, probe_control, versions."""

from __future__ import annotations

from collections import defaultdict

from routeblock.declared import by_name
from routeblock.route_block.document_tables import Document, Documents, DocumentTable, Evidence
from routeblock.route_block.paths import LANE, POINT, STUDY, Source, Studies
from routeblock.tables import Column, Row

AGREEMENT = Documents("routeblock.agreement.v1", Source((f"{STUDY}/agreement.json",), Studies.ON_GPU))
CENSUS = Documents("routeblock.census_summary.v1", Source((f"{POINT}/census.json",), Studies.ON_GPU))
PROBE_CONTROL = Documents("routeblock.probe_control.v1", Source((f"{LANE}/probe_control.json",), Studies.ON_GPU))
VERSIONS = Documents("routeblock.versions.v1", Source(("results/versions/versions.json",), Studies.VERSIONS))

NATIVE = Documents("routeblock.native_summary.v1", Source(("results/native/native.json",), Studies.NATIVE))
OPERATOR = Documents("routeblock.operator_summary.v1", Source(("results/native/operator.json",), Studies.NATIVE))

SURFACES = ("w13", "activation", "w2", "final")


def agreement(given: Evidence) -> list[Row]:
    """Does the twin equal the GPU in every recorded surface?

    The CPU twin against every surface that a GPU gave: elements compared bit for bit over all processes
    (``elements``) and how many differ (``differing``). The GPU's side is **observed**; on ``recorded-h200`` it is
    committed evidence, rebuilt and hashed again.
    """
    rows = []
    for document in given.documents:
        arms: dict[tuple[str, str], list[Document]] = defaultdict(list)
        for run in document["runs"]:
            arms[run["cell"], run["history"]].append(run)
        for (cell, history), runs in arms.items():
            for surface in SURFACES:
                counted = [run["surfaces"][surface] for run in runs]
                rows.append(
                    {
                        **{key: document[key] for key in ("lane", "point", "plan_source", "architecture")},
                        "cell": cell,
                        "history": history,
                        "surface": surface,
                        "processes": len(runs),
                        "plans": len({run["fingerprint"] for run in runs}),
                        "elements": sum(c["elements"] for c in counted),
                        "differing": sum(c["differing"] for c in counted),
                        "processes_that_differ": sum(c["differing"] > 0 for c in counted),
                    }
                )
    return rows


def census(given: Evidence) -> list[Row]:
    """How many plans and outputs does the native alignment give?

    How many plans and final outputs vLLM's own alignment gave on one routing, call by call and process by process,
    and canonical order beside it. **Observed**; on ``recorded-h200`` **recorded**. The single plan of canonical
    order is so by construction; its outputs are what was observed.
    """
    return [
        {
            **{key: document[key] for key in ("lane", "gpu", "point")},
            **{key: value for key, value in row.items() if key != "commonest_calls"},
            "commonest_share": row["commonest_calls"] / row["calls"],
            "canonical_share": row["canonical_calls"] / row["calls"],
        }
        for document in given.documents
        for row in document["rows"]
    ]


def probe_control(given: Evidence) -> list[Row]:
    """Does the grid probe change a bit?

    Launches whose grid can be asked for without the grid probe, run with it and without: ``same`` is yes where all
    four surfaces are equal in every bit and the probe recorded the grid asked for. **Observed**; on
    ``recorded-h200`` **recorded**.
    """
    return [
        {
            "lane": document["lane"],
            "gpu": document["gpu"],
            "sms": document["sms"],
            "plan": row["plan"],
            **dict(zip(("thread_k", "thread_n", "grid"), row["launch"], strict=True)),
            "equal_surfaces": len(row["equal"]),
            "same": row["same"],
        }
        for document in given.documents
        for row in document["launches"]
    ]


def versions(given: Evidence) -> list[Row]:
    """Do other versions of vLLM give the same bits?

    Extensions of several vLLM versions on the recorded layer: surfaces with the recorded bits at each launch, of
    ``compared``, and the launch that each version's own selector chose. **Recorded** on an H200.
    """
    rows = []
    for document in given.documents:
        for version in document["versions"]:
            row = {key: version[key] for key in ("version", "extension", "extension_sha256", "gpu", "torch")}
            row |= {f"same_{launch}": len(same) for launch, same in version["same"].items()}
            row["compared"] = max(version["compared"].values())
            row |= {
                f"automatic_{gemm}": " ".join("({}, {}) on {}".format(*launch) for launch in launches)
                for gemm, launches in version["automatic"].items()
            }
            rows.append(row)
    return rows


def history(given: Evidence) -> list[Row]:
    """Does history shift what the native alignment gives?

    Processes under H0 and H1 by turns, and a permutation test whose unit is the process, fixed before the recording:
    how far the outcomes are apart, and how far labels exchanged inside pairs put them. **Recorded** on one H200; the
    plans are proved legal here, and the twin computes each one's final output again.
    """
    return [{**_place(document), **row} for document in given.documents for row in document["history"]]


def repetition(given: Evidence) -> list[Row]:
    """When does the native alignment repeat itself?

    Ways to call vLLM's own alignment, and whether it repeated itself. **Recorded** on one H200, looked at without a
    hypothesis: every condition is listed, whatever came out.
    """
    return [{**_place(document), **row} for document in given.documents for row in document["repetition"]]


def operator(given: Evidence) -> list[Row]:
    """Which launches does the operator refuse, and what of one group over K, or a block without an expert?

    What vLLM's own operator does with launches that do not fit, with one quantisation group over K, and with a block
    whose expert id is -1. **Recorded** on an H200; every output is **computed** again by the twin.
    """
    return [{**_place(document), **row} for document in given.documents for row in document["rows"]]


def _place(document: Document) -> Row:
    return {key: document[key] for key in ("lane", "gpu")}


_GPU = (Column("lane"), Column("gpu"))
_NO_GPU = ("no lane of this study is on a GPU", "a lane recorded-h200 or cuda in config.yaml, then make study")
_NOT_RECORDED = ("recorded-h200 is not among the lanes", "a lane recorded-h200 in config.yaml, then make study")
TABLES = by_name(
    DocumentTable(
        "agreement",
        agreement,
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
        absent=_NO_GPU,
        made_from=AGREEMENT,
    ),
    DocumentTable(
        "census",
        census,
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
        absent=_NO_GPU,
        made_from=CENSUS,
    ),
    DocumentTable(
        "history",
        history,
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
        absent=_NOT_RECORDED,
        made_from=NATIVE,
    ),
    DocumentTable(
        "repetition",
        repetition,
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
        absent=_NOT_RECORDED,
        made_from=NATIVE,
    ),
    DocumentTable(
        "operator",
        operator,
        (*_GPU, Column("check"), Column("cases", "count"), Column("differing", "count"), Column("says")),
        "Operator: launches, one group over K, a block without an expert",
        "Recorded with vLLM's own operator; outputs are computed again by the twin and compared by digest. A block of "
        "expert id -1 is refused by the twin: what the operator makes of it depends on what lies before the weights.",
        absent=_NOT_RECORDED,
        made_from=OPERATOR,
    ),
    DocumentTable(
        "probe_control",
        probe_control,
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
        absent=_NO_GPU,
        made_from=PROBE_CONTROL,
    ),
    DocumentTable(
        "versions",
        versions,
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
        absent=("no recorded evidence is in this checkout", "fixtures/recorded, then make study"),
        made_from=VERSIONS,
    ),
)
