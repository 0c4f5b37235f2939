"""Profiles: what a class of hardware is, and how it wants models quantized. Data, from profiles/*.toml.

A profile requires raw features, never a CPU's family or marketing name. It may extend another one: requirements add
up, tables are merged key by key, and what it does not say it inherits. Among the profiles whose requirements a
machine meets, the highest rank wins; ranks of profiles that could meet are different and grow with the requirements,
which is checked on loading, so there is never a tie.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeq_device.cuda import capability_text
from edgeq_device.version import parse_version

from edgeq.errors import HardwareError, UsageError
from edgeq.hardware import schema
from edgeq.hardware import schema as doc
from edgeq.hardware.machine import Machine
from edgeq.hardware.schema import ANY, Document
from edgeq.scheme import Scheme
from edgeq.util.display import Displayed
from edgeq.util.records import NOT_WRITTEN, parse, written


@dataclass(frozen=True)
class Profile(Displayed):
    """One hardware class.

    Attributes:
        name: the file's name without suffix.
        title: one line for people.
        architecture: of the CPU, as in `Machine`; "any" where it does not matter.
        requires: CPU features, all of them.
        rank: the highest one that fits wins.
        backend: which backend builds for it: "cpu", "tensorrt", "systolic".
        min_onnxruntime: the oldest release that these choices were seen to work with.
        scheme: how to quantize; `dynamic_weight_types` holds the [dynamic] table.
        why, source: per scheme field, the reason for the default and where it comes from.
        hazards: "saturates_int16" and "slower_than_float" list type pairs and forms, "remedy_cost" holds the time that
            each mitigation against saturation takes, relative to none; "notes" says the rest by topic.
        search: per scheme field, the values that tuning may try; "session_options" holds lists by option.
        emulate: how to run its kernels elsewhere: "qemu" (arch, cpu, min_version), "mask" (features to hide on a
            host that has more), "simulator", "note".
        min_compute_capability: of an NVIDIA GPU, (major, minor); None where no GPU is needed.
        requires_runtimes: keys of `Machine.runtimes` that must be there.
        never_run: what of it was never run on hardware of this class, one line; "" where nothing is known.
        extends: the profile it builds on.
        files: where it was read from, the last word last.
    """

    name: str
    title: str
    architecture: str
    requires: frozenset[str]
    rank: int
    backend: str
    min_onnxruntime: str
    scheme: Scheme
    why: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    hazards: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    emulate: Mapping[str, Any] = field(default_factory=dict)
    min_compute_capability: tuple[int, int] | None = field(default=None, metadata=written(form=capability_text))
    requires_runtimes: frozenset[str] = frozenset()
    never_run: str = ""
    extends: str | None = None
    files: tuple[Path, ...] = field(default=(), metadata=NOT_WRITTEN)

    def missing(self, machine: Machine) -> tuple[str, ...]:
        """What `machine` lacks to run this profile, in words; empty when it fits."""
        if self.architecture not in (ANY, machine.architecture):
            return (f"architecture {self.architecture}",)
        lacks = sorted(self.requires - machine.features)
        if self.min_compute_capability is not None:
            if machine.gpu is None:
                return (*lacks, "an NVIDIA GPU")
            if machine.gpu.compute_capability < self.min_compute_capability:
                lacks.append(f"compute capability {capability_text(self.min_compute_capability)}")
        lacks += [f"{runtime} (not installed)" for runtime in sorted(self.requires_runtimes - set(machine.runtimes))]
        oldest, installed = self.min_onnxruntime, machine.onnxruntime
        if installed and parse_version(installed) < parse_version(oldest):
            lacks.append(f"onnxruntime {oldest} (here {installed})")
        return tuple(lacks)

    def saturates(self, scheme: Scheme) -> bool:
        """Whether this hardware's kernels for `scheme` add two products in 16 bits. Whether they really saturate
        depends on the weights."""
        known = self.hazards.get("saturates_int16", ())
        return scheme.mode == "static" and (scheme.pair in known or f"{scheme.pair}-{scheme.format}" in known)

    def includes(self, other: Profile) -> bool:
        """Whether every machine that fits this profile also fits `other` (as far as hardware goes)."""
        gpu, other_gpu = self.min_compute_capability, other.min_compute_capability
        return (
            other.architecture in (ANY, self.architecture)
            and other.requires <= self.requires
            and other.requires_runtimes <= self.requires_runtimes
            and (other_gpu is None or (gpu is not None and gpu >= other_gpu))
        )


@dataclass(frozen=True)
class RunnerUp:
    """A profile that ranks above the winner, and what the machine lacks for it."""

    profile: Profile
    missing: tuple[str, ...]


@dataclass(frozen=True)
class ProfileMatch:
    """The profile that fits best, why it fits, and what each better-ranked one lacked (closest rank first)."""

    profile: Profile
    reasons: tuple[str, ...]
    runner_ups: tuple[RunnerUp, ...]

    def explain(self) -> tuple[str, ...]:
        """The match in lines for people. Runner-ups that lack the same share a line."""
        by_lack: dict[tuple[str, ...], list[str]] = {}
        for runner_up in self.runner_ups:
            by_lack.setdefault(runner_up.missing, []).append(runner_up.profile.name)
        return (
            f"{self.profile.name} fits: {', '.join(self.reasons)}",
            *(f"not {', '.join(names)}: lacks {', '.join(lack)}" for lack, names in by_lack.items()),
        )

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "profile": self.profile.name,
            "title": self.profile.title,
            "backend": self.profile.backend,
            "reasons": self.reasons,
            "runner_ups": [{"profile": r.profile.name, "missing": list(r.missing)} for r in self.runner_ups],
        }


def load_profiles(folders: Sequence[Path] | None = None) -> Mapping[str, Profile]:
    """All profiles by name, in order of rank: the shipped ones with the user's merged over them, or of `folders`.

    Read again only where a file has changed.

    Raises:
        HardwareError: a file that is not a good profile, or two that could tie.
    """
    chosen = tuple(folders or schema.default_folders("profiles"))
    return _load_profiles(chosen, doc.state_of(chosen))


@lru_cache(maxsize=4)
def _load_profiles(folders: Sequence[Path], state: object) -> Mapping[str, Profile]:
    documents = schema.layered(folders, schema.ProfileFile)
    profiles = [build_profile(schema.inherit(document, documents)) for document in documents.values()]
    refuse_ties(profiles)
    return MappingProxyType({profile.name: profile for profile in sorted(profiles, key=lambda p: (p.rank, p.name))})


def match_profile(machine: Machine, profiles: Mapping[str, Profile]) -> ProfileMatch:
    """The highest-ranked profile whose requirements `machine` meets.

    Profiles of another architecture are not even runners-up.

    Raises:
        HardwareError: none fits; says what the least demanding one lacks.
    """
    related = [p for p in profiles.values() if p.architecture in (ANY, machine.architecture)]
    ranked = sorted(related, key=lambda p: p.rank, reverse=True)
    lacking = [(profile, profile.missing(machine)) for profile in ranked]
    winner = next((profile for profile, missing in lacking if not missing), None)
    if winner is None:
        lacks = f"{lacking[-1][0].name} lacks {', '.join(lacking[-1][1])}" if lacking else "there is none for it"
        raise HardwareError(
            f"no profile fits this {machine.architecture} machine: {lacks}", "Name one with --profile, or write one"
        )
    better = [
        RunnerUp(profile, missing)
        for profile, missing in lacking
        # What is simulated and needs no feature of a CPU is chosen by naming a target.
        if profile.rank > winner.rank and (profile.requires or "simulator" not in profile.emulate)
    ]
    return ProfileMatch(winner, _reasons(winner, machine), tuple(reversed(better)))


def _reasons(profile: Profile, machine: Machine) -> tuple[str, ...]:
    reasons = [machine.architecture if profile.architecture == ANY else profile.architecture]
    reasons += sorted(profile.requires)
    if profile.min_compute_capability is not None and machine.gpu is not None:
        reasons.append(f"{machine.gpu.name} with compute capability {capability_text(machine.gpu.compute_capability)}")
    reasons += [f"{name} {machine.runtimes[name]}" for name in sorted(profile.requires_runtimes)]
    return tuple(reasons)


def build_profile(document: Document) -> Profile:
    """The profile that a document with everything inherited describes."""
    content = document.content
    needed = ("title", "architecture", "rank", "backend", "min_onnxruntime")
    for key in needed:
        if key not in content:
            raise HardwareError(f"{document.file}: {key} is missing", f"Add it, or extend a profile that has {key}")
    capability = content.get("min_compute_capability")
    return Profile(
        name=document.name,
        **{key: content[key] for key in needed},
        **{table: content.get(table, {}) for table in ("why", "source", "hazards", "emulate")},
        requires=frozenset(content["requires"]),
        scheme=build_scheme(document),
        search=_search(document),
        min_compute_capability=None if capability is None else _compute_capability(document, capability),
        requires_runtimes=frozenset(content["requires_runtimes"]),
        never_run=content.get("never_run", ""),
        extends=content.get("extends"),
        files=document.files,
    )


def build_scheme(document: Document) -> Scheme:
    """The [scheme] and [dynamic] tables as a Scheme; errors name the file."""
    fields = {**document.content.get("scheme", {}), "dynamic_weight_types": document.content.get("dynamic", {})}
    return _checked_scheme(document, "scheme", fields)


def _search(document: Document) -> dict[str, Any]:
    search = dict(document.content.get("search", {}))
    for name, values in search.items():
        for value in () if isinstance(values, Mapping) else values:
            _checked_scheme(document, f"search.{name}", {name: value})
        if not isinstance(values, Mapping):
            search[name] = [tuple(value) if isinstance(value, list) else value for value in values]
    return search


def _checked_scheme(document: Document, table: str, fields: Mapping[str, Any]) -> Scheme:
    try:
        return parse(fields, Scheme, f"{document.file}: [{table}]", HardwareError, unknown_keys=False)
    except UsageError as error:
        raise HardwareError(f"{document.file}: [{table}]: {error.problem}", error.fix) from error


def _compute_capability(document: Document, text: str) -> tuple[int, int]:
    parts = parse_version(text)
    if len(parts) != 2:
        raise HardwareError(f"{document.file}: min_compute_capability is {text!r}", 'Write it as "8.6"')
    return parts[0], parts[1]


def refuse_ties(profiles: Sequence[Profile]) -> None:
    """Among profiles that one machine could fit, ranks differ, and requiring more means ranking higher.

    Raises:
        HardwareError: with the file whose rank is wrong, and why.
    """
    for more, less in itertools.permutations(profiles, 2):
        if more.includes(less) and not less.includes(more) and more.rank <= less.rank:
            raise HardwareError(
                f"{more.files[-1]}: rank {more.rank} is not above {less.rank} of {less.name}, which requires less",
                f"Give {more.name} a rank above {less.rank}",
            )
    for a, b in itertools.combinations(profiles, 2):
        if a.rank == b.rank and (a.architecture == b.architecture or ANY in (a.architecture, b.architecture)):
            raise HardwareError(
                f"{a.files[-1]}: rank {a.rank} is also that of {b.name}", "Give one of them another rank"
            )
