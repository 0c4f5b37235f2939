"""Scales and zero points as the `quantize` of 2019 to 2020 took them, made ready for today's runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.compat.source import LOG
from edgeq.errors import UsageError

Given = Mapping[str, Sequence[Any]]
_LOWEST = {"uint8": 0, "int8": -128}


@dataclass(frozen=True)
class Params:
    """One tensor's zero point (of the activation type) and scale (float32)."""

    zero_point: int
    scale: np.float32

    def limits(self, dtype: str) -> tuple[float, float]:
        """The smallest and largest number that `dtype` can hold this way."""
        low = _LOWEST[dtype]
        scale = float(self.scale)
        return (low - self.zero_point) * scale, (low + 255 - self.zero_point) * scale


def read_params(
    names: frozenset[str], both: Given | None, inputs: Given | None, outputs: Given | None
) -> dict[str, tuple[NDArray[Any], np.float32]]:
    """{tensor: [zero point, scale]} of the three arguments that there were, checked and in one.

    Args:
        names: tensors of the model; others are ignored, with a warning.

    Raises:
        UsageError: not a zero point and a scale, or a tensor with two different ones.
    """
    found: dict[str, tuple[NDArray[Any], np.float32]] = {}
    for argument, given in (
        ("quantization_params", both),
        ("input_quantization_params", inputs),
        ("output_quantization_params", outputs),
    ):
        for name, value in (given or {}).items():
            pair = _pair(argument, name, value)
            if name not in names:
                LOG.warning("%s: the model has no tensor %r; it is ignored", argument, name)
            elif name in found and found[name] != pair:
                raise UsageError(
                    f"tensor {name!r} has {found[name]} and, in {argument}, {pair}",
                    "A tensor keeps one scale and zero point now: give the same in both",
                )
            else:
                found[name] = pair
    return found


def in_type(given: Mapping[str, tuple[NDArray[Any], np.float32]], dtype: str) -> dict[str, Params]:
    """The same quantization with zero points of one type: 128 more or less changes no number that is represented."""
    shifted = {}
    for name, (zero_point, scale) in given.items():
        shift = _LOWEST[dtype] - _LOWEST.get(str(zero_point.dtype), _LOWEST[dtype])
        shifted[name] = Params(int(zero_point) + shift, scale)
    return shifted


def fold_clamps(
    model: onnx.ModelProto, params: dict[str, Params], quantized: frozenset[str], dtype: str
) -> tuple[dict[str, Params], frozenset[str]]:
    """Find the Relu and Clip nodes that a scale makes superfluous, and give their input the scale of their output.

    The older tool dropped every one behind a quantized node, whatever the scales said.

    Args:
        quantized: tensors that quantized nodes produce.

    Returns:
        The parameters, changed; the names of the nodes that can go.
    """
    constants = {t.name: t for t in model.graph.initializer}
    merged, gone = dict(params), set()
    for node in single_reader_clamps(model):
        if node.input[0] not in quantized:
            continue
        source, result = node.input[0], node.output[0]
        chosen = merged.get(result, merged.get(source))
        bounds = clamp_bounds(node, constants)
        if chosen is None or bounds is None:
            continue
        low, high = chosen.limits(dtype)
        slack = float(chosen.scale) / 2  # a bound between two levels is rounded to one of them anyway
        if low >= bounds[0] - slack and high <= bounds[1] + slack:
            merged[source] = merged[result] = chosen
            gone.add(node.name)
    return merged, frozenset(gone)


def single_reader_clamps(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Relu and Clip nodes that alone read their input."""
    graph = model.graph
    readers: dict[str, int] = {}
    for name in [*(n for node in graph.node for n in node.input), *(o.name for o in graph.output)]:
        readers[name] = readers.get(name, 0) + 1
    return [node for node in graph.node if node.op_type in ("Relu", "Clip") and readers[node.input[0]] == 1]


def clamp_bounds(clamp: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> tuple[float, float] | None:
    """The interval that a Relu or Clip keeps; None where it is not constant."""
    if clamp.op_type == "Relu":
        return 0.0, np.inf
    bounds = [-np.inf, np.inf]
    for place, name in enumerate(clamp.input[1:3]):
        if name and name not in constants:
            return None
        if name:
            bounds[place] = float(onnx.numpy_helper.to_array(constants[name]).reshape(-1)[0])
    return bounds[0], bounds[1]


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
        raise UsageError(f"{argument} of {name!r} is {value!r}", "A zero point is an integer, a scale above 0")
    if str(zero.dtype) not in _LOWEST:
        zero = zero.astype(np.int8 if zero < 0 else np.uint8)
    return zero, number
