"""Read deploy.json and pipeline.json, which MMDeploy writes next to a model. Source: backend/sdk/export_info.py.

For RKNN it leaves the mean and the deviation out, because they are inside the .rknn file; for ONNX they are stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.describe.beside import find_json, is_number, read_numbers
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.describe.recipes import Step, crop, resize, write_recipe
from edgeq.errors import DataError

_TASKS = {
    "Classifier": "classify",
    "Detector": "detect",
    "Segmentor": "semantic",
    "TextDetector": "text-detect",
    "TextRecognizer": "text",
    "PoseDetector": "pose",
    "RotatedDetector": "obb",
    "Restorer": "image",
}
# These change no value of an image.
_IDLE = frozenset({"LoadImageFromFile", "ImageToTensor", "Collect", "DefaultFormatBundle", "PackInputs", "Lift"})
_SCORES = ("score_thr", "conf_thr")


def read(exported: Exported) -> ModelFacts:
    """Return the facts of both files."""
    folder = exported.path.parent
    deploy = find_json(folder / "deploy.json", '"customs"', '"backend"') or {}
    path = folder / "pipeline.json"
    pipeline = find_json(path, '"Transform"', '"transforms"') or {}
    kind = deploy.get("task")
    task = _TASKS.get(kind) if isinstance(kind, str) else None
    inner = pipeline.get("pipeline")
    tasks = inner.get("tasks") if isinstance(inner, dict) else None
    preprocess: Fact[Mapping[str, Any] | str] | None = None
    thresholds: dict[str, float] = {}
    for entry in tasks if isinstance(tasks, list) else ():
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("transforms"), list):
            try:
                preprocess = Fact(_write(entry["transforms"], path, exported), f"transforms in {path}")
            except DataError as error:
                preprocess = Fact({}, f"transforms in {path}", problem=error)
        settings = entry.get("params")
        if isinstance(settings, dict):
            scores = [float(settings[key]) for key in _SCORES if is_number(settings.get(key))]
            thresholds |= {"confidence": scores[0]} if scores else {}
    return ModelFacts(
        task=Fact(task, f"task {kind!r} in {folder / 'deploy.json'}") if task else None,
        preprocess=preprocess,
        thresholds=Fact(thresholds, f"params in {path}") if thresholds else None,
    )


def _write(transforms: list[Any], path: Path, exported: Exported) -> dict[str, Any]:
    geometry: list[Step] = []
    order, mean, deviation = "BGR", list[float](), list[float]()
    for transform in transforms:
        settings = transform if isinstance(transform, dict) else {}
        kind = str(settings.get("type"))
        if kind == "Resize":
            geometry.append(_resize(settings, path))
        elif kind == "CenterCrop":
            geometry.append(crop(_pair(settings.get("crop_size"), path)))
        elif kind == "Pad":
            geometry.append(_letterbox(settings, geometry.pop() if geometry else {}, path, exported))
        elif kind == "Normalize":
            mean, deviation = (read_numbers(settings.get(key), f"{key} in {path}") for key in ("mean", "std"))
            order = "RGB" if settings.get("to_rgb", True) else "BGR"
        elif kind not in _IDLE:
            raise DataError(f"{path}: edgeq has no step for {kind[:60]}", "Give ⟨preprocess⟩")
    return write_recipe(f"MMDeploy in {path.name}", geometry, order=order, mean=mean, deviation=deviation)


def _resize(settings: Mapping[str, Any], path: Path) -> Step:
    sides = settings.get("size")
    # [256, -1] is the short side.
    if isinstance(sides, list) and len(sides) == 2 and sides[1] == -1:
        return resize(_pair(sides[0], path), "short", _filter(settings))
    return resize(_pair(sides, path), "fit" if settings.get("keep_ratio") else "exact", _filter(settings), "round")


def _filter(settings: Mapping[str, Any]) -> str:
    name = settings.get("interpolation", "bilinear")
    return name if name in ("nearest", "bilinear", "bicubic", "lanczos") else "bilinear"


def _letterbox(settings: Mapping[str, Any], last: Step, path: Path, exported: Exported) -> Step:
    """Return a step that fits an image into a size and fills it up, which stands for a resize and a pad."""
    value = settings.get("pad_val", 0)
    value = value.get("img", 0) if isinstance(value, dict) else value
    values = [int(number) for number in read_numbers(value, f"pad_val in {path}") if 0 <= number <= 255]
    pair = settings.get("size")
    size = list(_pair(pair, path)) if pair is not None else list(exported.size or ())
    if last.get("rule") != "fit" or not size or not values or last["size"] != size:
        raise DataError(f"{path}: edgeq has no step for Pad at a size that differs", "Give ⟨preprocess⟩")
    return {"op": "letterbox", "size": size, "position": "top-left", "value": values, "rounding": "round"}


def _pair(size: Any, path: Path) -> tuple[int, int]:
    """Return (width, height) from [width, height] or one side."""
    sides = [int(side) for side in read_numbers(size, f"size in {path}") if 1 <= side <= 65536]
    if not 1 <= len(sides) <= 2:
        raise DataError(f"a size in {path} is {str(size)[:60]}", "Give ⟨preprocess⟩")
    return sides[0], sides[-1]


READER = Reader("mmdeploy", "deploy.json and pipeline.json of MMDeploy", read)
