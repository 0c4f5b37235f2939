"""Collects the C source of one program, and the place of each tensor in memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edgeq.backends.systolic.emit_c import text
from edgeq.backends.systolic.emit_c.layout import Order, c_order, c_shape, moved
from edgeq.backends.systolic.program import Program, Tensor

Generation = Literal["2021", "2023"]


@dataclass(frozen=True)
class Place:
    """The place of a tensor in memory: a pointer expression, and the order of a sample there."""

    pointer: str
    order: Order


@dataclass(frozen=True)
class CLayer:
    """A buffer that C fills with int8, in the order in which layers run.

    Attributes:
        label: of the layer, as in the C source.
        buffer: name of the C array.
        tensor: the program tensor that it holds.
        order: place p of a sample in C holds element order[p] of the flattened tensor.
    """

    label: str
    buffer: str
    tensor: str
    order: Order


@dataclass
class Builder:
    """The source so far.

    Attributes:
        declarations: of params.h; calls: of main.c; both in the order of the steps.
        places: the place of each tensor, by name.
        patches, unpooled: elements of the largest scratch buffers that a convolution needs; 0 patches: there is none.
    """

    program: Program
    generation: Generation
    batch: int
    declarations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    layers: list[CLayer] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    patches: int = 0
    unpooled: int = 1
    _labels: Counter[str] = field(default_factory=Counter)
    _permuted: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """The entry of the program's tensor table."""
        return self.program.tensors[name]

    def size(self, name: str) -> int:
        """Elements of one sample."""
        return math.prod(self.tensor(name).shape[1:])

    def label(self, kind: str) -> str:
        """conv_1, conv_2, add_1 …"""
        self._labels[kind] += 1
        return f"{kind}_{self._labels[kind]}"

    def call(self, label: str, names: tuple[str, ...], statement: str) -> None:
        """Add a statement to main.c, under a comment with the layer's label and the float model's node names."""
        listed = ", ".join(text.harmless(name) for name in names[:4]) + (" ..." if len(names) > 4 else "")
        self.calls.append(f"    /* {label}{': ' + listed if listed else ''} */\n    {statement}\n")

    def declare(self, *declarations: str) -> None:
        """Add declarations, complete lines of C, to params.h."""
        self.declarations.extend(declarations)

    def output(self, label: str, tensor: str, *, suffix: str = "_out", order: Order | None = None) -> str:
        """A buffer for `tensor`, which the layer `label` computes in `order` (as an image is in C); its pointer."""
        name = f"{label}{suffix}"
        shape = self.tensor(tensor).shape
        standard = c_order(shape)
        order = standard if order is None else order
        inner = c_shape(shape) if np.array_equal(order, standard) else (order.size,)
        self.declare(text.buffer(name, (self.batch, *inner)))
        self.layers.append(CLayer(label, name, tensor, order))
        pointer = f"(elem_t *){name}"
        self.places[tensor] = Place(pointer, order)
        return pointer

    def request(self, tensor: str, order: Order) -> str:
        """A pointer to `tensor` in `order`; where it has another, a layer that permutes it is inserted, once."""
        place, key = self.places[tensor], (tensor, order.tobytes())
        if np.array_equal(place.order, order):
            return place.pointer
        if key in self._permuted:
            return self._permuted[key]
        label = self.label("order")
        index = moved(np.arange(order.size, dtype=np.int32), place.order, order)
        self.declare(text.array("int32_t", f"{label}_index", index))
        self.declare(text.buffer(f"{label}_out", (self.batch, order.size)))
        self.layers.append(CLayer(label, f"{label}_out", tensor, order))
        pointer = self._permuted[key] = f"(elem_t *){label}_out"
        self.call(label, (), rearranged(place.pointer, order.size, pointer, label, index.size, self.batch))
        return pointer

    def require_image(self, tensor: str) -> str:
        """A pointer to `tensor` in the standard order of C, NHWC for images."""
        return self.request(tensor, c_order(self.tensor(tensor).shape))


def rearranged(source: str, source_size: int, target: str, label: str, size: int, batch: int) -> str:
    """The C statement that permutes each of `batch` samples by the table LABEL_index.

    Args:
        source, target: pointer expressions.
        source_size, size: elements of one sample there.
    """
    return f"eq_rearrange({source}, {source_size}, {target}, {size}, {label}_index, {batch});"
