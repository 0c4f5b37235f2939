"""Build small Q/DQ models, write them as .tflite files, and run the files in each runtime."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.network import TfliteNetwork
from edgeq.backends.litert.writer import version, write
from edgeq.model.quant_params import QuantParams
from tests.graphs import proto

XNNPACK, REFERENCE, MICRO = "XNNPACK", "reference", "Micro"


def installed(module: str) -> bool:
    """Return whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


litert = pytest.mark.skipif(
    not (installed("ai_edge_litert") and installed("flatbuffers")), reason="ai-edge-litert is not installed"
)
RUNTIMES = [
    pytest.param(XNNPACK, marks=litert),
    pytest.param(REFERENCE, marks=litert),
    pytest.param(
        MICRO, marks=pytest.mark.skipif(not installed("tflite_micro"), reason="tflite-micro is not installed")
    ),
]


def answers(content: bytes, runtime: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the outputs of a runtime for a file's inputs, which have the file's own types and order of axes."""
    if runtime == MICRO:
        from tflite_micro.python.tflite_micro import runtime as micro

        small = micro.Interpreter.from_bytes(content, arena_size=1 << 22)
        for place, array in enumerate(inputs):
            small.set_input(np.ascontiguousarray(array), place)
        small.invoke()
        return [small.get_output(0)]
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kernels = OpResolverType.BUILTIN if runtime == XNNPACK else OpResolverType.BUILTIN_REF
    interpreter = Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=kernels)
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], np.ascontiguousarray(array))
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


# Operators and versions that LiteRT's portable kernels lack. No target uses these kernels.
_NOT_PORTABLE = frozenset({("CEIL", 1), ("ELU", 1), ("ROUND", 1), ("TILE", 3)})


def skip_what_the_portable_kernels_lack(network: TfliteNetwork, runtime: str) -> None:
    """Skip a test in the portable kernels if they lack an operator of `network`."""
    lacking = _NOT_PORTABLE.intersection((operator.kind, version(operator)) for operator in network.operators)
    if runtime == REFERENCE and lacking:
        pytest.skip(f"LiteRT's portable kernels lack {lacking}")


def network_of(model: onnx.ModelProto) -> TfliteNetwork:
    """Return the operators of a Q/DQ model."""
    return lower(ir.from_proto(model), Path("net.onnx"))


def run(model: onnx.ModelProto, runtime: str, feed: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Write a Q/DQ model as a file, run it, and return its first output, integers or floats, with the model's order of
    axes.
    """
    network = network_of(model)
    inputs = []
    for port in network.inputs:
        array, scales = feed[port.name].transpose(port.order), port.tensor.scales
        array = array.astype(np.int32) if array.dtype == np.int64 else array
        if scales is not None:
            array = np.clip(np.rint(array / scales.scale[0]) + scales.zero[0], -128, 127).astype(np.int8)
        inputs.append(array)
    (outputs, *_) = answers(write(network), runtime, inputs)
    return outputs.transpose(np.argsort(network.outputs[0].order))


def quantized(
    node: str,
    inputs: Mapping[str, Sequence[int]],
    output: Sequence[int],
    constants: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    scales: Mapping[str, tuple[float, int]],
    plain: Mapping[str, NDArray[Any]] | None = None,
    axis: int = 0,
) -> onnx.ModelProto:
    """Return a Q/DQ model of one node. It reads its inputs by their names and computes "y".

    Args:
        node: the node's text, such as "y = Conv<pads=[1,1,1,1]>(x, w, b)".
        constants: constants to quantize to int8; "w" has one scale for each index on `axis`, "b" is a bias of 32 bits.
        scales: the scale and the int8 zero point of each input and of "y".
        plain: constants that are not quantized, such as shapes.
    """
    lines, weights = [], {}
    for name in (*inputs, "y"):
        scale, zero = scales[name]
        weights |= {f"{name}_s": np.float32(scale), f"{name}_z": np.int8(zero)}
    operand_names = {name: f"{name}_d" for name in inputs}
    for name in inputs:
        lines.append(f"{name}_q = QuantizeLinear({name}, {name}_s, {name}_z)")
        lines.append(f"{name}_d = DequantizeLinear({name}_q, {name}_s, {name}_z)")
    channel: NDArray[Any] = np.ones(1)
    for name, values in (constants or {}).items():
        if name == "b":
            scale = (np.float64(scales["x"][0]) * channel).astype(np.float32)
            integers = np.rint(values / scale).astype(np.int32)
            params = QuantParams(scale, np.zeros(scale.shape, np.int64), ir.DataType.INT32)
        else:
            other_axes = tuple(place for place in range(values.ndim) if place != axis or name != "w")
            scale = channel = (np.abs(values).max(axis=other_axes) / 127).astype(np.float32)
            params = QuantParams(scale, np.zeros(scale.shape, np.int64), ir.DataType.INT8)
            integers = replace(params, axis=axis).quantize(values)
        zero = np.zeros(scale.shape, integers.dtype)
        weights |= {f"{name}_q": integers, f"{name}_s": scale, f"{name}_z": zero}
        lines.append(f"{name}_d = DequantizeLinear<axis={axis if name != 'b' else 0}>({name}_q, {name}_s, {name}_z)")
        operand_names[name] = f"{name}_d"
    for statement in node.splitlines():
        made_by, read_by = statement.split("(", 1)
        arguments = re.sub(r"\w+", lambda name: operand_names.get(name[0], name[0]), read_by)
        node_text = re.sub(r"^y\b", "r", made_by)
        lines.append(f"{node_text}({arguments}")
    lines.append("y_q = QuantizeLinear(r, y_s, y_z)")
    lines.append("y = DequantizeLinear(y_q, y_s, y_z)")
    signature = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in inputs.items())
    shape = ",".join(map(str, output))
    body = "\n".join(f"[n{place}] {line}" for place, line in enumerate(lines))
    return proto(f"g ({signature}) => (float[{shape}] y) {{\n{body}\n}}", {**weights, **(plain or {})})
