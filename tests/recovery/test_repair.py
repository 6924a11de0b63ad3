# SPDX-License-Identifier: Apache-2.0
"""Results changed behind Snakemake's back: `verify` names each, `repair` has it made again with what came of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from checkout import Checkout
from study import EVIDENCE, MORE, STUDY, Finished, Workflow, digests

from routeblock.evidence.chain import Kind, Repaired, repair, verify
from routeblock.evidence.manifest import SUFFIX, Manifest
from routeblock.rule_code import GIVEN, RESTORED

RUN = f"{STUDY}/native/H0/rep1"


# What the study's checkpoint is made from, and itself.
BEFORE_CHECKPOINT = {"manifest", "checkpoint_fixture"}


def edit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


# Each kind of artifact, with one kind of damage; tests/evidence/test_chain.py has all kinds of damage.
DAMAGED = {
    f"{RUN}/tensors.safetensors": edit,
    f"{RUN}/record.json": truncate,
    f"{RUN}/telemetry.json": Path.unlink,
    f"{RUN}/record.manifest.json": truncate,
    f"{STUDY}/prediction.manifest.json": Path.unlink,
    "results/tables/relations.manifest.json": Path.unlink,
    "results/fixtures/checkpoint/layer.safetensors": link,
    "results/tables/relations.csv": folder,
    "results/tables/confirmation.parquet": edit,
    "results/grouped_schedule/recorded-h200/gpu0/sweep/batches.parquet": truncate,
    f"{EVIDENCE}/probe_control/with_probe.json": edit,
    f"{EVIDENCE}/published/census/restored.json": edit,
    "results/twin/golden.json": link,
}


def linked_copy(checkout: Checkout, root: Path) -> Checkout:
    """A copy whose files are the same files: what is changed in it has to be replaced."""
    shutil.copytree(checkout.root, root, copy_function=os.link, symlinks=True)
    return Checkout(root)


def look(root: Path, what: Callable[..., object]) -> object:
    sources = [root / name for name in GIVEN]
    return what(root / "results", root / "reports", sources=sources, elsewhere=RESTORED)


def mended(root: Path) -> Repaired:
    repaired = look(root, repair)
    assert isinstance(repaired, Repaired)
    return repaired


def files_of(copy: Checkout, finished: Checkout, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The files that each job makes that would run.

    A dry run knows what follows from a Snakemake checkpoint when that has run: then all that the finished study made.
    """
    needed = list(copy.execute(monkeypatch, "dryrun", *MORE).needrun_jobs(exclude_finished=False))
    if any(job.is_checkpoint for job in needed):
        needed += finished.execute(monkeypatch, "dryrun", *MORE).jobs
    return [made_by(map(Path, job.output), finished.root) for job in needed if job.output]


def made_by(outputs: Iterable[Path], root: Path) -> set[str]:
    """The outputs of a job; of restored evidence, also what its list names."""
    found = set()
    for output in outputs:
        found.add(output.as_posix())
        if output.name == "restored.json":
            files = json.loads((root / output).read_bytes())["files"]
            found |= {(output.parent / name).as_posix() for name in files}
    return found


@pytest.mark.parametrize("artifact", DAMAGED)
def test_a_damaged_artifact_is_named_taken_away_and_made_again(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifact: str
) -> None:
    copy = linked_copy(finished.checkout, tmp_path / "checkout")
    path = copy.root / artifact
    sealed = {path}
    if artifact.endswith(SUFFIX) and DAMAGED[artifact] is Path.unlink:  # then what it sealed is what is named
        sealed = {path.parent / entry["path"] for entry in json.loads(path.read_bytes())["outputs"]}
    DAMAGED[artifact](path)
    found = look(copy.root, verify)
    assert isinstance(found, list)
    assert sealed & {finding.path for finding in found}, [str(f) for f in found]
    mended(copy.root)
    assert not os.path.lexists(path)
    assert look(copy.root, verify) == []
    assert artifact in set().union(*files_of(copy, finished.checkout, monkeypatch))


def test_what_a_repair_takes_away_is_made_again_and_nothing_else(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: dict[str, Path] = {}
    for path in sorted((finished.checkout.root / "results").rglob(f"*{SUFFIX}")):
        manifest = Manifest.model_validate_json(path.read_bytes())
        rules.setdefault(manifest.rule, path.parent / manifest.outputs[-1].path)
    wrong = {}
    for number, (rule, output) in enumerate(rules.items()):
        copy = linked_copy(finished.checkout, tmp_path / f"{number}")
        edit(copy.root / output.relative_to(finished.checkout.root))
        removed = {path.relative_to(copy.root).as_posix() for path in mended(copy.root).removed}
        jobs = files_of(copy, finished.checkout, monkeypatch)
        lost = removed - set().union(*jobs)
        needless = (
            [] if rule in BEFORE_CHECKPOINT else [sorted(outputs)[0] for outputs in jobs if not outputs & removed]
        )
        if lost or needless or not removed:
            wrong[rule] = (sorted(lost), sorted(needless))
    assert wrong == {}


def test_a_repaired_study_has_the_bits_that_it_had(finished: Finished, tmp_path: Path) -> None:
    checkout = finished.checkout.copy(tmp_path / "checkout")
    for artifact in (f"{RUN}/tensors.safetensors", "results/tables/relations.csv"):
        DAMAGED[artifact](checkout.root / artifact)
    done = checkout.command("routeblock", "repair", "results", "reports", "-v")
    assert done.returncode == 0, done.stderr
    removed = {line for line in done.stdout.splitlines() if line.startswith("results/") and "moved" not in line}
    assert f"{STUDY}/score.json" in removed and f"{STUDY}/replay/H0/rep1/record.json" not in removed
    assert (checkout.root / "results.set-aside/tables/relations.csv/notes.txt").read_text() == "mine"
    assert Workflow.start(checkout, *MORE).wait() == 0
    assert digests(checkout) == digests(finished.checkout)
    done = checkout.command("routeblock", "verify", "results", "reports")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("given", ["fixtures/mutations.json", "fixtures/recorded/h200-vllm0.24.0/tensors.xz"])
def test_an_edited_given_file_is_named_and_left(finished: Finished, tmp_path: Path, given: str) -> None:
    checkout = linked_copy(finished.checkout, tmp_path / "checkout")
    edit(checkout.root / given)
    edited = (checkout.root / given).read_bytes()
    found = look(checkout.root, verify)
    assert isinstance(found, list)
    assert (found[0].kind, found[0].path) == (Kind.EDITED, checkout.root / given)
    repaired = mended(checkout.root)
    assert (checkout.root / given).read_bytes() == edited
    assert [finding.path for finding in repaired.given] == [checkout.root / given] and repaired.removed
