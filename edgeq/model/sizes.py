"""How large tensors are when a model runs on given inputs, and parts of a model that fit a memory budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.shapes import inferred_shapes
from edgeq.model.skeleton import skeleton

T = TypeVar("T")

_FLOAT_BYTES = 4


def tensor_sizes(model: ir.Model, inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Tensor name → bytes when the model runs on `inputs`, four to an element; without those that cannot be
    inferred."""
    bare = skeleton(model)
    del bare.graph.value_info[:]
    for value in bare.graph.input:
        if value.name in inputs:
            dims = value.type.tensor_type.shape.dim
            del dims[:]
            for size in inputs[value.name].shape:
                dims.add().dim_value = size
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = inferred_shapes(bare, data_prop=True).graph
    return {
        value.name: _FLOAT_BYTES * math.prod(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in [*inferred.input, *inferred.value_info, *inferred.output]
        if value.type.tensor_type.HasField("shape")
        and all(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim)
    }


def partitions(sized: Iterable[tuple[T, int]], budget: int) -> Iterator[list[T]]:
    """Items in parts of neighbours whose sizes add up to at most `budget`; an item larger than that is alone.

    Args:
        sized: each item with its size, in the unit of `budget`.
    """
    partition: list[T] = []
    used = 0
    for item, size in sized:
        if partition and used + size > budget:
            yield partition
            partition, used = [], 0
        partition.append(item)
        used += size
    if partition:
        yield partition
