"""Decode the outputs of detector heads: convert a model's raw outputs to candidate boxes. Each head has a function that
decodes its outputs, and a `Decoder` that describes it.

Plug-ins add heads through an entry point of the group `edgeq.decoders`. "path.py:function" names a function in a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UsageError
from edgeq.measure.boxes import Detections, Floats, convert_to_corners, pick_best_class
from edgeq.measure.inference import Outputs
from edgeq.util.registry import DECODERS, Registry
from edgeq.util.user_code import load_function, names_function


class Decode(Protocol):
    """Define the signature of a decoder function."""

    def __call__(self, outputs: Outputs, size: tuple[int, int]) -> Detections:
        """Return the candidates of one image, before suppression.

        Boxes are in pixels of the model's input, whose `size` is (width, height). If a model gives shares of the size
        where its head usually gives pixels, or the other way round, `edgeq.measure.boxes.in_pixels` converts
        them.

        Raises:
            UsageError: the outputs do not belong to this head.
        """


@dataclass(frozen=True)
class Decoder:
    """Describe one detector head.

    Attributes:
        name: name for `decoder`.
        title: description of the outputs that the decoder reads, with their shapes.
        decode: the decoder function.
        fits: function that returns whether the outputs for an image belong to this head. The image has the model's
            input size (width, height). The function uses the outputs' shapes and the bounds of their values. None if
            the head cannot be recognised.
        preprocess: name of the preprocessing that models with this head are trained with; "" if there are several.
    """

    name: str
    title: str
    decode: Decode
    fits: Callable[[Outputs, tuple[int, int]], bool] | None = None
    preprocess: str = ""


REGISTRY: Registry[Decoder] = Registry(
    DECODERS, lambda entry: isinstance(entry, Decoder), "edgeq.measure.decoders.Decoder"
)


def recognise(outputs: Outputs, size: tuple[int, int]) -> list[Decoder]:
    """Return the decoders that fit the outputs for one image of the model's input size."""
    return [decoder for _, decoder in REGISTRY.items() if decoder.fits is not None and decoder.fits(outputs, size)]


def load_decoder(name: str) -> Decode:
    """Return the function of a registered decoder, or a user's "path.py:function".

    Raises:
        UsageError: the name is unknown, or the function cannot be loaded.
    """
    return load_function(name, "decoder", UsageError) if names_function(name) else REGISTRY.load(name).decode


def _drop_batch(outputs: Outputs) -> dict[str, NDArray[Any]]:
    """Return the outputs of shape [1, a, b], as [a, b]. Leave out all others, because they are not boxes or scores."""
    return {name: array[0] for name, array in outputs.items() if array.ndim == 3 and array.shape[0] == 1}


def _find_head(outputs: Outputs, decoder: str, layout: str, *, columns: int = 0) -> NDArray[Any]:
    """Return the only output of shape [1, a, b], as [a, b]. It must have at least `columns` columns."""
    heads = list(_drop_batch(outputs).values())
    if len(heads) != 1 or heads[0].shape[1] < columns:
        raise _wrong_head(outputs, decoder, layout)
    return heads[0]


def _wrong_head(outputs: Outputs, decoder: str, layout: str) -> UsageError:
    """Return the error for outputs that `decoder` cannot read. `layout` describes the outputs that it can read."""
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
    return UsageError(
        f"decoder {decoder} takes {layout}, but the model gives {shapes}",
        "Choose another ⟨decoder⟩, or give your own as path.py:function",
    )


def decode_ssd(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Scale boxes to pixels of the input. Each box gets its best class other than the background.

    The graph has already decoded the boxes: [1, N, 4] as corners x1, y1, x2, y2 normalised to 0..1. The class scores
    are [1, N, 1 + classes] after softmax. Class 0 is the background and is dropped. The two outputs are distinguished
    by their last axis. With three classes and background, both have four columns, so the names decide ("box" or "loc"
    marks the boxes).
    """
    arrays = _drop_batch(outputs)
    four = [name for name, array in arrays.items() if array.shape[1] == 4]
    if len(four) > 1:
        four = [name for name in four if "box" in name.lower() or "loc" in name.lower()]
    if len(arrays) != 2 or len(four) != 1:
        raise _wrong_head(outputs, "ssd", SSD.title)
    boxes = arrays.pop(four[0])
    (scores,) = arrays.values()
    if len(scores) != len(boxes) or scores.shape[1] < 2:
        raise _wrong_head(outputs, "ssd", SSD.title)
    return pick_best_class(np.asarray(boxes, np.float64) * np.tile(size, 2), scores[:, 1:])


ANCHORS = {
    8: ((10, 13), (16, 30), (33, 23)),
    16: ((30, 61), (62, 45), (59, 119)),
    32: ((116, 90), (156, 198), (373, 326)),
}
"""Width and height of COCO's anchors in pixels of the model's input, by stride."""


def decode_yolov3(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Decode YOLOv3 as defined by Darknet.

    The outputs are raw levels [1, 3 * (5 + classes), H, W], one for each stride of 8, 16 and 32, in any order. The
    channels are x, y, w, h, objectness and classes, anchor by anchor, all before their sigmoid (Redmon and Farhadi,
    "YOLOv3: An Incremental Improvement", 2018):

        centre = (cell + sigmoid(xy)) * stride   size = anchor * exp(wh)   score = sigmoid(objectness) * sigmoid(class)
    """
    boxes, scores = [], []
    for array in outputs.values():
        # The stride identifies a level, because models list the levels in any order.
        stride = size[0] // array.shape[3] if array.ndim == 4 and array.shape[3] else 0
        channels = array.shape[1] if array.ndim == 4 else 0
        fits = stride in ANCHORS and array.shape[0] == 1 and array.shape[2] * stride == size[1]
        if not fits or channels % 3 or channels // 3 < 6:
            raise _wrong_head(outputs, "yolov3", YOLOV3.title)
        head = _decode_level(np.asarray(array[0], np.float64), stride)
        boxes.append(head[:, :4])
        scores.append(head[:, 4:5] * head[:, 5:])
    if not boxes or len({part.shape[1] for part in scores}) != 1:
        raise _wrong_head(outputs, "yolov3", YOLOV3.title)
    return pick_best_class(convert_to_corners(np.concatenate(boxes)), np.concatenate(scores))


def _decode_level(level: Floats, stride: int) -> Floats:
    """Return one level [3 * (5 + classes), H, W] as rows. A row contains centre and size in pixels, objectness and
    classes.
    """
    anchors = np.array(ANCHORS[stride], np.float64)
    height, width = level.shape[1:]
    # The copy is needed because a view would write into the model's output.
    values: NDArray[Any] = level.reshape(3, -1, height, width).transpose(0, 2, 3, 1).copy()
    rows, columns = np.mgrid[:height, :width]
    with np.errstate(over="ignore"):  # an infinite box is dropped later; an infinite exponent is a probability of 0
        values[..., 2:4] = anchors[:, None, None] * np.exp(values[..., 2:4])
        for place in (slice(0, 2), slice(4, None)):
            values[..., place] = 1 / (1 + np.exp(-values[..., place]))
    values[..., :2] = (values[..., :2] + np.stack([columns, rows], axis=-1)) * stride
    return values.reshape(-1, values.shape[-1])


def decode_yolov3_nms(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Return the boxes selected by the YOLOv3 model from the ONNX Model Zoo. The model suppresses overlapping boxes
    itself. Its outputs are:

        boxes [1, N, 4]: top, left, bottom, right
        scores [1, classes, N]
        indices [K, 3] or [1, K, 3]: batch, class, box

    The model has a second input for the size of the image, and returns boxes for that size. The second input must be
    the size of the model's image input, so that boxes are in pixels of that input.
    `edgeq.compat.readers.YoloV3DataReader` sets it.
    """
    del size
    integers = [array for array in outputs.values() if array.dtype.kind == "i" and array.shape[-1:] == (3,)]
    floats = [array[0] for array in outputs.values() if array.dtype.kind == "f" and array.ndim == 3 and len(array) == 1]
    boxes = next((array for array in floats if array.shape[1] == 4), None)
    scores = next((array for array in floats if array is not boxes), None)
    if len(integers) != 1 or boxes is None or scores is None or scores.shape[1] != len(boxes):
        raise _wrong_head(outputs, "yolov3-nms", YOLOV3_NMS.title)
    image, classes, places = integers[0].reshape(-1, 3).astype(np.int64).T
    limits = (1, len(scores), len(boxes))
    # A negative index would silently count from the end.
    if any(((part < 0) | (part >= limit)).any() for part, limit in zip((image, classes, places), limits, strict=True)):
        raise _wrong_head(outputs, "yolov3-nms", "indices of its own boxes and classes")
    corners = np.asarray(boxes[places][:, [1, 0, 3, 2]], np.float64)
    return Detections(corners, np.asarray(scores[classes, places], np.float64), classes)


def decode_yolov5(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Decode YOLOv5 and YOLOv7. The score is objectness times class score.

    The one output [1, N, 5 + classes] is already decoded: centre x, centre y, width, height in pixels of the model's
    input, then objectness and class scores after their sigmoid. Further outputs (the raw levels) have other shapes.
    """
    del size
    head = _find_head(outputs, "yolov5", YOLOV5.title, columns=6)
    return pick_best_class(convert_to_corners(head[:, :4]), head[:, 4:5] * head[:, 5:])


def decode_yolov8(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Decode YOLOv8 and related models. The score is the class score.

    The one output [1, 4 + classes, N] is already decoded: centre x, centre y, width, height in pixels of the model's
    input, then class scores after their sigmoid. There is no objectness. [1, N, 4 + classes] is also accepted; the
    longer axis is N.
    """
    del size
    head = _find_head(outputs, "yolov8", YOLOV8.title)
    rows = head.T if head.shape[0] < head.shape[1] else head
    if rows.shape[1] < 5:
        raise _wrong_head(outputs, "yolov8", YOLOV8.title)
    return pick_best_class(convert_to_corners(rows[:, :4]), rows[:, 4:])


def decode_nanodet(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Decode NanoDet-Plus. Its outputs give the distance from a cell to each side of the box as a distribution.

    The one output [1, N, classes + 4 * 8] contains class scores after their sigmoid. They are followed by 8 logits for
    each side (left, top, right, bottom), which belong to distances of 0 to 7 strides (X. Li et al., "Generalized Focal
    Loss", 2020). Cells are listed row by row. The levels begin with the finest stride: 8, 16, 32 and perhaps 64, with
    sizes rounded up.

        distance = sum_i i * softmax(logits)_i * stride    corner = cell * stride -+ distance
    """
    cells = {len(anchors(size, strides, up=True)[0]): strides for strides in _STRIDES}
    layout = f"[1, N, classes + {4 * _BINS}] with N = {' or '.join(map(str, cells))}"
    head = _find_head(outputs, "nanodet", layout, columns=4 * _BINS + 1)
    if len(head) not in cells:
        raise _wrong_head(outputs, "nanodet", layout)
    grid, stride = anchors(size, cells[len(head)], up=True)
    logits = head[:, -4 * _BINS :].astype(np.float64).reshape(-1, 4, _BINS)
    # Subtracting the maximum keeps the exponentials finite and does not change the softmax.
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    distance = (weights @ np.arange(_BINS)) / weights.sum(axis=2) * stride
    corners = np.concatenate([grid * stride - distance[:, :2], grid * stride + distance[:, 2:]], axis=1)
    return pick_best_class(corners, head[:, : -4 * _BINS])


def decode_detections(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Return the boxes that the model selected itself, as YOLOv10 does.

    The one output is [1, N, 6]: left, top, right, bottom in pixels of the model's input, score, class.
    """
    del size
    head = _find_head(outputs, "detections", DETECTIONS.title, columns=6)
    if head.shape[1] != 6:
        raise _wrong_head(outputs, "detections", DETECTIONS.title)
    boxes = np.asarray(head[:, :4], np.float64)
    return Detections(boxes, np.asarray(head[:, 4], np.float64), head[:, 5].astype(np.int64))


# NanoDet-Plus has distances of 0 to 7 strides.
_BINS = 8
# The larger variants have a level more.
_STRIDES = ((8, 16, 32), (8, 16, 32, 64))


def decode_yolox(outputs: Outputs, size: tuple[int, int]) -> Detections:
    """Decode YOLOX by grid cell and stride.

    The one output [1, N, 5 + classes] is not decoded: x, y are offsets in grid cells and w, h are logarithms.
    Objectness and class scores follow, both after their sigmoid.

        centre = (xy + cell) * stride    size = exp(wh) * stride    score = objectness * class

    Cells are listed row by row. The levels begin with the finest stride: 8, 16, 32, and 64 in the larger variants.
    """
    cells = {sum((size[0] // s) * (size[1] // s) for s in strides): strides for strides in _STRIDES}
    layout = f"[1, N, 5 + classes] with N = {' or '.join(map(str, cells))}"
    head = _find_head(outputs, "yolox", layout, columns=6)
    if len(head) not in cells:
        raise _wrong_head(outputs, "yolox", layout)
    grid, stride = anchors(size, cells[len(head)])
    head = head.astype(np.float64)
    centre = (head[:, :2] + grid) * stride
    with np.errstate(over="ignore"):  # an infinite box is dropped later
        extent = np.exp(head[:, 2:4]) * stride
    return pick_best_class(convert_to_corners(np.concatenate([centre, extent], axis=1)), head[:, 4:5] * head[:, 5:])


def anchors(size: tuple[int, int], strides: tuple[int, ...], *, up: bool = False) -> tuple[Floats, Floats]:
    """Return the column and row of each cell, [N, 2], and the stride of its level in pixels, [N, 1].

    Args:
        size: width and height of the model's input in pixels.
        up: whether to round the sizes of levels up.
    """
    places, steps = [], []
    for stride in strides:
        width, height = (math.ceil(side / stride) if up else side // stride for side in size)
        rows, columns = np.mgrid[:height, :width]
        places.append(np.stack([columns, rows], axis=-1).reshape(-1, 2))
        steps.append(np.full((columns.size, 1), stride))
    return np.concatenate(places).astype(np.float64), np.concatenate(steps).astype(np.float64)


def _make_fits(decode: Decode) -> Callable[[Outputs, tuple[int, int]], bool]:
    """Return a `fits` function that tests whether the decoder accepts the outputs."""

    def fits(outputs: Outputs, size: tuple[int, int]) -> bool:
        """Return whether the decoder accepts the outputs."""
        try:
            decode(outputs, size)
        except UsageError:
            return False
        return True

    return fits


def _find_float_head(outputs: Outputs, columns: int) -> NDArray[Any] | None:
    """Return the only float output of shape [1, a, b], as [a, b]. Return None if it has at most `columns` columns or
    does not exist.
    """
    heads = list(_drop_batch(outputs).values())
    return heads[0] if len(heads) == 1 and heads[0].shape[1] > columns and heads[0].dtype.kind == "f" else None


def _are_scores(values: NDArray[Any]) -> bool:
    """Return whether all values can be scores after a sigmoid, from 0 to 1."""
    return bool(values.size and values.min() >= -_ROUNDING and values.max() <= 1 + _ROUNDING)


# Rounding may take a score after a sigmoid outside 0 to 1 by up to this much.
_ROUNDING = 1e-3
# The largest logarithm of a box's width or height in strides. e to this power exceeds any image size.
_MOST_LOGARITHM = 12.0
# The largest width or height of a box, and how far a centre may be outside the image, in shares of the image's size.
_LARGEST_SHARE, _OVER_THE_EDGE = 2.0, 0.1


def _are_normalised(boxes: NDArray[Any]) -> bool:
    """Return whether boxes [N, 4] (centre x, centre y, width, height) are shares of the image's size.

    Centres in shares spread over the image. Offsets in grid cells and logarithms of sizes do not stay in 0 to 1.
    """
    inside = float(boxes.min()) >= 0 and float(boxes.max()) <= _LARGEST_SHARE
    return inside and bool((boxes[:, :2].max(axis=0) <= 1 + _OVER_THE_EDGE).all())


def _fits_yolox(outputs: Outputs, size: tuple[int, int]) -> bool:
    head = _find_float_head(outputs, 5)
    cells = {len(anchors(size, strides)[0]) for strides in _STRIDES}
    if head is None or len(head) not in cells or _are_normalised(head[:, :4]):
        return False
    # Sizes are logarithms here, which tells YOLOX from YOLOv5 with the same columns.
    return float(np.abs(head[:, 2:4]).max()) < _MOST_LOGARITHM and _are_scores(head[:, 4:])


def _fits_yolov5(outputs: Outputs, size: tuple[int, int]) -> bool:
    head = _find_float_head(outputs, 5)
    # More columns than rows is the layout of YOLOv8, where each box is a column.
    if head is None or head.shape[1] >= len(head) or not _are_scores(head[:, 4:]):
        return False
    # Sizes in pixels reach values that the logarithm of a size never has.
    pixels = float(head[:, 2:4].min()) >= 0 and float(head[:, 2:4].max()) >= _MOST_LOGARITHM
    return pixels or _are_normalised(head[:, :4])


def _fits_yolov8(outputs: Outputs, size: tuple[int, int]) -> bool:
    head = _find_float_head(outputs, 4)
    if head is None or len(head) >= head.shape[1] or len(head) < 5:
        return False
    return _are_scores(head[4:]) and float(head[2:4].min()) >= 0


def _fits_nanodet(outputs: Outputs, size: tuple[int, int]) -> bool:
    head = _find_float_head(outputs, 4 * _BINS)
    cells = {len(anchors(size, strides, up=True)[0]) for strides in _STRIDES}
    return head is not None and len(head) in cells and _are_scores(head[:, : -4 * _BINS])


def _fits_detections(outputs: Outputs, size: tuple[int, int]) -> bool:
    head = _find_float_head(outputs, 5)
    if head is None or head.shape[1] != 6:
        return False
    # One pixel, in pixels or in shares: the corners of a thin box may swap by rounding.
    rounding = 1.0 if float(np.abs(head[:, :4]).max(initial=0.0)) > _LARGEST_SHARE else 1 / min(size)
    corners = bool((head[:, 2:4] >= head[:, :2] - rounding).all())
    return corners and _are_scores(head[:, 4]) and bool((head[:, 5] == np.round(head[:, 5])).all())


SSD = Decoder("ssd", "boxes [1, N, 4] and scores [1, N, 1 + classes]", decode_ssd, _make_fits(decode_ssd))
YOLOV3 = Decoder(
    "yolov3", "[1, 3 * (5 + classes), H, W] for strides of 8, 16 and 32", decode_yolov3, _make_fits(decode_yolov3)
)
YOLOV3_NMS = Decoder(
    "yolov3-nms",
    "boxes [1, N, 4], scores [1, classes, N] and integers [K, 3]",
    decode_yolov3_nms,
    _make_fits(decode_yolov3_nms),
)
YOLOV5 = Decoder("yolov5", "[1, N, 5 + classes]", decode_yolov5, _fits_yolov5, "yolo")
YOLOV8 = Decoder("yolov8", "[1, 4 + classes, N]", decode_yolov8, _fits_yolov8, "yolo")
YOLOX = Decoder(
    "yolox",
    "[1, N, 5 + classes] with box centres and sizes relative to the grid",
    decode_yolox,
    _fits_yolox,
    "yolox",
)
NANODET = Decoder("nanodet", f"[1, N, classes + {4 * _BINS}]", decode_nanodet, _fits_nanodet, "nanodet")
DETECTIONS = Decoder(
    "detections", "[1, N, 6]: corners in pixels, score, class", decode_detections, _fits_detections, "yolo"
)
