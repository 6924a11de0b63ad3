# SPDX-License-Identifier: Apache-2.0
"""The finished report in a real browser, from disk: `make test-report`, after `make report`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.report.catalogue import FIGURES
from routeblock.report.page import HTML, LIMIT_BYTES, MANIFEST

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "reports" / HTML
CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8").strip()
SCHEMES, WIDTHS = ("light", "dark"), (380, 1280)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert path, "no chromium on PATH: apt-get install chromium, or name one by CHROMIUM=FILE"
    assert REPORT.is_file(), f"{REPORT} is not there: make report"
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start for root, and needs user namespaces that containers often lack.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page and what it said and asked for while it was opened."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def check(self, name: str) -> Any:
        return self.page.evaluate(f"() => {CHECKS}.{name}()")


def opened(browser: Browser, file: Path, width: int = 1280, scheme: str = "light") -> Opened:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    found = Opened(page)
    page.on("request", lambda r: found.requests.append(r.url))
    page.on("console", lambda m: found.complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: found.complaints.append(str(e)))
    page.goto(file.as_uri())  # until the load event: everything that the page asks for has come or failed
    return found


@pytest.fixture(scope="module", params=[(w, s) for w in WIDTHS for s in SCHEMES], ids=lambda p: f"{p[0]}-{p[1]}")
def report(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[Opened]:
    found = opened(chromium, REPORT, *request.param)
    yield found
    found.page.close()


def test_it_opens_from_disk_without_a_complaint_and_asks_for_nothing_else(report: Opened) -> None:
    assert report.complaints == []
    assert [url for url in report.requests if not url.startswith("data:")] == [REPORT.as_uri()]


def test_every_figure_and_table_is_to_be_seen(report: Opened) -> None:
    assert report.check("invisible") == []
    sealed = json.loads((REPORT.parent / MANIFEST).read_bytes())["parameters"]
    for kind in ("table", "figure"):
        assert sealed[f"{kind}s"]
        for name in sealed[f"{kind}s"]:
            box = report.page.locator(f"#{kind}-{name}").bounding_box()
            assert box and box["width"] > 200 and box["height"] > 50, name
    assert set(sealed["figures"]) == set(FIGURES)
    assert report.page.locator("figure img").count() == len(sealed["figures"])


def test_every_link_leads_to_a_place_in_the_page(report: Opened) -> None:
    assert report.page.locator("a").count() > 100
    assert report.check("links") == []


def test_a_number_of_the_answer_leads_to_the_digest_of_its_table(report: Opened) -> None:
    report.page.locator(".sentence a.cite").first.click()
    anchor = report.page.evaluate("() => location.hash")
    target = report.page.locator(anchor)
    top = target.bounding_box()
    assert top and 0 <= top["y"] < 900  # scrolled into view
    name = anchor.removeprefix("#artifact-table-")
    assert f"results/tables/{name}.csv" in target.inner_text()
    assert sha256_file(ROOT / f"results/tables/{name}.csv") in target.inner_text()


def test_the_page_does_not_scroll_sideways(report: Opened) -> None:
    assert report.check("overflow") == []


def test_all_text_is_readable(report: Opened) -> None:
    found = report.check("contrast")
    assert found["faults"] == [] and found["kinds"] > 20 and found["least"] >= 4.5


def test_figures_stand_on_a_light_plate_in_both_schemes(report: Opened) -> None:
    colours = report.page.eval_on_selector_all(".plate", "es => es.map(e => getComputedStyle(e).backgroundColor)")
    assert set(colours) == {"rgb(255, 255, 255)"}


def test_headings_tables_images_and_landmarks_are_named(report: Opened) -> None:
    assert report.check("structure") == []


def test_every_digest_in_the_page_is_that_of_the_file_on_disk(report: Opened) -> None:
    told = report.page.eval_on_selector_all("[data-path]", "es => es.map(e => [e.dataset.path, e.textContent])")
    assert len(told) > 100
    wrong = [path for path, digest in told if sha256_file(ROOT / path) != digest]
    assert wrong == []


def test_the_printed_page_clips_no_table(chromium: Browser) -> None:
    found = opened(chromium, REPORT, 1000)
    found.page.emulate_media(media="print")
    clipped = "es => es.filter(e => getComputedStyle(e).overflowX !== 'visible').length"
    assert found.page.eval_on_selector_all(".scroll", clipped) == 0
    assert not found.page.locator("nav").is_visible()
    assert found.page.pdf()[:5] == b"%PDF-"
    found.page.close()


def test_it_is_one_file_of_the_promised_size() -> None:
    data = REPORT.read_bytes()
    assert len(data) < LIMIT_BYTES
    assert not re.search(rb"<script|@import|url\((?!data:)", data)


def test_a_second_report_has_the_same_bytes(tmp_path: Path) -> None:
    sealed = json.loads((REPORT.parent / MANIFEST).read_bytes())["parameters"]
    names = [option for kind in ("table", "figure") for n in sealed[f"{kind}s"] for option in (f"--{kind}", n)]
    command = [sys.executable, "-m", "routeblock", "report", "--out", str(tmp_path), *names]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert sha256_file(tmp_path / HTML) == sha256_file(REPORT)


def test_the_printed_commands_name_targets_and_one_run_gives_the_printed_digest(chromium: Browser) -> None:
    found = opened(chromium, REPORT)
    commands = found.page.eval_on_selector_all("#artifacts .command", "es => es.map(e => e.textContent)")
    tables = [c for c in commands if c.rsplit(" ", 1)[1].startswith("table_")]
    assert len(tables) >= 20
    prefix = tables[0].rsplit(" ", 1)[0]
    assert all(c.rsplit(" ", 1)[0] == prefix for c in [*tables, *(c for c in commands if "--force" in c)])
    targets = sorted({c.rsplit(" ", 1)[1] for c in commands if "--force" in c})
    asked = subprocess.run(
        [*prefix.replace(" --force", " --dry-run --quiet all").split(), *targets],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 0, asked.stderr
    before = found.page.locator("#artifact-table-relations [data-path$='.csv']").inner_text()
    subprocess.run([*prefix.split(), "table_relations"], cwd=ROOT, check=True, capture_output=True)
    assert sha256_file(ROOT / "results/tables/relations.csv") == before
    found.page.close()


DEFECTS = {
    "invisible": ("</main>", '<img src="data:,x" alt="nothing that could be shown"></main>'),
    "links": ('href="#answer"', 'href="#nowhere"'),
    "overflow": ("</main>", '<div style="width: 99rem">x</div></main>'),
    "contrast": ("--soft:", "--soft: #99a;--x:"),
    "structure": ('scope="col"', 'data-x="col"'),
}


@pytest.mark.parametrize("check", DEFECTS)
def test_the_checks_find_a_defect(chromium: Browser, tmp_path: Path, check: str) -> None:
    text = REPORT.read_text(encoding="utf-8")
    old, new = DEFECTS[check]
    assert old in text
    (tmp_path / "page.html").write_text(text.replace(old, new), encoding="utf-8")
    found = opened(chromium, tmp_path / "page.html")
    faults = found.check(check)
    assert faults["faults"] if check == "contrast" else faults
    found.page.close()


def test_a_request_and_a_complaint_are_noticed(chromium: Browser, tmp_path: Path) -> None:
    text = REPORT.read_text(encoding="utf-8")
    outside = '<img src="http://127.0.0.1:9/x.png" alt=""></main>'
    page = tmp_path / "page.html"
    page.write_text(text.replace("</main>", outside), encoding="utf-8")
    blocked = opened(chromium, page)
    assert blocked.complaints and sha256_bytes(page.read_bytes()) != sha256_file(REPORT)  # the policy refuses it
    page.write_text(re.sub("<meta http-equiv.*?>", "", text.replace("</main>", outside)), encoding="utf-8")
    asking = opened(chromium, page)
    assert any("127.0.0.1:9" in url for url in asking.requests)
    for found in (blocked, asking):
        found.page.close()
