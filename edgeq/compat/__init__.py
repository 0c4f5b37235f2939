"""Provide the interfaces of ONNX Runtime's quantization tools of 2019 to 2026. Change the import and keep the script.

    from onnxruntime.quantization import quantize_static, CalibrationDataReader, QuantType      # before
    from edgeq.compat import quantize_static, CalibrationDataReader, QuantType                  # after

docs/migration.md lists for each era what stays the same and what is better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeq.compat import _names

# For type checkers alone: importing all of this would make `import edgeq.compat` as slow as onnxruntime's tools.
if TYPE_CHECKING:
    from edgeq.compat.calibrators import (
        CalibraterBase,
        CalibratorBase,
        calibrate,
        create_calibrator,
        write_calibration_table,
    )
    from edgeq.compat.files import quantize_dynamic, quantize_qat, quantize_static
    from edgeq.compat.legacy import quantize_model
    from edgeq.compat.preprocess import quant_pre_process
    from edgeq.compat.quantize import quantize

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
    return _names.find(name)


# Completion in notebooks shows the names of onnxruntime as well.
def __dir__() -> list[str]:
    return sorted(_names.names())
