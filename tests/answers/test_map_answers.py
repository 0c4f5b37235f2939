"""Test the families whose answers are maps: drawn in the stored image, encoded as a model would, and decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.maps import map_to_original
from edgeq_device.answers.raster import pick_class
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.answers.heads import find, floats, of

FRAMES = {
    "letterbox": Frame.of(200, 150).resized(128, 96).placed(0, 16, (128, 128)),
    "stretch": Frame.of(200, 150).resized(128, 128),
    "crop": Frame.of(200, 150).resized(171, 128).placed(-21, 0, (128, 128)),
}


def distances(frame: Frame, size: int) -> Any:
    """Return the signed distances [3, size, size] in stored pixels to a disc, and to two half planes around it."""
    centres = (np.arange(size) + 0.5) * frame.size[0] / size
    points = frame.to_original(np.stack(np.meshgrid(centres, centres), axis=-1))
    disc = 40 - np.hypot(points[..., 0] - 100, points[..., 1] - 75)
    left = np.minimum(-disc, 100 - points[..., 0])
    return np.stack([disc, left, np.minimum(-disc, points[..., 0] - 100)])


def draw(frame: Frame) -> Any:
    """Return the classes of the stored image's pixels, and which of these the model sees."""
    y, x = np.mgrid[: frame.original[1], : frame.original[0]] + 0.5
    classes = np.where(np.hypot(x - 100, y - 75) < 40, 0, np.where(x < 100, 1, 2))
    seen = frame.to_input(np.stack([x, y], axis=-1))
    return classes, ((seen > 0) & (seen < np.array(frame.size))).all(axis=-1)


def iou(first: Any, second: Any) -> float:
    return float((first & second).sum() / (first | second).sum())


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", [128, 32])
def test_logits_become_the_classes_of_the_stored_image(frame: Frame, layout: str, size: int) -> None:
    logits = floats(distances(frame, size))[None]
    outputs = {"logits": logits if layout == "NCHW" else logits.transpose(0, 2, 3, 1)}
    head = of("semantic", outputs, frame.size, "abc", named=False)
    answer = decode(outputs, head, frame)
    classes, seen = draw(frame)
    assert answer.map is not None
    assert answer.map.shape == (150, 200)
    for number in range(3):
        assert iou((answer.map == number) & seen, (classes == number) & seen) >= 0.99
    assert set(answer.to_json()["map"]["shares"]) == set("abc")


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("rank", [3, 4])
def test_class_maps_take_the_nearest_pixel(dtype: Any, rank: int) -> None:
    frame = FRAMES["letterbox"]
    classes = distances(frame, 128).argmax(axis=0).astype(dtype).reshape((1,) * (rank - 2) + (128, 128))
    outputs = {"classes": classes}
    head = of("semantic", outputs, frame.size, named=dtype is np.float32)
    answer = decode(outputs, head, frame)
    assert answer.map is not None
    for number in range(3):
        assert iou(answer.map == number, draw(frame)[0] == number) >= 0.96


@pytest.mark.parametrize("scale", ["logits", "probabilities"])
def test_one_channel_is_the_foreground(scale: str) -> None:
    frame = FRAMES["letterbox"]
    disc = distances(frame, 128)[:1, :, :, None] / 2
    outputs = {"mask": floats(disc if scale == "logits" else 1 / (1 + np.exp(-disc)))}
    head = of("semantic", outputs, frame.size)
    assert head.parameters["scores"] == scale
    answer = decode(outputs, head, frame)
    assert answer.map is not None
    assert iou(answer.map == 1, draw(frame)[0] == 0) >= 0.99


def test_heads_of_one_model_are_separate_maps() -> None:
    frame = FRAMES["stretch"]
    logits = floats(distances(frame, 64))[None]
    outputs = {"road": logits[:, :2], "lanes": logits[:, 1:], "aux": logits}
    answer = decode(outputs, of("semantic", outputs, frame.size), frame)
    assert answer.map is not None
    assert set(answer.maps) == {"lanes"}
    assert "aux" not in answer.to_json()["maps"]
    np.testing.assert_array_equal(answer.maps["lanes"], pick_class(logits[0, 1:], frame))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(2, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1.0, 0.0]))
def test_classes_that_cannot_win_change_nothing(seed: int, count: int, height: int, width: int, spread: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(count, height, width)) * spread
    frame = Frame.of(17, 13).resized(8, 8)
    np.testing.assert_array_equal(pick_class(logits, frame), map_to_original(logits, frame).argmax(axis=0))


def test_semantic_needs_evidence() -> None:
    heat = {"heat": floats(distances(FRAMES["stretch"], 32))[None]}
    assert find("semantic", heat, (128, 128), named=False) is None
    exponents = np.exp(heat["heat"])
    soft = {"soft": exponents / exponents.sum(axis=1, keepdims=True)}
    assert find("semantic", soft, (128, 128), named=False) is not None
    assert find("semantic", {"rows": np.zeros((1, 84, 10), np.float32)}, (128, 128), "ab", named=False) is None


@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (1, 64, 64, 1), (1, 64, 64)])
def test_alpha_and_depth_are_resampled_to_the_stored_image(shape: tuple[int, ...]) -> None:
    frame = FRAMES["letterbox"]
    ramp = frame.to_original(np.stack([(np.arange(64) + 0.5) * 2, np.zeros(64)], axis=-1))[:, 0]
    values = np.broadcast_to(ramp / 200, (64, 64)).reshape(shape).astype(np.float32)
    outputs = {"pha": values, "fgr": np.zeros((1, 3, 64, 64), np.float32)}
    alpha = decode(outputs, of("matting", outputs, frame.size, named=False), frame).map
    assert alpha is not None
    assert alpha.shape == (150, 200)
    np.testing.assert_allclose(alpha[75, 2:-2], (np.arange(2, 198) + 0.5) / 200, atol=1e-6)
    outputs = {"predicted_depth": values * 30}
    head = of("depth", outputs, frame.size, named=False)
    assert head.parameters["quantity"] == "inverse"
    depth = decode(outputs, head, frame).map
    assert depth is not None
    np.testing.assert_allclose(depth, alpha * 30, atol=1e-5)


def test_the_quantity_of_a_depth_is_checked() -> None:
    outputs = {"y": floats(np.ones((1, 1, 8, 8)))}
    assert find("depth", outputs, named=False) is None
    assert find("depth", outputs, quantity="miles") is None
    assert of("depth", outputs, quantity="metric").parameters["quantity"] == "metric"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("scale", ["unit", "signed", "byte"])
def test_an_image_has_the_pixels_of_the_model_without_padding(channels: int, layout: str, scale: str) -> None:
    frame = Frame.of(40, 30).resized(40, 30).placed(4, 9, (48, 48))
    pixels = np.random.default_rng(3).integers(0, 256, (channels, 96, 96))
    pixels[:, 0, :2] = (0, 255)
    values = floats({"unit": pixels / 255, "signed": pixels / 127.5 - 1, "byte": pixels}[scale])[None]
    outputs = {"y": values if layout == "NCHW" else values.transpose(0, 2, 3, 1)}
    head = of("image", outputs, frame.size, named=False)
    answer = decode(outputs, head, frame)
    assert answer.map is not None
    assert answer.map.dtype == np.uint8
    assert head.parameters["range"] == scale
    expected = np.broadcast_to(pixels[:, 18:78, 8:88].transpose(1, 2, 0), (60, 80, 3))
    np.testing.assert_array_equal(answer.map, expected)


def test_an_image_of_the_same_size_needs_a_name() -> None:
    outputs = {"y": floats(np.ones((1, 3, 48, 48)))}
    assert find("image", outputs, (48, 48), named=False) is None
    assert find("image", outputs, (48, 48)) is not None
    assert find("image", {"y": floats(np.ones((1, 5, 96, 96)))}, (48, 48)) is None


def test_outputs_of_another_shape_are_refused() -> None:
    head = of("semantic", {"y": floats(np.ones((1, 2, 8, 8)))})
    with pytest.raises(DataError, match="head semantic does not fit"):
        decode({"y": floats(np.ones((2, 8)))}, head)


def test_anomalies_have_a_score_a_map_and_a_mask() -> None:
    frame = FRAMES["stretch"]
    values = floats(1 / (1 + np.exp(-distances(frame, 128)[0])))[None, None]
    outputs = {
        "pred_score": floats([[0.93]]),
        "pred_label": np.array([[True]]),
        "anomaly_map": values,
        "pred_mask": values > 0.5,
    }
    head = of("anomaly", outputs, frame.size, named=False)
    answer = decode(outputs, head, frame)
    expected = draw(frame)[0] == 0
    assert answer.confidence == pytest.approx(0.93)
    assert list(answer.top) == [1, 0]
    assert answer.masks is not None
    assert iou(answer.masks[0], expected) >= 0.96
    np.testing.assert_allclose(answer.boxes[0], [60, 35, 140, 115], atol=1.6)
    only_map = {"anomaly_map": values}
    answer = decode(only_map, of("anomaly", only_map, named=False), frame)
    assert answer.masks is not None
    assert iou(answer.masks[0], expected) >= 0.99
    quiet = {"anomaly_map": values * 0.3}
    answer = decode(quiet, of("anomaly", quiet, named=False), frame)
    assert list(answer.top) == [0, 1]
    assert len(answer) == 0
    assert find("anomaly", {"y": values}, named=False) is None
