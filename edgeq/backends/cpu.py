"""The CPU backend: ONNX Runtime's quantizer, fed with our ranges, for ONNX Runtime's CPU kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.backends.base import Artifact
from edgeq.calibrate.ranges import Range
from edgeq.errors import CalibrationError, ModelError, UsageError
from edgeq.model.int8_rules import Rule, int8_rules, quantizable_operators
from edgeq.model.load import load_model, model_files
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


class CpuBackend:
    name = "cpu"

    def build(
        self, prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme, destination: Path
    ) -> Artifact:
        """Write the quantized model to `destination`. See `Backend.build`."""
        onnxruntime()  # the quantizer is part of it: one clear error where it is missing
        _check_excluded(prepared, scheme)
        if scheme.mode == "dynamic":
            _write_dynamic(prepared, scheme, destination)
        else:
            _write_static(prepared, ranges, scheme, destination)
        session_options = dict(scheme.session_options)
        notes = []
        kept = float_compute_nodes(load_model(destination))
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


def _check_excluded(prepared: PreparedModel, scheme: Scheme) -> None:
    names = {node.name for node in load_model(prepared.path).graph.node}
    unknown = [name for name in scheme.exclude if name not in names]
    if unknown:
        import difflib

        close = difflib.get_close_matches(unknown[0], names, n=3)
        hint = f"Did you mean {', '.join(close)}?" if close else "List the node names with `edgeq inspect -v`"
        raise UsageError(f"{prepared.source}: no node is named {unknown[0]!r}", hint)


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

    if not scheme.dynamic_weight_types:
        raise UsageError("dynamic quantization needs a weight type per operator type", "Choose a profile that has them")
    by_type: dict[IntegerType, list[str]] = {}
    for op_type, weight_type in sorted(scheme.dynamic_weight_types.items()):
        if scheme.op_types is None or op_type in scheme.op_types:
            by_type.setdefault(weight_type, []).append(op_type)
    # The runtime's quantizer takes one weight type a call: one pass a type, each over what the last one left in float.
    source = prepared.path
    with tempfile.TemporaryDirectory(prefix="edgeq-dynamic-") as folder:
        for step, (weight_type, op_types) in enumerate(sorted(by_type.items())):
            last = step == len(by_type) - 1
            target = destination if last else Path(folder) / f"pass{step}.onnx"
            quantize_dynamic(
                source,
                target,
                op_types_to_quantize=op_types,
                per_channel=scheme.per_channel,
                reduce_range=scheme.reduce_range,
                weight_type=_quant_type(weight_type),
                nodes_to_exclude=list(scheme.exclude),
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
