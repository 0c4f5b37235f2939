"""Test that a model of an older opset gives the same outputs after edgeq raises its opset.

ONNX Runtime runs both models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeq.errors import ModelError
from edgeq.model.prepare import prepare_model
from tests.graphs import proto

IMAGE = np.random.default_rng(0).normal(size=(1, 3, 10, 12)).astype(np.float32)
SCALES = (0.25, 0.5, 0.7, 1.2, 1.5, 2.0, 3.0)


def raised(tmp_path: Path, body: str, opset: int, x: np.ndarray = IMAGE) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of a graph with one input before and after the preparation."""
    source = tmp_path / "model.onnx"
    onnx.save(proto(body, opset=opset, ir_version=7), source)
    prepared = prepare_model(source, tmp_path / "work")
    before, after = (onnxruntime.InferenceSession(path).run(None, {"x": x})[0] for path in (source, prepared.path))
    return before, after


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scale", SCALES)
def test_resize_10_and_upsample(tmp_path: Path, mode: str, scale: float) -> None:
    scales = f"<float[4] s = {{1, 1, {scale}, {scale}}}>"
    forms = [(10, f'Resize<mode = "{mode}">(x, s)', scales)]
    if scale >= 1:
        forms.append((9, f'Upsample<mode = "{mode}">(x, s)', scales))
        forms.append((7, f'Upsample<mode = "{mode}", scales = [1.0, 1.0, {scale}, {scale}]>(x)', ""))
    for opset, node, initializers in forms:
        body = f"g (float[1, 3, 10, 12] x) => (float[A, B, C, D] y) {initializers} {{ y = {node} }}"
        before, after = raised(tmp_path, body, opset)
        np.testing.assert_allclose(after, before, atol=1e-6, err_msg=node)


def test_resize_in_a_branch(tmp_path: Path) -> None:
    body = """g (float[1, 3, 10, 12] x) => (float[A, B, C, D] y) <float[4] s = {1, 1, 2, 2}> {
        total = ReduceSum<keepdims = 0>(x)
        d = Sub(total, total) c = Cast<to = 9>(d)
        y = If (c) <
            then_branch = t () => (float[A, B, C, D] a) { a = Resize<mode = "linear">(x, s) },
            else_branch = e () => (float[A, B, C, D] b) { n = Neg(x) b = Resize<mode = "linear">(n, s) }
        >
    }"""
    before, after = raised(tmp_path, body, 10)
    np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("opset", [10, 12])
def test_roi_align(tmp_path: Path, opset: int) -> None:
    body = """g (float[1, 3, 10, 12] x) => (float[A, B, C, D] y)
        <float[2, 4] r = {1, 1, 7, 6, 0.3, 2.2, 5.1, 8}, int64[2] b = {0, 0}> {
        y = RoiAlign<output_height = 3, output_width = 3, sampling_ratio = 2>(x, r, b)
    }"""
    before, after = raised(tmp_path, body, opset)
    np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize(
    ("node", "scales", "words"),
    [
        ('Resize<mode = "nearest">(x, s)', "1, 1, 2, 0.5", "enlarges one axis and shrinks another"),
        ("Hardmax(x)", "1, 1, 1, 1", r"uses Hardmax of opset \d+ \(y\), which no later opset has"),
    ],
)
def test_operators_without_a_later_form_stay(tmp_path: Path, node: str, scales: str, words: str) -> None:
    body = f"g (float[1, 3, 10, 12] x) => (float[A, B, C, D] y) <float[4] s = {{{scales}}}> {{ y = {node} }}"
    with pytest.raises(ModelError, match=words):
        raised(tmp_path, body, 10)


def test_constants_of_a_function_that_is_written_out_are_folded(tmp_path: Path) -> None:
    body = """g (float[1, 3, 10, 12] x) => (float[1, 3, 10, 12] y) <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 0}> {
        y = GroupNormalization<num_groups = 3>(x, s, b)
    }"""
    source = tmp_path / "model.onnx"
    onnx.save(proto(body, opset=21, ir_version=10), source)
    graph = prepare_model(source, tmp_path / "work").model.graph
    assert all(any(not value.is_initializer() for value in node.inputs if value is not None) for node in graph)
