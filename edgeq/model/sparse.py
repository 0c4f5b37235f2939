"""Sparse weights as dense ones, which the in-memory model, shape inference and quantizers know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgeq.errors import ModelError, one_line
from edgeq.model.tensors import DAMAGED, all_graphs


def make_dense(model: onnx.ModelProto, path: Path) -> None:
    """Put dense weights in place of the sparse ones of all graphs, in place.

    Args:
        model: checked, so that their size is bounded and their indices lie inside.
        path: its file, in whose folder external values are.

    Raises:
        ModelError: values and indices do not fit.
    """
    for graph in all_graphs(model):
        graph.initializer.extend([_dense(sparse, path) for sparse in graph.sparse_initializer])
        del graph.sparse_initializer[:]


def _dense(sparse: onnx.SparseTensorProto, path: Path) -> onnx.TensorProto:
    try:
        values, places = (numpy_helper.to_array(part, str(path.parent)) for part in (sparse.values, sparse.indices))
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        # [values]: places in the flattened tensor; [values, rank]: one row of coordinates each.
        dense[np.unravel_index(places, dense.shape) if places.ndim == 1 else tuple(places.T)] = values
        return numpy_helper.from_array(dense, sparse.values.name)
    except (IndexError, TypeError, ValueError) as error:
        where = f"{path}: sparse tensor {sparse.values.name!r}"
        raise ModelError(f"{where} is damaged: {one_line(error)}", DAMAGED) from error
