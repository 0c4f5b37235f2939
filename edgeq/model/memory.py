"""Plan memory: the size of each tensor in a run, and groups of tensors that fit a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import onnx
from numpy.typing import NDArray

from edgeq.model.shapes import inferred_shapes
from edgeq.model.skeleton import proto_skeleton

T = TypeVar("T")
_FLOAT_BYTES = 4


def tensor_sizes(model: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Return the size in bytes of each tensor, by name, when the model runs on `inputs`. Every element counts as four
    bytes. Tensors whose size cannot be inferred are left out.
    """
    bare = proto_skeleton(model)
    # Stated shapes may belong to other input sizes.
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
    """Yield the items in groups of neighbours. The sizes in a group add up to at most `budget`. An item that is larger
    than `budget` gets its own group.

    Args:
        sized: pairs of an item and its size, in the unit of `budget`.
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
