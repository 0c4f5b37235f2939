"""Build models for ONNX Runtime's CPU kernels: static, dynamic and weight-only quantization."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from edgeq_device.model_options import KEY as CARRIED
from numpy.typing import NDArray

from edgeq.backends.base import Artifact, check_names, refuse_wide
from edgeq.backends.block_compute import BlockCompute, described
from edgeq.backends.clamps import lasting_clamps
from edgeq.backends.dynamic import OPERATORS as DYNAMIC_OPERATORS
from edgeq.backends.dynamic import check_dynamic, finish_dynamic, write_dynamic
from edgeq.backends.float_guard import guard_float_layers, requantized_at_load
from edgeq.backends.qdq import write_qdq
from edgeq.backends.qdq_params import integer_type, spreads_thin
from edgeq.backends.quantizer import chosen_params, quant_type, quantize_with_ranges
from edgeq.backends.saturation_fit import check_fit, fitted_bounds
from edgeq.backends.stored import store_weights
from edgeq.backends.weight_only import write_weight_only
from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import ModelError, UsageError, closest
from edgeq.graph.index import GraphIndex
from edgeq.graph.query import is_op, name_of, node_input
from edgeq.model.int8_prediction import predict_int8, stacked_products
from edgeq.model.int8_rules import Rule, int8_rules, quantizable_operators, slow_fusions
from edgeq.model.load import is_quantized, read_model, read_own, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import ALL_NODES, WEIGHT_ONLY_TYPES, Scheme
from edgeq.session import onnxruntime

# For what `edgeq.backends.float_guard` has no form of.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_OTHER_FORMAT = "Choose --format QDQ; it writes Where wrongly in this format"
_REQUANTIZED_AT_LOAD = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class CpuBackend:
    """For ONNX Runtime's kernels on CPUs of any architecture: static, dynamic and weight-only quantization."""

    name = "cpu"
    title = "ONNX Runtime's CPU execution provider"
    adopts_quantized = False

    def __init__(self, reach: Mapping[str, NDArray[np.float64]] | None = None) -> None:
        self._reach = reach

    def fitting(self, reach: Mapping[str, NDArray[np.float64]]) -> CpuBackend:
        """The backend that fits ranges to samples. See `FittingBackend.fitting`."""
        return CpuBackend(reach)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that no model could be built with. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        if scheme.format == "table":
            raise UsageError("ONNX Runtime's CPU kernels take no calibration table", "Make --format QDQ")
        if scheme.rest != "float32":
            raise UsageError(f"the CPU kernels for {scheme.rest} are few and slow", "Leave --rest float32")
        if scheme.mode == "float":
            raise UsageError("there is nothing to quantize in mode float", "Choose another mode")
        if scheme.mode == "dynamic":
            check_dynamic(scheme)
        elif scheme.mode == "static" and scheme.pair == "S8U8":
            raise UsageError("int8 activations with uint8 weights have no kernels", "Make --weight-type int8")
        if scheme.fit_pairs or scheme.fit_seen:
            check_fit(scheme)
        known = _quantizable(scheme)
        named = (*(scheme.op_types or ()), *(scheme.dynamic_weight_types if scheme.mode == "dynamic" else ()))
        unknown = next((op_type for op_type in named if op_type not in known), None)
        if unknown is not None:
            hint = closest(unknown, known, f"It can be {', '.join(known)}", most=3)
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
        """Write the quantized model to `destination`. Samples serve to choose what products of weights in blocks
        compute in. See `Backend.build`."""
        onnxruntime()  # the quantizer is part of it: one clear error where it is missing
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
        if not is_quantized(built) and not changes:
            raise ModelError(f"{prepared.source}: nothing in it was quantized", _why_nothing(prepared, scheme))
        session_options, why, settled = settle(built, scheme.session_options)
        if settled or changes or scheme.mode == "static":
            save_model(built, destination)
        notes.extend(why)
        artifact = Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            session_options=session_options,
            notes=tuple(notes),
        )
        return artifact if compute is None else described(artifact, compute)

    def with_options(self, artifact: Artifact, scheme: Scheme, destination: Path) -> Artifact:
        """The artifact with other session options. See `OptionsBackend.with_options`."""
        model = read_own(artifact.model)
        options, _, _ = settle(model, scheme.session_options)
        save_model(model, destination)
        return replace(artifact, model=destination, scheme=scheme, session_options=options)


def settle(
    built: ir.Model, given: Mapping[str, str] | None = None, *, guard: bool = True
) -> tuple[dict[str, str], tuple[str, ...], bool]:
    """Make a quantized model right and fast on ONNX Runtime's CPU kernels, in place: by the form of its graph where
    that does it (`edgeq.backends.float_guard`), else by session options, which its metadata carry.

    Args:
        given: options that are set already; they are among those returned.
        guard: whether the form of the graph may be changed.

    Returns:
        The session options, why each thing was done, and whether the model was changed.
    """
    options = dict(given or {})
    disabled = [name for name in options.get(_DISABLED, "").split(";") if name]
    notes = []
    kept = float_compute_nodes(built)
    guarded = guard_float_layers(built, kept) if guard else 0
    if guarded:
        notes.append(
            f"compute nodes that stay in float: {guarded}, in a form that ONNX Runtime does not quantize at load"
        )
    at_risk = requantized_at_load(built, kept)
    if at_risk:
        disabled.append(_REQUANTIZER)
        notes.append(
            f"compute nodes that stay in float: {len(at_risk)}; the session option {_DISABLED} keeps ONNX Runtime from "
            "quantizing their weights at load"
        )
    for fusion in slow_fusions(CpuBackend.name, built):
        disabled.append(fusion.optimizer)
        notes.append(f"without ONNX Runtime's {fusion.optimizer}: {fusion.reason}")
    if disabled:
        options[_DISABLED] = ";".join(dict.fromkeys(disabled))
    before = built.metadata_props.pop(CARRIED, None)
    if options:
        built.metadata_props[CARRIED] = json.dumps(options, sort_keys=True)
    return options, tuple(notes), guarded > 0 or before != built.metadata_props.get(CARRIED)


def float_compute_nodes(model: ir.Model) -> tuple[str, ...]:
    """Names of Conv, ConvTranspose, Gemm and MatMul nodes with a constant float weight in a graph that has Q nodes."""
    if not any(node.op_type == "QuantizeLinear" for node in model.graph):
        return ()
    constants = GraphIndex(model).computed_constants
    found = []
    for node in model.graph:
        weight = node_input(node, 1) if node.op_type in _REQUANTIZED_AT_LOAD else None
        is_float = weight is not None and not is_op(weight.producer(), "DequantizeLinear")
        if is_float and name_of(weight) in constants:
            found.append(str(node.name))
    return tuple(found)


def _store(scheme: Scheme, model: ir.Model) -> tuple[str, ...]:
    stored = store_weights(model, scheme.stored_types, scheme.exclude) if scheme.stored_types else ()
    return (f"{len(stored)} weights of layers that compute in float are 8-bit integers in the file",) if stored else ()


def _quantizable(scheme: Scheme) -> tuple[str, ...]:
    if scheme.mode == "static":
        return quantizable_operators(int8_rules("cpu"))
    return DYNAMIC_OPERATORS if scheme.mode == "dynamic" else WEIGHT_ONLY_TYPES


def _why_nothing(prepared: PreparedModel, scheme: Scheme) -> str:
    """What a user can do about a model in which nothing was quantized, with the reason of the node that has most of the
    work."""
    rules, hazards = int8_rules("cpu"), prepared.hazards if scheme.mode == "static" else {}
    for node in sorted(predict_int8(prepared.model, rules, hazards=hazards), key=lambda n: -n.macs):
        if node.name in scheme.exclude:
            return "Exclude fewer nodes"
        types = scheme.quantized_types
        if node.verdict == "int8" and types is not None and node.op_type not in types:
            wanted = ", ".join(sorted(types))
            static = "" if scheme.mode == "static" else ". Static quantization takes it"
            return f"It holds {node.op_type}, which is not among the operator types to quantize ({wanted}){static}"
        if node.verdict == "float":
            return f"Deploy the float model; {node.op_type} ({node.name}): {node.reason}"
    left = next((n for n in predict_int8(prepared.model, rules, scheme) if n.verdict == "float"), None)
    return f"{left.op_type} ({left.name}): {left.reason}" if left is not None else "Deploy the float model"


def _static(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    destination: Path,
    reach: Mapping[str, NDArray[np.float64]] | None,
) -> ir.Model:
    """Return the statically quantized model; `destination` may serve as a scratch file."""
    rules = int8_rules("cpu")
    types = scheme.op_types or quantizable_operators(rules)
    float_nodes = {*scheme.exclude, *_float_nodes(prepared, rules, scheme)}
    if scheme.format == "QDQ":
        model = prepared.model.clone()
        nodes = {str(node.name) for node in model.graph if node.op_type in types} - float_nodes
        bounds = fitted_bounds(prepared, scheme, reach) if scheme.fit_pairs else None
        write_qdq(model, ranges, scheme, nodes, source=prepared.source, weight_bounds=bounds)
        return model
    graph = prepared.model.graph
    dtype = integer_type(scheme.activation_type)
    float_nodes |= lasting_clamps(graph, chosen_params(ranges, dtype, symmetric=scheme.activation_symmetric))
    # onnxruntime's quantizer gives every Softmax the range 0..1 in this format.
    outputs = {str(node.name): ranges.get(name_of(node.outputs[0])) for node in graph if is_op(node, "Softmax")}
    float_nodes |= {name for name, found in outputs.items() if found is not None and spreads_thin(found)}
    _write_operators(prepared, ranges, scheme, destination, float_nodes, types)
    return read_own(destination)


def _write_operators(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    destination: Path,
    float_nodes: Collection[str],
    types: Sequence[str],
) -> None:
    from onnxruntime.quantization import QuantFormat

    # onnxruntime's quantizer drops what a Where reads where that was quantized, in this format.
    lost = any(node.op_type == "Where" for node in prepared.model.graph)
    quantize_with_ranges(
        prepared,
        destination,
        ranges,
        float_nodes=float_nodes,
        fix=_OTHER_FORMAT if lost else "Keep the node in float with --exclude, or choose another scheme",
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


def _float_nodes(prepared: PreparedModel, rules: Mapping[str, Rule], scheme: Scheme) -> list[str]:
    """Nodes of quantizable types that have no integer form as they stand. Q/DQ around them costs time and accuracy,
    and some (a dilated AveragePool, a scale per channel of a MatMul's weights that are no matrix) would make a file
    that ONNX Runtime refuses."""
    predicted = predict_int8(prepared.model, rules, hazards=prepared.hazards)
    found = [node.name for node in predicted if node.verdict == "float"]
    if scheme.per_channel:
        found.extend(stacked_products(prepared.model))
    return found
