# SPDX-License-Identifier: Apache-2.0
"""A chain of three rules: fixture -> run -> table, with a given source file outside results/."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from routeblock.errors import InputError
from routeblock.evidence.chain import Kind, repair, seal, verify
from routeblock.evidence.digest import canonical_json

CODE = ["routeblock.errors"]  # who made it is no matter here


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    source = tmp_path / "given" / "numbers.json"
    fixture, run, table = root / "fixture" / "f.bin", root / "run" / "r.bin", root / "tables" / "t.csv"
    for path, text in ((source, "12"), (fixture, "fixture"), (run, "run"), (table, "table")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for rule, out, used in (("fixture", fixture, source), ("run", run, fixture), ("table", table, run)):
        manifest = out.with_name(f"{rule}.manifest.json")
        seal(manifest, rule=rule, outputs=[out], inputs=[used], parameters={"seed": 1}, modules=CODE)
    return root


def findings(root: Path, check_code: bool = True) -> list[tuple[Kind, str]]:
    found = verify(root, check_code=check_code, sources=[root.parent / "given"])
    return [(f.kind, os.path.relpath(f.path, root)) for f in found]


def rewrite(manifest: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(manifest.read_bytes())
    change(value)
    manifest.write_bytes(canonical_json(value))


def test_an_untouched_chain_holds(results: Path) -> None:
    assert findings(results) == []


def test_a_manifest_is_canonical_and_relative(results: Path) -> None:
    data = (results / "run" / "run.manifest.json").read_bytes()
    value = json.loads(data)
    assert canonical_json(value) == data
    assert [e["path"] for e in value["outputs"] + value["inputs"]] == ["r.bin", "../fixture/f.bin"]


def test_the_chain_holds_wherever_the_folder_is_copied(results: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    assert findings(tmp_path.parent / f"{tmp_path.name}-copy" / "results") == []


def test_results_may_be_a_link_to_another_disk(results: Path, tmp_path: Path) -> None:
    results.rename(tmp_path / "elsewhere")
    results.symlink_to(tmp_path / "elsewhere")
    assert findings(results) == []


def test_an_edit_that_keeps_size_and_time_is_found(results: Path) -> None:
    path = results / "run" / "r.bin"
    before = path.stat()
    path.write_text("rum")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert findings(results) == [(Kind.EDITED, "run/r.bin")]


def test_a_touch_is_no_edit(results: Path) -> None:
    os.utime(results / "run" / "r.bin", (1, 1))
    assert findings(results) == []


def test_the_artifact_nearest_the_source_comes_first(results: Path) -> None:
    for path in ("tables/t.csv", "run/r.bin", "fixture/f.bin"):
        (results / path).write_text("longer than before")
    assert findings(results) == [
        (Kind.RESIZED, "fixture/f.bin"),
        (Kind.RESIZED, "run/r.bin"),
        (Kind.RESIZED, "tables/t.csv"),
    ]


def test_a_deleted_output_is_missing(results: Path) -> None:
    (results / "run" / "r.bin").unlink()
    assert findings(results) == [(Kind.MISSING, "run/r.bin")]


def test_an_edited_source_is_named(results: Path) -> None:
    (results.parent / "given" / "numbers.json").write_text("13")
    assert findings(results) == [(Kind.EDITED, "../given/numbers.json")]


def test_an_edit_with_a_forged_manifest_is_caught_by_the_consumer(results: Path) -> None:
    (results / "run" / "r.bin").write_text("rum")
    manifest = results / "run" / "run.manifest.json"
    seal(manifest, rule="run", outputs=[results / "run/r.bin"], inputs=[], parameters={}, modules=CODE)
    assert findings(results) == [(Kind.INPUT_DIFFERS_FROM_PRODUCER, "tables/table.manifest.json")]


def test_a_manifest_is_an_input_like_any_other(results: Path) -> None:
    run = results / "run" / "run.manifest.json"
    report = results / "report"
    report.mkdir()
    (report / "r.html").write_text("r")
    seal(
        report / "r.manifest.json",
        rule="table",
        outputs=[report / "r.html"],
        inputs=[run],
        parameters={},
        modules=CODE,
    )
    assert findings(results) == []
    rewrite(run, lambda m: m.update(parameters={"seed": 2}))
    assert findings(results) == [(Kind.INPUT_DIFFERS_FROM_PRODUCER, "report/r.manifest.json")]


def test_a_file_that_no_manifest_lists_is_unsealed(results: Path) -> None:
    (results / "run" / "extra.bin").write_text("x")
    assert findings(results) == [(Kind.UNSEALED_FILE, "run/extra.bin")]


def test_logs_and_notes_need_no_seal(results: Path) -> None:
    (results / "logs" / "run").mkdir(parents=True)
    for name in ("logs/run.txt", "logs/run/r.log", "README.md", ".gitkeep"):
        (results / name).write_text("x")
    assert findings(results) == []


@pytest.mark.parametrize("name", ["run/logs/r.bin", "run/r.log", "run/README.md"])
def test_among_results_nothing_is_a_log_or_a_note(results: Path, name: str) -> None:
    (results / name).parent.mkdir(exist_ok=True)
    (results / name).write_text("x")
    assert findings(results) == [(Kind.UNSEALED_FILE, name)]
    (results / name).unlink()
    (results / name).symlink_to("/dev/null")
    assert findings(results) == [(Kind.LINK, name)]


@pytest.mark.parametrize("modules", [[], ["routeblock.gone"], ["routeblock.errors", "routeblock.gone"]])
def test_code_that_this_package_does_not_have_is_unknown(results: Path, modules: list[str]) -> None:
    rewrite(results / "tables" / "table.manifest.json", lambda m: m.update(modules=modules))
    assert findings(results) == [(Kind.UNKNOWN_CODE, "tables/table.manifest.json")]
    assert findings(results, check_code=False) == []


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_file_listed_twice_is_told(results: Path, side: str) -> None:
    manifest = results / "tables" / "table.manifest.json"
    rewrite(manifest, lambda m: m.update({side: [m[side][0] | {"sha256": "0" * 64}, *m[side]]}))  # type: ignore[index]
    assert (Kind.MALFORMED_MANIFEST, "tables/table.manifest.json") in findings(results)


def test_logs_above_the_root_excuse_nothing(results: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    moved = results.rename(tmp_path / "logs" / "results")
    shutil.move(tmp_path / "given", tmp_path / "logs" / "given")
    (moved / "extra.bin").write_text("x")
    assert findings(moved) == [(Kind.UNSEALED_FILE, "extra.bin")]


def test_without_its_manifest_an_input_has_no_producer(results: Path) -> None:
    (results / "fixture" / "fixture.manifest.json").unlink()
    assert findings(results)[0] == (Kind.INPUT_WITHOUT_PRODUCER, "fixture/f.bin")


def test_a_result_of_older_code_is_stale(results: Path) -> None:
    rewrite(results / "run" / "run.manifest.json", lambda m: m.update(code="d" * 64))
    assert findings(results) == [(Kind.STALE_CODE, "run/run.manifest.json")]
    assert findings(results, check_code=False) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"format":"routeblock.manifest.v1"}',
    ],
)
def test_a_malformed_manifest_comes_first(results: Path, data: bytes) -> None:
    (results / "tables" / "table.manifest.json").write_bytes(data)
    (results / "fixture" / "f.bin").write_text("edited too")
    assert findings(results)[0] == (Kind.MALFORMED_MANIFEST, "tables/table.manifest.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format="routeblock.manifest.v2"),
        lambda m: m.update(extra=1),
        lambda m: m.update(code="z" * 64),
        lambda m: m.update(modules=["routeblock./etc/hostname"]),
        lambda m: m.update(modules=["os"]),
        lambda m: m.update(outputs=[]),
        lambda m: m["outputs"][0].update(size=-1),
        lambda m: m["outputs"][0].update(size="3"),
        lambda m: m["outputs"][0].update(sha256="0"),
    ],
)
def test_a_manifest_of_another_form_is_malformed(results: Path, change: Callable[[dict[str, object]], object]) -> None:
    rewrite(results / "run" / "run.manifest.json", change)
    assert (Kind.MALFORMED_MANIFEST, "run/run.manifest.json") in findings(results)


def test_a_manifest_that_is_not_canonical_is_malformed(results: Path) -> None:
    path = results / "run" / "run.manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")
    assert (Kind.MALFORMED_MANIFEST, "run/run.manifest.json") in findings(results)


@pytest.mark.parametrize("path", ["../fixture/f.bin", "/etc/hostname", "..\\f.bin", "link", "r\0.bin", "../../given/x"])
def test_outputs_never_leave_the_manifests_folder(results: Path, path: str) -> None:
    (results / "run" / "link").symlink_to("/etc/hostname")
    rewrite(results / "run" / "run.manifest.json", lambda m: m["outputs"][0].update(path=path))  # type: ignore[index]
    assert (Kind.PATH_OUTSIDE, "run/run.manifest.json") in findings(results)


@pytest.mark.parametrize("path", ["../../../../../etc/hostname", "../../other/x"])
def test_inputs_come_from_the_results_or_a_source(results: Path, path: str) -> None:
    rewrite(results / "run" / "run.manifest.json", lambda m: m["inputs"][0].update(path=path))  # type: ignore[index]
    assert findings(results)[0] == (Kind.PATH_OUTSIDE, "run/run.manifest.json")


def test_two_manifests_of_one_file_are_refused(results: Path) -> None:
    shutil.copy(results / "run" / "run.manifest.json", results / "run" / "second.manifest.json")
    assert findings(results)[0] == (Kind.PRODUCED_TWICE, "run/r.bin")


def test_a_cycle_of_manifests_is_refused(results: Path) -> None:
    table = {"path": "../tables/t.csv", "size": 5, "sha256": "0" * 64}
    rewrite(results / "fixture" / "fixture.manifest.json", lambda m: m.update(inputs=[table]))
    assert findings(results)[0] == (Kind.MANIFEST_CYCLE, "fixture/fixture.manifest.json")


def test_a_named_pipe_does_not_hang_the_walk(results: Path) -> None:
    (results / "run" / "r.bin").unlink()
    os.mkfifo(results / "run" / "r.bin")
    os.mkfifo(results / "pipe.manifest.json")
    assert findings(results) == [(Kind.MALFORMED_MANIFEST, "pipe.manifest.json"), (Kind.UNREADABLE, "run/r.bin")]


@pytest.mark.parametrize("make", [False, True])
def test_nothing_to_verify_is_never_a_pass(tmp_path: Path, make: bool) -> None:
    root = tmp_path / "results"
    if make:
        root.mkdir()
    with pytest.raises(InputError, match="make study"):
        verify(root)


def test_seal_refuses_an_output_elsewhere_and_a_missing_file(results: Path) -> None:
    for outputs, inputs in (([results / "fixture" / "f.bin"], []), ([results / "run" / "r.bin"], [results / "none"])):
        with pytest.raises(InputError):
            seal(
                results / "run" / "new.manifest.json",
                rule="run",
                outputs=outputs,
                inputs=inputs,
                parameters={},
                modules=CODE,
            )
    assert not (results / "run" / "new.manifest.json").exists()


def test_seal_takes_a_folder_for_the_files_below_it(results: Path) -> None:
    path = results / "all.manifest.json"
    for m in results.rglob("*.manifest.json"):
        m.unlink()
    seal(path, rule="fixture", outputs=[results], inputs=[], parameters={}, modules=CODE)
    assert [e["path"] for e in json.loads(path.read_bytes())["outputs"]] == [
        "fixture/f.bin",
        "run/r.bin",
        "tables/t.csv",
    ]
    assert findings(results) == []


def test_repair_removes_what_does_not_fit_and_all_that_came_of_it(results: Path) -> None:
    (results / "run" / "r.bin").write_text("rum")
    (results / "notes.txt").write_text("mine")
    repaired = repair(results, sources=[results.parent / "given"])
    assert sorted(os.path.relpath(p, results) for p in repaired.removed) == [
        "run/r.bin",
        "run/run.manifest.json",
        "tables/t.csv",
        "tables/table.manifest.json",
    ]
    aside = results.with_name("results.set-aside") / "notes.txt"
    assert repaired.moved == [(results / "notes.txt", aside)] and aside.read_text() == "mine"
    assert findings(results) == []


def test_repair_leaves_an_edited_source_and_clears_leftovers(results: Path) -> None:
    source = results.parent / "given" / "numbers.json"
    source.write_text("13")
    (results / ".run.0.routeblock-tmp").mkdir()
    (results / ".run.1.routeblock-tmp" / "empty").mkdir(parents=True)
    (results / ".run.0.routeblock-tmp" / "record.json").write_text("{")
    repair(results, sources=[source])
    assert source.read_text() == "13"
    assert not [p for p in results.rglob("*") if p.is_file()]


def _edit(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _folder_with_notes(path: Path) -> None:
    _empty_folder(path)
    (path / "notes.txt").write_text("mine")


def _link_to_the_same_bytes(path: Path) -> None:
    shutil.move(path, path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def _link_to_a_neighbour(path: Path) -> None:
    path.rename(path.with_name("neighbour"))
    path.symlink_to("neighbour")


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = (
    _edit,
    _truncate,
    Path.unlink,
    _empty_folder,
    _folder_with_notes,
    _link_to_the_same_bytes,
    _link_to_a_neighbour,
    _link_to_nothing,
)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("artifact", ["run/r.bin", "run/run.manifest.json"])
def test_a_damaged_artifact_is_named_and_goes_with_what_was_made_from_it(
    results: Path, artifact: str, damage: Callable[[Path], None]
) -> None:
    path = results / artifact
    before = path.read_bytes()
    damage(path)
    named = {name for _, name in findings(results)}
    # Without its manifest, what is no longer sealed is named.
    assert (artifact if os.path.lexists(path) or path.suffix == ".bin" else "run/r.bin") in named
    repaired = repair(results, sources=[results.parent / "given"])
    left = sorted(os.path.relpath(p, results) for p in results.rglob("*") if not p.is_dir())
    assert left == ["fixture/f.bin", "fixture/fixture.manifest.json"]
    assert not os.path.lexists(path)
    assert findings(results) == []
    # What the workflow did not make is kept.
    kept = {p.name: p for _, aside in repaired.moved for p in [aside, *aside.rglob("*")]}
    if damage is _folder_with_notes:
        assert kept["notes.txt"].read_text() == "mine"
    if damage is _link_to_a_neighbour:
        assert kept["neighbour"].read_bytes() == before
    if damage is _link_to_the_same_bytes:
        assert (results.parent / "elsewhere").read_bytes() == before


def test_a_folder_of_results_behind_a_link_is_made_again(results: Path, tmp_path: Path) -> None:
    shutil.move(results / "run", tmp_path / "elsewhere")
    (results / "run").symlink_to(tmp_path / "elsewhere")
    assert findings(results)[0] == (Kind.LINK, "run")
    repair(results, sources=[results.parent / "given"])
    assert not os.path.lexists(results / "run") and (tmp_path / "elsewhere" / "r.bin").read_text() == "run"
    assert not (results / "tables" / "t.csv").exists()
    assert findings(results) == []


def test_manifests_of_one_process_go_together(results: Path) -> None:
    run = results / "run"
    (run / "telemetry.json").write_text("{}")
    telemetry = run / "telemetry.manifest.json"
    seal(
        telemetry,
        rule="run",
        outputs=[run / "telemetry.json"],
        inputs=[run / "r.bin"],
        parameters={"seed": 1},
        modules=CODE,
    )
    (run / "telemetry.json").unlink()
    repair(results, sources=[results.parent / "given"])
    assert not any(run.iterdir()) and not (results / "tables" / "t.csv").exists()


def test_two_repairs_keep_both_notes(results: Path) -> None:
    for text in ("first", "second"):
        (results / "notes.txt").write_text(text)
        repair(results, sources=[results.parent / "given"])
    aside = results.with_name("results.set-aside")
    assert sorted(p.read_text() for p in aside.iterdir()) == ["first", "second"]


def test_an_edited_source_is_told_and_stays(results: Path) -> None:
    source = results.parent / "given" / "numbers.json"
    source.write_text("13")
    repaired = repair(results, sources=[results.parent / "given"])
    assert [finding.path for finding in repaired.given] == [source] and source.read_text() == "13"
