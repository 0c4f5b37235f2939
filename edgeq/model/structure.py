"""What decides a quantized model's speed: its graph without the values of scales and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import onnx

from edgeq.model.load import model_files


def structure_digest(model: Path, session_options: Mapping[str, str]) -> str:
    """Hash of operators, attributes, connections, shapes and dtypes, not of the values of constants: two models of one
    digest, made from one float model, run the same kernels on the same shapes.

    Args:
        model: a file that edgeq wrote.
    """
    graph = onnx.load(model, load_external_data=False).graph
    digest = hashlib.sha256(json.dumps(sorted(session_options.items())).encode())
    for node in graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        digest.update(json.dumps([node.domain, node.op_type, list(node.input), list(node.output)]).encode())
        for attribute in attributes:
            digest.update(attribute)
    for tensor in sorted(graph.initializer, key=lambda t: t.name):
        digest.update(json.dumps([tensor.name, tensor.data_type, list(tensor.dims)]).encode())
    return digest.hexdigest()


def content_digest(model: Path, session_options: Mapping[str, str]) -> str:
    """Hash of the files and the options: two models of one digest are the same model."""
    digest = hashlib.sha256(json.dumps(sorted(session_options.items())).encode())
    for file in model_files(model):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def in_engine(digest: str, engine: str) -> str:
    """A digest of either kind, of what runs in `engine`; "" stands for onnxruntime's own kernels."""
    return hashlib.sha256((digest + engine).encode()).hexdigest() if engine else digest
