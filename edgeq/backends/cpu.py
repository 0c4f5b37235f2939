"""Build models for ONNX Runtime's CPU kernels: static, dynamic and weight-only quantization.

Some operators have kernels that compute in float. For these, `store_weights` writes weights that are 8-bit integers in
the file and float32 at run time, so the weights take a quarter of the space. The runtime folds the conversion when it
loads the model, so the conversion costs no time afterwards. The conversion is a Cast and a Mul, because ONNX Runtime
does not fold a DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.base import (
    FREE_SCALES,
    Artifact,
    Backend,
    check_names,
    refuse_wide,
    require_fields,
    with_compute,
)
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import ModelError, UsageError, closest
from edgeq.model.edit import Editor
from edgeq.model.graph import channel_axis, constant, is_op, name_of
from edgeq.model.int8_prediction import predict_int8, stacked_products
from edgeq.model.int8_rules import Int8Rule, int8_rules, quantizable_operators
from edgeq.model.load import is_quantized, read_model, read_unchecked, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.model.sharing import share_model
from edgeq.quantization.block_compute import BlockCompute
from edgeq.quantization.clamps import find_lasting_clamps
from edgeq.quantization.dynamic import OPERATORS as DYNAMIC_OPERATORS
from edgeq.quantization.dynamic import check_dynamic, finish_dynamic, write_dynamic
from edgeq.quantization.float_guard import fit_to_runtime
from edgeq.quantization.pair_fit import check_fit, fitted_bounds
from edgeq.quantization.params import integer_type, is_spread_thin, range_params
from edgeq.quantization.qdq import write_qdq
from edgeq.quantization.quantizer import quant_type, quantize_with_ranges
from edgeq.quantization.tables import tables_note, write_tables
from edgeq.quantization.weight_only import write_weight_only
from edgeq.run.session import onnxruntime
from edgeq.scheme import ALL_NODES, WEIGHT_ONLY_TYPES, Scheme

LEAST_ELEMENTS = 1024
"""Weights with fewer elements stay in float. As integers, they would save less space than the two extra nodes take."""


def store_weights(model: ir.Model, op_types: Collection[str], exclude: Collection[str] = ()) -> tuple[str, ...]:
    """Store float32 weights as integers, in place, if only operators of `op_types` read them.

    The weights of each output share one symmetric scale: their largest magnitude / 127.

    Args:
        exclude: names of nodes whose weights stay unchanged.

    Returns:
        Names of the weights that were converted.
    """
    graph = model.graph
    editor, first_node = Editor(model), next(iter(graph), None)
    stored: list[str] = []
    for name, weight in tuple(graph.initializers.items()):
        values = constant(weight) if _is_storable(weight, op_types, exclude) else None
        if values is None:
            continue
        # The first use decides along which axes the weights share a scale. Every choice is correct, because the readers
        # get floats.
        use = next(iter(weight.uses()))
        integers, scale = _quantize(values, use.node, use.idx)
        parts = [editor.constant(f"{name}/integers", integers), editor.constant(f"{name}/scale", scale)]
        # The nodes stand before all others, because a weight may have readers anywhere in the graph.
        wide = editor.node("Cast", parts[:1], f"{name}/float", before=first_node, attributes={"to": ir.DataType.FLOAT})
        scaled = editor.node("Mul", [wide, parts[1]], f"{name}/scaled", before=first_node)
        del graph.initializers[name]
        # The result takes the weight's name, so the tensor that the readers see keeps it.
        weight.replace_all_uses_with(scaled)
        scaled.name = name
        stored.append(name)
    return tuple(stored)


def _is_storable(weight: ir.Value, op_types: Collection[str], exclude: Collection[str]) -> bool:
    tensor, uses = weight.const_value, weight.uses()
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2 or tensor.size < LEAST_ELEMENTS:
        return False
    if weight.is_graph_input() or weight.is_graph_output() or not uses:
        return False
    # A single reader of another type keeps the weight in float: the file would otherwise contain it twice.
    return all(use.node.op_type in op_types and use.node.name not in exclude for use in uses)


def _quantize(values: NDArray[np.float32], node: ir.Node, place: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    # A row of zeros gets the scale 1/127, because its integers are zero with any scale, and a scale of 0 is not valid.
    largest = np.abs(values).max(axis=_summed_axes(node, place, values.ndim), keepdims=True)
    scale = (np.where(largest > 0, largest, 1) / 127).astype(np.float32)
    return np.rint(values / scale).astype(np.int8), scale


def _summed_axes(node: ir.Node, place: int, rank: int) -> tuple[int, ...]:
    """Return the axes of a weight that its product sums over. The weights along these axes share a scale."""
    if place == 1 and node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        return tuple(axis for axis in range(rank) if axis != channel_axis(node) % rank)
    if node.op_type == "MatMul" and place == 1:
        return (rank - 2,)
    if node.op_type == "Gemm":
        return (0,) if node.attributes.get_int("transA", 0) else (1,)
    # The remaining cases are a constant left matrix of a MatMul, the weights of recurrent layers [direction, gates,
    # inputs], and tables of rows.
    return (rank - 1,)


_OTHER_FORMAT = "Choose ⟨format⟩ QDQ: onnxruntime's quantizer writes Where wrongly in this format"


class CpuBackend(Backend):
    """Build for ONNX Runtime's CPU kernels on any architecture: static, dynamic and weight-only quantization."""

    name = "cpu"
    title = "ONNX Runtime's CPU execution provider"
    modes = ("static", "dynamic", "weight-only")

    def __init__(self, reach: Mapping[str, NDArray[np.float64]] | None = None) -> None:
        self._reach = reach

    def fitting(self, reach: Mapping[str, NDArray[np.float64]]) -> CpuBackend:
        """Return a backend that fits the ranges of weights to samples. See `Backend.fitting`."""
        return CpuBackend(reach)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that cannot be built, whatever the model is. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        if scheme.format == "table":
            raise UsageError("ONNX Runtime's CPU kernels cannot use a calibration table", "Use ⟨format⟩ QDQ")
        if scheme.rest != "float32":
            raise UsageError(f"the CPU kernels for {scheme.rest} are few and slow", "Use ⟨rest⟩ float32")
        if scheme.mode == "float":
            raise UsageError("there is nothing to quantize in mode float", "Choose another mode")
        if scheme.mode == "dynamic":
            check_dynamic(scheme)
        elif scheme.mode == "static" and scheme.pair == "S8U8":
            raise UsageError("int8 activations with uint8 weights have no kernels", "Use ⟨weight_type⟩ int8")
        # Only edgeq's own writer of Q/DQ pairs knows these fields.
        if (scheme.mode, scheme.format) != ("static", "QDQ"):
            require_fields(scheme, FREE_SCALES, self.name, "Choose static quantization in ⟨format⟩ QDQ")
        if scheme.fit_pairs or scheme.fit_seen:
            check_fit(scheme)
        quantizable = _quantizable(scheme)
        named = (*(scheme.op_types or ()), *(scheme.dynamic_weight_types if scheme.mode == "dynamic" else ()))
        unknown = next((op_type for op_type in named if op_type not in quantizable), None)
        if unknown is not None:
            hint = closest(unknown, quantizable, f"It can be {', '.join(quantizable)}", most=3)
            raise UsageError(f"no operator {unknown!r} has an int8 form on the {self.name} backend", hint)

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the quantized model to `destination`. For weights in blocks, the samples decide in which type the
        matrix products compute. See `Backend.build`.
        """
        onnxruntime()  # The quantizer is part of onnxruntime. If onnxruntime is missing, give one clear error.
        # The scheme may come from a search, which does not go through `check`.
        self.check(scheme)
        check_names(
            prepared, (*scheme.exclude, *scheme.eight_bit, *(n for n in scheme.float_compute or () if n != ALL_NODES))
        )
        notes: list[str] = []
        compute: BlockCompute | None = None
        if scheme.mode == "static":
            built = _static(prepared, ranges, scheme, destination, self._reach)
        elif scheme.mode == "dynamic":
            write_dynamic(prepared, scheme, destination)
            built = read_model(destination)
        else:
            compute, needs = write_weight_only(prepared, scheme, destination, samples)
            notes.extend(needs)
            built = read_model(destination)
        changes = [*(finish_dynamic(built, scheme) if scheme.mode == "dynamic" else ()), *_store(scheme, built)]
        notes.extend(changes)
        # A file without any integers would be a copy of the float model. The user must not take it for a quantized one.
        if not is_quantized(built) and not changes:
            raise ModelError(
                f"{prepared.source}: nothing in it was quantized", _nothing_quantized_note(prepared, scheme)
            )
        session_options, why, settled = fit_to_runtime(built, scheme.session_options)
        # In the other modes the writer has already written the file, so it is written again only if something changed.
        if settled or changes or scheme.mode == "static":
            save_model(built, destination)
        # Later steps read this file. Handing over the model in memory saves them from loading it again.
        share_model(built, destination, prepared.graph)
        notes.extend(why)
        artifact = Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            session_options=session_options,
            notes=tuple(notes),
        )
        return artifact if compute is None else with_compute(artifact, compute)

    def with_options(self, artifact: Artifact, scheme: Scheme, destination: Path) -> Artifact:
        """Return the artifact with other session options. See `Backend.with_options`."""
        model = read_unchecked(artifact.model)
        options, _, _ = fit_to_runtime(model, scheme.session_options)
        save_model(model, destination)
        return replace(artifact, model=destination, scheme=scheme, session_options=options)


def _store(scheme: Scheme, model: ir.Model) -> tuple[str, ...]:
    notes = []
    if "Gather" in scheme.stored_types and (tables := write_tables(model, {}, scheme.exclude)[0]):
        notes.append(tables_note(tables))
    other_types = [op_type for op_type in scheme.stored_types if op_type != "Gather"]
    stored = store_weights(model, other_types, scheme.exclude) if other_types else ()
    if stored:
        notes.append(f"{len(stored)} weights of layers that compute in float are 8-bit integers in the file")
    return tuple(notes)


def _quantizable(scheme: Scheme) -> tuple[str, ...]:
    if scheme.mode == "static":
        return quantizable_operators(int8_rules("cpu"))
    return DYNAMIC_OPERATORS if scheme.mode == "dynamic" else WEIGHT_ONLY_TYPES


def _nothing_quantized_note(prepared: PreparedModel, scheme: Scheme) -> str:
    """Explain what a user can do about a model in which nothing was quantized, naming the node with the most work."""
    rules, hazards = int8_rules("cpu"), prepared.hazards if scheme.mode == "static" else {}
    # The node with the most work explains best why nothing was quantized: it is the one that the user cares about.
    for node in sorted(predict_int8(prepared.graph, rules, hazards=hazards), key=lambda n: -n.macs):
        if node.name in scheme.exclude:
            return "Exclude fewer nodes"
        types = scheme.quantized_types
        if node.verdict == "int8" and types is not None and node.op_type not in types:
            type_list = ", ".join(sorted(types))
            static = "" if scheme.mode == "static" else ". Static quantization supports it"
            return (
                f"It contains {node.op_type}, which is not among the operator types to quantize ({type_list}){static}"
            )
        if node.verdict == "float":
            return f"Deploy the float model; {node.op_type} ({node.name}): {node.reason}"
    float_node = next((n for n in predict_int8(prepared.graph, rules, scheme) if n.verdict == "float"), None)
    return (
        f"{float_node.op_type} ({float_node.name}): {float_node.reason}"
        if float_node is not None
        else "Deploy the float model"
    )


def _static(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    destination: Path,
    reach: Mapping[str, NDArray[np.float64]] | None,
) -> ir.Model:
    """Return the statically quantized model. The function may use `destination` as a scratch file."""
    rules = int8_rules("cpu")
    types = scheme.op_types or quantizable_operators(rules)
    float_nodes = {*scheme.exclude, *_float_nodes(prepared, rules, scheme)}
    if scheme.format == "QDQ":
        model = prepared.model.clone()
        nodes = {str(node.name) for node in model.graph if node.op_type in types} - float_nodes
        bounds = fitted_bounds(prepared, scheme, reach) if scheme.fit_pairs else None
        floats = {op_type for op_type, rule in rules.items() if rule.float_result}
        write_qdq(model, ranges, scheme, nodes, source=prepared.source, weight_bounds=bounds, float_results=floats)
        return model
    graph = prepared.model.graph
    dtype = integer_type(scheme.activation_type)
    # onnxruntime's quantizer would remove these clamps, although their bounds cut values that the range contains.
    float_nodes |= find_lasting_clamps(graph, range_params(ranges, dtype, symmetric=scheme.activation_symmetric))
    # In the QOperator format, onnxruntime's quantizer gives every Softmax the range 0..1.
    outputs = {str(node.name): ranges.get(name_of(node.outputs[0])) for node in graph if is_op(node, "Softmax")}
    float_nodes |= {name for name, span in outputs.items() if span is not None and is_spread_thin(span)}
    _write_operators(prepared, ranges, scheme, destination, float_nodes, types)
    return read_unchecked(destination)


def _write_operators(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    destination: Path,
    float_nodes: Collection[str],
    types: Sequence[str],
) -> None:
    from onnxruntime.quantization import QuantFormat

    # In the QOperator format, onnxruntime's quantizer drops the quantized inputs of a Where.
    lost = any(node.op_type == "Where" for node in prepared.model.graph)
    quantize_with_ranges(
        prepared,
        destination,
        ranges,
        float_nodes=float_nodes,
        fix=_OTHER_FORMAT if lost else "Keep the node in float with ⟨exclude⟩, or choose another scheme",
        fix_ranges="The calibration does not cover this tensor: calibrate this model again",
        quant_format=QuantFormat[scheme.format],
        op_types_to_quantize=list(types),
        per_channel=scheme.per_channel,
        reduce_range=scheme.reduce_range,
        activation_type=quant_type(scheme.activation_type),
        weight_type=quant_type(scheme.weight_type),
        extra_options={
            "ActivationSymmetric": scheme.activation_symmetric,
            "WeightSymmetric": scheme.weight_symmetric,
        },
    )


def _float_nodes(prepared: PreparedModel, rules: Mapping[str, Int8Rule], scheme: Scheme) -> list[str]:
    """Return the nodes whose type can be quantized, but that have no integer form in this model.

    Q/DQ pairs around them would cost time and accuracy. ONNX Runtime would even refuse a file with such pairs around
    some of them: a dilated AveragePool, or a MatMul with per-channel scales whose weights are not a matrix.
    """
    predicted = predict_int8(prepared.graph, rules, hazards=prepared.hazards)
    names = [node.name for node in predicted if node.verdict == "float"]
    if scheme.per_channel:
        names.extend(stacked_products(prepared.model))
    return names
