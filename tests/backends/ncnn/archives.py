"""Write small .ncnn files by hand, independently of the writer."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.plugins import needs_plugin

needs_ncnn: pytest.MarkDecorator = needs_plugin("ncnn")
INT8_TAG, FLOAT_TAG = 0x000D4B38, 0


def archive(param: str, weights: bytes, signature: Mapping[str, Any], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the bytes of a .ncnn file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        file.writestr("model.param", param)
        file.writestr("model.bin", weights)
        file.writestr("edgeq.json", json.dumps(signature))
    return content.getvalue()


def port(name: str, blob: str, shape: Sequence[int | str], kind: str = "tensor(float)") -> dict[str, Any]:
    """Return the description of an input or output."""
    return {"name": name, "blob": blob, "type": kind, "shape": list(shape), "sizes": [1, *shape[1:]]}


def convolution(
    weights: NDArray[Any], bias: NDArray[Any], *, input_scale: float = 0.0, weight_scale: float = 1.0
) -> tuple[str, bytes]:
    """Return the parameters and the data of a 3 x 3 convolution without padding, [outputs, inputs, 3, 3]. It computes
    on int8 if `input_scale` is not 0; scales are factors from a value to its integer.
    """
    outputs, inputs = weights.shape[:2]
    parameters = f"0={outputs} 1=3 5=1 6={outputs * inputs * 9}"
    floats = bias.astype("<f4").tobytes()
    if not input_scale:
        return parameters, struct.pack("<I", FLOAT_TAG) + weights.astype("<f4").tobytes() + floats
    integers = weights.astype(np.int8).tobytes()
    padded = integers + bytes(-len(integers) % 4)
    scales = np.full(outputs, weight_scale, "<f4").tobytes() + np.float32(input_scale).tobytes()
    return f"{parameters} 8=2", struct.pack("<I", INT8_TAG) + padded + floats + scales


def convolution_file(
    weights: NDArray[Any],
    bias: NDArray[Any],
    size: int,
    *,
    batch: int | str = 1,
    options: Mapping[str, bool] | None = None,
    **scales: float,
) -> bytes:
    """Return a .ncnn file with one convolution of images with `size` rows and columns."""
    parameters, data = convolution(weights, bias, **scales)
    param = f"7767517\n2 2\nInput in 0 1 in\nConvolution conv 1 1 in out {parameters}\n"
    shapes = {"in": [batch, weights.shape[1], size, size], "out": [batch, weights.shape[0], size - 2, size - 2]}
    signature = {
        "inputs": [port("x", "in", shapes["in"])],
        "outputs": [port("y", "out", shapes["out"])],
        "options": dict(options or {}),
    }
    return archive(param, data, signature)
