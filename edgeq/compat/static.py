"""quantize_static of ONNX Runtime's documentation, 2020 to 2026, over edgeq's calibration and checks."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.atomic import output_file
from edgeq.backends.quantizer import needs_external_data, one_line, quiet
from edgeq.calibrate.ranges import Range
from edgeq.compat.calibration import as_ranges, as_tensors_data, ranges_of, read_cache, statistics_of
from edgeq.compat.calibrators import CalibraterBase
from edgeq.compat.enums import member, quant_type
from edgeq.compat.extra_options import check_options, writer_options
from edgeq.compat.legacy_params import clamp_bounds, single_reader_clamps
from edgeq.compat.source import LOG, ModelInput, Written, as_given, checked, warn_unknown_nodes
from edgeq.errors import CalibrationError, ModelError, RuntimeUnavailableError, UsageError
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.load import load_model
from edgeq.model.prepare import PreparedModel
from edgeq.scheme import IntegerType


def quantize_static(
    model_input: ModelInput,
    model_output: str | Path,
    calibration_data_reader: Any = None,
    quant_format: Any = "QDQ",
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = "QInt8",
    weight_type: Any = "QInt8",
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: Any = "MinMax",
    calibration_providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | Path | None = None,
    *,
    optimize_model: bool | None = None,
) -> Written:
    """Calibrate and quantize a model; every parameter has the meaning of ONNX Runtime's documentation.

    The model is quantized node by node as onnxruntime's quantizer does it, from ranges of edgeq's calibration. See
    docs/migration.md for what differs, and why it is better.

    Args:
        quant_format: QuantFormat, or its name; so for the other enumerations.
        calibration_data_reader: a CalibrationDataReader or other data; None with a cache that exists.
        calibrate_method: also a class derived from CalibraterBase, or an object of one that is ready to collect.
        calibration_providers: accepted; edgeq calibrates on the CPU.
        calibration_cache_path: ranges are read from it if it exists, and written to it if not.
        optimize_model: of the documentation of 2021 to 2022; optimisation before quantization is `edgeq preprocess`'
            and ONNX Runtime's own business, and False is always what is done.

    Raises:
        UsageError, ModelError, DataError, CalibrationError: bad arguments, model, data or cache.
        RuntimeUnavailableError: ONNX Runtime does not take the result.
    """
    del calibration_providers, optimize_model
    options = check_options(extra_options)
    types = quant_type(activation_type), quant_type(weight_type)
    if [t.name for t in types] == ["QInt8", "QUInt8"]:
        raise UsageError("int8 activations with uint8 weights have no kernels", "Make weight_type QuantType.QInt8")
    output = Path(model_output)
    with tempfile.TemporaryDirectory(prefix="edgeq-static-") as folder, output_file(output, force=True) as draft:
        prepared = as_given(model_input, Path(folder))
        model = load_model(prepared.path, external_data="none")
        warn_unknown_nodes(model, nodes_to_quantize, nodes_to_exclude)
        cache = Path(calibration_cache_path) if calibration_cache_path is not None else None
        signed = types[0].name.startswith("QInt")
        ranges = _ranges(
            prepared, calibration_data_reader, calibrate_method, cache, options, "int8" if signed else "uint8"
        )
        arguments = {
            "quant_format": member("QuantFormat", quant_format),
            "op_types_to_quantize": list(op_types_to_quantize or []),
            "per_channel": per_channel,
            "reduce_range": reduce_range,
            "activation_type": types[0],
            "weight_type": types[1],
            "nodes_to_quantize": list(nodes_to_quantize or []),
            "use_external_data_format": use_external_data_format or needs_external_data(prepared.path),
            "extra_options": writer_options(options),
        }
        kept = {*(nodes_to_exclude or ()), *clamps_that_must_stay(model, options.get("TensorQuantOverrides") or ())}
        notes = prepared.notes
        try:
            write_static(prepared, draft, ranges, kept, arguments)
            return checked(draft, output, notes)
        except RuntimeUnavailableError:
            # Some nodes (a dilated AveragePool) cannot run between Q/DQ as onnxruntime's quantizer writes them.
            predicted = predict_int8(prepared.model, int8_rules("cpu"))
            float_only = {node.name for node in predicted if node.verdict == "float"} - kept
            if not float_only:
                raise
            LOG.warning("kept in float, for want of an integer form: %s", ", ".join(sorted(float_only)))
            write_static(prepared, draft, ranges, kept | float_only, arguments)
            return checked(draft, output, notes)


def write_static(
    prepared: PreparedModel,
    destination: Path,
    ranges: Mapping[str, Range],
    kept: Collection[str],
    arguments: Mapping[str, Any],
) -> None:
    """onnxruntime's quantizer, fed with ranges instead of data. Raises ModelError or CalibrationError."""
    from onnxruntime.quantization import CalibrationMethod, TensorsData, quantize_static, save_tensors_data

    table = {name: (np.float32(r.low), np.float32(r.high)) for name, r in ranges.items()}
    with tempfile.TemporaryDirectory(prefix="edgeq-ranges-") as folder:
        cache = Path(folder) / "ranges.json"
        # Whatever method derived them: as "MinMax", the two numbers are taken as they are.
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, table), cache)
        try:
            with quiet():
                quantize_static(
                    prepared.path,
                    destination,
                    None,
                    nodes_to_exclude=sorted(kept),
                    calibration_cache_path=cache,
                    **arguments,
                )
        except (ValueError, RuntimeError, TypeError, NotImplementedError, KeyError) as error:
            if "Quantization parameters are not specified" in str(error):
                raise CalibrationError(
                    f"{prepared.source}: {one_line(error)}", "The cache does not cover this tensor: delete it"
                ) from error
            raise ModelError(
                f"{prepared.source}: onnxruntime's quantizer refuses it: {one_line(error)}",
                "Keep the node in float with nodes_to_exclude, or choose other options",
            ) from error


def clamps_that_must_stay(model: onnx.ModelProto, overridden: Collection[str] = ()) -> frozenset[str]:
    """Relu and Clip nodes that onnxruntime's quantizer drops although the scale of their input does not do their work:
    somebody else reads that input too, so it keeps its own range; the user has set the scale; or the interval of the
    Clip leaves out zero, which every scale has in it."""
    alone = {node.name for node in single_reader_clamps(model)}
    constants = {t.name: t for t in model.graph.initializer}
    kept = set()
    for node in model.graph.node:
        if node.op_type in ("Relu", "Clip"):
            bounds = clamp_bounds(node, constants)
            free = not {node.input[0], node.output[0]} & set(overridden)
            if node.name not in alone or not free or bounds is None or not bounds[0] <= 0 <= bounds[1]:
                kept.add(node.name)
    return frozenset(kept)


def _ranges(
    prepared: PreparedModel,
    reader: Any,
    method: Any,
    cache: Path | None,
    options: Mapping[str, Any],
    activation_type: IntegerType,
) -> dict[str, Range]:
    if isinstance(method, CalibraterBase) or (isinstance(method, type) and issubclass(method, CalibraterBase)):
        return _by_users_calibrator(prepared, reader, method)
    if cache is not None and cache.exists():
        return read_cache(cache, method)
    if reader is None:
        raise UsageError(
            "there is neither a calibration_data_reader nor a calibration_cache_path that exists", "Give one"
        )
    statistics = statistics_of(prepared, reader, stride=options.get("CalibStridedMinMax"))
    ranges = ranges_of(statistics, method, options, activation_type)
    if cache is not None:
        from onnxruntime.quantization import save_tensors_data

        save_tensors_data(as_tensors_data(ranges, method), cache)
    return ranges


def _by_users_calibrator(prepared: PreparedModel, reader: Any, method: Any) -> dict[str, Range]:
    if isinstance(method, type):
        with tempfile.TemporaryDirectory(prefix="edgeq-calibrator-") as folder:
            augmented = Path(folder) / "augmented_model.onnx"
            calibrator = method(str(prepared.path), [], augmented_model_path=str(augmented))
            calibrator.augment_graph()
            calibrator.create_inference_session()
            calibrator.collect_data(reader)
            return as_ranges(calibrator.compute_data())
    if reader is not None:
        method.collect_data(reader)
    return as_ranges(method.compute_data())
