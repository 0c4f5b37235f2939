"""Decide which preprocessing steps edgeq.mjs repeats bit for bit, and which it leaves to its caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.data.axes import model_axes
from edgeq.signature import TensorSpec
from edgeq.util.records import plain

# Steps that are plain arithmetic or index arithmetic. JavaScript computes them with the same IEEE numbers as NumPy.
_EXACT = frozenset(
    {"add", "subtract", "multiply", "divide", "dtype", "channels", "crop", "layout", "expand", "reshape", "window"}
)
_INPUTS = frozenset({"float32", "float64", "uint8"})
# Values of a step's `dtype` and `order` with which JavaScript computes the same. None: the step has no such option.
_EXACT_TYPES = frozenset({"float32", "float64", "RGB", "BGR", None})


def web_recipe(preprocess: Any, spec: TensorSpec) -> dict[str, Any] | None:
    """Return the steps that `prepare` of edgeq.mjs runs for an input, or None if there is no preprocessing.

    edgeq.mjs never repeats decoding and resizing, because browsers differ in both. So the caller has to do every step
    up to and including the last one that decodes or resizes. The recipe lists the caller's steps as text.

    Args:
        preprocess: an `edgeq.data.preprocess.Preprocess`, or None.
    """
    if preprocess is None:
        return None
    record: Mapping[str, Any] = plain(preprocess)
    if preprocess.spec is None or spec.dtype.name not in _INPUTS:
        return {"title": record.get("title", ""), "steps": [], "caller": [f"all of it: {record['name']}"]}
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
        "steps": [_fixed(step, spec) for step in steps[behind:]],
    }


def _is_exact(step: Mapping[str, Any]) -> bool:
    options = {step.get("dtype"), step.get("order")}
    sizes = step["op"] != "crop" or not isinstance(step["size"], str)
    return step["op"] in _EXACT and options <= _EXACT_TYPES and sizes


def _fixed(step: Mapping[str, Any], spec: TensorSpec) -> dict[str, Any]:
    """Return a step with the model's own axis order in place of "model"."""
    if step["op"] == "layout" and step["axes"] == "model":
        return {**step, "axes": model_axes(spec, "HWC")}
    return dict(step)
