# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.evidence import digest

FILES = {
    "__init__.py": '"""Package."""\nVERSION = 1\n',
    "errors.py": "class E(Exception):\n    pass\n",
    "moe/__init__.py": "",
    "moe/routing.py": "from routeblock.errors import E\n\n\ndef align(x):\n    return x + 1\n",
    "moe/unused.py": "x = 1\n",
    "twin/__init__.py": "FLAG = True\n",
    "twin/gemm.py": "from ..moe.routing import align\nfrom . import tensor_core\n\ngemm = align\n",
    "twin/tensor_core.py": "def step(x):\n    return x\n",
    "study.py": "import numpy\n\n\ndef run(x):\n    import routeblock.twin.gemm as g\n\n    return g.gemm(x)\n",
    "kernel.cu": "__global__ void f() {}\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(digest, "PACKAGE_ROOT", tmp_path)
    digest._parsed.cache_clear()
    yield tmp_path
    digest._parsed.cache_clear()


def after(package: Path, name: str, text: str, *modules: str) -> tuple[str, str]:
    """The digest of `modules` before and after `name` becomes `text`."""
    before = digest.code_digest(*modules)
    (package / name).write_text(text)
    digest._parsed.cache_clear()
    return before, digest.code_digest(*modules)


def test_the_closure_follows_relative_absolute_and_local_imports_and_every_init(package: Path) -> None:
    assert digest.import_closure(["routeblock.study"]) == [
        "routeblock",
        "routeblock.errors",
        "routeblock.moe",
        "routeblock.moe.routing",
        "routeblock.study",
        "routeblock.twin",
        "routeblock.twin.gemm",
        "routeblock.twin.tensor_core",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '"""New docstring."""\nfrom routeblock.errors import E\n\n\ndef align(x):\n    return x + 1\n',
        "from routeblock.errors import E\n\n\n# why\ndef align(x):  # comment\n    return x + 1\n",
        'from routeblock.errors import E\n\n\ndef align(x):\n    """Doc."""\n    return (x\n            + 1)\n',
        'from routeblock.errors import E\n\n"""About it."""\n\ndef align(x):\n    return x + 1\n',
    ],
)
def test_comments_docstrings_and_layout_keep_the_digest(package: Path, text: str) -> None:
    before, now = after(package, "moe/routing.py", text, "routeblock.study")
    assert before == now


@pytest.mark.parametrize(
    "text",
    [
        "from routeblock.errors import E\n\n\ndef align(x):\n    return x + 2\n",
        "from routeblock.errors import E\n\n\ndef align(x, y=0):\n    return x + 1\n",
        'from routeblock.errors import E\n\n\ndef align(x):\n    return "x"\n',
    ],
)
def test_code_changes_the_digest_of_what_imports_it_and_of_nothing_else(package: Path, text: str) -> None:
    others = digest.code_digest("routeblock.twin.tensor_core")
    before, now = after(package, "moe/routing.py", text, "routeblock.study")
    assert before != now
    assert digest.code_digest("routeblock.twin.tensor_core") == others


@pytest.mark.parametrize("name", ["__init__.py", "twin/__init__.py"])
def test_a_package_init_belongs_to_its_modules(package: Path, name: str) -> None:
    before, now = after(package, name, "VERSION = 2\n", "routeblock.twin.tensor_core")
    assert before != now


def test_a_module_that_nothing_imports_does_not_count(package: Path) -> None:
    before, now = after(package, "moe/unused.py", "x = 2\n", "routeblock.study")
    assert before == now


def test_every_byte_of_a_listed_file_counts_for_the_named_module_alone(package: Path) -> None:
    (package / "build.py").write_text('SOURCES = ("kernel.cu",)\n')
    (package / "use.py").write_text("import routeblock.build\n")
    before = digest.code_digest("routeblock.use"), digest.code_digest("routeblock.use", "routeblock.build")
    (package / "kernel.cu").write_text("__global__ void f() {} // note\n")
    now = digest.code_digest("routeblock.use"), digest.code_digest("routeblock.use", "routeblock.build")
    assert (now[0] == before[0], now[1] == before[1]) == (True, False)


def test_an_unknown_module_is_refused(package: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"routeblock\.nowhere"):
        digest.code_digest("routeblock.nowhere")


def test_a_docstring_only_body_equals_a_pass(package: Path) -> None:
    text = 'class E(Exception):\n    """An error."""\n'
    before, now = after(package, "errors.py", text, "routeblock.errors")
    assert before == now


def test_canonical_json_is_sorted_tight_utf8_and_without_nan() -> None:
    assert digest.canonical_json({"b": [1, 2], "a": "é"}) == '{"a":"é","b":[1,2]}'.encode()
    with pytest.raises(ValueError):
        digest.canonical_json(float("nan"))


def test_an_array_digest_is_over_contiguous_bytes() -> None:
    a = np.arange(12, dtype=np.float16).reshape(3, 4)
    assert digest.sha256_array(a.T) == digest.sha256_bytes(a.T.tobytes())
    assert digest.sha256_array(a[:0]) == digest.sha256_bytes(b"")
    assert digest.sha256_array(np.float32([-0.0])) != digest.sha256_array(np.float32([0.0]))


def test_what_was_read_once_is_not_parsed_again_until_its_bytes_change(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    parsed: list[str] = []
    read = digest._read

    def counted(module: str, source: bytes, *, is_package: bool) -> tuple[str, list[str]]:
        parsed.append(module)
        return read(module, source, is_package=is_package)

    monkeypatch.setattr(digest, "_read", counted)

    def again() -> str:
        parsed.clear()
        digest._parsed.cache_clear()
        return digest.code_digest("routeblock.study")

    first = again()
    assert "routeblock.study" in parsed
    assert again() == first and not parsed
    # The same size, the same time, other bytes.
    file = package / "moe" / "routing.py"
    before = file.stat()
    file.write_text(file.read_text().replace("x + 1", "x + 2"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert again() != first and parsed == ["routeblock.moe.routing"]
    # A module that appears is found by a name that was remembered.
    (package / "study.py").write_text("from routeblock import later\n")
    digest._parsed.cache_clear()
    assert "routeblock.later" not in digest.import_closure(["routeblock.study"])
    digest._parsed.cache_clear()
    (package / "later.py").write_text("x = 1\n")
    assert "routeblock.later" in digest.import_closure(["routeblock.study"])
    # Half a file, or none that can be written, costs time only.
    for kept in (home / ".cache").rglob("*.json"):
        kept.write_text("{")
    assert again() and parsed
    monkeypatch.setenv("HOME", str(package / "study.py"))
    assert again() and parsed


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    for text in ("\ud800", "n\udcff"):
        with pytest.raises(InputError, match="not UTF-8"):
            digest.canonical_json({"path": text})
