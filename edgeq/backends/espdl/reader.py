"""Read an .espdl file, which may come from anybody: every size is checked against the file before memory is used."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.errors import DeviceError
from edgeq_device.system.plainjson import parse_json
from numpy.typing import NDArray

from edgeq.backends.espdl import schema as s
from edgeq.backends.espdl.flat import BrokenFlatError, FlatBuffer, FlatTable
from edgeq.backends.espdl.layout import restore
from edgeq.backends.espdl.network import (
    DEPTHWISE,
    FILTER,
    Attribute,
    EspGraph,
    EspNode,
    EspPort,
    EspTensor,
)
from edgeq.backends.espdl.writer import METADATA
from edgeq.errors import ModelError

_TYPES = {number: name for name, number in s.TYPES.items()}
_MOST_AXES = 8
# The largest exponent that the runtime's shift of an int can express.
_MOST_EXPONENT = 64
_WEIGHTED = ("Conv", "Gemm")


@dataclass(frozen=True)
class EspFile:
    """Hold the content of an .espdl file: the graph, and the test values by the name of their tensor."""

    graph: EspGraph
    tests: Mapping[str, NDArray[Any]]


def read(data: bytes, source: Path) -> EspFile:
    """Return the content of an .espdl file. Weights are in the order HWCN, whatever the file's order.

    Args:
        source: the file, for messages.

    Raises:
        ModelError: the file is not a well-formed .espdl file, or is encrypted.
    """
    try:
        return _read(data)
    except (BrokenFlatError, ValueError, OverflowError) as error:
        raise ModelError(
            f"{source} is not a well-formed .espdl file: {error}", "Give a file of edgeq or esp-ppq"
        ) from None


def _read(data: bytes) -> EspFile:
    if len(data) < s.HEADER or data[:4] != s.MAGIC:
        raise BrokenFlatError(f"it does not begin with {s.MAGIC.decode()}")
    encrypted, length = struct.unpack_from("<II", data, 4)
    if encrypted:
        raise BrokenFlatError("it is encrypted")
    if length > len(data) - s.HEADER:
        raise BrokenFlatError("it is cut off")
    root = FlatBuffer(data[s.HEADER : s.HEADER + length]).root()
    table = root.table(s.ModelFields.GRAPH)
    return _GraphReader(table).read(_metadata(root))


class _GraphReader:
    def __init__(self, table: FlatTable) -> None:
        self._table = table
        self._tensors: dict[str, EspTensor] = {}

    def read(self, orders: Mapping[str, tuple[str, tuple[int, ...]]]) -> EspFile:
        """Return the graph and its test values."""
        table, f = self._table, s.GraphFields
        nodes = list(table.tables(f.NODE))
        layouts = self._layouts(nodes)
        for constant in table.tables(f.INITIALIZER):
            tensor = _stored(constant, layouts.get(constant.text(s.TensorFields.NAME), ""))
            self._tensors[tensor.name] = tensor
        ends = [[_info(t) for t in table.tables(field)] for field in (f.INPUT, f.OUTPUT)]
        for tensor in (*map(_info, table.tables(f.VALUE_INFO)), *ends[0], *ends[1]):
            # A tensor is described twice if it is an input or output; one object stands for both.
            self._tensors.setdefault(tensor.name, tensor)
        inputs, outputs = (
            tuple(self._port(self._tensors[t.name], orders) for t in end if self._tensors[t.name].values is None)
            for end in ends
        )
        tests = [_stored(t, "") for field in (f.TEST_INPUTS, f.TEST_OUTPUTS) for t in table.tables(field)]
        values = {t.name: t.values for t in tests if t.values is not None}
        return EspFile(EspGraph(inputs, outputs, tuple(map(self._node, nodes))), values)

    def _layouts(self, nodes: list[FlatTable]) -> dict[str, str]:
        """Return the layout of the weights, which depends on the node that reads them."""
        layouts = {}
        for node in nodes:
            inputs = node.texts(s.NodeFields.INPUT)
            if node.text(s.NodeFields.OP_TYPE) in _WEIGHTED and len(inputs) > 1:
                groups = next(
                    (a.number(s.AttributeFields.INT, "q") for a in node.tables(s.NodeFields.ATTRIBUTE)
                     if a.text(s.AttributeFields.NAME) == "group"),
                    1,
                )  # fmt: skip
                layouts[inputs[1]] = DEPTHWISE if groups > 1 else FILTER
        return layouts

    def _port(self, tensor: EspTensor, orders: Mapping[str, tuple[str, tuple[int, ...]]]) -> EspPort:
        name, order = orders.get(tensor.name, (tensor.name, tuple(range(len(tensor.shape)))))
        if sorted(order) != list(range(len(tensor.shape))):
            raise BrokenFlatError(f"the order of the axes of {tensor.name!r} is wrong")
        return EspPort(name, tensor, order)

    def _node(self, table: FlatTable) -> EspNode:
        f = s.NodeFields
        attributes = dict(map(_attribute, table.tables(f.ATTRIBUTE)))
        attributes.pop("quant_type", None)
        lut = attributes.pop("lut", None)
        inputs = tuple(None if not name else self._named(name) for name in table.texts(f.INPUT))
        outputs = tuple(map(self._named, table.texts(f.OUTPUT)))
        name = table.text(f.NAME)
        if not outputs or not any(inputs):
            raise BrokenFlatError(f"node {name!r} has no inputs or no outputs")
        looked_up = self._named(str(lut)) if lut is not None else None
        return EspNode(table.text(f.OP_TYPE), name, inputs, outputs, attributes, looked_up, name)

    def _named(self, name: str) -> EspTensor:
        if name not in self._tensors:
            raise BrokenFlatError(f"tensor {name!r} is not described")
        return self._tensors[name]


def _stored(table: FlatTable, layout: str) -> EspTensor:
    f = s.TensorFields
    type_ = _type(table.number(f.DATA_TYPE, "i"))
    name = table.text(f.NAME)
    shape = _shape(table.array(f.DIMS, "int64").tolist())
    raw = table.array(f.RAW_DATA, "uint8", s.ALIGNMENT)
    dtype = np.dtype(type_).newbyteorder("<")
    count = math.prod(shape)
    if count * dtype.itemsize > raw.size:
        raise BrokenFlatError(f"tensor {name!r} claims {count} values and has fewer")
    values = raw[: count * dtype.itemsize].view(dtype).astype(type_)
    values = values.reshape(shape) if not layout else _weights(values, shape, table.text(f.DOC_STRING), layout)
    tensor = EspTensor(name, shape, type_, _exponents(table, f.EXPONENTS), values, layout)
    return replace(tensor, shape=values.shape)


def _weights(values: NDArray[Any], shape: tuple[int, ...], text: str, layout: str) -> NDArray[Any]:
    if len(shape) < 3:
        raise BrokenFlatError(f"weights have the shape {shape}")
    return restore(values, shape, text, depthwise=layout == DEPTHWISE)


def _info(table: FlatTable) -> EspTensor:
    f = s.InfoFields
    kind = table.table(f.TYPE).table(s.TypeFields.VALUE)
    type_ = _type(kind.number(s.TensorTypeFields.ELEM_TYPE, "i"))
    sizes = []
    if kind.has(s.TensorTypeFields.SHAPE):
        for dimension in kind.table(s.TensorTypeFields.SHAPE).tables(s.ShapeFields.DIM):
            sizes.append(dimension.table(s.ShapeFields.DIMENSION_VALUE).number(s.ShapeFields.NUMBER, "q"))
    return EspTensor(table.text(f.NAME), _shape(sizes), type_, _exponents(table, f.EXPONENTS))


def _type(number: int) -> Any:
    if number not in _TYPES:
        raise BrokenFlatError(f"a tensor has the type {number}, which edgeq does not read")
    return _TYPES[number]


def _shape(sizes: list[int]) -> tuple[int, ...]:
    if len(sizes) > _MOST_AXES or any(size < 1 for size in sizes):
        raise BrokenFlatError(f"a tensor has the shape {sizes[:_MOST_AXES]}")
    return tuple(sizes)


def _exponents(table: FlatTable, field: int) -> tuple[int, ...]:
    exponents = table.array(field, "int64")
    if exponents.size and np.abs(np.clip(exponents, -_MOST_EXPONENT - 1, _MOST_EXPONENT + 1)).max() > _MOST_EXPONENT:
        raise BrokenFlatError("an exponent is too large")
    return tuple(exponents.tolist()) or (0,)


def _attribute(table: FlatTable) -> tuple[str, Attribute]:
    f = s.AttributeFields
    kind, name = table.number(f.TYPE, "i"), table.text(f.NAME)
    if kind == s.INT:
        return name, int(table.number(f.INT, "q"))
    if kind == s.FLOAT:
        return name, float(table.number(f.FLOAT, "f"))
    if kind == s.STRING:
        return name, bytes(table.array(f.TEXT, "uint8")).decode()
    if kind == s.INTS:
        return name, tuple(table.array(f.INTS, "int64").tolist())
    raise BrokenFlatError(f"attribute {name!r} has the type {kind}, which edgeq does not read")


def _metadata(root: FlatTable) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the name and the order of the axes of each input and output of a file that edgeq wrote, by the name of the
    tensor.
    """
    f = s.EntryFields
    for entry in root.tables(s.ModelFields.METADATA):
        if entry.text(f.KEY) == METADATA:
            try:
                content = parse_json(entry.text(f.VALUE).encode(), "the order of the axes")
                ports = [*content["inputs"], *content["outputs"]]
                return {str(p["tensor"]): (str(p["name"]), tuple(int(axis) for axis in p["order"])) for p in ports}
            except (KeyError, TypeError, DeviceError):
                raise BrokenFlatError("the order of its axes is not stated as edgeq does") from None
    return {}
