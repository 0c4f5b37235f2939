"""Read the metadata that Ultralytics' exporter writes (YOLOv5, v8 to v12, 26, RT-DETR): into ONNX files, and into
metadata.yaml next to models of other formats.

Each entry of metadata_props is the text of a Python value: task, names, imgsz, stride, kpt_shape, kpt_names, args,
end2end, head. Source: Ultralytics, engine/exporter.py. The preprocessing is not written; the task determines it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.describe.beside import find_yaml, read_names
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader, merge
from edgeq.describe.literals import parse_literal
from edgeq.describe.recipes import crop, resize, write_recipe

# Their task → the task of edgeq's families, and the preprocessing that their predictors use.
_TASKS = {
    "detect": ("detect", "yolo"),
    "segment": ("segment", "yolo"),
    "pose": ("pose", "yolo"),
    "obb": ("obb", "yolo"),
    "classify": ("classify", "yolo-classify"),
    "semantic": ("semantic", "yolo"),
    "depth": ("depth", "yolo"),
}
# From 8.4 on, the class of the head is written too.
_HEADS = {
    "Detect": "detect",
    "v10Detect": "detect",
    "WorldDetect": "detect",
    "RTDETRDecoder": "detect",
    "Segment": "segment",
    "Segment26": "segment",
    "Pose": "pose",
    "Pose26": "pose",
    "OBB": "obb",
    "OBB26": "obb",
    "Classify": "classify",
}
_LITERALS = ("names", "imgsz", "kpt_shape", "kpt_names", "args", "end2end")
_MOST_KEYPOINTS = 1000


def read(exported: Exported) -> ModelFacts:
    """Return the facts of the metadata. Files with only `stride` and `names` are YOLOv5's."""
    parts, metadata = [], exported.metadata
    if "stride" in metadata and "names" in metadata:
        place = "in the model's metadata"
        values = {key: parse_literal(metadata[key], f"{key!r} {place}") for key in _LITERALS if key in metadata}
        parts.append(_read(exported, {**metadata, **values}, place))
    path = exported.path.parent / "metadata.yaml"
    beside = find_yaml(path, "stride:")
    if beside is not None and {"stride", "names", "task"} <= beside.keys():
        parts.append(_read(exported, beside, f"in {path}"))
    return merge(parts)


def _read(exported: Exported, values: Mapping[str, Any], place: str) -> ModelFacts:
    task, head, notes = str(values.get("task", "detect")), str(values.get("head", "")), []
    stated, preprocess = _TASKS.get(task, (None, None))
    if stated is None:
        notes.append(f"edgeq does not know the task {task[:60]!r} {place}")
    elif _HEADS.get(head, stated) != stated:
        notes.append(f"task {task!r} and head {head!r} {place} differ; the outputs decide")
        stated = None
    source = f"task {task!r} {place}"
    names = read_names(values["names"], f"'names' {place}") if values["names"] else ()
    shape = values.get("kpt_shape")
    keypoints = None
    pair = isinstance(shape, list | tuple) and len(shape) == 2 and all(type(n) is int for n in shape)
    if pair and shape is not None and 1 <= shape[0] <= _MOST_KEYPOINTS and shape[1] in (2, 3):
        keypoints = (shape[0], shape[1])
    options = values.get("args")
    options = options if isinstance(options, dict) else {}
    size = values.get("imgsz")
    # A file may be exported again with other sizes, and keeps the strings of the first export.
    if exported.size is not None and isinstance(size, list) and len(size) == 2 and size[::-1] != list(exported.size):
        notes.append(
            f"imgsz {place} is {size[0]} x {size[1]}, but the input is {exported.size[1]} x {exported.size[0]} (height "
            "x width); the input decides"
        )
    recipe: Any = preprocess
    if head == "RTDETRDecoder" or "rt-detr" in str(values.get("description", "")).lower():
        # Its predictor stretches images: models/rtdetr/predict.py.
        recipe = write_recipe("RT-DETR: stretched, RGB, 0..1", [{"op": "resize", "size": "model"}], scale=1 / 255)
    stated_size = size if isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size) else None
    if preprocess == "yolo-classify" and (sides := exported.size or stated_size) is not None:
        side = min(sides)
        steps = [resize((side, side), "short"), crop((side, side), "round")]
        recipe = write_recipe("YOLO classification: short side, centre, RGB, 0..1", steps, scale=1 / 255)
    end_to_end = values.get("end2end") in (True, "True") or options.get("nms") is True
    hints = {"boxes": "centers"} if head == "RTDETRDecoder" else {}
    return ModelFacts(
        task=Fact(stated, source) if stated else None,
        labels=Fact(names, f"names {place}") if names else None,
        preprocess=Fact(recipe, source, assumed=True) if recipe else None,
        keypoints=Fact(keypoints, f"kpt_shape {place}") if keypoints else None,
        keypoint_names=_keypoint_names(values.get("kpt_names"), keypoints, place),
        hints=Fact(hints, f"head {place}") if hints else None,
        notes=(*notes, *([f"the model suppresses boxes itself, as end2end or nms {place} says"] if end_to_end else [])),
    )


def _keypoint_names(value: Any, keypoints: tuple[int, int] | None, place: str) -> Fact[tuple[str, ...]] | None:
    """Return the names of the keypoints of the first class. The value maps each class to its names."""
    names = value.get(0, value.get("0")) if isinstance(value, dict) else value
    if keypoints is None or not isinstance(names, list | tuple) or len(names) != keypoints[0]:
        return None
    return Fact(read_names(names, f"'kpt_names' {place}"), f"kpt_names {place}")


READER = Reader("ultralytics", "Ultralytics' metadata in the ONNX file, and metadata.yaml next to the model", read)
