"""Name the kinds of integer products in a model, and of float products that some release computes wrongly. Releases
with wrong kernels are known by these names.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from edgeq.model.graph import (
    constant,
    every_node,
    node_input,
    operator_of,
)

_SHORT = {ir.DataType.UINT8: "u8", ir.DataType.INT8: "s8"}
SMALLEST_SUFFIX = " with -128"
"""Suffix of a kind of product. It means that at least one weight has the smallest value of its type."""
UNEVEN = "Conv f32 with uneven padding"
"""Kind of a float convolution over two axes that are padded by different amounts."""


def integer_products(model: ir.Model) -> tuple[str, ...]:
    """Return the kinds of integer products in a model, each once. Examples are "Conv u8s8" (types of activation and
    weight), "MatMul s8s8 with -128" and "MatMulNBits 4 asymmetric level 4" (accuracy level 4). For Q/DQ models, these
    are the kinds that a runtime can create by fusion. `UNEVEN` is the only kind of float product.
    """
    return tuple(dict.fromkeys(kind for node in every_node(model) for kind in _kinds(node)))


def _kinds(node: ir.Node) -> Iterator[str]:
    row = operator_of(node)
    if row.mac_rule == "nbits":
        points = "symmetric" if node_input(node, 3) is None else "asymmetric"
        level = node.attributes.get_int("accuracy_level", 0)
        yield f"{node.op_type} {node.attributes.get_int('bits', 4)} {points} level {level}"
    elif row.mac_rule and row.weight is not None:
        activation = "u8" if row.dynamic else _type(integers(node, 0))
        weight_integers = integers(node, row.weight)
        if activation and (weight := _type(weight_integers)):
            kind = f"{'Conv' if row.mac_rule.startswith('conv') else 'MatMul'} {activation}{weight}"
            yield kind
            values = constant(weight_integers[0])
            if weight == "s8" and values is not None and values.min(initial=0) == np.iinfo(np.int8).min:
                yield kind + SMALLEST_SUFFIX
        elif row.mac_rule == "conv" and _is_uneven(node):
            yield UNEVEN


def _is_uneven(node: ir.Node) -> bool:
    """Return whether a Conv without groups pads two axes by different amounts, each axis by the same at both ends."""
    match tuple(node.attributes.get_ints("pads", ())):
        case (top, left, bottom, right):
            groups = node.attributes.get_int("group", 1)
            return groups == 1 and (top, left) == (bottom, right) and top != left
    return False


def integers(node: ir.Node, place: int) -> tuple[ir.Value | None, ...]:
    """Return the integers at an input and their zero point, or () if the input is a float. The input may also be a
    dequantized tensor; then the integers are those before the DequantizeLinear.
    """
    for places in operator_of(node).integers:
        if places.value == place:
            return node_input(node, place), node_input(node, places.zero_point)
    value = node_input(node, place)
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "DequantizeLinear":
        return ()
    return maker.inputs[0], node_input(maker, 2)


def _type(values: tuple[ir.Value | None, ...]) -> str:
    """Return the short name of the 8-bit type of integers or of their zero point. Return "" for other types and for
    floats.
    """
    types = [value.dtype for value in values if value is not None and value.dtype is not None]
    if not values:
        return ""
    return _SHORT.get(types[0], "") if types else "u8"
