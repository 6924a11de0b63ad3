# SPDX-License-Identifier: Apache-2.0
"""What config.json says about quantisation, decided for each Linear as the tools that write it mean it.

Facts. AutoAWQ and vLLM take an entry of modules_to_not_convert for a part of a module's path, so writers end it with a
dot (`model.layers.1.`) where `model.layers.10` is not meant. compressed-tensors matches `ignore` and a group's
`targets` against a Linear's whole name, as a pattern from its start (`re:`), or against its class; an exact name counts
before a pattern and a pattern before a class. GPTQModel writes AWQ with `dynamic`: patterns by which Linears are left
out (`-:`) or stored otherwise. AutoRound writes AWQ's packing as packing_format, with exceptions in `extra_config`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

from routeblock.errors import InputError

CLASSES = ("Linear",)  # what a target or an ignored entry may call every expert's projection
UNQUANTISED_BITS = 16
PATTERN = "re:"
# The decoder's own layers: a prefix of these words only, however often (a doubled `model.` is seen in the wild). Vision
# towers, talkers and multi-token prediction heads have others.
DECODER_PREFIX = re.compile(r"(?:(?:model|language_model|transformer|thinker)\.)*")
_DECODER_LAYER = re.compile(rf"{DECODER_PREFIX.pattern}(?=layers\.)")
# Python's patterns have no limit of time: a repeated group that repeats something itself, or many repeats in a row, can
# take longer than anyone waits.
_QUANTIFIER = re.compile(r"[^\\][*+{]|\\.[*+{]")
PATTERN_LENGTH, PATTERN_QUANTIFIERS = 500, 5
_STORED_TOGETHER = re.compile(r"\.experts\.(?P<expert>(?:\d+\.)?)(?P<name>gate_up_proj|(?<=experts\.)\w+)$")

Refuse = Callable[..., InputError]
_OTHER = "choose a checkpoint quantised that way"


class Container(StrEnum):
    """How packed tensors are stored. Of GPTQ's the settings are read and no tensors."""

    AWQ = "awq"
    COMPRESSED = "compressed-tensors"
    GPTQ = "gptq"


@dataclass(frozen=True)
class Scheme:
    """4-bit weights in groups of `group_size` rows of K (-1: one scale per column), with zero points or the fixed 8."""

    group_size: int
    zero_points: bool


@dataclass(frozen=True)
class Unread:
    """A scheme of which nothing is read: what it is, the limit and the way out."""

    what: str
    limit: str
    way_out: str


def bare(module: str) -> str:
    """A module's path without the decoder's prefix, which tools spell differently."""
    return _DECODER_LAYER.sub("", module, count=1)


def _spellings(module: str) -> Iterable[str]:
    """A Linear's name, and the names that it had while fused or stacked experts were modules of their own."""
    match = _STORED_TOGETHER.search(module)
    if not match:
        return (module,)
    start = module[: match.start()]
    numbers = (match["expert"],) if match["expert"] else ("", "0.")
    names = (match["name"], "gate_proj") if match["name"] == "gate_up_proj" else (match["name"],)
    return [f"{start}.experts.{number}{name}" for number in numbers for name in names]


@dataclass(frozen=True)
class Names:
    """Entries that name modules. `parts`: an entry also names every module whose path has it as whole components."""

    entries: tuple[str, ...]
    parts: bool = True

    @cached_property
    def _plain(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in self.entries:
            if not entry.startswith(PATTERN) and (path := bare(entry.strip("."))):
                found.setdefault(path, entry)
        return found

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({path.count(".") + 1 for path in self._plain})

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(re.compile(e.removeprefix(PATTERN)), e) for e in self.entries if e.startswith(PATTERN)]

    def find(self, module: str) -> tuple[int, str] | None:
        """How closely an entry names a Linear (0 its name, 1 a pattern, 2 its class), and the closest one; or None."""
        return min((match for name in _spellings(module) if (match := self._find(name))), default=None)

    def _find(self, module: str) -> tuple[int, str] | None:
        path = bare(module)
        if path in self._plain:
            return 0, self._plain[path]
        words = path.split(".")
        for length in self._lengths if self.parts else ():
            for start in range(len(words) - length + 1):
                if (entry := self._plain.get(".".join(words[start : start + length]))) is not None:
                    return 0, entry
        for pattern, entry in self._patterns:
            if any(pattern.match(name) for name in dict.fromkeys((module, path, f"model.{path}"))):
                return 1, entry
        return next(((2, e) for e in self.entries if e in CLASSES), None)


@dataclass(frozen=True)
class Group:
    """Linears of one scheme, those that `targets` name."""

    name: str
    targets: Names
    scheme: Scheme | Unread | None  # None: not quantised


@dataclass(frozen=True)
class Quantization:
    """The experts' scheme, and which Linears have it."""

    container: Container
    group_size: int
    zero_points: bool
    key: str = "modules_to_not_convert"
    skipped: Names = Names(())
    groups: tuple[Group, ...] = ()
    symmetric: str = "zero_point to false"  # the setting that says that there are no zero points
    _reasons: dict[str, str | None] = field(default_factory=dict, compare=False, repr=False)

    def why_plain(self, module: str) -> str | None:
        """Why a Linear is not quantised, or None: it is."""
        if module not in self._reasons:
            self._reasons[module] = self._why_plain(module)
        return self._reasons[module]

    def _why_plain(self, module: str) -> str | None:
        found = self.skipped.find(module)
        if found:
            return f"{self.key} lists {found[1]!r}"
        if not self.groups:
            return None
        group = group_of(self.groups, module)
        if group is None:
            return f"no target of config_groups reaches it ({_targets(self.groups)[:80]})"
        return f"{group.name} leaves it out" if group.scheme is None else None


def group_of(groups: Iterable[Group], module: str) -> Group | None:
    """The group whose targets name a Linear most closely, the first of equals; None if there is none."""
    found = [(match[0], g) for g in groups if (match := g.targets.find(module))]
    return min(found, key=lambda m: m[0])[1] if found else None


def _targets(groups: Iterable[Group]) -> str:
    return ", ".join(t for g in groups for t in g.targets.entries)


def read_quantization(
    settings: Mapping[str, Any], modules: Sequence[str], refuse: Refuse, *, tensors: bool = True
) -> Quantization:
    """How the experts' Linears `modules` are quantised, by `quantization_config`. `tensors`: they are to be read, which
    leaves out GPTQ's.

    `refuse` makes the error that names the file. Raises InputError for a method or scheme that is not read, and if the
    experts have several schemes or none.
    """
    match settings.get("quant_method"):
        case "awq":
            return _awq(settings, modules, refuse)
        case "auto-round" | "intel/auto-round":
            return _autoround(settings, modules, refuse)
        case "compressed-tensors":
            return _compressed(settings, modules, refuse)
        case "gptq" | "gptq_marlin" if not tensors:
            return _gptq(settings, modules, refuse)
        case method:
            raise refuse(f"quant_method {method!r}", "awq, auto-round and compressed-tensors are read")


def _settled(
    container: Container, key: str, skipped: Names, groups: Sequence[Group], modules: Sequence[str], refuse: Refuse
) -> Quantization:
    """The one scheme that the experts have."""
    found: dict[Scheme | Unread, str] = {}
    for module in modules:
        if skipped.find(module):
            continue
        group = group_of(groups, module)
        if group is not None and group.scheme is not None:
            found.setdefault(group.scheme, module)
    for scheme in found:
        if isinstance(scheme, Unread):
            raise refuse(scheme.what, scheme.limit, scheme.way_out)
    for (one, first), (other, second) in pairwise((s, m) for s, m in found.items() if isinstance(s, Scheme)):
        raise refuse(f"{first} has {_text(one)}, {second} has {_text(other)}", "all experts need one scheme")
    schemes = [s for s in found if isinstance(s, Scheme)]
    if not schemes:
        targets = _targets(g for g in groups if g.scheme is not None)
        raise refuse(
            f"no expert is quantised: {key} and the targets ({targets[:120]}) leave all out",
            "the study needs packed 4-bit experts",
        )
    return Quantization(container, schemes[0].group_size, schemes[0].zero_points, key, skipped, tuple(groups))


def _text(scheme: Scheme) -> str:
    return f"group size {scheme.group_size}, {'zero points' if scheme.zero_points else 'symmetric'}"


def _group_size(value: Any, refuse: Refuse) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or (value >= 16 and value % 16 == 0)):
        raise refuse(f"group size {value!r}", "a multiple of 16, or -1 for one scale per column")
    return value


def _names(value: Any, key: str, refuse: Refuse) -> tuple[str, ...]:
    """A list of names and patterns; InputError for anything else, or an invalid pattern."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise refuse(f"{key} is {value!r}"[:120], "a list of module paths is needed", "check config.json")
    for entry in value:
        if entry.startswith(PATTERN):
            _pattern(entry.removeprefix(PATTERN), f"{key} entry {entry!r}", refuse)
    return tuple(value)


def _pattern(text: str, what: str, refuse: Refuse) -> None:
    quantifiers = _QUANTIFIER.findall(text)
    if len(text) > PATTERN_LENGTH or len(quantifiers) > PATTERN_QUANTIFIERS or any(q[0] == ")" for q in quantifiers):
        limit = f"at most {PATTERN_LENGTH} characters, {PATTERN_QUANTIFIERS} of * + {{}}, none of a group"
        raise refuse(f"{what[:120]} may take for ever to match", limit, "write it as several, or as names")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as e:
        raise refuse(
            f"{what} is not a valid pattern: {e}", "a regular expression is needed", "check config.json"
        ) from e


def _flag(settings: Mapping[str, Any], key: str, default: bool, refuse: Refuse) -> bool:
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise refuse(f"{key} {value!r}", "true or false is needed", "check config.json")
    return value


def _mapping(settings: Mapping[str, Any], key: str, refuse: Refuse) -> dict[str, Mapping[str, Any]]:
    value = settings.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(v, dict) or v is None for v in value.values()):
        raise refuse(f"{key} is {value!r}"[:120], "a mapping of names to settings is needed", "check config.json")
    return {name: v or {} for name, v in value.items()}


def _awq(settings: Mapping[str, Any], modules: Sequence[str], refuse: Refuse) -> Quantization:
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version") or settings.get("format") or settings.get("checkpoint_format") or "gemm")
    if version.lower() != "gemm":
        raise refuse(f"version {version!r}", "the gemm packing is read")
    base = {
        "bits": bits,
        "group_size": settings.get("group_size", settings.get("q_group_size")),
        "zero_point": _flag(settings, "zero_point", True, refuse),
    }
    key = "modules_to_not_convert"
    # Entries are paths, never patterns, so one that begins with `re:` names nothing.
    skipped = tuple(e for e in _names(settings.get(key), key, refuse) if not e.startswith(PATTERN))
    groups = [*_dynamic(settings, lambda change: _awq_scheme({**base, **change}, refuse), refuse)]
    groups.append(Group("every Linear", Names(CLASSES), _awq_scheme(base, refuse)))
    return _settled(Container.AWQ, key, Names(skipped), groups, modules, refuse)


def _dynamic(
    settings: Mapping[str, Any], scheme: Callable[[Mapping[str, Any]], Scheme | Unread | None], refuse: Refuse
) -> Iterator[Group]:
    """The Linears that GPTQModel's `dynamic` leaves out (-:) or stores otherwise (+:)."""
    for name, change in _mapping(settings, "dynamic", refuse).items():
        text = name.removeprefix("-:").removeprefix("+:")
        _pattern(text, f"dynamic entry {name!r}", refuse)
        yield Group(f"dynamic {name!r}", Names((PATTERN + text,)), None if name.startswith("-:") else scheme(change))


def _gptq(settings: Mapping[str, Any], modules: Sequence[str], refuse: Refuse) -> Quantization:
    base = {name: settings.get(name) for name in ("bits", "group_size")}
    base["sym"], base["desc_act"] = _flag(settings, "sym", True, refuse), _flag(settings, "desc_act", False, refuse)
    groups = [*_dynamic(settings, lambda change: _gptq_scheme({**base, **change}, refuse), refuse)]
    groups.append(Group("every Linear", Names(CLASSES), _gptq_scheme(base, refuse)))
    return _settled(Container.GPTQ, "dynamic", Names(()), groups, modules, refuse)


def _gptq_scheme(settings: Mapping[str, Any], refuse: Refuse) -> Scheme | Unread | None:
    if settings["sym"] is not True:
        return Unread("sym false", "vLLM's Marlin takes GPTQ's weights with the fixed zero point alone", _OTHER)
    if settings["desc_act"] and settings["group_size"] != -1:
        return Unread("desc_act true", "columns in their own order are modelled", _OTHER)
    return _awq_scheme({**settings, "zero_point": False}, refuse)


def _awq_scheme(settings: Mapping[str, Any], refuse: Refuse) -> Scheme | Unread | None:
    bits = settings["bits"]
    if isinstance(bits, int) and bits >= UNQUANTISED_BITS:
        return None
    if bits != 4 or isinstance(bits, bool):
        return Unread(f"bits {bits!r}", "4-bit weights are read", _OTHER)
    return Scheme(_group_size(settings["group_size"], refuse), settings["zero_point"])


def _autoround(settings: Mapping[str, Any], modules: Sequence[str], refuse: Refuse) -> Quantization:
    packing = settings.get("packing_format") or settings.get("backend")
    if packing != "auto_round:auto_awq":
        raise refuse(f"packing_format {packing!r}", "of AutoRound's packings auto_round:auto_awq is read")
    if settings.get("data_type", "int") != "int":
        raise refuse(f"data_type {settings['data_type']!r}", "integer weights are read")
    base = {"bits": settings.get("bits"), "group_size": settings.get("group_size")}
    base["zero_point"] = not _flag(settings, "sym", True, refuse)
    groups = []
    for name, change in _mapping(settings, "extra_config", refuse).items():
        own = dict(base, **{k: v for k, v in change.items() if k in base})
        if "sym" in change:
            own["zero_point"] = not _flag(change, "sym", True, refuse)
        groups.append(Group(f"extra_config {name!r}", Names((name,)), _awq_scheme(own, refuse)))
    groups.append(Group("every Linear", Names(CLASSES), _awq_scheme(base, refuse)))
    key = "modules_to_not_convert"
    found = _settled(Container.AWQ, key, Names(_names(settings.get(key), key, refuse)), groups, modules, refuse)
    return replace(found, symmetric="sym to true")


# What a transform does to activations is computed when the model runs; elsewhere it is merged into the weights.
_ONLINE = ("input", "output")


def _compressed(settings: Mapping[str, Any], modules: Sequence[str], refuse: Refuse) -> Quantization:
    named = _mapping(settings, "config_groups", refuse)
    if not named:
        raise refuse("no config_groups", "the settings of the quantised modules are needed", "check config.json")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise refuse(f"sparsity_config of format {sparsity['format']!r}", "dense weights are read")
    groups = []
    for name, group in named.items():
        targets = _names(group.get("targets"), f"targets of {name}", refuse)
        groups.append(Group(name, Names(targets, parts=False), _compressed_scheme(group, settings, refuse)))
    found = _settled(
        Container.COMPRESSED, "ignore", Names(_names(settings.get("ignore"), "ignore", refuse)), groups, modules, refuse
    )
    _no_online_transform(settings, [m for m in modules if found.why_plain(m) is None], refuse)
    return replace(found, symmetric="symmetric to true")


def _compressed_scheme(group: Mapping[str, Any], settings: Mapping[str, Any], refuse: Refuse) -> Scheme | Unread | None:
    """The scheme of one group; what is not read is refused only if an expert has it."""
    other = _OTHER
    weights = group.get("weights")
    if weights is None:
        return None
    form = group.get("format") or settings.get("format")
    if form != "pack-quantized":
        return Unread(f"format {form!r}", "pack-quantized is read", other)
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            return Unread(f"{key} are quantised", "weight-only quantisation is read", other)
    if not isinstance(weights, dict) or weights.get("num_bits") != 4 or _lower(weights.get("type", "int")) != "int":
        return Unread(f"weights {weights!r}"[:160], "4-bit integer weights are read", other)
    for key in ("dynamic", "block_structure"):
        if weights.get(key):
            return Unread(
                f"{key} {weights[key]!r} for weights"[:160], "weights quantised once, in groups, are read", other
            )
    size = weights.get("group_size")
    strategy = _lower(weights.get("strategy")) or ("channel" if size == -1 else "group" if size else None)
    if strategy not in ("group", "channel"):
        return Unread(f"strategy {strategy!r}", "group and channel are read", other)
    # `dynamic` is another word for group, `static` for weight, which leaves the columns in their order.
    if _lower(weights.get("actorder")) not in (None, False, "weight", "static"):
        return Unread(f"actorder {weights['actorder']!r}"[:160], "columns in their own order are read", other)
    return Scheme(
        _group_size(size, refuse) if strategy == "group" else -1, not _flag(weights, "symmetric", True, refuse)
    )


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _no_online_transform(settings: Mapping[str, Any], modules: Sequence[str], refuse: Refuse) -> None:
    """Refuse a rotation of the experts' inputs or outputs at run time: the packed weights alone are another layer."""
    transforms = settings.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for name, scheme in (groups or {}).items() if isinstance(groups, dict | None) else ():
        for part in scheme.get("apply") or () if isinstance(scheme, dict) else ():
            if not isinstance(part, dict) or part.get("location") not in _ONLINE:
                continue
            given = {key: part.get(key) for key in ("targets", "ignore")}
            listed = {key: [x] if isinstance(x, str) else x for key, x in given.items()}
            targets, ignored = (Names(_names(x, key, refuse), parts=False) for key, x in listed.items())
            reached = next((m for m in modules if targets.find(m) and not ignored.find(m)), None)
            if reached:
                raise refuse(
                    f"transform_config {name} changes the {part['location']} of {reached} when the model runs",
                    "weights whose activations are used as they are",
                    "choose a checkpoint without run-time transforms",
                )
