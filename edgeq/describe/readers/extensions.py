"""Recognise models that the package onnxruntime-extensions extended: operators decode image files and draw boxes."""

from __future__ import annotations

from edgeq.describe.facts import Exported, ModelFacts, Reader


def read(exported: Exported) -> ModelFacts:
    """Return a note that names the operators, and the inner model to quantize instead."""
    if not exported.extensions:
        return ModelFacts()
    return ModelFacts(notes=(describe_extensions(exported),))


def describe_extensions(exported: Exported) -> str:
    """Return a sentence that names the operators and says how to get the inner model."""
    named = ", ".join(exported.extensions[:8])
    sentence = f"{exported.path.name} has operators of onnxruntime-extensions ({named})"
    if exported.inner is None:
        return f"{sentence}: quantize the model from before they were added"
    start, end = exported.inner
    return (
        f"{sentence}: quantize the inner model, which onnx.utils.extract_model({exported.path.name!r}, 'inner.onnx', "
        f"[{start!r}], [{end!r}]) writes"
    )


READER = Reader("extensions", "operators of onnxruntime-extensions in the graph", read)
