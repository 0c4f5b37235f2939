"""Decide which preprocessing steps edgeq.mjs repeats bit for bit, and which answer.mjs does on pixels before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeq.data.axes import model_axes, model_size
from edgeq.signature import TensorSpec
from edgeq.util.records import plain

# Steps that are plain arithmetic or index arithmetic. JavaScript computes them with the same IEEE numbers as NumPy.
_EXACT = frozenset(
    {"add", "subtract", "multiply", "divide", "dtype", "channels", "crop", "layout", "expand", "reshape", "window"}
)
_INPUTS = frozenset({"float32", "float64", "uint8"})
# Steps on pixels that answer.mjs computes as Pillow does.
_PIXELS = frozenset({"resize", "letterbox", "crop", "channels"})
# Values of a step's `dtype` and `order` with which JavaScript computes the same. None: the step has no such option.
_EXACT_TYPES = frozenset({"float32", "float64", "RGB", "BGR", None})


def web_recipe(preprocess: Any, spec: TensorSpec) -> dict[str, Any] | None:
    """Return the steps that `prepare` of edgeq.mjs runs for an input, or None if there is no preprocessing.

    `prepare` never repeats decoding and resizing. So its caller has to do every step up to and including the last one
    that decodes or resizes. The recipe lists the caller's steps as text, and as data in "image" if answer.mjs knows
    them all.

    Args:
        preprocess: an `edgeq.data.preprocess.Preprocess`, or None.
    """
    if preprocess is None:
        return None
    record: Mapping[str, Any] = plain(preprocess)
    if preprocess.spec is None or spec.dtype.name not in _INPUTS:
        caller = [f"all of it: {record['name']}"]
        return {"title": record.get("title", ""), "steps": [], "caller": caller, "image": None}
    steps = record["steps"]
    # Everything after the last inexact step can be repeated. A step in front of it would get other numbers.
    behind = next((i + 1 for i in reversed(range(len(steps))) if not _is_exact(steps[i])), 0)
    texts = [step.describe() for step in preprocess.spec.steps]
    return {
        "title": record.get("title", ""),
        "input": spec.name,
        "type": spec.dtype.name,
        "axes": record.get("source", {}).get("layout") or None,
        "caller": texts[:behind],
        "image": _image_steps(steps[:behind], spec),
        "steps": [_fixed(step, spec) for step in steps[behind:]],
    }


def _is_exact(step: Mapping[str, Any]) -> bool:
    options = {step.get("dtype"), step.get("order")}
    sizes = step["op"] != "crop" or not isinstance(step["size"], str)
    return step["op"] in _EXACT and options <= _EXACT_TYPES and sizes


def _image_steps(steps: Sequence[Mapping[str, Any]], spec: TensorSpec) -> list[dict[str, Any]] | None:
    """Return the steps with the model's own size in place of "model", or None if answer.mjs does not know one."""
    known = all(step["op"] in _PIXELS for step in steps)
    size = model_size(spec)
    if not known or (size is None and any(isinstance(step.get("size"), str) for step in steps)):
        return None
    return [{**step, "size": size} if isinstance(step.get("size"), str) else dict(step) for step in steps]


def _fixed(step: Mapping[str, Any], spec: TensorSpec) -> dict[str, Any]:
    """Return a step with the model's own axis order in place of "model"."""
    if step["op"] == "layout" and step["axes"] == "model":
        return {**step, "axes": model_axes(spec, "HWC")}
    return dict(step)
