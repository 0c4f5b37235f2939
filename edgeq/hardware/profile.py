"""Define profiles: classes of hardware, and how to quantize models for each. Profiles are data from profiles/*.toml.

A profile requires raw features, never a CPU's family or marketing name. It may extend another profile: requirements add
up, tables are merged key by key, and other values are inherited. Among the profiles whose requirements a machine meets,
the highest rank wins. Profiles that could fit the same machine have different ranks, and a profile that requires more
than another has a higher rank. edgeq checks both rules when it loads the profiles, so there is never a tie.
"""

from __future__ import annotations

import dataclasses
import itertools
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

from edgeq_device.engines.catalog import parse_version
from edgeq_device.engines.options import session_problem
from edgeq_device.system.features import normalise, normalise_architecture
from edgeq_device.system.gpus import format_capability
from msgspec import Meta

from edgeq.errors import HardwareError, UsageError, suggest
from edgeq.hardware.detect import Machine
from edgeq.run.engines import find_only_engine
from edgeq.scheme import Format, Scheme
from edgeq.util.display import Displayed
from edgeq.util.folders import shipped, user_folder
from edgeq.util.record_files import is_toml, toml_table
from edgeq.util.records import NOT_WRITTEN, Positive, parse, write_as
from edgeq.util.registry import BACKEND_TABLES, BACKENDS, find_data_folders

Text = Annotated[str, Meta(pattern=r"\S", description="text")]
Version = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*$", description='a version such as "1.20"')]


@dataclass(frozen=True)
class Document:
    """Hold the content of one TOML file, or of several files merged into one, with its name and source files."""

    name: str
    content: Mapping[str, Any]
    files: tuple[Path, ...]

    @property
    def file(self) -> Path:
        """Return the file whose values take precedence."""
        return self.files[-1]


def read_document(path: Path, kind: type) -> Document:
    """Read and check one file. The file's name without suffix becomes the document's name.

    Args:
        kind: the record type that defines what the file may contain.

    Raises:
        HardwareError: the file is unreadable, too large, not TOML, or not of that type.
    """
    content = toml_table(path, HardwareError, "Give a profile or target in TOML")
    parse(content, kind, path, HardwareError, unknown_keys=False)
    return Document(path.stem, content, (path,))


def read_folder(folder: Path, kind: type) -> dict[str, Document]:
    """Return every .toml file directly in `folder`, by name. If there is no such folder, the result is empty.

    Raises:
        HardwareError: a file is refused by `read_document`, or two files have the same name.
    """
    documents: dict[str, Document] = {}
    for document in (read_document(path, kind) for path in _list_files(folder)):
        if document.name in documents:
            raise HardwareError(
                f"{document.file} has the same name as {documents[document.name].file.name}", "Rename one"
            )
        documents[document.name] = document
    return documents


def read_state(folders: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return names, times and sizes of the .toml files in `folders`. Cached contents are valid until these change."""
    files = [path for folder in folders for path in _list_files(folder)]
    # A broken link still has a state of its own, so its error is not hidden by a cache.
    stats = ((path, path.stat() if path.exists() else path.lstat()) for path in files)
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if is_toml(path.name))


def overlay(below: Document, above: Document) -> Document:
    """Return `above` merged over `below`: tables are merged key by key, and everything else is replaced."""
    return Document(above.name, merge(below.content, above.content), (*below.files, *above.files))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables merged key by key, recursively. Values that are not tables come from `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


# The architecture of profiles that every machine fits.
ANY = "any"
Above0 = Annotated[int, Meta(ge=1, description="a whole number above 0")]
Values = Annotated[tuple[Any, ...], Meta(min_length=1, description="a list of values")]
_HINTS = get_type_hints(Scheme, include_extras=True)
_SCHEME = tuple(name for name in _HINTS if name != "dynamic_weight_types")


def _make_table(name: str, fields: Mapping[str, Any]) -> Any:
    """Return a record type with these fields, all of them optional."""
    return dataclasses.make_dataclass(name, [(key, kind, None) for key, kind in fields.items()], frozen=True)


# These tables are made from the fields of `Scheme`, so that the fields are listed only once.
_SchemeTable = _make_table("SchemeTable", {name: _HINTS[name] for name in _SCHEME})
_Reasons = _make_table(
    "Reasons", dict.fromkeys((*_HINTS, "dynamic", "requires", "min_onnxruntime", "integer_only"), Text)
)
_Search = _make_table("Search", {**dict.fromkeys(_HINTS, Values), "session_options": Mapping[str, Values]})


@dataclass(frozen=True)
class QemuSettings:
    """Describe how qemu emulates the profile's hardware."""

    arch: Text | None = None
    cpu: Text | None = None
    min_version: Version | None = None


@dataclass(frozen=True)
class Emulate:
    """Describe the [emulate] table: how to run the hardware's kernels on another machine."""

    qemu: QemuSettings | None = None
    mask: tuple[str, ...] = ()
    simulator: Text | None = None
    note: Text | None = None


Pair = Annotated[
    str,
    Meta(
        pattern=rf"^[US]8[US]8(-({'|'.join(get_args(Format))}))?$",
        description='a pair of types such as "U8S8", or one in a form such as "S8S8-QDQ"',
    ),
]
# The scheme fields that can prevent saturation. A session option can also prevent it.
REMEDIES = ("fit_pairs", "fit_seen", "reduce_range", "weight_type")


@dataclass(frozen=True)
class Hazards:
    """Describe the [hazards] table: what this hardware's kernels compute wrongly or slowly. See `Profile.hazards`."""

    saturates_int16: tuple[Pair, ...] = ()
    remedy_cost: Mapping[str, Positive] | None = None
    slower_than_float: tuple[str, ...] = ()
    notes: Mapping[str, Text] | None = None


@dataclass(frozen=True)
class Choices:
    """Define the keys that both profiles and targets may have."""

    title: Text | None = None
    extends: Text | None = None
    backend: Text | None = None
    architecture: Text | None = None
    min_onnxruntime: Version | None = None
    scheme: _SchemeTable | None = None  # type: ignore[valid-type]
    dynamic: Mapping[str, Text] | None = None
    why: _Reasons | None = None  # type: ignore[valid-type]
    source: _Reasons | None = None  # type: ignore[valid-type]
    hazards: Hazards | None = None
    search: _Search | None = None  # type: ignore[valid-type]
    emulate: Emulate | None = None
    never_run: Text | None = None
    integer_only: bool | None = None


@dataclass(frozen=True)
class ProfileFile(Choices):
    """Define the contents of profiles/*.toml."""

    requires: tuple[str, ...] = ()
    requires_runtimes: tuple[str, ...] = ()
    min_compute_capability: Version | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Runtime:
    """Describe the [runtime] table: versions of the software on the device."""

    onnxruntime: Version | None = None
    tensorrt: Version | None = None
    cuda: Version | None = None
    python: Version | None = None


@dataclass(frozen=True)
class Memories:
    """Describe the [device.memories] table: the sizes in KiB of the memories that a compiled model needs, with the
    reason for and the source of these numbers.
    """

    why: Text
    source: Text
    sram_kib: Above0 | None = None
    flash_kib: Above0 | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """Describe the [device] table, with known facts about the hardware.

    Attributes:
        cores: number of CPU cores.
        memory_mib: memory in MiB.
        compute_capability: the GPU's compute capability.
        engine: the engine that runs models on the device, if the backend builds for several.
        engine_options: settings of a compiler or simulator of the device.
        memories: sizes of the memories that a compiled model needs.
    """

    cores: Above0 | None = None
    memory_mib: Above0 | None = None
    compute_capability: Version | None = None
    engine: Text | None = None
    engine_options: Mapping[str, Text] | None = None
    memories: Memories | None = None


@dataclass(frozen=True)
class DeviceFile(Choices):
    """Define the keys that every target may have.

    Attributes:
        aliases: other names that people type for the device. Several targets may have the same alias; edgeq then names
            them all.
        nearest_for: names of devices that edgeq has no target for, without separators and capitals, each with the
            reason. The error for such a name names this target.
    """

    aliases: tuple[Text, ...] = ()
    nearest_for: Mapping[str, Text] | None = None
    features: tuple[str, ...] = ()
    runtime: Runtime | None = None
    device: DeviceFacts | None = None


def _with_backend_tables(name: str, *bases: type) -> type:
    """Return a record type with the keys of `bases`, and with the tables that belong to one backend each."""
    # The backend defines and explains the keys of its table, so that a wrong key in it is refused like any other when
    # the file is read. Only the modules of these tables are imported, and they import nothing heavy.
    tables: dict[str, Any] = {table: pkgutil.resolve_name(place) for table, place in BACKEND_TABLES.items()}
    fields = [(table, record | None, None) for table, record in tables.items()]
    return dataclasses.make_dataclass(name, fields, bases=bases, frozen=True)


TargetFile = _with_backend_tables("TargetFile", DeviceFile)
"""The contents of targets/*.toml."""
EitherFile = _with_backend_tables("EitherFile", DeviceFile, ProfileFile)
"""The contents of a file that may be either a profile or a target."""


def default_folders(name: str) -> tuple[Path, ...]:
    """Return the folders to read. Shipped folders come first, then plug-ins' folders, then the user's. Later folders
    override earlier ones.
    """
    user_config = user_folder("config")
    return shipped(name), *find_data_folders(name), *([user_config / name] if user_config is not None else [])


def load_layered(folders: Sequence[Path], kind: type) -> Mapping[str, Document]:
    """Return the documents of all folders, by name. Later folders override earlier ones. Unchanged files are not read
    again.

    If a document overrides a value without giving a reason, the reason for the old value is dropped.
    """
    return _load_layers(tuple(folders), kind, read_state(folders))


@lru_cache(maxsize=16)
def _load_layers(folders: Sequence[Path], kind: type, state: object) -> Mapping[str, Document]:
    base, *later = (read_folder(folder, kind) for folder in folders)
    # Every file is checked before any is merged, so that the error names the file that the user must correct.
    for document in [*base.values(), *(document for layer in later for document in layer.values())]:
        check_values(document)
    merged = dict(base)
    for name, document in (item for layer in later for item in layer.items()):
        explained = explain_override(document)
        merged[name] = overlay(merged[name], explained) if name in merged else explained
    return MappingProxyType(merged)


def check_values(document: Document) -> None:
    """Refuse values that the types of the keys cannot check.

    - The backend must be registered.
    - Session options must be allowed in bundles; otherwise a model built with them could not be shipped.
    - `remedy_cost` must name existing mitigations; a mitigation with any other name would never be tried.

    Raises:
        HardwareError: a value is not valid. The message names the file and the backend, option or mitigation.
    """
    backend = document.content.get("backend")
    if backend is not None and backend not in BACKENDS.names():
        raise HardwareError(f"{document.file}: unknown backend {backend!r}", suggest(backend, BACKENDS.names()))
    for name in document.content.get("hazards", {}).get("remedy_cost", {}):
        if name not in REMEDIES and session_problem(name, "1", references=False):
            raise HardwareError(
                f"{document.file}: hazards.remedy_cost has {name!r}, which is not a mitigation", suggest(name, REMEDIES)
            )
    fixed_options = document.content.get("scheme", {}).get("session_options", {})
    search_options = document.content.get("search", {}).get("session_options", {})
    pairs = [*fixed_options.items(), *((key, value) for key, values in search_options.items() for value in values)]
    for key, value in pairs:
        problem = session_problem(key, str(value), references=False)
        if problem:
            raise HardwareError(
                f"{document.file}: session option {key!a} {problem}", "See docs/bundle.md for what a bundle may set"
            )


def explain_override(document: Document) -> Document:
    """Return `document` with a "why" and a "source" added for every scheme field for which it gives none."""
    fields = [*document.content.get("scheme", {}), *(["dynamic"] if "dynamic" in document.content else [])]
    # The reason in the overridden file explains the old value, so it must not stay next to a new one.
    sources = dict.fromkeys(fields, f"set in {document.file}")
    return dataclasses.replace(document, content=merge({"why": sources, "source": sources}, document.content))


def inherit(document: Document, documents: Mapping[str, Document]) -> Document:
    """Return `document` merged over everything that it extends. Architecture and features are spelled as devices report
    them.

    Requirements add up. All other values are overridden. An architecture other than "any" cannot be overridden.

    Raises:
        HardwareError: the document extends an unknown document, itself, or a document for another architecture.
    """
    chain = [document]
    # The chain goes from the child to its oldest ancestor.
    while parent := chain[-1].content.get("extends"):
        if parent not in documents:
            raise HardwareError(f"{chain[-1].file}: extends {parent!r}, which is unknown", suggest(parent, documents))
        if documents[parent] in chain:
            raise HardwareError(f"{chain[-1].file}: extends {parent!r} in a circle", "Break the circle")
        chain.append(documents[parent])
    merged: Document = chain[-1]
    # The oldest document is the lowest layer, so that each child overrides its parents.
    for link in reversed(chain[:-1]):
        merged = overlay(merged, link)
    added: dict[str, Any] = {
        "requires": sorted(normalise(value for link in chain for value in link.content.get("requires", ()))),
        "requires_runtimes": sorted({value for link in chain for value in link.content.get("requires_runtimes", ())}),
        "features": sorted(normalise(merged.content.get("features", ()))),
    }
    if "architecture" in merged.content:
        added["architecture"] = _inherit_architecture(chain)
    return Document(document.name, {**merged.content, **added}, merged.files)


def _inherit_architecture(chain: Sequence[Document]) -> str:
    """Return the architecture of the first document in a chain of documents, each of which extends the next."""
    architecture = ANY
    for link in reversed(chain):
        link_architecture = normalise_architecture(link.content.get("architecture", ANY))
        # Feature names have no meaning on another architecture, so a child cannot change it.
        if link_architecture != ANY and architecture not in (ANY, link_architecture):
            raise HardwareError(
                f"{link.file}: architecture is {link_architecture!r}, "
                f"but {link.content['extends']} is for {architecture}",
                f"Extend a profile for {link_architecture}, or leave architecture out",
            )
        architecture = architecture if link_architecture == ANY else link_architecture
    return architecture


@dataclass(frozen=True)
class Profile(Displayed):
    """Describe one hardware class.

    Attributes:
        name: the file's name without suffix.
        title: one line for display.
        architecture: architecture of the CPU, as in `Machine`; "any" if it does not matter.
        requires: CPU features, all of which are required.
        rank: precedence; among the profiles that fit, the highest rank wins.
        backend: the backend that builds for it: "cpu", "tensorrt", "systolic".
        min_onnxruntime: the oldest release that was seen to work with these choices.
        scheme: how to quantize; `dynamic_weight_types` has the content of the [dynamic] table.
        why, source: by scheme field, the reason for the default and the source of the reason.
        hazards: "saturates_int16" lists type pairs, such as "U8S8"; "slower_than_float" lists forms, such as
            "dynamic-Conv"; "remedy_cost" has the time that a model takes with each mitigation of saturation, relative
            to the time without one; "notes" has other remarks by topic.
        search: by scheme field, the values that tuning may try; "session_options" has lists by option.
        emulate: how to run its kernels on another machine: "qemu" (arch, cpu, min_version), "mask" (features to hide on
            a host that has more), "simulator", "note".
        min_compute_capability: compute capability of an NVIDIA GPU, (major, minor); None if no GPU is needed.
        requires_runtimes: keys that `Machine.runtimes` must contain.
        never_run: one line that names what was never run on hardware of this class; "" if there is nothing to name.
        integer_only: whether layers run only in integers there. Hazards and repairs then never leave a layer, or a node
            that leads to a layer, in float.
        extends: the name of the profile that it extends.
        files: the profile's source files; later files take precedence.
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
    min_compute_capability: tuple[int, int] | None = field(default=None, metadata=write_as(form=format_capability))
    requires_runtimes: frozenset[str] = frozenset()
    never_run: str = ""
    integer_only: bool = False
    extends: str | None = None
    files: tuple[Path, ...] = field(default=(), metadata=NOT_WRITTEN)

    @property
    def named_only(self) -> bool:
        """Return whether only a user's choice of a target leads to this profile: no CPU or GPU feature decides for it,
        and its hardware is simulated or its runtime is a package of the application.
        """
        decided = bool(self.requires) or self.min_compute_capability is not None
        return not decided and ("simulator" in self.emulate or bool(self.requires_runtimes))

    def missing(self, machine: Machine) -> tuple[str, ...]:
        """Return in words what `machine` lacks for this profile. The result is empty if the profile fits."""
        # The features of another architecture say nothing, so nothing else is listed.
        if self.architecture not in (ANY, machine.architecture):
            return (f"architecture {self.architecture}",)
        lacks = sorted(self.requires - machine.features)
        if self.min_compute_capability is not None:
            if machine.gpu is None:
                return (*lacks, "an NVIDIA GPU")
            if machine.gpu.compute_capability < self.min_compute_capability:
                lacks.append(f"compute capability {format_capability(self.min_compute_capability)}")
        lacks += [f"{runtime} (not installed)" for runtime in sorted(self.requires_runtimes - set(machine.runtimes))]
        oldest, installed = self.min_onnxruntime, machine.onnxruntime
        # Without onnxruntime the machine can still be a target, so only an old version counts.
        if installed and parse_version(installed) < parse_version(oldest):
            lacks.append(f"onnxruntime {oldest} (here {installed})")
        return tuple(lacks)

    def saturates(self, scheme: Scheme) -> bool:
        """Return whether this hardware's kernels for `scheme` add two products in 16 bits.

        Whether the sums really saturate depends on the weights.
        """
        pairs = self.hazards.get("saturates_int16", ())
        return scheme.mode == "static" and (scheme.pair in pairs or f"{scheme.pair}-{scheme.format}" in pairs)

    def includes(self, broader: Profile) -> bool:
        """Return whether every machine that fits this profile also has the hardware and runtimes for `broader`."""
        gpu, broader_gpu = self.min_compute_capability, broader.min_compute_capability
        return (
            broader.architecture in (ANY, self.architecture)
            and broader.requires <= self.requires
            and broader.requires_runtimes <= self.requires_runtimes
            and (broader_gpu is None or (gpu is not None and gpu >= broader_gpu))
        )


@dataclass(frozen=True)
class ProfileMatch:
    """Name the profile that fits a machine best.

    Attributes:
        reasons: why it fits.
        runner_ups: profiles with a higher rank, in ascending order of rank, each with what the machine lacks for it.
    """

    profile: Profile
    reasons: tuple[str, ...]
    runner_ups: tuple[tuple[Profile, tuple[str, ...]], ...]

    def explain(self) -> tuple[str, ...]:
        """Describe the match in lines of text. Runners-up that lack the same things share a line."""
        by_lack: dict[tuple[str, ...], list[str]] = {}
        for profile, missing in self.runner_ups:
            by_lack.setdefault(missing, []).append(profile.name)
        return (
            f"{self.profile.name} fits: {', '.join(self.reasons)}",
            *(f"not {', '.join(names)}: lacks {', '.join(lack)}" for lack, names in by_lack.items()),
        )

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "profile": self.profile.name,
            "title": self.profile.title,
            "backend": self.profile.backend,
            "reasons": self.reasons,
            "runner_ups": [{"profile": p.name, "missing": list(missing)} for p, missing in self.runner_ups],
        }


def load_profiles(folders: Sequence[Path] | None = None) -> Mapping[str, Profile]:
    """Return all profiles by name, in order of rank. Unchanged files are not read again.

    Args:
        folders: folders to read; None reads the shipped profiles, with the user's merged over them.

    Raises:
        HardwareError: a file is not a valid profile, or two profiles could tie.
    """
    sources = tuple(folders or default_folders("profiles"))
    # The state is part of the cache's key, so an edited file is read again.
    return _load_profiles(sources, read_state(sources))


@lru_cache(maxsize=4)
def _load_profiles(folders: Sequence[Path], state: object) -> Mapping[str, Profile]:
    documents = load_layered(folders, ProfileFile)
    profiles = [build_profile(inherit(document, documents)) for document in documents.values()]
    refuse_ties(profiles)
    return MappingProxyType({profile.name: profile for profile in sorted(profiles, key=lambda p: (p.rank, p.name))})


def match_profile(machine: Machine, profiles: Mapping[str, Profile]) -> ProfileMatch:
    """Return the highest-ranked profile whose requirements `machine` meets.

    Profiles for another architecture are not listed as runners-up.

    Raises:
        HardwareError: no profile fits. The message names what the machine lacks for the profile with the lowest rank.
    """
    # A profile for an engine that any machine may have is used only if the user names it as a target.
    related = [
        p
        for p in profiles.values()
        if p.architecture in (ANY, machine.architecture) and not find_only_engine(p.backend)
    ]
    ranked = sorted(related, key=lambda p: p.rank, reverse=True)
    lacking = [(profile, profile.missing(machine)) for profile in ranked]
    winner = next((profile for profile, missing in lacking if not missing), None)
    if winner is None:
        lacks = f"{lacking[-1][0].name} lacks {', '.join(lacking[-1][1])}" if lacking else "there is none for it"
        raise HardwareError(
            f"no profile fits this {machine.architecture} machine: {lacks}", "Name one with ⟨target⟩, or write one"
        )
    better = [
        (profile, missing) for profile, missing in lacking if profile.rank > winner.rank and not profile.named_only
    ]
    return ProfileMatch(winner, _explain_fit(winner, machine), tuple(reversed(better)))


def _explain_fit(profile: Profile, machine: Machine) -> tuple[str, ...]:
    reasons = [machine.architecture if profile.architecture == ANY else profile.architecture]
    reasons += sorted(profile.requires)
    if profile.min_compute_capability is not None and machine.gpu is not None:
        reasons.append(
            f"{machine.gpu.name} with compute capability {format_capability(machine.gpu.compute_capability)}"
        )
    reasons += [f"{name} {machine.runtimes[name]}" for name in sorted(profile.requires_runtimes)]
    return tuple(reasons)


def build_profile(document: Document) -> Profile:
    """Return the profile that a document describes. Call `inherit` on the document first."""
    content = document.content
    required_keys = ("title", "architecture", "rank", "backend", "min_onnxruntime")
    for key in required_keys:
        if key not in content:
            raise HardwareError(f"{document.file}: {key} is missing", f"Add it, or extend a profile that has {key}")
    capability = content.get("min_compute_capability")
    # A comparison of versions of different lengths would call 8 older than 8.0.
    if capability is not None and len(parse_version(capability)) != 2:
        raise HardwareError(f"{document.file}: min_compute_capability is {capability!r}", 'Write it as "8.6"')
    scheme_fields = {**content.get("scheme", {}), "dynamic_weight_types": content.get("dynamic", {})}
    return Profile(
        name=document.name,
        **{key: content[key] for key in required_keys},
        **{table: content.get(table, {}) for table in ("why", "source", "hazards", "emulate")},
        requires=frozenset(content["requires"]),
        scheme=_check_scheme(document, "scheme", scheme_fields),
        search=_search(document),
        min_compute_capability=None if capability is None else parse_version(capability),  # type: ignore[arg-type]
        requires_runtimes=frozenset(content["requires_runtimes"]),
        never_run=content.get("never_run", ""),
        integer_only=content.get("integer_only", False),
        extends=content.get("extends"),
        files=document.files,
    )


def _search(document: Document) -> dict[str, Any]:
    search = dict(document.content.get("search", {}))
    for name, values in search.items():
        for value in () if isinstance(values, Mapping) else values:
            # Each value is tried as the only change, so that a wrong one is found before a search of hours.
            _check_scheme(document, f"search.{name}", {name: value})
        if not isinstance(values, Mapping):
            search[name] = [tuple(value) if isinstance(value, list) else value for value in values]
    return search


def _check_scheme(document: Document, table: str, fields: Mapping[str, Any]) -> Scheme:
    try:
        return parse(fields, Scheme, f"{document.file}: [{table}]", HardwareError, unknown_keys=False)
    except UsageError as error:
        raise HardwareError(f"{document.file}: [{table}]: {error.problem}", error.fix) from error


def refuse_ties(profiles: Sequence[Profile]) -> None:
    """Refuse two profiles of equal rank that could fit the same machine. Also refuse a profile that requires more than
    another but does not have a higher rank.

    Raises:
        HardwareError: two profiles break a rule. The message names the file with the wrong rank, and the reason.
    """
    # Without this rule, a more special profile could never win against a general one.
    for more, less in itertools.permutations(profiles, 2):
        if more.includes(less) and not less.includes(more) and more.rank <= less.rank:
            raise HardwareError(
                f"{more.files[-1]}: rank {more.rank} is not above {less.rank} of {less.name}, which requires less",
                f"Give {more.name} a rank above {less.rank}",
            )
    for a, b in itertools.combinations(profiles, 2):
        if a.rank == b.rank and (a.architecture == b.architecture or ANY in (a.architecture, b.architecture)):
            raise HardwareError(
                f"{a.files[-1]}: rank {a.rank} is also the rank of {b.name}", "Give one of them another rank"
            )
