"""Store constant matrices as blocks of 4- or 8-bit integers with one scale per block (MatMulNBits).

Memory limits the speed of a product with few rows. If the weights take a quarter or an eighth of the bytes, the product
is up to four or eight times as fast. With many rows, the integer kernels of dynamic quantization are faster.
`edgeq.quantization.block_compute` sets the type in which the products compute.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.model.edit import Editor, drop_unused_initializers, replace_node
from edgeq.model.graph import constant_values, is_op, maker, node_input
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.block_compute import BlockCompute, choose_compute, given_compute
from edgeq.quantization.block_products import DOMAIN, OPERATOR, attributes, operands
from edgeq.quantization.block_weights import BlockWeights, fit_blocks
from edgeq.quantization.tables import SINCE, write_tables
from edgeq.scheme import Scheme

_SINCE = {4: "1.17", 8: "1.22"}


def write_weight_only(
    prepared: PreparedModel, scheme: Scheme, destination: Path, samples: Samples | None = None
) -> tuple[BlockCompute, tuple[str, ...]]:
    """Write the model with its constant matrices in blocks.

    The table of a Gather shares the integers of a product that has the same matrix. Other tables are stored in 8 bits,
    with a scale for each row.

    Args:
        samples: samples by which edgeq chooses the type in which each product computes, if the scheme leaves this open.

    Returns:
        The types in which the products compute, and notes.

    Raises:
        ModelError: there is no constant matrix to quantize.
        DataError: ONNX Runtime refuses a sample.
    """
    types = scheme.quantized_types or frozenset()
    model = prepared.model.clone()
    # Blocks exist for MatMul only.
    if "Gemm" in types:
        gemms_to_matmuls(model, scheme.exclude)
    products = _to_blocks(model, scheme) if types.intersection(("MatMul", "Gemm")) else {}
    # The file would be the float model under another name.
    if not products:
        raise ModelError(f"{prepared.source}: it has no product with a constant matrix", "Leave ⟨weight_only⟩ out")
    # A given choice needs no measurement, and without samples there is nothing to measure on.
    if scheme.float_compute is None and samples is not None:
        compute = choose_compute(model, prepared, samples)
    else:
        compute = given_compute(model, scheme.float_compute)
    _, tied = write_tables(model, products, scheme.exclude) if "Gather" in types else (0, 0)
    save_model(model, destination)
    if tied:
        return compute, (
            f"tables that share the integers of a product: {tied}; they need onnxruntime {SINCE} or later",
        )
    oldest = _SINCE[max(scheme.weight_bits, 8 if scheme.eight_bit else 0)]
    return compute, (f"{OPERATOR} of {scheme.weight_bits} bits needs onnxruntime {oldest} or later",)


def gemms_to_matmuls(model: ir.Model, exclude: tuple[str, ...] = ()) -> int:
    """Split each Gemm that has a constant matrix and no scaling into MatMul and Add, in place. Return how many were
    split.
    """
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
        # The product keeps the Gemm's name, which exclusions and notes use.
        maker(product).name = node.name
    drop_unused_initializers(model.graph)
    return count


def _plain_matrix(node: ir.Node) -> ir.Value | None:
    """Return the constant matrix of a Gemm that is a plain product with at most a bias. Return None for any other
    node.
    """
    if not is_op(node, "Gemm") or node.attributes.get_int("transA", 0) == 1:
        return None
    if any(node.attributes.get_float(factor, 1.0) != 1.0 for factor in ("alpha", "beta")):
        return None
    matrix = node.inputs[1]
    return matrix if matrix is not None and matrix.is_initializer() and not matrix.is_graph_input() else None


def _to_blocks(model: ir.Model, scheme: Scheme) -> dict[ir.Node, NDArray[np.float32]]:
    """Quantize the constant matrix of every product to blocks, in place. Return the products with their float
    matrices.
    """
    fitted: dict[tuple[ir.Value, int], BlockWeights] = {}
    products: dict[ir.Node, NDArray[np.float32]] = {}
    for graph in model.graphs():
        editor = Editor(model, graph)
        for node in list(graph):
            matrix = _block_matrix(node) if node.name not in scheme.exclude else None
            if matrix is None:
                continue
            bits = 8 if node.name in scheme.eight_bit else scheme.weight_bits
            values = constant_values(matrix)
            flat = np.asarray(values, np.float32).reshape(values.shape[-2:])
            # Several products may read one matrix, and the search for its blocks takes long.
            if (matrix, bits) not in fitted:
                fitted[matrix, bits] = fit_blocks(flat, bits, scheme.block_size, symmetric=scheme.weight_symmetric)
            products[_replace_product(editor, node, matrix, fitted[matrix, bits])] = flat
    for graph in model.graphs():
        drop_unused_initializers(graph)
    return products


def _block_matrix(node: ir.Node) -> ir.Value | None:
    """Return the constant float32 matrix [k, n] of a MatMul that can be stored in blocks. Return None for any other
    node.

    A matrix with leading axes of length 1 qualifies only if the first operand has at least as many axes.
    """
    if not is_op(node, "MatMul"):
        return None
    source, matrix = node.inputs
    if source is None or matrix is None or not matrix.is_initializer() or matrix.is_graph_input():
        return None
    if matrix.dtype != ir.DataType.FLOAT or matrix.shape is None:
        return None
    shape = matrix.shape.numpy()
    # An empty matrix has no blocks.
    if 0 in shape:
        return None
    is_matrix = len(shape) == 2
    broadcast = len(shape) > 2 and set(shape[:-2]) == {1} and source.shape is not None
    return matrix if is_matrix or (broadcast and len(source.shape or ()) >= len(shape)) else None


def _replace_product(editor: Editor, node: ir.Node, matrix: ir.Value, blocks: BlockWeights) -> ir.Node:
    constants = (editor.constant(f"{matrix.name}_{key}", values) for key, values in operands(blocks).items())
    output = editor.node(
        OPERATOR,
        [node.inputs[0], *constants],
        f"{node.name}_Q{blocks.bits}",
        before=node,
        domain=DOMAIN,
        attributes=attributes(blocks),
    )
    replace_node(node, output)
    return maker(output)
