"""Read infer_cfg.yml, which PaddleDetection writes next to a model; PaddleX writes the same keys into inference.yml.

Source: PaddleDetection, ppdet/engine/export_utils.py and deploy/third_engine/onnx/infer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.describe.beside import check_names, find_yaml, is_number, read_numbers
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.describe.recipes import Step, read_filter, read_size, resize, write_recipe
from edgeq.errors import DataError

_POSES = frozenset({"HRNet", "HigherHRNet", "Keypoint", "TinyPose", "PETR_POSE"})


def read(exported: Exported) -> ModelFacts:
    """Return the facts of the file."""
    for name in ("infer_cfg.yml", "inference.yml"):
        path = exported.path.parent / name
        table = find_yaml(path, "draw_threshold", "label_list")
        if table is not None and "arch" in table and isinstance(table.get("Preprocess"), list):
            break
    else:
        return ModelFacts()
    labels, threshold = table.get("label_list"), table.get("draw_threshold")
    source, origin = f"Preprocess in {path}", f"arch {str(table['arch'])[:60]!r} in {path}"
    try:
        preprocess: Fact[Mapping[str, Any] | str] = Fact(_write(table["Preprocess"], path), source)
    except DataError as error:
        preprocess = Fact({}, source, problem=error)
    task = "pose" if str(table["arch"]) in _POSES else "segment" if table.get("mask") is True else "detect"
    return ModelFacts(
        task=Fact(task, origin),
        labels=Fact(check_names(labels, f"label_list in {path}"), f"label_list in {path}")
        if isinstance(labels, list) and labels
        else None,
        preprocess=preprocess,
        thresholds=Fact({"confidence": float(threshold or 0)}, f"draw_threshold in {path}")
        if is_number(threshold)
        else None,
    )


def _write(operators: list[Any], path: Path) -> dict[str, Any]:
    geometry: list[Step] = []
    scale, mean, deviation = 1.0, list[float](), list[float]()
    for operator in operators:
        kind = operator.get("type") if isinstance(operator, dict) else None
        if kind == "Resize":
            size = read_size(operator.get("target_size"), f"target_size in {path}")
            # A side may shrink less than the other allows, so only squares mean the same as fitting into them.
            if operator.get("keep_ratio") and size[0] != size[1]:
                raise DataError(f"{path}: edgeq has no step for keep_ratio with the size {size}", "Give ⟨preprocess⟩")
            rule = "fit" if operator.get("keep_ratio") else "exact"
            geometry.append(resize(size, rule, read_filter(operator.get("interp", 1), path), "round"))
        elif kind == "NormalizeImage":
            scale = 1 / 255 if operator.get("is_scale", True) else 1.0
            if operator.get("norm_type", "mean_std") != "none":
                mean, deviation = (read_numbers(operator.get(key), f"{key} in {path}") for key in ("mean", "std"))
        elif kind != "Permute":
            raise DataError(f"{path}: edgeq has no step for {str(kind)[:60]}", "Give ⟨preprocess⟩")
    return write_recipe(f"PaddleDetection in {path.name}", geometry, scale=scale, mean=mean, deviation=deviation)


READER = Reader("paddledetection", "infer_cfg.yml of PaddleDetection", read)
