"""Raising a model to an operator set where per-channel QuantizeLinear is valid."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError
from edgeq.graph.query import constant, every_node, is_op, name_of, node_input, opset_of
from edgeq.model.skeleton import reattach, shaped_skeleton, skeleton

LOWEST = 13
"""The first opset whose QuantizeLinear and DequantizeLinear have an axis, and so take per-channel scales."""
RAISED_TO = 17
"""What an older model is raised to: the opset of most exporters today, known to every runtime edgeq works with."""
OLDEST = 7
"""Older models cannot be checked, because ONNX Runtime does not run them; and onnx's converter gets some of them wrong:
it loses the axis of an Add or Mul that broadcasts the way opset 6 did."""
_IR_VERSION = 8
"""The IR version that came with opset 15 to 18; from 4 on, weights need not be listed as inputs."""
_PLACES = "coordinate_transformation_mode"


def raise_opset(
    model: ir.Model, path: Path, *, lowest: int = LOWEST, to: int = RAISED_TO, ir_version: int = _IR_VERSION
) -> ir.Model:
    """`model`, or, where its opset is under `lowest`, its conversion to opset `to` by onnx's version converter.

    Args:
        path: the model's file, for messages.
        ir_version: what the conversion has at least.

    Raises:
        ModelError: older than `OLDEST`, or the converter cannot, or it made something invalid.
    """
    opset = opset_of(model)
    if opset >= lowest:
        return model
    fix = f"Export the model again with opset {lowest} or later"
    if opset < OLDEST:
        raise ModelError(f"{path} uses opset {opset}, which ONNX Runtime does not run", fix)
    from onnx import version_converter

    bare = skeleton(model)
    bare.ir_version = max(bare.ir_version, ir_version)
    outputs = {o.name: _copied(o) for o in bare.graph.output}
    try:
        converted: onnx.ModelProto = version_converter.convert_version(bare, to)
        # Shapes that the old opset's rules had given may be wrong for what the converter put in.
        del converted.graph.value_info[:]
        onnx.checker.check_model(shaped_skeleton(converted))
        changed = [a.name for a, b in zip(bare.graph.input, converted.graph.input, strict=True) if a != b]
        if changed:
            raise ValueError(f"it changes the input {changed[0]!r}")
    except Exception as error:  # C++ raises ConvertError, ValidationError, RuntimeError, IndexError and others
        text = " ".join(str(error).split()).rpartition("failed: ")[2]  # without the place in onnx's own source
        raise ModelError(
            f"{path} uses opset {opset}, and onnx's converter cannot raise it to {to}: {text[:200]}",
            fix,
        ) from error
    for output in converted.graph.output:
        output.CopyFrom(outputs[output.name])
    raised = reattach(converted, model)
    _write_old_defaults(raised, opset, path)
    return raised


def _write_old_defaults(model: ir.Model, opset: int, path: Path) -> None:
    """Write out, in place, what an operator did by default in `opset` and does not any more; onnx's converter leaves it
    to the new default."""
    for node in every_node(model):
        if is_op(node, "Resize") and opset < 11:
            node.attributes[_PLACES] = ir.AttrString(_PLACES, "asymmetric")
            if node.attributes.get_string("mode", "nearest") == "nearest":
                node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", _old_rounding(node, path))
        elif is_op(node, "RoiAlign") and opset < 16:
            node.attributes.setdefault(_PLACES, ir.AttrString(_PLACES, "output_half_pixel"))
        elif is_op(node, "Hardmax") and opset < 13:
            raise ModelError(
                f"{path} uses opset {opset}, whose Hardmax ({name_of(node.outputs[0])}) no later opset has",
                f"Export the model again with opset {LOWEST} or later",
            )


def _old_rounding(node: ir.Node, path: Path) -> str:
    """How ONNX Runtime rounds places in the nearest mode of Resize 10 and of Upsample: up where an axis shrinks."""
    scales = constant(node_input(node, 2))
    if scales is None or not (scales < 1).any():
        return "floor"
    if (scales > 1).any():
        raise ModelError(
            f"{path}: the nearest mode of Resize in opset 10 enlarges one axis and shrinks another at "
            f"{name_of(node.outputs[0])!r}",
            f"Export the model again with opset {LOWEST} or later",
        )
    return "ceil"


def _copied(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy
