"""Weight-only quantization: constant matrices as blocks of 4- or 8-bit integers, one scale a block (MatMulNBits).

A product of few rows waits for the weights, so a quarter or an eighth of the bytes is that much faster; with many rows
the integer kernels of dynamic quantization win. What the products compute in: `edgeq.backends.block_compute`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.block_compute import BlockCompute, choose_compute, given_compute
from edgeq.backends.block_products import DOMAIN, OPERATOR, attributes, operands
from edgeq.backends.block_tables import SINCE as TIED_SINCE
from edgeq.backends.block_tables import write_tables
from edgeq.backends.block_weights import BlockWeights, fit_blocks
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.graph.edit import Editor, drop_unused_initializers, replace_node
from edgeq.graph.query import constant_values, is_op, maker, node_input
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme

_SINCE = {4: "1.17", 8: "1.22"}


def write_weight_only(
    prepared: PreparedModel, scheme: Scheme, destination: Path, samples: Samples | None = None
) -> tuple[BlockCompute, tuple[str, ...]]:
    """Write the model with its constant matrices in blocks, and tables of Gather as those of a product that they
    are tied to (`edgeq.backends.block_tables`), or in 8 bits.

    Args:
        samples: by which to choose what the products compute in, where the scheme leaves that open.

    Returns:
        What the products compute in, and notes.

    Raises:
        ModelError: there is no constant matrix to quantize.
        DataError: ONNX Runtime refuses a sample.
    """
    wanted = scheme.quantized_types or frozenset()
    model = prepared.model.clone()
    if "Gemm" in wanted:
        gemms_to_matmuls(model, scheme.exclude)
    products = _to_blocks(model, scheme) if wanted.intersection(("MatMul", "Gemm")) else {}
    if not products:
        raise ModelError(f"{prepared.source}: it has no product with a constant matrix", "Leave --weight-only out")
    if scheme.float_compute is None and samples is not None:
        compute = choose_compute(model, prepared, samples)
    else:
        compute = given_compute(model, scheme.float_compute)
    _, tied = write_tables(model, products, scheme.exclude) if "Gather" in wanted else (0, 0)
    save_model(model, destination)
    if tied:
        return compute, (
            f"tables that share the integers of a product: {tied}; they need onnxruntime {TIED_SINCE} or later",
        )
    oldest = _SINCE[max(scheme.weight_bits, 8 if scheme.eight_bit else 0)]
    return compute, (f"{OPERATOR} of {scheme.weight_bits} bits needs onnxruntime {oldest} or later",)


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
            matrix = editor.constant(f"{matrix.name}/transposed", constant_values(matrix).T)
        bias = node_input(node, 2)
        result = product = editor.node("MatMul", [node.inputs[0], matrix], f"{node.name}/product", before=node)
        if bias is not None:
            result = editor.node("Add", [product, bias], f"{node.name}/bias", before=node)
        replace_node(node, result)
        maker(product).name = node.name
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


def _to_blocks(model: ir.Model, scheme: Scheme) -> dict[ir.Node, NDArray[np.float32]]:
    """Put the constant matrix of every product into blocks, in place; returns the products with their matrices."""
    fitted: dict[tuple[ir.Value, int], BlockWeights] = {}
    made: dict[ir.Node, NDArray[np.float32]] = {}
    for graph in model.graphs():
        editor = Editor(model, graph)
        for node in list(graph):
            matrix = _block_matrix(node) if node.name not in scheme.exclude else None
            if matrix is None:
                continue
            bits = 8 if node.name in scheme.eight_bit else scheme.weight_bits
            values = constant_values(matrix)
            flat = np.asarray(values, np.float32).reshape(values.shape[-2:])
            if (matrix, bits) not in fitted:
                fitted[matrix, bits] = fit_blocks(flat, bits, scheme.block_size, symmetric=scheme.weight_symmetric)
            made[_replace_product(editor, node, matrix, fitted[matrix, bits])] = flat
    for graph in model.graphs():
        drop_unused_initializers(graph)
    return made


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
    if 0 in shape:
        return None
    plain = len(shape) == 2
    broadcast = len(shape) > 2 and set(shape[:-2]) == {1} and source.shape is not None
    return matrix if plain or (broadcast and len(source.shape or ()) >= len(shape)) else None


def _replace_product(editor: Editor, node: ir.Node, matrix: ir.Value, blocks: BlockWeights) -> ir.Node:
    constants = (editor.constant(f"{matrix.name}_{key}", values) for key, values in operands(blocks).items())
    made = editor.node(
        OPERATOR,
        [node.inputs[0], *constants],
        f"{node.name}_Q{blocks.bits}",
        before=node,
        domain=DOMAIN,
        attributes=attributes(blocks),
    )
    replace_node(node, made)
    return maker(made)
