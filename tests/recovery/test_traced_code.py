# SPDX-License-Identifier: Apache-2.0
"""What each command really imported and read, against what its rule's code digest and inputs name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from study import EVIDENCE, MORE, Finished

from routeblock import rule_code as workflow
from routeblock.evidence.digest import import_closure
from routeblock.evidence.manifest import SUFFIX, Manifest, absolute
from routeblock.rule_code import RESTORED

# The command line: it hands values on, and a rule's shell text is tracked by itself.
_PARTS = ("shared", "alignment", "dispatch", "figures", "grouped")
DISPATCH = ("routeblock.__main__", "routeblock.cli", *(f"routeblock.cli_{part}" for part in _PARTS))
# What only tells the digest, names figures, shows progress, opens a lane by name or takes a turn on a GPU.
APART = {"routeblock.rule_code", "routeblock.progress", "routeblock.route_block.runs.lanes", "routeblock.cuda.gpu_lock"}
for study in ("alignment_cost", "grouped_schedule"):
    APART |= {f"routeblock.{study}", f"routeblock.{study}.targets"}

# Rules whose commands do not run here, and why. What the command line imports for them is looked at in the source.
UNTRACED = {
    "agreement": "minutes",
    "pack_evidence": "minutes",
    "table_agreement": "an agreement",
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
}


# The page links what a table rests on, back to the sources, and its seal names that: what its inputs were made from.
WHOLE_CHAIN = "report"
STANDS_FOR = ("restored.json", "record.json")
Trace = dict[str, list[Any]]
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
        found[trace["rules"][0]].append(trace)
    return found


def imported(trace: Trace) -> set[str]:
    """The package's modules that the rule's own code brought in, directly or not."""
    onward = defaultdict(set)
    todo = set()
    for importer, module, top in trace["edges"]:
        if importer not in DISPATCH:
            onward[importer].add(module)
        elif not top:
            todo.add(module)
    seen = set()
    while todo := todo - seen - APART:
        seen |= todo
        todo = {module for importer in todo for module in onward[importer]}
    return seen


def test_every_rule_that_can_run_here_was_traced(traces: Mapping[str, list[Trace]]) -> None:
    assert workflow.RULES.keys() - traces.keys() == UNTRACED.keys()


def test_what_a_command_imported_lies_in_the_digest_of_its_rule(
    traces: Mapping[str, list[Trace]],
) -> None:
    outside = {}
    for rule, of_rule in traces.items():
        found = set().union(*map(imported, of_rule))
        assert found, rule
        outside[rule] = found - set(import_closure(workflow.RULES[rule].modules))
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
        outside[rule] = found - set(workflow.RULES[rule].files)
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
