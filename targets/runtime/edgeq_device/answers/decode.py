"""Decode a model's outputs by its head: the one way from arrays to an `Answer`, on devices and workstations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import Family, load_family
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import suppress
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame

NO_IMAGE = Frame((0, 0), (0, 0))
"""The frame of an input that is not an image."""
NOT_OF_THE_HEAD = (ValueError, KeyError, TypeError, IndexError, OverflowError)
"""What decoders of families raise for outputs or parameters that do not belong to the head."""
# COCO counts 100 detections in an image; Ultralytics keeps 300.
_LIMIT = 300


def decode(
    outputs: Mapping[str, Any], head: Head, frame: Optional[Frame] = None, family: Optional[Family] = None
) -> Answer:
    """Return the answer that the outputs of one run give.

    Args:
        outputs: output name → array, with a batch axis of 1 where the model has one.
        frame: the geometry of the prepared image; None if the input is not an image.
        family: the family of the head, if it is not one of the runner's own.

    Raises:
        DataError: the outputs do not belong to the head.
        BundleError: this runner does not know the head's family.
    """
    family = family or load_family(head.family)
    frame = frame or NO_IMAGE
    try:
        # Infinite values are dropped later, and need no warning.
        with np.errstate(invalid="ignore", over="ignore"):
            outputs, head = _join_rows(outputs, head)
            if family.candidates is not None:
                answer = _decode_objects(outputs, head, frame, family)
            elif family.decode is not None:
                answer = family.decode(outputs, head, frame)
            else:
                raise ValueError("the family has no decoder")
    except NOT_OF_THE_HEAD as error:
        shapes = ", ".join(f"{name} {list(np.shape(array))}" for name, array in outputs.items())
        raise DataError(
            f"head {head.family} does not fit the outputs {shapes} ({error})",
            "Give one sample if the file has several, or read the outputs themselves (--raw)",
        ) from error
    size = None if frame is NO_IMAGE else frame.original
    names = head.keypoint_names or family.keypoint_names
    # Names that do not match one to one would name the wrong points.
    names = names if answer.keypoints is not None and answer.keypoints.shape[1] == len(names) else ()
    return replace(answer, labels=head.labels, keypoint_names=names, image_size=size)


def _join_rows(outputs: Mapping[str, Any], head: Head) -> Tuple[Mapping[str, Any], Head]:
    """Return the outputs with rows joined from the parts at which edgeq has cut the graph, and a head that reads them.

    The parameter "rows" lists the roles of the parts. "axes" is the axis of the columns in the parts and in the rows.
    """
    roles = head.parameters.get("rows")
    if roles is None:
        return outputs, head
    source, target = head.parameters["axes"]
    parts = np.concatenate([np.asarray(outputs[head.outputs[role]]) for role in roles], axis=source)
    # No output of a model has an empty name.
    return {**outputs, "": np.moveaxis(parts, source, target)}, replace(head, outputs={**head.outputs, "rows": ""})


def _decode_objects(outputs: Mapping[str, Any], head: Head, frame: Frame, family: Family) -> Answer:
    assert family.candidates is not None
    # Such a model gets the size of the stored image as an input, and its boxes are in pixels of that image.
    if head.parameters.get("frame") == "image":
        frame = Frame.of(*frame.original)
    thresholds = {**family.thresholds, **head.thresholds}
    objects = suppress(
        family.candidates(outputs, head, frame.size),
        thresholds.get("confidence", 0.0),
        thresholds.get("iou"),
        int(thresholds.get("limit", _LIMIT)),
        family.rotated,
    )
    masks = family.masks(outputs, head, objects, frame) if family.masks is not None else None
    keypoints = objects.keypoints
    if keypoints is not None:
        keypoints = np.concatenate([frame.to_original(keypoints[..., :2]), keypoints[..., 2:]], axis=-1)
    boxes = objects.boxes if objects.angles is not None else frame.to_original(objects.boxes)
    if objects.angles is not None:
        boxes = _rotated_to_original(objects.boxes, frame)
    return Answer(
        family.task,
        boxes=boxes,
        scores=objects.scores,
        classes=objects.classes,
        angles=objects.angles,
        masks=masks,
        keypoints=keypoints,
    )


def _rotated_to_original(boxes: Any, frame: Frame) -> Any:
    """Return rotated boxes in pixels of the stored image. Rotated rectangles stay rectangles only if both directions
    have one scale, as a letterbox gives them, so their sides are divided by the mean scale.
    """
    centres = frame.to_original((boxes[:, :2] + boxes[:, 2:]) / 2)
    half = (boxes[:, 2:] - boxes[:, :2]) / 2 / np.sqrt(frame.scale[0] * frame.scale[1])
    return np.concatenate([centres - half, centres + half], axis=1)
