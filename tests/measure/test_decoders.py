from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgeq_device.answers.family import all_families
from edgeq_device.answers.grids import lay_cells, read_anchors

from edgeq.errors import UsageError
from edgeq.measure.decoders import FamilyDecode, load_decoder, recognise
from edgeq.util.registry import DECODERS

SIZE = (64, 96)  # width and height differ, so that a swap shows


def test_yolox_inverts_its_encoding() -> None:
    rng = np.random.default_rng(0)
    grid, stride = lay_cells(SIZE, (8, 16, 32))
    n = (8 * 12) + (4 * 6) + (2 * 3)
    assert grid.shape == (n, 2)
    centre = rng.uniform(0, 60, (n, 2))
    extent = rng.uniform(1, 40, (n, 2))
    head = np.concatenate([centre / stride - grid, np.log(extent / stride), rng.uniform(size=(n, 1 + 5))], axis=1)
    detections = load_decoder("yolox")({"output": head[None].astype(np.float32)}, SIZE)
    np.testing.assert_allclose(
        detections.boxes, np.concatenate([centre - extent / 2, centre + extent / 2], axis=1), atol=1e-3
    )
    assert detections.classes.tolist() == head[:, 5:].argmax(axis=1).tolist()
    np.testing.assert_allclose(detections.scores, head[:, 4] * head[:, 5:].max(axis=1), rtol=1e-5)


def test_yolox_cells_run_row_by_row_from_the_finest() -> None:
    grid, stride = lay_cells((16, 24), (8,))
    assert grid.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]
    assert stride.ravel().tolist() == [8] * 6


def test_yolox_takes_a_fourth_level() -> None:
    n = 16 * 16 + 8 * 8 + 4 * 4 + 2 * 2
    detections = load_decoder("yolox")({"output": np.zeros((1, n, 6), np.float32)}, (128, 128))
    assert detections.boxes[-1].tolist() == [32, 32, 96, 96]


def test_yolov5() -> None:
    head = np.zeros((1, 20, 8), np.float32)
    head[0, 3] = [30, 40, 10, 20, 0.5, 0.1, 0.2, 0.8]
    detections = load_decoder("yolov5")({"output": head, "raw": np.zeros((1, 3, 4, 4, 8), np.float32)}, SIZE)
    assert detections.boxes[3].tolist() == [25, 30, 35, 50]
    assert detections.classes[3] == 2
    assert detections.scores[3] == pytest.approx(0.4)


def test_yolov3_inverts_its_encoding() -> None:
    """YOLOv3 decodes an object at each level, in its own cell and with its own anchor, as the paper encodes it."""

    def logit(share: float) -> float:
        return float(np.log(share / (1 - share)))

    outputs, expected = {}, []
    for stride, place, (x, y, w, h) in (
        (32, 2, (40, 70, 100, 80)),
        (8, 0, (13, 21, 12, 20)),
        (16, 1, (50, 30, 60, 40)),
    ):
        level = np.full((3, 5 + 2, SIZE[1] // stride, SIZE[0] // stride), -20, np.float32)
        anchor = read_anchors("yolov5", 3)[(8, 16, 32).index(stride)][place]
        column, row = x // stride, y // stride
        level[place, :, row, column] = [
            logit(x / stride - column),
            logit(y / stride - row),
            np.log(w / anchor[0]),
            np.log(h / anchor[1]),
            logit(0.8),
            logit(0.1),
            logit(0.9),
        ]
        outputs[f"level{stride}"] = level.reshape(1, -1, *level.shape[2:])
        expected.append([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
    detections = load_decoder("yolov3")(outputs, SIZE)
    assert len(detections) == 3 * (8 * 12 + 4 * 6 + 2 * 3)
    best = np.argsort(-detections.scores)[:3]
    np.testing.assert_allclose(detections.scores[best], 0.72, rtol=1e-5)
    assert detections.classes[best].tolist() == [1, 1, 1]
    np.testing.assert_allclose(sorted(detections.boxes[best].tolist()), sorted(expected), rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [(1, 21, 5, 8), (1, 20, 12, 8), (2, 21, 12, 8), (1, 15, 12, 8), (1, 21, 96), (1, 21, 12, 0)]
)
def test_yolov3_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="yolov3"):
        load_decoder("yolov3")({"output": np.zeros(shape, np.float32)}, SIZE)


@pytest.mark.parametrize("transposed", [False, True])
def test_yolov8(transposed: bool) -> None:
    head = np.zeros((1, 7, 20), np.float32)
    head[0, :4, 3] = [30, 40, 10, 20]
    head[0, 4:, 3] = [0.1, 0.2, 0.9]
    detections = load_decoder("yolov8")({"output0": head.transpose(0, 2, 1) if transposed else head}, SIZE)
    assert detections.boxes[3].tolist() == [25, 30, 35, 50]
    assert detections.classes[3] == 2
    assert detections.scores[3] == pytest.approx(0.9)


def test_ssd_drops_the_background_and_scales_to_pixels() -> None:
    outputs = {
        "scores": np.array([[[0.8, 0.1, 0.1], [0.2, 0.3, 0.5]]], np.float32),
        "boxes": np.array([[[0, 0, 1, 1], [0.25, 0.5, 0.5, 0.75]]], np.float32),
    }
    detections = load_decoder("ssd")(outputs, SIZE)
    assert detections.boxes.tolist() == [[0, 0, 64, 96], [16, 48, 32, 72]]
    assert detections.classes.tolist() == [0, 1]
    assert detections.scores.tolist() == pytest.approx([0.1, 0.5])


def test_ssd_tells_boxes_from_four_scores_by_name() -> None:
    ones = np.ones((1, 2, 4), np.float32)
    assert load_decoder("ssd")({"scores": ones * 0.5, "loc": ones}, SIZE).boxes[0].tolist() == [64, 96, 64, 96]
    with pytest.raises(UsageError, match="decoder ssd takes"):
        load_decoder("ssd")({"a": ones, "b": ones}, SIZE)


@pytest.mark.parametrize("name", DECODERS.names())
@pytest.mark.parametrize("shape", [(1, 10), (2, 30, 9), (1, 3, 3)])
def test_outputs_of_another_head_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=f"decoder {name} takes .* the model gives out"):
        load_decoder(name)({"out": np.zeros(shape, np.float32)}, SIZE)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UsageError, match=r"ssd, ssd-raw, tf-detection, .*yolov3, yolov3-nms, yolov5"):
        load_decoder("faster")


def test_a_users_own_decoder(tmp_path: Path) -> None:
    path = tmp_path / "head.py"
    path.write_text("def decode(outputs, size): return size\n")
    assert load_decoder(f"{path}:decode")({}, SIZE) == SIZE


def test_yolov3_of_the_model_zoo_reads_what_was_kept() -> None:
    boxes = np.float32([[[1, 2, 5, 8], [0, 0, 9, 9]]])
    scores = np.float32([[[0.1, 0.2], [0.3, 0.9], [0.4, 0.5]]])
    decode = load_decoder("yolov3-nms")
    for indices in (np.int32([[0, 1, 1], [0, 2, 0]]), np.int32([[[0, 1, 1], [0, 2, 0]]])):
        detections = decode({"boxes": boxes, "scores": scores, "indices": indices}, SIZE)
        assert detections.boxes.tolist() == [[0, 0, 9, 9], [2, 1, 8, 5]]
        assert detections.scores.tolist() == pytest.approx([0.9, 0.4])
        assert detections.classes.tolist() == [1, 2]
    for wrong in ([0, 3, 0], [0, 0, 2], [1, 0, 0], [0, -1, 0]):
        with pytest.raises(UsageError, match="its own boxes and classes"):
            decode({"boxes": boxes, "scores": scores, "indices": np.int32([wrong])}, SIZE)
    with pytest.raises(UsageError, match="yolov3-nms takes"):
        decode({"boxes": boxes, "scores": scores}, SIZE)


IMAGE = (64, 64)


def nanodet_by_loops(head: np.ndarray, classes: int) -> list[list[float]]:
    """Decode one image's head cell by cell and side by side."""
    corners, row = [], 0
    for stride in (8, 16, 32):
        for y in range(-(-IMAGE[1] // stride)):
            for x in range(-(-IMAGE[0] // stride)):
                sides = []
                for side in range(4):
                    logits = head[row, classes + 8 * side : classes + 8 * side + 8]
                    weights = np.exp(logits) / np.exp(logits).sum()
                    sides.append(sum(i * weight for i, weight in enumerate(weights)) * stride)
                corners.append(
                    [x * stride - sides[0], y * stride - sides[1], x * stride + sides[2], y * stride + sides[3]]
                )
                row += 1
    return corners


def test_nanodet_equals_loops() -> None:
    random = np.random.default_rng(0)
    head = np.concatenate([random.random((84, 3)), random.normal(size=(84, 32))], axis=1)
    detections = load_decoder("nanodet")({"y": head[None]}, IMAGE)
    assert np.allclose(detections.boxes, nanodet_by_loops(head, 3))
    assert np.array_equal(detections.classes, head[:, :3].argmax(axis=1))


def heads() -> dict[str, dict[str, np.ndarray]]:
    """Return the outputs of each head for an image of 64 x 64."""
    random = np.random.default_rng(0)
    scores = random.random((84, 8))
    logarithms = random.normal(size=(84, 4))
    pixels = random.uniform(1, 64, (252, 4))
    corners = np.sort(random.uniform(0, 64, (30, 2, 2)), axis=1).reshape(30, 4)
    selected = np.concatenate([corners, random.random((30, 1)), random.integers(0, 7, (30, 1))], axis=1)
    levels = {f"y{n}": random.normal(size=(1, 36, n, n)) for n in (2, 4, 8)}
    for level in levels.values():
        level[:, 4::12] -= 5  # most cells see no object
    probabilities = random.random((1, 30, 7))
    return {
        "yolox": {"y": np.concatenate([logarithms, scores], axis=1)[None]},
        "yolov5": {"y": np.concatenate([pixels, random.random((252, 8))], axis=1)[None]},
        "yolov8": {"y": np.concatenate([pixels[:84], scores], axis=1).T[None]},
        "nanodet": {"y": np.concatenate([scores[:, :7], random.normal(size=(84, 32))], axis=1)[None]},
        "detections": {"y": selected[None]},
        "ssd": {"scores": probabilities / probabilities.sum(axis=2, keepdims=True), "boxes": corners[None] / 64},
        "yolov3": levels,
    }


@pytest.mark.parametrize("name", list(heads()))
def test_a_head_is_recognised_by_its_outputs(name: str) -> None:
    both = ["yolov3", "yolov5-raw"]  # levels before their sigmoid do not tell these apart
    expected = both if name == "yolov3" else [name]
    assert [decoder.name for decoder in recognise(heads()[name], IMAGE)] == expected


def test_every_family_of_detectors_is_a_decoder() -> None:
    names = [family.name for family in all_families() if family.task == "detect"]
    assert sorted(set(DECODERS.builtin())) == sorted(names)


def test_a_settled_decoder_keeps_its_parameters() -> None:
    """The unit of the first image holds for an image whose boxes are all empty, or tiny."""
    rows = heads()["detections"]["y"] / np.array([64, 64, 64, 64, 1, 1])
    decode = load_decoder("detections")
    assert isinstance(decode, FamilyDecode)
    settled = decode.settled({"y": rows}, IMAGE)
    assert settled is not None
    tiny = np.array([[[0.0, 0.0, 0.5, 0.5, 0.9, 0.0]]])
    assert settled({"y": tiny}, IMAGE).boxes.tolist() == [[0, 0, 32, 32]]


def test_decoded_boxes_on_the_cells_of_yolox_are_not_taken_for_logarithms() -> None:
    random = np.random.default_rng(0)
    decoded = np.concatenate([random.uniform(1, 64, (84, 4)), random.random((84, 8))], axis=1)[None]
    # The first score may be an objectness, or a class of YOLOv8 with transposed rows.
    assert [decoder.name for decoder in recognise({"y": decoded}, IMAGE)] == ["yolov5", "yolov8"]


def test_recognises_no_head_in_other_outputs() -> None:
    for outputs in ({"y": np.ones((1, 1000))}, {"y": np.full((1, 84, 13), 5.0)}, {"y": np.ones((1, 3, 64, 64))}):
        assert recognise(outputs, IMAGE) == []
