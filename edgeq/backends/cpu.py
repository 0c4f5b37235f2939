"""The CPU backend: ONNX Runtime's quantizer, fed with our ranges, for ONNX Runtime's CPU kernels."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.backends.base import Artifact, check_names
from edgeq.calibrate.ranges import Range
from edgeq.errors import CalibrationError, ModelError, UsageError
from edgeq.model.int8_rules import Rule, int8_rules, quantizable_operators
from edgeq.model.load import is_quantized, load_model, model_files
from edgeq.model.outlook import int8_outlook
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import IntegerType, Scheme
from edgeq.session import onnxruntime

# Protobuf refuses messages from 2 GiB on; the quantized file is smaller, but the intermediate ones may not be.
_EXTERNAL_DATA_FROM = 2**31 - 2**20

# At load, this optimizer quantizes the weights of a float Conv or Gemm that stands between integer tensors, per tensor
# and without being asked: what was kept in float for accuracy becomes the worst layer of all.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_REQUANTIZED_AT_LOAD = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

# In dynamic mode the runtime's quantizer first makes every plain Gemm a MatMul of this name and an Add.
_GEMM_IS = {"Gemm": "MatMul"}
_GEMM_SUFFIX = "_MatMul"


class CpuBackend:
    name = "cpu"

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that no model could be built with. See `Backend.check`."""
        if scheme.mode == "dynamic":
            _check_dynamic(scheme)
        elif scheme.pair == "S8U8":
            raise UsageError("int8 activations with uint8 weights have no kernels", "Make --weight-type int8")
        known = _quantizable(scheme)
        unknown = next((op_type for op_type in scheme.op_types or () if op_type not in known), None)
        if unknown is not None:
            close = difflib.get_close_matches(unknown, known, n=3)
            hint = f"Did you mean {', '.join(close)}?" if close else f"It can be {', '.join(known)}"
            raise UsageError(f"no operator {unknown!r} has an int8 form on the {self.name} backend", hint)

    def build(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path
    ) -> Artifact:
        """Write the quantized model to `destination`. See `Backend.build`."""
        onnxruntime()  # the quantizer is part of it: one clear error where it is missing
        self.check(scheme)
        check_names(load_model(prepared.path, external_data="none"), scheme.exclude, prepared.source)
        if scheme.mode == "dynamic":
            _write_dynamic(prepared, scheme, destination)
        else:
            _write_static(prepared, ranges, scheme, destination)
        built = load_model(destination, external_data="none")
        if not is_quantized(built):
            raise ModelError(f"{prepared.source}: nothing in it was quantized", _why_nothing(prepared, scheme))
        session_options = dict(scheme.session_options)
        notes = []
        kept = float_compute_nodes(built)
        if kept:
            disabled = [name for name in session_options.get(_DISABLED, "").split(";") if name]
            session_options[_DISABLED] = ";".join(dict.fromkeys([*disabled, _REQUANTIZER]))
            notes.append(
                f"{len(kept)} compute nodes stay in float; the session option {_DISABLED} keeps ONNX Runtime from "
                "quantizing their weights at load"
            )
        return Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            session_options=session_options,
            notes=tuple(notes),
        )


def float_compute_nodes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of Conv, ConvTranspose, Gemm and MatMul nodes with a constant float weight in a graph that is quantized."""
    graph = model.graph
    if not any(node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in graph.node):
        return ()
    constants = {tensor.name for tensor in graph.initializer}
    return tuple(
        node.name
        for node in graph.node
        if node.op_type in _REQUANTIZED_AT_LOAD and len(node.input) > 1 and node.input[1] in constants
    )


def _quantizable(scheme: Scheme) -> tuple[str, ...]:
    if scheme.mode == "static":
        return quantizable_operators(int8_rules("cpu"))
    from onnxruntime.quantization.registry import IntegerOpsRegistry

    return tuple(sorted({*IntegerOpsRegistry, *_GEMM_IS}))


def _check_dynamic(scheme: Scheme) -> None:
    if not scheme.dynamic_weight_types:
        raise UsageError("dynamic quantization needs a weight type per operator type", "Choose a profile that has them")
    untyped = next((op_type for op_type in scheme.op_types or () if op_type not in scheme.dynamic_weight_types), None)
    if untyped is not None:
        raise UsageError(
            f"the profile has no weight type for dynamic {untyped}", "Name one with --weight-type, or leave it in float"
        )


def _why_nothing(prepared: PreparedModel, scheme: Scheme) -> str:
    """What a user can do about a model in which nothing was quantized, with the first reason that there is."""
    model = load_model(prepared.path, external_data="none")
    for node in int8_outlook(model, int8_rules("cpu")):
        if node.name in scheme.exclude:
            return "Exclude fewer nodes"
        types = scheme.quantized_types
        if node.verdict == "int8" and types is not None and node.op_type not in types:
            return f"It holds {node.op_type}, which the scheme leaves in float: choose other operator types"
        if node.verdict == "float":
            return f"Deploy the float model; {node.op_type} ({node.name}): {node.reason}"
    return "Deploy the float model"


def _write_static(prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path) -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, quantize_static
    from onnxruntime.quantization.calibrate import TensorsData, save_tensors_data

    rules = int8_rules("cpu")
    table = {name: (np.float32(r.low), np.float32(r.high)) for name, r in ranges.items()}
    # The folder is private: the quantizer leaves shape-inferred copies of big models beside the file it reads.
    with tempfile.TemporaryDirectory(prefix="edgeq-ranges-") as folder:
        cache = Path(folder) / "ranges.json"
        # quantize_static reads ranges only as "MinMax"; whatever method derived them, it just uses the two numbers.
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, table), cache)
        try:
            quantize_static(
                prepared.path,
                destination,
                None,
                quant_format=QuantFormat[scheme.format],
                op_types_to_quantize=list(scheme.op_types or quantizable_operators(rules)),
                per_channel=scheme.per_channel,
                reduce_range=scheme.reduce_range,
                activation_type=_quant_type(scheme.activation_type),
                weight_type=_quant_type(scheme.weight_type),
                nodes_to_exclude=sorted({*scheme.exclude, *_float_nodes(prepared, rules)}),
                use_external_data_format=_needs_external_data(prepared.path),
                calibration_cache_path=cache,
                extra_options={
                    "ActivationSymmetric": scheme.activation_symmetric,
                    "WeightSymmetric": scheme.weight_symmetric,
                },
            )
        except ValueError as error:
            if "Quantization parameters are not specified" in str(error):
                raise CalibrationError(
                    f"{prepared.source}: {_one_line(error)}",
                    "The calibration does not cover this tensor: calibrate this model again",
                ) from error
            raise ModelError(
                f"{prepared.source}: onnxruntime's quantizer refuses it: {_one_line(error)}",
                "Keep the node in float with --exclude, or choose another scheme",
            ) from error


def _float_nodes(prepared: PreparedModel, rules: Mapping[str, Rule]) -> list[str]:
    """Nodes of quantizable types that have no integer form as they stand. Q/DQ around them costs time and accuracy,
    and some (a dilated AveragePool) would make a file that ONNX Runtime refuses."""
    outlook = int8_outlook(load_model(prepared.path, external_data="none"), rules)
    return [node.name for node in outlook if node.verdict == "float"]


def _write_dynamic(prepared: PreparedModel, scheme: Scheme, destination: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    by_type: dict[IntegerType, list[str]] = {}
    for op_type in sorted(scheme.quantized_types or ()):
        by_type.setdefault(scheme.dynamic_weight_types[op_type], []).append(op_type)
    nodes = load_model(prepared.path, external_data="none").graph.node
    # The runtime's quantizer takes one weight type a call: one pass a type, each over what the last one left in float.
    source = prepared.path
    with tempfile.TemporaryDirectory(prefix="edgeq-dynamic-") as folder:
        for step, (weight_type, op_types) in enumerate(sorted(by_type.items())):
            last = step == len(by_type) - 1
            target = destination if last else Path(folder) / f"pass{step}.onnx"
            kept = {n.name for n in nodes if n.op_type not in op_types or n.name in scheme.exclude}
            quantize_dynamic(
                source,
                target,
                op_types_to_quantize=sorted({_GEMM_IS.get(op_type, op_type) for op_type in op_types}),
                per_channel=scheme.per_channel,
                reduce_range=scheme.reduce_range,
                weight_type=_quant_type(weight_type),
                nodes_to_exclude=sorted(kept | {f"{name}{_GEMM_SUFFIX}" for name in kept}),
                use_external_data_format=_needs_external_data(source),
            )
            source = target


def _quant_type(name: IntegerType) -> Any:
    from onnxruntime.quantization import QuantType

    return {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}[name]


def _needs_external_data(model: Path) -> bool:
    return sum(file.stat().st_size for file in model_files(model)) >= _EXTERNAL_DATA_FROM


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
