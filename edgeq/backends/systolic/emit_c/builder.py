"""Collect the C source of one program: declarations for params.h, calls for main.c, and a buffer for each tensor."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.emit_c.layout import Order, c_order, c_shape, moved
from edgeq.backends.systolic.emit_c.text import array, buffer, harmless
from edgeq.backends.systolic.program import Program

# The 2021 generation of gemmini.h has structures with one size for rows and columns; the 2023 one has both.
Generation = Literal["2021", "2023"]


@dataclass(frozen=True)
class TensorLocation:
    """Locate a tensor in memory by a pointer expression. `order` is the order of a sample's elements there."""

    pointer: str
    order: Order


@dataclass(frozen=True)
class CLayer:
    """Describe a buffer that the C code fills with int8. The buffers are listed in the order in which their layers run.

    Attributes:
        label: the layer's label in the C source.
        buffer: name of the C array.
        tensor: the program tensor in the buffer.
        order: the order of the elements: element p of a sample in C is element order[p] of the flattened tensor.
    """

    label: str
    buffer: str
    tensor: str
    order: Order


@dataclass
class Builder:
    """Accumulate the C source.

    Attributes:
        declarations: C source for params.h, in the order of the steps.
        calls: C source for main.c, in the order of the steps.
        places: the place of each tensor, by name.
        patches, unpooled: sizes, in elements, of the two scratch buffers, each large enough for every convolution.
            `patches` is 0 if the program has no convolution.
    """

    program: Program
    generation: Generation
    batch: int
    declarations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    layers: list[CLayer] = field(default_factory=list)
    places: dict[str, TensorLocation] = field(default_factory=dict)
    patches: int = 0
    unpooled: int = 1
    _labels: Counter[str] = field(default_factory=Counter)
    _permuted: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def tensor(self, name: str) -> steps.Tensor:
        """Return a tensor's entry in the program's tensor table."""
        return self.program.tensors[name]

    def size(self, name: str) -> int:
        """Return the number of elements in one sample of a tensor."""
        return math.prod(self.tensor(name).shape[1:])

    def label(self, kind: str) -> str:
        """Return a new numbered label for a layer: conv_1, conv_2, add_1 …"""
        self._labels[kind] += 1
        return f"{kind}_{self._labels[kind]}"

    def call(self, label: str, names: tuple[str, ...], statement: str) -> None:
        """Add a statement to main.c, under a comment with the layer's label and the float model's node names."""
        # Four names identify a layer; a layer that replaced a whole block may have dozens.
        listed = ", ".join(harmless(name) for name in names[:4]) + (" ..." if len(names) > 4 else "")
        self.calls.append(f"    /* {label}{': ' + listed if listed else ''} */\n    {statement}\n")

    def declare(self, *declarations: str) -> None:
        """Add declarations to params.h. Each is one or more complete lines of C."""
        self.declarations.extend(declarations)

    def output(self, label: str, tensor: str, *, suffix: str = "_out", order: Order | None = None) -> str:
        """Declare the buffer for `tensor`, the output of the layer `label`, and return a pointer to the buffer.

        Args:
            order: the order of the elements; None means the result of `c_order`.
        """
        shape = self.tensor(tensor).shape
        standard = c_order(shape)
        order = standard if order is None else order
        # Only the standard order has axes in C. A buffer in another order is declared flat, so that no one indexes it
        # wrongly.
        inner = c_shape(shape) if np.array_equal(order, standard) else (order.size,)
        pointer = self._buffer(label, suffix, tensor, order, inner)
        self.places[tensor] = TensorLocation(pointer, order)
        return pointer

    def request(self, tensor: str, order: Order) -> str:
        """Return a pointer to `tensor` in `order`. If the tensor has another order, first add a layer that permutes it.
        Further requests use the same layer.
        """
        place, key = self.places[tensor], (tensor, order.tobytes())
        if np.array_equal(place.order, order):
            return place.pointer
        # Several layers may need the same order; one permutation serves them all.
        if key not in self._permuted:
            label = self.label("order")
            index = moved(np.arange(order.size, dtype=np.int32), place.order, order)
            self.declare(array("int32_t", f"{label}_index", index))
            pointer = self._permuted[key] = self._buffer(label, "_out", tensor, order, (order.size,))
            self.rearrange(label, (), place, pointer, index.size)
        return self._permuted[key]

    def _buffer(self, label: str, suffix: str, tensor: str, order: Order, shape: tuple[int, ...]) -> str:
        self.declare(buffer(f"{label}{suffix}", (self.batch, *shape)))
        # Every buffer is listed, so that a difference from the simulator is found in the first layer that has it.
        self.layers.append(CLayer(label, f"{label}{suffix}", tensor, order))
        return f"(elem_t *){label}{suffix}"

    def rearrange(self, label: str, names: tuple[str, ...], source: TensorLocation, target: str, size: int) -> None:
        """Add the call that permutes each sample of `source` by the table LABEL_index.

        Args:
            target: pointer to the result.
            size: number of elements of the result.
        """
        arguments = f"{source.pointer}, {source.order.size}, {target}, {size}, {label}_index, {self.batch}"
        self.call(label, names, f"eq_rearrange({arguments});")

    def require_image(self, tensor: str) -> str:
        """Return a pointer to `tensor` in C's standard order: NHWC for images."""
        return self.request(tensor, c_order(self.tensor(tensor).shape))
