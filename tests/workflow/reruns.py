# SPDX-License-Identifier: Apache-2.0
"""The table of what makes the workflow run again: each knob of config.yaml, each kind of edit, and the jobs.

`python tests/workflow/reruns.py` writes it anew, with docs/reruns.md; look at the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, Checkout
from done import mark_done, set_knobs
from pydantic import BaseModel

from routeblock.config import Config
from routeblock.cuda import telemetry
from routeblock.errors import InputError

GOLDEN = Path(__file__).with_name("golden") / "reruns.json"
PAGE = ROOT / "docs" / "reruns.md"
PACKAGE = "workflow/routeblock"
NOTHING = "nothing"


@dataclass(frozen=True)
class Case:
    """A change in a finished study: knobs and their new values, or an edit of files (a glob)."""

    title: str
    knobs: dict[str, Any] = field(default_factory=dict)
    edit: str = ""
    """Gets a statement, or a line, more."""
    comment: str = ""
    """Gets a comment and a text that stands alone."""


@dataclass(frozen=True)
class Study:
    """A finished study to change: its knobs beside config.yaml's, what is asked for, and the changes."""

    title: str
    knobs: dict[str, Any]
    targets: tuple[str, ...]
    cases: tuple[Case, ...]


CAPTURED = "captures/hidden.safetensors"
STUDIES = {
    "cpu": Study(
        "the default study without the recorded lane, one replicate",
        {"lanes": ["twin-ampere", "twin-hopper"], "replicates": 1},
        ("all", "table_prediction", "bundle"),
        (
            Case("another fixture", {"fixture.name": "checkpoint"}),
            Case("another seed", {"fixture.seed": 7}),
            Case(
                "anything of a checkpoint, with another fixture",
                {
                    "checkpoint.path": "elsewhere",
                    "checkpoint.revision": None,
                    "checkpoint.layer": 1,
                    "checkpoint.captured": None,
                    "checkpoint.prompt": None,
                    "checkpoint.token_ids": [1, 2],
                    "checkpoint.all_experts": True,
                    "checkpoint.confirm": False,
                },
            ),
            Case("one lane less", {"lanes": ["twin-ampere"]}),
            Case("the recorded lane more", {"lanes": ["twin-ampere", "twin-hopper", "recorded-h200"]}),
            Case("one point more", {"points": ["published", "auto"]}),
            Case("one replicate more", {"replicates": 2}),
            Case(
                "anything of the lane cuda, without that lane",
                {
                    "cuda.gpus": 2,
                    "cuda.python": "python3.12",
                    "cuda.wait_s": 1,
                    "cuda.census.calls": 1,
                    "cuda.census.processes": 1,
                },
            ),
            Case(
                "a guarded window, without the lane cuda",
                {
                    "window.before": ["true"],
                    "window.check": ["true"],
                    "window.after": ["true"],
                    "window.resident": ["vllm"],
                },
            ),
            Case(
                "anything of the predictions and the survey, of which the survey is a target of its own",
                {
                    "survey.layer.hidden": 4096,
                    "survey.layer.intermediate": 1536,
                    "survey.layer.experts": 64,
                    "survey.layer.top_k": 6,
                    "survey.layer.dtype": "bfloat16",
                    "survey.layer.group_size": 64,
                    "survey.layer.zero_points": False,
                    "survey.gpus": ["H200"],
                    "survey.vllm": "0.33.0",
                    "survey.populations": ["uniform"],
                    "survey.routing": "routing.npy",
                    "survey.tokens": [1],
                    "survey.routings": 10,
                    "survey.sample": 1,
                    "survey.macs": 1.0e8,
                    "survey.seed": 2,
                },
            ),
            Case("one lane of study B less", {"grouped_schedule.lanes": ["recorded-h200"]}),
            Case("another minimum effect", {"grouped_schedule.minimum_effect": 0.02}),
            Case("other threads", {"grouped_schedule.cpu_threads": 1}),
            Case("comments in every module", comment="workflow/**/*.py"),
            Case("comments in every rule file", comment="workflow/rules/*.smk"),
            Case("the kernels' order of additions", edit=f"{PACKAGE}/twin/layer.py"),
            Case("the scorer", edit=f"{PACKAGE}/route_block/scorer/score.py"),
            Case("the writer of tables", edit=f"{PACKAGE}/tables.py"),
            Case("the statistics' arithmetic", edit=f"{PACKAGE}/timing/estimate.py"),
            Case("canonical JSON", edit=f"{PACKAGE}/evidence/digest.py"),
            Case("the grid probe in C", edit=f"{PACKAGE}/cuda/grid_probe.c"),
            Case("what verifies and repairs", edit=f"{PACKAGE}/evidence/chain.py"),
            Case("the command line", edit=f"{PACKAGE}/cli/results.py"),
            Case("a generated schema", edit="workflow/schemas/config.schema.json"),
            Case("declared mutations", edit="fixtures/mutations.json"),
            Case("pins", edit="envs/base.txt"),
        ),
    ),
    "cuda": Study(
        "a study on a GPU, stored and captured plans, two replicates",
        {
            "lanes": ["cuda"],
            "plan_source": ["stored", "captured"],
            "replicates": 2,
            "cuda.census.processes": 1,
            "grouped_schedule.lanes": ["cuda"],
        },
        ("all", "gpu_evidence", "bundle", "results/build/sm_90/q6k_schedules.cubin"),
        (
            Case("another fixture seed", {"fixture.seed": 7}),
            Case("stored plans alone", {"plan_source": ["stored"]}),
            Case("one replicate more", {"replicates": 3}),
            Case("two GPUs", {"cuda.gpus": 2}),
            Case("another interpreter", {"cuda.python": "python3.12"}),
            Case("a longer wait", {"cuda.wait_s": 900}),
            Case("more calls in a census", {"cuda.census.calls": 300}),
            Case("more processes in a census", {"cuda.census.processes": 2}),
            Case("other threads", {"grouped_schedule.cpu_threads": 1}),
            Case("how a GPU is launched on", edit=f"{PACKAGE}/cuda/operators.py"),
            Case("the grid probe in C", edit=f"{PACKAGE}/cuda/grid_probe.c"),
            Case("study B's kernels", edit=f"{PACKAGE}/cuda/q6k_dot.cuh"),
        ),
    ),
    "checkpoint": Study(
        "a study on a checkpoint with captured inputs, one lane, one replicate",
        {
            "fixture.name": "checkpoint",
            "checkpoint.captured": CAPTURED,
            "checkpoint.prompt": None,
            "lanes": ["twin-ampere"],
            "replicates": 1,
            "grouped_schedule.lanes": ["cpu"],
        },
        ("all",),
        (
            Case("another fixture", {"fixture.name": "published_geometry"}),
            Case("another seed", {"fixture.seed": 7}),
            Case("another folder", {"checkpoint.path": "elsewhere"}),
            Case("another revision", {"checkpoint.revision": None}),
            Case("another layer", {"checkpoint.layer": 1}),
            Case("other captured inputs", {"checkpoint.captured": "captures/others.safetensors"}),
            Case("a prompt", {"checkpoint.captured": None, "checkpoint.prompt": "Sort."}),
            Case("token ids", {"checkpoint.captured": None, "checkpoint.token_ids": [1, 2]}),
            Case("all experts", {"checkpoint.all_experts": True}),
            Case("no confirmation by the twin", {"checkpoint.confirm": False}),
            Case("one lane more", {"lanes": ["twin-ampere", "twin-hopper"]}),
            Case("one lane of study B more", {"grouped_schedule.lanes": ["cpu", "recorded-h200"]}),
        ),
    ),
}


def leaves(model: type[BaseModel] = Config, above: str = "") -> Iterator[str]:
    """The dotted path of every knob."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def jobs_of(study: Study, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What runs again after each change of a study, which is made below `root`: rule and wildcards of each job."""

    def no_driver() -> tuple[str, ...]:
        raise InputError("no driver", where="test", limit="the same on every machine", way_out="none")

    monkeypatch.setattr(telemetry, "architectures", no_driver)
    finished = mark_done(root / "finished", monkeypatch, study.knobs, *study.targets)
    again = finished.would_run(monkeypatch, *study.targets)
    assert again == [], f"not finished: {again[:3]}"
    return {case.title: _after(case, study, finished, monkeypatch) for case in study.cases}


# What an edit adds; the text of a comment changes nothing in Python alone.
ADDED = {".py": "EDITED = True\n", ".json": "\n", ".txt": "# Edited.\n"}
KERNEL_LINE = "// Edited.\n"
COMMENT = '# A comment.\n"""A text."""\n'


def _after(case: Case, study: Study, finished: Checkout, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    files = sorted(finished.root.glob(case.edit or case.comment or "config.yaml"))
    assert files, case
    before = [(file, file.read_bytes(), file.stat()) for file in files]
    if case.knobs:
        set_knobs(finished, case.knobs)
    else:
        for file, data, _ in before:
            added = COMMENT if case.comment else ADDED.get(file.suffix, KERNEL_LINE)
            file.write_bytes(data + added.encode())
    try:
        found = finished.would_run(monkeypatch, *study.targets)
    finally:
        for file, data, status in before:
            file.write_bytes(data)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return [f"{rule} {' '.join(wildcards.values())}".rstrip() for rule, wildcards in found if rule not in TARGETS]


# Names for what others make.
TARGETS = {"all", "gpu_evidence"}


HEAD = """\
# What runs again

What `make study` makes again after a change in a finished study, and no more. The lists come from dry runs of the
real rules; `tests/workflow/golden/reruns.json` names every single job, a test compares, and `.venv/bin/python
tests/workflow/reruns.py` writes both anew.

Comments and docstrings of the package do not count, nor does code that a rule does not import. Of `.cu`, `.cuh` and
`.c` files every byte counts. `workflow/schemas` is generated from the models, whose code counts.

## After a crash

`make study`, again. After a power cut or `kill -9` it waits for the jobs that were left behind (`routeblock recover`:
only those of this machine; end those of a cluster with its own command), unlocks the folder, clears half-written
files, and makes what is missing. The result has the bits of an undisturbed study (`make test-recovery`). While
another workflow is at work in the folder it is refused.

A disk that is full or cannot be written ends a command with one line and exit code 2. Each file and each run's folder
appears whole or not at all: free the space and call `make study` again.

## After an edit of results

Snakemake does not notice an edited result. `make verify` does, on bytes, and names it; `make repair` takes away what
does not fit with what was made from it, and has it made again. What no manifest lists (notes, a folder where a file
belongs) is moved to `results.set-aside`; links are removed, and what they point to stays. An edited file of
`fixtures`, `envs` or `config.yaml` is told and left: it is not the workflow's.

"""


def page(golden: dict[str, dict[str, list[str]]]) -> str:
    """docs/reruns.md."""
    lines = HEAD.splitlines()
    for name, study in STUDIES.items():
        knobs = " ".join(study.targets)
        lines += [
            f"## In {study.title}",
            "",
            f"Asked for: `{knobs}`.",
            "",
            "| change | knobs | runs again |",
            "|---|---|---|",
        ]
        for case in study.cases:
            counts = Counter(job.split()[0] for job in golden[name][case.title])
            runs = ", ".join(f"{rule}" + (f" x {n}" if n > 1 else "") for rule, n in _short(counts).items()) or NOTHING
            given = ", ".join(f"`{knob}`" for knob in case.knobs) or f"`{case.edit or case.comment}`"
            lines.append(f"| {case.title} | {given} | {runs} |")
        lines.append("")
    return "\n".join(lines)


def _short(counts: Counter[str]) -> dict[str, int]:
    """Tables as one entry where there are many."""
    tables = [rule for rule in counts if rule.startswith("table_")]
    shown = {rule: n for rule, n in counts.items() if len(tables) < 8 or rule not in tables}
    return shown | ({"tables": len(tables)} if len(tables) >= 8 else {})


def main() -> None:
    golden = {}
    for name, study in STUDIES.items():
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            golden[name] = jobs_of(study, Path(folder), monkeypatch)
            print(name, file=sys.stderr)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    PAGE.write_text(page(golden))


if __name__ == "__main__":
    main()
