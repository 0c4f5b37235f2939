"""Weight-only quantization: constant matrices as blocks of 4- or 8-bit integers, one scale a block (MatMulNBits).

A product of few rows waits for the weights, so a quarter or an eighth of the bytes is that much faster; with many rows
the integer kernels of dynamic quantization win. Activations are quantized per block inside the kernel.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper, numpy_helper

from edgeq.backends.dynamic import quantize_types
from edgeq.backends.quantizer import quiet
from edgeq.errors import ModelError
from edgeq.model.load import load_model, save_model
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
    model = load_model(prepared.path, external_data="all")
    if "Gemm" in wanted:
        gemms_to_matmuls(model, scheme.exclude)
    blocked = _in_blocks(model, scheme) if "MatMul" in wanted or "Gemm" in wanted else model
    if not any(node.op_type == "MatMulNBits" for node in blocked.graph.node):
        raise ModelError(f"{prepared.source}: it has no product with a constant matrix", "Choose another scheme")
    save_model(blocked, destination)
    if "Gather" in wanted:
        quantize_types(prepared, destination, destination, ["Gather"], "int8", scheme)
    return (f"MatMulNBits of {scheme.weight_bits} bits needs onnxruntime {_SINCE[scheme.weight_bits]} or later",)


def gemms_to_matmuls(model: onnx.ModelProto, exclude: tuple[str, ...] = ()) -> int:
    """Make, in place, MatMul and Add of each Gemm with a constant matrix and no scaling; returns how many."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        plain = attributes.get("alpha", 1.0) == 1.0 and attributes.get("beta", 1.0) == 1.0
        fits = node.op_type == "Gemm" and plain and not attributes.get("transA", 0) and node.input[1] in constants
        if not fits or node.name in exclude:
            nodes.append(node)
            continue
        count += 1
        matrix = node.input[1]
        if attributes.get("transB", 0):
            matrix = f"{matrix}/transposed"
            if all(tensor.name != matrix for tensor in graph.initializer):
                values = numpy_helper.to_array(constants[node.input[1]]).T.copy()
                graph.initializer.append(numpy_helper.from_array(values, matrix))
        has_bias = len(node.input) > 2 and bool(node.input[2])
        product = f"{node.name}/product" if has_bias else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], matrix], [product], name=node.name))
        if has_bias:
            nodes.append(helper.make_node("Add", [product, node.input[2]], node.output, name=f"{node.name}/bias"))
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return count


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
