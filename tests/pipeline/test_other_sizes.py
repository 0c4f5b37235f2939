"""Models with free sizes are right at other sizes than the samples', or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.errors import CheckFailedError
from edgeq.pipeline.preparation_check import check_preparation
from edgeq.pipeline.quantize import quantize
from edgeq.session import open_session
from tests.backends.build import Bench, bench, random
from tests.graphs import proto

WINDOW = 4
# Pad to whole windows, put one row last, convolve, cut back and add: as Swin does.
WINDOWS = """g (float[n, 3, h, w] x) => (float[] y) {
    first = Conv <pads = [1, 1, 1, 1]> (x, wa)
    second = Relu (first)
    a = Conv <pads = [1, 1, 1, 1]> (second, wb)
    s = Shape (a)
    hw = Slice (s, two, four)
    over = Mod (hw, window)
    less = Sub (window, over)
    more = Mod (less, window)
    pads = Concat <axis = 0> (six, more)
    p = Pad (a, pads)
    head = Slice (p, one, most, two)
    tail = Slice (p, zero, one, two)
    r = Concat <axis = 2> (head, tail)
    b = Conv <pads = [1, 1, 1, 1]> (r, wb)
    c = Relu (b)
    d = Slice (c, none, hw, axes)
    e = Add (d, a)
    f = Relu (e)
    y = Conv (f, wc)
}"""


def windows() -> onnx.ModelProto:
    counts = {"zero": [0], "one": [1], "two": [2], "four": [4], "most": [2**31 - 1], "none": [0, 0], "axes": [2, 3]}
    weights = {"wa": random(8, 3, 3, 3), "wb": random(8, 8, 3, 3, seed=1), "wc": random(4, 8, 1, 1, seed=2)}
    sizes = {name: np.array(values) for name, values in counts.items()}
    return proto(WINDOWS, {**weights, **sizes, "window": np.array([WINDOW]), "six": np.zeros(6, np.int64)})


def images(*shape: int) -> list[dict[str, Any]]:
    return [{"x": random(*shape, seed=seed)} for seed in range(4)]


def test_a_file_made_at_one_size_is_right_at_others(tmp_path: Path) -> None:
    """onnxruntime's inference takes the padded size for the input's, which is so only at multiples of the window."""
    source, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(windows(), source)
    quantize(source, images(1, 3, 8, 8), output, timed=False, emulate=False)
    before, after = open_session(source), open_session(output)
    for shape in ((1, 3, 8, 8), (1, 3, 9, 9), (2, 3, 10, 15), (1, 3, 5, 12)):
        values = random(*shape, seed=9)
        (wanted,), (found,) = before.run(None, {"x": values}), after.run(None, {"x": values})
        assert np.sum((found - wanted) ** 2) < 0.01 * np.sum(wanted**2), shape


FLATTEN = "g (float[n, 8, h, 8] x) => (float[] y) <int64[4] s = {%s}> { a = Relu (x) b = Reshape (a, s) y = Neg (b) }"


def prepared_as(folder: Path, made: onnx.ModelProto, source: onnx.ModelProto) -> Bench:
    """The bench of one model, with another as its source: what a wrong preparation would be."""
    found = bench(folder, made)
    onnx.save(source, found.prepared.source)
    return found


@pytest.mark.parametrize(
    ("baked", "free", "named"),
    [("1, 8, -1, 8", "0, 8, -1, 8", "--fix n=1"), ("-1, 8, 8, 8", "0, 0, 0, 0", "--fix h=8")],
)
def test_a_size_that_the_preparation_bakes_in_is_refused(tmp_path: Path, baked: str, free: str, named: str) -> None:
    found = prepared_as(tmp_path, proto(FLATTEN % baked), proto(FLATTEN % free))
    with pytest.raises(CheckFailedError, match="its prepared form is wrong at a size that the model takes, x ") as e:
        check_preparation(found.prepared, found.samples)
    assert e.value.fix == f"Fix the sizes that you need: {named}"


def test_sizes_that_the_source_refuses_do_not_count(tmp_path: Path) -> None:
    """Its Reshape has the batch built in."""
    found = prepared_as(tmp_path, proto(FLATTEN % "1, 8, 8, 8"), proto(FLATTEN % "1, 8, 8, 8"))
    assert check_preparation(found.prepared, found.samples) is found.prepared
