"""Read inference.yml, which PaddleX, PaddleOCR and PaddleClas write next to a model.

Source: PaddleOCR, ppocr/utils/export_model.py. The scale "1./255." is text that Paddle evaluates; edgeq accepts only a
number or a fraction of two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.data.preprocess import shipped
from edgeq.describe.beside import check_names, find_yaml, is_number, read_numbers
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.describe.recipes import Step, crop, read_filter, read_size, resize, write_recipe
from edgeq.errors import DataError

_FRACTION = re.compile(r"\s*([0-9.eE+-]{1,24})\s*(?:/\s*([0-9.eE+-]{1,24})\s*)?")
_THRESHOLDS = {"thresh": "pixel", "box_thresh": "confidence", "unclip_ratio": "unclip", "max_candidates": "limit"}


def read(exported: Exported) -> ModelFacts:
    """Return the facts of the file."""
    path = exported.path.parent / "inference.yml"
    table = find_yaml(path, "transform_ops", "PostProcess")
    if table is None:
        return ModelFacts()
    post, pre = (value if isinstance(value := table.get(key), dict) else {} for key in ("PostProcess", "PreProcess"))
    operators = pre.get("transform_ops")
    # Each entry is one name with its settings, or the name alone.
    steps = {
        str(name): settings if isinstance(settings, dict) else {}
        for entry in (operators if isinstance(operators, list) else ())
        for name, settings in (entry.items() if isinstance(entry, dict) else ((entry, None),))
    }
    name = str(post.get("name", "Topk" if "Topk" in post else ""))
    if name == "CTCLabelDecode":
        return _read_recognition(post, path)
    if name == "DBPostProcess":
        thresholds = {key: float(post[old]) for old, key in _THRESHOLDS.items() if is_number(post.get(old))}
        return ModelFacts(
            task=Fact("text-detect", f"PostProcess in {path}"),
            preprocess=_name("ppocr-det", f"PostProcess in {path}"),
            thresholds=Fact(thresholds, f"PostProcess in {path}") if thresholds else None,
        )
    if not steps:
        return ModelFacts()
    topk = post.get("Topk")
    labels = topk.get("label_list") if isinstance(topk, dict) else None
    source = f"PreProcess in {path}"
    try:
        preprocess: Fact[Mapping[str, Any] | str] = Fact(_write(steps, path), source)
    except DataError as error:
        preprocess = Fact({}, source, problem=error)
    return ModelFacts(
        task=Fact("classify", f"PostProcess in {path}") if name == "Topk" else None,
        labels=Fact(check_names(labels, f"label_list in {path}"), f"label_list in {path}")
        if isinstance(labels, list) and labels
        else None,
        preprocess=preprocess,
    )


def _read_recognition(post: Mapping[str, Any], path: Path) -> ModelFacts:
    characters, source = post.get("character_dict"), f"character_dict in {path}"
    return ModelFacts(
        task=Fact("text", f"PostProcess in {path}"),
        labels=Fact(check_names(characters, source), source) if isinstance(characters, list) and characters else None,
        preprocess=_name("ppocr-rec", f"PostProcess in {path}"),
        hints=Fact({"blank": 0}, f"PostProcess in {path}"),
    )


def _name(preprocess: str, source: str) -> Fact[Mapping[str, Any] | str] | None:
    return Fact(preprocess, source, assumed=True) if preprocess in shipped() else None


def _write(operators: Mapping[str, Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Return the preprocessing of a classifier."""
    geometry: list[Step] = []
    order, scale, mean, deviation = "RGB", 1.0, [], []
    for name, settings in operators.items():
        if name == "DecodeImage":
            order = "BGR" if settings.get("img_mode") == "BGR" else "RGB"
        elif name == "ResizeImage":
            filter = read_filter(settings.get("interpolation", 1), path)
            short = settings.get("resize_short")
            side = read_size(short if short is not None else settings.get("size"), f"ResizeImage in {path}")
            geometry.append(resize(side, "short" if short is not None else "exact", filter, "round"))
        elif name == "CropImage":
            geometry.append(crop(read_size(settings.get("size"), f"CropImage in {path}")))
        elif name == "NormalizeImage":
            scale = read_fraction(settings.get("scale", 1), f"scale in {path}")
            mean, deviation = (read_numbers(settings.get(key), f"{key} in {path}") for key in ("mean", "std"))
        elif name not in ("ToCHWImage", "KeepKeys"):
            raise DataError(f"{path}: edgeq has no step for {name[:60]}", "Give ⟨preprocess⟩")
    return write_recipe(f"PaddleX in {path.name}", geometry, order=order, scale=scale, mean=mean, deviation=deviation)


def read_fraction(value: Any, subject: str) -> float:
    """Return a number, or the value of a text "NUMBER" or "NUMBER/NUMBER".

    Raises:
        DataError: the value is something else.
    """
    if is_number(value):
        return float(value)
    match = _FRACTION.fullmatch(value) if isinstance(value, str) else None
    try:
        result = float(match[1]) / float(match[2] or 1) if match else float("nan")
    except (ValueError, ZeroDivisionError):
        result = float("nan")
    if not is_number(result):
        raise DataError(f"{subject} is {str(value)[:60]!r}, not a number or a fraction", "Give ⟨preprocess⟩")
    return result


READER = Reader("paddleocr", "inference.yml of PaddleX, PaddleOCR and PaddleClas", read)
