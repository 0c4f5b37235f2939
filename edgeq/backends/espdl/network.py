"""Describe a model in the form of an .espdl file: integer tensors with power-of-two scales, and nodes in order.

x = integer * 2^exponent. There are no zero points. Activations of four axes are stored as NHWC. The values of a
convolution's filter are in the order HWCN here, and `layout` names the order in which a file stores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

EspType = Literal["float32", "int8", "int16", "int32", "int64"]
Attribute = int | float | str | tuple[int, ...]
LIMITS: Mapping[str, tuple[int, int]] = {"int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1)}
"""Type of activations → smallest and largest integer."""
QUANT_TYPES: Mapping[str, str] = {"int8": "S8", "int16": "S16", "float32": "F32"}
"""Type of a node's inputs → the name by which the runtime chooses the node's kernel."""
FILTER, DEPTHWISE = "filter", "depthwise"
"""Layouts of convolution weights. Any other tensor has the layout ""."""
LINEAR, RELU = "Linear", "Relu"
"""Activations that a Conv or Gemm applies to its result."""


@dataclass(frozen=True, eq=False)
class EspTensor:
    """Describe one tensor.

    Attributes:
        shape: the shape in the runtime's order of axes; [H, W, C, N] for a filter and [H, W, C, 1] for a depthwise one.
        exponents: one exponent, or one for each output channel.
        values: the values of a constant in that shape; None if the tensor is computed.
        layout: "filter" or "depthwise" for weights; "" otherwise.
    """

    name: str
    shape: tuple[int, ...]
    type: EspType
    exponents: tuple[int, ...] = (0,)
    values: NDArray[Any] | None = None
    layout: str = ""

    @property
    def exponent(self) -> int:
        """Return the exponent of a tensor that has only one."""
        return self.exponents[0]

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.type).itemsize


@dataclass(frozen=True, eq=False)
class EspNode:
    """Describe one node.

    Attributes:
        kind: operator type in the runtime.
        inputs: the tensors; None for an optional input that is left out.
        table: the constant with the node's 256 results, for operators that the runtime looks up.
        source: the ONNX node that the node is part of.
    """

    kind: str
    name: str
    inputs: tuple[EspTensor | None, ...]
    outputs: tuple[EspTensor, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    table: EspTensor | None = None
    source: str = ""

    @property
    def type(self) -> str:
        """Return the type of the data that the node reads."""
        return self.data[0].type

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an attribute that is a list of integers."""
        value = self.attributes[name]
        assert isinstance(value, tuple), name
        return value

    def integer(self, name: str) -> int:
        """Return an attribute that is an integer."""
        value = self.attributes[name]
        assert not isinstance(value, (tuple, str)), name
        return int(value)

    @property
    def data(self) -> tuple[EspTensor, ...]:
        """Return the inputs that are not left out."""
        return tuple(tensor for tensor in self.inputs if tensor is not None)


@dataclass(frozen=True)
class EspPort:
    """Describe an input or output of the file, which represents an input or output of the ONNX model.

    Attributes:
        name: the ONNX name.
        order: for each axis in the file, its number in the ONNX model: (0, 2, 3, 1) for NCHW stored as NHWC.
    """

    name: str
    tensor: EspTensor
    order: tuple[int, ...]


@dataclass(frozen=True)
class EspGraph:
    """Hold a whole model as tensors and nodes of an .espdl file."""

    inputs: tuple[EspPort, ...]
    outputs: tuple[EspPort, ...]
    nodes: tuple[EspNode, ...]

    def tensors(self) -> Iterator[EspTensor]:
        """Yield every tensor once, in the order in which the nodes read and make them."""
        # A dictionary as an ordered set: the same graph must always give the same bytes.
        ordered: dict[EspTensor, None] = {port.tensor: None for port in self.inputs}
        for node in self.nodes:
            ordered.update(dict.fromkeys((*node.data, *node.outputs)))
            if node.table is not None:
                ordered[node.table] = None
        return iter(ordered)
