"""List the files of a model: the model file and its external data."""

from __future__ import annotations

from pathlib import Path

import onnx
from edgeq_device.engines.catalog import engine_of_file
from edgeq_device.errors import BundleError
from edgeq_device.model.onnxfile import read_onnx

from edgeq.model.parsing import parse_model
from edgeq.model.tensors import (
    external_span,
    is_external,
    iter_tensors,
)

INLINE_LIMIT = 2**30
"""Largest size of the tensors, in bytes, of a model that is saved as one file. It is half of protobuf's limit, which
leaves space for Q/DQ nodes, shapes and copies of some weights."""


def model_files(path: Path, folder: Path | None = None) -> tuple[Path, ...]:
    """Return the model file, followed by its external data files in sorted order. Each data file is checked to be
    inside its folder. Weights are not read.

    Args:
        folder: folder of external data, which a bundle's variant may set; None for the model's folder. In other
            functions of this module, `folder` has the same meaning.

    Raises:
        ModelError: the file is not a model, or external data is outside the allowed folders.
    """
    if engine_of_file(path.name) is not None:
        return (path,)
    locations = {external_span(tensor, path, folder).location for tensor in _external_tensors(path)}
    return (path, *((folder or path.parent) / location for location in sorted(locations)))


def model_bytes(path: Path, folder: Path | None = None) -> int:
    """Return the size of a model on disk in bytes, including external data."""
    return sum(file.stat().st_size for file in model_files(path, folder))


def data_name(output: Path) -> str:
    """Return the name of the file next to `output` that contains the weights of a large model."""
    return f"{output.name}.data"


def data_names(output: Path, model: Path) -> tuple[str, ...]:
    """Return the names of extra files that a model at `output` may need if it is made from `model`. Pass them to
    `edgeq.util.outputs.output_file`.

    Raises:
        ModelError: for the same reasons as `model_files`.
    """
    return (data_name(output),) if model_bytes(model) > INLINE_LIMIT else ()


def _external_tensors(path: Path) -> list[onnx.TensorProto]:
    """Return the external tensors of a file without reading their data."""
    try:
        external = read_onnx(path, str(path)).external
    # Either the file is not a model, and the parser gives a better message, or it is an unusual model that `read_onnx`
    # does not accept.
    except BundleError:
        return [tensor for tensor in iter_tensors(parse_model(path)) if is_external(tensor)]
    return [
        onnx.TensorProto(
            name=tensor.name,
            data_type=tensor.data_type,
            dims=tensor.dims,
            data_location=onnx.TensorProto.EXTERNAL,
            external_data=[onnx.StringStringEntryProto(key=key, value=value) for key, value in tensor.entries.items()],
        )
        for tensor in external
    ]
