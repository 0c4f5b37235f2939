"""Encode faces as YuNet, SCRFD and RetinaFace do, and decode them again."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.answers.families.retinaface import make_priors
from edgeq_device.answers.family import View, load_family
from edgeq_device.answers.points import FACE_POINTS
from edgeq_device.errors import DataError

from tests.answers.scenes import answer_of, check_objects, draw_objects, fit_only, frame_cases, make_frame

SIZE = (320, 256)
ROUND_TRIPS = pytest.mark.parametrize(("kind", "seed"), frame_cases())


def encode_levels(seed: int, anchors: int, faces: int = 3) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the outputs of levels by "role_stride", each face at a random cell of a random level."""
    boxes, points = draw_objects(seed, faces, 5, SIZE)
    random = np.random.default_rng(seed)
    levels = {s: (SIZE[0] // s) * (SIZE[1] // s) * anchors for s in (8, 16, 32)}
    outputs = {f"{role}_{s}": random.uniform(0, 0.1, (1, n, w)) for s, n in levels.items() for role, w in ROLES.items()}
    for box, keypoints in zip(boxes, points, strict=True):
        stride = int(random.choice(list(levels)))
        cell = np.floor((box[:2] + box[2:]) / 2 / stride)
        place = int(cell[1] * (SIZE[0] // stride) + cell[0]) * anchors + int(random.integers(anchors))
        corner = cell * stride
        if anchors == 1:
            centre, side = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
            outputs[f"box_{stride}"][0, place] = [*(centre - corner) / stride, *np.log(side / stride)]
        else:
            outputs[f"box_{stride}"][0, place] = [*(corner - box[:2]) / stride, *(box[2:] - corner) / stride]
        outputs[f"points_{stride}"][0, place] = ((keypoints - corner) / stride).reshape(-1)
        outputs[f"score_{stride}"][0, place], outputs[f"object_{stride}"][0, place] = 0.9, 0.8
    return {name: array.astype(np.float32) for name, array in outputs.items()}, boxes, points


ROLES = {"score": 1, "object": 1, "box": 4, "points": 10}


@ROUND_TRIPS
def test_decodes_yunet(kind: str, seed: int) -> None:
    frame = make_frame(kind, SIZE)
    outputs, boxes, points = encode_levels(seed, 1)
    answer = answer_of("yunet", fit_only("yunet", outputs, SIZE), outputs, frame)
    check_objects(answer, frame, boxes, points)
    np.testing.assert_allclose(answer.scores, np.sqrt(0.72), rtol=1e-5)
    assert answer.keypoint_names == FACE_POINTS


@ROUND_TRIPS
@pytest.mark.parametrize("with_points", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_decodes_scrfd_without_names(kind: str, seed: int, with_points: bool, batch: bool) -> None:
    frame = make_frame(kind, SIZE)
    levels, boxes, points = encode_levels(seed, 2)
    roles = ("score", "box", "points") if with_points else ("score", "box")
    arrays = [levels[f"{role}_{stride}"] for role in roles for stride in (8, 16, 32)]
    order = np.random.default_rng(seed).permutation(len(arrays))
    outputs = {str(440 + place): arrays[place] if batch else arrays[place][0] for place in order}
    answer = answer_of("scrfd", fit_only("scrfd", outputs, SIZE), outputs, frame)
    check_objects(answer, frame, boxes, points if with_points else None)
    assert (answer.keypoints is None) is not with_points


@ROUND_TRIPS
@pytest.mark.parametrize("scores", ["softmax", "logits"])
def test_decodes_retinaface(kind: str, seed: int, scores: str) -> None:
    frame = make_frame(kind, SIZE)
    boxes, points = draw_objects(seed, 3, 5, SIZE)
    priors = make_priors(SIZE)
    assert len(priors) == 2 * (40 * 32 + 20 * 16 + 10 * 8)
    assert priors[:2].tolist() == [[4, 4, 16], [4, 4, 32]]
    locations, landmarks = np.zeros((1, len(priors), 4)), np.zeros((1, len(priors), 10))
    logits = np.tile([4.0, -4.0], (1, len(priors), 1))
    for place, box, keypoints in zip(
        np.random.default_rng(seed).choice(len(priors), 3, False), boxes, points, strict=True
    ):
        centre, side = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
        prior, length = priors[place, :2], priors[place, 2]
        locations[0, place] = [*(centre - prior) / length / 0.1, *np.log(side / length) / 0.2]
        landmarks[0, place] = ((keypoints - prior) / length / 0.1).reshape(-1)
        logits[0, place] = (-3, 3)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    confidences = logits if scores == "logits" else probabilities
    arrays = {"420": confidences, "loc": locations, "421": landmarks}
    outputs = {name: array.astype(np.float32) for name, array in arrays.items()}
    answer = answer_of("retinaface", fit_only("retinaface", outputs, SIZE), outputs, frame)
    check_objects(answer, frame, boxes, points)
    np.testing.assert_allclose(answer.scores, 1 / (1 + np.exp(-6)), rtol=1e-5)


def test_refuses_levels_of_another_size() -> None:
    outputs, _, _ = encode_levels(0, 1)
    for size in ((640, 640), (0, 0)):
        assert load_family("yunet").fit(View(outputs, size)) is None
    fit = fit_only("yunet", outputs, SIZE)
    with pytest.raises(DataError, match="does not have"):
        answer_of("yunet", fit, outputs, make_frame("stretch", (640, 640)))


def test_refuses_one_level_and_distances_that_cross() -> None:
    outputs, _, _ = encode_levels(0, 2)
    scrfd = {name: array for name, array in outputs.items() if not name.startswith("object")}
    assert load_family("scrfd").fit(View({n: a for n, a in scrfd.items() if n.endswith("_8")}, SIZE)) is None
    swapped = {name: -array if name.startswith("box") else array for name, array in scrfd.items()}
    assert load_family("scrfd").fit(View(swapped, SIZE)) is None
