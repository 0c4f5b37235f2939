"""What profile and target files may say, where they lie, and how one builds on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

from edgeq_device.features import normalise, normalise_architecture
from edgeq_device.options import session_problem
from msgspec import Meta

from edgeq.errors import HardwareError, suggest
from edgeq.scheme import Format, Scheme
from edgeq.util.records import Positive, is_toml, parse, toml_table
from edgeq.util.registry import BACKENDS, data_folders
from edgeq.util.resources import shipped, user_folder

Text = Annotated[str, Meta(pattern=r"\S", description="text")]
Version = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*$", description='a version such as "1.20"')]


@dataclass(frozen=True)
class Document:
    """One TOML file, or several merged into one: its name, its content, and the files it comes from."""

    name: str
    content: Mapping[str, Any]
    files: tuple[Path, ...]

    @property
    def file(self) -> Path:
        """The file whose values win."""
        return self.files[-1]


def read(path: Path, kind: type) -> Document:
    """Read and check one file. Its name without suffix is the document's name.

    Args:
        kind: the record type that says what the file may hold.

    Raises:
        HardwareError: unreadable, too large, not TOML, or not of that type.
    """
    content = toml_table(path, HardwareError, "Give a profile or target in TOML")
    parse(content, kind, path, HardwareError, unknown_keys=False)
    return Document(path.stem, content, (path,))


def read_folder(folder: Path, kind: type) -> dict[str, Document]:
    """Every .toml file directly in `folder`, by name; nothing where there is no such folder.

    Raises:
        HardwareError: as `read`; or two have one name.
    """
    found: dict[str, Document] = {}
    for document in (read(path, kind) for path in _toml_files(folder)):
        if document.name in found:
            raise HardwareError(f"{document.file} has the name of {found[document.name].file.name}", "Rename one")
        found[document.name] = document
    return found


def state_of(folders: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the .toml files in `folders`: what is read of them stays true while these do."""
    files = [path for folder in folders for path in _toml_files(folder)]
    found = ((path, path.stat() if path.exists() else path.lstat()) for path in files)
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in found)


def _toml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if is_toml(path.name))


def overlay(below: Document, above: Document) -> Document:
    """`above` over `below`: tables are merged key by key, everything else replaced."""
    return Document(above.name, merge(below.content, above.content), (*below.files, *above.files))


def overlay_all(layers: Iterable[Mapping[str, Document]]) -> dict[str, Document]:
    """Folders merged by document name, later ones over earlier ones."""
    merged: dict[str, Document] = {}
    for layer in layers:
        for name, document in layer.items():
            merged[name] = overlay(merged[name], document) if name in merged else document
    return merged


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables key by key, recursively; everything else from `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


ANY = "any"
Above0 = Annotated[int, Meta(ge=1, description="a whole number above 0")]
Values = Annotated[tuple[Any, ...], Meta(min_length=1, description="a list of values")]
_HINTS = get_type_hints(Scheme, include_extras=True)
_SCHEME = tuple(name for name in _HINTS if name != "dynamic_weight_types")


def _table(name: str, fields: Mapping[str, Any]) -> Any:
    """A record type with these fields, all of them optional."""
    return dataclasses.make_dataclass(name, [(key, kind, None) for key, kind in fields.items()], frozen=True)


# These follow the fields of a scheme, which is the one place that lists them.
_SchemeTable = _table("SchemeTable", {name: _HINTS[name] for name in _SCHEME})
_Reasons = _table("Reasons", dict.fromkeys((*_HINTS, "dynamic", "requires", "min_onnxruntime"), Text))
_Search = _table("Search", {**dict.fromkeys(_HINTS, Values), "session_options": Mapping[str, Values]})


@dataclass(frozen=True)
class Qemu:
    """How qemu runs what the profile describes."""

    arch: Text | None = None
    cpu: Text | None = None
    min_version: Version | None = None


@dataclass(frozen=True)
class Emulate:
    """[emulate]: how to run the kernels elsewhere."""

    qemu: Qemu | None = None
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
# The fields of a scheme by which weights are kept from saturating; a session option does it too.
REMEDIES = ("fit_pairs", "fit_seen", "reduce_range", "weight_type")


@dataclass(frozen=True)
class Hazards:
    """[hazards]: what kernels of this hardware do wrong or slowly; see `edgeq.hardware.profile.Profile`."""

    saturates_int16: tuple[Pair, ...] = ()
    remedy_cost: Mapping[str, Positive] | None = None
    slower_than_float: tuple[str, ...] = ()
    notes: Mapping[str, Text] | None = None


@dataclass(frozen=True)
class Choices:
    """What profiles and targets both may say."""

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


@dataclass(frozen=True)
class ProfileFile(Choices):
    """profiles/*.toml."""

    requires: tuple[str, ...] = ()
    requires_runtimes: tuple[str, ...] = ()
    min_compute_capability: Version | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Runtime:
    """[runtime]: versions that the place has."""

    onnxruntime: Version | None = None
    tensorrt: Version | None = None
    cuda: Version | None = None
    python: Version | None = None


@dataclass(frozen=True)
class Device:
    """[device]: cores, memory in MiB, the GPU's compute capability, and what a compiler or simulator of the device is
    set to."""

    cores: Above0 | None = None
    memory_mib: Above0 | None = None
    compute_capability: Version | None = None
    engine_options: Mapping[str, Text] | None = None


@dataclass(frozen=True)
class Systolic:
    """[systolic]: the array's size in processing elements, its memories in KiB or rows, its number types."""

    dim: int | None = None
    scratchpad_kib: int | None = None
    scratchpad_banks: int | None = None
    scratchpad_bank_rows: int | None = None
    accumulator_kib: int | None = None
    accumulator_rows: int | None = None
    max_bytes: int | None = None
    element_type: Text | None = None
    accumulator_type: Text | None = None
    scale_type: Text | None = None
    dataflow: Text | None = None


@dataclass(frozen=True)
class TargetFile(Choices):
    """targets/*.toml."""

    features: tuple[str, ...] = ()
    runtime: Runtime | None = None
    device: Device | None = None
    systolic: Systolic | None = None


@dataclass(frozen=True)
class EitherFile(TargetFile, ProfileFile):
    """A file of which it is not yet known whether it is a profile or a target."""


def default_folders(name: str) -> tuple[Path, ...]:
    """Shipped first, then those of plug-ins, then the user's; each is merged over those before."""
    own = user_folder("config")
    return shipped(name), *data_folders(name), *([own / name] if own is not None else [])


def layered(folders: Sequence[Path], kind: type) -> Mapping[str, Document]:
    """The documents of all folders by name, later folders over earlier ones. Read again only where a file has changed.

    An override without a reason of its own does not keep the reason that it overrides.
    """
    return _layered(tuple(folders), kind, state_of(folders))


@lru_cache(maxsize=16)
def _layered(folders: Sequence[Path], kind: type, state: object) -> Mapping[str, Document]:
    first, *later = (read_folder(folder, kind) for folder in folders)
    for document in [*first.values(), *(document for layer in later for document in layer.values())]:
        check_values(document)
    own = [{name: explain_override(document) for name, document in layer.items()} for layer in later]
    return MappingProxyType(overlay_all([first, *own]))


def check_values(document: Document) -> None:
    """Refuse what the types of the keys leave open: a backend that nothing registers, session options that no bundle
    could carry, so that what is built with them could not be shipped, and prices of mitigations that do not exist,
    which would never be tried.

    Raises:
        HardwareError: with the file and the backend, option or mitigation.
    """
    backend = document.content.get("backend")
    if backend is not None and backend not in BACKENDS.names():
        raise HardwareError(f"{document.file}: unknown backend {backend!r}", suggest(backend, BACKENDS.names()))
    for name in document.content.get("hazards", {}).get("remedy_cost", {}):
        if name not in REMEDIES and session_problem(name, "1", references=False):
            raise HardwareError(
                f"{document.file}: hazards.remedy_cost has {name!r}, which is no mitigation", suggest(name, REMEDIES)
            )
    chosen = document.content.get("scheme", {}).get("session_options", {})
    tried = document.content.get("search", {}).get("session_options", {})
    pairs = [*chosen.items(), *((key, value) for key, values in tried.items() for value in values)]
    for key, value in pairs:
        problem = session_problem(key, str(value), references=False)
        if problem:
            raise HardwareError(
                f"{document.file}: session option {key!a} {problem}", "See docs/bundle.md for what a bundle may set"
            )


def explain_override(document: Document) -> Document:
    """`document` with a "why" and "source" for every scheme field that it sets without one."""
    fields = [*document.content.get("scheme", {}), *(["dynamic"] if "dynamic" in document.content else [])]
    sources = dict.fromkeys(fields, f"set in {document.file}")
    return dataclasses.replace(document, content=merge({"why": sources, "source": sources}, document.content))


def inherit(document: Document, documents: Mapping[str, Document]) -> Document:
    """`document` over everything that it extends. Requirements add up; everything else is overridden, but for an
    architecture that is not "any". Architecture and features are in the one spelling in which devices report theirs.

    Raises:
        HardwareError: it extends what is unknown, itself, or something for another architecture.
    """
    chain = [document]
    while parent := chain[-1].content.get("extends"):
        if parent not in documents:
            raise HardwareError(f"{chain[-1].file}: extends {parent!r}, which is unknown", suggest(parent, documents))
        if documents[parent] in chain:
            raise HardwareError(f"{chain[-1].file}: extends {parent!r} in a circle", "Break the circle")
        chain.append(documents[parent])
    whole: Document = chain[-1]
    for link in reversed(chain[:-1]):
        whole = overlay(whole, link)
    added: dict[str, Any] = {
        "requires": sorted(normalise(value for link in chain for value in link.content.get("requires", ()))),
        "requires_runtimes": sorted({value for link in chain for value in link.content.get("requires_runtimes", ())}),
        "features": sorted(normalise(whole.content.get("features", ()))),
    }
    if "architecture" in whole.content:
        added["architecture"] = _architecture(chain)
    return Document(document.name, {**whole.content, **added}, whole.files)


def _architecture(chain: Sequence[Document]) -> str:
    """The architecture of a document, first in the chain of what it extends."""
    found = ANY
    for link in reversed(chain):
        own = normalise_architecture(link.content.get("architecture", ANY))
        if own != ANY and found not in (ANY, own):
            raise HardwareError(
                f"{link.file}: architecture is {own!r}, but {link.content['extends']} is for {found}",
                f"Extend a profile for {own}, or leave architecture out",
            )
        found = found if own == ANY else own
    return found
