"""Preprocessings as plain data for people and for --json: the arithmetic, the steps there are."""

from __future__ import annotations

from typing import Any

from edgeq.data.preprocess import Preprocess, load_preprocess, names
from edgeq.data.steps import REGISTRY
from edgeq.records import plain

FILTERS = "FILTER is nearest, box, bilinear (default), hamming, bicubic or lanczos; ROUNDING defaults to floor"

SOURCE = {
    "key": "the array of a .npz that holds the items",
    "encoded, offsets": "arrays that hold concatenated image files, and where each begins",
    "label": "the array (or column) that holds the labels",
    "labels": "where labels come from otherwise: name:{label}_*, or a file",
    "input": "the model input that the items feed, where there are several",
    "source.layout": "the axes of one stored item, such as HWC, CHW, TF",
    "source.channels": "RGB (default) or BGR, of stored arrays",
    "stack": "true or false: whether the first axis of prepared arrays counts samples",
    "pattern": "which files to read, for functions that read paths",
}
"""Source option as written in text → what it means."""


def steps() -> dict[str, str]:
    """Names of every step, joined by ", " → what is written after "NAME="."""
    return {", ".join((name, *step.aliases)): step.help for name, step in REGISTRY.items()}


def list_preprocessings() -> dict[str, Any]:
    """Names with titles, steps and source options."""
    return {
        "preprocessings": [{"name": name, "title": title} for name, title in names().items()],
        "steps": steps(),
        "filters": FILTERS,
        "source": dict(SOURCE),
    }


def show_preprocessing(name: str) -> dict[str, Any]:
    """The exact arithmetic of whatever `load_preprocess` takes."""
    loaded: Preprocess = load_preprocess(name)
    return {
        "name": loaded.name,
        "title": loaded.title,
        "arithmetic": list(loaded.arithmetic()),
        "spec": plain(loaded),
    }
