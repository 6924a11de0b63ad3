# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file, atomic_folder


def test_a_file_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.json"
    with atomic_file(target) as tmp:
        tmp.write_text("x")
        assert not target.exists() and tmp.parent == target.parent
    assert target.read_text() == "x"
    assert [p.name for p in target.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(error), atomic_file(target) as tmp:
        tmp.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_replaces_an_earlier_result_of_the_same_kind(tmp_path: Path) -> None:
    target = tmp_path / "run"
    for text in ("first", "second"):
        with atomic_folder(target) as tmp:
            (tmp / "record.json").write_text(text)
    assert (target / "record.json").read_text() == "second"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match=r"thesis\.txt"), atomic_folder(tmp_path / "home") as tmp:
        (tmp / "record.json").write_text("x")
    assert [p.name for p in tmp_path.rglob("*")] == ["home", "thesis.txt"]


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "run") as tmp:
        (tmp / "record.json").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("atomic", [atomic_file, atomic_folder])
def test_a_file_in_the_way_is_one_line(tmp_path: Path, atomic: object) -> None:
    (tmp_path / "in_the_way").write_text("x")
    with (
        pytest.raises(InputError, match=r"in_the_way/out: cannot be written: .*; .*; ") as e,
        atomic(  # type: ignore[operator]
            tmp_path / "in_the_way" / "out"
        ),
    ):
        pass
    assert "\n" not in str(e.value)
    assert (tmp_path / "in_the_way").read_text() == "x"


def test_a_file_where_the_folder_should_be_stays(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(InputError, match="run: cannot be written"), atomic_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "run").read_text() == "x"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_about_the_target(tmp_path: Path, number: int) -> None:
    with pytest.raises(InputError, match="run: cannot be written"), atomic_folder(tmp_path / "run"):
        raise OSError(number, "no")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_input_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "run"):
        (tmp_path / "input.json").read_text()


def test_a_real_write_past_the_file_size_limit_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from routeblock.evidence.files import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as tmp: tmp.write_bytes(bytes(100_000))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, tmp_path / "big"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "InputError" in done.stderr and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_that_replace_one_folder_leave_a_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "run"

    def replace(writer: int) -> None:
        for number in range(50):
            with atomic_folder(target) as tmp:
                for name in ("record.json", "tensors.bin"):
                    (tmp / name).write_text(f"{writer} {number}")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(replace, (1, 2))) == [None, None]
    assert len({p.read_text() for p in target.iterdir()}) == 1
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_to_a_folder_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "record.json").write_text("old")
    (tmp_path / "run").symlink_to(elsewhere)
    with atomic_folder(tmp_path / "run") as tmp:
        (tmp / "record.json").write_text("new")
    assert not (tmp_path / "run").is_symlink() and (tmp_path / "run" / "record.json").read_text() == "new"
    assert (elsewhere / "record.json").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"run", "elsewhere"}


def test_a_folder_that_has_no_name_as_given_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "above" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "above" / "here")
    with pytest.raises(InputError, match="runs in this folder"), atomic_folder(Path()):
        pass
    with pytest.raises(InputError, match="'here' first"), atomic_folder(Path("..")) as tmp:
        (tmp / "record.json").write_text("x")
    with pytest.raises(InputError, match="move the folder"), atomic_file(Path()) as tmp:
        tmp.write_text("x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["above", "here"]


@pytest.mark.parametrize("atomic", [atomic_file, atomic_folder])
def test_the_root_is_no_name_of_a_result(atomic: object) -> None:
    with pytest.raises(InputError, match=r"^/: has no name"), atomic(Path("/")):  # type: ignore[operator]
        pass
