"""Name the fields of the flatbuffers in an .espdl file, which copy the structure of ONNX.

Source: espressif/esp-dl 3.3.9, fbs_loader. The number of a field is its place in its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edgeq.backends.espdl.network import EspType

MAGIC = b"EDL2"
HEADER = 16
"""Bytes before the flatbuffer: magic, uint32 encrypted, uint32 length of the flatbuffer, four zero bytes."""
ALIGNMENT = 16
"""The schema stores constants in structs of 16 bytes, which start at multiples of 16."""
# The exporter esp-ppq 1.3.12 writes this number into its files.
IR_VERSION = 8
TYPES: Mapping[EspType, int] = {"float32": 1, "int8": 3, "int16": 5, "int32": 6, "int64": 7}
FLOAT, INT, STRING, INTS = 1, 2, 3, 7
"""Types of attributes."""
TENSOR_TYPE = 1
"""The member of the union of types that describes a tensor."""
FIXED = 1
"""The kind of a dimension that has a number."""


class ModelFields:
    """Fields of the root."""

    SIZE: Final = 10
    IR_VERSION, PRODUCER, PRODUCER_VERSION, GRAPH, METADATA = 0, 2, 3, 7, 8


class GraphFields:
    """Fields of a graph."""

    SIZE: Final = 10
    NODE, NAME, INITIALIZER, INPUT, OUTPUT, VALUE_INFO, TEST_INPUTS, TEST_OUTPUTS = 0, 1, 2, 4, 5, 6, 8, 9


class NodeFields:
    """Fields of a node."""

    SIZE: Final = 7
    INPUT, OUTPUT, NAME, OP_TYPE, ATTRIBUTE = 0, 1, 2, 3, 5


class AttributeFields:
    """Fields of an attribute."""

    SIZE: Final = 16
    NAME, TYPE, FLOAT, INT, TEXT, INTS = 0, 3, 4, 5, 6, 11


class TensorFields:
    """Fields of a constant or test value."""

    SIZE: Final = 14
    DIMS, DATA_TYPE, NAME, DOC_STRING, RAW_DATA, EXPONENTS = 0, 1, 6, 7, 8, 13


class InfoFields:
    """Fields of the description of a computed tensor."""

    SIZE: Final = 4
    NAME, TYPE, EXPONENTS = 0, 1, 3


class TypeFields:
    """Fields of a type."""

    SIZE: Final = 3
    VALUE_TYPE, VALUE = 0, 1


class TensorTypeFields:
    """Fields of the type of a tensor."""

    SIZE: Final = 2
    ELEM_TYPE, SHAPE = 0, 1


class ShapeFields:
    """Fields of a shape, of each of its dimensions and of the value of a dimension."""

    SIZE: Final = 1
    DIM: Final = 0
    DIMENSION_SIZE, DIMENSION_VALUE = 2, 0
    VALUE_SIZE, KIND, NUMBER = 3, 0, 1


class EntryFields:
    """Fields of a pair of texts."""

    SIZE: Final = 2
    KEY, VALUE = 0, 1
