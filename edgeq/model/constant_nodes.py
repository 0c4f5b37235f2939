"""Constant nodes of a file, each with the one value that ONNX Runtime reads."""

from __future__ import annotations

from pathlib import Path

import onnx

from edgeq.errors import ModelError
from edgeq.model.tensors import iter_nodes

_STRINGS = {"value_string": 0, "value_strings": 1}
"""Attribute → axes of the tensor that it stands for."""


def settle_constants(model: onnx.ModelProto, path: Path) -> None:
    """Leave each Constant node its first attribute, in place, and make tensors of texts, which onnx_ir reads as ASCII.

    Args:
        path: the model file, for the message.

    Raises:
        ModelError: one has no value.
    """
    for node in iter_nodes(model):
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            continue
        if not node.attribute:
            name = node.name or next(iter(node.output), "")
            raise ModelError(f"{path}: Constant {name!r} has no value", "Export the model again")
        del node.attribute[1:]
        (value,) = node.attribute
        if value.name in _STRINGS and not value.ref_attr_name:
            texts = [*value.strings] if _STRINGS[value.name] else [value.s]
            tensor = onnx.TensorProto(data_type=onnx.TensorProto.STRING, string_data=texts)
            tensor.dims.extend([len(texts)] * _STRINGS[value.name])
            value.CopyFrom(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))
