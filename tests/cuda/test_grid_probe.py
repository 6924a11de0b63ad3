# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from routeblock.cuda.grid_probe import GridProbe, KernelLaunch, build, environment, without_probe
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

# Loads an extension and a bystander made from the same source, each by RTLD_LOCAL as torch loads extensions.
CHILD = """
import ctypes, json, sys
from pathlib import Path
from routeblock.cuda.grid_probe import GridProbe
extension, bystander = (ctypes.CDLL(path) for path in sys.argv[1:3])
runtime = ctypes.CDLL(sys.argv[3])
probe = GridProbe(Path(sys.argv[1]))
seen = {"start": [extension.attribute(16), bystander.attribute(16)]}
probe.answer(82)
seen["answered"] = [extension.attribute(16), bystander.attribute(16)]
seen["other attribute"] = [extension.attribute(75), bystander.attribute(75)]
seen["status"] = [extension.launch_by_handle(246), bystander.launch_by_handle(999), extension.launch_by_handle(0)]
seen["reached the runtime"] = runtime.fake_last_grid()
first = probe.take()
extension.launch_by_function(7)
extension.launch_extended(5)
bystander.launch_by_function(9)
bystander.launch_extended(9)
second = probe.take()
probe.answer(None)
seen["end"] = [extension.attribute(16), bystander.attribute(16)]
seen["answers"] = probe.answers
seen["launches"] = [[x.grid, x.block, x.shared_memory, x.thread_sizes] for x in first + second]
seen["left"] = len(probe.take())
seen["probe"] = str(probe.path)
print(json.dumps(seen))
"""


def compile_c(out: Path, source: str, *flags: str) -> Path:
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O2", "-o", str(out), str(HERE / source), *flags], check=True)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("probe")
    # Versioned symbols, as CUDA's runtime has them.
    versions = folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    runtime = compile_c(folder / "libcudart.so.13", "fake_runtime.c", f"-Wl,--version-script={versions}")
    found = {"runtime": runtime, "probe": build(folder / "probe.so")}
    for name in ("extension", "bystander"):
        found[name] = compile_c(folder / f"{name}.so", "fake_extension.c", str(runtime), f"-Wl,-rpath,{folder}")
    return found


def run_child(built: dict[str, Path], code: str = CHILD, sms: int | None = None) -> dict[str, Any]:
    arguments = [str(built[name]) for name in ("extension", "bystander", "runtime")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(built["probe"], built["extension"], sms),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_only_the_extension_is_answered_and_recorded(built: dict[str, Path]) -> None:
    seen = run_child(built)
    assert seen["start"] == [132, 132]
    assert seen["answered"] == [82, 132]
    assert seen["other attribute"] == [75, 75]
    assert seen["end"] == [132, 132]
    assert seen["answers"] == 1
    assert seen["launches"] == [
        [[246, 1, 1], [128, 1, 1], 4096, [64, 128]],
        [[7, 2, 1], [128, 1, 1], 0, [64, 128]],
        [[5, 1, 3], [128, 1, 1], 64, [64, 128]],
    ]
    assert seen["left"] == 0
    assert Path(seen["probe"]) == built["probe"]


def test_a_launch_that_the_runtime_refuses_is_no_launch(built: dict[str, Path]) -> None:
    seen = run_child(built)
    assert seen["status"] == [0, 0, 9]
    assert seen["reached the runtime"] == 999
    assert 0 not in [launch[0][0] for launch in seen["launches"]]


def test_the_environment_variable_answers_from_the_start(built: dict[str, Path]) -> None:
    assert run_child(built, sms=100)["start"] == [100, 132]


def test_a_link_to_the_extension_is_the_extension(built: dict[str, Path], tmp_path: Path) -> None:
    link = tmp_path / "linked.so"
    link.symlink_to(built["extension"])
    assert run_child({**built, "extension": link})["answered"] == [82, 132]


def test_a_probe_that_watches_another_file_is_refused(built: dict[str, Path]) -> None:
    code = "import sys; from pathlib import Path; from routeblock.cuda.grid_probe import GridProbe\n"
    code += "try: GridProbe(Path(sys.argv[2]))\nexcept Exception as e: print('\"' + type(e).__name__ + '\"', end='')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(built["extension"]), str(built["bystander"])],
        env=environment(built["probe"], built["extension"]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == '"InputError"'


def test_two_builds_have_one_digest(built: dict[str, Path], tmp_path: Path) -> None:
    assert sha256_file(build(tmp_path / "again.so")) == sha256_file(built["probe"])


def test_a_command_line_starts_again_with_the_probe_in_the_same_process(built: dict[str, Path], tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom routeblock.cuda.grid_probe import GridProbe, reexecute\n"
        "print(os.getpid(), len(sys.argv))\n"
        "if 'LD_PRELOAD' not in os.environ: reexecute(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "GridProbe(Path(sys.argv[2]))\n"
    )
    command = [sys.executable, str(script), str(built["probe"]), str(built["extension"])]
    done = subprocess.run(
        command, env=without_probe(environment(*map(Path, command[2:]))), capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == second


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(InputError, match="no C compiler") as caught:
        build(tmp_path / "probe.so")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_refuses_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(InputError, match="refuses"):
        build(tmp_path / "probe.so")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_ld_preload_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="space or a colon"):
        environment(tmp_path / "my probe.so", tmp_path / "extension.so")


def test_without_the_probe_in_the_process_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not preloaded.*build-probe"):
        GridProbe(tmp_path / "extension.so")


# Kernel names as vLLM 0.24.0 registers them.
MANGLED = (
    "_ZN16marlin_moe_wna166MarlinILl1125899906909960ELl1125899906843648ELl1125899906909960ELl1125899906909960E"
    "Li{threads}ELi1ELi{n}ELi{k}ELb1ELi4ELi8ELb0EEEvPK4int4S3_PS1_S4_S3_PKfS3_S6_S3_PKiS8_S8_S8_S6_ibiiiiPibbb"
)


@pytest.mark.parametrize(("thread_k", "thread_n"), [(64, 128), (128, 64), (128, 128), (64, 256)])
def test_thread_sizes_are_read_from_the_kernel_name(thread_k: int, thread_n: int) -> None:
    threads = thread_k * thread_n // 64
    name = MANGLED.format(threads=threads, n=thread_n // 16, k=thread_k // 16)
    assert KernelLaunch((246, 1, 1), (threads, 1, 1), 0, name).thread_sizes == (thread_k, thread_n)
    with pytest.raises(InputError, match="its name says otherwise"):
        KernelLaunch((246, 1, 1), (threads + 1, 1, 1), 0, name).thread_sizes  # noqa: B018


def test_other_kernels_have_no_thread_sizes() -> None:
    assert KernelLaunch((1, 1, 1), (1024, 1, 1), 0, "_ZN4vllm3moe27moe_align_block_size_kernelEv").thread_sizes is None
