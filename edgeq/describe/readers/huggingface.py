"""Read config.json and preprocessor_config.json of transformers and optimum, next to the model or one folder up.

Code that these files name (auto_map) is never run. A key that is null or absent means the default of the image
processor's class, and edgeq has the defaults of the most common classes.
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

# The end of a class's name → the task of edgeq's families.
_TASKS = {
    "ForImageClassification": "classify",
    "ForImageClassificationWithTeacher": "classify",
    "ForAudioClassification": "classify",
    "ForSequenceClassification": "classify",
    "ForObjectDetection": "detect",
    "ForSemanticSegmentation": "semantic",
    "ForDepthEstimation": "depth",
    "ForCTC": "text",
    "ForPoseEstimation": "pose",
    "ForImageSuperResolution": "image",
}
_HALF, _DEFAULT = [0.5] * 3, [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
_CLIP = [[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]


def _defaults(size: Any, resample: int, mean: list[float], std: list[float], **more: Any) -> dict[str, Any]:
    basis = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False}
    return {**basis, "size": size, "resample": resample, "image_mean": mean, "image_std": std, **more}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _cropped(side: int) -> dict[str, Any]:
    return {"do_center_crop": True, "crop_size": _square(side)}


# The class of the image processor → its defaults. Source: transformers, models/*/image_processing_*.py.
_CLASSES: dict[str, dict[str, Any]] = {
    "ViT": _defaults(_square(224), 2, _HALF, _HALF),
    "DeiT": _defaults(_square(256), 3, _HALF, _HALF, **_cropped(224)),
    "CLIP": _defaults({"shortest_edge": 224}, 3, *_CLIP, **_cropped(224)),
    "Bit": _defaults({"shortest_edge": 224}, 3, *_CLIP, **_cropped(224)),
    "ConvNext": _defaults({"shortest_edge": 384}, 2, _HALF, _HALF, crop_pct=224 / 256),
    "MobileNetV1": _defaults({"shortest_edge": 256}, 2, _HALF, _HALF, **_cropped(224)),
    "MobileNetV2": _defaults({"shortest_edge": 256}, 2, _HALF, _HALF, **_cropped(224)),
    "Segformer": _defaults(_square(512), 2, *_DEFAULT),
    "RTDetr": _defaults(_square(640), 2, *_DEFAULT, do_normalize=False),
    "Detr": _defaults({"shortest_edge": 800, "longest_edge": 1333}, 2, *_DEFAULT),
    "Yolos": _defaults({"shortest_edge": 800, "longest_edge": 1333}, 2, *_DEFAULT),
}
# One number as the size means a square for these classes, and the short side for the others.
_SQUARE = frozenset({"ViT", "DeiT", "Segformer", "Beit", "DPT", "RTDetr"})
# ConvNext crops only below this side: image_processing_convnext.py.
_UNCROPPED = 384


def read(exported: Exported) -> ModelFacts:
    """Return the facts of both files."""
    folders = [exported.path.parent]
    # Repositories for transformers.js have the models in a folder of their own.
    if exported.path.absolute().parent.name == "onnx":
        folders.append(exported.path.absolute().parent.parent)
    config_path, config = _find(folders, "config.json", '"architectures"', '"id2label"', '"model_type"')
    marks = ("_processor_type", "feature_extractor_type", "do_resize")
    path, processor = _find(folders, "preprocessor_config.json", *marks)
    notes = []
    if any("auto_map" in table or table.get("trust_remote_code") for table in (config, processor)):
        notes.append(f"the files next to {exported.path.name} name code (auto_map), which edgeq does not run")
    preprocess = _read_preprocess(processor, path, exported) if processor else None
    task = _read_task(config, config_path)
    labels = config.get("id2label")
    # timm writes the same file with other keys.
    names = read_names(labels, f"id2label in {config_path}") if isinstance(labels, dict) and labels else ()
    if names and all(name == f"LABEL_{number}" for number, name in enumerate(names)):
        names = ()  # The names that transformers makes up.
    facts = ModelFacts(
        task=task,
        labels=Fact(names, f"id2label in {config_path}") if names else None,
        preprocess=preprocess,
        notes=tuple(notes),
    )
    return _with_alphabet(facts, folders) if task is not None and task.stated == "text" else facts


def _find(folders: list[Path], name: str, *marks: str) -> tuple[Path, dict[str, Any]]:
    for folder in folders:
        if (table := find_json(folder / name, *marks)) is not None:
            return folder / name, table
    return folders[0] / name, {}


def _read_task(config: Mapping[str, Any], path: Path) -> Fact[str] | None:
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        for end, task in _TASKS.items():
            if isinstance(name, str) and name.endswith(end):
                multiple = task == "classify" and config.get("problem_type") == "multi_label_classification"
                return Fact("multi-label" if multiple else task, f"architectures {name!r} in {path}")
    return None


def _with_alphabet(facts: ModelFacts, folders: list[Path]) -> ModelFacts:
    """Return the facts of a CTC model with its symbols, without the blank, which is the pad token."""
    path, symbols = _find(folders, "vocab.json", '"|"', '"<pad>"', '"[PAD]"')
    if not symbols:
        return facts
    tokenizer_path, tokenizer = _find(folders, "tokenizer_config.json", "pad_token", "word_delimiter_token")
    pad = tokenizer.get("pad_token", "<pad>")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    order = read_names({str(number): symbol for symbol, number in symbols.items()}, str(path))
    space = tokenizer.get("word_delimiter_token", "|")
    blank = symbols.get(pad) if isinstance(pad, str) else None
    names = tuple(" " if name == space else name for number, name in enumerate(order) if number != blank)
    source = f"{path}, pad_token in {tokenizer_path}"
    return ModelFacts(
        task=facts.task,
        labels=Fact(names, str(path)),
        hints=Fact({"blank": blank}, source) if isinstance(blank, int) else None,
        notes=facts.notes,
    )


def _read_preprocess(config: Mapping[str, Any], path: Path, exported: Exported) -> Fact[Mapping[str, Any] | str] | None:
    """Return the preprocessing of images; None for a processor of sound."""
    kind = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
    if not isinstance(kind, str) or "sampling_rate" in config:
        return None
    source = f"{kind or 'the settings'} in {path}"
    try:
        return Fact(_write(config, kind, path, exported), source)
    except DataError as error:
        # A user who names the preprocessing does not need this file.
        return Fact({}, source, problem=error)


def _write(config: Mapping[str, Any], kind: str, path: Path, exported: Exported) -> dict[str, Any]:
    base = kind.removesuffix("Fast").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    defaults = _CLASSES.get(base, {})

    def setting(key: str) -> Any:
        """Return a setting, or the default of the class."""
        value = config.get(key)
        return defaults.get(key) if value is None else value

    def stated(key: str) -> Any:
        """Return a setting without which the preprocessing would be a guess."""
        value = setting(key)
        if value is None:
            raise DataError(
                f"{path} leaves {key} to the class {kind or '(which it does not name)'}, which edgeq does not know",
                "Give ⟨preprocess⟩",
            )
        return value

    steps: list[Step] = []
    if stated("do_resize"):
        filter = PILLOW.get(number) if isinstance(number := stated("resample"), int) else None
        if filter is None:
            raise DataError(f"{path}: resample {str(number)[:40]} is no filter of Pillow", "Give ⟨preprocess⟩")
        steps += _resize(stated("size"), filter, base, setting, path)
    if setting("do_center_crop"):
        size = setting("crop_size")
        if size is None:
            raise DataError(f"{path} asks for a crop without its size", "Give crop_size there, or ⟨preprocess⟩")
        steps.append(crop(_pair(size, f"crop_size in {path}")))
    if setting("do_pad") and (pad := setting("pad_size")) is not None:
        width, height = _pair(pad, f"pad_size in {path}")
        last = steps.pop() if steps else {}
        if last.get("rule") != "fit" or list(last["size"]) != [width, height]:
            raise DataError(f"{path} pads to {width} x {height}, which edgeq has no step for", "Give ⟨preprocess⟩")
        resized = {key: value for key, value in last.items() if key != "rule"}
        steps.append({**resized, "op": "letterbox", "position": "top-left", "value": 0})
    # Every class rescales unless its file says otherwise.
    rescale = config.get("do_rescale")
    factor = setting("rescale_factor") if setting("rescale_factor") is not None else 1 / 255
    scale = read_numbers(factor, f"rescale_factor in {path}")[0] if rescale is not False else 1.0
    mean: list[float] = []
    deviation: list[float] = []
    if stated("do_normalize"):
        mean = read_numbers(stated("image_mean"), f"image_mean in {path}")
        deviation = read_numbers(stated("image_std"), f"image_std in {path}")
    order = "BGR" if setting("do_flip_channel_order") else "RGB"
    title = f"{kind or 'the preprocessing'} in {path.name}"
    return write_recipe(title, steps, order=order, scale=scale, mean=mean, deviation=deviation)


def _resize(size: Any, filter: str, base: str, setting: Any, path: Path) -> list[Step]:
    """Return the steps of one of the four ways to resize."""
    subject = f"size in {path}"
    if isinstance(size, int | list):
        pair = read_size(size, subject)
        if isinstance(size, list) or base in _SQUARE:
            return [resize(pair, "exact", filter)]
        size = {"shortest_edge": pair[0]}
    if not isinstance(size, dict):
        raise DataError(f"{subject} is {str(size)[:60]}, not a size", "Correct the file, or give ⟨preprocess⟩")
    sides = {key: value for key, value in size.items() if value is not None}
    if set(sides) == {"height", "width"}:
        return [resize(_pair(sides, subject), "exact", filter)]
    if set(sides) == {"max_height", "max_width"}:
        pair = read_size([sides["max_height"], sides["max_width"]], subject)
        return [resize(pair, "fit", filter)]
    if set(sides) == {"shortest_edge"}:
        side = read_size(sides["shortest_edge"], subject)[0]
        if base == "ConvNext":
            share = setting("crop_pct")
            if side >= _UNCROPPED:
                return [resize((side, side), "exact", filter)]
            if not is_number(share) or not 0 < share <= 1:
                raise DataError(f"crop_pct in {path} is {str(share)[:40]}, not a share", "Give ⟨preprocess⟩")
            larger = math.floor(side / share)
            return [resize((larger, larger), "short", filter), crop((side, side))]
        return [resize((side, side), "short", filter)]
    raise DataError(
        f"{subject} asks for {' and '.join(map(str, sides))}, which edgeq has no step for"[:300],
        "Give ⟨preprocess⟩ with the size that the model was exported for",
    )


def _pair(size: Any, subject: str) -> tuple[int, int]:
    """Return (width, height) from {"height", "width"}, {"shortest_edge"} or a number."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")] if "height" in size else size.get("shortest_edge")
    return read_size(size, subject)


READER = Reader("huggingface", "config.json and preprocessor_config.json of transformers", read)
