"""Kinds of integer products in a quantized model, by which releases with wrong kernels are recognised
(targets/onnxruntime/known_wrong.toml)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from edgeq.graph.operators import operator_of
from edgeq.graph.query import constant, every_node, node_input

_SHORT = {ir.DataType.UINT8: "u8", ir.DataType.INT8: "s8"}
LEAST = " with -128"
"""Behind a kind: some weight is the least of its type."""


def integer_products(model: ir.Model) -> tuple[str, ...]:
    """ "Conv u8s8" (types of activation and weight), "MatMul s8s8 with -128", "MatMulNBits 4 asymmetric level 4" (that
    of accuracy) ..., each once. Of a model with Q/DQ nodes, those that a runtime can make of them."""
    return tuple(dict.fromkeys(kind for node in every_node(model) for kind in _kinds(node)))


def _kinds(node: ir.Node) -> Iterator[str]:
    row = operator_of(node)
    if row.mac_rule == "nbits":
        points = "symmetric" if node_input(node, 3) is None else "asymmetric"
        level = node.attributes.get_int("accuracy_level", 0)
        yield f"{node.op_type} {node.attributes.get_int('bits', 4)} {points} level {level}"
    elif row.mac_rule and row.weight is not None:
        activation = "u8" if row.dynamic else _type(integers(node, 0))
        held = integers(node, row.weight)
        if activation and (weight := _type(held)):
            kind = f"{'Conv' if row.mac_rule.startswith('conv') else 'MatMul'} {activation}{weight}"
            yield kind
            values = constant(held[0])
            if weight == "s8" and values is not None and values.min(initial=0) == np.iinfo(np.int8).min:
                yield kind + LEAST


def integers(node: ir.Node, place: int) -> tuple[ir.Value | None, ...]:
    """The integers at an input, which may stand before a DequantizeLinear, and their zero point; () for floats."""
    for places in operator_of(node).integers:
        if places.value == place:
            return node_input(node, place), node_input(node, places.zero_point)
    value = node_input(node, place)
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "DequantizeLinear":
        return ()
    return maker.inputs[0], node_input(maker, 2)


def _type(values: tuple[ir.Value | None, ...]) -> str:
    """Short name of 8-bit integers by themselves or their zero point; "" for other types and for floats."""
    known = [value.dtype for value in values if value is not None and value.dtype is not None]
    if not values:
        return ""
    return _SHORT.get(known[0], "") if known else "u8"
