"""Provide the embedded demo: a small digit classifier with its calibration and validation samples.

`model.onnx` reads `image`, float32 [N, 1, 16, 16] between 0 and 1, and outputs `logits`, float32 [N, 10]. The two .npz
files contain `image` (already preprocessed) and `label` (digits, uint8). `scripts/train_demo.py` made all of them.
`provenance.json` names their sources and the measured accuracy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent
# The files are inside the package, so the demo works without a network.
MODEL = DIRECTORY / "model.onnx"
CALIBRATION = DIRECTORY / "calibration.npz"
VALIDATION = DIRECTORY / "validation.npz"


def provenance() -> dict[str, Any]:
    """Return the data set, preprocessing, split, training, float32 accuracy and the SHA-256 of each file."""
    record: dict[str, Any] = json.loads((DIRECTORY / "provenance.json").read_text("utf-8"))
    return record
