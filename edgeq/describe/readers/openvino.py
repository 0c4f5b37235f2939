"""Read what OpenVINO's Model API writes into ONNX files: keys of the form "model_info NAME".

Source: openvinotoolkit/model_api, docs/source/guides/model-configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.describe.beside import check_names, is_number
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.describe.recipes import write_recipe
from edgeq.errors import DataError

_PREFIX = "model_info "
_TASKS = {
    "ssd": "detect",
    "yolo": "detect",
    "yolov3": "detect",
    "yolov4": "detect",
    "yolov5": "detect",
    "yolov8": "detect",
    "yolox": "detect",
    "yolov3-onnx": "detect",
    "centernet": "detect",
    "classification": "classify",
    "maskrcnn": "segment",
    "segmentation": "semantic",
    "keypoint_detection": "pose",
    "anomalydetection": "anomaly",
}
_THRESHOLDS = {"confidence_threshold": "confidence", "iou_threshold": "iou"}


def read(exported: Exported) -> ModelFacts:
    """Return the facts of the metadata."""
    info = {key[len(_PREFIX) :]: text for key, text in exported.metadata.items() if key.startswith(_PREFIX)}
    if not info:
        return ModelFacts()
    place = "in the model's metadata"
    kind = info.get("model_type", "")
    task = _TASKS.get(kind.lower())
    if task == "classify" and info.get("multilabel", "").lower() == "true":
        task = "multi-label"
    names = info.get("labels", "").split()
    thresholds = {name: _number(info[key], key, place) for key, name in _THRESHOLDS.items() if key in info}
    embedded = info.get("embedded_processing", "").lower() == "true"
    return ModelFacts(
        task=Fact(task, f"model_info model_type {kind!r} {place}") if task else None,
        # Blanks in a name are written as underscores, because blanks separate the names.
        labels=Fact(
            check_names((name.replace("_", " ") for name in names), f"'model_info labels' {place}"),
            f"model_info labels {place}",
        )
        if names
        else None,
        preprocess=None if embedded else _preprocess(info, place),
        thresholds=Fact(thresholds, f"model_info {place}") if thresholds else None,
        notes=("the model prepares images itself, as model_info embedded_processing says",) if embedded else (),
    )


def _preprocess(info: Mapping[str, str], place: str) -> Fact[Mapping[str, Any] | str] | None:
    keys = [key for key in ("resize_type", "mean_values", "scale_values", "reverse_input_channels") if info.get(key)]
    if not keys:
        return None
    source = f"model_info {', '.join(keys)} {place}"
    kind = info.get("resize_type", "standard")
    pad = int(_number(info.get("pad_value", "0"), "pad_value", place))
    geometry: dict[str, list[dict[str, Any]]] = {
        "standard": [{"op": "resize", "size": "model"}],
        "fit_to_window": [{"op": "letterbox", "size": "model", "position": "top-left", "value": pad}],
        "fit_to_window_letterbox": [{"op": "letterbox", "size": "model", "position": "center", "value": pad}],
    }
    if kind not in geometry or not 0 <= pad <= 255:
        problem = DataError(f"edgeq has no steps for {source} ({kind[:40]!r})", "Give ⟨preprocess⟩")
        return Fact({}, source, problem=problem)
    mean, scale = (_numbers(info.get(key, ""), key, place) for key in ("mean_values", "scale_values"))
    # Model API is given images of OpenCV, whose first channel is blue.
    order = "RGB" if info.get("reverse_input_channels", "").lower() in ("true", "yes", "1") else "BGR"
    title = "OpenVINO Model API's preprocessing in the model's metadata"
    return Fact(write_recipe(title, geometry[kind], order=order, mean=mean, deviation=scale), source)


def _numbers(text: str, key: str, place: str) -> list[float]:
    return [_number(part, key, place) for part in text.replace(",", " ").strip("[] ").split()[:5]]


def _number(text: str, key: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_number(value):
        raise DataError(f"'model_info {key}' {place} is {text[:60]!r}, not a number", "Export the model again")
    return value


READER = Reader("openvino", "OpenVINO Model API's metadata in the ONNX file", read)
