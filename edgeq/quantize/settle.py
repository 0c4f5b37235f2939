"""Make quantized models right and fast on ONNX Runtime's CPU kernels.

Layers that were kept in float stay so in every session, with or without session options.

At load, ONNX Runtime's WeightBiasQuantization quantizes the weights of a float Conv or Gemm between integer tensors,
per tensor: what was kept in float for accuracy loses more of it than any other layer. A session option prevents that,
and is lost where the file is used alone. The optimizer looks for one scale on the tensor that the layer reads. So the
layer gets a DequantizeLinear of its own, with the same scale written once per channel: the same numbers, in a form that
the optimizer does not match.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from edgeq_device.options import KEY as CARRIED

from edgeq.model.edit import Editor
from edgeq.model.graph import computed_constants, constant, constant_tensor, is_op, name_of, node_input
from edgeq.model.int8_prediction import slow_fusions

# For what `guard_float_layers` has no form of.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_REQUANTIZED_AT_LOAD = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_SUFFIX = "/kept_in_float"


def guard_float_layers(model: ir.Model, names: Collection[str]) -> int:
    """Give each of the named nodes that reads a dequantized tensor its own DequantizeLinear per channel, in place.

    Args:
        names: of Conv, ConvTranspose, Gemm and MatMul nodes with constant weights.

    Returns:
        How many nodes were changed.
    """
    editor = Editor(model)
    changed = 0
    for node, maker in _behind_dequantize(model, names):
        restored, weight = maker.outputs[0], constant_tensor(node.inputs[1])
        if weight is None:
            continue
        parameters = {value.name: constant(value) for value in maker.inputs[1:] if value is not None}
        if not all(number is not None and not number.ndim for number in parameters.values()):
            continue
        axis, channels = _channels(node, tuple(weight.shape.numpy()))
        if channels == 1:  # one number per channel would be one scale again
            axis, channels = next(
                ((axis, n) for axis, n in enumerate(restored.shape or ()) if isinstance(n, int) and n > 1), (axis, 1)
            )
        if channels == 1:
            continue
        repeated = [
            editor.constant(f"{name}/{channels}_times", np.full(channels, number))
            for name, number in parameters.items()
        ]
        own = editor.node(
            "DequantizeLinear",
            [maker.inputs[0], *repeated],
            f"{node.name}{_SUFFIX}",
            before=node,
            attributes={"axis": axis},
        )
        node.replace_input_with(0, own)
        changed += 1
        if not restored.uses() and not restored.is_graph_output():
            model.graph.remove(maker, safe=True)
    return changed


def requantized_at_load(model: ir.Model, names: Collection[str]) -> tuple[str, ...]:
    """Return those of the named nodes that the optimizer may match: they read a tensor that is dequantized with one
    scale."""
    scales = [(node, constant(maker.inputs[1])) for node, maker in _behind_dequantize(model, names)]
    return tuple(str(node.name) for node, scale in scales if scale is None or scale.size == 1)


def _behind_dequantize(model: ir.Model, names: Collection[str]) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yield the named nodes that read a dequantized tensor, each with the DequantizeLinear."""
    for node in model.graph:
        data = node.inputs[0] if node.name in names else None
        made = data.producer() if data is not None else None
        if made is not None and is_op(made, "DequantizeLinear"):
            yield node, made


def _channels(node: ir.Node, weight: tuple[int, ...]) -> tuple[int, int]:
    """(axis, size) of the channels of the data that a node sums over."""
    if node.op_type == "Conv":
        return 1, weight[1] * node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose":
        return 1, weight[0]
    if node.op_type == "Gemm":
        rows = weight[1] if node.attributes.get_int("transB", 0) else weight[0]
        return 0 if node.attributes.get_int("transA", 0) else 1, rows
    return -1, weight[-2] if len(weight) > 1 else weight[0]


def settle(
    built: ir.Model, given: Mapping[str, str] | None = None, *, guard: bool = True
) -> tuple[dict[str, str], tuple[str, ...], bool]:
    """Make a quantized model right and fast on ONNX Runtime's CPU kernels, in place: by the form of its graph where
    that does it (`guard_float_layers`), else by session options, which its metadata carry.

    Args:
        given: options that are set already; they are among those returned.
        guard: whether the form of the graph may be changed.

    Returns:
        The session options, why each thing was done, and whether the model was changed.
    """
    options = dict(given or {})
    disabled = [name for name in options.get(_DISABLED, "").split(";") if name]
    notes = []
    kept = float_compute_nodes(built)
    guarded = guard_float_layers(built, kept) if guard else 0
    if guarded:
        notes.append(
            f"compute nodes that stay in float: {guarded}, in a form that ONNX Runtime does not quantize at load"
        )
    at_risk = requantized_at_load(built, kept)
    if at_risk:
        disabled.append(_REQUANTIZER)
        notes.append(
            f"compute nodes that stay in float: {len(at_risk)}; the session option {_DISABLED} keeps ONNX Runtime from "
            "quantizing their weights at load"
        )
    for fusion in slow_fusions("cpu", built):
        disabled.append(fusion.optimizer)
        notes.append(f"without ONNX Runtime's {fusion.optimizer}: {fusion.reason}")
    if disabled:
        options[_DISABLED] = ";".join(dict.fromkeys(disabled))
    before = built.metadata_props.pop(CARRIED, None)
    if options:
        built.metadata_props[CARRIED] = json.dumps(options, sort_keys=True)
    return options, tuple(notes), guarded > 0 or before != built.metadata_props.get(CARRIED)


def float_compute_nodes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of Conv, ConvTranspose, Gemm and MatMul nodes with a constant float weight in a graph that has Q
    nodes."""
    if not any(node.op_type == "QuantizeLinear" for node in model.graph):
        return ()
    constants = computed_constants(model.graph)
    found = []
    for node in model.graph:
        weight = node_input(node, 1) if node.op_type in _REQUANTIZED_AT_LOAD else None
        is_float = weight is not None and not is_op(weight.producer(), "DequantizeLinear")
        if is_float and name_of(weight) in constants:
            found.append(str(node.name))
    return tuple(found)
