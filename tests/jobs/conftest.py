from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.backends.build import random, residual


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with `net.onnx`, `calib.npz` and a labelled `val.npz` (preprocessing "key=x,label=y")."""
    (tmp_path / "net.onnx").write_bytes(residual().SerializeToString())
    np.savez(tmp_path / "calib.npz", x=random(4, 8, 8, 8))
    np.savez(tmp_path / "val.npz", x=random(3, 8, 8, 8, seed=1), y=np.array([0, 1, 2]))
    monkeypatch.chdir(tmp_path)
    return tmp_path
