# SPDX-License-Identifier: Apache-2.0
"""The page: whole, escaped, linked, sealed, and refused in one line where something does not fit."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_inputs import columns_of, study_rows, write_caption, write_figure, write_study, write_table

from routeblock.errors import InputError
from routeblock.evidence.chain import Kind, verify
from routeblock.evidence.digest import sha256_file
from routeblock.report import page
from routeblock.report.page import Request, present, write
from routeblock.tables import Column

HOSTILE = '<script>alert("x")</script><img src=http://elsewhere/x onerror=y> & {{ 7 * 7 }}'


class Read(HTMLParser):
    """Ids, links, digests and elements of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.alts: list[str] = []
        self.sources: list[str] = []
        self.digests: list[tuple[str, str]] = []
        self._path = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.tags.append(tag)
        self.ids += [told["id"] or ""] if "id" in told else []
        self.links += [told["href"] or ""] if tag == "a" else []
        if tag == "img":
            self.alts.append(told.get("alt") or "")
            self.sources.append(told.get("src") or "")
        self._path = told.get("data-path") or ""

    def handle_data(self, data: str) -> None:
        if self._path:
            self.digests.append((self._path, data))
            self._path = ""


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return write_study(tmp_path, study_rows())


def made(request_: Request) -> Path:
    return write(request_.results.parent / "reports", request_)


def test_every_link_leads_to_an_anchor_and_no_anchor_stands_twice(request_: Request) -> None:
    read = Read(made(request_))
    assert len(read.ids) == len(set(read.ids))
    assert read.links and all(link[0] == "#" and link[1:] in read.ids for link in read.links)


def test_every_digest_is_that_of_the_file_and_every_file_read_has_one(request_: Request) -> None:
    read = Read(made(request_))
    root = request_.results.parent
    assert {path: sha256_file(root / path) for path, _ in read.digests} == dict(read.digests)
    named = {path for path, _ in read.digests}
    assert {p.relative_to(root).as_posix() for p in [*request_.made, request_.config, *request_.texts]} <= named


def test_the_page_has_no_script_and_loads_nothing(request_: Request) -> None:
    text = made(request_).read_text(encoding="utf-8")
    read = Read(request_.results.parent / "reports" / page.HTML)
    assert not {"script", "iframe", "object", "embed", "form"} & set(read.tags)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in read.sources) and all(read.alts)
    assert not re.search(r"(https?:)?//(?!www\.w3\.org)", re.sub(r"base64,[^\"]*", "", text))
    assert "default-src 'none'" in text


def test_what_a_table_says_is_text_and_never_markup_or_a_template(tmp_path: Path) -> None:
    rows = study_rows()
    rows["relations"][0] |= {"note": HOSTILE, "relation": HOSTILE, "status": HOSTILE}
    request_ = write_study(tmp_path, rows)
    text = made(request_).read_text(encoding="utf-8")
    assert "<script>" not in text and "<img src=http" not in text
    assert "&lt;script&gt;" in text and "{{ 7 * 7 }}" in text


def test_a_caption_cannot_bring_raw_html_or_another_file(request_: Request) -> None:
    for text in (".. raw:: html\n\n   <script>x</script>\n", ".. include:: /etc/hostname\n"):
        write_caption(request_.captions, "table", "census", text)
        with pytest.raises(InputError, match=r"table_census.rst: no readable caption: .*; write it"):
            made(request_)


def test_a_missing_table_is_said_to_be_missing_with_what_makes_it(request_: Request) -> None:
    text = made(request_).read_text(encoding="utf-8")
    assert "<b>Table prediction is not in this report:</b> 200 random plans take minutes" in text
    assert "It comes with make prediction." in text
    assert "Table versions is not in this report" in text


def test_a_table_that_was_asked_for_and_is_not_there_is_refused_and_nothing_is_written(request_: Request) -> None:
    (request_.results / "tables" / "census.parquet").unlink()
    with pytest.raises(InputError, match=r"census.parquet: not readable: .*snakemake --cores 2 -- table_census"):
        made(request_)
    assert not (request_.results.parent / "reports").exists()


@pytest.mark.parametrize("svg", ["", "<html/>", "<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_a_figure_that_is_no_drawing_is_refused(request_: Request, svg: str) -> None:
    write_figure(request_.results, "partition", svg)
    with pytest.raises(
        InputError, match=r"partition.svg: no readable drawing: .*snakemake --cores 2 -- figure_partition"
    ):
        made(request_)


def test_an_edited_table_is_refused(request_: Request) -> None:
    path = request_.results / "tables" / "census.csv"
    path.write_text(path.read_text().replace("4000", "4001") + "x")
    with pytest.raises(InputError, match=r"census.csv: it is not what its manifest sealed; .*make repair"):
        made(request_)


def test_a_table_without_a_seal_is_refused(request_: Request) -> None:
    (request_.results / "tables" / "census.manifest.json").unlink()
    with pytest.raises(InputError, match=r"census.(md|csv|parquet): no manifest seals it"):
        made(request_)


def test_a_table_made_from_another_score_than_is_there_now_is_refused(request_: Request) -> None:
    from routeblock.evidence.manifest import seal

    score = request_.results / "score.json"
    score.write_text(score.read_text() + " ")
    seal(
        request_.results / "score.manifest.json",
        rule="score",
        outputs=[score],
        inputs=[],
        parameters={},
        modules=["routeblock.errors"],
    )
    with pytest.raises(InputError, match=r"made from another version of results/score.json than is there now"):
        made(request_)


def test_verify_covers_the_report_and_names_it_when_it_is_edited(request_: Request) -> None:
    root = request_.results.parent
    report = made(request_)
    roots, sources = (request_.results, root / "reports"), [request_.config, request_.captions]
    assert verify(*roots, sources=sources) == []
    text = report.read_text(encoding="utf-8")
    report.write_text(text.replace("6 to 17", "6 to 18"), encoding="utf-8")
    assert [(f.kind, f.path) for f in verify(*roots, sources=sources)] == [(Kind.EDITED, report)]


def test_two_reports_of_one_study_are_equal_in_every_byte(request_: Request, tmp_path: Path) -> None:
    first = made(request_).read_bytes()
    again = write_study(tmp_path / "elsewhere", study_rows())
    assert made(request_).read_bytes() == first == made(again).read_bytes()
    assert str(tmp_path).encode() not in first


def test_identities_and_environments_are_those_of_the_documents(request_: Request) -> None:
    text = made(request_).read_text(encoding="utf-8")
    for digit in "12345":  # prediction and plan, weights, routing, source, binary
        assert f">{digit * 64}</a>" in text
    assert "w13 (64, 128) on 246" in text and "across 51 and 86, within 22 and 28; by construction" in text
    assert ">NVIDIA H200</a>" in text and ">&lt;b&gt;</a>" in text
    assert "numpy 2.4.6" in text and "not installed" in text


def test_a_document_that_is_not_the_sealed_one_is_refused(request_: Request) -> None:
    fixture = request_.results / "fixture" / "fixture.json"
    fixture.write_text(fixture.read_text().replace("synthetic", "real"))
    with pytest.raises(InputError, match=r"fixture.json: not readable: it is not the document that was sealed"):
        made(request_)


def test_a_page_beyond_the_limit_is_refused(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LIMIT_BYTES", 1000)
    with pytest.raises(InputError, match=r"the report would have \d+ bytes; 1000 bytes"):
        made(request_)


def test_a_long_table_says_how_many_rows_it_shows_and_holds_them_all(request_: Request) -> None:
    rows = [{"family": f"row-{i}", "schedule": "band4", "scope": "inclusive"} for i in range(300)]
    write_table(request_.results, "discovery", rows)
    tables, figures = present(request_.results)
    assert "discovery" in tables and figures == ["partition"]
    text = made(
        Request(request_.results, request_.captions, request_.config, tuple(tables), ("partition",))
    ).read_text()
    assert "Here: 12 of 300 rows, the first in the table." in text and "The other 288 rows" in text
    assert all(f"row-{i}<" in text for i in range(300))
    # Told once, not in a column: the same in every row, empty in every row.
    assert "<b>schedule</b> <span>band4</span>" in text and "Empty in every row: lane, device" in text


def test_the_share_of_a_long_table_is_the_one_that_is_named(request_: Request) -> None:
    rows = [
        {"family": f"row-{s}-{i}", "schedule": s, "scope": "inclusive", "change_percent": -1.234}
        for s in ("band4", "band32")
        for i in range(30)
    ]
    write_table(request_.results, "discovery", rows)
    text = made(Request(request_.results, request_.captions, request_.config, ("discovery",), ())).read_text()
    assert "Here: 30 of 60 rows, all with schedule band32, scope inclusive." in text
    assert text.index("row-band32-0<") < text.index("<details>") < text.index("row-band4-0<")


def test_a_digest_is_cut_for_the_eye_and_whole_at_hand(request_: Request) -> None:
    digest = "0123456789abcdef" * 4
    write_table(request_.results, "anything", [{"x": digest}, {"x": "short"}], [Column("x")])
    text = made(Request(request_.results, request_.captions, request_.config, ("anything",), ())).read_text()
    assert f'title="{digest}">0123456789ab…</td>' in text
    assert "Further tables and figures" in text


def test_a_table_without_rows_says_so(request_: Request) -> None:
    write_table(request_.results, "rejections", [], columns_of("rejections"))
    text = made(Request(request_.results, request_.captions, request_.config, ("rejections",), ())).read_text()
    assert "This table has no rows." in text


def test_the_command_line_reports_in_one_line_what_is_missing(
    request_: Request, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from routeblock.cli import main

    monkeypatch.chdir(request_.results.parent)
    assert main(["report", "--captions", "captions"]) == 0
    assert capsys.readouterr().out == "reports/routeblock.html\n"
    first = (request_.results.parent / "reports" / page.HTML).read_bytes()
    options = [option for name in reversed(request_.tables) for option in ("--table", name)]
    assert main(["report", "--captions", "captions", *options]) == 0
    assert capsys.readouterr().err == ""
    assert (request_.results.parent / "reports" / page.HTML).read_bytes() == first
    (request_.captions / "figure_partition.rst").unlink()
    assert main(["report", "--captions", "captions"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "figure_partition.rst: no readable caption" in told
