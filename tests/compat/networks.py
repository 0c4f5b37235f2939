"""Provide small float networks in the forms that older scripts have, and functions that compare them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tests.graphs import proto

SIZE = 8
CHANNELS = 6
Arrays = Mapping[str, np.ndarray]


def weights(*shape: int, seed: int = 0, scale: float = 0.3) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scale, np.float32)


def model_of(
    nodes: str, constants: Arrays, *, inputs: str = f"float[1, 3, {SIZE}, {SIZE}] x", opset: int = 17
) -> onnx.ModelProto:
    """Return a model with the output y from nodes and inputs in ONNX's text form."""
    ir_version = 10 if opset > 19 else 8 if opset > 14 else 7
    body = f"network ({inputs}) => (float[] y) {{ {nodes} }}"
    return onnx.shape_inference.infer_shapes(proto(body, constants, opset=opset, ir_version=ir_version))


def residual(opset: int = 17, *, named: bool = True, biased: bool = True) -> onnx.ModelProto:
    """Return conv, relu, conv, add, relu and matmul, with biases on both convolutions."""
    constants = {
        "w1": weights(CHANNELS, 3, 3, 3, seed=1),
        "w2": weights(CHANNELS, CHANNELS, 3, 3, seed=2),
        "m": weights(SIZE, 5, seed=3),
    }
    if biased:
        constants |= {"b1": weights(CHANNELS, seed=4), "b2": weights(CHANNELS, seed=5)}
    b1, b2 = (", b1", ", b2") if biased else ("", "")
    nodes = f"""
        [conv1] c1 = Conv<pads = [1, 1, 1, 1]>(x, w1{b1})
        [relu1] r1 = Relu(c1)
        [conv2] c2 = Conv<pads = [1, 1, 1, 1]>(r1, w2{b2})
        [add] a = Add(c2, r1)
        [relu2] r2 = Relu(a)
        [matmul] y = MatMul(r2, m)
    """
    return model_of(nodes if named else re.sub(r"\[\w+\] ", "", nodes), constants, opset=opset)


def images(count: int = 4, *, seed: int = 7) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(1, 3, SIZE, SIZE)).astype(np.float32)} for _ in range(count)]


class Reader:
    """Provide a CalibrationDataReader as scripts write it, with only get_next."""

    def __init__(self, samples: Sequence[dict[str, np.ndarray]] | None = None) -> None:
        self._samples: Iterator[dict[str, np.ndarray]] = iter(images() if samples is None else samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._samples, None)


class PartialReader(Reader):
    """Provide a reader with a length and set_range."""

    def __init__(self) -> None:
        self._all = images()
        super().__init__([])

    def __len__(self) -> int:
        return len(self._all)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._samples = iter(self._all[start_index:end_index])


def run(model: onnx.ModelProto | Path, inputs: Arrays | None = None, **settings: Any) -> list[np.ndarray]:
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"], **settings)
    outputs: list[np.ndarray] = session.run(None, dict(images(1, seed=99)[0] if inputs is None else inputs))
    return outputs


def values_of(model: onnx.ModelProto, inputs: Arrays | None = None) -> dict[str, np.ndarray]:
    """Return every tensor of a model by name, for one input."""
    inputs = images(1, seed=99)[0] if inputs is None else inputs
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    outputs = {o.name for o in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name not in outputs:
                whole.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    names = [o.name for o in whole.graph.output]
    return {**dict(zip(names, run(whole, inputs), strict=True)), **inputs}


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def operators(model: onnx.ModelProto | Path) -> list[str]:
    loaded = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    return [node.op_type for node in loaded.graph.node]


def constants_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def assert_same_quantization(ours: Path, theirs: Path) -> None:
    """Check that both files have the same operators, the same integers, and scales that are equal within float32
    rounding.
    """
    assert sorted(operators(ours)) == sorted(operators(theirs))
    one, other = constants_of(ours), constants_of(theirs)
    assert one.keys() == other.keys()
    for name, values in one.items():
        if values.dtype == np.float32:
            np.testing.assert_allclose(values, other[name], rtol=3e-7, err_msg=name)
        elif values.dtype == np.int32:  # a bias, whose scale may differ in its last bit
            assert np.abs(values.astype(np.int64) - other[name]).max() <= 1, name
        else:
            np.testing.assert_array_equal(values, other[name], err_msg=name)
