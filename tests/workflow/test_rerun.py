# SPDX-License-Identifier: Apache-2.0
"""What the workflow runs again after an edit, and what only `verify` notices."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkout import Checkout

ENVIRONMENT = "results/environment/environment.json"
SOURCE = "workflow/routeblock/environment.py"
RERUN = [("environment", {})]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout.fresh(tmp_path_factory.mktemp("made"))
    checkout.run(ENVIRONMENT)
    return checkout


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the made checkout, times included, to edit."""
    return made.copy(tmp_path / "checkout")


def test_a_second_run_has_nothing_to_do(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == []


def test_a_missing_result_is_made(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout.root / ENVIRONMENT).unlink()
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == RERUN


def test_a_comment_edit_runs_nothing(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.edit(SOURCE, '"python": platform.python_version(),', '"python": platform.python_version(),  # 3.x')
    checkout.edit("workflow/routeblock/evidence/chain.py", '"""Why an artifact does', '"""Why some artifact does')
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (SOURCE, '"avx2", ', ""),
        ("workflow/routeblock/evidence/digest.py", "sort_keys=True", "sort_keys=False"),
        ("envs/base.txt", "numpy==", "numpy>="),
    ],
)
def test_an_edit_of_code_or_input_runs_what_uses_it(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, path: str, old: str, new: str
) -> None:
    checkout.edit(path, old, new)
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == RERUN


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("workflow/routeblock/cli/results.py", '"""Check sealed', '"""Check all sealed'),
        ("workflow/routeblock/generated.py", "indent=2", "indent=4"),
        ("workflow/routeblock/route_block/targets.py", "PUBLISHED = ", "ANOTHER = PUBLISHED = "),
    ],
)
def test_an_edit_of_other_code_runs_nothing(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, path: str, old: str, new: str
) -> None:
    checkout.edit(path, old, new)
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == []


def test_a_touch_runs_nothing(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(checkout.root / "envs" / "base.txt")
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == []


def test_an_edited_result_is_named_by_verify_and_made_again_after_repair(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkout.command("routeblock", "verify", "results").returncode == 0
    original = (checkout.root / ENVIRONMENT).read_bytes()
    (checkout.root / ENVIRONMENT).write_bytes(original.replace(b"CPython", b"cpython"))

    assert checkout.would_run(monkeypatch, ENVIRONMENT) == []
    found = checkout.command("routeblock", "verify", "results")
    assert found.returncode == 1 and found.stdout.startswith(f"{ENVIRONMENT}: edited: ")

    assert checkout.command("routeblock", "repair", "results").returncode == 0
    assert checkout.would_run(monkeypatch, ENVIRONMENT) == RERUN
    checkout.run(ENVIRONMENT)
    assert (checkout.root / ENVIRONMENT).read_bytes() == original
    assert checkout.command("routeblock", "verify", "results").returncode == 0


def test_bad_settings_end_the_workflow_in_one_line(checkout: Checkout) -> None:
    checkout.edit("config.yaml", "replicates: 5", "replicate: 5")
    done = checkout.command("snakemake", "--cores", "1")
    assert done.returncode == 2
    assert done.stderr.endswith("did you mean 'replicates'?\n") and "Traceback" not in done.stderr


def test_a_results_folder_that_cannot_be_written_ends_the_workflow_in_one_line(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / "results")
    (checkout.root / "results").write_text("in the way")
    done = checkout.command("snakemake", "--cores", "1")
    assert done.returncode == 2
    assert "results: cannot be written: " in done.stderr and "Traceback" not in done.stderr
