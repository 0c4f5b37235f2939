"""Make a detector that finds a person in the middle of every image, with the rows of a YOLOv8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.bundle.spec import BundleSpec, VariantSpec
from edgeq.bundle.write import write_bundle
from tests.bundle.samples import HERE
from tests.graphs import proto

STEPS = [
    {"op": "resize", "size": "model"},
    {"op": "divide", "value": 255},
    {"op": "layout", "axes": "NCHW"},
    {"op": "dtype", "dtype": "float32"},
]
HEAD = {
    "family": "yolov8",
    "outputs": {"rows": "y"},
    "parameters": {"unit": "pixel"},
    "thresholds": {"confidence": 0.25, "iou": 0.7},
}


def detector(path: Path, *, batch: int = 1, metadata: dict[str, str] | None = None) -> Path:
    """Write a model whose rows do not depend on the pixels of its images [N, 3, 8, 8]."""
    rows = np.zeros((batch, 6, 10), np.float32)
    # Centre, size, and the scores of two classes; a box in the input's middle, and a weak one.
    rows[:, :, 0], rows[:, :, 1] = (4, 4, 4, 2, 0.1, 0.9), (2, 2, 2, 2, 0.3, 0.1)
    body = f"""detector (float[{batch}, 3, 8, 8] x) => (float[{batch}, 6, 10] y) {{
        [mean] m = ReduceMean<keepdims = 0>(x)
        [zero] z = Mul(m, nothing)
        [add] y = Add(rows, z)
    }}"""
    model = proto(body, {"rows": rows, "nothing": np.float32(0)})
    onnx.helper.set_model_props(model, metadata or {})
    onnx.save_model(model, str(path))
    return path


def bundle(folder: Path, *, batch: int = 1, **changes: Any) -> Path:
    """Write a bundle of the detector at folder/dist, with its preprocessing and head."""
    info: dict[str, Any] = {
        "architecture": HERE,
        "preprocessing": {"steps": STEPS, "source": {}},
        "head": HEAD,
        **changes,
    }
    info = {key: value for key, value in info.items() if value is not None}
    variant = VariantSpec("own", detector(folder / "m.onnx", batch=batch), info=info)
    write_bundle(BundleSpec("detector", (variant,), extras={"labels.txt": b"cat\nperson\n"}), folder / "dist")
    return folder / "dist"
