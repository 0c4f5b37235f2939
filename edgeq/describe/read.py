"""Read the facts of all writers about one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from edgeq.data.axes import model_size
from edgeq.describe.facts import Exported, ModelFacts, Reader, merge
from edgeq.describe.readers.extensions import describe_extensions
from edgeq.errors import ModelError
from edgeq.model.load import load_model, signature_of
from edgeq.signature import Signature
from edgeq.util.registry import READERS, Registry

REGISTRY: Registry[Reader] = Registry(READERS, lambda entry: isinstance(entry, Reader), "edgeq.describe.facts.Reader")

# Operators that a runtime has only with the package onnxruntime-extensions.
_EXTENSIONS = "com.microsoft.extensions"
_FIRST = frozenset({"Conv", "MatMul", "Gemm"})
_LAST = frozenset({*_FIRST, "ConvTranspose", "DepthToSpace"})


def read_facts(exported: Exported) -> ModelFacts:
    """Return what a model's metadata and the files next to it state.

    Raises:
        DataError: a file of a writer is damaged.
    """
    return merge(reader.read(exported) for _, reader in REGISTRY.items())


def describe_file(path: Path) -> ModelFacts:
    """Return what a model file's metadata and the files next to it state.

    Raises:
        ModelError: the file is a damaged ONNX file.
        DataError: a file of a writer is damaged.
    """
    return read_facts(open_exported(path))


def open_exported(path: Path) -> Exported:
    """Return what readers need of a model file. Of a file in another format, that is only its path.

    Raises:
        ModelError: the file is a damaged ONNX file.
    """
    if path.suffix.lower() != ".onnx" or not path.is_file():
        return Exported(path=path)
    model = load_model(path, external_data="none")
    exported = list_exported(
        {entry.key: entry.value for entry in model.metadata_props}, signature_of(model, path), path
    )
    nodes = model.graph.node
    extensions = tuple(sorted({node.op_type for node in nodes if node.domain == _EXTENSIONS}))
    return replace(exported, extensions=extensions, inner=_find_inner(nodes)) if extensions else exported


def list_exported(metadata: Mapping[str, str], signature: Signature, path: Path) -> Exported:
    """Return what readers need of a model that is already open and has no operators of onnxruntime-extensions."""
    image = next((spec for spec in signature.inputs if len(spec.shape or ()) == 4), None)
    outputs = tuple(spec.name for spec in signature.outputs)
    return Exported(dict(metadata), path, outputs, model_size(image) if image is not None else None)


def explain_extensions(path: Path, error: ModelError) -> ModelError:
    """Return a better error for a model that edgeq refused because it has operators of onnxruntime-extensions, or
    `error` itself for another model.
    """
    try:
        exported = open_exported(path)
    except ModelError:  # The error at hand says what is wrong.
        return error
    return ModelError(describe_extensions(exported)) if exported.extensions else error


def _find_inner(nodes: Iterable[onnx.NodeProto]) -> tuple[str, str] | None:
    """Return the input of the first node with weights and the output of the last one, in the graph's order."""
    nodes = list(nodes)
    start = next((node for node in nodes if node.op_type in _FIRST and node.input), None)
    end = next((node for node in reversed(nodes) if node.op_type in _LAST and node.output), None)
    return (start.input[0], end.output[0]) if start is not None and end is not None else None
