"""The interfaces of ONNX Runtime's quantization tools, 2019 to 2026: change the import, keep the script.

    from onnxruntime.quantization import quantize_static, CalibrationDataReader, QuantType      # before
    from edgeq.compat import quantize_static, CalibrationDataReader, QuantType                  # after

docs/migration.md says, era by era, what is the same and what is better.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeq.compat.calibration import calibrate, write_calibration_table
    from edgeq.compat.calibrators import CalibraterBase, CalibratorBase, create_calibrator
    from edgeq.compat.configs import quantize
    from edgeq.compat.files import quantize_dynamic, quantize_qat, quantize_static
    from edgeq.compat.legacy import quantize_model
    from edgeq.compat.preprocess import quant_pre_process

_OWN = {
    "CalibraterBase": "calibrators",
    "CalibratorBase": "calibrators",
    "create_calibrator": "calibrators",
    "quant_pre_process": "preprocess",
    "quantize_dynamic": "files",
    "quantize_model": "legacy",
    "quantize_qat": "files",
    "quantize_static": "files",
    "write_calibration_table": "calibration",
    **dict.fromkeys(("ImageNetDataReader", "ResNet50DataReader", "YoloV3DataReader"), "readers"),
    **dict.fromkeys(("YoloV3VariantDataReader", "YoloV3VisionDataReader"), "readers"),
    **dict.fromkeys(("ImageClassificationEvaluator", "YoloV3Evaluator", "YoloV3VariantEvaluator"), "evaluators"),
}
# Values and configurations that say what to do and do nothing themselves are onnxruntime's own: scripts mix imports.
_ONNXRUNTIMES = frozenset(
    {
        "CudaQuantizer",
        "CalibrationDataReader",
        "CalibrationMethod",
        "DynamicQuantConfig",
        "MinMaxCalibrater",
        "QDQQuantizer",
        "QuantFormat",
        "QuantType",
        "QuantizationMode",
        "StaticQuantConfig",
        "TensorData",
        "TensorsData",
        "get_qdq_config",
        "load_tensors_data",
        "save_tensors_data",
    }
)

# Modules of the same name as onnxruntime's; `calibrate` and `quantize` are functions too.
_MODULES = frozenset(
    {
        "CalTableFlatBuffers",
        "base_quantizer",
        "calibrate",
        "cuda_quantizer",
        "execution_providers",
        "matmul_4bits_quantizer",
        "matmul_bnb4_quantizer",
        "matmul_nbits_quantizer",
        "onnx_model",
        "onnx_quantizer",
        "preprocess",
        "qdq_loss_debug",
        "qdq_quantizer",
        "quant_utils",
        "quantize",
        "registry",
        "shape_inference",
        "static_quantize_runner",
        "tensor_quant_overrides",
    }
)

__all__ = [
    "CalibraterBase",
    "CalibratorBase",
    "calibrate",
    "create_calibrator",
    "quant_pre_process",
    "quantize",
    "quantize_dynamic",
    "quantize_model",
    "quantize_qat",
    "quantize_static",
    "write_calibration_table",
]


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(importlib.import_module(f"edgeq.compat.{_OWN[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"edgeq.compat.{name}")
    if name in _ONNXRUNTIMES:
        from edgeq.compat._onnxruntime import quantization_tools

        return getattr(quantization_tools(), name)
    from edgeq.compat._left_out import LEFT_OUT, why

    raise AttributeError(why(name) if name in LEFT_OUT else f"module 'edgeq.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN, *_MODULES, *_ONNXRUNTIMES})
