"""Raise the opset of an old model, and set the attributes whose defaults have changed since. Lower the opset of a new
model for a compiler that ends at an older one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError, one_line
from edgeq.model.graph import MAIN_DOMAINS, constant, every_node, is_op, name_of, node_input, opset_of
from edgeq.model.skeleton import reattach, shaped_skeleton, skeleton

LOWEST = 13
"""First opset whose QuantizeLinear and DequantizeLinear have an axis for per-channel scales."""
RAISED_TO = 17
"""Opset to which older models are raised. Most exporters write this opset, and every runtime that edgeq uses supports
it."""
OLDEST = 7
"""Oldest opset that edgeq accepts. ONNX Runtime does not run older models, so edgeq could not check them. onnx's
converter also converts some of them wrongly: it loses the axis of an Add or Mul that broadcasts by the rules of opset
6."""
# IR version of opsets 15 to 18. Since version 4, weights need not be listed as inputs.
_IR_VERSION = 8
_PLACES = "coordinate_transformation_mode"


def raise_opset(
    model: ir.Model, path: Path, *, lowest: int = LOWEST, to: int = RAISED_TO, ir_version: int = _IR_VERSION
) -> ir.Model:
    """Return `model` if its opset is at least `lowest`. Otherwise convert it to opset `to` with onnx's version
    converter.

    Args:
        path: the model's file, for messages.
        ir_version: the lowest IR version of the converted model.

    Raises:
        ModelError: the opset is older than `OLDEST`, the converter failed, or its result is invalid.
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
        # Shapes inferred by the rules of the old opset may be wrong for nodes that the converter inserted.
        del converted.graph.value_info[:]
        onnx.checker.check_model(shaped_skeleton(converted))
        changed = [a.name for a, b in zip(bare.graph.input, converted.graph.input, strict=True) if a != b]
        if changed:
            raise ValueError(f"it changes the input {changed[0]!r}")
    # The C++ code raises ConvertError, ValidationError, RuntimeError, IndexError and others.
    except Exception as error:
        text = one_line(error).rpartition("failed: ")[2]  # without the position in onnx's own source code
        raise ModelError(
            f"{path} uses opset {opset}, and onnx's converter cannot raise it to {to}: {one_line(text, most=200)}",
            fix,
        ) from error
    for output in converted.graph.output:
        output.CopyFrom(outputs[output.name])
    raised = reattach(converted, model)
    _write_old_defaults(raised, opset, path)
    return raised


def _write_old_defaults(model: ir.Model, opset: int, path: Path) -> None:
    """Set attributes explicitly, in place, if their default changed after `opset`. onnx's converter does not do this,
    so the new defaults would apply.
    """
    for node in every_node(model):
        if is_op(node, "Resize") and opset < 11:
            node.attributes[_PLACES] = ir.AttrString(_PLACES, "asymmetric")
            if node.attributes.get_string("mode", "nearest") == "nearest":
                node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", _old_rounding(node, path))
        elif is_op(node, "RoiAlign") and opset < 16:
            node.attributes.setdefault(_PLACES, ir.AttrString(_PLACES, "output_half_pixel"))
        elif is_op(node, "Hardmax") and opset < 13:
            raise ModelError(
                f"{path} uses Hardmax of opset {opset} ({name_of(node.outputs[0])}), which no later opset has",
                f"Export the model again with opset {LOWEST} or later",
            )


def _old_rounding(node: ir.Node, path: Path) -> str:
    """Return how ONNX Runtime rounds positions for Resize 10 and for Upsample in nearest mode: "ceil" if an axis
    shrinks, else "floor".
    """
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


@dataclass(frozen=True)
class Opset:
    """Name the newest opset that a compiler reads, and the operators that later opsets define differently."""

    newest: int
    changed: tuple[str, ...]
    why: str
    source: str


def lower_opset(model: ir.Model, path: Path, opset: Opset, compiler: str) -> None:
    """Declare the newest opset that a compiler reads, in place, if all the model's operators have the same meaning in
    it.

    Args:
        path, compiler: the model's file and the compiler, for messages.

    Raises:
        ModelError: an operator has another meaning in that opset; the message names the operator.
    """
    newest, now = opset.newest, opset_of(model)
    if now <= newest:
        return
    for node in model.graph:
        known = onnx.defs.has(node.op_type, newest, "") and node.op_type not in opset.changed
        if node.domain in MAIN_DOMAINS and not known:
            raise ModelError(
                f"{path}: {node.name!r} is the {node.op_type} of opset {now}; {compiler} ends at {newest}",
                f"Export the model with opset {newest}",
            )
    # Only the declaration changes: the check above makes sure that every operator means the same in the older opset.
    model.opset_imports[""] = newest
    model.graph.opset_imports[""] = newest


def _copied(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy
