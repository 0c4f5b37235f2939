"""Raising a model to an operator set where per-channel QuantizeLinear is valid."""

from __future__ import annotations

from pathlib import Path

import onnx

from edgeq.errors import ModelError
from edgeq.model.load import opset_of
from edgeq.model.skeleton import reattach, skeleton

LOWEST = 13
"""The first opset whose QuantizeLinear and DequantizeLinear have an axis, and so take per-channel scales."""
RAISED_TO = 17
"""What an older model is raised to: the opset of most exporters today, known to every runtime edgeq works with."""
_IR_VERSION = 8
"""The IR version that came with opset 15 to 18; from 4 on, weights need not be listed as inputs."""


def raise_opset(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """`model`, or, where its opset is under `LOWEST`, its conversion to `RAISED_TO` by onnx's version converter.

    Args:
        path: the model's file, for messages.

    Raises:
        ModelError: the converter cannot, or made something invalid (it leaves the bodies of If and Loop as they were).
    """
    opset = opset_of(model)
    if opset >= LOWEST:
        return model
    from onnx import version_converter

    bare = skeleton(model)
    bare.ir_version = max(bare.ir_version, _IR_VERSION)
    outputs = {o.name: _copied(o) for o in model.graph.output}
    try:
        converted: onnx.ModelProto = version_converter.convert_version(bare, RAISED_TO)
        # Shapes that the old opset's rules had given may be wrong for what the converter put in.
        del converted.graph.value_info[:]
        for output in converted.graph.output:
            if not outputs[output.name].type.tensor_type.HasField("shape"):
                output.type.tensor_type.shape.SetInParent()
        onnx.checker.check_model(converted)
    except Exception as error:  # C++ raises ConvertError, ValidationError, RuntimeError, IndexError and others
        text = " ".join(str(error).split())
        raise ModelError(
            f"{path} uses opset {opset}, and onnx's converter cannot raise it to {RAISED_TO}: {text[:200]}",
            f"Export the model again with opset {LOWEST} or later",
        ) from error
    for output in converted.graph.output:
        output.CopyFrom(outputs[output.name])
    return reattach(converted, model)


def _copied(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy
