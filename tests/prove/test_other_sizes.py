"""Test that models with free sizes are right at sizes that the samples do not have, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.errors import CheckFailedError
from edgeq.hardware.target import Target
from edgeq.jobs.quantize import quantize
from edgeq.prove.job import Built, Job, build
from edgeq.prove.opening import check_preparation
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.util.display import Progress
from tests.backends.build import Bench, bench, random
from tests.graphs import proto
from tests.model.build import windows


def images(*shape: int) -> list[dict[str, Any]]:
    return [{"x": random(*shape, seed=seed)} for seed in range(4)]


def test_a_file_made_at_one_size_is_right_at_others(tmp_path: Path) -> None:
    """A model with windows is right at every size.

    onnxruntime's shape inference confuses the padded size with the input's. They are equal only for whole windows.
    """
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
    """Return the bench of one model with another as its source, as if the preparation were wrong."""
    found = bench(folder, made)
    onnx.save(source, found.prepared.source)
    return found


@pytest.mark.parametrize(
    ("baked", "free", "named"),
    [("1, 8, -1, 8", "0, 8, -1, 8", "⟨fix⟩ n=1"), ("-1, 8, 8, 8", "0, 0, 0, 0", "⟨fix⟩ h=8")],
)
def test_a_size_that_the_preparation_bakes_in_is_refused(tmp_path: Path, baked: str, free: str, named: str) -> None:
    found = prepared_as(tmp_path, proto(FLATTEN % baked), proto(FLATTEN % free))
    with pytest.raises(CheckFailedError, match="its prepared form is wrong at a size that the model takes, x ") as e:
        check_preparation(found.prepared, found.samples)
    assert e.value.fix == f"Fix the sizes that you need: {named}"


def test_sizes_that_the_source_refuses_do_not_count(tmp_path: Path) -> None:
    """Sizes that the source cannot run are not compared: here its Reshape contains the batch."""
    found = prepared_as(tmp_path, proto(FLATTEN % "1, 8, 8, 8"), proto(FLATTEN % "1, 8, 8, 8"))
    assert check_preparation(found.prepared, found.samples) is found.prepared


def test_nothing_is_written_that_is_wrong_at_another_size(tmp_path: Path) -> None:
    """A file that is wrong at another batch is refused: this builder writes the samples' batch into a Reshape."""

    def baking(job: Job, target: Target, scheme: Scheme, path: Path, progress: Progress) -> Built:
        built = build(job, target, scheme, path)
        model = onnx.load(path)
        sizes = next(tensor for tensor in model.graph.initializer if tensor.name == "s")
        sizes.CopyFrom(numpy_helper.from_array(np.array([1, 4, -1]), "s"))
        onnx.save(model, path)
        return built

    text = "g (float[n, 3, 8, 8] x) => (float[] y) <int64[3] s = {0, 4, -1}> { a = Conv (x, w) y = Reshape (a, s) }"
    source, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(proto(text, {"w": random(4, 3, 3, 3)}), source)
    settings: dict[str, Any] = {"builder": baking, "timed": False, "emulate": False}
    with pytest.raises(
        CheckFailedError, match=r"m.onnx: its quantized form is wrong .* x \[2, 3, 8, 8\]: .*shape"
    ) as e:
        quantize(source, images(1, 3, 8, 8), output, **settings)
    assert e.value.fix == "Fix the sizes that you need: ⟨fix⟩ n=1"
    assert not output.exists()
    quantize(source, images(1, 3, 8, 8), output, fix={"n": 1}, **settings)
    assert output.exists()
