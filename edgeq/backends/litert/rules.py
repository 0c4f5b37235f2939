"""Check that the tensors of a .tflite file follow the rules of their operators.

The runtimes silently accept wrong scales and then give wrong answers, so loading a file proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from edgeq.backends.litert.dialect import dialect, fixed_output
from edgeq.backends.litert.network import BIAS_TYPES, QUANTIZED, TfliteNetwork, TfliteOperator, TfliteTensor
from edgeq.errors import ModelError

# The product of two float32 scales is rounded to float32 in the file.
_BIAS_TOLERANCE = 1e-6


def check(network: TfliteNetwork) -> None:
    """Refuse a network that breaks a rule of its operators.

    Raises:
        ModelError: an operator breaks a rule; the message names the first such operator, its node, and the rule.
    """
    problem = next(problems(network), None)
    if problem is not None:
        raise ModelError(
            f"the .tflite file would be wrong: {problem}", "This is a bug in edgeq: report it with the model"
        )


def check_kernels(network: TfliteNetwork, engine: str) -> None:
    """Refuse a network with an operator for which the engine has no kernel.

    Raises:
        ModelError: the engine has no kernel for an operator; the message names the node.
    """
    for operator in network.operators:
        if dialect()[operator.kind].lacks(engine, operator.type):
            problem = f"node {operator.node!r} becomes {operator.kind}, for which {engine} has no kernel"
            raise ModelError(problem, "Export the model without it, or choose a target with LiteRT")


def problems(network: TfliteNetwork) -> Iterator[str]:
    """Yield one sentence for each fault in a network."""
    available = {port.tensor for port in network.inputs}
    for operator in network.operators:
        location = f"{operator.kind} of node {operator.node!r}"
        row = dialect().get(operator.kind)
        # The rules of an operator without a row are not known, so it could break all of them.
        if row is None:
            yield f"{location}: the dialect has no row for it"
            continue
        for tensor in operator.inputs:
            # The runtimes run operators in the order of the file and do not look ahead.
            if tensor is not None and tensor.values is None and tensor not in available:
                yield f"{location}: it reads {tensor.name!r}, which no earlier operator makes"
        available.update(operator.outputs)
        if _integers(operator):
            if row.version(operator.type) == 0:
                yield f"{location}: no runtime has an {operator.type} kernel"
            for rule in row.rules:
                yield from (f"{location}: {fault}" for fault in RULES[rule](operator))
    yield from _tensors(network)


def _integers(operator: TfliteOperator) -> bool:
    """Return whether an operator computes on integers: it reads quantized and no float32 tensors, and is not a
    DEQUANTIZE.
    """
    return operator.type in QUANTIZED and operator.kind != "DEQUANTIZE"


def _tensors(network: TfliteNetwork) -> Iterator[str]:
    names: set[str] = set()
    for tensor in network.tensors():
        if tensor.name in names:
            yield f"two tensors are named {tensor.name!r}"
        names.add(tensor.name)
        if tensor.type in QUANTIZED:
            yield from (f"tensor {tensor.name!r}: {fault}" for fault in _scales(tensor))
        elif tensor.type == "float32" and tensor.scales is not None:
            yield f"tensor {tensor.name!r}: floats with scales"
        if tensor.values is not None and tensor.values.shape != tensor.shape:
            yield f"tensor {tensor.name!r}: its values have the shape {tensor.values.shape}"


def _scales(tensor: TfliteTensor) -> Iterator[str]:
    scales = tensor.scales
    if scales is None:
        yield "integers without scales"
        return
    if not (np.all(np.isfinite(scales.scale)) and np.all(scales.scale > 0)):
        yield "a scale is not positive and finite"
    limits = np.iinfo(tensor.type)
    if np.any(scales.zero < limits.min) or np.any(scales.zero > limits.max):
        yield f"a zero point is not an {tensor.type}"
    # The kernels ignore a zero point of 16-bit integers, whatever the file says.
    if tensor.type == "int16" and np.any(scales.zero):
        yield "16-bit integers with a zero point"
    if scales.scale.size > 1 and tensor.shape[scales.axis] != scales.scale.size:
        yield f"{scales.scale.size} scales on an axis of {tensor.shape[scales.axis]}"
    # Kernels read one scale for an activation, whatever the file says.
    if scales.scale.size > 1 and tensor.values is None:
        yield "an activation with a scale for each channel"


def _has_same_scales(tensor: TfliteTensor | None, reference: TfliteTensor | None) -> bool:
    return (
        tensor is not None
        and reference is not None
        and tensor.scales is not None
        and tensor.scales.equals(reference.scales)
    )


def _input_as_output(operator: TfliteOperator) -> Iterator[str]:
    if not _has_same_scales(operator.inputs[0], operator.outputs[0]):
        yield "its input and output have different scales"


def _inputs_as_output(operator: TfliteOperator) -> Iterator[str]:
    for tensor in operator.inputs:
        if not _has_same_scales(tensor, operator.outputs[0]):
            yield f"{tensor.name if tensor else ''!r} has another scale than the output"


def _fixed_output(operator: TfliteOperator) -> Iterator[str]:
    result = operator.outputs[0]
    expected = fixed_output(operator.kind, result.type)
    if expected is not None and not expected.equals(result.scales):
        yield f"its output does not have the scale {expected.scale[0]:g} and zero point {expected.zero[0]}"


def _weights(axis: int) -> Callable[[TfliteOperator], Iterator[str]]:
    def check_weights(operator: TfliteOperator) -> Iterator[str]:
        """Yield the faults of the weights. Their output channels are on `axis`."""
        weights = operator.inputs[1]
        if weights is None or weights.scales is None or weights.values is None:
            yield "its weights are not constant integers"
            return
        if weights.scales.zero.any():
            yield "its weights have a zero point"
        if weights.scales.scale.size > 1 and weights.scales.axis != axis:
            yield f"its weights have their scales on axis {weights.scales.axis}, not {axis}"

    return check_weights


def _bias(operator: TfliteOperator) -> Iterator[str]:
    # The first input of a TRANSPOSE_CONV is the size of its output.
    data = operator.inputs[2] if operator.kind == "TRANSPOSE_CONV" else operator.inputs[0]
    weights, bias = operator.inputs[1], operator.inputs[-1]
    # A layer without bias has nothing to check, and missing scales are reported by the other rules.
    if bias is None or data is None or weights is None or data.scales is None or weights.scales is None:
        return
    # LiteRT's and TFLite Micro's kernels read other bits of 16-bit layers with int32 biases: their answers differ.
    bias_type = BIAS_TYPES[data.type]
    if bias.type != bias_type or bias.scales is None:
        yield f"its bias is not {bias_type}"
        return
    expected = data.scales.scale.astype(np.float64) * weights.scales.scale.astype(np.float64)
    if bias.scales.zero.any() or not np.allclose(bias.scales.scale, expected, rtol=_BIAS_TOLERANCE, atol=0):
        yield "the scale of its bias is not that of its input times that of its weights"


RULES: Mapping[str, Callable[[TfliteOperator], Iterator[str]]] = {
    "input-as-output": _input_as_output,
    "inputs-as-output": _inputs_as_output,
    "fixed-output": _fixed_output,
    "weights-0": _weights(0),
    "weights-3": _weights(3),
    "bias": _bias,
}
"""The rules that targets/litert/operators.toml refers to by name."""
