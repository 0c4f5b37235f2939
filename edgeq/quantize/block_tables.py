"""Tables of embeddings as integers: those of a product in blocks that they are tied to, or 8-bit rows.

The head of a language model often multiplies by the table that was looked up. Blocks of a product's matrix [k, n] run
along k, those of the table [n, k] along its rows: they are the same integers. So such a table is not stored at all:
GatherBlockQuantized reads the product's, through a Reshape, since the two operators want other shapes. ONNX Runtime
folds the Reshape into a copy when it opens the model; only the file gains.

Any other table has 8-bit integers with a scale for each row, both gathered and multiplied. One scale for the table, as
ONNX Runtime's quantizer has it, leaves rows of small values few steps: the embeddings of minilm_l6 keep 26 dB (words)
and 15 dB (positions) of it, with a scale a row 42 and 39 dB.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import Editor, drop_unused_initializers, replace_node
from edgeq.model.graph import constant_tensor, constant_values, is_op, node_input
from edgeq.quantize.block_weights import DOMAIN

OPERATOR = "GatherBlockQuantized"
SINCE = "1.23"
"""The first release of onnxruntime that reads the integers of a product so."""
# A scale is four bytes: of shorter rows, it would take what the integers gain.
_SHORTEST = 16
_STEPS = 127
Matrices = Mapping[ir.Node, NDArray[np.float32]]
"""Products in blocks → their float matrices [k, n]."""


def write_tables(model: ir.Model, products: Matrices, exclude: Collection[str] = ()) -> tuple[int, int]:
    """Put the table [n, k] of every Gather of the main graph into integers, in place.

    Args:
        products: that tables may be tied to; none in a model without blocks.
        exclude: names of nodes that stay as they are.

    Returns:
        How many of the nodes have a scale for each row now, and how many share the integers of a product.
    """
    editor = Editor(model)
    rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    own = tied = 0
    for node in list(model.graph):
        table = table_of(node) if node.name not in exclude else None
        if table is None:
            continue
        product = _tied(table, products)
        if product is not None:
            made, tied = _from_product(editor, node, product), tied + 1
        else:
            if table not in rows:
                rows[table] = _in_rows(editor, table)
            made, own = _from_rows(editor, node, *rows[table]), own + 1
        replace_node(node, made)
    drop_unused_initializers(model.graph)
    return own, tied


def table_of(node: ir.Node) -> ir.Value | None:
    """The constant float matrix [n, k] of which a node gathers rows, if they are long enough to be worth a scale."""
    tensor = constant_tensor(node.inputs[0]) if is_op(node, "Gather") else None
    if tensor is None or node.attributes.get_int("axis", 0) != 0 or tensor.dtype != ir.DataType.FLOAT:
        return None
    shape = tensor.shape.numpy()
    return node.inputs[0] if len(shape) == 2 and shape[1] >= _SHORTEST else None


def _tied(table: ir.Value, products: Matrices) -> ir.Node | None:
    """The product that has the values of `table`, transposed, in blocks that fill its rows."""
    values = constant_values(table)
    for product, matrix in products.items():
        own = product.graph is table.graph and matrix.shape == values.shape[::-1] and _fills_rows(product)
        if own and np.array_equal(values.T, matrix):
            return product
    return None


def _fills_rows(product: ir.Node) -> bool:
    """Whether each row of integers, and of zero points, ends with a whole block and a whole byte."""
    k, size, bits = (product.attributes.get_int(key, 0) or 0 for key in ("K", "block_size", "bits"))
    return k % (size if node_input(product, 3) is None else size * 8 // bits) == 0


def _from_product(editor: Editor, gather: ir.Node, product: ir.Node) -> ir.Value:
    k, n, size, bits = (product.attributes.get_int(key, 0) or 0 for key in ("K", "N", "block_size", "bits"))
    integers, scales, zeros = product.inputs[1], product.inputs[2], node_input(product, 3)
    shape = editor.constant(f"{gather.name}/shape", np.array([n, k * bits // 8], np.int64))
    return editor.node(
        OPERATOR,
        [
            editor.node("Reshape", [integers, shape], f"{gather.name}/rows", before=gather),
            gather.inputs[1],
            scales,
            *([] if zeros is None else [zeros]),
        ],
        f"{gather.name}_Q{bits}",
        before=gather,
        domain=DOMAIN,
        attributes={"gather_axis": 0, "quantize_axis": 1, "block_size": size, "bits": bits},
    )


def _in_rows(editor: Editor, table: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Integers int8 [n, k] and scales float32 [n, 1]."""
    values = constant_values(table)
    scales = np.abs(values).max(1, keepdims=True).astype(np.float32) / np.float32(_STEPS)
    scales[scales == 0] = 1
    integers = np.rint(values / scales).astype(np.int8)
    return editor.constant(f"{table.name}_Q8", integers), editor.constant(f"{table.name}_scales", scales)


def _from_rows(editor: Editor, gather: ir.Node, integers: ir.Value, scales: ir.Value) -> ir.Value:
    name, indices = gather.name, gather.inputs[1]
    found = editor.node("Gather", [integers, indices], f"{name}_Q8", before=gather)
    scale = editor.node("Gather", [scales, indices], f"{name}_scales", before=gather)
    to = {"to": int(ir.DataType.FLOAT)}
    plain = editor.node("Cast", [found], f"{name}_float", before=gather, attributes=to)
    return editor.node("Mul", [plain, scale], f"{name}_rows", before=gather)
