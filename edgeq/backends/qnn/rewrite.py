"""Q/DQ pairs on every tensor of every node that the NPU takes, by ONNX Runtime's own quantizer and its rules for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.ranges import Range
from edgeq.calibrate.tensors import share_ranges
from edgeq.errors import HardwareError, ModelError
from edgeq.model.edit import Editor, replace_node
from edgeq.model.fold import norm_factors
from edgeq.model.graph import is_constant, is_op, name_of, sizes
from edgeq.model.int8_prediction import Rule, int8_rules, predict_int8
from edgeq.model.operators import DATA_MOVEMENT
from edgeq.model.prepare import PreparedModel, rewritten
from edgeq.quantize.qdq import lasting_clamps
from edgeq.quantize.quantizer import chosen_params, quant_type, quantize_with_ranges, quiet
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.util.records import read_toml
from edgeq.util.resources import shipped

_NARROW = 8


def write_pairs(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    destination: Path,
    rules: Mapping[str, Rule] | None = None,
) -> dict[str, str]:
    """Write the quantized model; gives the nodes that stay in float, each with its reason.

    Args:
        rules: what is quantized; None: what is known of the NPU.

    Raises:
        CalibrationError: a tensor has no range.
        ModelError: the quantizer refuses the model, or nothing in it can be quantized.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    rules = rules or int8_rules("qnn")
    predicted = predict_int8(prepared.model, rules, scheme.replace(per_channel=False), hazards=prepared.hazards)
    left = {node.name: node.reason for node in predicted if node.verdict == "float"}
    types = sorted({node.op_type for node in predicted if node.verdict == "int8"})
    if not types:
        raise ModelError(f"{prepared.source}: no node of it runs in integers on the NPU", next(iter(left.values()), ""))
    overrides = {name_of(v): [{"quant_type": QuantType.QUInt16}] for v in _wide(prepared.model, scheme)}
    overrides |= {name: [{"quant_type": QuantType.QUInt8}] for name in _unsigned(prepared.model)}
    one_scale = [{"quant_type": quant_type(scheme.weight_type), "symmetric": scheme.weight_symmetric}]
    overrides |= dict.fromkeys(_grouped_transposed(prepared.model), one_scale)
    activation = QuantType.QUInt16 if ALL_NODES in scheme.wide else quant_type(scheme.activation_type)
    with quiet():
        config = get_qnn_qdq_config(
            str(prepared.path),
            None,  # ranges are known
            activation_type=activation,
            weight_type=quant_type(scheme.weight_type),
            per_channel=scheme.per_channel,
            init_overrides=overrides or None,
            activation_symmetric=scheme.activation_symmetric,
            weight_symmetric=scheme.weight_symmetric,
            op_types_to_quantize=types,
            nodes_to_exclude=sorted(left),
        )
    shared = {**ranges, **share_ranges(prepared.model, ranges, DATA_MOVEMENT)}
    options = {k: v for k, v in config.extra_options.items() if v is not None}
    dtype = ir.DataType(int(activation.tensor_type))
    if lasting_clamps(prepared.model.graph, chosen_params(shared, dtype, symmetric=scheme.activation_symmetric)):
        options["QDQKeepRemovableActivations"] = True
    quantize_with_ranges(
        prepared,
        destination,
        shared,
        float_nodes=left,
        fix="Keep the node in float with --exclude",
        fix_ranges="The calibration does not cover this tensor: calibrate this model again",
        op_types_to_quantize=types,
        per_channel=scheme.per_channel,
        activation_type=activation,
        weight_type=quant_type(scheme.weight_type),
        extra_options=options,
    )
    return left


def _unsigned(model: ir.Model) -> set[str]:
    """Constants of the operators that take uint8 alone, by what was executed."""
    types = {row.operator for row in dialect() if row.right and row.weights == "uint8" and row.bits == _NARROW}
    types -= {row.operator for row in dialect() if row.right and row.weights == "int8" and row.bits == _NARROW}
    second = (node.inputs[1] for node in model.graph if node.op_type in types and len(node.inputs) > 1)
    return {name_of(value) for value in second if value is not None and is_constant(value)}


def _grouped_transposed(model: ir.Model) -> set[str]:
    """Weights of transposed convolutions in groups: [C_in, C_out / groups, ...], so that a scale for each place on the
    axis of the outputs is none for each output, as their bias needs."""
    layers = [node for node in model.graph if is_op(node, "ConvTranspose")]
    return {name_of(node.inputs[1]) for node in layers if node.attributes.get_int("group", 1) > 1}


@dataclass(frozen=True)
class Row:
    """What the NPU does with one operator in one form; targets/qnn/htp.toml says what the fields are."""

    operator: str
    form: str
    bits: int
    weights: str
    taken_by: tuple[str, ...]
    right: bool = False
    db: float = 0.0
    arithmetic_db: float = 0.0
    steps: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class _Table:
    version: str
    line: tuple[Row, ...]


@cache
def dialect() -> tuple[Row, ...]:
    """The rows of targets/qnn/htp.toml."""
    return read_toml(shipped("targets") / "qnn" / "htp.toml", _Table, HardwareError, "Install edgeq again").line


def wide_share(model: ir.Model, scheme: Scheme) -> float:
    """The share of the activations' elements that a scheme has in 16 bits."""
    every = {name_of(v): prod(sizes(v) or (1,)) for v in _activations(model) if v.producer() is not None}
    wide = every if ALL_NODES in scheme.wide else {name_of(value) for value in _wide(model, scheme)}
    return sum(size for name, size in every.items() if name in wide) / max(1, sum(every.values()))


def _wide(model: ir.Model, scheme: Scheme) -> list[ir.Value]:
    """The tensors in 16 bits: what the nodes of the scheme make, and inputs that only those read. The quantizer's rules
    convert what else those nodes read, and what others read of them."""
    nodes = frozenset(scheme.wide) - {ALL_NODES}

    def is_wide(value: ir.Value) -> bool:
        """Whether a tensor is on 16 bits: its maker is named, or of an input all readers are."""
        maker = value.producer()
        among = [maker] if maker is not None else [reader for reader, _ in value.uses()]
        return bool(among) and all(node.name in nodes for node in among)

    return [value for value in _activations(model) if is_wide(value)]


def _activations(model: ir.Model) -> list[ir.Value]:
    """The float tensors that are not constant."""
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    made = [value for node in model.graph for value in node.outputs]
    return [value for value in (*inputs, *made) if value.dtype in (None, ir.DataType.FLOAT)]


def rewrite(
    prepared: PreparedModel, ranges: Mapping[str, Range], path: Path
) -> tuple[PreparedModel, Mapping[str, Range]]:
    """`prepared` with each BatchNormalization that preparation could not fold as a depthwise convolution of 1 x 1, and
    the ranges with those of the tensors that this adds. Written to `path` where anything changes."""
    if not any(is_op(node, "BatchNormalization") for node in prepared.model.graph):
        return prepared, ranges
    model, more = prepared.model.clone(), dict(ranges)
    editor = Editor(model)
    norms = [node for node in model.graph if is_op(node, "BatchNormalization")]
    changed = sum(_as_convolution(node, editor, more) for node in norms)
    if not changed:
        return prepared, ranges
    return rewritten(prepared, model, path, f"{changed} BatchNormalization written as depthwise convolutions"), more


def _as_convolution(norm: ir.Node, editor: Editor, ranges: dict[str, Range]) -> bool:
    """y = x * factor + shift for each channel, in place; whether that could be done."""
    source, result = norm.inputs[0], norm.outputs[0]
    shape, factors = sizes(source), norm_factors(norm)
    if source is None or shape is None or len(shape) < 2 or isinstance(factors, str):
        return False
    factor, added = factors
    channels, flat = len(factor), len(shape) != 4
    name = str(norm.name)
    read = source
    if flat:
        image = editor.constant(f"{name}/image", np.array([shape[0], channels, 1, -1], np.int64))
        read = editor.node("Reshape", [source, image], f"{name}/image_of", before=norm)
        ranges[name_of(read)] = ranges[name_of(source)]
    weight = editor.constant(f"{name}/weight", factor.reshape(-1, 1, 1, 1).astype(np.float32))
    shift = editor.constant(f"{name}/shift", added.astype(np.float32))
    made = editor.node(
        "Conv", [read, weight, shift], name, before=norm, attributes={"group": channels, "kernel_shape": [1, 1]}
    )
    if flat:
        ranges[name_of(made)] = ranges[name_of(result)]
        back = editor.constant(f"{name}/shape", np.array(shape, np.int64))
        made = editor.node("Reshape", [made, back], f"{name}/shape_of", before=norm)
    replace_node(norm, made)
    return True
