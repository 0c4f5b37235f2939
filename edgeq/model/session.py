"""A session of a model in memory, whose weights are handed over as they are: writing them into protobuf and parsing
them again takes several times as long as the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.graph.convert import external_folder, to_bytes
from edgeq.graph.query import name_of
from edgeq.session import SessionSettings, open_session

_HANDED_OVER = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8, ir.DataType.UINT8}
)
_LEAST = 1 << 12
"""Bytes of a weight. Smaller ones, and integers that may be a shape or axes, stay in the graph, where shape inference
and constant folding read them."""
_FOLDER = "session.model_external_initializers_file_folder_path"


def open_in_memory(model: ir.Model, settings: SessionSettings | None = None) -> Any:
    """Open an `onnxruntime.InferenceSession` for a model in memory; external data is found where it is.

    Args:
        model: it is not changed.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model or the settings.
    """
    settings = settings or SessionSettings()
    folder = external_folder(model)
    if folder is not None:
        settings = replace(settings, config={**settings.config, _FOLDER: str(folder)})
    weights = {name_of(value): np.ascontiguousarray(tensor.numpy()) for value, tensor in _large(model)}
    if weights:
        model = model.clone()
        for value, tensor in _large(model):
            shape = ir.Shape(weights[name_of(value)].shape)
            value.const_value = ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name_of(value)
            )
    return open_session(to_bytes(model), settings, weights=weights)


def _large(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The initializers of the main graph that are handed over."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.dtype in _HANDED_OVER and tensor.nbytes >= _LEAST:
            yield value, tensor
