"""Measure answers against labels, with slow references for each statistic."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.head import Head
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgeq.data.sample import Sample
from edgeq.errors import DataError, UsageError
from edgeq.measure import polygons
from edgeq.measure.answer_metric import AnswerMetric, with_head
from edgeq.measure.edit_distance import count_edits
from edgeq.measure.picture_quality import compute_ssim
from edgeq.measure.resample import draw_halves
from edgeq.measure.task import REGISTRY, make_task
from edgeq.measure.tasks import (
    depth,
    enhancement,
    image_quality,
    multi_label,
    text_detection,
    verification,
    voice_activity,
)


def measure(name: str, *pairs: tuple[Answer, Any]) -> dict[str, float]:
    task = make_task(name)
    assert isinstance(task, AnswerMetric)
    return dict(task.summarize([task.read(a, Sample(f"{n}", {}, label)) for n, (a, label) in enumerate(pairs)]))


def slow_edits(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(slow_edits(a[1:], b) + 1, slow_edits(a, b[1:]) + 1, slow_edits(a[1:], b[1:]) + (a[0] != b[0]))


SHORT = st.text("abc", max_size=5)


@given(SHORT, SHORT)
def test_edits_against_recursion(a: str, b: str) -> None:
    assert count_edits(a, b) == slow_edits(a, b)


def test_text_by_total_edits() -> None:
    pairs = [("ab cd", "ab  cd "), ("ﬁne", "fine"), ("Abc", "abc d")]
    figures = measure("text-recognition", *((Answer("text", text=a), b) for a, b in pairs))
    assert figures == {"exact": pytest.approx(2 / 3), "cer": pytest.approx(3 / 14), "wer": pytest.approx(2 / 5)}


def test_text_in_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("007\n", "utf-8")
    assert measure("text-recognition", (Answer("text", text="007"), tmp_path / "a.txt"))["exact"] == 1


def test_classes_of_pixels_without_255(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    truth = random.choice([0, 1, 2, 255], (32, 32)).astype(np.uint8)
    answer = random.integers(0, 3, (32, 32))
    picture = Image.fromarray(truth)
    picture.putpalette(list(range(255, -1, -1)) * 3)
    picture.save(tmp_path / "mask.png")
    figures = measure("semantic-segmentation", (Answer("semantic", map=answer), tmp_path / "mask.png"))
    ious, right, pixels = [], 0, 0
    for number in range(3):
        both = either = 0
        for t, a in zip(truth.reshape(-1), answer.reshape(-1), strict=True):
            both += t == number == a
            either += t != 255 and number in (t, a)
        ious.append(both / either)
    for t, a in zip(truth.reshape(-1), answer.reshape(-1), strict=True):
        pixels += t != 255
        right += t == a
    assert figures == {"miou": pytest.approx(np.mean(ious)), "accuracy": pytest.approx(right / pixels)}


def test_depth_up_to_scale_and_shift() -> None:
    truth = np.random.default_rng(2).uniform(1, 10, (16, 16))
    truth[0, 0] = 0
    disparity = np.divide(3, truth, out=np.zeros_like(truth), where=truth > 0) + 2
    figures = measure("depth", (Answer("depth", map=disparity), truth))
    assert figures["abs_rel"] == pytest.approx(0, abs=1e-9)
    assert figures["delta1"] == 1
    figures = measure("depth", (Answer("depth", map=truth * 1.1), truth))
    assert figures["metric_abs_rel"] == pytest.approx(0.1)
    assert figures["metric_rmse"] == pytest.approx(0.1 * math.sqrt((truth[truth > 0] ** 2).mean()))
    assert (figures["metric_delta1"], figures["delta1"]) == (1, 1)
    assert measure("depth", (Answer("depth", map=truth * 1.3), truth))["metric_delta1"] == 0


def test_the_fit_is_the_best() -> None:
    random = np.random.default_rng(3)
    truth, values = random.uniform(1, 10, 50), random.uniform(-1, 1, 50)
    fitted = 1 / depth.fit_disparity(values, truth)
    error = ((fitted - 1 / truth) ** 2).sum()
    for scale, shift in random.normal(0, 0.01, (50, 2)):
        assert ((fitted * (1 + scale) + shift - 1 / truth) ** 2).sum() >= error


def slow_ssim(x: Any, y: Any, data_range: float) -> float:
    weights = np.array([[math.exp(-(i**2 + j**2) / 4.5) for i in range(-5, 6)] for j in range(-5, 6)])
    weights /= weights.sum()
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
            ma, mb = (weights * a).sum(), (weights * b).sum()
            va, vb, ab = (
                (weights * (a - ma) ** 2).sum(),
                (weights * (b - mb) ** 2).sum(),
                (weights * (a - ma) * (b - mb)).sum(),
            )
            c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
            values.append((2 * ma * mb + c1) * (2 * ab + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return float(np.mean(values))


def test_ssim_against_a_loop() -> None:
    x, y = np.random.default_rng(4).integers(0, 256, (2, 14, 16)).astype(np.float64)
    assert compute_ssim(x, y, 255.0) == pytest.approx(slow_ssim(x, y, 255.0))
    assert compute_ssim(x, x, 255.0) == pytest.approx(1)


def test_ssim_is_that_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    x, y = np.random.default_rng(5).integers(0, 256, (2, 40, 30)).astype(np.float64)
    settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255.0}
    assert compute_ssim(x, y, 255.0) == pytest.approx(metrics.structural_similarity(x, y, **settings), abs=1e-6)


def test_images_against_targets(tmp_path: Path) -> None:
    target = np.random.default_rng(6).integers(0, 250, (20, 20, 3)).astype(np.uint8)
    Image.fromarray(target).save(tmp_path / "target.png")
    figures = measure("image-quality", (Answer("image", map=target + np.uint8(5)), tmp_path / "target.png"))
    assert figures["psnr"] == pytest.approx(20 * math.log10(255 / 5))
    white = np.full((1, 1, 3), 255.0)
    assert image_quality.to_luma(white) == pytest.approx(np.array([[235.0]]))
    with pytest.raises(DataError, match="target is"):
        measure("image-quality", (Answer("image", map=target[1:]), target))


def test_regression_by_definition() -> None:
    a, b = np.random.default_rng(7).normal(0, 1, (2, 30))
    figures = measure(
        "regression", *((Answer("regression", vector=np.array([x])), float(y)) for x, y in zip(a, b, strict=True))
    )
    assert figures["r2"] == pytest.approx(1 - ((a - b) ** 2).sum() / ((b - b.mean()) ** 2).sum())
    assert figures["mae"] == pytest.approx(np.abs(a - b).mean())


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=12), st.sampled_from([0.0, 0.2, 0.5]))
def test_misses_against_all_thresholds(rows: list[tuple[int, bool]], allowed: float) -> None:
    scores, labels = np.array([r[0] for r in rows], np.float64), np.array([r[1] for r in rows])
    misses = []
    for threshold in (*range(11), 99):
        if labels.all() or not labels.any():
            return
        if (scores[~labels] >= threshold).mean() <= allowed + 1e-9:
            misses.append((scores[labels] < threshold).mean())
    # Between two scores there is a threshold too.
    assert voice_activity.find_miss_rate(scores, labels.astype(int), allowed) == pytest.approx(min(misses))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=10))
def test_average_precision_against_a_loop(rows: list[tuple[int, bool]]) -> None:
    scores, positive = np.array([r[0] for r in rows], np.float64), np.array([r[1] for r in rows])
    if not positive.any():
        return
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        hits = (positive & (scores >= threshold)).sum()
        total += (hits / positive.sum() - recall) * hits / (scores >= threshold).sum()
        recall = hits / positive.sum()
    assert multi_label.average_precision(scores, positive) == pytest.approx(total)


def test_labels_in_text() -> None:
    rows = [({0: 0.9, 1: 0.2}, "0"), ({0: 0.1, 1: 0.8}, "0 1")]
    assert measure("multi-label", *((Answer("multi-label", top=t), n) for t, n in rows))["mAP"] == 1
    with pytest.raises(DataError, match="class numbers"):
        measure("multi-label", (Answer("multi-label"), "0.5"))


def test_verification_against_all_pairs() -> None:
    random = np.random.default_rng(8)
    names = [f"p{n % 6}" for n in range(36)]
    centres = random.normal(0, 1, (6, 8))
    vectors = [centres[n % 6] + random.normal(0, 0.9, 8) for n in range(36)]
    figures = measure(
        "verification", *((Answer("embedding", vector=v), n) for v, n in zip(vectors, names, strict=True))
    )
    unit = [v / np.linalg.norm(v) for v in vectors]
    pairs = [(float(unit[i] @ unit[j]), names[i] == names[j]) for i, j in combinations(range(36), 2)]
    highest = max(score for score, same in pairs if not same)
    assert figures["tar"] == pytest.approx(np.mean([score > highest for score, same in pairs if same]))
    hits = 0
    for i in range(36):
        nearest = max((j for j in range(36) if j != i), key=lambda j: float(unit[i] @ unit[j]))
        hits += names[nearest] == names[i]
    assert figures["recall@1"] == pytest.approx(hits / 36)
    assert 0.5 < figures["accuracy"] <= 1


def test_the_best_threshold_against_all() -> None:
    random = np.random.default_rng(9)
    same, different = random.normal(1, 1, 20), random.normal(0, 1, 30)
    chosen = verification.best_threshold(same, different)
    best = max((same > t).mean() + (different <= t).mean() for t in (*same, *different, -9))
    assert (same > chosen).mean() + (different <= chosen).mean() == pytest.approx(best)


def test_lines_of_text_one_to_one() -> None:
    square = np.array([[0, 0], [10, 0], [10, 10], [0, 10]], np.float64)
    lines = square + np.array([[[0, 0]], [[1, 0]], [[40, 0]], [[60, 0]]])
    label = "0,0,10,0,10,10,0,10,word, and comma\n100,0,110,0,110,10,100,10\n38,-2,52,-2,52,12,38,12,###\n"
    figures = measure("text-detection", (Answer("text-detect", polygons=lines), label))
    assert figures == {"hmean": 0.4, "recall": 0.5, "precision": pytest.approx(1 / 3)}
    with pytest.raises(DataError, match="line 1"):
        text_detection.parse_lines("1,2,3", "file")
    with pytest.raises(DataError, match="line 1"):
        text_detection.parse_lines("1,2,3,4,5,6,7,inf", "file")


ANGLED = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(4, 14), st.integers(4, 14), st.floats(-3, 3))


@given(ANGLED, ANGLED)
def test_polygon_overlap_against_a_raster(a: Any, b: Any) -> None:
    corners = polygons.find_corners(
        np.array([[x, y, x + w, y + h] for x, y, w, h, _ in (a, b)], np.float64), np.array([a[4], b[4]])
    )
    x, y = np.meshgrid(np.arange(-16, 40, 0.125) + 0.0625, np.arange(-16, 40, 0.125) + 0.0625)
    masks = []
    for cx, cy, w, h, t in ((r[0] + r[2] / 2, r[1] + r[3] / 2, *r[2:]) for r in (a, b)):
        dx, dy = x - cx, y - cy
        along, across = dx * math.cos(t) + dy * math.sin(t), dy * math.cos(t) - dx * math.sin(t)
        masks.append((np.abs(along) <= w / 2) & (np.abs(across) <= h / 2))
    expected = (masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum()
    assert polygons.compute_polygon_overlaps(corners[:1], corners[1:])[0, 0] == pytest.approx(expected, abs=0.02)


def test_polygon_overlap_is_that_of_shapely() -> None:
    shapely = pytest.importorskip("shapely")
    points = np.random.default_rng(10).uniform(0, 10, (20, 6, 2))
    overlaps = polygons.compute_polygon_overlaps(points, points[::-1])
    hulls = [shapely.MultiPoint(p).convex_hull for p in points]
    for i, a in enumerate(hulls):
        for j, b in enumerate(hulls[::-1]):
            assert overlaps[i, j] == pytest.approx(a.intersection(b).area / a.union(b).area)


def test_si_sdr_ignores_the_scale() -> None:
    random = np.random.default_rng(11)
    clean, noise = random.normal(0, 1, (2, 4000))
    noise -= noise.mean()
    centred = clean - clean.mean()
    noise -= (noise @ centred) / (centred @ centred) * centred
    noise *= math.sqrt((centred @ centred) / (noise @ noise)) / 10
    for scale in (0.1, 1, 7):
        assert enhancement.compute_si_sdr(scale * (clean + noise) + 3, clean) == pytest.approx(20)
    meter = make_task("enhancement").start()
    meter.update({"wave": clean[None]}, Sample("a", {}, clean))
    assert meter.result() == {"si_sdr": 100}
    with pytest.raises(DataError, match="values for a wave"):
        meter.update({"wave": clean[None]}, Sample("a", {}, clean[1:]))


def test_a_meter_decodes_by_the_head() -> None:
    head = Head("classify", {"scores": "scores"}, {"scores": "probabilities"})
    task = AnswerMetric(
        "best", "mean", lambda a, s: a.top[0], lambda v: {"mean": float(np.mean(v))}, frozenset({"classify"})
    )
    with pytest.raises(UsageError, match="needs the model's head"):
        task.start()
    settled = with_head(task, head)
    meters = [settled.start() for _ in range(3)]
    for number in range(10):
        for meter in (meters[0], meters[1 + number // 6]):
            meter.update({"scores": np.array([[number / 10, 1 - number / 10]])}, Sample("s", {}))
    meters[1].take(meters[2].collected())
    assert meters[1].result() == meters[0].result() == {"mean": pytest.approx(0.45)}
    halves = draw_halves(10)
    np.testing.assert_allclose(meters[0].resampled(halves), halves @ (np.arange(10) / 10) / halves.sum(axis=1))
    with pytest.raises(UsageError, match="does not read the answers"):
        with_head(make_task("depth"), head).start()
    assert with_head(make_task("classification"), head) == make_task("classification")


@pytest.mark.parametrize("name", ["text-recognition", "semantic-segmentation", "depth", "regression", "verification"])
def test_labels_are_necessary(name: str) -> None:
    assert REGISTRY.load(name).title
    with pytest.raises(DataError, match="has no label"):
        measure(name, (Answer("any", vector=np.ones(2)), None))
