# SPDX-License-Identifier: Apache-2.0
"""What each command really imported and read, against what its rule's code digest and inputs name."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from study import EVIDENCE, MORE, Finished

from routeblock.evidence.digest import PACKAGE_ROOT, import_closure, other_sources
from routeblock.evidence.manifest import SUFFIX, Manifest, absolute
from routeblock.report.catalogue import FIGURES, TABLES
from routeblock.rule_code import RESTORED

# The command line: it hands values on, and a rule's shell text is tracked by itself.
DISPATCH = re.compile(r"routeblock\.(__main__|cli\b.*|cli_\w+)")
# What only finds a declaration, shows progress, opens a lane by name or takes a turn on a GPU.
APART = {"routeblock.declared", "routeblock.progress", "routeblock.route_block.runs.lanes", "routeblock.cuda.gpu_lock"}
# A table or figure is found among all by its name: the others are imported, and not used.
FOUND_AMONG = {"routeblock.report.catalogue", *(t.module for t in TABLES.values())}

# Rules whose commands do not run here, and why. What the command line imports for them is looked at in the source.
UNTRACED = {
    "agreement": "minutes",
    "pack_evidence": "minutes",
    "recorded_native": "minutes",
    "recorded_operator": "minutes",
    "survey_point": "minutes",
    "table_agreement": "an agreement",
    "table_history": "the native record, recomputed",
    "table_repetition": "the native record, recomputed",
    "table_operator": "the operator's record, recomputed",
    "figure_explain": "an explanation, which no study asks for",
    "sweep": "minutes",
    "confirmation": "minutes",
    "run_cuda": "a GPU",
    "capture": "a GPU",
    "captured_plans": "captures",
    "census": "a GPU",
    "unassisted": "a GPU",
    "beyond": "a GPU",
    "sanitizer": "a GPU",
    "record_alignment": "a GPU",
    "record_dispatch": "a GPU",
    "record_serving": "a GPU",
    "window": "a GPU",
}


# The page links what a table rests on, back to the sources, and its seal names that: what its inputs were made from.
WHOLE_CHAIN = "report"
STANDS_FOR = ("restored.json", "record.json")
Trace = dict[str, Any]
# Code, the checkpoint (its files lie outside the results: the manifest says what they were), and Snakemake's own.
NO_INPUT = ("workflow", "checkpoints", ".snakemake", "results/logs")


@pytest.fixture(scope="module")
def traces(finished: Finished) -> Mapping[str, list[Trace]]:
    """The traces of each rule's processes, those by hand among them."""
    return read_traces(finished.traces.rglob("*.json"))


def read_traces(paths: Iterable[Path]) -> dict[str, list[Trace]]:
    found = defaultdict(list)
    for path in paths:
        trace = json.loads(path.read_bytes())
        found[trace["rule"]].append(trace)
    return found


def imported(trace: Trace) -> set[str]:
    """The package's modules that the rule's own code brought in, directly or not."""
    apart = (APART | FOUND_AMONG) - set(trace["modules"])
    onward = defaultdict(set)
    todo = set()
    for importer, module, top in trace["edges"]:
        if not DISPATCH.fullmatch(importer):
            onward[importer].add(module)
        elif not top:
            todo.add(module)
    seen = set()
    while todo := todo - seen - apart:
        seen |= todo
        todo = {module for importer in todo for module in onward[importer]}
    return seen


def test_every_rule_that_can_run_here_was_traced(traces: Mapping[str, list[Trace]]) -> None:
    sealed = set(re.findall(r'\brule="(\w+)"', "".join(path.read_text() for path in PACKAGE_ROOT.rglob("*.py"))))
    sealed |= {f"table_{name}" for name in TABLES} | {f"figure_{name}" for name in FIGURES}
    assert sealed - traces.keys() <= UNTRACED.keys()
    assert not UNTRACED.keys() & traces.keys()


def test_what_a_command_imported_lies_in_the_digest_of_its_rule(
    traces: Mapping[str, list[Trace]],
) -> None:
    outside = {}
    for rule, of_rule in traces.items():
        found = set().union(*map(imported, of_rule))
        assert found, rule
        outside[rule] = found - set(import_closure(of_rule[0]["modules"]))
    assert {rule: modules for rule, modules in outside.items() if modules} == {}


def test_package_files_that_a_command_read_are_in_the_digest_of_its_rule(
    finished: Finished, traces: Mapping[str, list[Trace]]
) -> None:
    package = finished.checkout.root / "workflow" / "routeblock"
    outside = {}
    for rule, of_rule in traces.items():
        read = {Path(path) for trace in of_rule for path in trace["read"]}
        sources = {p.relative_to(package).as_posix() for p in read if p.is_relative_to(package)}
        # Compiled code is kept for the file that it came from alone.
        found = {source for source in sources if Path(source).suffix not in {".py", ".pyc", ".nbi", ".nbc"}}
        listed = (path for module in of_rule[0]["modules"] for path in other_sources(module))
        outside[rule] = found - {path.relative_to(PACKAGE_ROOT).as_posix() for path in listed}
    assert {rule: files for rule, files in outside.items() if files} == {}


def test_every_file_that_a_command_read_or_sealed_is_an_input_of_its_job(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = finished.checkout.root
    declared: dict[str, set[Path]] = defaultdict(set)
    wrong = {}
    jobs = list(finished.checkout.execute(monkeypatch, "dryrun", *MORE).jobs)
    made = {root / file for job in jobs for file in job.output}
    for job in jobs:
        known = {root / file for file in [*job.input, *job.output]}
        known |= made if job.rule.name == WHOLE_CHAIN else set()
        # The list of restored files stands for them, and so does a restored run's record: it has their digests.
        known |= {path.parent for path in known if path.name in STANDS_FOR and EVIDENCE in path.as_posix()}
        for file in job.output:
            path = root / file
            if not file.endswith(SUFFIX) or any(path.match(pattern) for pattern in RESTORED):
                continue
            manifest = Manifest.model_validate_json(path.read_bytes())
            declared[manifest.rule] |= known
            sealed = {absolute(path.parent / entry.path) for entry in manifest.inputs}
            if undeclared := {p for p in sealed if not below(p, known)}:
                wrong[f"sealed by {file}"] = undeclared
    assert declared.keys() >= {"run", "score", "table_relations"}
    for rule, of_rule in read_traces(finished.traces.glob("*.json")).items():
        if rule == WHOLE_CHAIN:  # it looks through every manifest for those that it names
            continue
        read = {absolute(Path(path)) for trace in of_rule for path in trace["read"]}
        given = {p for p in read if p.is_relative_to(root) and not any(p.is_relative_to(root / f) for f in NO_INPUT)}
        if undeclared := {p for p in given if p.is_file() and not below(p, declared[rule])}:
            wrong[f"read for {rule}"] = undeclared
    assert wrong == {}


def below(path: Path, known: set[Path]) -> bool:
    """Whether a file is one of these, or lies in a folder that is."""
    return path in known or not known.isdisjoint(path.parents)
