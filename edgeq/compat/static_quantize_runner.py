"""python -m edgeq.compat.static_quantize_runner: the command of that name of ONNX Runtime, with its options.

Calibrates on the test_data_set_N folders beside the model, or on --calibration_dataset, and calls `quantize_static`.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgeq.compat._command import one_line_errors
from edgeq.errors import DataError, UsageError

_TYPES = {
    "qint8": "QInt8",
    "quint8": "QUInt8",
    "qint16": "QInt16",
    "quint16": "QUInt16",
    "qint4": "QInt4",
    "quint4": "QUInt4",
    "qfloat8e4m3fn": "QFLOAT8E4M3FN",
}
_METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile", "distribution": "Distribution"}
_FORMATS = {"qdq": "QDQ", "qoperator": "QOperator"}
_MAX_OVERRIDES = 2**24
"""Bytes of a file of overrides."""

# Options that are an entry of extra_options under another name.
_EXTRA = {
    "enable_subgraph": ("EnableSubgraph", "Quantize the bodies of If, Loop and Scan too."),
    "force_quantize_no_input_check": ("ForceQuantizeNoInputCheck", "Quantize MaxPool, Transpose and the like always."),
    "matmul_const_b_only": ("MatMulConstBOnly", "Only MatMul with a constant matrix."),
    "add_qdq_pair_to_weight": ("AddQDQPairToWeight", "Keep float weights, with a pair of Q/DQ behind."),
    "dedicated_qdq_pair": ("DedicatedQDQPair", "A pair of Q/DQ for each reader of a tensor."),
    "calib_tensor_range_symmetric": ("CalibTensorRangeSymmetric", "Ranges symmetric about zero."),
    "calib_moving_average": ("CalibMovingAverage", "minmax: means of the extrema of the samples."),
    "use_qdq_contrib_ops": ("UseQDQContribOps", "Q/DQ of ONNX Runtime's own domain."),
    "qdq_keep_removable_activations": ("QDQKeepRemovableActivations", "Keep Relu and Clip nodes."),
    "qdq_disable_weight_adjust_for_int32_bias": ("QDQDisableWeightAdjustForInt32Bias", "Never widen a weight's scale."),
}


def parser() -> argparse.ArgumentParser:
    """The options of the older command, which takes lists after one option."""
    made = argparse.ArgumentParser("static_quantize_runner", description="Calibrate and quantize a model.")
    made.add_argument("-i", "--input_model_path", required=True, type=Path, help="Float model.")
    made.add_argument("-o", "--output_quantized_model_path", required=True, type=Path, help="Result.")
    made.add_argument("--calibration_dataset", help="Samples; else the test_data_set_N folders beside the model.")
    made.add_argument("--preprocess", help="Preprocessing of the samples, as `edgeq preprocess` lists them.")
    made.add_argument("--activation_type", choices=_TYPES, default="quint8", help="Integer type. [quint8]")
    made.add_argument("--weight_type", choices=_TYPES, default="qint8", help="Integer type. [qint8]")
    made.add_argument("--calibration_method", choices=_METHODS, default="minmax", help="How ranges are found. [minmax]")
    made.add_argument("--quant_format", choices=_FORMATS, default="qdq", help="Form of the result. [qdq]")
    made.add_argument("--per_channel", action="store_true", help="One weight scale a channel.")
    made.add_argument("--nodes_to_quantize", nargs="+", metavar="NODE", help="Only these.")
    made.add_argument("--nodes_to_exclude", nargs="+", metavar="NODE", help="Not these.")
    made.add_argument("--op_types_to_exclude_output_quantization", nargs="+", metavar="TYPE", help="Outputs in float.")
    made.add_argument("--op_per_channel_axis", nargs=2, action="append", metavar=("TYPE", "AXIS"), help="Of weights.")
    made.add_argument("--tensor_quant_overrides", type=Path, help="JSON: tensor → [{scale, zero_point}].")
    made.add_argument("--minimum_real_range", type=float, help="The least that a range covers.")
    made.add_argument("--quantize_bias", action="store_true", help="As is done anyway.")
    made.add_argument("--disable_quantize_bias", action="store_true", help="Keep biases in float.")
    for option, (_, text) in _EXTRA.items():
        made.add_argument(f"--{option}", action="store_true", help=text)
    return made


def extra_options(given: argparse.Namespace) -> dict[str, Any]:
    """The entries of `quantize_static`'s extra_options that the command line sets."""
    found: dict[str, Any] = {name: True for option, (name, _) in _EXTRA.items() if getattr(given, option)}
    if given.disable_quantize_bias:
        found["QuantizeBias"] = False
    if given.minimum_real_range is not None:
        found["MinimumRealRange"] = given.minimum_real_range
    if given.op_types_to_exclude_output_quantization:
        found["OpTypesToExcludeOutputQuantization"] = given.op_types_to_exclude_output_quantization
    if given.op_per_channel_axis:
        found["QDQOpTypePerChannelSupportToAxis"] = {kind: _axis(axis) for kind, axis in given.op_per_channel_axis}
    if given.tensor_quant_overrides is not None:
        found["TensorQuantOverrides"] = read_overrides(given.tensor_quant_overrides, given)
    return found


def read_overrides(path: Path, given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Overrides of a JSON file, with numbers as arrays of the types that the tensors will have.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    import numpy as np
    from onnxruntime.quantization import QuantType

    from edgeq.model.load import load_model

    weights = {t.name for t in load_model(given.input_model_path, external_data="none").graph.initializer}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, entries in _json(path).items():
        kind = QuantType[_TYPES[given.weight_type if name in weights else given.activation_type]]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path}: {name!r} is not a list of objects", 'Write {"tensor": [{"scale": …}]}')
        found[name] = []
        for entry in entries:
            values = dict(entry)
            try:
                if "quant_type" in values:
                    kind = QuantType[_TYPES[str(values["quant_type"]).lower()]]
                if "scale" in values:
                    values["scale"] = np.array(values["scale"], np.float32)
                if "zero_point" in values:
                    values["zero_point"] = np.array(values["zero_point"], _numpy_type(kind))
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise DataError(f"{path}: {name!r}: {error}", "Give numbers that fit the type") from error
            found[name].append({**values, "quant_type": kind})
    return found


def run(arguments: Sequence[str] | None = None) -> str:
    """Do what the command line says; the line to print."""
    from edgeq.compat.readers import DataReader

    given = parser().parse_args(arguments)
    model = given.input_model_path
    reader = DataReader(given.calibration_dataset or model.absolute().parent, model, preprocess=given.preprocess)
    quantize_static = importlib.import_module("edgeq.compat").quantize_static
    quantize_static(
        model,
        given.output_quantized_model_path,
        reader,
        quant_format=_FORMATS[given.quant_format],
        per_channel=given.per_channel,
        activation_type=_TYPES[given.activation_type],
        weight_type=_TYPES[given.weight_type],
        nodes_to_quantize=given.nodes_to_quantize,
        nodes_to_exclude=given.nodes_to_exclude,
        calibrate_method=_METHODS[given.calibration_method],
        extra_options=extra_options(given),
    )
    pair = f"activations {given.activation_type}, weights {given.weight_type}"
    return f"{given.output_quantized_model_path}: {_FORMATS[given.quant_format]}, {pair}"


def _numpy_type(kind: Any) -> Any:
    from onnx import helper

    return helper.tensor_dtype_to_np_dtype(kind.tensor_type)


def _axis(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"--op_per_channel_axis: {text!r} is no axis", "Write --op_per_channel_axis MatMul 1"
        ) from None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_OVERRIDES:
            raise DataError(f"{path} is larger than {_MAX_OVERRIDES} bytes", "Keep only overrides")
        plain = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON: {error}", "Check the file") from error
    if not isinstance(plain, dict):
        raise DataError(f"{path} holds no object", 'Write {"tensor": [{"scale": …, "zero_point": …}]}')
    return plain


@one_line_errors
def main() -> None:
    """The command."""
    click.echo(run())


if __name__ == "__main__":
    main()
