# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to cubins with NVRTC from a pip wheel, on machines with or without a GPU.

A cubin's bytes do not depend on the folder or the run, so its SHA-256 is the binary identity of what ran.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_bytes

# Where the wheels put the library, and the wheel, newest first. CUDA 13 no longer compiles for sm_70.
_WHEELS = (
    ("cu13/lib/libnvrtc.so.13", "nvidia-cuda-nvrtc"),
    ("cuda_nvrtc/lib/libnvrtc.so.12", "nvidia-cuda-nvrtc-cu12"),
)
# A floating-point expression is rounded as it is written: no multiply-add is fused behind our back.
OPTIONS = ("--std=c++17", "--fmad=false")
_EM_CUDA = 190


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and what made it."""

    architecture: str
    code: bytes
    nvrtc: str
    options: tuple[str, ...]
    log: str

    @property
    def sha256(self) -> str:
        return sha256_bytes(self.code)


class Nvrtc:
    """An NVRTC library. Raises InputError if the file at `path` cannot be loaded as one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # NVRTC looks the builtins up by name: they must already be loaded, for all to see.
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            self._lib = ctypes.CDLL(str(path))
            self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as e:
            raise InputError(
                f"not an NVRTC library: {e}",
                where=str(path),
                limit="libnvrtc and its builtins must lie in one folder",
                way_out="install envs/cuda13.txt or, for sm_70, envs/cuda12.txt",
            ) from e

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {self._lib.nvrtcGetErrorString(status).decode()}")

    @cached_property
    def version(self) -> str:
        """The wheel's version where the wheel is known, else major.minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        short = f"{major.value}.{minor.value}"
        for folder in self.path.parents:
            for wheel in importlib.metadata.distributions(path=[str(folder)]):
                name, version = wheel.metadata["Name"], wheel.version
                if name in dict(_WHEELS).values() and version.startswith(f"{short}."):
                    return version
        return short

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        """The real architectures that it compiles for, ascending: sm_75, sm_80, ..."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(f"sm_{n}" for n in numbers)

    def compile(self, source: Path, architecture: str, includes: Sequence[Path] = ()) -> Cubin:
        """Compile `source` for `architecture`; `includes` are headers, found by their file name.

        Raises InputError if this NVRTC does not know the architecture or the source does not compile.
        """
        if architecture not in self.architectures:
            raise InputError(
                f"NVRTC {self.version} does not compile for {architecture}",
                where=str(self.path),
                limit=f"it knows {', '.join(self.architectures)}",
                way_out="take another architecture, or envs/cuda12.txt for sm_70",
            )
        options = (f"--gpu-architecture={architecture}", *OPTIONS)
        program = ctypes.c_void_p()
        headers = [path.read_bytes() for path in includes]
        names = [path.name.encode() for path in includes]
        array = ctypes.c_char_p * len(headers)
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            array(*headers),
            array(*names),
        )
        try:
            raw = [option.encode() for option in options]
            status = self._lib.nvrtcCompileProgram(program, len(raw), (ctypes.c_char_p * len(raw))(*raw))
            log = " ".join(self._text(program, "nvrtcGetProgramLog").split())
            if status:
                raise InputError(
                    log[:500],
                    where=source.name,
                    limit=f"NVRTC {self.version} must compile it for {architecture}",
                    way_out="correct the source",
                )
            return Cubin(architecture, self._bytes(program, "nvrtcGetCUBIN"), self.version, options, log)
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(getter, program, buffer)
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, getter: str) -> str:
        return self._bytes(program, getter).rstrip(b"\0").decode(errors="replace")


def installed(site_packages: Iterable[Path] | None = None) -> list[Path]:
    """NVRTC libraries of wheels, newest first, in this interpreter's environment or in the given site-packages."""
    if site_packages is None:
        spec = importlib.util.find_spec("nvidia")
        roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    else:
        roots = [Path(p) / "nvidia" for p in site_packages]
    return [root / name for name, _ in _WHEELS for root in roots if (root / name).is_file()]


def for_architecture(architecture: str, libraries: Sequence[Path] | None = None) -> Nvrtc:
    """The newest of `libraries` (default: the installed ones) that compiles for `architecture`.

    Raises InputError if there is none.
    """
    libraries = installed() if libraries is None else libraries
    known: list[str] = []
    for path in libraries:
        nvrtc = Nvrtc(path)
        if architecture in nvrtc.architectures:
            return nvrtc
        known += [a for a in nvrtc.architectures if a not in known]
    raise InputError(
        f"no NVRTC here compiles for {architecture}",
        where="NVRTC",
        limit=f"{len(libraries)} found" + (f", which know {', '.join(known)}" if known else ""),
        way_out="pip install -r envs/cuda12.txt for sm_70, envs/cuda13.txt for newer, in an environment of its own",
    )


def cubin_architecture(code: bytes) -> str:
    """The architecture that a cubin was made for, from its ELF header. Raises InputError if it is no cubin."""
    if len(code) < 64 or code[:4] != b"\x7fELF" or struct.unpack_from("<H", code, 18)[0] != _EM_CUDA:
        raise InputError(
            "not a cubin",
            where="cubin",
            limit="an ELF file of machine type CUDA is needed",
            way_out="build it again: routeblock gpu build-kernels",
        )
    (flags,) = struct.unpack_from("<I", code, 48)
    # The ELF ABI that came with CUDA 13 moved the number from the lowest byte to the next.
    number = flags & 0xFF if code[8] < 8 else flags >> 8 & 0xFF
    return f"sm_{number}"
