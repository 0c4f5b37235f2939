"""Implement `edgeq.retarget`: rewrite a quantized model in another format or with other integer types, and compare it
with the original.

From QDQ to QOperator, an integer operator replaces each float operator between DequantizeLinear and QuantizeLinear. An
operator stays unchanged if it has no integer form, or if not all its tensors are quantized. A Relu or Clip before the
QuantizeLinear is removed if the range of the integers already clamps the same way. Otherwise, it becomes a Clip of the
integers. Quantization keeps the order of numbers, so clamping after it gives the same result as clamping before it.

From QOperator to QDQ, each integer operator becomes DequantizeLinear, the float operator and QuantizeLinear. Nothing is
lost: the integers, scales and zero points are still those of the operator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.engines.catalog import load_wrong_kernels
from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import ONNX, SIMULATORS, backend_for, check_suffix
from edgeq.errors import CheckFailedError, ModelError, RuntimeUnavailableError, UsageError
from edgeq.hardware.target import Target, resolve
from edgeq.model.clean import remove_no_ops, tidy
from edgeq.model.convert import from_proto, to_proto
from edgeq.model.edit import Editor, replace_value
from edgeq.model.files import data_name, data_names, model_files
from edgeq.model.graph import (
    MAIN_DOMAINS,
    MICROSOFT,
    OPERATORS,
    IntegerInput,
    bodies,
    channel_axis,
    constant,
    integer_inputs,
    is_op,
    moves_data,
    node_input,
    operator_of,
    opset_of,
)
from edgeq.model.integer_products import integer_products
from edgeq.model.load import check_valid, is_quantized, load_model, save_model
from edgeq.model.names import name_nodes
from edgeq.model.opset import LOWEST, raise_opset
from edgeq.model.quant_params import QuantParams
from edgeq.model.shapes import write_shapes
from edgeq.quantization.float_guard import fit_to_runtime
from edgeq.retargeting.compare import USUAL, RetargetComparison, compare, compare_by_default, compare_sessions
from edgeq.retargeting.normalise import normalise
from edgeq.retargeting.operands import In, Out, clamp_integers, has_constant_clamp, product_problem, read_sides
from edgeq.retargeting.read import Form, check_form, is_integer_operator, read_form
from edgeq.retargeting.shift import INTEGERS, limit_weights, params_at, params_of, shift_activations, shift_weights
from edgeq.retargeting.traits import check_target
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.bundle_names import check_model_name
from edgeq.util.display import Displayed
from edgeq.util.outputs import check_apart, output_file
from edgeq.util.paths import path_of

_PRODUCTS = ("Conv", "Gemm", "MatMul")
# Number of inputs that must be quantized for an operator to have an integer form; 0 means all inputs.
_QUANTIZED_INPUTS = {
    **dict.fromkeys((*_PRODUCTS, "Add", "Mul"), 2),
    **dict.fromkeys(("Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Relu", "Clip"), 1),
    "Concat": 0,
}


def to_qoperator(model: ir.Model, accepts: Callable[[ir.Node], bool] = lambda node: True) -> tuple[int, list[str]]:
    """Rewrite float operators between Q/DQ pairs as integer operators, in place.

    Args:
        accepts: function that selects the operators to rewrite.

    Returns:
        The number of rewritten operators, and the operators with weights that stayed in float, each with the reason.
    """
    editor = Editor(model)
    # An operator is rewritten only if one QuantizeLinear reads its output, so duplicates would keep it in float.
    _share_quantizers(editor)
    count, unchanged = 0, []
    for node in list(model.graph):
        # A node without a graph was removed as the clamp of an operator before it.
        has_integer_form = node.op_type in _QUANTIZED_INPUTS or moves_data(node)
        if not has_integer_form or node.domain not in MAIN_DOMAINS or node.graph is None or not accepts(node):
            continue
        reason = _to_integers(node, editor)
        if not reason:
            count += 1
        # Only products cost enough time in float to be worth a line.
        elif node.op_type in _PRODUCTS:
            unchanged.append(f"{node.op_type} {node.name} stays between Q and DQ: {reason}")
    return count, unchanged


def _to_integers(node: ir.Node, editor: Editor) -> str:
    """Replace an operator with its integer form and return "". If it has no integer form, return the reason."""
    operands = read_sides(node, _QUANTIZED_INPUTS.get(node.op_type, 1) or len(node.inputs))
    if isinstance(operands, str):
        return operands
    if node.op_type in ("Relu", "Clip"):
        return _clamp(node, *operands, editor)
    if node.op_type not in _QUANTIZED_INPUTS:
        return _data_movement(node, *operands, editor)
    return (product_problem(node, operands[0]) if node.op_type in _PRODUCTS else "") or _compute(
        node, *operands, editor
    )


def _share_quantizers(editor: Editor) -> None:
    """If a tensor has several QuantizeLinear nodes with the same parameters, keep only one of them."""
    for node in list(editor.graph):
        for output in node.outputs:
            quantizers: list[tuple[ir.Node, QuantParams]] = []
            for user, _ in list(output.uses()):
                params = params_of(user) if is_op(user, "QuantizeLinear") else None
                if params is None or user.graph is not editor.graph:
                    continue
                duplicate = next((n for n, p in quantizers if p.equals(params)), None)
                if duplicate is None:
                    quantizers.append((user, params))
                elif not user.outputs[0].is_graph_output():
                    # The duplicate may come later in the list, but the graph is sorted at the end.
                    replace_value(user.outputs[0], duplicate.outputs[0])
                    editor.graph.remove(user, safe=True)


def _emit(
    op_type: str,
    inputs: list[ir.Value | None],
    node: ir.Node,
    out: Out,
    editor: Editor,
    *,
    domain: str = "",
) -> str:
    """Replace an operator, its clamp and its QuantizeLinear with one integer operator."""
    result = editor.node(
        op_type,
        inputs,
        f"{node.name or node.op_type}_quant",
        before=out.quantize,
        like=node.outputs[0],
        dtype=out.params.dtype,
        # beta is 1 here, and QGemm does not have it.
        attributes={name: value for name, value in node.attributes.items() if name != "beta"},
        domain=domain,
    )
    replace_value(out.quantize.outputs[0], clamp_integers(result, out, editor))
    for gone in (out.quantize, out.clamp, node):
        if gone is not None:
            editor.graph.remove(gone, safe=True)
    return ""


def _compute(node: ir.Node, connected: list[In], out: Out, editor: Editor) -> str:
    """Write the integer operator, with its inputs in the order that the operator table gives."""
    mixed = any(side.params.dtype != out.params.dtype or side.params.per_channel for side in connected)
    # These kernels read all their inputs in the type of the output, with one scale each.
    if node.op_type in ("Add", "Mul", "Concat") and mixed:
        return "its inputs are of different types"
    if node.op_type == "AveragePool" and (
        node.attributes.get_int("ceil_mode", 0) != 0 or any(d != 1 for d in node.attributes.get_ints("dilations", []))
    ):
        return "it has ceil_mode or dilations"
    if node.op_type == "Gemm" and node.attributes.get_float("beta", 1.0) != 1.0:
        return "beta is not 1"
    op_type = "QGemm" if node.op_type == "Gemm" else f"QLinear{node.op_type}"
    row = OPERATORS[op_type]
    bias, reason = _bias(node, connected, editor) if row.bias is not None else (None, "")
    if reason:
        return reason
    operands: list[ir.Value | None] = []
    for place, side in enumerate(connected):
        operands += [side.value, *editor.parameters(side.params, f"{node.name}/in{place}")]
    assert row.integer_output is not None, "QLinear operators give integers"
    behind: dict[int, tuple[ir.Value | None, ...]] = {
        row.integer_output[0]: editor.parameters(out.params, f"{node.name}/out")
    }
    if row.bias is not None:
        behind[row.bias] = (bias,)
    # In ascending order, because each insertion moves the inputs behind it.
    for place, values in sorted(behind.items(), key=lambda item: item[0]):
        operands[place:place] = values
    # A bias that is missing is the last operand, which the node leaves out.
    if operands[-1] is None:
        operands.pop()
    # ONNX defines only these two. The others are ONNX Runtime's own.
    domain = "" if op_type in ("QLinearConv", "QLinearMatMul") else MICROSOFT
    return _emit(op_type, operands, node, out, editor, domain=domain)


def _data_movement(node: ir.Node, inputs: list[In], out: Out, editor: Editor) -> str:
    """Let an operator that only moves values work directly on the integers. The parameters before and after the
    operator must be the same.
    """
    if node.op_type in ("Pad", "Expand", "Tile", "Split") or len(node.outputs) != 1:
        return "no integer form"
    # Moving integers keeps the numbers only if both sides read the integers the same way.
    if out.clamp is not None or not inputs[0].params.equals(out.params):
        return "its scale changes"
    return _emit(node.op_type, [inputs[0].value, *node.inputs[1:]], node, out, editor)


def _clamp(node: ir.Node, inputs: list[In], out: Out, editor: Editor) -> str:
    """Replace a standalone Relu or Clip with a Clip of the integers. The DequantizeLinear before it and the
    QuantizeLinear after it must have the same parameters.
    """
    source, alone = inputs[0], Out(out.quantize, out.params, node)
    if out.clamp is not None or not source.params.equals(out.params) or not has_constant_clamp(alone):
        return "its scale or a bound changes"
    integers = clamp_integers(source.value, alone, editor)
    if integers is source.value and out.quantize.outputs[0].is_graph_output():
        return (
            "its output is an output of the model"  # an output cannot be the same tensor as an input or another output
        )
    replace_value(out.quantize.outputs[0], integers)
    editor.graph.remove([out.quantize, node], safe=True)
    return ""


def _bias(node: ir.Node, operands: list[In], editor: Editor) -> tuple[ir.Value | None, str]:
    """Return the bias as int32 in units of input scale times weight scale, and "". If the bias has no such form, return
    None and the reason.
    """
    value = node_input(node, 2)
    if value is None:
        return None, ""
    numbers = constant(value)
    if numbers is None:
        maker = value.producer()
        params = params_of(maker) if maker is not None and is_op(maker, "DequantizeLinear") else None
        integers = constant(maker.inputs[0]) if maker is not None and params is not None else None
        if params is None or integers is None:
            return None, "its bias is not constant"
        scale, zero = params.spread(integers.shape)
        numbers = (integers.astype(np.int64) - zero).astype(np.float64) * scale
    unit = operands[0].params.scale.reshape(-1)[:1].astype(np.float64) * operands[1].params.scale.reshape(-1)
    unit *= node.attributes.get_float("alpha", 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):  # alpha may be 0
        levels = np.rint(numbers.astype(np.float64) / unit)
    # The comparison is false for NaN, too, which an alpha of 0 gives.
    if not np.all(np.abs(levels) <= np.iinfo(np.int32).max):
        return None, "its bias does not fit into int32"
    return editor.constant(f"{value.name}/int32", levels.astype(np.int32)), ""


# The float forms of these operators have other inputs or attributes.
_OTHERWISE = frozenset({"QLinearReduceMean", "QLinearWhere"})
# No float form has these attributes.
_OWN_ATTRIBUTES = frozenset({"channels_last", "opset"})


def to_qdq(model: ir.Model) -> list[str]:
    """Rewrite integer operators as float operators between Q and DQ, in place. Return the operators for which this
    function has no float form.
    """
    editor, unchanged = Editor(model), []
    for node in list(model.graph):
        if not is_integer_operator(node):
            continue
        if _write_float_form(node, editor):
            editor.graph.remove(node, safe=True)
        else:
            unchanged.append(f"{node.op_type} {node.name} stays as it is")
    return unchanged


def _write_float_form(node: ir.Node, editor: Editor) -> bool:
    """Write the float form of an integer operator between Q and DQ, and return whether there is such a form."""
    row, output = operator_of(node), node.outputs[0]
    if row.integer_output is None or node.op_type in _OTHERWISE or node.domain not in (*MAIN_DOMAINS, MICROSOFT):
        return False
    if node.attributes.get_int("channels_last", 0) != 0 or _flattens(node):
        return False
    # QGemm without a scale for its output gives floats.
    gives_floats = node.op_type == "QGemm" and node_input(node, row.integer_output[0]) is None
    operands = [(node_input(node, places.value), _operand(node, places)) for places in integer_inputs(node)]
    quantized = [(value, params) for value, params in operands if value is not None and params is not None]
    output_params = params_at(node, row.integer_output[0])
    if len(quantized) < len(operands) or (output_params is None and not gives_floats):
        return False
    if any(params.scale.ndim > 1 for _, params in quantized):
        return False
    bias = node_input(node, row.bias)
    if bias is not None:
        params = _float_bias(node, bias, quantized[0][1], quantized[1][1])
        if params is None:
            return False
        quantized.append((bias, params))
    result = editor.node(
        row.float_form,
        [editor.dequantize(value, params, f"{value.name}/float", before=node) for value, params in quantized],
        f"{(node.name or row.float_form).removesuffix('_quant')}/float",
        before=node,
        like=output,
        dtype=ir.DataType.FLOAT,
        attributes={key: value for key, value in node.attributes.items() if key not in _OWN_ATTRIBUTES},
    )
    if output_params is not None:
        result = editor.quantize(result, output_params, f"{output.name}/integers", before=node)
    replace_value(output, result)
    return True


def _operand(node: ir.Node, places: IntegerInput) -> QuantParams | None:
    assert places.scale is not None, "only operators that give integer sums have no scale"
    if places.value not in operator_of(node).weights:
        return params_at(node, places.scale)
    value, axis = node_input(node, places.value), channel_axis(node)
    rank = len(value.shape) if value is not None and value.shape is not None else 2
    return params_at(node, places.scale, axis % rank)


def _flattens(node: ir.Node) -> bool:
    """Return whether `node` is a Softmax of opset 12 or older, which normalizes jointly over several trailing axes."""
    if node.op_type != "QLinearSoftmax" or node.attributes.get_int("opset", LOWEST) >= LOWEST:
        return False
    axis, data = node.attributes.get_int("axis", -1), node.inputs[0]
    return axis != -1 and (data is None or data.shape is None or axis != len(data.shape) - 1)


def _float_bias(node: ir.Node, bias: ir.Value, data: QuantParams, weight: QuantParams) -> QuantParams | None:
    """Return the parameters that turn an int32 bias, in units of input scale times weight scale, into floats.

    Return None if one bias value belongs to several output channels with different units.
    """
    factor = np.float32(node.attributes.get_float("alpha", 1.0))
    scale = (data.scale.reshape(-1)[:1] * weight.scale * factor).astype(np.float32).reshape(-1)
    shape = bias.shape if bias.shape is not None else scale.shape
    if scale.size > 1 and (not len(shape) or shape[-1] != scale.size):
        return None
    return QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT32, axis=max(len(shape) - 1, 0))


FORMATS = ("QDQ", "QOperator")


@dataclass(frozen=True)
class Retargeted(Displayed):
    """Report what `retarget` did.

    Attributes:
        before, after: the forms of the original and of the new model.
        changes: the changes, one phrase each.
        kept: the operators and tensors that stayed unchanged, each with the reason.
        comparison: result of comparing both models on made-up inputs without ONNX Runtime's optimiser; None if they do
            not run on such inputs.
        by_default: result of comparing them as they run by default: in ONNX Runtime's default session with
            `session_options`, or, if the target has another format, in the target's engine. None if one of them does
            not run there.
        session_options: options for ONNX Runtime's CPU kernels. Without them, the new model may be less accurate.
    """

    output: Path
    before: Form
    after: Form
    changes: tuple[str, ...]
    kept: tuple[str, ...]
    comparison: RetargetComparison | None
    by_default: RetargetComparison | None
    session_options: Mapping[str, str]

    def __record__(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "before": self.before,
            "after": self.after,
            "changes": self.changes,
            "kept": self.kept,
            "identical": self.comparison.identical if self.comparison is not None else None,
            "largest_difference": _largest(self.comparison),
            "by_default": self.by_default
            and {"identical": self.by_default.identical, "largest": _largest(self.by_default)},
            "session_options": self.session_options,
        }


def _largest(comparison: RetargetComparison | None) -> float | None:
    """Return the largest difference, or None if it is not known or infinite."""
    return comparison.largest if comparison is not None and np.isfinite(comparison.largest) else None


def retarget(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    target: str | Path | None = None,
    format: str | None = None,
    activation_type: str | None = None,
    weight_type: str | None = None,
    wanted: Callable[[ir.Node], bool] = lambda node: True,
    force: bool = False,
) -> Retargeted:
    """Rewrite a quantized model for another runtime. Its scales, and the numbers that its integers represent, stay the
    same.

    Args:
        model: a model with QuantizeLinear and DequantizeLinear nodes (from any tool, or from training in PyTorch or
            TensorFlow), or a model with QLinear operators.
        target: "auto" (this machine), a profile, a target or a .toml file. It sets the format and the integer types
            that the arguments below do not set. None keeps the model's format and types. If the target runs files of
            its own format, such as .tflite, `output` is such a file.
        format: "QDQ" or "QOperator".
        activation_type, weight_type: "int8" or "uint8".
        wanted: for QOperator, a function that selects the operators to rewrite.
        force: whether to replace an existing file at `output`.

    Raises:
        UsageError: a format or type is unknown, int8 activations are combined with uint8 weights, or the name of the
            output has the suffix of another format than the target's.
        ModelError: the model is not quantized, is quantized dynamically, or is damaged; or the kernels of `target` do
            not support its zero points or scales.
        CheckFailedError: only types were to change, but the new model's outputs differ; or the new model does not run.
            In both cases nothing is written.
    """
    model, output = path_of(model), path_of(output, "output")
    place = resolve(target) if target is not None else None
    if place is not None:
        scheme = place.profile.scheme
        format = format or scheme.format
        activation_type = activation_type or scheme.activation_type
        weight_type = weight_type or scheme.weight_type
    _check_request(format, activation_type, weight_type)
    check_model_name(output)
    suffix = check_suffix(output, place)
    # A large model has its weights in a second file, which must not replace an input either.
    for path in (output, output.with_name(data_name(output))):
        check_apart(path, model_files(model))
    with (
        scratch_folder("edgeq-retarget-") as folder,
        output_file(output, force=force, beside=data_names(output, model)) as written_file,
    ):
        draft = written_file if suffix == ONNX else Path(folder) / f"{written_file.stem}{ONNX}"
        graph, changes = _load_quantized(model)
        source_form = read_form(graph)
        if source_form.format == "dynamic" or not source_form.activations:
            raise ModelError(
                f"{model} has no 8-bit activations with constant scales"
                + (", only dynamic quantization" if source_form.format == "dynamic" else ""),
                "It runs as it is. For another runtime use `edgeq quantize FLOAT.onnx ⟨mode='dynamic'⟩ -o OUT.onnx`, "
                "or with "
                "⟨data⟩ SAMPLES instead of ⟨mode='dynamic'⟩",
            )
        unchanged = _rewrite(graph, source_form, changes, format, activation_type, weight_type, wanted)
        # The changes leave nodes that nothing reads, and nodes that come before those that they read.
        tidy(graph)
        graph.graph.sort()
        new_form = read_form(graph)
        name_nodes(graph)
        # A mistake in the rewriting shows here, before the model replaces a file.
        check_valid(to_proto(graph), output)
        session_options, why, _ = fit_to_runtime(graph)
        if place is not None:
            check_target(graph, place, model, source_form)
            changes += _limit(graph, place)
        save_model(graph, draft)
        # If only types change, every operator computes the same numbers, so the outputs must be equal.
        same_operators = format is None and source_form.format == "QDQ"
        branches = any(True for node in graph.graph for _ in bodies(node))
        by_default, problem = compare_by_default(model, draft, session_options, branches=branches)
        comparison = compare(model, draft, same_operators=same_operators, default=by_default)
        if problem:
            unchanged.append(f"ONNX Runtime's optimiser has to be off: {problem}")
        if comparison is None:
            unchanged.append("not compared on noise: the model does not run on made-up inputs")
        # The optimiser turns Q/DQ pairs into integer operators, so its session may be closer to the rewritten model.
        elif (closest := min(c.largest for c in (comparison, by_default) if c is not None)) > USUAL:
            unchanged.append(
                f"outputs on noise differ by {closest:.0%} of the largest, because single 8-bit steps "
                "matter in this model; compare both on your own data (`edgeq compare`)"
            )
        if place is not None and suffix != ONNX:
            session_options, why = {}, ()  # They are for ONNX Runtime.
            changes.append(f"operators → {suffix}")
            backend_for(place).write_file(draft, written_file)
            by_default, problem = _compare_on_target(model, draft, place)
            if problem:
                unchanged.append(f"not compared in the kernels of {place.name}: {problem}")
    return Retargeted(
        output, source_form, new_form, tuple(changes), (*unchanged, *why), comparison, by_default, session_options
    )


def _compare_on_target(source: Path, rewritten: Path, target: Target) -> tuple[RetargetComparison | None, str]:
    """Compare the outputs of a model in ONNX Runtime with those of its rewritten form in the kernels of a target.

    Returns:
        The result and "", or None and the reason why the models cannot be compared.
    """
    simulate = SIMULATORS[target.profile.emulate["simulator"]]
    try:
        with simulate(target) as open_model:
            session = open_model(rewritten, SessionSettings())
            return compare_sessions(source, open_session(source), session), ""
    except (CheckFailedError, RuntimeUnavailableError) as error:
        return None, error.problem


def _limit(graph: ir.Model, target: Target) -> list[str]:
    """Limit weights, in place, if larger ones give wrong results in a release of ONNX Runtime that the target has or
    may have.

    Returns:
        A line for each reason for which weights were limited.
    """
    # If the release is not known, it may be one of those that compute wrongly.
    release, kinds = target.runtime.get("onnxruntime"), set(integer_products(graph))
    lines = []
    for row in load_wrong_kernels():
        concerned = kinds.intersection(row.products) and row.on(target.architecture, target.features)
        if not row.weight_limit or not concerned or (release is not None and not row.in_release(release)):
            continue
        count = limit_weights(graph, row.weight_limit)
        if count:
            lines.append(f"{count} weights below -{row.weight_limit} → -{row.weight_limit}: {row.what} ({row.source})")
    return lines


def _load_quantized(path: Path) -> tuple[ir.Model, list[str]]:
    changes: list[str] = []
    graph = from_proto(load_model(path, external_data="all"), label=path)
    if not is_quantized(graph):
        raise ModelError(f"{path} is not quantized", "Use `edgeq quantize`")
    old = opset_of(graph)
    if old < LOWEST:
        graph = raise_opset(graph, path)
        changes.append(f"opset {old} → {opset_of(graph)}")
    write_shapes(graph)  # the type shifts below need to know the integer types
    name_nodes(graph)
    tidy(graph)
    remove_no_ops(graph)  # PyTorch uses Identity nodes to share scales
    check_form(graph, path)
    return graph, [*changes, *normalise(graph)]


def _rewrite(
    graph: ir.Model,
    source_form: Form,
    changes: list[str],
    format: str | None,
    activation_type: str | None,
    weight_type: str | None,
    accepts: Callable[[ir.Node], bool],
) -> list[str]:
    """Change the format and the types in place, and append each change to `changes`. Return the operators and tensors
    that stayed unchanged, each with the reason.
    """
    unchanged: list[str] = []
    keeps_integer_operators = format is None and source_form.format == "QOperator"
    # There are no kernels for int8 activations with uint8 weights, so the weights have to follow.
    needs_weights = activation_type == "int8" and weight_type is None
    integer_operators = sum(map(is_integer_operator, graph.graph))
    # Types change between Q/DQ pairs. So integer operators become pairs first, and integer operators again at the end.
    if source_form.format != "QDQ":
        unchanged += to_qdq(graph)
    if weight_type is not None or needs_weights:
        new_type = weight_type or "int8"
        count = shift_weights(graph, INTEGERS[new_type])
        if count:
            changes.append(f"{count} weights → {new_type}, with integers and zero points shifted by 128")
    if activation_type is not None:
        count, stuck = shift_activations(graph, INTEGERS[activation_type])
        unchanged += stuck
        if count:
            changes.append(f"{count} activations → {activation_type}, with integers and zero points shifted by 128")
    if format == "QOperator" or keeps_integer_operators:
        count, stuck = to_qoperator(graph, accepts)
        unchanged += stuck
        if format == "QOperator":
            changes.append(f"{count} operators between DequantizeLinear and QuantizeLinear → integer operators")
    gone = integer_operators - sum(map(is_integer_operator, graph.graph))
    if gone > 0:
        changes.append(f"{gone} integer operators → DequantizeLinear, operator, QuantizeLinear")
    return unchanged


def _check_request(format: str | None, activation_type: str | None, weight_type: str | None) -> None:
    choices: Sequence[tuple[str, str | None, Sequence[str]]] = (
        ("format", format, FORMATS),
        ("activation type", activation_type, tuple(INTEGERS)),
        ("weight type", weight_type, tuple(INTEGERS)),
    )
    for name, value, choices_of_name in choices:
        if value is not None and value not in choices_of_name:
            raise UsageError(f"the {name} is {value!r}", f"It can be {' or '.join(choices_of_name)}")
    if all(value is None for _, value, _ in choices):
        raise UsageError("there is nothing to change", "Name a target, a format or a type")
    if activation_type == "int8" and weight_type == "uint8":
        raise UsageError("int8 activations with uint8 weights have no kernels", "Set the weight type to int8")
