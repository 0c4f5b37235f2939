"""Run the static quantization command that ONNX Runtime has had since 2025: python -m
edgeq.compat.static_quantize_runner.

The samples are in the test_data_set_N folders next to the model. argparse reads the options, as in the original,
because several of them accept lists of names (`--nodes_to_exclude conv1 conv2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.compat._command import run_printed, run_program
from edgeq.compat._names import find
from edgeq.compat._options import ArgumentParser
from edgeq.compat.files import quantize_static
from edgeq.errors import UsageError
from edgeq.util.record_files import json_object

_INTEGERS = {f"q{sign.lower()}{bits}": f"Q{sign}{bits}" for sign in ("Int", "UInt") for bits in (4, 8, 16)}
# "distribution" gives float ranges and is refused later, with the reason.
_METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile", "distribution": "Distribution"}
_FORMATS = {"qdq": "QDQ", "qoperator": "QOperator"}
# Flag → the extra option that it sets.
_FLAGS = {
    "enable_subgraph": "EnableSubgraph",
    "force_quantize_no_input_check": "ForceQuantizeNoInputCheck",
    "matmul_const_b_only": "MatMulConstBOnly",
    "add_qdq_pair_to_weight": "AddQDQPairToWeight",
    "dedicated_qdq_pair": "DedicatedQDQPair",
    "calib_tensor_range_symmetric": "CalibTensorRangeSymmetric",
    "calib_moving_average": "CalibMovingAverage",
    "use_qdq_contrib_ops": "UseQDQContribOps",
    "qdq_keep_removable_activations": "QDQKeepRemovableActivations",
    "qdq_disable_weight_adjust_for_int32_bias": "QDQDisableWeightAdjustForInt32Bias",
}


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    options = ArgumentParser("edgeq.compat.static_quantize_runner", description="Quantize a model.")
    options.add_argument("-i", "--input_model_path", type=Path, required=True, help="Float model.")
    options.add_argument("-o", "--output_quantized_model_path", type=Path, required=True, help="Quantized model.")
    options.add_argument(
        "--activation_type", choices=list(_INTEGERS), default="quint8", help="Integer type of activations."
    )
    options.add_argument("--weight_type", choices=list(_INTEGERS), default="qint8", help="Integer type of weights.")
    options.add_argument("--quant_format", choices=list(_FORMATS), default="qdq", help="Format of the result.")
    options.add_argument(
        "--calibration_method", choices=list(_METHODS), default="minmax", help="How ranges are derived."
    )
    options.add_argument("--per_channel", action="store_true", help="One weight scale per output channel.")
    options.add_argument("--nodes_to_quantize", nargs="+", help="The only nodes to quantize.")
    options.add_argument("--nodes_to_exclude", nargs="+", help="Nodes to keep in float.")
    options.add_argument("--minimum_real_range", type=float, default=0.0001, help="Minimum width of a range.")
    options.add_argument("--disable_quantize_bias", action="store_true", help="Biases stay float.")
    options.add_argument("--quantize_bias", action="store_true", help="Biases become integers (the default).")
    options.add_argument("--tensor_quant_overrides", type=Path, help="JSON: {tensor: [{scale, zero_point}]}.")
    options.add_argument(
        "--op_types_to_exclude_output_quantization",
        nargs="+",
        default=[],
        help="Operator types whose outputs stay float.",
    )
    options.add_argument(
        "--op_per_channel_axis",
        nargs=2,
        action="append",
        default=[],
        metavar=("OP_TYPE", "AXIS"),
        help="Channel axis of an operator type's weights.",
    )
    # These flags only set extra options, so the table is their whole definition.
    for flag, option in _FLAGS.items():
        options.add_argument(f"--{flag}", action="store_true", help=f"The extra option {option}.")
    return options


def run(arguments: Sequence[str]) -> str:
    """Run the command with the given arguments and return the line to print."""
    options = parser().parse_args(arguments)
    extra: dict[str, Any] = {option: getattr(options, flag) for flag, option in _FLAGS.items()}
    extra |= {
        "QuantizeBias": not options.disable_quantize_bias,
        "MinimumRealRange": options.minimum_real_range,
        "OpTypesToExcludeOutputQuantization": options.op_types_to_exclude_output_quantization,
        "QDQOpTypePerChannelSupportToAxis": {name: int(axis) for name, axis in options.op_per_channel_axis},
        "TensorQuantOverrides": _overrides(options.tensor_quant_overrides),
    }
    # The samples are in folders next to the model, as in the original command.
    result = quantize_static(
        options.input_model_path,
        options.output_quantized_model_path,
        options.input_model_path.absolute().parent,
        quant_format=_FORMATS[options.quant_format],
        activation_type=_INTEGERS[options.activation_type],
        weight_type=_INTEGERS[options.weight_type],
        calibrate_method=_METHODS[options.calibration_method],
        per_channel=options.per_channel,
        nodes_to_quantize=options.nodes_to_quantize,
        nodes_to_exclude=options.nodes_to_exclude,
        extra_options=extra,
    )
    return f"{result.output}: {options.quant_format} {options.activation_type} {options.weight_type}"


def _overrides(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    fix = 'Write {"tensor": [{"scale": 0.005, "zero_point": 12}]}'
    content = json_object(path, UsageError, fix)
    try:
        return {
            tensor: [
                {
                    **entry,
                    # JSON has only one type of numbers, and the quantizer checks the dtype of these arrays.
                    "scale": np.array(entry["scale"], np.float32),
                    "zero_point": np.array(entry["zero_point"]),
                }
                for entry in entries
            ]
            for tensor, entries in content.items()
        }
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise UsageError(f"{path} does not contain overrides ({error!r})", fix) from error


main = partial(run_printed, run)


def __getattr__(name: str) -> Any:
    return find(name, "static_quantize_runner")


if __name__ == "__main__":
    run_program(main)
