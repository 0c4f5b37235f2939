"""Products of weights in blocks (MatMulNBits) in a model: found, read, written, and what they compute in.

The operator's `accuracy_level` says it: at 4 the kernel quantizes its input to 8 bits, block by block, at run time; at
1 it expands the weights to float32. Measured on AVX-512-VNNI with AMX, float takes up to twice the time of int8 at few
rows and 0.6 of it at many; of 8-bit weights it takes 2 to 30 times as long (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.block_weights import BlockWeights, packed, unpacked
from edgeq.graph.edit import set_constant
from edgeq.graph.query import constant, constant_values, every_node, is_constant, node_input, read_count
from edgeq.scheme import ALL_NODES

OPERATOR, DOMAIN = "MatMulNBits", "com.microsoft"
LEVEL = "accuracy_level"
FLOAT_LEVEL, INT8_LEVEL = 1, 4


def block_products(model: ir.Model) -> dict[str, ir.Node]:
    """Products in blocks of the main graph, by the name that they had in float."""
    return {float_name(node): node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)}


def float_name(product: ir.Node) -> str:
    """The name that a product in blocks had in float."""
    return (product.name or "").rpartition("_Q")[0]


def find_blocks(model: ir.Model) -> dict[str, ir.Node]:
    """Those with weights of their own, which can be changed."""
    return {
        name: node
        for name, node in block_products(model).items()
        if all(read_count(value) == 1 and is_constant(value) for value in node.inputs[1:] if value is not None)
    }


def read_blocks(product: ir.Node) -> BlockWeights:
    """The weights of a product that `edgeq.backends.weight_only` or ONNX Runtime's quantizer wrote."""
    k, size = (product.attributes[key].as_int() for key in ("K", "block_size"))
    bits = int(product.attributes.get_int("bits", 4))
    stored, scales = (constant_values(value) for value in product.inputs[1:3])
    blocks = stored.shape[1]
    scales = scales.reshape(-1, blocks)
    zeros = constant(node_input(product, 3))
    middle = np.full(scales.shape, 1 << bits - 1, np.uint8)
    zero_points = middle if zeros is None else unpacked(zeros.reshape(len(scales), -1), bits, blocks)
    return BlockWeights(k, bits, unpacked(stored, bits, size), scales, zero_points, zeros is None)


def store_blocks(product: ir.Node, blocks: BlockWeights) -> None:
    """Give a product that `read_blocks` reads other weights, in place."""
    for position, values in enumerate(operands(blocks).values(), 1):
        value = product.inputs[position]
        assert value is not None
        set_constant(value, values)


def operands(blocks: BlockWeights) -> dict[str, NDArray[Any]]:
    """What a product in blocks reads beside its input, in the operator's order."""
    stored: dict[str, NDArray[Any]] = {
        f"Q{blocks.bits}": packed(blocks.integers, blocks.bits),
        "scales": blocks.scales,
    }
    return stored if blocks.symmetric else stored | {"zero_points": packed(blocks.zero_points, blocks.bits)}


def attributes(blocks: BlockWeights) -> Mapping[str, int]:
    """Of a product with these weights, which computes in int8."""
    size = blocks.integers.shape[-1]
    return {"K": blocks.k, "N": len(blocks.integers), "bits": blocks.bits, "block_size": size, LEVEL: INT8_LEVEL}


def set_compute(model: ir.Model, float_compute: Collection[str]) -> None:
    """Let the products that are named compute in float and all others in int8, in place. `ALL_NODES` leaves out
    those of 8 bits, which are slower so and gain little."""
    for node in every_node(model):
        if (node.domain, node.op_type) == (DOMAIN, OPERATOR):
            every = ALL_NODES in float_compute and node.attributes.get_int("bits", 4) < 8
            in_float = every or float_name(node) in float_compute
            node.attributes[LEVEL] = ir.AttrInt64(LEVEL, FLOAT_LEVEL if in_float else INT8_LEVEL)
