"""Stands for `onnxruntime.quantization.quant_utils`: QuantType, QuantFormat, write_calibration_table,
load_model_with_shape_infer. Other helpers are onnxruntime's own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.compat._names import own_or_theirs

if TYPE_CHECKING:
    import onnx


def load_model_with_shape_infer(model_path: str | Path) -> onnx.ModelProto:
    """A model with the shapes of its tensors, and its weights.

    Raises:
        ModelError: the file cannot be read, or is damaged.
    """
    from edgeq.compat.preprocess import quant_pre_process
    from edgeq.model.load import load_model

    with tempfile.TemporaryDirectory(prefix="edgeq-shapes-") as folder:
        inferred = Path(folder) / "model.onnx"
        quant_pre_process(Path(model_path), inferred, skip_optimization=True, skip_symbolic_shape=True)
        return load_model(inferred, external_data="all")


def __getattr__(name: str) -> Any:
    return own_or_theirs(name, "quant_utils")
