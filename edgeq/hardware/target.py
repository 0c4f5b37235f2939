"""Define targets: places to deploy a model to. Targets are data from targets/*.toml.

A target has a profile, a runtime, and known facts about the device. It extends one profile and may override the
profile's choices. A target that extends "auto" gets the profile that fits this machine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq.errors import HardwareError, suggest
from edgeq.hardware import profile as schema
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import Document, Profile, build_profile, inherit, load_profiles, match_profile
from edgeq.run.engines import Engine, find_only_engine, load_engines
from edgeq.util.display import Displayed
from edgeq.util.record_files import is_toml
from edgeq.util.records import NOT_WRITTEN

AUTO = "auto"
THIS_MACHINE = "this-machine"


@dataclass(frozen=True)
class Target(Displayed):
    """Describe one place to deploy to.

    Attributes:
        name: the file's name without suffix, or the profile's name.
        title: one line for display.
        profile: its profile, with the target's own overrides.
        backend: the profile's backend.
        architecture: architecture of the device's CPU.
        features: CPU features that the device is known to have, including those that the profile requires.
        runtime: known versions of "onnxruntime", "tensorrt", "cuda" and "python" on the device.
        emulate: how to run the device's kernels on another machine; see `Profile.emulate`.
        device: known facts about the hardware: "cores", "memory_mib", "compute_capability"; "engine", the engine that
            runs models there, if the backend builds for several; and "engine_options", the provider options with which
            the engine, on another machine, compiles for the device or simulates it.
        systolic: the array's parameters, if the target is a systolic array.
    """

    name: str
    title: str
    profile: Profile
    backend: str
    architecture: str
    features: frozenset[str]
    runtime: Mapping[str, str] = field(default_factory=dict)
    emulate: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    systolic: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = field(default=(), metadata=NOT_WRITTEN)


def load_targets(machine: Machine | None = None) -> dict[str, Target]:
    """Return all targets by name.

    Args:
        machine: this machine; None detects it if a target extends "auto".

    Raises:
        HardwareError: a file is not a valid target or profile.
    """
    profiles = _load_profile_documents()
    documents = _load_target_documents()
    # Detection takes a moment, so it runs only if a target needs it.
    if machine is None and any(document.content.get("extends") == AUTO for document in documents.values()):
        machine = detect_machine()
    return {name: _build(documents[name], profiles, machine) for name in sorted(documents)}


def resolve(name_or_path: str | Path, machine: Machine | None = None) -> Target:
    """Return the target that a user named: "auto", a target, a profile, or a path to a .toml file of either.

    Args:
        machine: this machine; None detects it if the target depends on it.

    Raises:
        HardwareError: the name is unknown (the message suggests the nearest one), or a file is not a valid target or
            profile.
    """
    name = str(name_or_path)
    if is_toml(name):
        return _resolve_file(Path(name), _load_profile_documents(), machine)
    return find_target(name, machine)


def as_targets(names: str | Path | Sequence[str | Path]) -> tuple[str | Path, ...]:
    """Return names or paths of targets as a tuple. A single name or path becomes a tuple of one."""
    return (names,) if isinstance(names, (str, Path)) else tuple(names)


def find_target(name: str, machine: Machine | None = None) -> Target:
    """Return the target with a name that is never a path, such as one in a bundle. See `resolve`.

    Raises:
        HardwareError: the name is unknown. The message suggests the nearest one.
    """
    profiles, documents = _load_profile_documents(), _load_target_documents()
    # "auto" is a word of the user; the shipped file has a name like any other target.
    target_name = THIS_MACHINE if name == AUTO else name
    if target_name in documents:
        return _build(documents[target_name], profiles, machine)
    if target_name in profiles:
        return _build_from_profile(build_profile(inherit(profiles[target_name], profiles)))
    titles = {key: document.content["title"] for key, document in documents.items() if _has_alias(document, name)}
    if len(titles) == 1:
        return _build(documents[next(iter(titles))], profiles, machine)
    if titles:
        choices = "; ".join(f"{key} ({title})" for key, title in titles.items())
        raise HardwareError(f"{name} can be several targets", f"Choose one: {choices}")
    for key, document in documents.items():
        reason = document.content.get("nearest_for", {}).get(_fold(name))
        if reason is not None:
            raise HardwareError(f"edgeq has no target for {name}: {reason}", f"The nearest target is {key}")
    fix = suggest(name, [*documents, *profiles, AUTO], listing="List them with `edgeq info targets`")
    raise HardwareError(f"unknown target or profile {name!r}", fix)


def is_known(name: str) -> bool:
    """Return whether `find_target` knows the name, or an alias of exactly one target."""
    documents = _load_target_documents()
    if name == AUTO or name in documents or name in _load_profile_documents():
        return True
    return sum(_has_alias(document, name) for document in documents.values()) == 1


def _has_alias(document: Document, name: str) -> bool:
    return _fold(name) in map(_fold, document.content.get("aliases", ()))


def _fold(name: str) -> str:
    """Return a name without separators and capitals, because people type a device's name in many ways."""
    return re.sub(r"[\W_]", "", name.lower())


def runs_natively(target: Target, machine: Machine) -> bool:
    """Return whether this machine runs the same kernels as the target. It does if the profile that fits this machine
    best is the target's.

    It is not enough that this machine is newer and meets all the target's requirements, because newer machines run
    other kernels.
    """
    # such a plug-in engine runs the same kernels on every machine
    if find_only_engine(target.backend) is not None:
        return True
    return match_profile(machine, load_profiles()).profile.name == target.profile.name


def find_application_engine(target: Target) -> Engine | None:
    """Return the engine that applications on the target use instead of onnxruntime, or None if there is none. It is one
    of the runtimes that the target's profile requires.
    """
    engines = load_engines()
    return next((engines[name] for name in sorted(target.profile.requires_runtimes) if name in engines), None)


def _load_profile_documents() -> Mapping[str, Document]:
    return schema.load_layered(schema.default_folders("profiles"), schema.ProfileFile)


def _load_target_documents() -> Mapping[str, Document]:
    return schema.load_layered(schema.default_folders("targets"), schema.TargetFile)


def _resolve_file(path: Path, profiles: Mapping[str, Document], machine: Machine | None) -> Target:
    """Return the target of a user's own file. The file is a profile if it has a key that only profiles have, else a
    target.
    """
    # A key of another kind of file would be refused first, so the file is read with all keys allowed to find its kind.
    either = schema.read_document(path, schema.EitherFile)
    is_profile = not either.content.keys() <= {field.name for field in dataclasses.fields(schema.TargetFile)}
    raw_document = schema.read_document(path, schema.ProfileFile if is_profile else schema.TargetFile)
    schema.check_values(raw_document)
    document = schema.explain_override(raw_document)
    if is_profile:
        return _build_from_profile(build_profile(inherit(document, profiles)))
    return _build(document, profiles, machine)


def _build_from_profile(profile: Profile) -> Target:
    return Target(
        name=profile.name,
        title=profile.title,
        profile=profile,
        backend=profile.backend,
        architecture=profile.architecture,
        features=profile.requires,
        emulate=profile.emulate,
        files=profile.files,
    )


def _build(document: Document, profiles: Mapping[str, Document], machine: Machine | None) -> Target:
    """Return the target of one document, built on the profile that it extends. "auto" extends the profile that fits
    `machine`.
    """
    content = document.content
    for key in ("title", "extends"):
        if key not in content:
            raise HardwareError(f"{document.file}: {key} is missing", "Add it")
    if content["extends"] == AUTO:
        return _build_for(machine or detect_machine(), document, profiles)
    merged = inherit(document, profiles)
    parent = build_profile(inherit(profiles[content["extends"]], profiles))
    # The target's own choices change the profile, but people and records still know it by the profile's name.
    target_profile = build_profile(merged)
    profile = dataclasses.replace(target_profile, name=parent.name, title=parent.title, extends=parent.extends)
    return dataclasses.replace(
        _build_from_profile(profile),
        name=document.name,
        title=content["title"],
        features=frozenset(merged.content["features"]) | profile.requires,
        files=merged.files,
        **{table: content.get(table, {}) for table in ("runtime", "device", "systolic")},
    )


def _build_for(machine: Machine, document: Document, profiles: Mapping[str, Document]) -> Target:
    """Return the target of an "auto" document on `machine`. Detected values fill in what the file leaves out."""
    # All profiles are built, because the match compares their ranks.
    built = {name: build_profile(inherit(profile, profiles)) for name, profile in profiles.items()}
    match = match_profile(machine, built)
    fixed = Document(document.name, {**document.content, "extends": match.profile.name}, document.files)
    target = _build(fixed, profiles, machine)
    # A value of 0 means unknown, and then the file or nothing decides.
    detected = {"cores": machine.cores, "memory_mib": machine.memory_bytes >> 20}
    return dataclasses.replace(
        target,
        title=f"{target.title}: {target.profile.title}",
        architecture=machine.architecture,
        features=machine.features | target.features,
        runtime={**machine.runtimes, **target.runtime},
        device={**{key: value for key, value in detected.items() if value}, **target.device},
    )
