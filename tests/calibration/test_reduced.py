"""Test reduced sessions: tensors that stay inside the session give the same bytes as tensors that are fetched."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.calibration import instrumented
from edgeq.calibration.collect import Checkpoints, PassLimits, collect
from edgeq.calibration.instrumented import FIRST_PARTIAL
from edgeq.calibration.reduced import Bounds, reduce_large, row_length
from edgeq.calibration.statistics import Nonfinite, Statistics
from edgeq.errors import CalibrationError
from edgeq.model.convert import to_proto
from edgeq.model.load import read_model
from tests.graphs import model

from .models import ListSamples, images, small_cnn, write

COUNT, SIZE = FIRST_PARTIAL + 5, 64
"""Samples, and the side of an image of which the tensors of `small_cnn` are large."""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record, for each sample that allows a reduced session, whether one was used."""
    found: list[bool] = []
    run = instrumented._Reduced.run

    def watched(self: instrumented._Reduced, inputs: instrumented.Inputs) -> Any:
        values = run(self, inputs)
        found.append(values is not None)
        return values

    monkeypatch.setattr(instrumented._Reduced, "run", watched)
    return found


def whole(path: Path, samples: ListSamples, **options: Any) -> Statistics:
    """Return the statistics from fetching every tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instrumented, "FIRST_PARTIAL", len(samples))
        return collect(read_model(path), samples, **options)


@pytest.mark.parametrize(("channels", "threads"), [(32, 1), (32, 3), (20, 1)])
def test_statistics_are_the_same(tmp_path: Path, used: list[bool], channels: int, threads: int) -> None:
    path, samples = small_cnn(tmp_path / "m.onnx", channels, SIZE), ListSamples(images(COUNT, SIZE))
    assert collect(read_model(path), samples, limits=PassLimits(threads=threads)) == whole(path, samples)
    assert all(used)
    assert used or threads > 1  # other threads continue while one opens the session


def test_other_shapes_are_fetched(tmp_path: Path, used: list[bool]) -> None:
    path = small_cnn(tmp_path / "m.onnx", size="S")
    items = images(COUNT, SIZE)
    items[-2] = images(1, SIZE + 8)[0]
    assert collect(read_model(path), ListSamples(items), limits=PassLimits(threads=1)) == whole(
        path, ListSamples(items)
    )
    assert used == [True, True, False, True]


def test_tensors_with_channel_extrema_and_every_element_are_fetched(tmp_path: Path, used: list[bool]) -> None:
    path, samples = small_cnn(tmp_path / "m.onnx", size=SIZE), ListSamples(images(COUNT, SIZE))
    channels = {"conv1": 1, "clip1": 1}
    assert collect(read_model(path), samples, channels=channels) == whole(path, samples, channels=channels)
    del used[:]
    every = collect(read_model(path), samples, limits=PassLimits(every_element=True))
    assert not used
    assert every != whole(path, samples)


def test_it_goes_on_after_an_interruption(tmp_path: Path, used: list[bool]) -> None:
    path, items = small_cnn(tmp_path / "m.onnx", size=SIZE), images(COUNT, SIZE)
    kept: list[Statistics] = []
    with pytest.raises(KeyboardInterrupt):
        collect(read_model(path), ListSamples(items, COUNT - 1), checkpoints=Checkpoints(save=kept.append))
    assert collect(read_model(path), ListSamples(items), checkpoints=Checkpoints(start=kept[-1])) == whole(
        path, ListSamples(items)
    )


def hidden(path: Path, op_type: str) -> Path:
    """Write a model in which a Clip hides the output of an operator after a convolution."""
    body = f"""g (float[N, 16, {SIZE}, {SIZE}] x) => (float[N, 16, {SIZE}, {SIZE}] y) {{
        [conv] conv = Conv(x, w)
        [inner] inner = {op_type}(conv)
        [clip] y = Clip(inner, zero, six)
    }}"""
    weights = {"w": np.eye(16, dtype=np.float32)[:, :, None, None], "zero": np.float32(0), "six": np.float32(6)}
    return write(path, body, weights)


def filled(number: float) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((1, 16, SIZE, SIZE), number, np.float32)} for _ in range(COUNT)]


@pytest.mark.parametrize(
    ("op_type", "bad", "nonfinite"), [("Sqrt", -1, Nonfinite(nan=1)), ("Reciprocal", 0, Nonfinite(above=1))]
)
def test_one_bad_value_in_a_large_tensor_is_found(
    tmp_path: Path, op_type: str, bad: float, nonfinite: Nonfinite, used: list[bool]
) -> None:
    path, items = hidden(tmp_path / "m.onnx", op_type), filled(2)
    items[-2]["x"][0, 3, 5, 7] = bad
    found = collect(read_model(path), ListSamples(items), ["inner"], limits=PassLimits(threads=1)).tensors["inner"]
    assert found.nonfinite == nonfinite
    assert found.count == COUNT * 16 * SIZE * SIZE - 1
    assert False in used


def test_a_convolution_that_overflows_is_found(tmp_path: Path, used: list[bool]) -> None:
    weights = {"w": np.full((32, 3, 1, 1), 2, np.float32), "zero": np.float32(0), "six": np.float32(6)}
    weights["w"][:, 1] = -2
    body = f"""g (float[1, 3, {SIZE}, {SIZE}] x) => (float[1, 32, {SIZE}, {SIZE}] y) {{
        [conv] conv = Conv(x, w)
        [clip] y = Clip(conv, zero, six)
    }}"""
    path, items = write(tmp_path / "m.onnx", body, weights), images(COUNT, SIZE)
    items[-1]["x"][0, :2, 9, 9] = 3e38
    with pytest.raises(CalibrationError, match=f"'y' in sample sample-{COUNT - 1}: it contains NaN"):
        collect(read_model(path), ListSamples(items), ["conv", "y"], limits=PassLimits(threads=1))
    assert used == [True] * (COUNT - FIRST_PARTIAL - 2) + [False]


BOUNDED = """g (float[1, 3, 8, 8] x, float low) => (float y)
    <float[1, 3, 1, 1] w = {WEIGHT, 1, 1}, float zero = {0}, float six = {6}> {
    a = Conv (x, w)
    b = Clip (a, zero, six)
    c = Relu (b)
    d = Add (a, c)
    e = Mul (d, d)
    f = Clip (e, low, six)
    y = Add (f, a)
}"""


@pytest.mark.parametrize("weight", ["1", "1e6"])
def test_proves_which_tensors_are_finite(weight: str) -> None:
    graph = to_proto(model(BOUNDED.replace("WEIGHT", weight))).graph

    def bounds(name: str, *measured: str) -> frozenset[str] | None:
        return Bounds(graph, set(measured), Path()).of(name)

    assert bounds("a", "x") == (frozenset({"x"}) if weight == "1" else None)
    assert bounds("a", "a") is None
    assert bounds("d", "a") == {"a"}
    assert bounds("e", "d") is None
    assert bounds("y", "a", "e") is None  # one limit of the Clip is not known
    assert bounds("y", "a", "f") == {"a", "f"}


def test_a_sum_that_overflows_is_no_bad_value(tmp_path: Path, used: list[bool]) -> None:
    path = hidden(tmp_path / "m.onnx", "Sqrt")
    statistics = collect(read_model(path), ListSamples(filled(3e38)), ["conv"], limits=PassLimits(threads=1))
    assert statistics.tensors["conv"].maximum == np.float32(3e38)
    assert not any(used)


def test_a_size_that_depends_on_values(tmp_path: Path, used: list[bool]) -> None:
    body = f"""g (float[1, 3, {SIZE}, {SIZE}] x) => (float[M] y) {{
        [conv] conv = Conv(x, w)
        [flat] flat = Flatten<axis = 0>(conv)
        [line] line = Reshape(flat, all)
        [positive] positive = Greater(line, zero)
        [y] y = Compress(line, positive)
    }}"""
    weights = {
        "w": np.random.default_rng(0).normal(size=(32, 3, 1, 1)).astype(np.float32),
        "all": np.int64([-1]),
        "zero": np.float32(0),
    }
    path, samples = write(tmp_path / "m.onnx", body, weights), ListSamples(images(COUNT, SIZE))
    assert collect(read_model(path), samples, limits=PassLimits(threads=1)) == whole(path, samples)
    assert used
    assert not any(used)


STRIDE = 7


@cache
def session(size: int, opset: int = 17) -> onnxruntime.InferenceSession:
    """Open a model whose only tensor, y = -x, is output in parts instead of whole."""
    graph = to_proto(model(f"g (float[{size}] x) => (float[{size}] y) {{ y = Neg (x) }}", opset=opset))
    reduce_large(graph, ["y"], {"y": (size, STRIDE)}, ["y"])
    return onnxruntime.InferenceSession(graph.SerializeToString())


ROW = 192


@given(
    st.sampled_from([60, 5 * ROW, 5 * ROW + 1]),
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.integers(0, 59), st.floats(width=32), max_size=5),
)
def test_extrema_and_parts_are_exact(size: int, seed: int, some: dict[int, float]) -> None:
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    x[[place * size // 60 for place in some]] = [*some.values()]
    (joined,) = session(size).run(None, {"x": x})
    rows = x.size // row_length(x.size)
    low, high, total, part = np.split(joined, [rows, 2 * rows, 2 * rows + 1])
    assert np.array_equal(part, -x[::STRIDE], equal_nan=True)
    if np.isfinite(x).all():
        assert (low.min(), high.max()) == ((-x).min(), (-x).max())
    else:
        assert not np.isfinite([low.min(), high.max(), *total]).all()


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_axes_are_an_input_from_opset_18_on(opset: int) -> None:
    x = np.arange(5 * ROW, dtype=np.float32)
    (joined,) = session(5 * ROW, opset).run(None, {"x": x})
    assert joined[:10].tolist() == [*(-x.reshape(5, -1).max(1)), *(-x.reshape(5, -1).min(1))]


@given(st.integers(1, 1 << 22))
def test_rows_divide_a_tensor(size: int) -> None:
    length = row_length(size)
    assert size % length == 0
    assert 96 <= length <= 768 or length == size
