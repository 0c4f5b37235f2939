"""Compare the answers of two models for one input, as sums that can be added up over inputs.

Each task has a function that returns the sums of one input, and a function from (added) sums to figures. So figures
over all inputs, over one input and over any selection of inputs come from the same two functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.measure.boxes import compute_overlap
from edgeq.measure.edit_distance import count_edits
from edgeq.measure.keypoint_similarity import BOX_SHARE, compute_similarity
from edgeq.measure.picture_quality import to_decibels
from edgeq.measure.polygons import compute_polygon_overlaps, find_corners
from edgeq.measure.rank_statistics import correlation

Sums = dict[str, float]
Figures = dict[str, float]
# Two objects are one if they overlap so far (COCO, VOC).
_SAME_OBJECT = 0.5
# Scores so close to the threshold fall on either side of it by rounding alone.
_MARGIN = 0.05


@dataclass(frozen=True)
class Limits:
    """Hold the thresholds of an answer.

    Attributes:
        confidence: score that an object must exceed, or a window of speech must reach.
        keypoint: score from which a keypoint counts as visible.
    """

    confidence: float = 0.0
    keypoint: float = 0.5

    @property
    def margin(self) -> float:
        """Return how far from the threshold a score counts as being at it: 0.05, or half of a threshold below 0.1."""
        return min(_MARGIN, self.confidence / 2)


@dataclass(frozen=True)
class AnswerTask:
    """Describe how the answers of one task are compared.

    Attributes:
        primary: name of the primary figure.
        compare: function from the reference's and the candidate's answer to sums.
        summarize: function from sums to figures. It leaves out those that are undefined.
        describe: function from sums and figures to a sentence for users.
        share: names of the two sums whose ratio is the primary figure, if it is a share of events; else ().
        unit: "dB", or "" for a figure whose best value is 1.
    """

    primary: str
    compare: Callable[[Answer, Answer, Limits], Sums]
    summarize: Callable[[Mapping[str, float]], Figures]
    describe: Callable[[Mapping[str, float], Mapping[str, float]], str]
    share: tuple[str, ...] = ()
    unit: str = field(default="", kw_only=True)


def _ratio(sums: Mapping[str, float], numerator: str, denominator: str) -> float | None:
    total = sums.get(denominator, 0.0)
    return sums.get(numerator, 0.0) / total if total else None


def _drop_undefined(figures: Mapping[str, float | None]) -> Figures:
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def compare_objects(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Match the objects of two answers one to one.

    Both answers were decoded with a threshold lower by the margin (`edgeq.measure.answer_agreement.loosen`). Objects
    above the head's threshold are the ones that a user gets. The candidate's objects take, in order of their scores,
    the free object of the reference of their class that they overlap most, if the IoU is at least 0.5. There are three
    rounds:

    1. Users' objects of both models: matched.
    2. An object of either model whose score is within the margin above the threshold, with a counterpart of the other
       model within the margin below: matched as well, and counted as `borderline`. Both scores are at the threshold,
       so rounding alone decides which side they are on.
    3. An object of the reference well above the threshold with a counterpart just below: missed, because a user does
       not get it, and counted as `dimmed`. A lower threshold gives it back.

    All other objects of the reference are missed, and all others of the candidate are extra. `objects` is the number
    of matched objects and of the missed or the extra ones, whichever are more.
    """
    t, close = limits.confidence, limits.confidence + limits.margin
    overlaps = np.where(reference.classes[:, None] == candidate.classes, compute_overlaps(reference, candidate), 0.0)
    free = np.ones(len(reference), bool), np.ones(len(candidate), bool)

    def match(of_reference: NDArray[np.bool_], of_candidate: NDArray[np.bool_]) -> list[tuple[int, int]]:
        pairs = []
        for place in np.argsort(-candidate.scores, kind="stable"):
            usable = np.where(free[0] & of_reference, overlaps[:, place], 0.0)
            if not free[1][place] or not of_candidate[place] or not usable.max(initial=0.0) >= _SAME_OBJECT:
                continue
            best = int(usable.argmax())
            free[0][best] = free[1][place] = False
            pairs.append((best, int(place)))
        return pairs

    r, c = reference.scores, candidate.scores
    matched = match(r > t, c > t)
    below = [(scores <= t) & (scores > t - limits.margin) for scores in (r, c)]
    borderline = match((r > t) & (r <= close), below[1]) + match(below[0], (c > t) & (c <= close))
    missed, extra = int((free[0] & (r > t)).sum()), int((free[1] & (c > t)).sum())
    dimmed = match(r > close, below[1])
    pairs = matched + borderline
    differences = np.array([c[j] - r[i] for i, j in pairs])
    sums = {
        "matched": len(pairs),
        "borderline": len(borderline),
        "missed": missed,
        "extra": extra,
        "dimmed": len(dimmed),
        "objects": len(pairs) + max(missed, extra),
        "iou": sum(overlaps[i, j] for i, j in pairs),
        "score": differences.sum(),
        "score_squared": (differences**2).sum(),
    }
    if reference.masks is not None and candidate.masks is not None:
        sums["mask_iou"] = sum(_mask_overlap(reference.masks[i], candidate.masks[j]) for i, j in pairs)
    if reference.keypoints is not None and candidate.keypoints is not None:
        figures = [_compare_keypoints(reference, i, candidate.keypoints[j], limits) for i, j in pairs]
        sums["oks"], sums["distance"] = np.array(figures).reshape(-1, 2).sum(axis=0)
    return {name: float(value) for name, value in sums.items()}


def compute_overlaps(reference: Answer, candidate: Answer) -> NDArray[np.float64]:
    """Return the IoU of each object with each of the other answer, [N, M]: of polygons or rotated boxes, where the
    answers have them, else of upright boxes. Objects with keypoints and an empty box have the box around these.
    """
    if reference.polygons is not None and candidate.polygons is not None:
        return compute_polygon_overlaps(reference.polygons, candidate.polygons)
    if reference.angles is not None and candidate.angles is not None:
        corners = find_corners(reference.boxes, reference.angles)
        return compute_polygon_overlaps(corners, find_corners(candidate.boxes, candidate.angles))
    boxes, others = _find_boxes(reference), _find_boxes(candidate)
    return np.array([compute_overlap(box, others) for box in boxes]).reshape(len(boxes), len(others))


def _find_boxes(answer: Answer) -> NDArray[np.float64]:
    boxes: NDArray[np.float64] = np.asarray(answer.boxes, np.float64).reshape(-1, 4)
    if answer.keypoints is None or not answer.keypoints.size:
        return boxes
    points = answer.keypoints[..., :2]
    around = np.concatenate([points.min(axis=1), points.max(axis=1)], axis=1)
    empty = (boxes[:, 2:] <= boxes[:, :2]).any(axis=1, keepdims=True)
    return np.where(empty, around, boxes)


def _mask_overlap(mask: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    union = np.count_nonzero(mask | other)
    return np.count_nonzero(mask & other) / union if union else 1.0


def _compare_keypoints(reference: Answer, place: int, points: Any, limits: Limits) -> tuple[float, float]:
    """Return the OKS, and the mean distance of the keypoints as a share of the object's size."""
    assert reference.keypoints is not None, "the caller made sure"
    target = reference.keypoints[place]
    visible = target[:, 2] >= limits.keypoint
    # Models without a score for points have all of them visible.
    visible = visible if visible.any() else np.ones(len(target), bool)
    x1, y1, x2, y2 = _find_boxes(reference)[place]
    area = max(x2 - x1, 0.0) * max(y2 - y1, 0.0)
    distances = np.linalg.norm(points[visible, :2] - target[visible, :2], axis=1)
    oks = compute_similarity(points[:, :2], target[:, :2], visible, area * BOX_SHARE)
    return oks, float(distances.mean() / max(math.sqrt(area), 1.0))


def summarize_objects(sums: Mapping[str, float]) -> Figures:
    """Return the share of matched objects, and the mean overlap and score difference of these."""
    squared = _ratio(sums, "score_squared", "matched")
    return _drop_undefined(
        {
            "matched": _ratio(sums, "matched", "objects"),
            "iou": _ratio(sums, "iou", "matched"),
            "mask_iou": _ratio(sums, "mask_iou", "matched") if "mask_iou" in sums else None,
            "oks": _ratio(sums, "oks", "matched") if "oks" in sums else None,
            "distance": _ratio(sums, "distance", "matched") if "distance" in sums else None,
            "score_bias": _ratio(sums, "score", "matched"),
            "score_rms": math.sqrt(squared) if squared is not None else None,
        }
    )


def _describe_objects(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    objects = int(sums["matched"] + sums["missed"])
    parts = [f"{int(sums['matched'])} of {objects} object{'s' * (objects != 1)} are found again"]
    if sums["dimmed"]:
        parts.append(f"{int(sums['dimmed'])} of the missed score just below the threshold")
    if sums["extra"]:
        parts.append(f"{int(sums['extra'])} are new")
    labels = {"iou": "mean IoU", "mask_iou": "of masks", "oks": "OKS"}
    parts += [f"{label} {figures[name]:.3f}" for name, label in labels.items() if name in figures]
    return ", ".join(parts)


def compare_top(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Compare the best class of both answers, and the score that the candidate gives to the reference's."""
    del limits
    best = next(iter(reference.top), None)
    sums = {"same": float(best == next(iter(candidate.top), None)), "answers": 1.0}
    if best is not None and best in candidate.top:
        difference = candidate.top[best] - reference.top[best]
        sums.update(scored=1.0, score=difference, score_squared=difference**2)
    if reference.map is not None and candidate.map is not None and np.size(reference.map):
        a, b = (np.asarray(values, np.float64).reshape(-1) for values in _same_shape(reference.map, candidate.map))
        # A constant map has no pattern. Equal ones agree all the same.
        sums.update(maps=1.0, correlation=1.0 if np.array_equal(a, b) else correlation(a, b))
    return _mark_nonfinite(sums)


def summarize_top(sums: Mapping[str, float]) -> Figures:
    """Return the share of equal decisions, the score difference, and the mean correlation of maps."""
    squared = _ratio(sums, "score_squared", "scored")
    return _drop_undefined(
        {
            "same": _ratio(sums, "same", "answers"),
            "score_bias": _ratio(sums, "score", "scored"),
            "score_rms": math.sqrt(squared) if squared is not None else None,
            "correlation": _ratio(sums, "correlation", "maps"),
        }
    )


def _describe_top(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    sentence = f"{int(sums['same'])} of {int(sums['answers'])} answers are the same"
    maps = f", correlation of the maps {figures['correlation']:.3f}" if "correlation" in figures else ""
    return sentence + maps


def compare_labels(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Compare the classes that both answers give. Classes that neither gives do not count: with hundreds of classes,
    almost all decisions are an equal no.
    """
    del limits
    a, b = set(reference.top), set(candidate.top)
    counts = {"same": a & b, "labels": a | b, "missed": a - b, "extra": b - a}
    return {name: float(len(numbers)) for name, numbers in counts.items()}


def _describe_labels(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    del figures
    total = int(sums["same"] + sums["missed"])
    return f"{int(sums['same'])} of {total} labels are given again, {int(sums['extra'])} are new"


def compare_text(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Count equal texts, and the edits of characters that turn the candidate's text into the reference's."""
    del limits
    text, target = candidate.text or "", reference.text or ""
    return {
        "exact": float(text == target),
        "texts": 1.0,
        "edits": float(count_edits(text, target)),
        # Without characters, each character of the candidate is one too many.
        "characters": float(max(len(target), 1 if text else 0)),
    }


def summarize_text(sums: Mapping[str, float]) -> Figures:
    """Return the share of equal texts, and the CER: all edits by all characters."""
    cer = sums.get("edits", 0.0) / max(sums.get("characters", 0.0), 1.0)
    return _drop_undefined({"exact": _ratio(sums, "exact", "texts"), "cer": cer})


def _describe_text(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    edits, characters = int(sums["edits"]), int(sums["characters"])
    differing = f"{edits} of {characters} characters differ" if edits else "no character differs"
    return f"{int(sums['exact'])} of {int(sums['texts'])} texts are equal, {differing}"


def compare_classes(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Count the pixels of each class in both maps and in either. Further maps have classes of their own."""
    del limits
    sums: Sums = {"equal": 0.0, "pixels": 0.0}
    further, candidate_further = (getattr(answer, "maps", {}) for answer in (reference, candidate))
    pairs = {"": (reference.map, candidate.map), **{name: (further[name], candidate_further[name]) for name in further}}
    for name, (target, values) in pairs.items():
        a, b = (array.reshape(-1) for array in _same_shape(target, values))
        equal = a == b
        sums["equal"] += float(equal.sum())
        sums["pixels"] += float(equal.size)
        count_a, count_b, both = (_count_numbers(numbers) for numbers in (a, b, a[equal]))
        for number in {**count_a, **count_b}:
            common = both.get(number, 0)
            sums[f"{_COMMON}{name}:{number}"] = float(common)
            sums[f"{_EITHER}{name}:{number}"] = float(count_a.get(number, 0) + count_b.get(number, 0) - common)
    return sums


_COMMON, _EITHER = "common:", "either:"


def _count_numbers(numbers: NDArray[Any]) -> dict[int, int]:
    return dict(zip(*(array.tolist() for array in np.unique(numbers, return_counts=True)), strict=True))


def summarize_classes(sums: Mapping[str, float]) -> Figures:
    """Return the mean IoU over the classes that either model gives, and the share of equal pixels."""
    ious = [
        sums.get(_COMMON + name[len(_EITHER) :], 0.0) / pixels
        for name, pixels in sums.items()
        if name.startswith(_EITHER) and pixels
    ]
    return _drop_undefined({"miou": float(np.mean(ious)) if ious else None, "pixels": _ratio(sums, "equal", "pixels")})


def _describe_classes(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    classes = sum(name.startswith(_EITHER) and pixels > 0 for name, pixels in sums.items())
    pixels, miou = figures.get("pixels", 0.0), figures.get("miou", 0.0)
    return f"{pixels:.2%} of the pixels have the same class, mean IoU {miou:.3f} over {classes} classes"


def compare_values(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Sum the errors of a map. The squared error is in units of the squared range of the values.

    The range of an image is 255, of a matte 1, and of other maps the range of the reference's values for this input.
    """
    del limits
    target, values = _same_shape(reference.map, candidate.map)
    extent = 255.0 if target.dtype.kind in "iu" else 1.0 if reference.task == "matting" else 0.0
    target, values = target.astype(np.float64), values.astype(np.float64)
    finite = np.isfinite(target)
    if not extent and finite.any():
        # A constant map has no range. Then its size tells what is much.
        extent = float(np.ptp(target[finite])) or float(np.abs(target[finite]).max()) or 1.0
    usable = finite & np.isfinite(values)
    differences = values[usable] - target[usable]
    return {
        "error": float(((differences / extent) ** 2).mean()) if usable.any() else 0.0,
        "difference": float(np.abs(differences).mean()) if usable.any() else 0.0,
        "maps": float(usable.any()),
        "nonfinite": float((finite & ~np.isfinite(values)).sum()),
    }


def summarize_values(sums: Mapping[str, float]) -> Figures:
    """Return the PSNR in dB of the mean squared error over all maps, and the mean absolute difference."""
    error = _ratio(sums, "error", "maps")
    psnr = to_decibels(error) if error is not None else None
    return _drop_undefined({"psnr": psnr, "difference": _ratio(sums, "difference", "maps")})


def _describe_values(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    maps = int(sums["maps"])
    psnr, difference = figures.get("psnr", 0.0), figures.get("difference", 0.0)
    return f"PSNR {psnr:.1f} dB against float over {maps} map{'s' * (maps != 1)}, mean difference {difference:.4g}"


def compare_windows(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Count the windows on the same side of the threshold."""
    a, b = _vectors(reference, candidate)
    finite = np.isfinite(a) & np.isfinite(b)
    differences = (b - a)[finite]
    return {
        "same": float(((a >= limits.confidence) == (b >= limits.confidence))[finite].sum()),
        "windows": float(finite.sum()),
        "score": float(differences.sum()),
        "nonfinite": float((np.isfinite(a) & ~np.isfinite(b)).sum()),
    }


def _describe_windows(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    del figures
    return f"{int(sums['same'])} of {int(sums['windows'])} windows are on the same side of the threshold"


def compare_vectors(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Compute the cosine of two embeddings. An embedding of zeros has the cosine 0 with any but its like."""
    del limits
    a, b = _vectors(reference, candidate)
    if not np.isfinite(b).all():
        return {"cosine": 0.0, "vectors": 1.0, "nonfinite": float((~np.isfinite(b)).sum())}
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / size if size else float(np.array_equal(a, b))
    return {"cosine": min(cosine, 1.0), "vectors": 1.0}


def _describe_vectors(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    return f"mean cosine {figures.get('cosine', 0.0):.4f} over {int(sums['vectors'])} embeddings"


def compare_numbers(reference: Answer, candidate: Answer, limits: Limits) -> Sums:
    """Sum what the coefficient of determination of each regressed value needs."""
    del limits
    a, b = _vectors(reference, candidate)
    finite = np.isfinite(a) & np.isfinite(b)
    sums: Sums = {
        "difference": float(np.abs(b - a)[finite].sum()),
        "values": float(finite.sum()),
        "nonfinite": float((np.isfinite(a) & ~np.isfinite(b)).sum()),
    }
    for place in np.flatnonzero(finite):
        number, error = float(a[place]), float(b[place] - a[place])
        terms = {"n": 1.0, "sum": number, "squares": number**2, "errors": error**2}
        sums.update({f"{name}:{place}": value for name, value in terms.items()})
    return sums


def summarize_numbers(sums: Mapping[str, float]) -> Figures:
    """Return R² (1 minus the squared error by the variance, both summed over the values of a vector), and the mean
    absolute difference. R² is left out if the reference does not vary.
    """
    places = [name[2:] for name, count in sums.items() if name.startswith("n:") and count]
    errors = sum(sums[f"errors:{p}"] for p in places)
    spread = sum(max(sums[f"squares:{p}"] - sums[f"sum:{p}"] ** 2 / sums[f"n:{p}"], 0.0) for p in places)
    # Rounding leaves a rest of the squares also where all values are equal.
    varies = spread > 1e-12 * sum(sums[f"squares:{p}"] for p in places)
    figures = {"r2": 1 - errors / spread if varies else None, "difference": _ratio(sums, "difference", "values")}
    return _drop_undefined(figures)


def _describe_numbers(sums: Mapping[str, float], figures: Mapping[str, float]) -> str:
    r2 = f"R² {figures['r2']:.4f}, " if "r2" in figures else ""
    return f"{r2}mean difference {figures.get('difference', 0.0):.4g} over {int(sums['values'])} values"


def _vectors(reference: Answer, candidate: Answer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = _same_shape(reference.vector, candidate.vector)
    return a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)


def _same_shape(target: Any, values: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two arrays as they are.

    Raises:
        DataError: one is missing, or their shapes differ.
    """
    if target is None or values is None or np.shape(target) != np.shape(values):
        shapes = " and ".join("none" if array is None else str(list(np.shape(array))) for array in (target, values))
        raise DataError(f"the two models' answers cannot be compared: their shapes are {shapes}", "Use the same input")
    return np.asarray(target), np.asarray(values)


def _mark_nonfinite(sums: Mapping[str, float]) -> Sums:
    """Return sums with those that are not finite as 0, and their number."""
    strange = [name for name, value in sums.items() if not math.isfinite(value)]
    return {**sums, **dict.fromkeys(strange, 0.0), "nonfinite": float(len(strange))}


_OBJECTS = AnswerTask("matched", compare_objects, summarize_objects, _describe_objects, ("matched", "objects"))
_TOP = AnswerTask("same", compare_top, summarize_top, _describe_top, ("same", "answers"))
_VALUES = AnswerTask("psnr", compare_values, summarize_values, _describe_values, unit="dB")
ANSWER_TASKS: Mapping[str, AnswerTask] = {
    **dict.fromkeys(("detect", "segment", "pose", "obb", "text-detect"), _OBJECTS),
    **dict.fromkeys(("classify", "anomaly"), _TOP),
    **dict.fromkeys(("depth", "matting", "image"), _VALUES),
    "multi-label": AnswerTask(
        "same",
        compare_labels,
        lambda sums: _drop_undefined({"same": _ratio(sums, "same", "labels")}),
        _describe_labels,
        ("same", "labels"),
    ),
    "text": AnswerTask("exact", compare_text, summarize_text, _describe_text, ("exact", "texts")),
    "semantic": AnswerTask("miou", compare_classes, summarize_classes, _describe_classes),
    "voice": AnswerTask(
        "same",
        compare_windows,
        lambda sums: _drop_undefined(
            {"same": _ratio(sums, "same", "windows"), "score_bias": _ratio(sums, "score", "windows")}
        ),
        _describe_windows,
        ("same", "windows"),
    ),
    "embedding": AnswerTask(
        "cosine",
        compare_vectors,
        lambda sums: _drop_undefined({"cosine": _ratio(sums, "cosine", "vectors")}),
        _describe_vectors,
    ),
    "regression": AnswerTask("r2", compare_numbers, summarize_numbers, _describe_numbers),
}
"""Task of a head's family → how its answers are compared."""
OBJECT_TASKS = frozenset(name for name, task in ANSWER_TASKS.items() if task is _OBJECTS)
