"""Identify models by digests: of their files, or of their structure without the values of constants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import onnx
from edgeq_device.system.files import open_file

from edgeq.errors import ModelError
from edgeq.model.files import model_files


def model_digest(path: Path, folder: Path | None = None) -> str:
    """Return the SHA-256 of a model in hex. Without external data it is the digest of the file, as `sha256sum` prints
    it. With external data it is a hash of the digests of all files and of the names of the data files.
    """
    files = model_files(path, folder)
    if len(files) == 1:
        return _file_digest(path)
    digest = hashlib.sha256(bytes.fromhex(_file_digest(path)))
    for file in files[1:]:
        digest.update(file.relative_to(folder or path.parent).as_posix().encode() + b"\0")
        digest.update(bytes.fromhex(_file_digest(file)))
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


def structure_digest(model: Path, session_options: Mapping[str, str]) -> str:
    """Return a hash of a model's operators, attributes, connections, shapes and dtypes. The values of constants are
    left out. If two models made from one float model have the same digest, they run the same kernels on the same
    shapes.

    Args:
        model: a file that edgeq wrote.
        session_options: options of the session, which are included in the hash.
    """
    graph = onnx.load(model, load_external_data=False).graph
    # Options may select other kernels for the same file.
    digest = hashlib.sha256(json.dumps(sorted(session_options.items())).encode())
    for node in graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        digest.update(json.dumps([node.domain, node.op_type, list(node.input), list(node.output)]).encode())
        for attribute in attributes:
            digest.update(attribute)
    # Two builds may list the same weights in another order.
    for tensor in sorted(graph.initializer, key=lambda t: t.name):
        digest.update(json.dumps([tensor.name, tensor.data_type, list(tensor.dims)]).encode())
    return digest.hexdigest()


def content_digest(model: Path, session_options: Mapping[str, str]) -> str:
    """Return a hash of a model's files and of the session options. Equal digests mean that the model and the options
    are the same.
    """
    digest = hashlib.sha256(json.dumps(sorted(session_options.items())).encode())
    for file in model_files(model):
        with open_file(file) as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def with_engine(digest: str, engine: str) -> str:
    """Return a structure or content digest that also depends on the engine. "" means onnxruntime's own kernels."""
    return hashlib.sha256((digest + engine).encode()).hexdigest() if engine else digest
