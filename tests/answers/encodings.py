"""Encode boxes as the exporters of each family of detectors write them: the inverse of what the families decode.

Each encoder takes the objects of one image in pixels of the model's input, and fills the remaining rows or cells with
what real models give where they see nothing. It shares no code with the families.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SIZE = (256, 128)  # width and height differ, so that a swap shows
CLASSES = 7
STRIDES = (8, 16, 32)
QUERIES = 300
Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Truth:
    """Hold objects: boxes [n, 4] as corners, scores [n], classes [n] without repetition, angles [n], and the size
    (width, height) that shares refer to.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    angles: np.ndarray
    size: tuple[int, int]

    @property
    def centred(self) -> np.ndarray:
        """Return the boxes as centre and size."""
        low, high = self.boxes[:, :2], self.boxes[:, 2:]
        return np.concatenate([(low + high) / 2, high - low], axis=1)

    @property
    def shares(self) -> np.ndarray:
        """Return the corners in shares of the size."""
        return self.boxes / np.tile(self.size, 2)


def draw_truth(random: np.random.Generator, size: tuple[int, int] = SIZE) -> Truth:
    """Return one to four objects of different classes, whose centres are at least a cell of 32 pixels apart."""
    count = int(random.integers(1, 5))
    extents = random.uniform(24, 60, (count, 2))
    columns = random.permutation(size[0] // 64)[:count] * 64
    centres = np.stack([columns + random.uniform(18, 46, count), random.uniform(34, size[1] - 34, count)], axis=1)
    boxes = np.concatenate([centres - extents / 2, centres + extents / 2], axis=1)
    classes = random.permutation(CLASSES)[:count]
    return Truth(boxes, random.uniform(0.7, 0.95, count), classes, random.uniform(-0.7, 2.3, count), size)


def logit(share: Any) -> Any:
    return np.log(np.asarray(share, np.float64) / (1 - np.asarray(share)))


def lay(strides: tuple[int, ...] = STRIDES) -> list[tuple[int, int, int]]:
    """Return column, row and stride of each cell."""
    return [(x, y, s) for s in strides for y in range(SIZE[1] // s) for x in range(SIZE[0] // s)]


def background(random: np.random.Generator, count: int) -> np.ndarray:
    """Return random boxes [count, 4] inside the input, as centre and size in pixels."""
    centres = random.uniform(0.1, 0.9, (count, 2)) * SIZE
    return np.concatenate([centres, random.uniform(2, 60, (count, 2))], axis=1)


def corners(centred: np.ndarray) -> np.ndarray:
    return np.concatenate([centred[:, :2] - centred[:, 2:] / 2, centred[:, :2] + centred[:, 2:] / 2], axis=1)


def dense(truth: Truth, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes [count, 4] as centre and size, and scores [count, classes]; the objects are at random rows."""
    boxes, scores = background(random, count), random.uniform(0, 0.2, (count, CLASSES))
    rows = random.permutation(count)[: len(truth.scores)]
    boxes[rows], scores[rows, truth.classes] = truth.centred, truth.scores
    return boxes, scores


def selected(truth: Truth, random: np.random.Generator, count: int, fill: str = "low") -> tuple[np.ndarray, ...]:
    """Return boxes as centre and size, scores, classes and angles of `count` rows in the order of their scores.

    Args:
        fill: rows after the objects have "low" scores, are "zero", or have class "-1".
    """
    order = np.argsort(-truth.scores)
    boxes, scores = background(random, count), np.sort(random.uniform(0, 0.2, count))[::-1].copy()
    classes, angles = random.integers(0, CLASSES, count).astype(float), random.uniform(-0.7, 2.3, count)
    if fill != "low":
        boxes, scores, angles = boxes * 0, scores * 0, angles * 0
        classes[:] = 0 if fill == "zero" else -1
    n = len(order)
    boxes[:n], scores[:n], classes[:n] = truth.centred[order], truth.scores[order], truth.classes[order]
    angles[:n] = truth.angles[order]
    return boxes, scores, classes, angles


def distribution(distances: np.ndarray, bins: int) -> np.ndarray:
    """Return the logits [4 * bins] of distributions with the given means [4]."""
    logits = np.full((4, bins), -20.0)
    for row, distance in zip(logits, distances, strict=True):
        below = min(int(distance), bins - 2)
        row[below], row[below + 1] = np.log(1 - (distance - below) + 1e-9), np.log(distance - below + 1e-9)
    return logits.ravel()


def float32(**outputs: Any) -> Outputs:
    return {name: np.asarray(array, np.float32) for name, array in outputs.items()}


# Rows that the graph has decoded.


def yolov5(truth: Truth, random: np.random.Generator, *, shares: bool = False) -> Outputs:
    boxes, scores = dense(truth, random, 3 * len(lay()))
    best = scores.max(axis=1, keepdims=True)
    if shares:
        boxes = boxes / np.tile(SIZE, 2)
    return float32(output=np.concatenate([boxes, np.sqrt(best), scores / np.sqrt(best)], axis=1)[None])


def yolov6(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, len(lay()))
    return float32(outputs=np.concatenate([boxes, np.ones((len(boxes), 1)), scores], axis=1)[None])


def yolov8(truth: Truth, random: np.random.Generator, *, shares: bool = False) -> Outputs:
    boxes, scores = dense(truth, random, len(lay()))
    if shares:
        boxes = boxes / np.tile(SIZE, 2)
    return float32(output0=np.concatenate([boxes, scores], axis=1).T[None])


def transposed(truth: Truth, random: np.random.Generator, *, encode: Callable[..., Outputs]) -> Outputs:
    """Return an encoding whose rows and columns have changed places, as converters to .tflite write them."""
    axes = {3: (0, 2, 1), 4: (0, 2, 3, 1)}
    return {name: array.transpose(axes[array.ndim]) for name, array in encode(truth, random).items()}


def yolo_obb(truth: Truth, random: np.random.Generator) -> Outputs:
    (rows,) = yolov8(truth, random).values()
    angles = random.uniform(-0.7, 2.3, rows.shape[2])
    for number, angle in zip(truth.classes, truth.angles, strict=True):
        angles[rows[0, 4 + number].argmax()] = angle
    return float32(output0=np.concatenate([rows, angles[None, None]], axis=1))


def yolo_seg(truth: Truth, random: np.random.Generator) -> Outputs:
    (rows,) = yolov8(truth, random).values()
    coefficients = random.normal(size=(1, 32, rows.shape[2]))
    prototypes = random.normal(size=(1, 32, 32, 64))
    return float32(output0=np.concatenate([rows, coefficients], axis=1), output1=prototypes)


# Rows relative to cells.


def yolox(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, len(lay()))
    cells, best = np.array(lay(), np.float64), scores.max(axis=1, keepdims=True)
    centres = boxes[:, :2] / cells[:, 2:] - cells[:, :2]
    rows = [centres, np.log(boxes[:, 2:] / cells[:, 2:]), np.sqrt(best), scores / np.sqrt(best)]
    return float32(output=np.concatenate(rows, axis=1)[None])


def yolox_decoded(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, len(lay()))
    best = np.sqrt(scores.max(axis=1, keepdims=True))
    return float32(output=np.concatenate([boxes, best, scores / best], axis=1)[None])


def nanodet(truth: Truth, random: np.random.Generator) -> Outputs:
    cells = lay((8, 16, 32, 64))
    rows = random.normal(size=(len(cells), CLASSES + 32))
    rows[:, :CLASSES] = random.uniform(0, 0.2, (len(cells), CLASSES))
    for (x1, y1, x2, y2), score, number in zip(truth.boxes, truth.scores, truth.classes, strict=True):
        x, y = round((x1 + x2) / 32), round((y1 + y2) / 32)
        at = cells.index((x, y, 16))
        rows[at, :CLASSES], rows[at, number] = 0.01, score
        rows[at, CLASSES:] = distribution(np.array([x - x1 / 16, y - y1 / 16, x2 / 16 - x, y2 / 16 - y]), 8)
    return float32(output=rows[None])


# Levels.


def yolov8_raw(
    truth: Truth, random: np.random.Generator, *, form: str = "split", sigmoid: bool = True, last: bool = False
) -> Outputs:
    outputs: dict[str, np.ndarray] = {}
    for level, stride in enumerate(STRIDES):
        shape = SIZE[1] // stride, SIZE[0] // stride
        boxes, scores = random.normal(size=(64, *shape)), random.normal(-5, 0.5, (CLASSES, *shape))
        for place, box in enumerate(truth.boxes):
            if place % len(STRIDES) == level:
                x1, y1, x2, y2 = box / stride
                x, y = int((x1 + x2) / 2), int((y1 + y2) / 2)
                sides = np.array([x + 0.5 - x1, y + 0.5 - y1, x2 - x - 0.5, y2 - y - 0.5])
                boxes[:, y, x] = distribution(sides, 16)
                scores[truth.classes[place], y, x] = logit(truth.scores[place])
        scores = 1 / (1 + np.exp(-scores)) if sigmoid else scores
        if form == "joined":
            outputs[f"level{level}"] = np.concatenate([boxes, scores])[None]
            continue
        outputs |= {f"boxes{level}": boxes[None], f"scores{level}": scores[None]}
        if form == "sums":
            outputs[f"sums{level}"] = scores.sum(axis=0, keepdims=True)[None].clip(0, 1)
    return float32(**{n: a.transpose(0, 2, 3, 1) if last else a for n, a in outputs.items()})


ANCHORS = {
    8: ((10, 13), (16, 30), (33, 23)),
    16: ((30, 61), (62, 45), (59, 119)),
    32: ((116, 90), (156, 198), (373, 326)),
}


def anchored(truth: Truth, random: np.random.Generator, encode: Callable[..., Any]) -> dict[int, np.ndarray]:
    """Return stride → raw level [3, 5 + classes, h, w]. `encode` returns x, y, w, h for shares of a cell and ratios
    to the anchor.
    """
    levels = {}
    for stride in (32, 8, 16):  # in any order
        shape = SIZE[1] // stride, SIZE[0] // stride
        level = random.normal(0, 1, (3, 5 + CLASSES, *shape))
        level[:, 4] -= 8
        levels[stride] = level
    for place, (x, y, w, h) in enumerate(truth.centred):
        stride, anchor = ((8, 2), (16, 0))[place % 2]
        column, row = int(x / stride), int(y / stride)
        ratios = np.array([w, h]) / ANCHORS[stride][anchor]
        values = levels[stride][anchor, :, row, column]
        values[:4] = encode(np.array([x / stride - column, y / stride - row]), ratios)
        values[4], values[5:] = logit(0.98), -6
        values[5 + truth.classes[place]] = logit(truth.scores[place] / 0.98)
    return levels


def yolov3(truth: Truth, random: np.random.Generator) -> Outputs:
    levels = anchored(truth, random, lambda inside, ratios: [*logit(inside), *np.log(ratios)])
    return float32(**{f"level{s}": level.reshape(1, -1, *level.shape[2:]) for s, level in levels.items()})


def yolov5_raw(truth: Truth, random: np.random.Generator, *, axes: int = 5, sigmoid: bool = False) -> Outputs:
    levels = anchored(
        truth, random, lambda inside, ratios: [*logit((inside + 0.5) / 2), *logit(np.sqrt(ratios).clip(0, 1.99) / 2)]
    )
    outputs = {}
    for stride, level in levels.items():
        values = 1 / (1 + np.exp(-level)) if sigmoid else level
        shape = (1, -1, *level.shape[2:])
        outputs[f"level{stride}"] = values.transpose(0, 2, 3, 1)[None] if axes == 5 else values.reshape(shape)
    return float32(**outputs)


def centernet(truth: Truth, random: np.random.Generator, *, named: bool = True) -> Outputs:
    shape = SIZE[1] // 4, SIZE[0] // 4
    heat = 1 / (1 + np.exp(-random.normal(-6, 0.5, (CLASSES, *shape))))
    sizes, offsets = random.uniform(0, 9, (2, *shape)), random.uniform(0, 1, (2, *shape))
    for (x, y, w, h), score, number in zip(truth.centred, truth.scores, truth.classes, strict=True):
        column, row = int(x / 4), int(y / 4)
        heat[number, row, column] = score
        heat[number, row, column + 1] = score / 2  # the flank of the peak
        sizes[:, row, column], offsets[:, row, column] = (w / 4, h / 4), (x / 4 - column, y / 4 - row)
    names = ("hm", "wh", "reg") if named else ("5", "7", "6")
    return float32(**dict(zip(names, (heat[None], sizes[None], offsets[None]), strict=True)))


# Offsets from priors.


def efficientdet(truth: Truth, random: np.random.Generator, *, levels: bool = False, sigmoid: bool = True) -> Outputs:
    anchors = []
    for x, y, stride in lay((8, 16, 32, 64, 128)):
        for scale in (1, 2 ** (1 / 3), 2 ** (2 / 3)):
            for w, h in ((1, 1), (1.4, 0.7), (0.7, 1.4)):
                side = 4 * stride * scale
                anchors.append([(x + 0.5) * stride, (y + 0.5) * stride, side * w, side * h])
    boxes, scores = np.array(anchors), random.normal(-6, 0.5, (len(anchors), CLASSES))
    offsets = random.normal(0, 0.3, (len(anchors), 4))
    for place, (x, y, w, h) in enumerate(truth.centred):
        at = np.abs(boxes - [x, y, w, h]).sum(axis=1).argmin()
        ax, ay, aw, ah = boxes[at]
        offsets[at] = (y - ay) / ah, (x - ax) / aw, math.log(h / ah), math.log(w / aw)
        scores[at, truth.classes[place]] = logit(truth.scores[place])
    scores = 1 / (1 + np.exp(-scores)) if sigmoid else scores
    if not levels:
        return float32(regression=offsets[None], classification=scores[None], anchors=boxes[None] / 2)
    outputs, start = {}, 0
    for stride in (8, 16, 32, 64, 128):
        shape = (1, SIZE[1] // stride, SIZE[0] // stride, -1)
        end = start + 9 * shape[1] * shape[2]
        outputs[f"class{stride}"] = scores[start:end].reshape(shape)
        outputs[f"box{stride}"] = offsets[start:end].reshape(shape)
        start = end
    return float32(**outputs)


def ssd_priors() -> np.ndarray:
    """Return the priors of the SSD300 of the paper by loops, as centre and size in shares."""
    priors = []
    shapes = ((38, 8, 30, 60), (19, 16, 60, 111), (10, 32, 111, 162), (5, 64, 162, 213), (3, 100, 213, 264))
    for side, step, low, high in (*shapes, (1, 300, 264, 315)):
        for y in range(side):
            for x in range(side):
                centre = ((x + 0.5) * step / 300, (y + 0.5) * step / 300)
                priors += [(*centre, low / 300, low / 300), (*centre, *(math.sqrt(low * high) / 300,) * 2)]
                for ratio in (2, 3) if side in (19, 10, 5) else (2,):
                    long, short = low * math.sqrt(ratio) / 300, low / math.sqrt(ratio) / 300
                    priors += [(*centre, long, short), (*centre, short, long)]
    return np.array(priors)


def with_background(scores: np.ndarray) -> np.ndarray:
    """Return scores [N, C] with a class before them, so that rows sum to 1."""
    scores = scores.copy()
    weak = scores.max(axis=1) < 0.5
    scores[weak] /= scores.shape[1]
    strong = np.nonzero(~weak)[0]
    for row in strong:
        best = scores[row].argmax()
        scores[row, np.arange(scores.shape[1]) != best] = 0.001
    return np.concatenate([1 - scores.sum(axis=1, keepdims=True), scores], axis=1)


def ssd(truth: Truth, random: np.random.Generator, *, pixels: bool = False) -> Outputs:
    boxes, scores = dense(truth, random, 4420)
    unit = 1 if pixels else np.tile(SIZE, 2)
    return float32(scores=with_background(scores)[None], boxes=(corners(boxes) / unit)[None])


def ssd_raw(truth: Truth, random: np.random.Generator, *, logits: bool = False) -> Outputs:
    priors = ssd_priors()
    offsets, scores = random.normal(size=(len(priors), 4)), random.uniform(0, 0.2, (len(priors), CLASSES))
    for place, box in enumerate(truth.centred / np.tile(SIZE, 2)):
        at = np.abs(priors - box).sum(axis=1).argmin()
        prior = priors[at]
        offsets[at, :2] = (box[:2] - prior[:2]) / prior[2:] / 0.1
        offsets[at, 2:] = np.log(box[2:] / prior[2:]) / 0.2
        scores[at, truth.classes[place]] = truth.scores[place]
    shares = with_background(scores)
    return float32(loc=offsets[None], conf=np.log(shares)[None] + 1.5 if logits else shares[None])


# Queries.


def detr(truth: Truth, random: np.random.Generator, *, softmax: bool = False, columns: int = CLASSES) -> Outputs:
    boxes, scores = dense(truth, random, QUERIES)
    scores = np.pad(scores, ((0, 0), (0, columns - CLASSES)), constant_values=0.01)
    logits = logit(scores.clip(0.001, 0.999)) - np.where(scores < 0.5, 3, 0)
    if softmax:
        shares = with_background(scores)
        logits = np.log(np.concatenate([shares[:, 1:], shares[:, :1]], axis=1)) + 2
    return float32(logits=logits[None], pred_boxes=(boxes / np.tile(SIZE, 2))[None])


def rf_detr(truth: Truth, random: np.random.Generator, *, masks: bool = False) -> Outputs:
    outputs = detr(truth, random, columns=CLASSES + 1)
    named = {"dets": outputs["pred_boxes"], "labels": outputs["logits"]}
    return named | (float32(masks=random.normal(size=(1, QUERIES, 16, 32))) if masks else {})


def rtdetr(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, QUERIES)
    return float32(output0=np.concatenate([boxes / np.tile(SIZE, 2), scores], axis=1)[None])


def rtdetr_selected(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, QUERIES)
    rows = [boxes / np.tile(SIZE, 2), scores[:, None], classes[:, None]]
    return float32(output0=np.concatenate(rows, axis=1)[None])


# Objects that the graph has selected.


def rtdetr_official(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, QUERIES)
    return {"labels": classes.astype(np.int64)[None], **float32(boxes=corners(boxes)[None], scores=scores[None])}


def detections(
    truth: Truth, random: np.random.Generator, *, count: int = 300, fill: str = "low", unit: str = "pixel"
) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, count, fill)
    factor = np.tile(SIZE, 2) if unit == "share" else 1
    return float32(output0=np.concatenate([corners(boxes) / factor, scores[:, None], classes[:, None]], axis=1)[None])


def yolov7_end2end(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, len(truth.scores))
    rows = [np.zeros((len(boxes), 1)), corners(boxes), classes[:, None], scores[:, None]]
    return float32(output=np.concatenate(rows, axis=1))


def yolo_obb_nms(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, angles = selected(truth, random, 100, "zero")
    return float32(output0=np.concatenate([boxes, np.stack([scores, classes, angles], axis=1)], axis=1)[None])


def yolo_seg_nms(truth: Truth, random: np.random.Generator) -> Outputs:
    (rows,) = detections(truth, random, fill="zero").values()
    rows = np.concatenate([rows, random.normal(size=(1, rows.shape[1], 32))], axis=2)
    return float32(output0=rows, output1=random.normal(size=(1, 32, 32, 64)))


def tf_detection(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, 100)
    share = (corners(boxes) / np.tile(SIZE, 2))[:, [1, 0, 3, 2]]
    parts = {"detection_boxes:0": share, "detection_classes:0": classes + 1, "detection_scores:0": scores}
    return float32(**{name: array[None] for name, array in parts.items()}, **{"num_detections:0": [100]})


def tflite_operator(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, 10, "zero")
    share = (corners(boxes) / np.tile(SIZE, 2))[:, [1, 0, 3, 2]]
    parts = (share[None], classes[None], scores[None], [len(truth.scores)])
    return float32(**dict(zip(("out", "out:1", "out:2", "out:3"), parts, strict=True)))


def paddle_detection(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, 20, "-1")
    rows = np.concatenate([classes[:, None], scores[:, None], corners(boxes)], axis=1)
    return {**float32(multiclass_nms3_0=rows), "count": np.array([20], np.int32)}


def ppyoloe(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, len(lay()))
    return float32(boxes=corners(boxes)[None], scores=scores.T[None])


def torchvision(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, len(truth.scores) + 3)
    return {**float32(boxes=corners(boxes)), "labels": classes.astype(np.int64) + 1, **float32(scores=scores)}


def mmdetection(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, 100, "-1")
    rows = np.concatenate([corners(boxes), scores[:, None]], axis=1)
    return {**float32(dets=rows[None]), "labels": classes.astype(np.int64)[None]}


def yolo_nas(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, len(lay()))
    return float32(**{"913": corners(boxes)[None], "904": scores[None]})


def yolo_nas_flat(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, len(truth.scores))
    rows = [np.zeros((len(boxes), 1)), corners(boxes), scores[:, None], classes[:, None]]
    return float32(graph2_flat_predictions=np.concatenate(rows, axis=1))


def yolo_nas_batch(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores, classes, _ = selected(truth, random, 50, "-1")
    count = {"num_predictions": np.array([[len(truth.scores)]], np.int64)}
    parts = float32(pred_boxes=corners(boxes)[None], pred_scores=scores[None])
    return {**count, **parts, "pred_classes": classes.astype(np.int64)[None]}


def yolov3_nms(truth: Truth, random: np.random.Generator) -> Outputs:
    boxes, scores = dense(truth, random, 500)
    places = [int(scores[:, number].argmax()) for number in truth.classes]
    indices = [[0, number, place] for number, place in zip(truth.classes, places, strict=True)]
    floats = float32(boxes=corners(boxes)[:, [1, 0, 3, 2]][None], scores=scores.T[None])
    return {**floats, "indices": np.array([indices], np.int32)}
