"""Find, read and write the products with weights in blocks (MatMulNBits) of a model, and set the type in which they
compute.

The operator's `accuracy_level` sets this type. At 4 the kernel quantizes its input to 8 bits, block by block, at run
time. At 1 it expands the weights to float32. Measured on AVX-512-VNNI with AMX: for few rows, float takes up to twice
as long as int8; for many rows, it takes 0.6 times as long. With 8-bit weights, float takes 2 to 30 times as long as
int8 (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import set_constant
from edgeq.model.graph import constant, constant_values, every_node, is_constant, node_input, read_count
from edgeq.quantization.block_weights import BlockWeights, pack, unpack
from edgeq.scheme import ALL_NODES

OPERATOR, DOMAIN = "MatMulNBits", "com.microsoft"
LEVEL = "accuracy_level"
FLOAT_LEVEL, INT8_LEVEL = 1, 4


def block_products(model: ir.Model) -> dict[str, ir.Node]:
    """Return the products with weights in blocks of the main graph, by their names in the float model."""
    return {float_name(node): node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)}


def float_name(product: ir.Node) -> str:
    """Return the name that a product with weights in blocks had in the float model."""
    return (product.name or "").rpartition("_Q")[0]


def find_blocks(model: ir.Model) -> dict[str, ir.Node]:
    """Return the products whose weights no other node reads, by their names in the float model. Such weights can be
    changed.
    """
    return {
        name: node
        for name, node in block_products(model).items()
        if all(read_count(value) == 1 and is_constant(value) for value in node.inputs[1:] if value is not None)
    }


def read_blocks(product: ir.Node) -> BlockWeights:
    """Return the weights of a product. `edgeq.quantization.weight_only` or ONNX Runtime's quantizer must have written
    them.
    """
    k, size = (product.attributes[key].as_int() for key in ("K", "block_size"))
    bits = int(product.attributes.get_int("bits", 4))
    stored, scales = (constant_values(value) for value in product.inputs[1:3])
    blocks = stored.shape[1]
    scales = scales.reshape(-1, blocks)
    zeros = constant(node_input(product, 3))
    middle = np.full(scales.shape, 1 << bits - 1, np.uint8)
    zero_points = middle if zeros is None else unpack(zeros.reshape(len(scales), -1), bits, blocks)
    return BlockWeights(k, bits, unpack(stored, bits, size), scales, zero_points, zeros is None)


def store_blocks(product: ir.Node, blocks: BlockWeights) -> None:
    """Replace the weights of a product, in place. `read_blocks` must be able to read the product."""
    for position, values in enumerate(operands(blocks).values(), 1):
        value = product.inputs[position]
        assert value is not None
        set_constant(value, values)


def operands(blocks: BlockWeights) -> dict[str, NDArray[Any]]:
    """Return the operands that follow the input of a MatMulNBits, in the operator's order."""
    stored: dict[str, NDArray[Any]] = {
        f"Q{blocks.bits}": pack(blocks.integers, blocks.bits),
        "scales": blocks.scales,
    }
    return stored if blocks.symmetric else stored | {"zero_points": pack(blocks.zero_points, blocks.bits)}


def attributes(blocks: BlockWeights) -> Mapping[str, int]:
    """Return the attributes of a MatMulNBits that has these weights and computes in int8."""
    size = blocks.integers.shape[-1]
    return {"K": blocks.k, "N": len(blocks.integers), "bits": blocks.bits, "block_size": size, LEVEL: INT8_LEVEL}


def set_compute(model: ir.Model, float_compute: Collection[str]) -> None:
    """Set the products named in `float_compute` to float and all others to int8, in place.

    `ALL_NODES` does not include products with 8-bit weights: in float they would be slower and hardly more accurate.
    """
    for node in every_node(model):
        if (node.domain, node.op_type) == (DOMAIN, OPERATOR):
            every = ALL_NODES in float_compute and node.attributes.get_int("bits", 4) < 8
            in_float = every or float_name(node) in float_compute
            node.attributes[LEVEL] = ir.AttrInt64(LEVEL, FLOAT_LEVEL if in_float else INT8_LEVEL)


def is_in_float(product: ir.Node) -> bool:
    """Return whether a product with weights in blocks computes in float."""
    return product.attributes.get_int(LEVEL, 0) in (0, FLOAT_LEVEL)
