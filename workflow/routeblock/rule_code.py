# SPDX-License-Identifier: Apache-2.0
"""What the Snakefile needs besides targets: settings that are refused in one line, and where given inputs lie."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from routeblock.config import Config, check, load
from routeblock.errors import InputError
from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.evidence.files import writable_folder
from routeblock.evidence.line_endings import check_line_endings
from routeblock.recovery import mark
from routeblock.route_block.operating_point import LANES

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


def prepare(settings: Any, results: Path, where: str = "config.yaml") -> Config:
    """Check the settings (of the file `where`) and the results folder, and let shell commands find `routeblock`.

    What does not fit ends this process with one line and 2, as it ends a command: Snakemake would add a traceback.
    """
    bin_folder = str(Path(sys.executable).parent)
    mark(Path())
    os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)])
    try:
        for folder in (results, Path(".snakemake")):
            writable_folder(folder)
        check_line_endings(Path("fixtures"), PACKAGE_ROOT / "cuda")
        return check(settings, where=where)
    except InputError as e:
        print(e, file=sys.stderr)
        sys.exit(2)


def checkpoint_arguments(config: Config) -> str:
    """The options of `routeblock checkpoint fixture` that config.yaml asks for, quoted for a shell.

    The pair search looks at every point on every lane whose launches are known.
    """
    wanted = config.checkpoint
    given: list[str] = ["--layer", str(wanted.layer)]
    named = {"--revision": wanted.revision, "--captured": wanted.captured, "--prompt": wanted.prompt}
    for option, value in named.items():
        given += [option, value] if value is not None else []
    for token_id in wanted.token_ids or ():
        given += ["--token-id", str(token_id)]
    for point in config.points:
        for lane in config.lanes:
            given += ["--point", f"{point}:{lane}"] if lane in LANES else []
    given += ["--all-experts"] if wanted.all_experts else []
    given += ["--confirm"] if wanted.confirm else []
    return shlex.join(given)


def link_given() -> None:
    """Link the checkout's given inputs into the working directory of a deployment, whose settings are its own.

    A package that is not installed from a checkout has none: this process ends with one line and 2.
    """
    checkout = PACKAGE_ROOT.parents[1]
    for name in GIVEN:
        link, target = Path(name), checkout / name
        if name == "config.yaml" or link.exists():
            continue
        if not target.exists():
            missing = InputError(
                "missing",
                where=str(target),
                limit="a deployment links it from the clone that the package is installed from",
                way_out="pip install --editable CLONE",
            )
            print(missing, file=sys.stderr)
            sys.exit(2)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def given() -> list[Path]:
    """The checkout's given inputs, as seen from the working directory."""
    checkout = Path(os.path.relpath(PACKAGE_ROOT.parents[1]))
    return [checkout / name for name in GIVEN]
