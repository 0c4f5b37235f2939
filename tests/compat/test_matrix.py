"""Users' models are right or refused: opsets 9 to 23, float16, subgraphs, unnamed nodes, weights as inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compat.networks import Reader, model_of, operators, relative_error, residual, run, values_of, weights
from edgeq.compat import QuantFormat, QuantType, quantize
from edgeq.compat.files import quantize_dynamic, quantize_static
from edgeq.errors import ModelError

pytestmark = pytest.mark.usefixtures("exact_kernels")

OPSETS = (9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)


def static(format_: Any) -> Callable[..., onnx.ModelProto]:
    def write(model: onnx.ModelProto, folder: Path, reader: Any = None) -> onnx.ModelProto:
        options: dict[str, Any] = {"activation_type": QuantType.QUInt8, "per_channel": True}
        quantize_static(model, folder / "q.onnx", reader or Reader(), format_, **options)
        return onnx.load(folder / "q.onnx")

    return write


def dynamic(model: onnx.ModelProto, folder: Path, reader: Any = None) -> onnx.ModelProto:
    quantize_dynamic(model, folder / "q.onnx", extra_options={"EnableSubgraph": True})
    return onnx.load(folder / "q.onnx")


def integer_ops(model: onnx.ModelProto, folder: Path, reader: Any = None) -> onnx.ModelProto:
    return quantize(model)


WRITERS = {
    "qdq": static(QuantFormat.QDQ),
    "qoperator": static(QuantFormat.QOperator),
    "dynamic": dynamic,
    "legacy": integer_ops,
}
INTEGER = {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "DequantizeLinear", "DynamicQuantizeLinear"}


def all_operators(graph: onnx.GraphProto) -> list[str]:
    found = []
    for node in graph.node:
        found.append(node.op_type)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += all_operators(attribute.g)
    return found


def check(quantized: onnx.ModelProto, model: onnx.ModelProto, inputs: Any = None, *, bar: float = 0.05) -> None:
    onnx.checker.check_model(quantized)
    assert INTEGER & set(all_operators(quantized.graph))
    assert relative_error(run(quantized, inputs)[0].astype(float), run(model, inputs)[0].astype(float)) < bar


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("writer", WRITERS)
def test_opsets(opset: int, writer: str, tmp_path: Path) -> None:
    model = residual(opset)
    quantized = WRITERS[writer](model, tmp_path)
    assert max(o.version for o in quantized.opset_import if not o.domain) >= 13
    check(quantized, model)


@pytest.mark.parametrize("writer", WRITERS)
def test_nodes_without_names(writer: str, tmp_path: Path) -> None:
    model = residual(named=False)
    check(WRITERS[writer](model, tmp_path), model)


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_that_are_listed_as_inputs(writer: str, tmp_path: Path) -> None:
    """Weights that are listed as inputs, as in IR version 3, are weights. onnxruntime's quantizer takes them for
    activations.
    """
    model = residual(opset=9)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    quantized = WRITERS[writer](model, tmp_path)
    assert [i.name for i in quantized.graph.input] == ["x"]
    check(quantized, model)


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_in_constant_nodes(writer: str, tmp_path: Path) -> None:
    model = residual()
    for tensor in model.graph.initializer:
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    check(WRITERS[writer](model, tmp_path), model)


@pytest.mark.parametrize("writer", WRITERS)
def test_float16(writer: str, tmp_path: Path) -> None:
    """The model computes in float32 inside, and its inputs and outputs stay float16."""
    constants = {"w": weights(4, 3, 3, 3).astype(np.float16), "b": weights(4, seed=1).astype(np.float16)}
    model = model_of("[conv] y = Conv<pads = [1, 1, 1, 1]>(x, w, b)", constants)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    samples = [{"x": weights(1, 3, 8, 8, seed=seed, scale=1.0).astype(np.float16)} for seed in range(4)]
    quantized = WRITERS[writer](model, tmp_path, Reader(samples))
    assert quantized.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    check(quantized, model, samples[0])


def held(name: str, values: np.ndarray) -> str:
    """Return a constant for a body, in ONNX's text form."""
    return f"<float{list(values.shape)} {name} = {{{', '.join(map(str, values.ravel().tolist()))}}}>"


def with_if() -> onnx.ModelProto:
    """Return a MatMul followed by an If with a MatMul in each branch."""
    nodes = f"""
        [matmul] h = MatMul(x, w)
        [top] top = ReduceMax<keepdims = 0>(h)
        [positive] positive = Greater(top, zero)
        [if] y = If(positive)<
            then_branch = then () => (float[] y_then) {held("m0", weights(8, 5, seed=0))} {{
                [matmul_then] y_then = MatMul(h, m0)
            }},
            else_branch = else () => (float[] y_else) {held("m1", weights(8, 5, seed=1))} {{
                [matmul_else] y_else = MatMul(h, m1)
            }}
        >
    """
    return model_of(nodes, {"w": weights(6, 8), "zero": np.float32(0)}, inputs="float[2, 6] x")


def with_loop() -> onnx.ModelProto:
    """Return a loop that computes h = tanh(h W) three times."""
    nodes = f"""
        [matmul] h = MatMul(x, w)
        [loop] y = Loop(three, true, h)<
            body = body (int64 step, bool go, float[2, 8] state) => (bool on, float[2, 8] next)
            {held("m", weights(8, 8, seed=5))} {{
                [inner] product = MatMul(state, m)
                [tanh] next = Tanh(product)
                [go_on] on = Identity(go)
            }}
        >
    """
    constants = {"w": weights(6, 8), "three": np.int64(3), "true": np.bool_(True)}
    return model_of(nodes, constants, inputs="float[2, 6] x")


@pytest.mark.parametrize("make", [with_if, with_loop])
@pytest.mark.parametrize("writer", WRITERS)
def test_subgraphs(make: Callable[[], onnx.ModelProto], writer: str, tmp_path: Path) -> None:
    """Dynamic quantization changes subgraphs (`EnableSubgraph`). Otherwise they stay float, the rest is quantized."""
    model = make()
    samples = [{"x": weights(2, 6, seed=seed, scale=1.0)} for seed in range(4)]
    quantized = WRITERS[writer](model, tmp_path, Reader(samples))
    for sample in samples:
        check(quantized, model, sample)
    integers = all_operators(quantized.graph).count("MatMulInteger")
    if writer == "dynamic":
        assert integers == (3 if make is with_if else 2)


@pytest.mark.parametrize("writer", WRITERS)
def test_refuses_models_that_no_runtime_runs_by_name(writer: str, tmp_path: Path) -> None:
    old = residual(opset=9)
    old.opset_import[0].version = 5
    with pytest.raises(ModelError, match=r"model\.onnx .*opset 5|valid ONNX model"):
        WRITERS[writer](old, tmp_path)
    strange = residual()
    strange.graph.node[0].op_type, strange.graph.node[0].domain = "Sparkle", "custom"
    strange.opset_import.append(helper.make_opsetid("custom", 1))
    with pytest.raises(ModelError, match="custom domain 'custom'"):
        WRITERS[writer](strange, tmp_path)


def test_fixed_scales_inside_old_opsets(tmp_path: Path) -> None:
    """QLinearOps works with the scales of 2019 on each opset of that time."""
    for opset in (9, 10, 11, 12):
        model = residual(opset)
        params = {}
        for name, values in values_of(model).items():
            low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
            scale = np.float32((high - low) / 255)
            params[name] = [np.uint8(np.round(-low / scale)), scale]
        quantized = quantize(model, quantization_mode="QLinearOps", static=True, quantization_params=params)
        assert operators(quantized).count("QLinearConv") == 2
        check(quantized, model)
