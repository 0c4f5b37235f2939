"""Models that are quantized already (Q/DQ pairs from PyTorch, TFLite converters or quantization-aware training), taken
back to float with what their quantization decided.

Weights come back as they were rounded; `tiles` finds their grid again, so that a scale that the array can express
is kept with its integers. Activation scales are kept where the zero point is 0; others become the symmetric scale that
covers the same values, and a note says by how much the step grows. Where the integers began at zero, quantization was
the ReLU (quantizers remove one that it makes superfluous), so that one comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeq.backends.systolic.moves import MOVES
from edgeq.calibrate.ranges import Range
from edgeq.errors import ModelError
from edgeq.model.load import load_model, save_model

_LARGEST = 127
_KEEP_SIGN = MOVES | {"MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean", "Concat"}
_FLOAT_FIX = "Give the float32 model that it was made from"


@dataclass(frozen=True)
class Adoption:
    """Attributes:
    model: the float model.
    ranges: by tensor, what its quantization kept of it.
    notes: what changed, quantified.
    """

    model: Path
    ranges: Mapping[str, Range]
    notes: tuple[str, ...]


def adopt(source: Path, destination: Path) -> Adoption:
    """Write `source`, a Q/DQ model, without its conversions to `destination`.

    Raises:
        ModelError: it is quantized in another form (QLinearConv and the like), or with parameters that are computed.
    """
    model = load_model(source, external_data="all")
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], numpy_helper.to_array(a.t)) for a in node.attribute if a.name == "value")
    makers = {name: node for node in model.graph.node for name in node.output}
    renamed: dict[str, str] = {}
    steps: dict[str, tuple[float, int, np.dtype[Any]]] = {}
    weights: list[onnx.TensorProto] = []
    floors: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type.startswith(("QLinear", "QGemm", "ConvInteger", "MatMulInteger", "DynamicQuantize")):
            raise ModelError(f"{source}: {node.op_type} {node.name!r} is no Q/DQ pair", _FLOAT_FIX)
        if node.op_type == "QuantizeLinear":
            continue
        if node.op_type != "DequantizeLinear":
            kept.append(node)
            continue
        if node.input[0] in constants:
            values = _dequantized(node, constants, source)
            weights.append(numpy_helper.from_array(values, node.output[0]))
            continue
        pair = makers.get(node.input[0])
        if pair is None or pair.op_type != "QuantizeLinear":
            raise ModelError(f"{source}: DequantizeLinear {node.name!r} has no QuantizeLinear before it", _FLOAT_FIX)
        scale, zero = _parameters(node, constants, source)
        if scale.size != 1:
            raise ModelError(f"{source}: {node.name!r} has one scale a channel for an activation", _FLOAT_FIX)
        origin = renamed.get(pair.input[0], pair.input[0])
        found = (float(scale.reshape(())), int(zero.reshape(())), zero.dtype)
        if found[1] == np.iinfo(zero.dtype).min and not _nonnegative(origin, makers, renamed, floors):
            if origin not in floors:
                floors[origin] = f"{origin}/floor"
                kept.append(onnx.helper.make_node("Relu", [origin], [floors[origin]], name=floors[origin]))
            origin = floors[origin]
        renamed[node.output[0]] = origin
        steps[origin] = found
    _rewire(model, kept, weights, renamed)
    save_model(model, destination)
    ranges = {name: Range(*_covered(*found)) for name, found in steps.items()}
    return Adoption(destination, ranges, _notes(steps))


def _nonnegative(
    tensor: str, makers: Mapping[str, onnx.NodeProto], renamed: Mapping[str, str], floors: Mapping[str, str]
) -> bool:
    """Whether a tensor has no negative values as the graph stands."""
    if tensor in floors.values():
        return True
    node = makers.get(tensor)
    if node is None:
        return False
    if node.op_type in ("Relu", "Sigmoid", "Softmax"):
        return True
    if node.op_type not in _KEEP_SIGN:
        return False
    sources = node.input if node.op_type == "Concat" else node.input[:1]
    return all(_nonnegative(renamed.get(name, name), makers, renamed, floors) for name in sources)


def _covered(scale: float, zero: int, dtype: np.dtype[Any]) -> tuple[float, float]:
    info = np.iinfo(dtype)
    bound = max(zero - info.min, info.max - zero) * scale
    # -128 of a symmetric int8 scale is not worth a larger step.
    if zero == 0 and dtype == np.int8:
        bound = _LARGEST * scale
    return -bound, bound


def _notes(steps: Mapping[str, tuple[float, int, np.dtype[Any]]]) -> tuple[str, ...]:
    notes = []
    grown = {}
    for name, (scale, zero, dtype) in steps.items():
        growth = _covered(scale, zero, dtype)[1] / _LARGEST / scale
        if growth > 1.001:
            grown[name] = growth
    same = len(steps) - len(grown)
    if same:
        notes.append(f"{same} activation scales of the quantized model are kept")
    if grown:
        worst = max(grown, key=lambda name: grown[name])
        notes.append(
            f"WARNING: {len(grown)} activations are asymmetric or uint8, which the array is not: their steps grow by "
            f"{np.mean(list(grown.values())):.2f} times, at most {grown[worst]:.2f} times ({worst})"
        )
    return tuple(notes)


def _parameters(
    node: onnx.NodeProto, constants: Mapping[str, NDArray[Any]], source: Path
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    if any(name and name not in constants for name in node.input[1:]):
        raise ModelError(f"{source}: the scale of {node.name!r} is computed", _FLOAT_FIX)
    zero = constants[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
    return np.asarray(constants[node.input[1]], np.float32), np.asarray(zero)


def _dequantized(node: onnx.NodeProto, constants: Mapping[str, NDArray[Any]], source: Path) -> NDArray[np.float32]:
    scale, zero = _parameters(node, constants, source)
    values = constants[node.input[0]].astype(np.float64)
    if scale.size > 1:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % values.ndim
        shape = [-1 if i == axis else 1 for i in range(values.ndim)]
        scale = scale.reshape(shape)
        zero = zero.reshape(shape) if zero.size > 1 else zero
    return np.asarray((values - zero.astype(np.float64)) * scale.astype(np.float64), np.float32)


def _rewire(
    model: onnx.ModelProto, kept: list[onnx.NodeProto], weights: list[onnx.TensorProto], renamed: Mapping[str, str]
) -> None:
    outputs = {o.name for o in model.graph.output}
    nodes = []
    for node in kept:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for place, name in enumerate(copy.input):
            copy.input[place] = renamed.get(name, name)
        nodes.append(copy)
    nodes += [
        onnx.helper.make_node("Identity", [origin], [name], name=f"{name}/float")
        for name, origin in renamed.items()
        if name in outputs
    ]
    used = {name for node in nodes for name in node.input}
    tensors = [t for t in (*model.graph.initializer, *weights) if t.name in used]
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(tensors)
