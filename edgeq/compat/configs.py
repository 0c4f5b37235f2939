"""`quantize`, which was two functions: of a ModelProto until 2020, of files with a configuration since 2022."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx

from edgeq.compat.files import quantize_dynamic, quantize_static
from edgeq.compat.legacy import quantize_model
from edgeq.compat.matmul_nbits_quantizer import in_blocks
from edgeq.compat.source import ModelInput, Written
from edgeq.errors import UsageError
from edgeq.model.load import path_of

_COMMON = (
    "op_types_to_quantize",
    "nodes_to_quantize",
    "nodes_to_exclude",
    "per_channel",
    "reduce_range",
    "weight_type",
    "use_external_data_format",
    "extra_options",
)
_STATIC = (
    *_COMMON,
    "calibration_data_reader",
    "calibrate_method",
    "quant_format",
    "activation_type",
    "calibration_providers",
)


def quantize(*arguments: Any, **options: Any) -> Written | onnx.ModelProto:
    """Either of the two, chosen by the arguments.

    `quantize(model_input, model_output, quant_config)`: StaticQuantConfig, DynamicQuantConfig, what get_qdq_config or
    get_qnn_qdq_config gives, or a configuration of MatMulNBitsQuantizer.
    `quantize(model, per_channel=False, nbits=8, quantization_mode=…, static=False, …)`: a ModelProto in, a ModelProto
    out; see `edgeq.compat.legacy.quantize_model`.
    """
    names_output = len(arguments) > 1 and isinstance(arguments[1], str | os.PathLike)
    if names_output or "model_output" in options or "quant_config" in options:
        return quantize_with_config(*arguments, **options)
    model = arguments[0] if arguments else options.get("model")
    if not isinstance(model, onnx.ModelProto):
        raise UsageError(
            f"quantize takes a ModelProto here, not {type(model).__name__}",
            "Load it with onnx.load, or give model_output and quant_config",
        )
    return quantize_model(*arguments, **options)


def quantize_with_config(model_input: ModelInput, model_output: str | Path, quant_config: Any) -> Written:
    """Quantize a file by a configuration object of onnxruntime.

    Raises:
        UsageError: the object is no configuration. Else as quantize_static and quantize_dynamic.
    """
    names = _STATIC if hasattr(quant_config, "calibration_data_reader") else _COMMON
    if all(hasattr(quant_config, name) for name in names):
        chosen = {name: getattr(quant_config, name) for name in names}
        function = quantize_static if names is _STATIC else quantize_dynamic
        return function(model_input, model_output, **chosen)
    if not hasattr(quant_config, "algorithm"):
        raise UsageError(
            f"{type(quant_config).__name__} is no quantization configuration",
            "Give a StaticQuantConfig, a DynamicQuantConfig or a weight-only configuration",
        )
    return in_blocks(model_input, path_of(model_output, "output"), algo_config=quant_config)
