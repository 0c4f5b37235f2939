"""Preprocessings as plain data for people and for --json: the arithmetic, the steps there are."""

from __future__ import annotations

from typing import Any

from edgeq.data.preprocess import Preprocess, load_preprocess, names

STEPS = {
    "resize": "SIZE[:exact|short|long|fit][:FILTER][:floor|round|ceil]; SIZE 256, 320x240 or model",
    "crop": "SIZE[:floor|round]; the centre",
    "letterbox": "SIZE[:top-left|center][:PAD][:FILTER][:ROUNDING]; PAD 0..255 or [r,g,b], default 114",
    "channels": "RGB, BGR, or L for grey",
    "dtype": "float16, float32 or float64: what follows is computed in it (float32 if not said)",
    "multiply, scale": "x * CONSTANT; a number, a fraction such as 1/255, or [one,a,channel]",
    "divide, std": "x / CONSTANT",
    "add, offset": "x + CONSTANT",
    "subtract, mean": "x - CONSTANT",
    "center": "x - mean(x) of the item itself",
    "window": "FRAMES[:STEP]; windows along the first axis, flattened, one row of the batch each",
    "layout": "NCHW, NHWC, CHW … or model",
    "reshape": "[1,49,10]",
    "expand": "AXIS",
}
"""Step → what is written after its "="."""

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


def list_preprocessings() -> dict[str, Any]:
    """Names with titles, steps and source options."""
    return {
        "preprocessings": [{"name": name, "title": title} for name, title in names().items()],
        "steps": dict(STEPS),
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
        "spec": loaded.to_dict(),
    }
