# SPDX-License-Identifier: Apache-2.0
"""The chain of evidence: every rule seals what it made, and `verify` walks the seals from source to report.

A manifest lies beside the outputs of one rule and lists, by path relative to its own folder, size and SHA-256, the
outputs and the inputs they were made from. What one manifest lists as an output and another as an input links the two.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase as fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from pydantic import ValidationError

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, code_digest, sha256_bytes, sha256_file
from routeblock.evidence.files import is_temporary, writable_folder
from routeblock.evidence.manifest import SUFFIX, Entry, Manifest, absolute, parse, seal

__all__ = ["Finding", "Kind", "Repaired", "repair", "seal", "verify"]


class Kind(StrEnum):
    """Why an artifact does not fit its manifest."""

    MALFORMED_MANIFEST = "malformed manifest"
    MANIFEST_CYCLE = "manifest cycle"
    PATH_OUTSIDE = "path outside"
    LINK = "link"
    PRODUCED_TWICE = "produced twice"
    MISSING = "missing"
    RESIZED = "resized"
    EDITED = "edited"
    UNREADABLE = "unreadable"
    INPUT_DIFFERS_FROM_PRODUCER = "input differs from producer"
    INPUT_WITHOUT_PRODUCER = "input without producer"
    STALE_CODE = "stale code"
    UNKNOWN_CODE = "unknown code"
    UNSEALED_FILE = "unsealed file"


@dataclass(frozen=True)
class Finding:
    """One artifact that does not fit; `manifest` is empty for a file that no manifest lists."""

    kind: Kind
    path: Path
    manifest: Path | None
    detail: str

    def __str__(self) -> str:
        by = f" (sealed by {self.manifest})" if self.manifest and self.manifest != self.path else ""
        return f"{self.path}: {self.kind}: {self.detail}{by}"


@dataclass
class _Sealed:
    """A manifest read from disk, its paths made absolute."""

    path: Path
    size: int
    sha256: str
    manifest: Manifest
    outputs: dict[Path, Entry] = field(default_factory=dict)
    inputs: dict[Path, Entry] = field(default_factory=dict)


def verify(
    *roots: Path, check_code: bool = True, sources: Sequence[Path] = (), elsewhere: Sequence[str] = ()
) -> list[Finding]:
    """Check every manifest below `roots` on bytes; the finding nearest the source comes first, none means it holds.

    With `check_code` a manifest must carry the present digest of the modules that it names, unless its path fits a
    pattern of `elsewhere`: brought by evidence, and sealed by the code of another place. Inputs lie
    below `roots`, where another manifest must have produced them, or in `sources`: files and folders (such as
    config.yaml and fixtures) that are given and not produced. A file below `roots` that no manifest lists is a finding
    too; logs, README.md and .gitkeep need no seal. Raises `InputError` if a root is no folder or holds no file.
    """
    return _Walk(roots, sources, elsewhere).findings(check_code)


SET_ASIDE = ".set-aside"


@dataclass(frozen=True)
class Repaired:
    """What a repair did: sealed files removed, others moved (from, to), and given inputs that are not as they were."""

    removed: list[Path]
    moved: list[tuple[Path, Path]]
    given: list[Finding]


def repair(*roots: Path, sources: Sequence[Path] = (), elsewhere: Sequence[str] = ()) -> Repaired:
    """Take away what does not fit and everything made from it, so that the workflow makes it again.

    A sealed file is removed, and with it all that its rule made there. What no manifest lists (notes, a folder that
    stands where a file belongs) is moved to `{root}.set-aside`, and nothing of it is lost; but what a killed process
    left of an atomic write is removed. A link is removed, its target stays. Given inputs are left as they are. Raises
    `InputError` as `verify` does.
    """
    walk = _Walk(roots, sources, elsewhere)
    for root in roots:
        writable_folder(root)
    found = walk.findings(check_code=True)
    lost = walk.lost(found)
    leftovers = {p for p in walk.files if any(is_temporary(part) for part in p.parts)}
    removed = sorted(p for p in lost | leftovers | set(walk.links) if p.is_symlink() or p.is_file())
    for path in removed:
        path.unlink()
    for root in walk.roots:
        for folder in [Path(at, name) for at, below, _ in os.walk(root) for name in below if is_temporary(name)]:
            _remove_empty(folder)
    moved = []
    loose = [absolute(f.path) for f in found if f.kind is Kind.UNSEALED_FILE]
    in_the_way = [p for p in sorted(lost) if p.is_dir()]
    for path in [*in_the_way, *sorted(loose)]:
        if path.exists() and not _remove_empty(path):
            moved.append((walk.show(path), walk.show(_set_aside(path, walk.roots))))
    given = [f for f in found if any(absolute(f.path).is_relative_to(source) for source in walk.sources)]
    return Repaired([walk.show(p) for p in removed], moved, given)


def _remove_empty(folder: Path) -> bool:
    """Remove a folder that holds no file; whether it did."""
    if not folder.is_dir() or folder.is_symlink() or any(_walk(folder)):
        return False
    shutil.rmtree(folder)
    return True


def _set_aside(path: Path, roots: Sequence[Path]) -> Path:
    root = next(r for r in roots if path.is_relative_to(r))
    target = root.with_name(root.name + SET_ASIDE) / path.relative_to(root)
    number = 1
    while os.path.lexists(target):  # of an earlier repair
        number += 1
        target = target.with_name(f"{path.name}.{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
    return target


def _nothing_at(root: Path, what: str) -> InputError:
    return InputError(
        what, where=str(root), limit="verify needs a folder of sealed results", way_out="run make study first"
    )


class _Walk:
    def __init__(self, roots: Sequence[Path], sources: Sequence[Path], elsewhere: Sequence[str] = ()) -> None:
        self.elsewhere = elsewhere
        self.code: dict[tuple[str, ...], str] = {}
        self.shown = {absolute(r): r for r in [*roots, *sources]}
        for root in roots:
            if not root.is_dir():
                raise _nothing_at(root, "no such folder")
        self.roots = [absolute(r) for r in roots]
        self.sources = [absolute(s) for s in sources]
        self.files = sorted({p for r in self.roots for p in _walk(r)})
        if not self.files:
            raise _nothing_at(roots[0], "nothing there")
        self.unplaced: list[Finding] = []
        self.links = [p for p in self.files if p.is_symlink() and (_is_manifest(p) or self._needs_seal(p))]
        self.sealed = [s for p in self.files if _is_manifest(p) and (s := self._read(p))]
        self.producer: dict[Path, _Sealed] = {s.path: s for s in self.sealed}
        self._link()
        self.unplaced[:0] = [self._of_link(p) for p in self.links]

    def show(self, path: Path) -> Path:
        """The path as the caller would write it."""
        for whole, given in self.shown.items():
            if path.is_relative_to(whole):
                return given / path.relative_to(whole)
        return path

    def finding(self, kind: Kind, path: Path, sealed: Path | None, detail: str) -> Finding:
        return Finding(kind, self.show(path), sealed and self.show(sealed), detail)

    def _of_link(self, path: Path) -> Finding:
        made = path if _is_manifest(path) else self.producer[path].path if path in self.producer else None
        return self.finding(Kind.LINK, path, made, f"a link to {path.readlink()}, where a result belongs")

    def _read(self, path: Path) -> _Sealed | None:
        try:
            if not path.is_file():
                raise ValueError("not a file")
            data = path.read_bytes()
            manifest = parse(data)
            if canonical_json(json.loads(data)) != data:
                raise ValueError("not canonical JSON")
        except UNREADABLE as e:
            self.unplaced.append(self.finding(Kind.MALFORMED_MANIFEST, path, path, _first_line(e)))
            return None
        return _Sealed(path, len(data), sha256_bytes(data), manifest)

    def _link(self) -> None:
        """Place every entry of every manifest, and note who produced what."""
        for s in self.sealed:
            home = s.path.parent
            for entries, placed, allowed in (
                (s.manifest.outputs, s.outputs, [home]),
                (s.manifest.inputs, s.inputs, [*self.roots, *self.sources]),
            ):
                for entry in entries:
                    target = _place(home, entry.path, allowed)
                    if target is None:
                        where = "the manifest's folder" if placed is s.outputs else "the results and their sources"
                        detail = f"lists {entry.path!r}, outside {where}"
                        self.unplaced.append(self.finding(Kind.PATH_OUTSIDE, s.path, s.path, detail))
                    elif target in placed:
                        detail = f"lists {entry.path!r} twice"
                        self.unplaced.append(self.finding(Kind.MALFORMED_MANIFEST, s.path, s.path, detail))
                    else:
                        placed[target] = entry
            for target in s.outputs:
                other = self.producer.setdefault(target, s)
                if other is not s:
                    detail = f"also sealed by {self.show(other.path)}"
                    self.unplaced.append(self.finding(Kind.PRODUCED_TWICE, target, s.path, detail))

    def _order(self) -> list[_Sealed]:
        """Manifests with producers before consumers, path order where both orders would do."""
        by_path = {s.path: s for s in self.sealed}
        graph = {s.path: {self.producer[p].path for p in s.inputs if p in self.producer} for s in self.sealed}
        sorter = TopologicalSorter(graph)
        try:
            sorter.prepare()
        except CycleError as e:
            cycle = sorted(set(e.args[1]))
            names = ", ".join(str(self.show(p)) for p in cycle)
            self.unplaced.append(self.finding(Kind.MANIFEST_CYCLE, cycle[0], cycle[0], f"each needs the next: {names}"))
            return self.sealed
        order: list[_Sealed] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            order.extend(by_path[p] for p in ready)
            sorter.done(*ready)
        return order

    def _needs_seal(self, path: Path) -> bool:
        # Logs and what the repository keeps there are no results; they have no place among these.
        at = path.relative_to(next(r for r in self.roots if path.is_relative_to(r))).parts
        return not (_is_manifest(path) or at[0] == "logs" or at in {("README.md",), (".gitkeep",)})

    def lost(self, found: Sequence[Finding]) -> set[Path]:
        """What has to be made again: what does not fit, what else its rule made there, and what was made from that."""
        unfit = {absolute(f.manifest) for f in found if f.manifest}
        # Made, as a manifest says, but unsealed.
        lost = {absolute(f.path) for f in found if f.kind is Kind.INPUT_WITHOUT_PRODUCER}
        lost -= {p for p in lost if any(p.is_relative_to(source) for source in self.sources)}
        jobs: dict[tuple[Path, str, bytes], set[Path]] = {}
        for s in self.sealed:
            # One process may write several manifests: it runs again if it has to for one of them.
            job = (s.path.parent, s.manifest.rule, canonical_json(s.manifest.parameters))
            jobs.setdefault(job, set()).add(s.path)
        together = {path: job for job in jobs.values() for path in job}
        grown = True
        while grown:  # a workflow that finds a final result in place does not miss what it was made from
            unfit |= {other for path in unfit for other in together.get(path, ())}
            lost |= {p for s in self.sealed if s.path in unfit for p in [s.path, *s.outputs]} | unfit
            more = {s.path for s in self.sealed if self._is_hit(s, lost)} - unfit
            unfit |= more
            grown = bool(more)
        return lost

    def _is_hit(self, s: _Sealed, lost: set[Path]) -> bool:
        # Through a link is not from what the workflow made, wherever the link leads.
        return bool(lost & s.inputs.keys()) or any(
            p.is_relative_to(link) for link in self.links for p in [*s.inputs, *s.outputs]
        )

    def findings(self, check_code: bool) -> list[Finding]:
        order = self._order()
        given = {p for s in order for p in s.inputs if p not in self.producer}
        with ThreadPoolExecutor() as pool:
            todo = sorted(given | {p for s in order for p in s.outputs})
            found = dict(zip(todo, pool.map(_measure, todo), strict=True))
        placed: list[Finding] = []
        for s in order:
            placed += self._check(s, found)
            placed += self._check_code(s) if check_code else ()
        loose = [p for p in self.files if p not in self.producer and p not in self.links and self._needs_seal(p)]
        placed += [self.finding(Kind.UNSEALED_FILE, p, None, "no manifest lists it") for p in loose]
        first: dict[Path, Finding] = {}
        for f in [*self.unplaced, *placed]:
            first.setdefault(f.path, f)
        return list(first.values())

    def _check(self, s: _Sealed, found: Mapping[Path, tuple[int, str] | OSError]) -> Iterator[Finding]:
        for path, entry in s.inputs.items():
            producer = self.producer.get(path)
            if producer is None:
                yield from self._compare(path, entry, found[path], s, "read as an input, ")
                if not any(path.is_relative_to(source) for source in self.sources):
                    yield self.finding(Kind.INPUT_WITHOUT_PRODUCER, path, s.path, "an input that no manifest produces")
                continue
            made = producer if path == producer.path else producer.outputs[path]
            if (made.size, made.sha256) != (entry.size, entry.sha256):
                detail = f"made from {entry.sha256[:16]} of {self.show(path)}, whose producer sealed {made.sha256[:16]}"
                yield self.finding(Kind.INPUT_DIFFERS_FROM_PRODUCER, s.path, s.path, detail)
        for path, entry in s.outputs.items():
            yield from self._compare(path, entry, found[path], s, "")

    def _check_code(self, s: _Sealed) -> Iterator[Finding]:
        if any(fnmatch(s.path.as_posix(), pattern) for pattern in self.elsewhere):
            return
        modules = s.manifest.modules
        if modules not in self.code:
            with suppress(ModuleNotFoundError):
                self.code[modules] = code_digest(*modules)
        now = self.code.get(modules) if modules else None
        if now is None:
            detail = f"made by {', '.join(modules) or 'no module'}, which this package does not have"
            yield self.finding(Kind.UNKNOWN_CODE, s.path, s.path, detail)
        elif now != s.manifest.code:
            detail = f"made by code {s.manifest.code[:16]} of rule {s.manifest.rule}, which is now {now[:16]}"
            yield self.finding(Kind.STALE_CODE, s.path, s.path, detail)

    def _compare(
        self, path: Path, entry: Entry, found: tuple[int, str] | OSError, s: _Sealed, role: str
    ) -> Iterator[Finding]:
        if isinstance(found, OSError):
            absent = isinstance(found, FileNotFoundError)
            kind, detail = (Kind.MISSING, "no such file") if absent else (Kind.UNREADABLE, _first_line(found))
            yield self.finding(kind, path, s.path, role + detail)
        elif found[0] != entry.size:
            yield self.finding(Kind.RESIZED, path, s.path, f"{role}{found[0]} bytes, sealed with {entry.size}")
        elif found[1] != entry.sha256:
            detail = f"{role}SHA-256 {found[1][:16]}, sealed with {entry.sha256[:16]}"
            yield self.finding(Kind.EDITED, path, s.path, detail)


def _walk(root: Path) -> Iterator[Path]:
    """Every file below `root`, every link, which is not followed, and every folder that is named as a manifest."""
    for folder, folders, names in os.walk(root):
        for name in names:
            yield Path(folder, name)
        for name in folders:
            if (path := Path(folder, name)).is_symlink() or _is_manifest(path):
                yield path


def _is_manifest(path: Path) -> bool:
    return path.name.endswith(SUFFIX)


def _place(home: Path, relative: str, allowed: Sequence[Path]) -> Path | None:
    """The file that a manifest in `home` means, or None if it, or a link on the way to it, leaves `allowed`."""
    if relative.startswith("/") or "\\" in relative or "\0" in relative:
        return None
    target = absolute(home / relative)
    real = Path(os.path.realpath(target))
    inside = any(target.is_relative_to(a) and real.is_relative_to(os.path.realpath(a)) for a in allowed)
    return target if inside else None


def _measure(path: Path) -> tuple[int, str] | OSError:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("a folder, not a file" if stat.S_ISDIR(status.st_mode) else "not a file")
        return status.st_size, sha256_file(path)
    except OSError as e:
        return e


def _first_line(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        detail = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}".lstrip(": ")
    return str(error).splitlines()[0] if str(error) else type(error).__name__
