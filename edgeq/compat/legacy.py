"""`quantize(model, …)` on a ModelProto, as it was from 2019 to 2020 (and in the RISC-V fork), on today's runtime.

IntegerOps gives ConvInteger and MatMulInteger, QLinearOps QLinearConv and its like. What was wrong then is right here:
a model of an older opset is converted, not relabelled; Relu and Clip go only where a scale does their work; the bias of
a QLinearConv with a measured input scale is quantized while the model runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeq.backends.quantizer import one_line, quiet
from edgeq.compat.enums import member
from edgeq.compat.legacy_params import Given, Params, fold_clamps, in_type, read_params
from edgeq.compat.source import as_given, checked, warn_unknown_nodes
from edgeq.errors import ModelError, UsageError
from edgeq.model.load import load_model, save_model

_PRODUCTS = frozenset({"Conv", "MatMul"})
_INTEGER = _PRODUCTS | {"Gather", "Transpose", "Attention", "EmbedLayerNormalization"}
# Types with parameters of their own for what they give; and those that hand their input's on.
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
    """The quantized form of a float model, which stays as it is.

    Args:
        per_channel: one scale per output channel of a Conv's weights (int8 then); QLinearOps only.
        nbits: 8, or 7 for weights of 7 bits.
        quantization_mode: QuantizationMode or its name.
        static: whether activations have the parameters given, or are measured at run time. A QLinear node's output
            needs parameters either way.
        force_fusions: always done where it matters; accepted.
        asymmetric_input_types: weights int8 instead of uint8; activations are uint8 (2019 to early 2020).
        symmetric_activation, symmetric_weight: int8 instead of uint8 (from 2020 on).
        input_quantization_params, output_quantization_params, quantization_params: {tensor: [zero_point, scale]}. The
            zero point may be of either type; all are shifted to the activations' type, which is exact.
        nodes_to_quantize, nodes_to_exclude: names; op_types_to_quantize: types. None or empty: all.

    Raises:
        UsageError: a missing or contradictory parameter, or a combination that no operator has.
        ModelError: not a float model that can be quantized.
    """
    del force_fusions
    mode = str(member("QuantizationMode", quantization_mode).name)
    if nbits not in (7, 8):
        raise UsageError(f"nbits is {nbits}", "It can be 8, or 7 for weights of 7 bits")
    with tempfile.TemporaryDirectory(prefix="edgeq-quantize-") as folder:
        prepared = as_given(model, Path(folder))
        graph = load_model(prepared.path, external_data="all")
        warn_unknown_nodes(graph, nodes_to_quantize, nodes_to_exclude)
        chosen = [
            node
            for node in graph.graph.node
            if (not nodes_to_quantize or node.name in nodes_to_quantize)
            and node.name not in (nodes_to_exclude or ())
            and (not op_types_to_quantize or node.op_type in op_types_to_quantize)
        ]
        if mode == "IntegerOps" and per_channel and any(node.op_type == "Conv" for node in chosen):
            raise UsageError(
                "per_channel with IntegerOps: ConvInteger has one weight scale for all channels",
                "Use QuantizationMode.QLinearOps, or per_channel=False",
            )
        given = read_params(_tensors(graph), quantization_params, input_quantization_params, output_quantization_params)
        weights = "int8" if symmetric_weight or asymmetric_input_types else "uint8"
        # int8 activations with uint8 weights have no kernels; as uint8 they stand for the same numbers. Those that are
        # measured at run time are uint8 as well: DynamicQuantizeLinear gives nothing else, and finer steps.
        activations = "int8" if symmetric_activation and weights == "int8" and static else "uint8"
        params = in_type(given, activations)
        if mode == "IntegerOps":
            names = [node.name for node in chosen if node.op_type in _INTEGER]
            if not static:  # the quantizer then makes a MatMul of this name, and an Add, of each plain Gemm
                names += [f"{node.name}_MatMul" for node in chosen if node.op_type == "Gemm"]
        else:
            params, names = _qlinear_nodes(graph, chosen, params, activations)
        if static:
            _check_inputs(graph, names, params, quantized_outputs=mode == "QLinearOps")
        if not names:
            raise ModelError("nothing in the model can be quantized this way", "Choose other nodes or a float model")
        quantized = _written(
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
        save_model(quantized, draft)
        checked(draft, Path("the quantized model"), ())
    return quantized


def _qlinear_nodes(
    model: onnx.ModelProto, chosen: Sequence[onnx.NodeProto], params: dict[str, Params], dtype: str
) -> tuple[dict[str, Params], list[str]]:
    """The parameters with those of dropped Relu and Clip nodes folded in, and the nodes that can be quantized."""
    taken = [n for n in chosen if n.op_type in _PRODUCTS or (n.op_type in _COMPUTING and n.output[0] in params)]
    behind = [n for n in chosen if n.op_type in _COMPUTING]
    makers = frozenset(node.output[0] for node in [*taken, *behind])
    clamps = frozenset(node.name for node in chosen if node.op_type in ("Relu", "Clip"))
    params, gone = fold_clamps(model, params, makers, dtype)
    for node in taken:
        if node.output[0] not in params:
            raise UsageError(
                f"QLinearOps needs the scale and zero point of {node.output[0]!r}, the output of {node.name!r}",
                "Add it to quantization_params, or leave the node out with nodes_to_exclude",
            )
    names = [n.name for n in chosen if n.op_type in _PRODUCTS or n.op_type in _HANDING_ON]
    names += [n.name for n in chosen if n.op_type in _COMPUTING and n.output[0] in params]
    return params, [*names, *(gone & clamps)]


def _check_inputs(
    model: onnx.ModelProto, names: Sequence[str], params: Mapping[str, Params], *, quantized_outputs: bool
) -> None:
    """Refuse a Conv or MatMul with an input of unknown scale: neither given, nor handed on by a quantized node."""
    constants = {t.name for t in model.graph.initializer}
    taken = [node for node in model.graph.node if node.name in names]
    known = {o for node in taken if quantized_outputs or node.op_type in _HANDING_ON for o in node.output}
    for node in taken:
        for name in node.input[:2] if node.op_type in _PRODUCTS else ():
            if name not in params and name not in constants and name not in known:
                raise UsageError(
                    f"static quantization needs the scale and zero point of {name!r}, an input of {node.name!r}",
                    "Add it to quantization_params, or use static=False",
                )


def _written(
    model: onnx.ModelProto,
    *,
    mode: str,
    static: bool,
    per_channel: bool,
    reduce_range: bool,
    types: tuple[str, str],
    params: Mapping[str, Params],
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
    nothing = TensorData(lowest=np.float32(0), highest=np.float32(1))  # overridden, but there has to be one
    biases = _without_biases(model, names) if mode == "QLinearOps" and not static else {}
    op_types = sorted({"MatMul", *(node.op_type for node in model.graph.node)})
    try:
        with quiet():
            quantizer = ONNXQuantizer(
                model,
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
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        if "Quantization parameters are not specified" in str(error):
            raise UsageError(one_line(error), "Add the tensor to quantization_params, or use static=False") from error
        raise ModelError(
            f"onnxruntime's quantizer refuses the model: {one_line(error)}", "Leave the node out with nodes_to_exclude"
        ) from error
    quantized: onnx.ModelProto = quantizer.model.model
    _with_biases(quantized, biases)
    return quantized


def _without_biases(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, onnx.TensorProto]:
    """Take the constant biases off the Conv nodes of these names, in place; gives them by node."""
    constants = {t.name: t for t in model.graph.initializer}
    taken = {}
    for node in model.graph.node:
        if node.op_type == "Conv" and node.name in names and len(node.input) > 2 and node.input[2] in constants:
            taken[node.name] = onnx.TensorProto()
            taken[node.name].CopyFrom(constants[node.input[2]])
            del node.input[2:]
    return taken


def _with_biases(model: onnx.ModelProto, biases: Mapping[str, onnx.TensorProto]) -> None:
    """Give QLinearConv nodes their biases back: int32 in units of input scale times weight scale, which are known only
    when the model runs."""
    nodes: list[onnx.NodeProto] = []
    present = {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        bias = biases.get(node.name.removesuffix("_quant")) if node.op_type == "QLinearConv" else None
        if bias is not None:
            if bias.name not in present:
                model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(bias), bias.name))
                present.add(bias.name)
            scale, ratio, rounded, integers = (f"{node.name}/bias_{p}" for p in ("scale", "ratio", "rounded", "int32"))
            nodes += [
                helper.make_node("Mul", [node.input[1], node.input[4]], [scale], name=scale),
                helper.make_node("Div", [bias.name, scale], [ratio], name=ratio),
                helper.make_node("Round", [ratio], [rounded], name=rounded),
                helper.make_node("Cast", [rounded], [integers], name=integers, to=onnx.TensorProto.INT32),
            ]
            node.input.append(integers)
        nodes.append(node)
    if biases:
        kept = [_copied(node) for node in nodes]  # deleting the list would take its nodes with it
        del model.graph.node[:]
        model.graph.node.extend(kept)


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _tensors(model: onnx.ModelProto) -> frozenset[str]:
    graph = model.graph
    return frozenset([i.name for i in graph.input] + [name for node in graph.node for name in node.output if name])
