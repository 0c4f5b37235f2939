from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from compat.networks import residual


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A float model in a file of its own: convolutions, a residual sum, a product."""
    path = tmp_path / "float.onnx"
    onnx.save(residual(), path)
    return path
