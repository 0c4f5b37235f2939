"""Read the metadata that Ultralytics' exporter writes into ONNX files (YOLOv5, v8 to v12, 26, RT-DETR).

Each entry of metadata_props is the text of a Python value: task, names, imgsz, stride, kpt_shape, kpt_names, args,
end2end. Source: Ultralytics, engine/exporter.py. The preprocessing is not written; the task determines it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.describe.facts import Fact, ModelFacts, Reader
from edgeq.describe.literals import parse_literal

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


def read(metadata: Mapping[str, str], model: Path) -> ModelFacts:
    """Return the facts of the metadata. Files with only `stride` and `names` are YOLOv5's."""
    del model
    if "stride" not in metadata or "names" not in metadata:
        return ModelFacts()
    names = _read_names(_literal(metadata, "names"))
    task = metadata.get("task", "detect")
    known_task, preprocess = _TASKS.get(task, (None, None))
    shape = _literal(metadata, "kpt_shape") if "kpt_shape" in metadata else None
    valid_shape = isinstance(shape, list | tuple) and len(shape) == 2 and all(isinstance(n, int) for n in shape)
    return ModelFacts(
        task=Fact(known_task, f"task {task!r} in the model's metadata") if known_task else None,
        labels=Fact(names, "names in the model's metadata") if names else None,
        preprocess=Fact(preprocess, f"task {task!r} in the model's metadata") if preprocess else None,
        keypoints=Fact((shape[0], shape[1]), "kpt_shape in the model's metadata") if valid_shape and shape else None,
        notes=() if known_task else (f"edgeq does not know the task {task!r} in the model's metadata",),
    )


def _literal(metadata: Mapping[str, str], key: str) -> Any:
    return parse_literal(metadata[key], f"{key!r} in the model's metadata")


def _read_names(value: Any) -> tuple[str, ...]:
    """Return the names of a dict with keys 0 to n - 1 (numbers, or numbers as text), or of a list."""
    if isinstance(value, dict):
        numbered = {int(key): str(name) for key, name in value.items() if str(key).isdigit()}
        if sorted(numbered) != list(range(len(value))):
            return ()
        return tuple(numbered[number] for number in range(len(numbered)))
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


READER = Reader("ultralytics", "Ultralytics' metadata in the ONNX file", read)
