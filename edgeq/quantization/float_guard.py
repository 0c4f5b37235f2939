"""Finish a quantized model of any quantizer, so that ONNX Runtime computes it as it was written.

`fit_to_runtime` keeps float layers in float in every session, with or without session options. When a model is loaded,
ONNX Runtime's WeightBiasQuantization quantizes the weights of a float Conv or Gemm between integer tensors, with one
scale per tensor. A layer that was kept in float for accuracy then loses more accuracy than any other. A session option
prevents this, but it is lost if the file is used alone. The optimizer matches a layer only if the layer's input is
dequantized with one scale. So edgeq gives the layer its own DequantizeLinear, which repeats the same scale for each
channel. The numbers are the same, but the optimizer does not match this form.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from edgeq_device.engines.options import KEY as CARRIED

from edgeq.model.edit import Editor, drop_unused_initializers
from edgeq.model.graph import computed_constants, constant, constant_tensor, is_op, name_of, node_input
from edgeq.model.int8_rules import slow_fusions

# Session option for layers that `guard_float_layers` cannot change.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
# Types that WeightBiasQuantization matches.
_REQUANTIZED_AT_LOAD = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_SUFFIX = "/kept_in_float"


def guard_float_layers(model: ir.Model, names: Collection[str]) -> int:
    """Give each named node that reads a dequantized tensor its own DequantizeLinear with per-channel scales, in place.

    Args:
        names: names of Conv, ConvTranspose, Gemm and MatMul nodes with constant weights.

    Returns:
        The number of nodes that were changed.
    """
    editor = Editor(model)
    changed = 0
    for node, maker in _find_dequantized(model, names):
        restored, weight = maker.outputs[0], constant_tensor(node.inputs[1])
        if weight is None:
            continue
        parameters = {value.name: constant(value) for value in maker.inputs[1:] if value is not None}
        # Scales per channel are never matched, and computed ones cannot be repeated here.
        if not all(number is not None and not number.ndim for number in parameters.values()):
            continue
        axis, channels = _channels(node, tuple(weight.shape.numpy()))
        if channels == 1:  # With one channel, a scale per channel would again be a single scale.
            axis, channels = next(
                ((axis, n) for axis, n in enumerate(restored.shape or ()) if isinstance(n, int) and n > 1), (axis, 1)
            )
        if channels == 1:
            continue
        repeated = [
            editor.constant(f"{name}/{channels}_times", np.full(channels, number))
            for name, number in parameters.items()
        ]
        dequantized = editor.node(
            "DequantizeLinear",
            [maker.inputs[0], *repeated],
            f"{node.name}{_SUFFIX}",
            before=node,
            attributes={"axis": axis},
        )
        node.replace_input_with(0, dequantized)
        changed += 1
        # The last reader of the shared DequantizeLinear may just have left it.
        if not restored.uses() and not restored.is_graph_output():
            model.graph.remove(maker, safe=True)
    return changed


def find_requantized(model: ir.Model, names: Collection[str]) -> tuple[str, ...]:
    """Return those of the named nodes whose weights ONNX Runtime may quantize when it loads the model.

    These nodes read a tensor that is dequantized with one scale, or with a scale that is not constant.
    """
    scales = [(node, constant(maker.inputs[1])) for node, maker in _find_dequantized(model, names)]
    return tuple(str(node.name) for node, scale in scales if scale is None or scale.size == 1)


def _find_dequantized(model: ir.Model, names: Collection[str]) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yield each named node that reads a dequantized tensor, together with the DequantizeLinear."""
    for node in model.graph:
        data = node.inputs[0] if node.name in names else None
        producer = data.producer() if data is not None else None
        if producer is not None and is_op(producer, "DequantizeLinear"):
            yield node, producer


def _channels(node: ir.Node, weight: tuple[int, ...]) -> tuple[int, int]:
    """Return the axis of a node's data along which the node sums over channels, and the number of these channels."""
    if node.op_type == "Conv":
        return 1, weight[1] * node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose":
        return 1, weight[0]
    if node.op_type == "Gemm":
        rows = weight[1] if node.attributes.get_int("transB", 0) else weight[0]
        return 0 if node.attributes.get_int("transA", 0) else 1, rows
    return -1, weight[-2] if len(weight) > 1 else weight[0]


def fit_to_runtime(
    built: ir.Model, session_options: Mapping[str, str] | None = None, *, guard: bool = True
) -> tuple[dict[str, str], tuple[str, ...], bool]:
    """Make a quantized model correct and fast on ONNX Runtime's CPU kernels, in place.

    If a change to the graph is enough, edgeq changes the graph (`guard_float_layers`). Otherwise it sets session
    options, which are stored in the model's metadata.

    Args:
        session_options: options that are already set; the result includes them.
        guard: whether the graph may be changed.

    Returns:
        The session options, the reason for each change, and whether the graph was changed.
    """
    options = dict(session_options or {})
    # Optimizers that the user disabled stay disabled.
    disabled = [name for name in options.get(_DISABLED, "").split(";") if name]
    notes = []
    float_layers = float_compute_nodes(built)
    # A change of the graph comes first, because it travels with the file. An option may be lost.
    guarded = guard_float_layers(built, float_layers) if guard else 0
    if guarded:
        notes.append(
            f"compute nodes that stay in float: {guarded}, in a form that ONNX Runtime does not quantize at load"
        )
    unfused = guard_products(built) if guard else 0
    at_risk = find_requantized(built, float_layers)
    if at_risk:
        disabled.append(_REQUANTIZER)
        notes.append(
            f"compute nodes that stay in float: {len(at_risk)}; the session option {_DISABLED} keeps ONNX Runtime from "
            "quantizing their weights at load"
        )
    # A fusion can make a correct model slower. The table lists those that were measured.
    for fusion in slow_fusions("cpu", built):
        disabled.append(fusion.optimizer)
        notes.append(f"without ONNX Runtime's {fusion.optimizer}: {fusion.reason}")
    # The same optimizer may have been disabled for several reasons.
    if disabled:
        options[_DISABLED] = ";".join(dict.fromkeys(disabled))
    earlier_options = built.metadata_props.pop(CARRIED, None)
    if options:
        built.metadata_props[CARRIED] = json.dumps(options, sort_keys=True)
    return options, tuple(notes), guarded + unfused > 0 or earlier_options != built.metadata_props.get(CARRIED)


def guard_products(model: ir.Model) -> int:
    """Find the biases that are added after integer MatMuls of known sizes, and give each as many axes as the product,
    in place. Return how many were changed.

    When ONNX Runtime loads a model, its MatMulAddFusion turns a MatMul and an Add of a vector into a Gemm, even if the
    MatMul has integer weights. The vector is not an integer bias, so the Gemm computes in float. The fusion does not
    match a bias with more axes.
    """
    editor, guarded = Editor(model), 0
    for node in [node for node in model.graph if is_op(node, "Add")]:
        for product, bias in (node.inputs, node.inputs[::-1]):
            values = constant(bias)
            if product is None or bias is None or values is None or values.ndim > 1 or not _is_wide(product):
                continue
            sizes = (1,) * (len(product.shape or ()) - 1) + values.shape[-1:]
            wide = editor.constant(f"{name_of(bias)}/wide", values.reshape(sizes))
            node.replace_input_with(list(node.inputs).index(bias), wide)
            guarded += 1
            break
    if guarded:
        drop_unused_initializers(model.graph)
    return guarded


def _is_wide(product: ir.Value) -> bool:
    """Return whether a tensor is the result of a MatMul with integer weights and has at least three axes of known
    size.
    """
    node, shape = product.producer(), product.shape
    weight = node_input(node, 1) if node is not None and is_op(node, "MatMul") else None
    has_sizes = shape is not None and len(shape) > 2 and all(isinstance(size, int) for size in shape)
    return has_sizes and weight is not None and is_op(weight.producer(), "DequantizeLinear")


def float_compute_nodes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of Conv, ConvTranspose, Gemm and MatMul nodes with a constant float weight.

    Return an empty tuple if the graph has no QuantizeLinear nodes.
    """
    # WeightBiasQuantization matches only between integer tensors.
    if not any(node.op_type == "QuantizeLinear" for node in model.graph):
        return ()
    constants = computed_constants(model.graph)
    names = []
    for node in model.graph:
        weight = node_input(node, 1) if node.op_type in _REQUANTIZED_AT_LOAD else None
        is_float = weight is not None and not is_op(weight.producer(), "DequantizeLinear")
        if is_float and name_of(weight) in constants:
            names.append(str(node.name))
    return tuple(names)
