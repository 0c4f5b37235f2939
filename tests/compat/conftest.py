from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from compat.networks import residual


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a float model of convolutions, a residual sum and a product."""
    path = tmp_path / "float.onnx"
    onnx.save(residual(), path)
    return path
