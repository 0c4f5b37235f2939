"""Provide the functions of ONNX Runtime's documentation from 2020 to 2026 that quantize files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.system.places import scratch_folder

from edgeq.calibration.ranges import Range
from edgeq.compat._members import member, name_of_member, quant_type
from edgeq.compat._result import Written, check_written
from edgeq.compat.calibrators import CalibraterBase, CalibratorOptions, as_ranges, ranges_of, read_cache, statistics_of
from edgeq.compat.source import LOG, ModelInput, as_file, as_given, listed, siblings, warn_unknown_nodes
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.model.gemm import gemms_with_factors, plain_gemms
from edgeq.model.graph import clamps, name_of
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.prepare import PreparedModel, save_rewritten
from edgeq.quantization.clamps import find_lasting_clamps
from edgeq.quantization.dynamic import standard_attentions
from edgeq.quantization.params import range_params
from edgeq.quantization.quantizer import quantize_with_ranges, quantizer_files, tensors_data
from edgeq.retargeting.run import retarget
from edgeq.util.outputs import output_file
from edgeq.util.paths import path_of

# Options that onnxruntime's quantizer reads. edgeq uses this quantizer to write the model.
WRITER = frozenset(
    {
        "ActivationRestrictedAsymmetric",
        "ActivationSymmetric",
        "AddQDQPairToWeight",
        "BlockSize",
        "DedicatedQDQPair",
        "DefaultTensorType",
        "EnableSubgraph",
        "ForceQuantizeNoInputCheck",
        "MatMulConstBOnly",
        "MinimumRealRange",
        "OpTypesToExcludeOutputQuantization",
        "QDQDisableWeightAdjustForInt32Bias",
        "QDQKeepRemovableActivations",
        "QDQOpTypePerChannelSupportToAxis",
        "QuantizeBias",
        "TensorQuantOverrides",
        "UseQDQContribOps",
        "WeightSymmetric",
        "extra.Sigmoid.nnapi",
    }
)
# Options that edgeq's calibration reads.
CALIBRATION = frozenset(
    {
        "CalibMaxIntermediateOutputs",
        "CalibMovingAverage",
        "CalibMovingAverageConstant",
        "CalibPercentile",
        "CalibStridedMinMax",
        "CalibTensorRangeSymmetric",
    }
)
_CALIBRATORS = {
    "CalibTensorRangeSymmetric": "symmetric",
    "CalibMovingAverage": "moving_average",
    "CalibPercentile": "percentile",
}
"""Extra option → name of the calibrator's option."""
_SMOOTH = ("SmoothQuant", "SmoothQuantAlpha", "SmoothQuantFolding")


def check_options(extra_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the options.

    Unknown keys are ignored, as in the older functions, but a warning names each key.

    Raises:
        UsageError: the options are not a mapping, or SmoothQuant is set. SmoothQuant needs a module that current
            releases of neural-compressor no longer contain.
    """
    if extra_options is not None and not isinstance(extra_options, Mapping):
        raise UsageError(
            f"extra_options are given as {type(extra_options).__name__}", "Give a dict of names and values"
        )
    options = dict(extra_options or {})
    if options.get("SmoothQuant"):
        raise UsageError(
            "the extra option SmoothQuant needs a module of neural-compressor that its releases no longer have",
            "Leave it out; `edgeq tune` finds the layers to keep in float instead",
        )
    names = WRITER | CALIBRATION | set(_SMOOTH)
    # The older functions ignored a misspelt option, so an error would break scripts that run today.
    for name in sorted(set(options) - names):
        close = difflib.get_close_matches(name, names, n=1)
        LOG.warning("unknown extra option %r is ignored%s", name, f"; did you mean {close[0]}?" if close else "")
    return options


def writer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the quantizer that writes the model. `None` means that an option is not set."""
    selected = {name: value for name, value in options.items() if name in WRITER and value is not None}
    if "TensorQuantOverrides" in selected:
        # The quantizer needs arrays instead of numpy scalars.
        selected["TensorQuantOverrides"] = {
            tensor: [
                {key: np.asarray(value) if isinstance(value, np.generic) else value for key, value in override.items()}
                for override in overrides
            ]
            for tensor, overrides in selected["TensorQuantOverrides"].items()
        }
    return selected


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
    """Calibrate and quantize a model. Every parameter has the meaning that ONNX Runtime's documentation gives.

    edgeq quantizes the model node by node as onnxruntime's quantizer does, but with ranges from edgeq's calibration.
    docs/migration.md describes the differences and their reasons.

    Args:
        quant_format: QuantFormat or its name. Members of the other enumerations can also be given by name.
        calibration_data_reader: a CalibrationDataReader or other data; None if the calibration cache exists.
        calibrate_method: a CalibrationMethod, a class derived from CalibraterBase, or an instance of such a class that
            is ready to collect.
        calibration_providers: accepted but not used, because edgeq calibrates on the CPU.
        calibration_cache_path: a file of ranges. If it exists, edgeq reads it. If not, edgeq writes it.
        optimize_model: a parameter of 2021 to 2022, accepted but not used. This function never optimises the model.
            `edgeq.compat.preprocess` does that before, and ONNX Runtime when it opens the model.

    Raises:
        UsageError, ModelError, DataError, CalibrationError: the arguments, the model, the data or the cache are wrong.
        RuntimeUnavailableError: ONNX Runtime cannot open the result.
    """
    del calibration_providers, optimize_model
    options = check_options(extra_options)
    types = quant_type(activation_type), quant_type(weight_type)
    # The model would be written and checked, and then fail when it is opened.
    if [t.name for t in types] == ["QInt8", "QUInt8"]:
        raise UsageError("int8 activations with uint8 weights have no kernels", "Set weight_type to QuantType.QInt8")
    output = path_of(model_output, "output")
    included, excluded = listed(nodes_to_quantize), listed(nodes_to_exclude)
    with (
        scratch_folder("edgeq-static-") as folder,
        output_file(output, force=True, beside=siblings(model_input, output)) as draft,
    ):
        # The factors of a Gemm are folded first, because ranges and names must fit the rewritten model.
        prepared = _with_plain_gemms(as_given(model_input, Path(folder)), Path(folder))
        warn_unknown_nodes(prepared.model, included, excluded)
        cache = Path(calibration_cache_path) if calibration_cache_path is not None else None
        # Ranges come first: a problem in the data should show before any file is written.
        ranges = _ranges(prepared, calibration_data_reader, calibrate_method, cache, options)
        arguments = {
            "quant_format": member("QuantFormat", quant_format),
            "op_types_to_quantize": listed(op_types_to_quantize),
            "per_channel": per_channel,
            "reduce_range": reduce_range,
            "activation_type": types[0],
            "weight_type": types[1],
            "nodes_to_quantize": included,
            "use_external_data_format": use_external_data_format,
            "fix": "Keep the node in float with nodes_to_exclude, or choose other options",
            "fix_ranges": "The cache does not cover this tensor: delete it",
            "extra_options": writer_options(options),
        }
        float_nodes = {
            *excluded,
            *_kept_clamps(prepared.model, ranges, types[0], options),
            *gemms_with_factors(prepared.model),
        }
        notes = prepared.notes
        try:
            quantize_with_ranges(prepared, draft, ranges, float_nodes=float_nodes, **arguments)
            return check_written(draft, output, notes)
        except RuntimeUnavailableError:
            # Some nodes, such as a dilated AveragePool, cannot run between the Q/DQ nodes that onnxruntime's quantizer
            # writes.
            predicted = predict_int8(prepared.model, int8_rules("cpu"))
            # Only nodes that can never be integers are given up. If there are none, the error stands.
            float_only = {node.name for node in predicted if node.verdict == "float"} - float_nodes
            if not float_only:
                raise
            LOG.warning("kept in float, because they have no integer form: %s", ", ".join(sorted(float_only)))
            quantize_with_ranges(prepared, draft, ranges, float_nodes=float_nodes | float_only, **arguments)
            return check_written(draft, output, notes)


def _kept_clamps(
    model: ir.Model, ranges: Mapping[str, Range], activation_type: Any, options: Mapping[str, Any]
) -> frozenset[str]:
    """Return the Relu and Clip nodes that onnxruntime's quantizer must keep. These are the nodes that
    `find_lasting_clamps` returns, and those for whose input the user set a scale.
    """
    dtype, symmetric = ir.DataType(int(activation_type.tensor_type)), bool(options.get("ActivationSymmetric"))
    overridden = options.get("TensorQuantOverrides") or ()
    # A scale that the user set need not cover the clamp's bounds, so such a clamp must stay.
    free = {name: span for name, span in ranges.items() if name not in overridden}
    overridden_clamps = [node for node in clamps(model.graph) if name_of(node.inputs[0]) in overridden]
    lasting = find_lasting_clamps(model.graph, range_params(free, dtype, symmetric=symmetric))
    return lasting | {str(node.name) for node in overridden_clamps}


def _with_plain_gemms(prepared: PreparedModel, folder: Path) -> PreparedModel:
    """Return the model with plain Gemm nodes, which have neither alpha nor beta, and have one bias value per output.
    onnxruntime's quantizer multiplies a bias by beta but keeps beta, and computes the bias's scale as if alpha were 1.
    For weights with one scale per channel, the quantizer expects one bias value per output. The rewrite adds no node,
    so a user's names and ranges still fit.
    """
    model = prepared.model.clone()
    changed = plain_gemms(model, add_nodes=False)
    if not changed:
        return prepared
    note = f"{changed} Gemm nodes rewritten without factors, with one bias value per output"
    return save_rewritten(prepared, model, folder / "plain.onnx", note)


def _ranges(
    prepared: PreparedModel,
    reader: Any,
    method: Any,
    cache: Path | None,
    options: Mapping[str, Any],
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
    calibrator_options = {_CALIBRATORS[name]: value for name, value in options.items() if name in _CALIBRATORS}
    ranges = ranges_of(statistics, method, CalibratorOptions.parse(calibrator_options))
    # onnxruntime's own writer, so that its tools can read the file too.
    if cache is not None:
        from onnxruntime.quantization import save_tensors_data

        save_tensors_data(tensors_data(ranges, name_of_member(method)), cache)
    return ranges


def _by_users_calibrator(prepared: PreparedModel, reader: Any, method: Any) -> dict[str, Range]:
    # A class gets the five calls in the order of onnxruntime's documentation. An object is ready to collect.
    if isinstance(method, type):
        with scratch_folder("edgeq-calibrator-") as folder:
            augmented = Path(folder) / "augmented_model.onnx"
            calibrator = method(str(prepared.path), [], augmented_model_path=str(augmented))
            calibrator.augment_graph()
            calibrator.create_inference_session()
            calibrator.collect_data(reader)
            return as_ranges(calibrator.compute_data())
    if reader is not None:
        method.collect_data(reader)
    return as_ranges(method.compute_data())


def quantize_dynamic(
    model_input: ModelInput,
    model_output: str | Path,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: Any = "QInt8",
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: Mapping[str, Any] | None = None,
    *,
    activation_type: Any = "QUInt8",
    optimize_model: bool | None = None,
    quant_format: Any = "QOperator",
) -> Written:
    """Quantize weights. The runtime measures the ranges of activations. The parameters are those of ONNX Runtime's
    documentation.

    Args:
        weight_type: QuantType or its name. Matrix products support QInt8 and QUInt8. The tables of Gather also support
            other types.
        activation_type: a parameter of 2020 to 2022. The runtime supports only QUInt8.
        optimize_model: a parameter of 2021 to 2022, accepted but not used.
        quant_format: a parameter of 2022. QDQ is refused, because onnxruntime's function does not accept it either.

    Raises:
        UsageError, ModelError: the arguments or the model are wrong.
        RuntimeUnavailableError: ONNX Runtime cannot open the result.
    """
    from onnxruntime.quantization import quantize_dynamic as write

    del optimize_model
    if member("QuantFormat", quant_format).name != "QOperator":
        raise UsageError(
            "dynamic quantization is written as operators (MatMulInteger, DynamicQuantizeLinear), not as QDQ",
            "Leave quant_format out",
        )
    if quant_type(activation_type).name != "QUInt8":
        raise UsageError(
            "dynamic quantization measures activations as uint8", "Set activation_type to QuantType.QUInt8"
        )
    options = check_options(extra_options)
    for name in sorted(CALIBRATION & set(options)):
        LOG.warning("extra option %r has no effect on dynamic quantization", name)
    integer_type = quant_type(weight_type)
    output = path_of(model_output, "output")
    included, excluded = listed(nodes_to_quantize), listed(nodes_to_exclude)
    with (
        scratch_folder("edgeq-dynamic-") as folder,
        output_file(output, force=True, beside=siblings(model_input, output)) as draft,
    ):
        prepared = as_given(model_input, Path(folder))
        warn_unknown_nodes(prepared.model, included, excluded)
        fix = "Keep the node in float with nodes_to_exclude, or choose other options"
        with quantizer_files(prepared.path, draft, prepared.source, fix, external=use_external_data_format) as files:
            write(
                **files,
                op_types_to_quantize=listed(op_types_to_quantize),
                per_channel=per_channel,
                reduce_range=reduce_range,
                weight_type=integer_type,
                nodes_to_quantize=included,
                # onnxruntime's quantizer mistakes these nodes for its own operator of the same name.
                nodes_to_exclude=[*excluded, *standard_attentions(prepared.model)],
                extra_options=writer_options(options),
            )
        return check_written(draft, output, prepared.notes)


_NAMES = {"QInt8": "int8", "QUInt8": "uint8"}


def quantize_qat(
    model_input: ModelInput,
    model_output: str | Path,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = "QUInt8",
    weight_type: Any = None,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
) -> Written:
    """Replace operators between DequantizeLinear and QuantizeLinear nodes with integer operators.

    ONNX Runtime runs the original model just as fast. To change only the integer types, use `edgeq retarget`.

    Args:
        activation_type: QuantType or its name. Converting int8 activations to uint8 only shifts the zero points, so it
            loses nothing.
        weight_type: QuantType or its name; None keeps the type that training chose.
        per_channel, reduce_range: accepted but not used, because training determined them.
        op_types_to_quantize, nodes_to_quantize: the operators to rewrite. None or empty means all operators.
        nodes_to_exclude: names of nodes that are not rewritten.
        use_external_data_format: accepted but not used, because large models always have their weights next to the
            file.

    Raises:
        ModelError: the model is damaged, or has no Q and DQ nodes with constant scales.
        CheckFailedError: the outputs of the rewritten model differ.
    """
    del use_external_data_format
    if per_channel or reduce_range:
        LOG.warning("per_channel and reduce_range were decided in training; they change nothing here")

    types, included, excluded = map(listed, (op_types_to_quantize, nodes_to_quantize, nodes_to_exclude))

    def is_requested(node: ir.Node) -> bool:
        """Return whether the arguments allow this node to be quantized."""
        return (
            (not types or node.op_type in types)
            and (not included or node.name in included)
            and node.name not in excluded
        )

    with scratch_folder("edgeq-qat-") as folder:
        result = retarget(
            as_file(model_input, Path(folder)),
            model_output,
            format="QOperator",
            activation_type=_integer(activation_type),
            weight_type=_integer(weight_type),
            wanted=is_requested,
            force=True,
        )
    # What stayed in Q/DQ form runs as before, but scripts should see it in their log.
    for line in result.kept:
        LOG.warning("%s", line)
    return Written(result.output, {}, (*result.changes, *result.kept))


def _integer(value: Any) -> str | None:
    if value is None:
        return None
    # Names that retarget does not know are passed on, so that its message lists the valid ones.
    name = str(quant_type(value).name)
    return _NAMES.get(name, name)
