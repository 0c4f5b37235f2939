"""Test the comparison of quantization noise with what an image-to-image model adds to its input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from edgeq.data.open_source import Data
from edgeq.jobs.quantize import quantize
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.baseline import BaselineSums, enlarge
from tests.graphs import proto
from tests.measure.fakes import FakeSession, vectors


def pictures(count: int, side: int = 24) -> np.ndarray:
    """Return smooth images, [count, 1, side, side]."""
    random = np.random.default_rng(0)
    small = random.random((count, 1, side // 4, side // 4))
    return enlarge(small, 4).astype(np.float32)


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_enlarging_equals_bicubic_interpolation(factor: int) -> None:
    picture = pictures(1)[0, 0]
    side = len(picture) * factor
    expected = np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC))
    for axes in ((None, None), (None, slice(None), slice(None), None)):
        image = picture[axes] if len(axes) == 4 else picture[None, None]
        enlarged = enlarge(image.astype(np.float64), factor).reshape(side, side)
        edge = 2 * factor  # Pillow weighs the pixels at the edge in another way
        np.testing.assert_allclose(enlarged[edge:-edge, edge:-edge], expected[edge:-edge, edge:-edge], atol=1e-5)


def margin(detail: float, noise: float, factor: int = 2, gain: float = 1.0) -> float | None:
    """Return the margin of a model that adds noise of power `detail`² to its input, with noise of power `noise`²."""
    random = np.random.default_rng(1)
    sums = BaselineSums()
    for picture in pictures(8):
        copy = gain * enlarge(picture[None].astype(np.float64), factor) + 5
        reference = copy + gain * detail * random.normal(size=copy.shape)
        candidate = reference + gain * noise * random.normal(size=copy.shape)
        sums.update({"y": reference}, {"y": candidate}, {"x": picture[None]})
    margin = sums.result()
    return margin.margin_db if margin is not None else None


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("gain", [1.0, 255.0])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_the_margin_is_the_ratio_of_the_powers(factor: int, gain: float, ratio: float) -> None:
    assert margin(0.02, 0.02 / ratio, factor, gain) == pytest.approx(20 * np.log10(ratio), abs=0.3)


def test_an_output_that_does_not_resemble_the_input_has_no_margin() -> None:
    random = np.random.default_rng(1)
    sums = BaselineSums()
    output = random.normal(size=(1, 1, 24, 24))
    sums.update({"y": output, "z": output[0, 0]}, {"y": output + 1, "z": output[0, 0]}, {"x": pictures(1)})
    assert sums.result() is None


def test_parts_of_workers_add_up() -> None:
    total, parts = BaselineSums(), [BaselineSums(), BaselineSums()]
    random = np.random.default_rng(1)
    for number, picture in enumerate(pictures(6)):
        output = picture[None] + 0.1 * random.normal(size=(1, 1, 24, 24))
        for sums in (total, parts[number // 3]):
            sums.update({"y": output}, {"y": output + 0.01}, {"x": picture[None]})
    parts[0].merge(parts[1])
    margin, merged_margin = total.result(), parts[0].result()
    assert margin is not None
    assert merged_margin is not None
    assert merged_margin.margin_db == pytest.approx(margin.margin_db)


def test_an_evaluation_has_the_margin() -> None:
    session = FakeSession(lambda feed: {"y": feed["x"] + 0.1 * feed["x"] ** 3}, ["y"])
    rounded = FakeSession(lambda feed: {"y": np.round(8 * (feed["x"] + 0.1 * feed["x"] ** 3)) / 8}, ["y"])
    samples = vectors(list(pictures(4)[:, None]))
    margins = evaluate_sessions({"float": session, "int8": rounded}, samples, reference="float").baseline
    assert margins["int8"].margin_db < 0
    assert "resembles its input" in margins["int8"].sentence


def test_a_model_that_adds_little_is_repaired_beyond_20_db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a model that adds a small detail to its input, with one wide channel that coarsens the others."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    kernel = random.normal(0, 0.1, (8, 1, 3, 3))
    kernel[0] = 0
    kernel[0, 0, 1, 1] = 400  # carries the input; the other channels carry the detail
    second = random.normal(0, 0.02, (1, 8, 1, 1))
    second[0, 0] = 1 / 400
    body = """g (float[n, 1, 24, 24] x) => (float[n, 1, 24, 24] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, v)
        b = Relu (a)
        y = Conv (b, w)
    }"""
    onnx.save(proto(body, {"v": kernel.astype(np.float32), "w": second.astype(np.float32)}), "m.onnx")
    np.savez("val.npz", x=pictures(16))
    options = {"timed": False, "emulate": False, "force": True, "overrides": {"per_channel": False}}
    unrepaired = quantize("m.onnx", Data("val.npz"), "q.onnx", effort=None, **options).proof  # type: ignore[arg-type]
    assert unrepaired.agreement.sqnr_db > 20
    assert unrepaired.adds_little
    assert any("resembles its input" in warning for warning in unrepaired.warnings())
    proof = quantize("m.onnx", Data("val.npz"), "q.onnx", **options).proof  # type: ignore[arg-type]
    assert proof.repair is not None
    assert unrepaired.baseline is not None
    assert proof.baseline is not None
    assert proof.baseline.margin_db > unrepaired.baseline.margin_db + 3
