# SPDX-License-Identifier: Apache-2.0
"""What the Snakemake rules need from the package: which code each rule uses, and where given inputs lie.

The command line hands a rule's code digest to the function that seals. No study imports this module: a new entry in
`RULES` would then remake everything.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.alignment_cost.targets import FIGURES as ALIGNMENT_FIGURES
from routeblock.alignment_cost.targets import TABLES as ALIGNMENT_TABLES
from routeblock.config import Config, check, load
from routeblock.errors import InputError
from routeblock.evidence.digest import PACKAGE_ROOT, code_digest
from routeblock.evidence.files import writable_folder
from routeblock.grouped_schedule.targets import FIGURES as GROUPED_FIGURES
from routeblock.grouped_schedule.targets import TABLES as GROUPED_TABLES
from routeblock.q6k_dispatch.targets import TABLES as DISPATCH_TABLES
from routeblock.recovery import mark
from routeblock.route_block.facts import CELLS, HISTORIES
from routeblock.route_block.operating_point import LANES


@dataclass(frozen=True)
class Code:
    """The modules and further sources (paths inside the package) that a rule runs."""

    modules: tuple[str, ...]
    files: tuple[str, ...] = ()


TABLES = ("geometry", "studies", "trajectories", "relations", "differences", "mutations", "prediction")
GPU_TABLES = ("agreement", "census", "history", "repetition", "operator", "probe_control", "versions")
_PROBE = ("cuda/grid_probe.c",)
FIGURES = ("partition", "differences", "trajectories")
_ALIGNMENT_FILES = ("cuda/align.cu", "cuda/align_variants.cuh")
_DISPATCH_FILES = ("cuda/q6k_dispatch.cu", "cuda/q6k_machine.cuh")
_KERNEL_FILES = ("cuda/q6k_schedules.cu", "cuda/q6k_dot.cuh")

# Each rule's own code, without the command line: a rule is made again when something here changes.
RULES: dict[str, Code] = {
    "environment": Code(("routeblock.environment",)),
    "probe": Code(("routeblock.cuda.grid_probe",), _PROBE),
    "golden": Code(("routeblock.twin.self_test",)),
    "fixture": Code(("routeblock.route_block.fixtures.make",)),
    "manifest": Code(("routeblock.checkpoint.manifest",)),
    "checkpoint_fixture": Code(("routeblock.route_block.fixtures.from_checkpoint",)),
    "prediction": Code(("routeblock.route_block.prediction.freeze",)),
    "control": Code(("routeblock.route_block.runs.negative_control",)),
    "run": Code(("routeblock.route_block.runs.run", "routeblock.route_block.runs.twin")),
    "run_cuda": Code(
        ("routeblock.route_block.runs.run", "routeblock.route_block.runs.cuda", "routeblock.cuda.gpu_lock"), _PROBE
    ),
    # With the code of the runs, whose digest they write down.
    "identity": Code(
        ("routeblock.route_block.runs.identity", "routeblock.route_block.runs.run", "routeblock.route_block.runs.twin")
    ),
    "identity_cuda": Code(
        (
            "routeblock.route_block.runs.identity",
            "routeblock.route_block.runs.run",
            "routeblock.route_block.runs.cuda",
            "routeblock.cuda.gpu_lock",
        ),
        _PROBE,
    ),
    "capture": Code(("routeblock.route_block.gpu.captures", "routeblock.cuda.gpu_lock"), _PROBE),
    "captured_plans": Code(("routeblock.route_block.gpu.captures",)),
    "record_native": Code(("routeblock.route_block.native.record", "routeblock.route_block.native.process")),
    "recorded_native": Code(("routeblock.route_block.native.evidence",)),
    "recorded_operator": Code(("routeblock.route_block.gpu.operator_check",)),
    "record_operator": Code(("routeblock.route_block.gpu.operator_record",)),
    "census": Code(("routeblock.route_block.gpu.census", "routeblock.cuda.gpu_lock"), _PROBE),
    "pack_evidence": Code(("routeblock.route_block.runs.recorded",)),
    "restore_evidence": Code(("routeblock.route_block.runs.recorded",)),
    "agreement": Code(("routeblock.route_block.gpu.agreement",)),
    "census_summary": Code(("routeblock.route_block.gpu.census_summary",)),
    "probe_comparison": Code(("routeblock.route_block.gpu.probe_comparison",)),
    "versions": Code(("routeblock.route_block.gpu.versions",)),
    "unassisted": Code(("routeblock.route_block.gpu.unassisted", "routeblock.cuda.gpu_lock"), _PROBE),
    "random_plans": Code(("routeblock.route_block.prediction.random_plans",)),
    "mutations": Code(("routeblock.route_block.scorer.mutations",)),
    "score": Code(("routeblock.route_block.scorer.score",)),
    **{f"table_{name}": Code(("routeblock.route_block.tables",)) for name in (*TABLES, *GPU_TABLES)},
    "build_kernels": Code(("routeblock.cuda.build",), _KERNEL_FILES),
    "sweep": Code(("routeblock.grouped_schedule.lanes",)),
    "confirmation": Code(("routeblock.grouped_schedule.lanes",)),
    "beyond": Code(("routeblock.grouped_schedule.lanes",)),
    "recorded": Code(("routeblock.grouped_schedule.verification",)),
    "recorded_documents": Code(("routeblock.grouped_schedule.documents",)),
    "record_grouped_counters": Code(("routeblock.grouped_schedule.counters",), _KERNEL_FILES),
    "window": Code(("routeblock.cuda.window",)),
    "bundle": Code(("routeblock.grouped_schedule.bundle",)),
    "sanitizer": Code(("routeblock.grouped_schedule.sanitizer", "routeblock.grouped_schedule.sanitizer_cases")),
    "statistics": Code(("routeblock.grouped_schedule.study",)),
    "validate_timings": Code(("routeblock.grouped_schedule.study", "routeblock.timing.validation")),
    "grouped_mutations": Code(
        (
            *(f"routeblock.grouped_schedule.{name}" for name in ("edits", "study", "verification")),
            "routeblock.timing.mutations",
        )
    ),
    **{f"table_{name}": Code(("routeblock.grouped_schedule.tables",)) for name in GROUPED_TABLES},
    "record_alignment": Code(
        ("routeblock.alignment_cost.record", "routeblock.alignment_cost.sanitizer_cases"), _ALIGNMENT_FILES
    ),
    "recorded_alignment": Code(("routeblock.alignment_cost.verification",)),
    "alignment_statistics": Code(("routeblock.alignment_cost.study", "routeblock.timing.statistics")),
    "validate_alignment": Code(("routeblock.alignment_cost.study", "routeblock.timing.validation")),
    "alignment_mutations": Code(
        (
            *(f"routeblock.alignment_cost.{name}" for name in ("edits", "study", "verification")),
            "routeblock.timing.mutations",
        )
    ),
    **{f"table_{name}": Code(("routeblock.alignment_cost.tables",)) for name in ALIGNMENT_TABLES},
    **{f"figure_{name}": Code(("routeblock.route_block.figures.draw",)) for name in FIGURES},
    **{f"figure_{name}": Code(("routeblock.grouped_schedule.figures",)) for name in GROUPED_FIGURES},
    **{f"figure_{name}": Code(("routeblock.alignment_cost.figures",)) for name in ALIGNMENT_FIGURES},
    "report": Code(("routeblock.report.page",), ("report/report.html.j2", "report/report.css")),
    "record_dispatch": Code(
        ("routeblock.q6k_dispatch.record", "routeblock.q6k_dispatch.sanitizer_cases"),
        (*_DISPATCH_FILES, *_KERNEL_FILES, *_ALIGNMENT_FILES),
    ),
    "recorded_dispatch": Code(("routeblock.q6k_dispatch.verification",)),
    "dispatch_statistics": Code(("routeblock.q6k_dispatch.study", "routeblock.timing.statistics")),
    "validate_dispatch": Code(("routeblock.q6k_dispatch.study", "routeblock.timing.validation")),
    "dispatch_mutations": Code(
        (
            *(f"routeblock.q6k_dispatch.{name}" for name in ("edits", "study", "verification")),
            "routeblock.timing.mutations",
        )
    ),
    **{f"table_{name}": Code(("routeblock.q6k_dispatch.tables",)) for name in DISPATCH_TABLES},
}

# Manifests that evidence brought: they were sealed where the runs were, by the code of that time.
_RECORDED = "*/route_block/*/recorded-*"
RESTORED = (
    *(f"{_RECORDED}/*/*/*/H?/rep*/{name}.manifest.json" for name in ("record", "telemetry")),
    *(f"{_RECORDED}/*/*/{name}.manifest.json" for name in ("prediction", "plans")),
    *(f"{_RECORDED}/*/*/capture/H?/{name}.manifest.json" for name in ("capture", "telemetry")),
    f"{_RECORDED}/*/census/H?/process*.manifest.json",
    f"{_RECORDED}/probe_control/with*_probe.manifest.json",
)

# Inputs that are given and not produced, in the checkout.
GIVEN = ("config.yaml", "envs", "fixtures", "workflow/report")


def readable(file: str) -> str:
    """The name of a file of settings, once it is read: what Snakemake would tell in several lines is told in one.

    A file that cannot be read or holds a key twice ends this process with one line and 2, as `prepare` does.
    """
    try:
        load(Path(file))
    except InputError as e:
        print(e, file=sys.stderr)
        sys.exit(2)
    return file


def prepare(settings: Any, results: Path) -> Config:
    """Check the workflow's settings and results folder, and let its shell commands find `routeblock`.

    What does not fit ends this process with one line and 2, as it ends a command: Snakemake would add a traceback.
    """
    bin_folder = str(Path(sys.executable).parent)
    mark(Path())
    os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)])
    try:
        writable_folder(results)
        return check(settings, where="config.yaml")
    except InputError as e:
        print(e, file=sys.stderr)
        sys.exit(2)


def recorded(evidence: Path) -> dict[str, int]:
    """The groups of committed evidence and the replicates that each has; none where there is no evidence."""
    if not (evidence / "evidence.json").is_file():
        return {}
    groups = json.loads((evidence / "evidence.json").read_bytes())["groups"]
    return {name: facts["runs"] // (len(CELLS) * len(HISTORIES)) for name, facts in groups.items()}


def code(rule: str) -> str:
    """The digest of the code that `rule` uses."""
    return code_digest(*RULES[rule].modules, files=RULES[rule].files)


def checkpoint_arguments(config: Config) -> str:
    """The options of `routeblock checkpoint-fixture` that config.yaml asks for, quoted for a shell.

    The pair search looks at every point on every lane whose launches are known.
    """
    wanted = config.checkpoint
    given: list[str] = ["--layer", str(wanted.layer)]
    named = {"--revision": wanted.revision, "--captured": wanted.captured, "--prompt": wanted.prompt}
    for option, value in named.items():
        given += [option, value] if value is not None else []
    if wanted.token_ids is not None:
        given += ["--token-ids", ",".join(map(str, wanted.token_ids))]
    for point in config.points:
        for lane in config.lanes:
            given += ["--point", f"{point}:{lane}"] if lane in LANES else []
    given += ["--all-experts"] if wanted.all_experts else []
    given += ["--confirm"] if wanted.confirm else []
    return shlex.join(given)


def codes() -> dict[str, str]:
    """The digest of every rule's code."""
    return {rule: code(rule) for rule in RULES}


def given() -> list[Path]:
    """The checkout's given inputs, as seen from the working directory."""
    checkout = Path(os.path.relpath(PACKAGE_ROOT.parents[1]))
    return [checkout / name for name in GIVEN]
