"""Replace `onnxruntime.quantization.quantize`, both the module and the function of the same name.

The function took a ModelProto until 2020. Since 2022, it takes files and a configuration.
"""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import onnx

from edgeq.compat._callable import make_callable
from edgeq.compat._names import find
from edgeq.compat._result import Written
from edgeq.compat.files import quantize_dynamic, quantize_static
from edgeq.compat.legacy import quantize_model
from edgeq.compat.matmul_nbits_quantizer import in_blocks
from edgeq.compat.source import ModelInput
from edgeq.errors import UsageError
from edgeq.util.paths import path_of


def quantize(*arguments: Any, **options: Any) -> Written | onnx.ModelProto:
    """Call one of the two functions of this name. The arguments decide which.

    `quantize(model_input, model_output, quant_config)` accepts a StaticQuantConfig, a DynamicQuantConfig, the result of
    get_qdq_config or get_qnn_qdq_config, or a configuration of MatMulNBitsQuantizer. `quantize(model,
    per_channel=False, nbits=8, quantization_mode=…, static=False, …)` accepts and returns a ModelProto; see
    `edgeq.compat.legacy.quantize_model`.
    """
    # The second positional argument was a boolean until 2020, and is the path of the output since 2022.
    names_output = len(arguments) > 1 and isinstance(arguments[1], str | os.PathLike)
    if names_output or "model_output" in options or "quant_config" in options:
        return quantize_with_config(*arguments, **options)
    model = arguments[0] if arguments else options.get("model")
    if not isinstance(model, onnx.ModelProto):
        raise UsageError(
            f"quantize takes a ModelProto here, not {type(model).__name__}",
            "Load it with onnx.load, or give model_output and quant_config",
        )
    # All that is left is the form of 2019, which takes a model in memory.
    return quantize_model(*arguments, **options)


def quantize_with_config(model_input: ModelInput, model_output: str | Path, quant_config: Any) -> Written:
    """Quantize a file as a configuration object of onnxruntime specifies.

    Raises:
        UsageError: the object is not a configuration. For other errors, see quantize_static and quantize_dynamic.
    """
    # onnxruntime's configurations have no common base class, so their attributes tell them apart.
    if hasattr(quant_config, "algorithm"):
        return in_blocks(model_input, path_of(model_output, "output"), algo_config=quant_config)
    if not hasattr(quant_config, "nodes_to_quantize"):
        raise UsageError(
            f"{type(quant_config).__name__} is not a quantization configuration",
            "Give a StaticQuantConfig, a DynamicQuantConfig or a weight-only configuration",
        )
    function = quantize_static if hasattr(quant_config, "calibration_data_reader") else quantize_dynamic
    parameters = [name for name in signature(function).parameters if hasattr(quant_config, name)]
    return function(model_input, model_output, **{name: getattr(quant_config, name) for name in parameters})


def __getattr__(name: str) -> Any:
    return find(name, "quantize")


make_callable(__name__, "edgeq.compat.quantize:quantize")
