# SPDX-License-Identifier: Apache-2.0
"""Environments and identities, from the documents at the ends of the manifests' chain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import sha256_bytes
from routeblock.report.lineage import File, Lineage, Seal

Document = Mapping[str, Any]

# Of a run's environment, what names hardware and software, in this order; the rest of it follows by name.
FIRST_RECORD = "/native/H0/rep1/record.json"
ENVIRONMENT_FIRST = ("gpu", "compute_capability", "sms", "driver", "cuda", "torch", "vllm", "extension")


@dataclass(frozen=True)
class Fact:
    """A fact with the file that says it."""

    name: str
    value: str
    source: File


@dataclass(frozen=True)
class Group:
    """Facts about one thing, or about several of which they are true alike."""

    kind: str
    names: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def title(self) -> str:
        """The heading."""
        return f"{self.kind}: {', '.join(self.names)}" if self.names else self.kind


def environments(lineage: Lineage, environment: File) -> list[Group]:
    """The machine that built this report's results, and the machines of the runs and of recorded evidence."""
    groups = [Group("This build", (), tuple(_machine(_document(lineage, environment), environment)))]
    for name, file, record in _records(lineage):
        told = record["identity"]["environment"]
        order = [*(n for n in ENVIRONMENT_FIRST if n in told), *(n for n in sorted(told) if n not in ENVIRONMENT_FIRST)]
        groups.append(Group("Runs", (name,), tuple(Fact(n, str(told[n]), file) for n in order)))
    for file in lineage.given:
        if file.path.endswith("/evidence.json"):
            for name, group in sorted(_document(lineage, file)["groups"].items()):
                groups.append(
                    Group("Hosts of recorded runs", (name,), tuple(_machine(group["machine"]["environment"], file)))
                )
    for rule, kind in (("recorded_alignment", "Recorded cost of alignment"), ("recorded", "Recorded study B")):
        for file in lineage.files(rule, "run.json"):
            device = tuple(part for part in file.path.split("/") if part.startswith("gpu"))
            groups.append(Group(kind, device, tuple(_device(_document(lineage, file), file))))
    return _once(groups)


def identities(lineage: Lineage) -> list[Group]:
    """What went in: fixtures with the digests of weights, inputs and plans; launches, plans and code of each study."""
    groups = []
    for file in (f for rule in ("fixture", "checkpoint_fixture") for f in lineage.files(rule, "fixture.json")):
        told = _document(lineage, file)
        facts = [Fact("fixture.json", file.sha256, file)]
        facts += [Fact(name, str(digest), file) for name, digest in sorted(told["digests"].items())]
        shape = ("tokens", "top_k", "num_experts", "hidden", "intermediate", "block_size", "group_size", "dtype")
        facts.append(Fact("shape", ", ".join(f"{name} {told[name]}" for name in shape if name in told), file))
        facts.append(Fact("kind", str(told["kind"]), file))
        facts += [Fact(f"source: {name}", str(value), file) for name, value in sorted(told["source"].items())]
        exchange = told["exchange"]
        pairs = [f"{n} {' and '.join(map(str, exchange[n]))}" for n in ("across", "within") if exchange.get(n)]
        chosen = [str(exchange[n]) for n in ("chosen", "from", "why") if exchange.get(n)]
        facts.append(Fact("exchange pairs", "; ".join((", ".join(pairs) or "none", *chosen)), file))
        groups.append(Group("Fixture", (told["name"],), tuple(facts)))
    records = {name: (file, record) for name, file, record in _records(lineage)}
    for name, (file, record) in records.items():
        inputs = tuple(Fact(n, digest, file) for n, digest in sorted(record["inputs"].items()))
        groups.append(Group("What the runs read, by their own hashes", (name,), inputs))
    for name, score, told in _scores(lineage):
        plans = {a["history"]: a["fingerprint"] for a in told["arms"] if a["cell"] == "replay"}
        facts = [Fact(f"plan {history}", digest, score) for history, digest in sorted(plans.items())]
        facts += [Fact("prediction", told["prediction"], score), Fact("runs scored", str(len(told["runs"])), score)]
        if name in records:
            file, record = records[name]
            grids = sorted(record["grid"].items())
            launch = ", ".join(f"{gemm} ({g['thread_k']}, {g['thread_n']}) on {g['launched']}" for gemm, g in grids)
            facts.append(Fact("launch of native", launch, file))
            facts += [Fact(f"{n} of the runs", record["identity"][n], file) for n in ("source", "binary")]
        groups.append(Group("Study", (name,), tuple(facts)))
    return _once(groups)


def _scores(lineage: Lineage) -> list[tuple[str, File, Document]]:
    """Every study's name with its score."""
    found = []
    for file in lineage.files("score", "score.json"):
        told = _document(lineage, file)
        found.append((" ".join(told[name] for name in ("lane", "point", "plan_source")), file, told))
    return found


def _records(lineage: Lineage) -> list[tuple[str, File, Document]]:
    """One record a study, with the study's name: the scorer demands that identities are alike within one."""
    found = []
    for name, score, _ in _scores(lineage):
        inputs = lineage.by_output[score.path].inputs
        record = next((f for f in inputs if f.path.endswith(FIRST_RECORD)), None)
        if record is not None:
            found.append((name, record, _document(lineage, record)))
    return found


def _machine(told: Document, file: File) -> list[Fact]:
    system, cpu = told["system"], told["cpu"]
    facts = [
        Fact("Python", f"{told['python']} ({told['implementation']})", file),
        Fact("system", " ".join(filter(None, (system["name"], system["release"], system["libc"]))), file),
        Fact("CPU", f"{cpu['model']}, {cpu['machine']}, {cpu['count']} logical; {' '.join(cpu['flags'])}", file),
    ]
    packages = ", ".join(f"{name} {version}" for name, version in sorted(told["packages"].items()) if version)
    absent = ", ".join(name for name, version in sorted(told["packages"].items()) if not version)
    facts.append(Fact("packages", packages, file))
    return [*facts, *([Fact("not installed", absent, file)] if absent else [])]


def _device(told: Document, file: File) -> list[Fact]:
    device = told["device"]
    names = ("name", "architecture", "multiprocessors", "memory_bytes", "power_limit_mw", "driver", "cuda")
    facts = [Fact(n.replace("_", " "), str(device[n]), file) for n in names if n in device]
    packages = ", ".join(f"{name} {version}" for name, version in sorted(device.get("packages", {}).items()))
    facts += [Fact("packages", packages, file)] if packages else []
    binary = told.get("cubin_sha256") or device.get("cubin_sha256")
    facts += [Fact("kernels", str(binary), file)] if binary else []
    if extension := told.get("extension"):
        facts.append(Fact("extension", f"{extension['file']} {extension.get('sha256', '')}".strip(), file))
    return facts


def _once(groups: list[Group]) -> list[Group]:
    """Groups of one kind with the same facts become one with all their names."""
    merged: dict[tuple[str, tuple[tuple[str, str], ...]], Group] = {}
    for group in groups:
        key = group.kind, tuple((f.name, f.value) for f in group.facts)
        known = merged.setdefault(key, group)
        merged[key] = Group(group.kind, tuple(dict.fromkeys((*known.names, *group.names))), known.facts)
    return list(merged.values())


def _document(lineage: Lineage, file: File) -> Document:
    """A document of the lineage, only if its bytes are the sealed ones."""
    path = lineage.locate(file)
    try:
        data = path.read_bytes()
        told = json.loads(data)
        if sha256_bytes(data) != file.sha256 or not isinstance(told, dict):
            raise ValueError("it is not the document that was sealed")
    except UNREADABLE as e:
        raise InputError(
            f"not readable: {e}", where=str(path), limit="a document of the study", way_out="run make repair"
        ) from e
    return told


def rules(lineage: Lineage) -> list[tuple[str, list[Seal]]]:
    """The seals by rule, producers before consumers."""
    found: dict[str, list[Seal]] = {}
    for seal in lineage.seals:
        found.setdefault(seal.rule, []).append(seal)
    return list(found.items())
