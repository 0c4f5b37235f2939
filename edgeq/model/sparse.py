"""Make sparse weights dense. Few runtimes and no quantizer accept sparse weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgeq.errors import ModelError, one_line
from edgeq.model.tensors import DAMAGED, all_graphs


def make_dense(model: onnx.ModelProto, path: Path) -> None:
    """Replace the sparse weights of all graphs by dense weights, in place.

    Args:
        model: a checked model, whose sparse tensors have a limited size and indices in range.
        path: the model's file, whose folder contains external values.

    Raises:
        ModelError: the values and the indices of a tensor do not match.
    """
    for graph in all_graphs(model):
        graph.initializer.extend([_to_dense(sparse, path) for sparse in graph.sparse_initializer])
        del graph.sparse_initializer[:]


def _to_dense(sparse: onnx.SparseTensorProto, path: Path) -> onnx.TensorProto:
    try:
        values, places = (numpy_helper.to_array(part, str(path.parent)) for part in (sparse.values, sparse.indices))
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        # Indices of shape [values] are positions in the flattened tensor. In [values, rank], each row is one position.
        dense[np.unravel_index(places, dense.shape) if places.ndim == 1 else tuple(places.T)] = values
        return numpy_helper.from_array(dense, sparse.values.name)
    except (IndexError, TypeError, ValueError) as error:
        subject = f"{path}: sparse tensor {sparse.values.name!r}"
        raise ModelError(f"{subject} is damaged: {one_line(error)}", DAMAGED) from error
