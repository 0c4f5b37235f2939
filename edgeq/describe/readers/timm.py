"""Read the config.json that timm writes next to a model.

Source: timm, models/_hub.py and data/transforms_factory.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.describe.beside import find_json, is_number, read_names, read_numbers
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader
from edgeq.describe.recipes import PILLOW, Step, crop, read_size, resize, write_recipe
from edgeq.errors import DataError


def read(exported: Exported) -> ModelFacts:
    """Return the task, the labels and the preprocessing."""
    path = exported.path.parent / "config.json"
    table = find_json(path, '"crop_pct"', '"pretrained_cfg"', '"interpolation"')
    if table is None:
        return ModelFacts()
    # Old files are one flat table.
    config = table.get("pretrained_cfg", table)
    if not isinstance(config, dict) or "input_size" not in config:
        return ModelFacts()
    key = "label_names" if "label_names" in table else "labels"
    labels = table.get(key)
    names = read_names(labels, f"{key} in {path}") if isinstance(labels, dict | list) and labels else ()
    source = f"input_size, crop_pct, mean and std in {path}"
    try:
        preprocess: Fact[Mapping[str, Any] | str] = Fact(_write(config, path, exported), source)
    except DataError as error:
        preprocess = Fact({}, source, problem=error)
    classifies = table.get("num_classes", config.get("num_classes")) not in (0, None)
    return ModelFacts(
        task=Fact("classify", f"num_classes in {path}") if classifies else None,
        labels=Fact(names, f"{key} in {path}") if names else None,
        preprocess=preprocess,
    )


def _write(config: Mapping[str, Any], path: Path, exported: Exported) -> dict[str, Any]:
    size, share = _read_pair(config, "", path)
    # A model may be exported at the size at which it is tested.
    if "test_input_size" in config and exported.size is not None and size != exported.size:
        tested = _read_pair(config, "test_", path)
        size, share = tested if tested[0] == exported.size else (size, share)
    if exported.size is not None:
        size = exported.size
    name = config.get("interpolation", "bicubic")
    if name not in PILLOW.values():
        raise DataError(f"{path}: interpolation is {str(name)[:40]!r}", "Give ⟨preprocess⟩")
    mode = config.get("crop_mode", "center")
    larger = (math.floor(size[0] / share), math.floor(size[1] / share))
    steps: list[Step]
    if mode == "squash":
        steps = [resize(larger, "exact", name), crop(size, "round")]
    elif mode == "center" and size[0] == size[1]:
        steps = [resize(larger, "short", name), crop(size, "round")]
    else:
        raise DataError(f"{path}: edgeq has no step for crop_mode {str(mode)[:40]!r} at {size}", "Give ⟨preprocess⟩")
    mean, deviation = (read_numbers(config.get(key), f"{key} in {path}") for key in ("mean", "std"))
    return write_recipe(f"timm's evaluation in {path.name}", steps, scale=1 / 255, mean=mean, deviation=deviation)


def _read_pair(config: Mapping[str, Any], prefix: str, path: Path) -> tuple[tuple[int, int], float]:
    """Return (width, height), and the share of the resized image that the crop keeps."""
    shape = config[f"{prefix}input_size"]
    if not isinstance(shape, list) or len(shape) != 3:
        raise DataError(f"{path}: {prefix}input_size is {str(shape)[:60]}, not [C, H, W]", "Give ⟨preprocess⟩")
    share = config.get(f"{prefix}crop_pct") or config.get("crop_pct") or 0.875
    if not is_number(share) or not 0.01 <= share <= 1:
        raise DataError(f"{path}: crop_pct is {str(share)[:40]}, not a share", "Give ⟨preprocess⟩")
    return read_size(shape[1:], f"{prefix}input_size in {path}"), float(share)


READER = Reader("timm", "config.json of timm", read)
