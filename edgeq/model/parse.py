"""The bytes of an untrusted file, parsed as an ONNX model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from edgeq.atomic import interrupted
from edgeq.errors import ModelError
from edgeq.model.identify import BUNDLES_GO, is_archived_bundle, likely_cause

PROTOBUF_LIMIT = 2**31 - 1
"""Bytes. A protobuf message cannot be longer; larger models keep their weights in external data."""


def parse_model(path: Path) -> onnx.ModelProto:
    """The protobuf in a file: a graph with nodes, of an opset that onnx knows. Nothing else of it is checked.

    Raises:
        ModelError: it cannot be read, or is something else.
    """
    from google.protobuf.message import DecodeError

    content = _read(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
        # Many byte strings happen to parse: as unknown fields, or as a message that holds next to nothing.
        parsed = model.HasField("graph") and model.ir_version > 0 and bool(model.opset_import) and _text_is_text(model)
    except DecodeError:
        parsed = False
    if not parsed:
        what, fix = likely_cause(content, path)
        raise ModelError(f"{path} is not an ONNX model: {what}", fix)
    if not model.graph.node:
        raise ModelError(f"{path} has no operators in it", "Export the model again")
    newest = onnx.defs.onnx_opset_version()
    if _opset(model) > newest:
        raise ModelError(
            f"{path} uses opset {_opset(model)}; onnx {onnx.__version__} knows opsets up to {newest}",
            "Install a newer onnx, or export the model with an older opset",
        )
    return model


def _read(path: Path) -> bytes:
    try:
        if (path / "manifest.json").is_file():
            raise ModelError(f"{path} is a bundle, not a model", f"Give the .onnx file in it; {BUNDLES_GO}")
        if path.is_dir():
            raise ModelError(f"{path} is a directory, not a model", "Give the .onnx file in it")
        if not path.exists():
            if interrupted(path):
                fix = "A run that was killed has moved it away; write to that name again, which puts it back first"
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
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


def _opset(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def _text_is_text(message: Any) -> bool:
    """Whether every string in a message is UTF-8. The parser lets others through as bytes, which break what follows.

    Recursion is bounded by the parser, which refuses messages nested deeper than 100.
    """
    from google.protobuf.descriptor import FieldDescriptor

    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            if not all(isinstance(v, str) for v in ([value] if isinstance(value, str | bytes) else value)):
                return False
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not all(
            _text_is_text(v) for v in ([value] if hasattr(value, "ListFields") else value)
        ):
            return False
    return True
