# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file: it needs no network, no script and no other file, and its bytes depend on its inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import SUFFIX, absolute, seal
from routeblock.report import answer, beside, facts, figure, table_view
from routeblock.report.caption import caption
from routeblock.report.catalogue import CHAPTERS, FIGURES, TABLES, tone
from routeblock.report.lineage import File, Lineage, shown_path, trace
from routeblock.report.not_claimed import NOT_CLAIMED

Row = Mapping[str, Any]

SOURCES = ("report.html.j2", "report.css")
HTML, MANIFEST = "routeblock.html", "routeblock.manifest.json"
LIMIT_BYTES = 8_000_000
FORCE = ".venv/bin/snakemake --cores 2 --force --"
TABLE_SUFFIXES, FIGURE_SUFFIXES = ("md", "csv", "parquet"), ("svg", "png")
# What `facts` reads besides the evidence given.
DOCUMENTS = ("/fixture.json", "/score.json", facts.FIRST_RECORD, "/run.json", "/environment.json")
EVIDENCE = "/evidence.json"
_NO_ANCHOR = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class Shown:
    """A figure or table with its caption, its files, and the command that builds it anew."""

    name: str
    anchor: str
    caption: Markup
    files: tuple[File, ...]
    command: str
    view: table_view.View | None = None
    figure: figure.Figure | None = None
    alt: str = ""


@dataclass(frozen=True)
class Request:
    """What goes into a report: folders, settings, and the tables and figures by name."""

    results: Path
    """With `tables`, `figures` and `environment`; its parent is the folder that paths are told from."""
    captions: Path
    config: Path
    tables: tuple[str, ...]
    figures: tuple[str, ...]

    @property
    def environment(self) -> Path:
        """What the study ran on."""
        return self.results / "environment" / "environment.json"

    def files_of_table(self, name: str) -> list[Path]:
        """The files of a table."""
        return [self.results / "tables" / f"{name}.{suffix}" for suffix in TABLE_SUFFIXES]

    def files_of_figure(self, name: str) -> list[Path]:
        """The files of a figure."""
        return [self.results / "figures" / f"{name}.{suffix}" for suffix in FIGURE_SUFFIXES]

    @property
    def made(self) -> list[Path]:
        """The results that are read, all sealed by the rules that made them."""
        tables = [path for name in self.tables for path in self.files_of_table(name)]
        return [*tables, *(path for name in self.figures for path in self.files_of_figure(name)), self.environment]

    @property
    def texts(self) -> list[Path]:
        """The captions."""
        tables = [self.captions / f"table_{name}.rst" for name in self.tables]
        return [*tables, *(self.captions / f"figure_{name}.rst" for name in self.figures)]


def write(out: Path, request: Request) -> Path:
    """Write the report to the folder `out`, sealed by its manifest; returns the file.

    Raises InputError where something is missing or does not fit its seal, and if the page is too large.
    """
    page, lineage = render(request)
    if len(page) > LIMIT_BYTES:
        raise InputError(
            f"the report would have {len(page)} bytes",
            where=str(out / HTML),
            limit=f"{LIMIT_BYTES} bytes",
            way_out="fewer lanes or points in config.yaml",
        )
    with atomic_file(out / HTML) as temporary:
        temporary.write_bytes(page)
    documents = [f for s in lineage.seals for f in s.outputs if f.path.endswith(DOCUMENTS)]
    evidence = [f for f in lineage.given if f.path.endswith(EVIDENCE)]
    told = [lineage.locate(f) for f in (*documents, *evidence, *(s.file for s in lineage.seals))]
    seal(
        out / MANIFEST,
        rule="report",
        outputs=[out / HTML],
        inputs=[*request.made, request.config, *request.texts, *told],
        parameters={"tables": list(request.tables), "figures": list(request.figures)},
        modules=[__name__],
    )
    return out / HTML


def present(results: Path) -> tuple[list[str], list[str]]:
    """The names of the sealed tables and figures below `results`."""
    found = []
    for folder in ("tables", "figures"):
        found.append([p.name.removesuffix(SUFFIX) for p in sorted((results / folder).glob(f"*{SUFFIX}"))])
    return found[0], found[1]


def in_order(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Names in the order of the catalogue, others after them: one set of names gives one page."""
    given = sorted(set(names))
    first = [n for n in known if n in given]
    return (*first, *(n for n in given if n not in first))


def render(request: Request) -> tuple[bytes, Lineage]:
    """The page, UTF-8, and what it rests on."""
    read = {name: table_view.read(request.results / "tables", name) for name in request.tables}
    drawn = {name: figure.read(request.results / "figures", name) for name in request.figures}
    captions = {f"table-{name}": caption(request.captions, "table", name) for name in request.tables}
    captions |= {f"figure-{name}": caption(request.captions, "figure", name) for name in request.figures}
    lineage = trace(request.results, request.made, [request.config, *request.texts])
    files = {f.path: f for s in lineage.seals for f in s.outputs} | {f.path: f for f in lineage.given}

    def file(path: Path) -> File:
        return files[shown_path(absolute(path), lineage.root)]

    shown: dict[str, Shown] = {}
    for name, drawing in drawn.items():
        key, mine = f"figure-{name}", tuple(map(file, request.files_of_figure(name)))
        alt = FIGURES[name].alt if name in FIGURES else f"Figure {name}, described by its caption."
        shown[key] = Shown(name, key, captions[key], mine, f"{FORCE} figure_{name}", figure=drawing, alt=alt)
    for name, table in read.items():
        key, mine = f"table-{name}", tuple(map(file, request.files_of_table(name)))
        shown[key] = Shown(name, key, captions[key], mine, f"{FORCE} table_{name}", view=table_view.view(table))
    rows = {name: table.rows for name, table in read.items()}
    documents = [f for s in lineage.seals for f in s.outputs if f.path.endswith(DOCUMENTS)]
    given = [f for f in lineage.given if not f.path.endswith(EVIDENCE)]
    page = _template().render(
        sentences=answer.answer(rows),
        matrix=_matrix(rows.get("relations", ())),
        claims=_claims(rows.get("relations", ())),
        statuses=_statuses(rows),
        comparisons=beside.comparisons(rows),
        not_claimed=NOT_CLAIMED,
        chapters=CHAPTERS,
        shown=shown,
        further=[s for s in shown.values() if s.name not in (*TABLES, *FIGURES)],
        missing=[(name, *table.absent) for name, table in TABLES.items() if name not in read],
        environments=facts.environments(lineage, file(request.environment)),
        identities=facts.identities(lineage),
        rules=facts.rules(lineage),
        seals=lineage.seals,
        documents=documents,
        evidence=[f for f in lineage.given if f.path.endswith(EVIDENCE)],
        given=given,
        lanes=list(dict.fromkeys(str(r["lane"]) for r in rows.get("relations", ()))),
        fixtures=list(dict.fromkeys(str(r["fixture"]) for r in rows.get("relations", ()))),
        observed=any(answer.kind(r) == answer.OBSERVED for r in rows.get("relations", ())),
    )
    return page.encode(), lineage


def _template() -> Any:
    folder = Path(__file__).parent
    jinja = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.globals |= {
        "style": Markup((folder / "report.css").read_text(encoding="utf-8")),
        "anchor": anchor,
        "force": FORCE,
        "tone": tone,
    }
    jinja.tests["text"] = lambda part: isinstance(part, str)
    jinja.tests["digest"] = lambda value: bool(table_view.DIGEST.fullmatch(value))
    jinja.filters["literals"] = _literals
    return jinja.get_template("report.html.j2")


def _literals(text: str) -> Markup:
    """Escaped text in which what stands between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one backtick has no partner
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def anchor(file: File) -> str:
    """The anchor of a file's line among the artifacts."""
    return "file-" + _NO_ANCHOR.sub("-", file.path).strip("-")


@dataclass(frozen=True)
class Line:
    """A study in the matrix of relations: where, on what arithmetic, and the seven relations."""

    place: str
    kind: str
    relations: tuple[Row, ...]


def _matrix(rows: Sequence[Row]) -> list[Line]:
    studies: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        studies.setdefault(answer.place(r), []).append(r)
    fixtures = {key[0] for key in studies}
    return [
        Line(" ".join(key if len(fixtures) > 1 else key[1:]), answer.kind(found[0]), tuple(found))
        for key, found in studies.items()
    ]


def _claims(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Each relation's number and claims, as the scores word them."""
    said: dict[str, dict[str, None]] = {}
    for r in rows:
        said.setdefault(str(r["number"]), {})[str(r["relation"])] = None
    return [(number, "; ".join(claims)) for number, claims in said.items()]


def _statuses(tables: answer.Tables) -> list[tuple[str, str, str, str]]:
    """What of this report is what: study, lane, the word for it, the table that says so."""
    lines: dict[tuple[str, str, str, str], None] = {}
    for r in tables.get("relations", ()):
        lane = str(r["lane"])
        word = str(r["arithmetic"])
        lines["Study A", lane, f"{word}; recorded" if lane.startswith("recorded") else word, "relations"] = None
    for r in tables.get("confirmation", ()):
        lane = str(r["lane"])
        word = "observed; recorded" if lane.startswith("recorded") else "observed"
        lines[
            "Study B",
            lane,
            word + (", on this CPU: says nothing of a GPU" if lane == answer.CPU else ""),
            "confirmation",
        ] = None
    for r in tables.get("alignment_checks", ()):
        if r["check"] == "device":
            lines["Cost of alignment", str(r["outcome"]), "observed; recorded", "alignment_checks"] = None
    return list(lines)
