"""Make signatures and small files for the tests of this folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from edgeq.signature import Dimension, Signature, TensorSpec


def spec(name: str, *shape: Dimension, dtype: Any = np.float32) -> TensorSpec:
    return TensorSpec(name, np.dtype(dtype), tuple(shape))


def signature(*inputs: TensorSpec) -> Signature:
    return Signature(inputs, ())


IMAGE_MODEL = signature(spec("x", "N", 3, 8, 8))


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save_image(path: Path, height: int = 8, width: int = 8, seed: int = 0) -> np.ndarray:
    """Save a random image in a lossless format and return its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = pixels(height, width, seed)
    Image.fromarray(array).save(path)
    return array


def encoded(array: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
