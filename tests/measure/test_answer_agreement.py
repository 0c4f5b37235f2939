"""Compare the answers of two models, against slow references."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import Family
from edgeq_device.answers.head import Head
from edgeq_device.prepare.frame import Frame
from hypothesis import given
from hypothesis import strategies as st

from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure.answer_agreement import BOUNDS, AnswerAgreement, AnswerMeter, loosen
from edgeq.measure.answer_sums import ANSWER_TASKS
from edgeq.util.records import plain

HEAD = Head("yolov8", thresholds={"confidence": 0.25})


def family(task: str, **thresholds: float) -> Family:
    return Family("test", task, "", lambda view: None, thresholds=thresholds)


def objects(*rows: tuple[float, float, float, float, float, int], task: str = "detect", **fields: Any) -> Answer:
    table = np.array(rows, np.float64).reshape(-1, 6)
    return Answer(task, table[:, :4], table[:, 4], table[:, 5].astype(np.int64), **fields)


def compare(task: str, *pairs: tuple[Answer, Answer], **thresholds: float) -> AnswerAgreement:
    meter = AnswerMeter(Head("test"), family(task, **thresholds))
    for number, (reference, candidate) in enumerate(pairs):
        meter.update(reference, candidate, Sample(f"image {number}", {}))
    return meter.result()


def test_each_object_has_one_counterpart_of_its_class() -> None:
    float_answer = objects((0, 0, 10, 10, 0.9, 1), (20, 0, 30, 10, 0.8, 1), (40, 0, 50, 10, 0.7, 2))
    candidate = objects(
        (0, 0, 10, 9, 0.85, 1), (0, 0, 10, 10, 0.8, 1), (40, 0, 50, 10, 0.7, 3), (21, 0, 31, 10, 0.5, 1)
    )
    agreement = compare("detect", (float_answer, candidate), confidence=0.25)
    assert agreement.counts["matched"] == 2
    assert agreement.counts["missed"] == 1
    assert agreement.counts["extra"] == 2
    assert agreement.value == pytest.approx(2 / 4)
    assert agreement.figures["iou"] == pytest.approx((0.9 + 9 / 11) / 2)
    assert agreement.figures["score_bias"] == pytest.approx((-0.05 - 0.3) / 2)
    assert agreement.level == "poor"
    assert agreement.sentence == "2 of 3 objects are found again, 2 are new, mean IoU 0.859"


def test_scores_at_the_threshold_may_fall_on_either_side() -> None:
    float_answer = objects((0, 0, 10, 10, 0.27, 1), (20, 0, 30, 10, 0.24, 1), (40, 0, 50, 10, 0.9, 1))
    candidate = objects((0, 0, 10, 10, 0.23, 1), (20, 0, 30, 10, 0.26, 1), (40, 0, 50, 10, 0.24, 1))
    counts = compare("detect", (float_answer, candidate), confidence=0.25).counts
    assert {name: counts[name] for name in ("matched", "borderline", "missed", "extra", "dimmed")} == {
        "matched": 2,
        "borderline": 2,
        # The user of the quantized model does not get the third object, whose score fell far.
        "missed": 1,
        "extra": 0,
        "dimmed": 1,
    }


def test_objects_below_the_margin_do_not_count() -> None:
    float_answer = objects((0, 0, 10, 10, 0.27, 1))
    counts = compare("detect", (float_answer, objects((0, 0, 10, 10, 0.1, 1))), confidence=0.25).counts
    assert (counts["matched"], counts["missed"], counts["dimmed"]) == (0, 1, 0)


BOXES = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(0, 12),
        st.integers(1, 12),
        st.integers(1, 12),
        st.integers(2, 9),
        st.integers(0, 1),
    ).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3], b[4] / 10, b[5])),
    max_size=8,
)


@given(BOXES, BOXES)
def test_counts_are_consistent(rows: list[Any], others: list[Any]) -> None:
    reference, candidate = objects(*rows), objects(*others)
    agreement = compare("detect", (reference, candidate), confidence=0.45)
    counts, above = agreement.counts, [int((answer.scores > 0.45).sum()) for answer in (reference, candidate)]
    strong = counts["matched"] - counts["borderline"]
    assert strong + counts["missed"] <= above[0] <= counts["matched"] + counts["missed"]
    assert strong + counts["extra"] <= above[1] <= counts["matched"] + counts["extra"]
    assert counts["matched"] <= min(len(rows), len(others))
    assert counts["dimmed"] <= counts["missed"]
    assert agreement.value is None or 0 <= agreement.value <= 1


@given(BOXES)
def test_a_model_agrees_with_itself(rows: list[Any]) -> None:
    agreement = compare("detect", (objects(*rows), objects(*rows)), confidence=0.45)
    strong = int((objects(*rows).scores > 0.45).sum())
    assert agreement.counts["missed"] == agreement.counts["extra"] == 0
    assert agreement.counts["matched"] == strong
    assert agreement.level == ("healthy" if strong else None)


def test_masks_and_keypoints_of_matched_objects() -> None:
    masks = np.zeros((2, 1, 20, 20), bool)
    masks[0, 0, :10, :10] = masks[1, 0, :10, :8] = True
    points = np.zeros((2, 1, 17, 3))
    points[..., 2] = 0.9
    points[1, 0, 0, 0] = 1.0
    answers = [objects((0, 0, 10, 10, 0.9, 0), masks=m, keypoints=k) for m, k in zip(masks, points, strict=True)]
    figures = compare("pose", (answers[0], answers[1]), confidence=0.25).figures
    assert figures["mask_iou"] == pytest.approx(0.8)
    # The nose has a sigma of 0.026, and a box of 100 pixels an area of 53.
    nose = np.exp(-1 / (2 * 53 * (2 * 0.026) ** 2))
    assert figures["oks"] == pytest.approx((16 + nose) / 17)
    assert figures["distance"] == pytest.approx(1 / 17 / 10)


def test_rotated_boxes_overlap_as_they_lie() -> None:
    box = (0, 0, 20, 2, 0.9, 0)
    upright, turned = (objects(box, task="obb", angles=np.array([angle])) for angle in (0.0, np.pi / 2))
    assert compare("obb", (upright, turned)).value == 0
    half_turn = objects(box, task="obb", angles=np.array([np.pi]))
    assert compare("obb", (upright, half_turn)).figures["iou"] == pytest.approx(1)


def test_text_by_equal_texts_and_characters() -> None:
    pairs = [("kitten", "sitting"), ("abc", "abc"), ("", "")]
    agreement = compare("text", *((Answer("text", text=a), Answer("text", text=b)) for a, b in pairs))
    assert agreement.value == pytest.approx(2 / 3)
    assert agreement.figures["cer"] == pytest.approx(3 / 9)
    assert agreement.most_different(1)[0].name == "image 0"
    assert agreement.sentence == "2 of 3 texts are equal, 3 of 9 characters differ"


def test_classes_by_the_best() -> None:
    a, b = Answer("classify", top={3: 0.9, 1: 0.1}), Answer("classify", top={1: 0.6, 3: 0.4})
    agreement = compare("classify", (a, a), (a, b), (b, b), (b, b))
    assert (agreement.value, agreement.level) == (0.75, "poor")
    assert agreement.figures["score_bias"] == pytest.approx(-0.5 / 4)


def test_labels_that_neither_model_gives_do_not_count() -> None:
    a, b = Answer("multi-label", top={1: 0.9, 2: 0.8, 3: 0.7}), Answer("multi-label", top={2: 0.8, 3: 0.7, 9: 0.6})
    agreement = compare("multi-label", (a, b), (Answer("multi-label"), Answer("multi-label")))
    assert agreement.value == pytest.approx(2 / 4)


def test_maps_of_classes_against_a_loop() -> None:
    random = np.random.default_rng(1)
    maps = random.integers(0, 4, (3, 2, 32, 32))
    agreement = compare("semantic", *((Answer("semantic", map=a), Answer("semantic", map=b)) for a, b in maps))
    ious = []
    for number in range(4):
        both = either = 0
        for a, b in maps.transpose(0, 2, 3, 1).reshape(-1, 2):
            both += a == number and b == number
            either += a == number or b == number
        ious.append(both / either)
    assert agreement.value == pytest.approx(np.mean(ious))
    assert agreement.figures["pixels"] == pytest.approx((maps[:, 0] == maps[:, 1]).mean())


def test_values_in_the_range_of_the_answer() -> None:
    depth = np.linspace(2, 6, 100).reshape(10, 10)
    agreement = compare("depth", (Answer("depth", map=depth), Answer("depth", map=depth + 0.04)))
    assert agreement.value == pytest.approx(40)
    image = np.zeros((4, 4, 3), np.uint8)
    agreement = compare("image", (Answer("image", map=image), Answer("image", map=image + np.uint8(255))))
    assert agreement.value == pytest.approx(0)
    assert compare("image", (Answer("image", map=image), Answer("image", map=image))).value == 100


def test_values_that_are_not_finite_are_poor() -> None:
    depth = np.linspace(2, 6, 100).reshape(10, 10)
    broken = depth.copy()
    broken[0, 0] = np.nan
    agreement = compare("depth", (Answer("depth", map=depth), Answer("depth", map=broken)))
    assert (agreement.level, agreement.counts["nonfinite"]) == ("poor", 1)
    vectors = Answer("embedding", vector=np.ones(4)), Answer("embedding", vector=np.array([1, np.nan, 1, 1]))
    assert compare("embedding", vectors).level == "poor"


def test_windows_embeddings_and_numbers() -> None:
    voice = [Answer("voice", vector=np.array(v)) for v in ([0.1, 0.6, 0.5], [0.1, 0.4, 0.9])]
    assert compare("voice", (voice[0], voice[1]), confidence=0.5).value == pytest.approx(2 / 3)
    vectors = [Answer("embedding", vector=np.array(v)) for v in ([1.0, 0.0], [1.0, 1.0])]
    agreement = compare("embedding", (vectors[0], vectors[1]), (vectors[0], vectors[0]))
    assert agreement.figures["lowest"] == pytest.approx(0.5**0.5)
    assert agreement.value == pytest.approx((1 + 0.5**0.5) / 2)
    a, b = np.random.default_rng(2).normal(5, 1, (2, 50, 3))
    pairs = [[Answer("regression", vector=values) for values in pair] for pair in zip(a, b, strict=True)]
    agreement = compare("regression", *((x, y) for x, y in pairs))
    assert agreement.value == pytest.approx(1 - ((a - b) ** 2).sum() / ((a - a.mean(axis=0)) ** 2).sum())
    assert agreement.figures["difference"] == pytest.approx(np.abs(a - b).mean())


def test_anomalies_by_decision_and_map() -> None:
    grid = np.arange(16.0).reshape(4, 4)
    a, b = Answer("anomaly", top={1: 0.8, 0: 0.2}, map=grid), Answer("anomaly", top={1: 0.7, 0: 0.3}, map=-grid)
    agreement = compare("anomaly", (a, b), (a, a))
    assert (agreement.value, agreement.level) == (1, "poor")
    assert agreement.figures["correlation"] == pytest.approx(0)


def test_workers_may_share_the_inputs() -> None:
    random = np.random.default_rng(3)
    answers = [Answer("voice", vector=random.random(20)) for _ in range(12)]
    meters = [AnswerMeter(Head("test"), family("voice", confidence=0.5)) for _ in range(3)]
    for number, (a, b) in enumerate(pairwise(answers)):
        for meter in (meters[0], meters[1 + (number > 5)]):
            meter.update(a, b, Sample(str(number), {}))
    meters[1].take(meters[2].collected())
    assert meters[1].result() == meters[0].result()


def test_the_interval_is_that_of_many_inputs() -> None:
    random = np.random.default_rng(4)
    same, other = Answer("classify", top={1: 0.9}), Answer("classify", top={2: 0.9})
    inside = 0
    for _ in range(60):
        pairs = [(same, other if random.random() < 0.1 else same) for _ in range(80)]
        agreement = compare("classify", *pairs)
        assert agreement.low is not None
        assert agreement.high is not None
        inside += agreement.low <= 0.9 <= agreement.high
    assert inside >= 52
    perfect = compare("classify", *[(same, same)] * 20)
    assert perfect.low == pytest.approx(1 - 4 / 24)


def test_no_objects_give_no_figure() -> None:
    agreement = compare("detect", (objects(), objects()))
    assert (agreement.value, agreement.level, agreement.low) == (None, None, None)
    assert agreement.sentence == "the answers contain nothing to compare"


def test_refuses_answers_that_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="shapes are"):
        compare("depth", (Answer("depth", map=np.zeros((2, 2))), Answer("depth", map=np.zeros((2, 3)))))
    with pytest.raises(UsageError, match="songs"):
        AnswerMeter(Head("test"), family("songs"))


def test_every_task_has_bounds_and_a_record() -> None:
    assert set(BOUNDS) == set(ANSWER_TASKS)
    record = plain(compare("detect", (objects((0, 0, 9, 9, 0.9, 0)),) * 2))
    assert record["level"] == "healthy"
    assert record["samples"][0]["name"] == "image 0"


def test_a_loose_head_adds_objects_and_changes_none() -> None:
    random = np.random.default_rng(5)
    output = np.concatenate([random.random((1, 4, 200)) * 60 + 2, random.random((1, 3, 200)) * 0.5], axis=1)
    head = replace(HEAD, outputs={"rows": "rows"}, parameters={"unit": "pixel"})
    frame = Frame((64, 64), (64, 64))
    outputs = {"rows": output.astype(np.float32)}
    tight, loose = decode(outputs, head, frame), decode(outputs, loosen(head), frame)
    assert len(loose) > len(tight) > 0
    np.testing.assert_array_equal(loose.boxes[loose.scores > 0.25], tight.boxes)
    assert loose.scores.min() > 0.2 - 1e-9
    assert loosen(Head("classify")) == Head("classify")
