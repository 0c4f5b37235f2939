from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from edgeq.errors import ModelError
from edgeq.model.load import load_model
from edgeq.model.prepare import prepare_model
from tests.graphs import proto

WANTED = np.zeros((4, 3), np.float32)
WANTED[[0, 1], [1, 2]] = [2, 3]


def sparse(places: list[int] | list[list[int]]) -> ModelProto:
    """Return a product with a sparse matrix that has two values."""
    made = proto("g (float[2,4] x) => (float[2,3] y) { y = MatMul (x, w) }")
    held = made.graph.sparse_initializer.add(dims=[4, 3])
    held.values.CopyFrom(numpy_helper.from_array(np.array([2, 3], np.float32), "w"))
    held.indices.CopyFrom(numpy_helper.from_array(np.array(places), "w_places"))
    return made


@pytest.mark.parametrize("places", [[1, 5], [[0, 1], [1, 2]]], ids=["flat", "coordinates"])
def test_sparse_weights_become_dense(places: list[int] | list[list[int]], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(sparse(places).SerializeToString())
    loaded = load_model(path).graph
    assert not loaded.sparse_initializer
    np.testing.assert_array_equal(numpy_helper.to_array(loaded.initializer[0]), WANTED)
    prepared = prepare_model(path, tmp_path / "work")
    np.testing.assert_array_equal(prepared.model.graph.initializers["w"].const_value.numpy(), WANTED)


@pytest.mark.parametrize("places", [[1, 12], [5, 1], [[0, 1], [4, 0]], [-1, 2]])
def test_places_outside_of_it_are_refused(places: list[int] | list[list[int]], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(sparse(places).SerializeToString())
    with pytest.raises(ModelError, match=r"sparse tensor|not a valid"):
        load_model(path)
