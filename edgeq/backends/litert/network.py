"""Describe a model in the form of a .tflite file: tensors with their quantization, and operators in execution order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Type = Literal["float32", "int8", "int16", "int32", "int64", "bool", "uint8"]
QUANTIZED: tuple[Type, ...] = ("int8", "int16")
"""The types of quantized activations."""
BIAS_TYPES: dict[Type, Type] = {"int8": "int32", "int16": "int64"}
"""Type of a layer's activations → type of its bias."""
_WIDEST_FIRST: tuple[Type, ...] = ("float32", "int16", "int8")


@dataclass(frozen=True, eq=False)
class Scales:
    """Describe how the integers of a tensor represent numbers: x = (q - zero) * scale.

    The tensor has one scale and one zero point, or one of each for every index of `axis`. The integers of an activation
    are of the type `type`.
    """

    scale: NDArray[np.float32]
    zero: NDArray[np.int64]
    # Meaningful only if there are several scales.
    axis: int = 0
    type: Type = "int8"

    def equals(self, candidate: Scales | None) -> bool:
        """Return whether every integer represents the same number with these scales as with `candidate`."""
        return (
            candidate is not None
            and self.type == candidate.type
            and self.scale.shape == candidate.scale.shape
            and bool(np.all(self.scale == candidate.scale) and np.all(self.zero == candidate.zero))
        )

    @classmethod
    def of(cls, scale: float, zero: int, type_: Type = "int8") -> Scales:
        """Return scales with one scale and one zero point for the whole tensor."""
        return cls(np.array([scale], np.float32), np.array([zero], np.int64), type=type_)


@dataclass(frozen=True, eq=False)
class TfliteTensor:
    """Describe one tensor. `values` are the values of a constant, or None if the tensor is computed."""

    name: str
    shape: tuple[int, ...]
    type: Type
    scales: Scales | None = None
    values: NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class TfliteOperator:
    """Describe one operator by its builtin name in the schema, such as "CONV_2D".

    Attributes:
        inputs: input tensors; None for an optional input that is left out.
        options: fields of the operator's options, keyed by their names in the schema's object API.
        node: the ONNX node that the operator is part of.
    """

    kind: str
    inputs: tuple[TfliteTensor | None, ...]
    outputs: tuple[TfliteTensor, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""

    @property
    def type(self) -> Type | None:
        """Return the type of the numbers that the operator reads: "float32", "int16" or "int8". Return None if it reads
        only other types, such as indices.
        """
        types = {tensor.type for tensor in self.inputs if tensor is not None}
        # The weights of an operator on 16-bit activations are int8, so the widest type is that of the activations.
        return next((kind for kind in _WIDEST_FIRST if kind in types), None)


@dataclass(frozen=True)
class Port:
    """Describe an input or output of the file, which represents an input or output of the ONNX model.

    Attributes:
        name: the ONNX name.
        order: for each axis in the file, its number in the ONNX model: (0, 2, 3, 1) for NCHW stored as NHWC.
        type, shape: type and shape in the ONNX model as onnxruntime reports them, with names for open sizes; "" and
            None if the file does not state them.
    """

    name: str
    tensor: TfliteTensor
    order: tuple[int, ...]
    type: str = ""
    shape: tuple[int | str | None, ...] | None = None


@dataclass(frozen=True)
class TfliteNetwork:
    """Hold a whole model as tensors and operators of a .tflite file."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: tuple[TfliteOperator, ...]

    def tensors(self) -> tuple[TfliteTensor, ...]:
        """Return every tensor once: first the inputs, then the others in the order in which operators read or make
        them.
        """
        # A dictionary as an ordered set: the same network must always give the same bytes.
        ordered: dict[TfliteTensor, None] = {port.tensor: None for port in self.inputs}
        for operator in self.operators:
            ordered.update({t: None for t in (*operator.inputs, *operator.outputs) if t is not None})
        ordered.update({port.tensor: None for port in self.outputs})
        return tuple(ordered)

    def without_unused(self) -> TfliteNetwork:
        """Return the network without the operators whose results nothing reads."""
        live = {port.tensor for port in self.outputs}
        live_operators: list[TfliteOperator] = []
        # From the end, so that one pass finds everything that the outputs depend on.
        for operator in reversed(self.operators):
            if live.intersection(operator.outputs):
                live_operators.append(operator)
                live.update(t for t in operator.inputs if t is not None)
        return replace(self, operators=tuple(reversed(live_operators)))
