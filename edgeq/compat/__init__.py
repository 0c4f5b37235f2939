"""The interfaces of ONNX Runtime's quantization tools, 2019 to 2026: change the import, keep the script.

    from onnxruntime.quantization import quantize_static, CalibrationDataReader, QuantType      # before
    from edgeq.compat import quantize_static, CalibrationDataReader, QuantType                  # after

docs/migration.md says, era by era, what is the same and what is better.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeq.compat.calibrators import CalibraterBase, CalibratorBase, create_calibrator
    from edgeq.compat.configs import quantize
    from edgeq.compat.dynamic import quantize_dynamic
    from edgeq.compat.legacy import quantize_model
    from edgeq.compat.preprocess import quant_pre_process
    from edgeq.compat.qat import quantize_qat
    from edgeq.compat.static import quantize_static
    from edgeq.compat.tables import calibrate, write_calibration_table

_OWN = {
    "CalibraterBase": "calibrators",
    "CalibratorBase": "calibrators",
    "calibrate": "tables",
    "create_calibrator": "calibrators",
    "quant_pre_process": "preprocess",
    "quantize": "configs",
    "quantize_dynamic": "dynamic",
    "quantize_model": "legacy",
    "quantize_qat": "qat",
    "quantize_static": "static",
    "write_calibration_table": "tables",
    **dict.fromkeys(("ImageNetDataReader", "ResNet50DataReader", "YoloV3DataReader"), "readers"),
    **dict.fromkeys(("YoloV3VariantDataReader", "YoloV3VisionDataReader"), "readers"),
    **dict.fromkeys(("ImageClassificationEvaluator", "YoloV3Evaluator", "YoloV3VariantEvaluator"), "evaluators"),
}
# Values and configurations that say what to do and do nothing themselves are onnxruntime's own: scripts mix imports.
_ONNXRUNTIMES = frozenset(
    {
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
    if name in _ONNXRUNTIMES:
        from edgeq.compat._onnxruntime import quantization_tools

        return getattr(quantization_tools(), name)
    raise AttributeError(f"module 'edgeq.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OWN, *_ONNXRUNTIMES])
