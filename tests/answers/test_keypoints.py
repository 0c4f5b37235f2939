"""Encode people as exporters of keypoint heads do, and decode them again."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.answers.family import View, load_family
from edgeq_device.answers.points import COCO_POINTS, lie_near
from edgeq_device.errors import DataError

from tests.answers.scenes import answer_of, check_objects, draw_objects, fit_only, frame_cases, make_frame

SIZE = (320, 256)
ROUND_TRIPS = pytest.mark.parametrize(("kind", "seed"), frame_cases())


def encode_yolo(seed: int, count: int, points: int, classes: int, values: int = 3) -> tuple[np.ndarray, ...]:
    boxes, keypoints = draw_objects(seed, count, points, SIZE)
    random = np.random.default_rng(seed)
    rows = 1680
    columns = np.zeros((4 + classes + values * points, rows))
    # Background rows are small boxes with low scores, whose keypoints lie at their centre.
    centres = random.uniform(0, SIZE, (rows, 2))
    columns[:4] = np.concatenate([centres, np.full((rows, 2), 20)], axis=1).T
    columns[4 : 4 + classes] = random.uniform(0, 0.1, (classes, rows))
    parts = [centres[:, :1], centres[:, 1:], np.full((rows, 1), 0.1)][:values]
    columns[4 + classes :] = np.tile(np.concatenate(parts, axis=1), points).T
    places = random.choice(rows, count, replace=False)
    columns[:4, places] = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1).T
    columns[4 + seed % classes, places] = random.uniform(0.5, 0.9, count)
    visible = np.full((count, points, 1), 0.8)
    full = np.concatenate([keypoints, visible], axis=2)[..., :values]
    columns[4 + classes :, places] = full.reshape(count, -1).T
    return columns[None].astype(np.float32), boxes, keypoints


@ROUND_TRIPS
@pytest.mark.parametrize("layout", ["columns", "rows"])
def test_decodes_yolo_pose(kind: str, seed: int, layout: str) -> None:
    frame = make_frame(kind, SIZE)
    array, boxes, points = encode_yolo(seed, 4, 17, 1)
    outputs = {"output0": array if layout == "columns" else array.transpose(0, 2, 1)}
    answer = answer_of("yolo-pose", fit_only("yolo-pose", outputs, SIZE), outputs, frame)
    check_objects(answer, frame, boxes, points)
    assert answer.keypoint_names == COCO_POINTS
    assert answer.to_json()["objects"][0]["keypoints"]["names"][0] == "nose"


@pytest.mark.parametrize("values", [2, 3])
def test_decodes_yolo_pose_of_several_classes_by_the_stated_keypoints(values: int) -> None:
    frame = make_frame("letterbox", SIZE)
    array, boxes, points = encode_yolo(1, 3, 5, 4, values)
    fit = fit_only("yolo-pose", {"o": array}, SIZE, keypoints=(5, values), classes=4)
    answer = answer_of("yolo-pose", fit, {"o": array}, frame)
    check_objects(answer, frame, boxes, points)
    assert answer.classes.tolist() == [1, 1, 1]
    assert answer.keypoint_names == ()


def test_decodes_yolo_pose_in_shares() -> None:
    frame = make_frame("stretch", SIZE)
    array, boxes, points = encode_yolo(0, 2, 17, 1)
    for axis in (0, 1):
        array[:, [axis, axis + 2, *range(5 + axis, 56, 3)]] /= SIZE[axis]
    family = load_family("yolo-pose")
    fit = family.fit(View({"o": array}, SIZE))
    assert fit is not None
    check_objects(answer_of("yolo-pose", fit, {"o": array}, frame), frame, boxes, points)


@ROUND_TRIPS
def test_decodes_yolo_pose_of_selected_objects(kind: str, seed: int) -> None:
    frame = make_frame(kind, SIZE)
    boxes, points = draw_objects(seed, 3, 17, SIZE)
    rows = np.zeros((1, 300, 6 + 51), np.float32)
    rows[0, :3, :4], rows[0, :3, 4] = boxes, (0.9, 0.8, 0.7)
    rows[0, :3, 6:] = np.concatenate([points, np.full((3, 17, 1), 0.9)], axis=2).reshape(3, -1)
    answer = answer_of("yolo-pose-nms", fit_only("yolo-pose-nms", {"o": rows}, SIZE), {"o": rows}, frame)
    check_objects(answer, frame, boxes, points)


def test_refuses_columns_that_are_no_keypoints() -> None:
    array, _, _ = encode_yolo(0, 3, 17, 1)
    array[0, 5:] = np.random.default_rng(0).uniform(0, 1, array[0, 5:].shape)
    assert load_family("yolo-pose").fit(View({"o": array}, SIZE)) is None
    assert not lie_near(np.zeros((0, 4)), np.zeros(0), np.zeros((0, 3, 3)))


def draw_heatmaps(points: np.ndarray, stride: int, size: tuple[int, int], sigma: float = 2.0) -> np.ndarray:
    y, x = np.mgrid[: size[1] // stride, : size[0] // stride]
    return np.stack([np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * sigma**2)) for a, b in points / stride])


@ROUND_TRIPS
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_decodes_heatmaps(kind: str, seed: int, layout: str) -> None:
    size = (192, 256)
    frame = make_frame(kind, size, (150, 210))
    random = np.random.default_rng(seed)
    # A quarter shift is exact at a quarter of a cell.
    cells = np.stack([random.integers(3, 45, 17), random.integers(3, 61, 17)], axis=1)
    points = (cells + random.choice([-0.25, 0.25], (17, 2))) * 4
    maps = draw_heatmaps(points, 4, size).astype(np.float32)[None]
    outputs = {"heatmaps": maps if layout == "NCHW" else maps.transpose(0, 2, 3, 1)}
    answer = answer_of("heatmaps", fit_only("heatmaps", outputs, size), outputs, frame)
    check_objects(answer, frame, np.array([[0, 0, *size]]), points[None])
    assert answer.keypoint_names == COCO_POINTS


def test_takes_no_map_of_areas_for_heatmaps() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (1, 19, 64, 64))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    areas = np.zeros((1, 19, 64, 64))
    areas[:, :, :32] = 1
    for array in (logits, shares, areas, -np.abs(logits), np.full((1, 19, 64, 64), np.nan)):
        assert load_family("heatmaps").fit(View({"o": array.astype(np.float32)}, (256, 256))) is None


@ROUND_TRIPS
@pytest.mark.parametrize("size", [(192, 256), (256, 256)])
def test_decodes_simcc(kind: str, seed: int, size: tuple[int, int]) -> None:
    frame = make_frame(kind, size, (150, 210))
    random = np.random.default_rng(seed)
    points = np.stack([random.integers(2, 2 * side - 2, 17) / 2 for side in size], axis=1)
    peak = random.uniform(0.4, 0.9, 17)
    rows = [
        peak[:, None] * np.exp(-((np.arange(2 * side) / 2 - points[:, axis, None]) ** 2) / 18)
        for axis, side in enumerate(size)
    ]
    x, y = (row[None].astype(np.float32) for row in rows)
    # Exports list the outputs in any order, and names tell the axes of a square input apart.
    outputs = {"simcc_y": y, "simcc_x": x}
    answer = answer_of("simcc", fit_only("simcc", outputs, size), outputs, frame)
    check_objects(answer, frame, None, points[None])
    assert answer.keypoints is not None
    np.testing.assert_allclose(answer.keypoints[0, :, 2], peak, atol=1e-6)


@ROUND_TRIPS
def test_decodes_movenet(kind: str, seed: int) -> None:
    size = (192, 192)
    frame = make_frame(kind, size)
    _, points = draw_objects(seed, 1, 17, size)
    array = np.concatenate([points[0, :, ::-1] / size, np.full((17, 1), 0.6)], axis=1)[None, None].astype(np.float32)
    outputs = {"output_0": array}
    answer = answer_of("movenet", fit_only("movenet", outputs, size), outputs, frame)
    check_objects(answer, frame, np.concatenate([points.min(axis=1), points.max(axis=1)], axis=1), points)


@ROUND_TRIPS
def test_decodes_movenet_of_several_people(kind: str, seed: int) -> None:
    frame = make_frame(kind, SIZE)
    boxes, points = draw_objects(seed, 3, 17, SIZE)
    rows = np.zeros((1, 6, 56), np.float32)
    rows[0, :3, :51] = np.concatenate([points[..., ::-1] / SIZE[::-1], np.full((3, 17, 1), 0.6)], axis=2).reshape(3, -1)
    rows[0, :3, 51:55] = boxes[:, [1, 0, 3, 2]] / np.tile(SIZE[::-1], 2)
    rows[0, :3, 55] = (0.9, 0.8, 0.7)
    fit = load_family("movenet-multipose").fit(View({"output_0": rows}, SIZE))
    assert fit is not None
    check_objects(answer_of("movenet-multipose", fit, {"output_0": rows}, frame), frame, boxes, points)


def test_decodes_line_segments() -> None:
    size = (512, 512)
    frame = make_frame("stretch", size)
    random = np.random.default_rng(3)
    centres = random.integers(60, 180, (1, 200, 2)).astype(np.int32)
    centres[0, 0] = (100, 120)
    displacements = np.zeros((1, 256, 256, 4), np.float32)
    displacements[0, 100, 120] = (-30, -10, 30, 10)
    scores = np.full((1, 200), 0.02, np.float32)
    scores[0, :2] = 0.9
    centres[0, 1] = (50, 50)
    outputs = {"a": centres, "b": scores, "c": displacements}
    answer = answer_of("mlsd", fit_only("mlsd", outputs, size), outputs, frame)
    # The second segment has no length.
    check_objects(answer, frame, np.array([[180, 180, 300, 220]]), np.array([[[180, 180], [300, 220]]]))
    assert answer.keypoint_names == ("start", "end")
    centres[0, 0] = (256, 0)
    with pytest.raises(DataError, match="centre lies outside"):
        answer_of("mlsd", load_family("mlsd").fit(View({**outputs, "a": centres * 0}, size)), outputs, frame)  # type: ignore[arg-type]
