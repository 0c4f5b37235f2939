"""The CPU backend: ONNX Runtime's quantizer, fed with our ranges, for ONNX Runtime's CPU kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from edgeq.backends.base import Artifact
from edgeq.backends.dynamic import write_dynamic
from edgeq.backends.quantizer import needs_external_data, one_line, quant_type
from edgeq.backends.stored import store_weights
from edgeq.backends.weight_only import write_weight_only
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.tensors import constant_tensors
from edgeq.errors import CalibrationError, ModelError, UsageError
from edgeq.model.int8_rules import Rule, int8_rules, quantizable_operators, slow_fusions
from edgeq.model.load import load_model, save_model
from edgeq.model.outlook import int8_outlook
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import Scheme
from edgeq.session import onnxruntime

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
        notes: list[str] = []
        if scheme.mode == "dynamic":
            notes.extend(write_dynamic(prepared, scheme, destination))
        elif scheme.mode == "weight-only":
            notes.extend(write_weight_only(prepared, scheme, destination))
        else:
            _write_static(prepared, ranges, scheme, destination)
        notes.extend(_store(scheme, destination))
        written = load_model(destination, external_data="none")
        session_options = dict(scheme.session_options)
        disabled = [name for name in session_options.get(_DISABLED, "").split(";") if name]
        kept = float_compute_nodes(written)
        if kept:
            disabled.append(_REQUANTIZER)
            notes.append(
                f"{len(kept)} compute nodes stay in float; the session option {_DISABLED} keeps ONNX Runtime from "
                "quantizing their weights at load"
            )
        slow = slow_fusions(self.name, written)
        for fusion in slow:
            disabled.append(fusion.optimizer)
            notes.append(f"without ONNX Runtime's {fusion.optimizer}: {fusion.reason}")
        if disabled:
            session_options[_DISABLED] = ";".join(dict.fromkeys(disabled))
        return Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            session_options=session_options,
            notes=tuple(notes),
        )


def float_compute_nodes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of Conv, ConvTranspose, Gemm and MatMul nodes with a constant float weight in a graph that has Q nodes."""
    graph = model.graph
    if not any(node.op_type == "QuantizeLinear" for node in graph.node):
        return ()
    constants = constant_tensors(model)
    integers = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return tuple(
        node.name
        for node in graph.node
        if node.op_type in _REQUANTIZED_AT_LOAD
        and len(node.input) > 1
        and node.input[1] in constants
        and node.input[1] not in integers
    )


def _store(scheme: Scheme, destination: Path) -> tuple[str, ...]:
    if not scheme.stored_types:
        return ()
    model = load_model(destination, external_data="all")
    stored = store_weights(model, scheme.stored_types, scheme.exclude)
    if not stored:
        return ()
    save_model(model, destination)
    return (f"{len(stored)} weights of layers that compute in float are 8-bit integers in the file",)


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
                activation_type=quant_type(scheme.activation_type),
                weight_type=quant_type(scheme.weight_type),
                nodes_to_exclude=sorted({*scheme.exclude, *_float_nodes(prepared, rules)}),
                use_external_data_format=needs_external_data(prepared.path),
                calibration_cache_path=cache,
                extra_options={
                    "ActivationSymmetric": scheme.activation_symmetric,
                    "WeightSymmetric": scheme.weight_symmetric,
                },
            )
        except ValueError as error:
            if "Quantization parameters are not specified" in str(error):
                raise CalibrationError(
                    f"{prepared.source}: {one_line(error)}",
                    "The calibration does not cover this tensor: calibrate this model again",
                ) from error
            raise ModelError(
                f"{prepared.source}: onnxruntime's quantizer refuses it: {one_line(error)}",
                "Keep the node in float with --exclude, or choose another scheme",
            ) from error


def _float_nodes(prepared: PreparedModel, rules: Mapping[str, Rule]) -> list[str]:
    """Nodes of quantizable types that have no integer form as they stand. Q/DQ around them costs time and accuracy,
    and some (a dilated AveragePool) would make a file that ONNX Runtime refuses."""
    outlook = int8_outlook(load_model(prepared.path, external_data="none"), rules)
    return [node.name for node in outlook if node.verdict == "float"]
