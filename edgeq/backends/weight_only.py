"""Weight-only quantization: constant matrices as blocks of 4- or 8-bit integers, one scale a block (MatMulNBits).

A product of few rows waits for the weights, so a quarter or an eighth of the bytes is that much faster; with many rows
the integer kernels of dynamic quantization win. Activations are quantized per block inside the kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.block_weights import BlockWeights, fit_blocks, packed, unpacked
from edgeq.backends.dynamic import quantize_types
from edgeq.errors import ModelError
from edgeq.graph.edit import Editor, drop_unused_initializers, replace_value, set_constant
from edgeq.graph.query import constant, is_constant, is_op, node_input, read_count
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme

OPERATOR, _DOMAIN = "MatMulNBits", "com.microsoft"
# The kernel computes in int8 at this level; at lower ones it expands the weights to float32 each time.
_INT8_COMPUTE = 4
_SINCE = {4: "1.17", 8: "1.22"}


def write_weight_only(prepared: PreparedModel, scheme: Scheme, destination: Path) -> tuple[str, ...]:
    """Write the model with its constant matrices in blocks, and tables of Gather as 8-bit rows; returns notes.

    Raises:
        ModelError: there is no constant matrix to quantize.
    """
    wanted = scheme.quantized_types or frozenset()
    model = prepared.model.clone()
    if "Gemm" in wanted:
        gemms_to_matmuls(model, scheme.exclude)
    if not wanted.intersection(("MatMul", "Gemm")) or not _to_blocks(model, scheme):
        raise ModelError(f"{prepared.source}: it has no product with a constant matrix", "Choose another scheme")
    save_model(model, destination)
    if "Gather" in wanted:
        quantize_types(prepared, destination, destination, ["Gather"], "int8", scheme)
    oldest = _SINCE[max(scheme.weight_bits, 8 if scheme.eight_bit else 0)]
    return (f"{OPERATOR} of {scheme.weight_bits} bits needs onnxruntime {oldest} or later",)


def find_blocks(model: ir.Model) -> dict[str, ir.Node]:
    """Products in blocks of the main graph, by the name that they had in float; those with shared weights are left
    out."""
    found = (node for node in model.graph if (node.domain, node.op_type) == (_DOMAIN, OPERATOR))
    return {
        (node.name or "").rpartition("_Q")[0]: node
        for node in found
        if all(read_count(value) == 1 and is_constant(value) for value in node.inputs[1:] if value is not None)
    }


def read_blocks(product: ir.Node) -> BlockWeights:
    """The weights of a product that this module wrote."""
    k, bits, size = (product.attributes.get_int(key) for key in ("K", "bits", "block_size"))
    stored, scales = constant(product.inputs[1]), constant(product.inputs[2])
    assert k is not None, OPERATOR
    assert bits is not None, OPERATOR
    assert size is not None, OPERATOR
    assert stored is not None, OPERATOR
    assert scales is not None, OPERATOR
    blocks = stored.shape[1]
    zeros = constant(node_input(product, 3))
    zero_points = np.full(scales.shape, 1 << bits - 1, np.uint8) if zeros is None else unpacked(zeros, bits, blocks)
    return BlockWeights(k, bits, unpacked(stored, bits, size), scales, zero_points, zeros is None)


def store_blocks(product: ir.Node, blocks: BlockWeights) -> None:
    """Give a product that `read_blocks` reads other weights, in place."""
    for position, values in enumerate(_operands(blocks).values(), 1):
        value = product.inputs[position]
        assert value is not None
        set_constant(value, values)


def gemms_to_matmuls(model: ir.Model, exclude: tuple[str, ...] = ()) -> int:
    """Make, in place, MatMul and Add of each Gemm with a constant matrix and no scaling; returns how many."""
    editor = Editor(model)
    count = 0
    for node in model.graph:
        matrix = _plain_matrix(node) if node.name not in exclude else None
        if matrix is None:
            continue
        count += 1
        if node.attributes.get_int("transB", 0):
            values = constant(matrix)
            assert values is not None
            matrix = editor.constant(f"{matrix.name}/transposed", values.T)
        bias = node_input(node, 2)
        result = product = editor.node("MatMul", [node.inputs[0], matrix], f"{node.name}/product", before=node)
        if bias is not None:
            result = editor.node("Add", [product, bias], f"{node.name}/bias", before=node)
        replace_value(node.outputs[0], result, keep_name=True)
        model.graph.remove(node, safe=True)
        made = product.producer()
        assert made is not None
        made.name = node.name
    drop_unused_initializers(model.graph)
    return count


def _plain_matrix(node: ir.Node) -> ir.Value | None:
    """The second operand of a Gemm that is a product with a constant matrix and, at most, a bias."""
    if not is_op(node, "Gemm") or node.attributes.get_int("transA", 0) == 1:
        return None
    if any(node.attributes.get_float(factor, 1.0) != 1.0 for factor in ("alpha", "beta")):
        return None
    matrix = node.inputs[1]
    return matrix if matrix is not None and matrix.is_initializer() and not matrix.is_graph_input() else None


def _to_blocks(model: ir.Model, scheme: Scheme) -> int:
    """Put the constant matrix of every product into blocks, in place; returns how many."""
    fitted: dict[tuple[ir.Value, int], BlockWeights] = {}
    count = 0
    for graph in model.graphs():
        editor = Editor(model, graph)
        for node in list(graph):
            matrix = _block_matrix(node) if node.name not in scheme.exclude else None
            if matrix is None:
                continue
            bits = 8 if node.name in scheme.eight_bit else scheme.weight_bits
            if (matrix, bits) not in fitted:
                values = constant(matrix)
                assert values is not None
                flat = np.asarray(values, np.float32).reshape(values.shape[-2:])
                fitted[matrix, bits] = fit_blocks(flat, bits, scheme.block_size, symmetric=scheme.weight_symmetric)
            _replace_product(editor, node, matrix, fitted[matrix, bits])
            count += 1
    for graph in model.graphs():
        drop_unused_initializers(graph)
    return count


def _block_matrix(node: ir.Node) -> ir.Value | None:
    """The second operand of a MatMul, where it is a constant float32 matrix [k, n] and the product has one form in
    blocks: with leading ones, only beside a first operand of at least as many axes."""
    if not is_op(node, "MatMul"):
        return None
    source, matrix = node.inputs
    if source is None or matrix is None or not matrix.is_initializer() or matrix.is_graph_input():
        return None
    if matrix.dtype != ir.DataType.FLOAT or matrix.shape is None:
        return None
    shape = matrix.shape.numpy()
    plain = len(shape) == 2
    broadcast = len(shape) > 2 and set(shape[:-2]) == {1} and source.shape is not None
    return matrix if plain or (broadcast and len(source.shape or ()) >= len(shape)) else None


def _replace_product(editor: Editor, node: ir.Node, matrix: ir.Value, blocks: BlockWeights) -> None:
    operands = (editor.constant(f"{matrix.name}_{key}", values) for key, values in _operands(blocks).items())
    made = editor.node(
        OPERATOR,
        [node.inputs[0], *operands],
        f"{node.name}_Q{blocks.bits}",
        before=node,
        domain=_DOMAIN,
        attributes={
            "K": blocks.k,
            "N": len(blocks.integers),
            "bits": blocks.bits,
            "block_size": blocks.integers.shape[-1],
            "accuracy_level": _INT8_COMPUTE,
        },
    )
    replace_value(node.outputs[0], made, keep_name=True)
    editor.graph.remove(node, safe=True)


def _operands(blocks: BlockWeights) -> dict[str, NDArray[Any]]:
    """What a product in blocks reads beside its input, in the operator's order."""
    operands: dict[str, NDArray[Any]] = {
        f"Q{blocks.bits}": packed(blocks.integers, blocks.bits),
        "scales": blocks.scales,
    }
    return operands if blocks.symmetric else operands | {"zero_points": packed(blocks.zero_points, blocks.bits)}
