"""Scales and zero points as the `quantize` of 2019 to 2020 took them, made ready for today's runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.compat.source import LOG
from edgeq.errors import UsageError
from edgeq.model.graph import clamp_bounds, clamps, name_of
from edgeq.model.quant_params import LIMITS, QuantParams

Given = Mapping[str, Sequence[Any]]
_TYPES = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}


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


def in_type(given: Mapping[str, tuple[NDArray[Any], np.float32]], dtype: str) -> dict[str, QuantParams]:
    """The same quantization with integers of one type: 128 more or less changes no number that is represented."""
    wanted = _TYPES[dtype]
    shifted = {}
    for name, (zero_point, scale) in given.items():
        shift = LIMITS[wanted][0] - LIMITS[_TYPES.get(str(zero_point.dtype), wanted)][0]
        shifted[name] = QuantParams(np.asarray(scale), np.asarray(int(zero_point) + shift), wanted)
    return shifted


def fold_clamps(
    model: ir.Model, params: Mapping[str, QuantParams], quantized: frozenset[str]
) -> tuple[dict[str, QuantParams], frozenset[str]]:
    """Find the Relu and Clip nodes that a scale makes superfluous, and give their input the scale of their output.

    The older tool dropped every one behind a quantized node, whatever the scales.

    Args:
        quantized: tensors that quantized nodes produce.

    Returns:
        The parameters, changed; the names of the nodes that can go.
    """
    merged, gone = dict(params), set()
    for node in reversed(list(clamps(model.graph))):
        source, result = name_of(node.inputs[0]), name_of(node.outputs[0])
        chosen = merged.get(result, merged.get(source))
        bounds = clamp_bounds(node)
        if source not in quantized or chosen is None or bounds is None:
            continue
        low, high = chosen.range
        slack = float(chosen.scale) / 2  # a bound between two levels is rounded to one of them anyway
        if low >= bounds[0] - slack and high <= bounds[1] + slack:
            merged[source] = merged[result] = chosen
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
        raise UsageError(f"{argument} of {name!r} is {value!r}", "A zero point is an integer, a scale above 0")
    if str(zero.dtype) not in _TYPES:
        zero = zero.astype(np.int8 if zero < 0 else np.uint8)
    return zero, number
