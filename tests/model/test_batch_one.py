"""Test how a model is prepared for formats that have fixed sizes and constants alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.errors import ModelError
from edgeq.model.fixed_shapes import at_batch_one
from tests.graphs import proto

# As PyTorch writes them: a constant as a node, and a second name for a bias that two layers share.
BODY = """g (float[N,3] x) => (float[N,3] y) {
    w = Constant <value = float[3,3] {1,0,0, 0,1,0, 0,0,1}> ()
    second = Identity(b)
    h = Gemm(x, w, b)
    y = Gemm(h, w, second)
}"""


def test_constants_of_an_exported_model_are_constants() -> None:
    model = ir.serde.deserialize_model(proto(BODY, {"b": np.zeros(3, np.float32)}))
    fixed = at_batch_one(model, Path("m.onnx"), "a file")
    assert [node.op_type for node in fixed.graph] == ["Gemm", "Gemm"]
    assert all(value in fixed.graph.initializers.values() for node in fixed.graph for value in node.inputs[1:])
    assert fixed.graph.outputs[0].shape == ir.Shape([1, 3])
    assert [node.op_type for node in model.graph][:2] == ["Constant", "Identity"], "the caller's model is unchanged"


def test_names_another_open_size_than_the_batch() -> None:
    model = ir.serde.deserialize_model(proto("g (float[N,W] x) => (float[N,W] y) { y = Relu(x) }"))
    with pytest.raises(ModelError, match=r"input 'x' has no fixed size on axis 1 \(W\).*a file has fixed sizes"):
        at_batch_one(model, Path("m.onnx"), "a file")
