"""Write an .espdl file. The same graph always gives the same bytes.

The runtime does not fill in the defaults of ONNX, so `graph` gives every attribute. With test values, the runtime
compares its tensors with those that a file states, and names the first that differs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl import schema as s
from edgeq.backends.espdl.layout import UNKNOWN, describe_layout, store
from edgeq.backends.espdl.network import QUANT_TYPES, Attribute, EspGraph, EspNode, EspPort, EspTensor

METADATA = "edgeq"
"""Key of the entry that states the order of the axes of inputs and outputs."""
_Fields = Sequence[tuple[int, Callable[[int], None]]]


def write(
    graph: EspGraph, *, blocked: bool, name: str = "main", tests: Mapping[EspTensor, NDArray[Any]] | None = None
) -> bytes:
    """Return the bytes of a graph's file.

    Args:
        blocked: whether weights are stored for the SIMD kernels.
        name: the name of the model, which the runtime prints.
        tests: values of the inputs, the outputs and some inner tensors for one sample, in the runtime's order of axes.
    """
    content = _GraphWriter(graph, blocked).write(name, tests or {})
    return struct.pack("<4sIII", s.MAGIC, 0, len(content), 0) + content


class _GraphWriter:
    def __init__(self, graph: EspGraph, blocked: bool) -> None:
        # Imported here, so that listing backends does not load the package.
        import flatbuffers

        self._graph, self._blocked = graph, blocked
        self._builder: Any = flatbuffers.Builder(1 << 16)

    def write(self, name: str, tests: Mapping[EspTensor, NDArray[Any]]) -> bytes:
        """Return the flatbuffer, padded to a multiple of the alignment."""
        graph, builder = self._graph, self._builder
        inputs, outputs = ([port.tensor for port in ports] for ports in (graph.inputs, graph.outputs))
        tensors = list(graph.tensors())
        constants = [self._constant(tensor) for tensor in tensors if tensor.values is not None]
        # A flatbuffer is written from the inside out: everything that a table refers to comes before the table.
        lists = {
            s.GraphFields.NODE: [self._node(node) for node in graph.nodes],
            s.GraphFields.INITIALIZER: constants,
            s.GraphFields.INPUT: [self._info(tensor) for tensor in inputs],
            s.GraphFields.OUTPUT: [self._info(tensor) for tensor in outputs],
            s.GraphFields.VALUE_INFO: [self._info(tensor) for tensor in tensors if tensor.values is None],
            s.GraphFields.TEST_INPUTS: [self._value(t, v) for t, v in tests.items() if t in inputs],
            s.GraphFields.TEST_OUTPUTS: [self._value(t, v) for t, v in tests.items() if t not in inputs],
        }
        fields = [(place, self._offset(self._vector(items))) for place, items in lists.items()]
        fields.append((s.GraphFields.NAME, self._offset(builder.CreateString(name))))
        graph_table = self._table(s.GraphFields.SIZE, fields)
        metadata = self._vector([self._entry(METADATA, json.dumps(_orders(graph), sort_keys=True))])
        producer = builder.CreateString("edgeq")
        builder.Finish(
            self._table(
                s.ModelFields.SIZE,
                [
                    (s.ModelFields.IR_VERSION, lambda place: builder.PrependInt32Slot(place, s.IR_VERSION, 0)),
                    (s.ModelFields.PRODUCER, self._offset(producer)),
                    (s.ModelFields.GRAPH, self._offset(graph_table)),
                    (s.ModelFields.METADATA, self._offset(metadata)),
                ],
            )
        )
        content = bytes(builder.Output())
        return content + bytes(-len(content) % s.ALIGNMENT)

    def _table(self, size: int, fields: _Fields) -> int:
        self._builder.StartObject(size)
        for place, add in fields:
            add(place)
        return int(self._builder.EndObject())

    def _offset(self, offset: int) -> Callable[[int], None]:
        return lambda slot: self._builder.PrependUOffsetTRelativeSlot(slot, offset, 0)

    def _number(self, value: int) -> Callable[[int], None]:
        return lambda slot: self._builder.PrependInt32Slot(slot, value, 0)

    def _texts(self, texts: Sequence[str]) -> int:
        return self._vector([self._builder.CreateString(text) for text in texts])

    def _vector(self, offsets: Sequence[int]) -> int:
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())

    def _numbers(self, values: Sequence[int]) -> int:
        return int(self._builder.CreateNumpyVector(np.array(values, np.int64)))

    def _bytes(self, text: str) -> int:
        return int(self._builder.CreateNumpyVector(np.frombuffer(text.encode(), np.uint8)))

    def _entry(self, key: str, value: str) -> int:
        texts = [self._builder.CreateString(key), self._builder.CreateString(value)]
        places = (s.EntryFields.KEY, s.EntryFields.VALUE)
        return self._table(s.EntryFields.SIZE, [(p, self._offset(t)) for p, t in zip(places, texts, strict=True)])

    def _node(self, node: EspNode) -> int:
        attributes: dict[str, Attribute] = {**node.attributes, "quant_type": QUANT_TYPES[node.type]}
        if node.table is not None:
            attributes["lut"] = node.table.name
        parts = {
            s.NodeFields.INPUT: self._texts(["" if tensor is None else tensor.name for tensor in node.inputs]),
            s.NodeFields.OUTPUT: self._texts([tensor.name for tensor in node.outputs]),
            s.NodeFields.NAME: self._builder.CreateString(node.name),
            s.NodeFields.OP_TYPE: self._builder.CreateString(node.kind),
            s.NodeFields.ATTRIBUTE: self._vector([self._attribute(*item) for item in sorted(attributes.items())]),
        }
        return self._table(s.NodeFields.SIZE, [(place, self._offset(part)) for place, part in parts.items()])

    def _attribute(self, name: str, value: Attribute) -> int:
        label, builder = self._builder.CreateString(name), self._builder
        field: tuple[int, Callable[[int], None]]
        if isinstance(value, str):
            kind, field = s.STRING, (s.AttributeFields.TEXT, self._offset(self._bytes(value)))
        elif isinstance(value, tuple):
            kind, field = s.INTS, (s.AttributeFields.INTS, self._offset(self._numbers(value)))
        elif isinstance(value, float):
            kind, number = s.FLOAT, value

            def add_float(slot: int) -> None:
                # Structs are stored in the table itself.
                builder.Prep(4, 4)
                builder.PrependFloat32(number)
                builder.PrependStructSlot(slot, builder.Offset(), 0)

            field = (s.AttributeFields.FLOAT, add_float)
        else:
            kind, integer = s.INT, value

            def add_integer(slot: int) -> None:
                builder.Prep(8, 8)
                builder.PrependInt64(integer)
                builder.PrependStructSlot(slot, builder.Offset(), 0)

            field = (s.AttributeFields.INT, add_integer)
        named = (s.AttributeFields.NAME, self._offset(label))
        return self._table(s.AttributeFields.SIZE, [named, (s.AttributeFields.TYPE, self._number(kind)), field])

    def _constant(self, tensor: EspTensor) -> int:
        return self._stored(
            tensor, store(tensor, blocked=self._blocked), describe_layout(tensor, blocked=self._blocked)
        )

    def _value(self, tensor: EspTensor, values: NDArray[Any]) -> int:
        return self._stored(tensor, np.asarray(values).ravel(), UNKNOWN)

    def _stored(self, tensor: EspTensor, values: NDArray[Any], text: str) -> int:
        parts = {
            s.TensorFields.DIMS: self._numbers(tensor.shape),
            s.TensorFields.NAME: self._builder.CreateString(tensor.name),
            s.TensorFields.DOC_STRING: self._builder.CreateString(text),
            s.TensorFields.RAW_DATA: self._raw(values.astype(np.dtype(tensor.type).newbyteorder("<")).tobytes()),
            s.TensorFields.EXPONENTS: self._numbers(tensor.exponents),
        }
        fields = [(place, self._offset(part)) for place, part in parts.items()]
        return self._table(
            s.TensorFields.SIZE, [(s.TensorFields.DATA_TYPE, self._number(s.TYPES[tensor.type])), *fields]
        )

    def _raw(self, data: bytes) -> int:
        """Write bytes as structs of 16 bytes, which start at a multiple of 16."""
        data += bytes(-len(data) % s.ALIGNMENT)
        builder = self._builder
        builder.StartVector(s.ALIGNMENT, len(data) // s.ALIGNMENT, s.ALIGNMENT)
        # The bytes are copied at once. The package would append them one by one, which is slow for large models.
        builder.head = builder.Head() - len(data)
        builder.Bytes[builder.Head() : builder.Head() + len(data)] = data
        return int(builder.EndVector())

    def _info(self, tensor: EspTensor) -> int:
        label, exponents = self._builder.CreateString(tensor.name), self._numbers(tensor.exponents)
        shape = self._vector([self._dimension(size) for size in tensor.shape])
        shape = self._table(s.ShapeFields.SIZE, [(s.ShapeFields.DIM, self._offset(shape))])
        elements = (s.TensorTypeFields.ELEM_TYPE, self._number(s.TYPES[tensor.type]))
        kind = self._table(s.TensorTypeFields.SIZE, [elements, (s.TensorTypeFields.SHAPE, self._offset(shape))])
        union = (s.TypeFields.VALUE_TYPE, lambda slot: self._builder.PrependUint8Slot(slot, s.TENSOR_TYPE, 0))
        whole = self._table(s.TypeFields.SIZE, [union, (s.TypeFields.VALUE, self._offset(kind))])
        parts = {s.InfoFields.NAME: label, s.InfoFields.TYPE: whole, s.InfoFields.EXPONENTS: exponents}
        return self._table(s.InfoFields.SIZE, [(place, self._offset(part)) for place, part in parts.items()])

    def _dimension(self, size: int) -> int:
        kind = (s.ShapeFields.KIND, lambda slot: self._builder.PrependInt8Slot(slot, s.FIXED, 0))
        number = (s.ShapeFields.NUMBER, lambda slot: self._builder.PrependInt64Slot(slot, size, 0))
        value = self._table(s.ShapeFields.VALUE_SIZE, [kind, number])
        place = s.ShapeFields.DIMENSION_VALUE
        return self._table(s.ShapeFields.DIMENSION_SIZE, [(place, self._offset(value))])


def _orders(graph: EspGraph) -> dict[str, Any]:
    return {"inputs": [_order(port) for port in graph.inputs], "outputs": [_order(port) for port in graph.outputs]}


def _order(port: EspPort) -> dict[str, Any]:
    return {"name": port.name, "tensor": port.tensor.name, "order": list(port.order)}
