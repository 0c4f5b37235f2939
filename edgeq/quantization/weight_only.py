"""Quantize only the weights, or quantize the weights now and the activations at run time.

Weight-only quantization: store constant matrices as blocks of 4- or 8-bit integers with one scale per block
(MatMulNBits).

Memory limits the speed of a product with few rows. If the weights take a quarter or an eighth of the bytes, the product
is up to four or eight times as fast. With many rows, the integer kernels of dynamic quantization are faster.
`edgeq.quantization.block_weights` sets the type in which the products compute.

GPTQ: choose integers for the rows of a layer's weights so that the expected error of the layer's output is small.

The output error is dW x. Its expected square is sum_m dW[m] H dW[m]', where H is the second moment of x. Columns are
rounded one after the other, and the columns that follow compensate for the error of each. With H^-1 = U'U, U upper
triangular, the error e of column i is spread as w[j] -= e U[i, j] / U[i, i] for j > i (Frantar and Alistarh 2022,
"Optimal Brain Compression"; Frantar et al. 2022, "GPTQ"). A sweep of coordinate descent follows.

Store embedding tables as integers. If a product has the same matrix in blocks, the table shares the product's integers.
Any other table is stored in 8 bits, with a scale for each row.

The last layer of a language model often multiplies by the embedding table. Blocks of a product's matrix [k, n] run
along k, and blocks of the table [n, k] run along its rows. So the integers are the same, and such a table need not be
stored separately. GatherBlockQuantized reads the product's integers through a Reshape, because the two operators expect
different shapes. When ONNX Runtime opens the model, it folds the Reshape into a copy, so only the file gets smaller.

Any other table has 8-bit integers with a scale for each row. The model gathers both, then multiplies them. ONNX
Runtime's quantizer uses one scale for the whole table, which leaves few steps to rows of small values. With one scale,
the embeddings of minilm_l6 have an SQNR of 26 dB (words) and 15 dB (positions). With a scale for each row, they have 42
and 39 dB.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir
from edgeq_device.system.places import scratch_folder
from numpy.typing import ArrayLike, NDArray

from edgeq.data.samples import Samples
from edgeq.errors import ModelError, UsageError
from edgeq.model.edit import Editor, drop_unused_initializers, replace_node
from edgeq.model.graph import MAIN_DOMAINS, constant_tensor, constant_values, is_op, maker, node_input
from edgeq.model.int8_prediction import stacked_products
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.block_weights import (
    DOMAIN,
    OPERATOR,
    BlockCompute,
    BlockWeights,
    attributes,
    choose_compute,
    fit_blocks,
    given_compute,
    operands,
)
from edgeq.quantization.quantizer import check_clashes, quant_type, quantizer_files
from edgeq.quantization.recurrent import IntegerWeights, expand_grus
from edgeq.scheme import IntegerType, Scheme

TABLE_OPERATOR = "GatherBlockQuantized"
SINCE = "1.23"
"""First release of onnxruntime in which a table can share the integers of a product."""
# A scale takes four bytes. For shorter rows, the scales would use up what the integers save.
_SHORTEST = 16
_STEPS = 127
Matrices = Mapping[ir.Node, NDArray[np.float32]]
"""Products in blocks → their float matrices [k, n]."""


def write_tables(model: ir.Model, products: Matrices, exclude: Collection[str] = ()) -> tuple[int, int]:
    """Quantize the table [n, k] of every Gather of the main graph to integers, in place.

    Args:
        products: products whose integers a table may share; empty for a model without blocks.
        exclude: names of nodes that stay unchanged.

    Returns:
        The number of nodes whose table now has a scale for each row, and the number of nodes whose table shares the
        integers of a product.
    """
    editor = Editor(model)
    rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    row_count = tied_count = 0
    for node in list(model.graph):
        table = table_of(node) if node.name not in exclude else None
        if table is None:
            continue
        product = _find_tied(table, products)
        if product is not None:
            output, tied_count = _from_product(editor, node, product), tied_count + 1
        else:
            if table not in rows:
                rows[table] = _in_rows(editor, table)
            output, row_count = _from_rows(editor, node, *rows[table]), row_count + 1
        replace_node(node, output)
    drop_unused_initializers(model.graph)
    return row_count, tied_count


def tables_note(count: int) -> str:
    """Return the note on Gather nodes whose tables have a scale for each row."""
    return f"the tables of {count} Gather nodes are in 8 bits with a scale for each row"


def table_of(node: ir.Node) -> ir.Value | None:
    """Return the constant float matrix [n, k] from which a node gathers rows.

    Return None if there is no such matrix, or if its rows are too short to be worth a scale.
    """
    tensor = constant_tensor(node.inputs[0]) if is_op(node, "Gather") else None
    if tensor is None or node.attributes.get_int("axis", 0) != 0 or tensor.dtype != ir.DataType.FLOAT:
        return None
    shape = tensor.shape.numpy()
    return node.inputs[0] if len(shape) == 2 and shape[1] >= _SHORTEST else None


def _find_tied(table: ir.Value, products: Matrices) -> ir.Node | None:
    """Return the product whose matrix is `table` transposed, if its blocks fill the rows of the table. Return None if
    there is no such product.
    """
    values = constant_values(table)
    for product, matrix in products.items():
        is_candidate = product.graph is table.graph and matrix.shape == values.shape[::-1] and _fills_rows(product)
        if is_candidate and np.array_equal(values.T, matrix):
            return product
    return None


def _fills_rows(product: ir.Node) -> bool:
    """Return whether each row ends with a whole block, and each row of zero points with a whole byte."""
    k, size, bits = (product.attributes.get_int(key, 0) or 0 for key in ("K", "block_size", "bits"))
    return k % (size if node_input(product, 3) is None else size * 8 // bits) == 0


def _from_product(editor: Editor, gather: ir.Node, product: ir.Node) -> ir.Value:
    k, n, size, bits = (product.attributes.get_int(key, 0) or 0 for key in ("K", "N", "block_size", "bits"))
    integers, scales, zeros = product.inputs[1], product.inputs[2], node_input(product, 3)
    shape = editor.constant(f"{gather.name}/shape", np.array([n, k * bits // 8], np.int64))
    return editor.node(
        TABLE_OPERATOR,
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
    """Quantize a table with a scale for each row. Return integers int8 [n, k] and scales float32 [n, 1]."""
    values = constant_values(table)
    scales = np.abs(values).max(1, keepdims=True).astype(np.float32) / np.float32(_STEPS)
    scales[scales == 0] = 1
    integers = np.rint(values / scales).astype(np.int8)
    return editor.constant(f"{table.name}_Q8", integers), editor.constant(f"{table.name}_scales", scales)


def _from_rows(editor: Editor, gather: ir.Node, integers: ir.Value, scales: ir.Value) -> ir.Value:
    name, indices = gather.name, gather.inputs[1]
    gathered = editor.node("Gather", [integers, indices], f"{name}_Q8", before=gather)
    scale = editor.node("Gather", [scales, indices], f"{name}_scales", before=gather)
    to = {"to": int(ir.DataType.FLOAT)}
    floats = editor.node("Cast", [gathered], f"{name}_float", before=gather, attributes=to)
    return editor.node("Mul", [floats, scale], f"{name}_rows", before=gather)


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
    if "Gemm" in types:
        gemms_to_matmuls(model, scheme.exclude)
    products = _to_blocks(model, scheme) if types.intersection(("MatMul", "Gemm")) else {}
    if not products:
        raise ModelError(f"{prepared.source}: it has no product with a constant matrix", "Leave --weight-only out")
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


# Operator types that onnxruntime's quantizer rewrites. The quantizer first replaces every plain Gemm by an Add and a
# MatMul whose name ends with `_GEMM_SUFFIX`.
_QUANTIZER_TYPES = frozenset({"Attention", "Conv", "EmbedLayerNormalization", "Gather", "Gemm", "LSTM", "MatMul"})
_GEMM_IS = {"Gemm": "MatMul"}
_GEMM_SUFFIX = "_MatMul"
_EDGEQ_TYPES = frozenset({"GRU"})
OPERATORS = tuple(sorted(_QUANTIZER_TYPES | _EDGEQ_TYPES))
# Largest integer weight with 7 bits and with 8 bits.
_LIMITS = {True: 63, False: 127}


def check_dynamic(scheme: Scheme) -> None:
    """Refuse a dynamic scheme that cannot be applied to any model.

    Raises:
        UsageError: the scheme has no weight types, or lists an operator type for which it has no weight type.
    """
    if not scheme.dynamic_weight_types:
        raise UsageError("dynamic quantization needs a weight type per operator type", "Choose a profile that has them")
    untyped = next((t for t in scheme.op_types or () if t in OPERATORS and t not in scheme.dynamic_weight_types), None)
    if untyped is not None:
        raise UsageError(
            f"the profile has no weight type for dynamic {untyped}", "Name one with --weight-type, or leave it in float"
        )


def write_dynamic(prepared: PreparedModel, scheme: Scheme, destination: Path) -> None:
    """Run onnxruntime's dynamic quantizer on the model and write its output. `finish_dynamic` does the rest.

    Raises:
        ModelError: the quantizer refuses the model.
    """
    by_type: dict[IntegerType, list[str]] = {}
    for op_type in sorted(_QUANTIZER_TYPES.intersection(scheme.quantized_types or ())):
        by_type.setdefault(scheme.dynamic_weight_types[op_type], []).append(op_type)
    # The quantizer accepts one weight type per call. So there is one pass for each type, over the nodes that the
    # previous pass left in float.
    source = prepared.path
    with scratch_folder("edgeq-dynamic-") as folder:
        for step, (weight_type, op_types) in enumerate(sorted(by_type.items())):
            target = destination if step == len(by_type) - 1 else Path(folder) / f"pass{step}.onnx"
            quantize_types(prepared, source, target, op_types, weight_type, scheme)
            source = target
    if not by_type:
        save_model(prepared.model, destination)


def finish_dynamic(model: ir.Model, scheme: Scheme) -> tuple[str, ...]:
    """Quantize the parts that onnxruntime's quantizer does not support or quantizes badly, in place, and return notes.

    These are the tables of Gather nodes, and GRU layers (`edgeq.quantization.recurrent`).
    """
    notes = []
    if _writes_tables(scheme) and (tables := write_tables(model, {}, scheme.exclude)[0]):
        notes.append(tables_note(tables))
    if _EDGEQ_TYPES.intersection(scheme.quantized_types or ()):
        quantizer = IntegerWeights(scheme.per_channel, _LIMITS[scheme.reduce_range])
        if names := expand_grus(model, quantizer, exclude=scheme.exclude):
            subject = f"the recurrence of {', '.join(names)}"
            notes.append(f"{subject} is written out with integer products, because GRU has no integer kernel")
    return tuple(notes)


def _writes_tables(scheme: Scheme) -> bool:
    """Return whether edgeq quantizes the tables itself, to signed integers with a scale for each row."""
    return "Gather" in (scheme.quantized_types or ()) and scheme.dynamic_weight_types["Gather"] == "int8"


def standard_attentions(model: ir.Model) -> set[str]:
    """Return the names of the nodes with ONNX's own Attention operator (opset 23).

    These nodes have no weights, but onnxruntime's quantizer mistakes them for onnxruntime's operator of the same name.
    """
    return {str(node.name) for node in model.graph if node.op_type == "Attention" and node.domain in MAIN_DOMAINS}


def quantize_types(
    prepared: PreparedModel,
    source: Path,
    target: Path,
    op_types: Collection[str],
    weight_type: IntegerType,
    scheme: Scheme,
) -> None:
    """Run onnxruntime's dynamic quantizer over the operators of some types, from the file `source` to the file
    `target`.

    Raises:
        ModelError: the quantizer refuses the model.
    """
    from onnxruntime.quantization import quantize_dynamic

    nodes = prepared.model.graph
    float_nodes = {str(node.name) for node in nodes if node.op_type not in op_types or node.name in scheme.exclude}
    float_nodes |= standard_attentions(prepared.model)
    if scheme.per_channel:
        float_nodes |= stacked_products(prepared.model)
    if _writes_tables(scheme):
        float_nodes |= {str(node.name) for node in nodes if table_of(node) is not None}
    fix = "Keep the node in float with --exclude, or choose another scheme"
    with quantizer_files(source, target, prepared.source, fix) as files:
        quantize_dynamic(
            **files,
            op_types_to_quantize=sorted({_GEMM_IS.get(op_type, op_type) for op_type in op_types}),
            per_channel=scheme.per_channel,
            reduce_range=scheme.reduce_range,
            weight_type=quant_type(weight_type),
            nodes_to_exclude=float_nodes | {f"{name}{_GEMM_SUFFIX}" for name in float_nodes},
            # Shape inference does not know the outputs of ONNX Runtime's own operators.
            extra_options={"DefaultTensorType": int(ir.DataType.FLOAT)},
        )
    check_clashes(prepared, source, target)


Floats = NDArray[np.float64]

T = TypeVar("T", bound=np.generic)

_BLOCK = 32
_DAMPING = 1e-3
_SWEEPS = 1


def round_rows(
    rows: Floats,
    metric: Floats,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    *,
    scale: ArrayLike = 1.0,
    block: int = _BLOCK,
) -> NDArray[np.int64]:
    """Return integers q such that scale * q approximates the rows with a small expected error (GPTQ).

    Args:
        rows: float64 [groups, m, k].
        metric: second moment of the inputs, float64 [groups, k, k], positive definite.
        low, high: limits of the integers, broadcastable to the rows.
        scale: scale of each weight, broadcastable to the rows; may be negative.
        block: number of columns whose errors are collected before they are spread over the later columns.
    """
    upper = np.linalg.cholesky(np.linalg.inv(metric)).transpose(0, 2, 1)
    # The loop reads and writes one column after another, so the columns are contiguous in memory here.
    low, high, scale = (_columns(np.broadcast_to(values, rows.shape)) for values in (low, high, scale))
    columns = _columns(rows)
    remaining = columns.copy()
    integers = np.empty(columns.shape, np.int64)
    taps = columns.shape[1]
    for start in range(0, taps, block):
        stop = min(start + block, taps)
        errors = np.empty((len(columns), stop - start, columns.shape[2]))
        for column in range(start, stop):
            step, target = scale[:, column], remaining[:, column]
            integers[:, column] = np.clip(np.rint(target / step), low[:, column], high[:, column])
            error = (target - integers[:, column] * step) / upper[:, column, column, None]
            errors[:, column - start] = error
            remaining[:, column + 1 : stop] -= upper[:, column, column + 1 : stop, None] * error[:, None]
        remaining[:, stop:] -= upper[:, start:stop, stop:].transpose(0, 2, 1) @ errors
    return _columns(_descend(columns, metric, integers, low, high, scale, block))


def _columns(rows: NDArray[T]) -> NDArray[T]:
    """Swap the last two axes, [groups, m, k] to [groups, k, m] or back. The result is contiguous in memory."""
    return np.ascontiguousarray(rows.transpose(0, 2, 1))


def _descend(
    columns: Floats,
    metric: Floats,
    integers: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    scale: Floats,
    block: int,
) -> NDArray[np.int64]:
    """Set each column in turn to its best integers while the others are fixed, and return all integers.

    No step increases the error. All arrays are [groups, k, m].
    """
    slope = metric @ (columns - scale * integers)
    taps = columns.shape[1]
    for _ in range(_SWEEPS):
        for start in range(0, taps, block):
            stop = min(start + block, taps)
            block_slope = slope[:, start:stop].copy()
            moved = np.zeros(block_slope.shape)
            for column in range(start, stop):
                curvature = metric[:, column, column, None] * scale[:, column]
                # The difference from the current integer is rounded, so a change of less than half a step does not move
                # the integer.
                steps = np.rint(block_slope[:, column - start] / curvature).astype(np.int64)
                steps = np.clip(integers[:, column] + steps, low[:, column], high[:, column]) - integers[:, column]
                if steps.any():
                    integers[:, column] += steps
                    moved[:, column - start] = change = steps * scale[:, column]
                    block_slope -= metric[:, start:stop, column, None] * change[:, None]
            slope -= metric[:, :, start:stop] @ moved
    return integers


def damp(moment: Floats, step: float) -> Floats:
    """Return a second moment [groups, k, k] with the rounding error of the inputs added to its diagonal.

    The result is positive definite.
    """
    taps = moment.shape[-1]
    trace = np.trace(moment, axis1=1, axis2=2) / taps
    diagonal = step**2 / 12 + _DAMPING * trace + np.finfo(np.float64).tiny ** 0.5
    return np.asarray(moment + diagonal[:, None, None] * np.eye(taps), np.float64)


def squared_errors(errors: Floats, metric: Floats) -> Floats:
    """Return the expected squared error of each output, float64 [groups, m], if the weights are off by `errors`."""
    return np.asarray(np.einsum("gmk,gmk->gm", errors @ metric, errors), np.float64)
