"""Parse an untrusted file as a protobuf model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from edgeq_device.system.files import read_file

from edgeq.errors import ModelError
from edgeq.model.file_type import likely_cause
from edgeq.util.bundle_names import BUNDLES_GO, is_archived_bundle
from edgeq.util.placement import is_interrupted

PROTOBUF_LIMIT = 2**31 - 1
"""Largest size of a protobuf message, in bytes. Larger models keep their weights in external data."""


def parse_model(path: Path) -> onnx.ModelProto:
    """Return the protobuf in a file. The protobuf always has a graph with nodes, and an opset that onnx knows. No other
    checks are made.

    Raises:
        ModelError: the file cannot be read, or is not a model with nodes and a known opset.
    """
    from google.protobuf.message import DecodeError

    content = _read_file(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
        # Many byte strings happen to parse, as unknown fields or as a message that is almost empty.
        parsed = model.HasField("graph") and model.ir_version > 0 and bool(model.opset_import) and _is_utf8(model)
    except DecodeError:
        parsed = False
    if not parsed:
        problem, fix = likely_cause(content, path)
        raise ModelError(f"{path} is not an ONNX model: {problem}", fix)
    if not model.graph.node:
        raise ModelError(f"{path} has no operators in it", "Export the model again")
    newest = onnx.defs.onnx_opset_version()
    if opset_of_proto(model) > newest:
        raise ModelError(
            f"{path} uses opset {opset_of_proto(model)}; onnx {onnx.__version__} knows opsets up to {newest}",
            "Install a newer onnx, or export the model with an older opset",
        )
    return model


def _read_file(path: Path) -> bytes:
    try:
        if (path / "manifest.json").is_file():
            raise ModelError(f"{path} is a bundle, not a model", f"Give the .onnx file in it; {BUNDLES_GO}")
        if path.is_dir():
            raise ModelError(f"{path} is a directory, not a model", "Give the .onnx file in it")
        if not path.exists():
            if is_interrupted(path):
                fix = "A killed run has moved it; write to that name again, which first restores it"
                raise ModelError(f"{path} is not there now", fix)
            raise ModelError(f"{path} does not exist", "Check the path of the model")
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file", "Give an .onnx file")
        if is_archived_bundle(path):
            raise ModelError(f"{path} is a bundle, not a model", f"Give the .onnx file it was made from; {BUNDLES_GO}")
        size = path.stat().st_size
        if size == 0:
            raise ModelError(f"{path} is empty", "Export or download the model again")
        if size > PROTOBUF_LIMIT:
            raise ModelError(
                f"{path} has {size} bytes, more than a protobuf can have (2 GiB)",
                "If it is an ONNX model, save it with external data (onnx.save with save_as_external_data=True)",
            )
        return read_file(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


def opset_of_proto(model: onnx.ModelProto) -> int:
    """Return the version of the main operator set; 0 if the model does not import it."""
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def _is_utf8(message: Any) -> bool:
    """Return whether every string in a message is valid UTF-8. The parser returns other strings as bytes, which cause
    errors in later steps.

    The parser refuses messages nested deeper than 100, which limits the recursion.
    """
    from google.protobuf.descriptor import FieldDescriptor

    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            if not all(isinstance(v, str) for v in ([value] if isinstance(value, str | bytes) else value)):
                return False
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not all(
            _is_utf8(v) for v in ([value] if hasattr(value, "ListFields") else value)
        ):
            return False
    return True
