"""Provide the `quantize` function of 2019 to 2020 and of the RISC-V fork, which quantizes a ModelProto. The result runs
in today's runtime.

IntegerOps gives ConvInteger and MatMulInteger. QLinearOps gives QLinearConv and similar operators. This module corrects
three faults of the old function:

- A model with an older opset is converted. The old function only changed the opset number.
- Relu and Clip are dropped only if a scale clips the values in the same way.
- If the input scale of a QLinearConv is measured at run time, its bias is quantized at run time as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.system.places import scratch_folder
from numpy.typing import NDArray

from edgeq.compat._members import member
from edgeq.compat._result import check_written
from edgeq.compat.source import LOG, as_given, warn_unknown_nodes
from edgeq.errors import CalibrationError, ModelError, UsageError
from edgeq.model.convert import from_proto, to_proto
from edgeq.model.edit import Editor
from edgeq.model.graph import (
    MAIN_DOMAINS,
    clamp_bounds,
    clamps,
    constant,
    is_constant,
    is_op,
    name_of,
    node_input,
    opset_of,
)
from edgeq.model.load import save_model
from edgeq.model.quant_params import LIMITS, QuantParams
from edgeq.quantization.quantizer import refusals

Given = Mapping[str, Sequence[Any]]
_TYPES = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}


def read_params(
    names: frozenset[str], both: Given | None, inputs: Given | None, outputs: Given | None
) -> dict[str, tuple[NDArray[Any], np.float32]]:
    """Check and merge the values of the old function's three arguments, and return {tensor: [zero point, scale]}.

    Args:
        names: tensors of the model. Other names are ignored with a warning.

    Raises:
        UsageError: a value is not a pair of zero point and scale, or a tensor has two different pairs.
    """
    params: dict[str, tuple[NDArray[Any], np.float32]] = {}
    for argument, table in (
        ("quantization_params", both),
        ("input_quantization_params", inputs),
        ("output_quantization_params", outputs),
    ):
        for name, value in (table or {}).items():
            pair = _pair(argument, name, value)
            # A name without a tensor does no harm, so it is only reported.
            if name not in names:
                LOG.warning("%s: the model has no tensor %r; it is ignored", argument, name)
            elif name in params and params[name] != pair:
                raise UsageError(
                    f"tensor {name!r} has {params[name]}, but {pair} in {argument}",
                    "A tensor has one zero point and scale: give the same in both",
                )
            else:
                params[name] = pair
    return params


def in_type(params: Mapping[str, tuple[NDArray[Any], np.float32]], dtype: str) -> dict[str, QuantParams]:
    """Return the same quantization with all integers of one type. Shifting integers and zero points by 128 changes no
    number that they represent.
    """
    target_type = _TYPES[dtype]
    shifted = {}
    for name, (zero_point, scale) in params.items():
        # uint8 begins at 0 and int8 at -128, so the difference of the limits is the shift.
        shift = LIMITS[target_type][0] - LIMITS[_TYPES.get(str(zero_point.dtype), target_type)][0]
        shifted[name] = QuantParams(np.asarray(scale), np.asarray(int(zero_point) + shift), target_type)
    return shifted


def fold_clamps(
    model: ir.Model, params: Mapping[str, QuantParams], quantized: frozenset[str]
) -> tuple[dict[str, QuantParams], frozenset[str]]:
    """Find the Relu and Clip nodes that a scale makes unnecessary, and give their input the scale of their output.

    The older tool dropped every Relu and Clip after a quantized node, whatever the scales were.

    Args:
        quantized: names of the tensors that quantized nodes produce.

    Returns:
        The changed parameters, and the names of the nodes that can be dropped.
    """
    merged, gone = dict(params), set()
    for node in reversed(list(clamps(model.graph))):
        source, result = name_of(node.inputs[0]), name_of(node.outputs[0])
        clamp_params = merged.get(result, merged.get(source))
        bounds = clamp_bounds(node)
        if source not in quantized or clamp_params is None or bounds is None:
            continue
        low, high = clamp_params.range
        slack = float(clamp_params.scale) / 2  # a bound between two levels would be rounded to one of them in any case
        if low >= bounds[0] - slack and high <= bounds[1] + slack:
            merged[source] = merged[result] = clamp_params
            gone.add(str(node.name))
    return merged, frozenset(gone)


def _pair(argument: str, name: str, value: Any) -> tuple[NDArray[Any], np.float32]:
    try:
        zero_point, scale = value
        zero = np.asarray(zero_point).reshape(())
        number = np.float32(np.asarray(scale).reshape(()))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{argument} of {name!r} is {value!r}",
            "Give [zero_point, scale], such as [np.uint8(113), np.float32(0.05)]",
        ) from error
    if zero.dtype.kind not in "iu" or not (np.isfinite(number) and number > 0):
        raise UsageError(f"{argument} of {name!r} is {value!r}", "Give an integer zero point and a scale above 0")
    # A plain Python integer becomes int64. Its sign tells which of the two types was meant.
    if str(zero.dtype) not in _TYPES:
        zero = zero.astype(np.int8 if zero < 0 else np.uint8)
    return zero, number


_FIRST_QUANTIZED_OPSET = 10
_PRODUCTS = frozenset({"Conv", "MatMul"})
_INTEGER = _PRODUCTS | {"Gather", "Transpose", "Attention", "EmbedLayerNormalization"}
# _COMPUTING: operators whose outputs need their own zero point and scale. _HANDING_ON: operators whose outputs have the
# zero point and scale of the input.
_COMPUTING = frozenset(
    {"Add", "Mul", "Gemm", "LeakyRelu", "Sigmoid", "AveragePool", "GlobalAveragePool", "Concat", "Softmax", "Where"}
)
_HANDING_ON = frozenset({"MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Resize", "Gather"})


def quantize_model(
    model: onnx.ModelProto,
    per_channel: bool = False,
    nbits: int = 8,
    quantization_mode: Any = "IntegerOps",
    static: bool = False,
    *,
    force_fusions: bool = False,
    asymmetric_input_types: bool = False,
    symmetric_activation: bool = False,
    symmetric_weight: bool = False,
    input_quantization_params: Given | None = None,
    output_quantization_params: Given | None = None,
    quantization_params: Given | None = None,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    op_types_to_quantize: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Return the quantized form of a float model. The float model does not change.

    Args:
        per_channel: True for one scale per output channel of a Conv's weights, which are then int8; QLinearOps only.
        nbits: 8, or 7 for weights of 7 bits.
        quantization_mode: QuantizationMode or its name.
        static: True if activations use the given parameters, False if the runtime measures their ranges. The output of
            a QLinear node needs parameters in both cases.
        force_fusions: accepted but not used. edgeq always fuses where it matters.
        asymmetric_input_types: True for int8 weights instead of uint8; activations are uint8 (2019 to early 2020).
        symmetric_activation, symmetric_weight: True for int8 instead of uint8 (from 2020 on).
        input_quantization_params, output_quantization_params, quantization_params: {tensor: [zero_point, scale]}. A
            zero point may be int8 or uint8. edgeq shifts all zero points to the type of the activations, which is
            exact.
        nodes_to_quantize, op_types_to_quantize: names of nodes, and operator types. For each, None or empty means all.
        nodes_to_exclude: names of nodes to keep in float.

    Raises:
        UsageError: a parameter is missing or contradicts another, or no operator supports this combination.
        ModelError: the model is not a float model that can be quantized.
    """
    del force_fusions
    mode = str(member("QuantizationMode", quantization_mode).name)
    if nbits not in (7, 8):
        raise UsageError(f"nbits is {nbits}", "It can be 8, or 7 for weights of 7 bits")
    with scratch_folder("edgeq-quantize-") as folder:
        prepared = as_given(model, Path(folder))
        graph = prepared.model.clone()
        _warn_of_conversion(model, opset_of(graph))
        ir.external_data.load_to_model(graph)  # the result is one ModelProto without files next to it
        warn_unknown_nodes(graph, nodes_to_quantize, nodes_to_exclude)
        selected = [
            node
            for node in graph.graph
            if (not nodes_to_quantize or node.name in nodes_to_quantize)
            and node.name not in (nodes_to_exclude or ())
            and (not op_types_to_quantize or node.op_type in op_types_to_quantize)
        ]
        if mode == "IntegerOps" and per_channel and any(node.op_type == "Conv" for node in selected):
            raise UsageError(
                "per_channel with IntegerOps: ConvInteger has one weight scale for all channels",
                "Use QuantizationMode.QLinearOps, or per_channel=False",
            )
        user_params = read_params(
            _tensors(graph), quantization_params, input_quantization_params, output_quantization_params
        )
        weights = "int8" if symmetric_weight or asymmetric_input_types else "uint8"
        # There are no kernels for int8 activations with uint8 weights. uint8 activations represent the same numbers.
        # Activations that are measured at run time are also uint8: DynamicQuantizeLinear returns only uint8, and its
        # steps are finer.
        activations = "int8" if symmetric_activation and weights == "int8" and static else "uint8"
        params = in_type(user_params, activations)
        if mode == "IntegerOps":
            names = [str(node.name) for node in selected if node.op_type in _INTEGER]
            if not static:  # the quantizer then splits each plain Gemm into a MatMul of this name and an Add
                names += [f"{node.name}_MatMul" for node in selected if node.op_type == "Gemm"]
        else:
            params, names = _qlinear_nodes(graph, selected, params)
        if static:
            _check_inputs(graph, names, params, quantized_outputs=mode == "QLinearOps")
        if not names:
            raise ModelError("nothing in the model can be quantized this way", "Choose other nodes or a float model")
        quantized = _write_quantized(
            graph,
            mode=mode,
            static=static,
            per_channel=per_channel,
            reduce_range=nbits == 7,
            types=(activations, weights),
            params=params,
            names=names,
        )
        draft = Path(folder) / "quantized.onnx"
        save_model(from_proto(quantized), draft)
        check_written(draft, Path("the quantized model"), ())
    return quantized


def _warn_of_conversion(model: onnx.ModelProto, opset: int) -> None:
    """Log a warning if the model's opset has no quantized operators and the model was converted. The older function did
    the same.
    """
    original_opset = max(
        (imported.version for imported in model.opset_import if imported.domain in MAIN_DOMAINS), default=opset
    )
    if original_opset < _FIRST_QUANTIZED_OPSET:
        LOG.warning(
            "the model's opset is %d, and quantized operators exist from %d on: the quantized model has opset %d",
            original_opset,
            _FIRST_QUANTIZED_OPSET,
            opset,
        )


def _qlinear_nodes(
    model: ir.Model, selected: Sequence[ir.Node], params: Mapping[str, QuantParams]
) -> tuple[dict[str, QuantParams], list[str]]:
    """Return the zero points and scales of the tensors, and the names of the nodes that can be quantized. If a Relu or
    Clip node is dropped, its input has the zero point and scale of its output.
    """
    computing = [node for node in selected if node.op_type in _COMPUTING]
    products = [node for node in selected if node.op_type in _PRODUCTS]
    makers = frozenset(name_of(node.outputs[0]) for node in [*products, *computing])
    chosen_clamps = frozenset(str(node.name) for node in selected if is_op(node, "Relu", "Clip"))
    scaled = [node for node in computing if name_of(node.outputs[0]) in params]
    folded, gone = fold_clamps(model, params, makers)
    for node in [*products, *scaled]:
        if name_of(node.outputs[0]) not in folded:
            raise UsageError(
                f"QLinearOps needs the scale and zero point of {node.outputs[0].name!r}, the output of {node.name!r}",
                "Add it to quantization_params, or leave the node out with nodes_to_exclude",
            )
    names = [str(n.name) for n in selected if n.op_type in _PRODUCTS or n.op_type in _HANDING_ON]
    names += [str(n.name) for n in computing if name_of(n.outputs[0]) in folded]
    return folded, [*names, *(gone & chosen_clamps)]


def _check_inputs(
    model: ir.Model, names: Sequence[str], params: Mapping[str, QuantParams], *, quantized_outputs: bool
) -> None:
    """Refuse a Conv or MatMul that has an input of unknown scale. A scale is known if it is given, or if a quantized
    node passes it on.
    """
    quantized_nodes = [node for node in model.graph if node.name in names]
    scaled_values = {
        o for node in quantized_nodes if quantized_outputs or node.op_type in _HANDING_ON for o in node.outputs
    }
    for node in quantized_nodes:
        for value in node.inputs[:2] if node.op_type in _PRODUCTS else ():
            if name_of(value) not in params and not is_constant(value) and value not in scaled_values:
                raise UsageError(
                    f"static quantization needs the scale and zero point of {name_of(value)!r}, an input of "
                    f"{node.name!r}",
                    "Add it to quantization_params, or use static=False",
                )


def _write_quantized(
    model: ir.Model,
    *,
    mode: str,
    static: bool,
    per_channel: bool,
    reduce_range: bool,
    types: tuple[str, str],
    params: Mapping[str, QuantParams],
    names: Sequence[str],
) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationMethod, QuantizationMode, QuantType, TensorData, TensorsData
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

    kinds = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    activation, weight = (kinds[name] for name in types)
    overrides = {
        name: [
            {
                "quant_type": activation,
                "zero_point": np.array(p.zero_point, types[0]),
                "scale": np.array(p.scale, np.float32),
            }
        ]
        for name, p in params.items()
    }
    # the overrides replace this value, but the quantizer needs one
    nothing = TensorData(lowest=np.float32(0), highest=np.float32(1))
    biases = _take_biases(model, names) if mode == "QLinearOps" and not static else {}
    op_types = sorted({"MatMul", *(node.op_type for node in model.graph)})
    try:
        with refusals("the model", "Leave the node out with nodes_to_exclude", fix_ranges="Add it"):
            quantizer = ONNXQuantizer(
                to_proto(model),
                per_channel,
                reduce_range,
                QuantizationMode[mode],
                static,
                weight,
                activation,
                TensorsData(CalibrationMethod.MinMax, dict.fromkeys(params, nothing)) if params else None,
                list(names),
                [],
                op_types,
                {
                    "WeightSymmetric": types[1] == "int8",
                    "TensorQuantOverrides": overrides,
                    "MatMulConstBOnly": mode == "IntegerOps" and not static,
                },
            )
            quantizer.quantize_model()
    except CalibrationError as error:  # here the ranges come from an argument
        raise UsageError(error.problem, "Add the tensor to quantization_params, or use static=False") from error
    quantized: onnx.ModelProto = quantizer.model.model
    return _with_biases(quantized, biases) if biases else quantized


def _take_biases(model: ir.Model, names: Sequence[str]) -> dict[str, tuple[str, NDArray[Any]]]:
    """Remove the constant biases from the Conv nodes with these names, in place. Return the name and values of each
    bias, keyed by node name.
    """
    biases = {}
    for node in model.graph:
        bias = node_input(node, 2) if is_op(node, "Conv") and node.name in names else None
        values = constant(bias)
        if bias is not None and values is not None:
            biases[str(node.name)] = (str(bias.name), values)
            node.resize_inputs(2)
    return biases


def _with_biases(quantized: onnx.ModelProto, biases: Mapping[str, tuple[str, NDArray[Any]]]) -> onnx.ModelProto:
    """Return the model with the biases of its QLinearConv nodes restored. A bias is int32, in units of the input scale
    times the weight scale. The input scale is known only when the model runs.
    """
    model = from_proto(quantized)
    editor = Editor(model)
    for node in model.graph:
        stem = str(node.name)
        if node.op_type != "QLinearConv" or stem.removesuffix("_quant") not in biases:
            continue
        name, values = biases[stem.removesuffix("_quant")]
        bias = model.graph.initializers.get(name) or editor.constant(name, values)
        scale = editor.node("Mul", [node.inputs[1], node.inputs[4]], f"{stem}/bias_scale", before=node)
        ratio = editor.node("Div", [bias, scale], f"{stem}/bias_ratio", before=node)
        rounded = editor.node("Round", [ratio], f"{stem}/bias_rounded", before=node)
        to = {"to": ir.DataType.INT32}
        integers = editor.node("Cast", [rounded], f"{stem}/bias_int32", before=node, attributes=to)
        node.resize_inputs(9)
        node.replace_input_with(8, integers)
    return to_proto(model)


def _tensors(model: ir.Model) -> frozenset[str]:
    produced = [value for node in model.graph for value in node.outputs]
    return frozenset(value.name for value in (*model.graph.inputs, *produced) if value.name)
