"""What profile and target files may say, where they lie, and how one builds on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import platformdirs
from edgeq_device.options import session_problem

from edgeq.errors import HardwareError, suggest
from edgeq.hardware import document as doc
from edgeq.hardware.document import Document
from edgeq.registry import data_folders
from edgeq.resources import shipped
from edgeq.scheme import Scheme

_SCHEME_FIELDS = tuple(f.name for f in dataclasses.fields(Scheme))
_SCHEME_KINDS: doc.Schema = {
    **dict.fromkeys(("mode", "format", "activation_type", "weight_type", "method", "rest"), doc.TEXT),
    **dict.fromkeys(
        ("activation_symmetric", "weight_symmetric", "per_channel", "reduce_range", "fit_pairs"), doc.BOOLEAN
    ),
    **dict.fromkeys(("op_types", "exclude", "stored_types"), doc.TEXTS),
    **dict.fromkeys(("weight_bits", "block_size"), doc.INTEGER),
    "method_options": {"*": doc.NUMBER},
    "session_options": {"*": doc.TEXT},
}
_REASONS: doc.Schema = dict.fromkeys((*_SCHEME_FIELDS, "dynamic", "requires", "min_onnxruntime"), doc.TEXT)
_EMULATE: doc.Schema = {
    "qemu": {"arch": doc.TEXT, "cpu": doc.TEXT, "min_version": doc.VERSION},
    "mask": doc.TEXTS,
    "simulator": doc.TEXT,
    "note": doc.TEXT,
}
_CHOICES: doc.Schema = {
    "title": doc.TEXT,
    "extends": doc.TEXT,
    "backend": doc.TEXT,
    "min_onnxruntime": doc.VERSION,
    "scheme": _SCHEME_KINDS,
    "dynamic": {"*": doc.TEXT},
    "why": _REASONS,
    "source": _REASONS,
    "hazards": {
        "saturates_int16": doc.TEXTS,
        "remedy_cost": {"*": doc.NUMBER},
        "slower_than_float": doc.TEXTS,
        "notes": {"*": doc.TEXT},
    },
    "search": {**dict.fromkeys(_SCHEME_FIELDS, doc.VALUES), "session_options": {"*": doc.VALUES}},
    "emulate": _EMULATE,
}
PROFILE: doc.Schema = {
    **_CHOICES,
    "architecture": doc.TEXT,
    "requires": doc.TEXTS,
    "requires_runtimes": doc.TEXTS,
    "min_compute_capability": doc.VERSION,
    "rank": doc.INTEGER,
}
TARGET: doc.Schema = {
    **_CHOICES,
    "architecture": doc.TEXT,
    "features": doc.TEXTS,
    "runtime": dict.fromkeys(("onnxruntime", "tensorrt", "cuda", "python"), doc.VERSION),
    "device": {"cores": doc.INTEGER, "memory_mib": doc.INTEGER, "compute_capability": doc.VERSION},
    "systolic": {
        **dict.fromkeys(("dim", "scratchpad_kib", "scratchpad_banks", "scratchpad_bank_rows"), doc.INTEGER),
        **dict.fromkeys(("accumulator_kib", "accumulator_rows", "max_bytes"), doc.INTEGER),
        **dict.fromkeys(("element_type", "accumulator_type", "scale_type", "dataflow"), doc.TEXT),
    },
}


def config_folder(name: str) -> Path:
    """The user's own folder of "profiles" or "targets"."""
    return platformdirs.user_config_path("edgeq") / name


def default_folders(name: str) -> tuple[Path, ...]:
    """Shipped first, then those of plug-ins, then the user's; each is merged over those before."""
    return shipped(name), *data_folders(name), config_folder(name)


def layered(folders: Sequence[Path], schema: doc.Schema) -> dict[str, Document]:
    """The documents of all folders by name, later folders over earlier ones.

    An override without a reason of its own does not keep the reason that it overrides.
    """
    first, *later = (doc.read_folder(folder, schema) for folder in folders)
    for document in [*first.values(), *(document for layer in later for document in layer.values())]:
        check_session_options(document)
    own = [{name: explain_override(document) for name, document in layer.items()} for layer in later]
    return doc.overlay_all([first, *own])


def check_session_options(document: Document) -> None:
    """Refuse session options that no bundle could carry: what is built with them could not be shipped.

    Raises:
        HardwareError: with the file and the option.
    """
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
    return dataclasses.replace(document, content=doc.merge({"why": sources, "source": sources}, document.content))


def inherit(document: Document, documents: Mapping[str, Document]) -> Document:
    """`document` over everything that it extends. Requirements add up; everything else is overridden."""
    chain = [document]
    while parent := chain[-1].content.get("extends"):
        if parent not in documents:
            raise HardwareError(f"{chain[-1].file}: extends {parent!r}, which is unknown", suggest(parent, documents))
        if documents[parent] in chain:
            raise HardwareError(f"{chain[-1].file}: extends {parent!r} in a circle", "Break the circle")
        chain.append(documents[parent])
    whole: Document = chain[-1]
    for link in reversed(chain[:-1]):
        whole = doc.overlay(whole, link)
    added = {
        key: sorted({value for link in chain for value in link.content.get(key, ())})
        for key in ("requires", "requires_runtimes")
    }
    return Document(document.name, {**whole.content, **added}, whole.files)
