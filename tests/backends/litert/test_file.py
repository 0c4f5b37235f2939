"""Read a written file with the schema: its alignment, versions and rules. The same rules refuse a network that breaks
them.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.backends.litert.dialect import dialect
from edgeq.backends.litert.network import Port, Scales, TfliteNetwork, TfliteOperator, TfliteTensor
from edgeq.backends.litert.rules import RULES, check, problems
from edgeq.backends.litert.writer import ALIGNMENT, schema, write
from edgeq.errors import ModelError
from tests.backends.litert.files import litert, network_of, quantized

SCALES = {"x": (0.03, -7), "y": (0.03, -7)}
RANDOM = np.random.default_rng(0)


def network(channels: int = 5) -> TfliteNetwork:
    """Return a convolution whose padding differs from side to side."""
    weights = {
        "w": RANDOM.normal(0, 0.3, (channels, 3, 3, 3)).astype(np.float32),
        "b": RANDOM.normal(0, 0.3, channels).astype(np.float32),
    }
    node = "y = Conv<pads=[2,1,0,1]>(x, w, b)"
    return network_of(quantized(node, {"x": [1, 3, 6, 6]}, [1, channels, 6, 6], weights, scales=SCALES))


def parse_model(content: bytes) -> Any:
    """Read the file with the schema's object API."""
    return schema().ModelT.InitFromPackedBuf(content)


@litert
@pytest.mark.parametrize("channels", [1, 5, 16])
def test_constants_start_at_multiples_of_16(channels: int) -> None:
    content = write(network(channels))
    model = schema().Model.GetRootAs(content)
    starts = []
    for place in range(model.BuffersLength()):
        buffer = model.Buffers(place)
        if not buffer.DataIsNone():
            starts.append(buffer._tab.Vector(buffer._tab.Offset(4)))
    assert len(starts) >= 4
    assert not [start for start in starts if start % ALIGNMENT]
    assert content[4:8] == b"TFL3"


@litert
def test_a_file_states_what_its_network_has() -> None:
    saved = network()
    model = parse_model(write(saved))
    (graph,) = model.subgraphs
    names = {value: name for name, value in vars(schema().BuiltinOperator).items() if isinstance(value, int)}
    codes = [model.operatorCodes[operator.opcodeIndex] for operator in graph.operators]
    assert [names[code.builtinCode] for code in codes] == [operator.kind for operator in saved.operators]
    assert [code.deprecatedBuiltinCode for code in codes] == [min(code.builtinCode, 127) for code in codes]
    assert [code.version for code in codes] == [dialect()[operator.kind].int8 for operator in saved.operators]
    for tensor, entry in zip(saved.tensors(), graph.tensors, strict=True):
        assert tuple(entry.shape) == tensor.shape
        if tensor.scales is not None:
            assert np.array_equal(entry.quantization.scale, tensor.scales.scale)
            assert np.array_equal(
                entry.quantization.zeroPoint, np.broadcast_to(tensor.scales.zero, entry.quantization.scale.shape)
            )
        if tensor.values is not None:
            assert bytes(model.buffers[entry.buffer].data) == np.ascontiguousarray(tensor.values).tobytes()


@litert
def test_the_same_model_gives_the_same_bytes() -> None:
    tflite = network()
    assert write(tflite) == write(tflite)
    assert struct.unpack_from("<I", write(tflite))[0] < len(write(tflite))


ONE, OTHER = Scales.of(0.1, 3), Scales.of(0.2, 3)
WEIGHTS = Scales(np.full(4, 0.5, np.float32), np.zeros(4, np.int64), 0)


def tensor(name: str, scales: Scales | None, shape: tuple[int, ...] = (1, 4), **more: Any) -> TfliteTensor:
    """Return a tensor of integers."""
    return TfliteTensor(name, shape, more.pop("type", "int8"), scales, **more)


def constant(scales: Scales) -> TfliteTensor:
    """Return weights with four outputs."""
    return tensor("w", scales, (4, 4), values=np.ones((4, 4), np.int8))


def bias(scale: float) -> TfliteTensor:
    """Return a bias for four outputs."""
    scales = Scales(np.full(4, scale, np.float32), np.zeros(4, np.int64))
    return tensor("b", scales, (4,), type="int32", values=np.ones(4, np.int32))


BROKEN = {
    "input-as-output": ("RESHAPE", (tensor("x", ONE),), OTHER, "different scales"),
    "inputs-as-output": ("CONCATENATION", (tensor("x", ONE), tensor("a", OTHER)), ONE, "another scale"),
    "fixed-output": ("LOGISTIC", (tensor("x", ONE),), Scales.of(1 / 255, -128), "0.00390625"),
    "weights-0": (
        "FULLY_CONNECTED",
        (tensor("x", ONE), constant(replace(WEIGHTS, zero=np.full(4, 3))), bias(0.05)),
        ONE,
        "zero point",
    ),
    "weights-3": ("DEPTHWISE_CONV_2D", (tensor("x", ONE), constant(WEIGHTS), bias(0.05)), ONE, "axis 0, not 3"),
    "bias": ("FULLY_CONNECTED", (tensor("x", ONE), constant(WEIGHTS), bias(0.06)), ONE, "bias"),
}


def test_every_rule_of_the_dialect_has_a_case() -> None:
    assert set(BROKEN) == set(RULES) == {rule for row in dialect().values() for rule in row.rules}


@pytest.mark.parametrize(("kind", "inputs", "scales", "problem"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_refused(kind: str, inputs: tuple[TfliteTensor, ...], scales: Scales, problem: str) -> None:
    ports = tuple(t for t in inputs if t.values is None)
    output = tensor("y", scales)
    operator = TfliteOperator(kind, inputs, (output,), node="n")
    broken = TfliteNetwork(tuple(Port(t.name, t, (0, 1)) for t in ports), (Port("y", output, (0, 1)),), (operator,))
    with pytest.raises(ModelError, match=problem):
        check(broken)


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.sampled_from([1, 2]))
def test_lowered_networks_break_no_rule(kernel: int, front: int, end: int, stride: int) -> None:
    size = (6 + front + end - kernel) // stride + 1
    weights = {"w": np.ones((2, 3, kernel, kernel), np.float32)}
    node = f"y = Conv<pads=[{front},{end},{end},{front}], strides=[{stride},{stride}]>(x, w)"
    model = quantized(node, {"x": [1, 3, 6, 6]}, [1, 2, size, size], weights, scales=SCALES)
    assert list(problems(network_of(model))) == []
