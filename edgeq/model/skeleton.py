"""A model without its weights: what onnx's C++ functions are given, because they copy and serialize all they get."""

from __future__ import annotations

import onnx

from edgeq.model.tensors import is_external, tensor_bytes

KEPT_BYTES = 1024
"""Tensors up to this size stay: they may be shapes, axes or scales that shape inference and conversion read."""


def skeleton(model: onnx.ModelProto, *, kept_bytes: int = KEPT_BYTES) -> onnx.ModelProto:
    """A copy of `model` where every larger or external initializer has become a graph input of its type and shape.

    Initializers of subgraphs become nothing less than they are: a body cannot have inputs of its own choosing.
    """
    copy = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _assign(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _assign(copy.graph, field.name, value)
    inputs = {i.name for i in model.graph.input}
    for tensor in model.graph.initializer:
        if is_external(tensor) or tensor_bytes(tensor) > kept_bytes:
            if tensor.name not in inputs:
                copy.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        else:
            copy.graph.initializer.add().CopyFrom(tensor)
    return copy


def reattach(bare: onnx.ModelProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """Give `bare`, a skeleton of `model` that may have been changed since, the weights of `model` back, in place."""
    inputs = {i.name for i in model.graph.input}
    kept = {t.name for t in bare.graph.initializer}
    missing = [t for t in model.graph.initializer if t.name not in kept]
    stand_ins = {t.name for t in missing} - inputs
    remaining = [i for i in bare.graph.input if i.name not in stand_ins]
    del bare.graph.input[:]
    bare.graph.input.extend(remaining)
    bare.graph.initializer.extend(missing)
    return bare


def _assign(message: object, name: str, value: object) -> None:
    target = getattr(message, name)
    if hasattr(target, "CopyFrom") and not hasattr(target, "extend"):
        target.CopyFrom(value)
    elif hasattr(target, "extend"):
        target.extend(value)
    else:
        setattr(message, name, value)
