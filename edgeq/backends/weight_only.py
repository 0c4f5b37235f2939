"""Weight-only quantization: constant matrices as blocks of 4- or 8-bit integers, one scale a block (MatMulNBits).

A product of few rows waits for the weights, so a quarter or an eighth of the bytes is that much faster; with many rows
the integer kernels of dynamic quantization win. Activations are quantized per block inside the kernel.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from edgeq.backends.dynamic import quantize_types
from edgeq.backends.quantizer import quiet
from edgeq.errors import ModelError
from edgeq.graph.convert import from_proto, to_proto
from edgeq.graph.edit import Editor, drop_unused_initializers, replace_value
from edgeq.graph.query import constant, is_op, node_input
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme

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
    ir.external_data.load_to_model(model)  # the quantizer reads no external data
    proto = to_proto(model)
    blocked = _in_blocks(proto, scheme) if "MatMul" in wanted or "Gemm" in wanted else proto
    if not any(node.op_type == "MatMulNBits" for node in blocked.graph.node):
        raise ModelError(f"{prepared.source}: it has no product with a constant matrix", "Choose another scheme")
    save_model(from_proto(blocked), destination)
    if "Gather" in wanted:
        quantize_types(prepared, destination, destination, ["Gather"], "int8", scheme)
    return (f"MatMulNBits of {scheme.weight_bits} bits needs onnxruntime {_SINCE[scheme.weight_bits]} or later",)


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


def _in_blocks(model: onnx.ModelProto, scheme: Scheme) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        model,
        bits=scheme.weight_bits,
        block_size=scheme.block_size,
        is_symmetric=scheme.weight_symmetric,
        accuracy_level=_INT8_COMPUTE,
        nodes_to_exclude=list(scheme.exclude),
        op_types_to_quantize=("MatMul",),
    )
    with quiet():
        quantizer.process()
    done: onnx.ModelProto = quantizer.model.model
    return done
