"""Which tensors of a model are worth recording, and which of them follow exactly from others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from edgeq.model.skeleton import skeleton
from edgeq.model.tensors import is_external

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
_MAIN_DOMAINS = ("", "ai.onnx")
_RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"})
_REARRANGING = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "DepthToSpace", "SpaceToDepth"}
)


@dataclass(frozen=True)
class Derived:
    """A tensor whose statistics follow from those of others, to the last bit.

    Attributes:
        kind: "clip" (of one source, to low..high) or "union" (all elements of the sources, once each; with one source:
            the same elements rearranged).
    """

    name: str
    kind: Literal["clip", "union"]
    sources: tuple[str, ...]
    low: float = float("-inf")
    high: float = float("inf")


@dataclass(frozen=True)
class Plan:
    """How to learn about some tensors.

    Attributes:
        inputs: those that are graph inputs, so that the sample has them already.
        fetched: those that the session must give.
        derived: the rest, each after its sources.
    """

    inputs: tuple[str, ...]
    fetched: tuple[str, ...]
    derived: tuple[Derived, ...]


def quantizable_tensors(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the float tensors that some backend may quantize, in the order of the graph: inputs, activations and
    outputs of the main graph.

    Not among them: weights and what is computed from weights alone; a convolution's output that only a
    BatchNormalization reads, since every backend folds that away. A tensor whose type inference cannot tell is listed;
    `collect` drops it when ONNX Runtime says that it is no float.
    """
    constants = constant_tensors(model)
    types = element_types(model)
    readers = _reader_counts(model)
    graph = model.graph
    folded = {
        node.input[0]
        for node in graph.node
        if node.op_type == "BatchNormalization"
        and readers.get(node.input[0]) == 1
        and all(name in constants for name in node.input[1:])
    }
    convolved = {node.output[0] for node in graph.node if node.op_type in ("Conv", "ConvTranspose", "Gemm")}
    names = [i.name for i in graph.input]
    names += [name for node in graph.node for name in node.output if name]
    return tuple(
        name
        for name in dict.fromkeys(names)
        if name not in constants and types.get(name, TensorProto.FLOAT) in _FLOATS and name not in folded & convolved
    )


def plan(model: onnx.ModelProto, wanted: Collection[str], whole: Collection[str] = ()) -> Plan:
    """Find the cheapest way to the statistics of `wanted`.

    A Relu or Clip output follows from its input when that is wanted too; so do rearranged tensors and Concat.

    Args:
        whole: tensors whose values themselves are needed (for channel extrema): never derived.
    """
    wanted = set(wanted)
    inputs = tuple(i.name for i in model.graph.input if i.name in wanted)
    bounds = _scalar_constants(model)
    known = set(inputs)
    fetched: list[str] = []
    derived: list[Derived] = []
    for node in model.graph.node:
        for name in node.output:
            if name not in wanted or name in known:
                continue
            found = _derivation(node, bounds)
            if found is not None and known.issuperset(found.sources) and name not in whole:
                derived.append(found)
            else:
                fetched.append(name)
            known.add(name)
    return Plan(inputs, tuple(fetched), tuple(derived))


def constant_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """Names of initializers and of everything computed from constants alone."""
    graph = model.graph
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        has_body = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if node.op_type in _RANDOM or has_body:
            continue
        if all(not name or name in constants for name in node.input):
            constants.update(name for name in node.output if name)
    return frozenset(constants)


def _derivation(node: onnx.NodeProto, constants: Mapping[str, float]) -> Derived | None:
    if node.domain not in _MAIN_DOMAINS or len(node.output) != 1:
        return None
    name = node.output[0]
    if node.op_type in _REARRANGING:
        return Derived(name, "union", (node.input[0],))
    if node.op_type == "Concat":
        return Derived(name, "union", tuple(node.input))
    if node.op_type == "Relu":
        return Derived(name, "clip", (node.input[0],), low=0.0)
    if node.op_type == "Clip":
        limits = _clip_limits(node, constants)
        if limits is not None and limits[0] <= limits[1]:
            return Derived(name, "clip", (node.input[0],), *limits)
    return None


def _clip_limits(node: onnx.NodeProto, constants: Mapping[str, float]) -> tuple[float, float] | None:
    limits = {a.name: float(np.float32(a.f)) for a in node.attribute}
    for name, place in (("min", 1), ("max", 2)):
        if len(node.input) > place and node.input[place]:
            if node.input[place] not in constants:
                return None
            limits[name] = constants[node.input[place]]
    return limits.get("min", float("-inf")), limits.get("max", float("inf"))


def _scalar_constants(model: onnx.ModelProto) -> dict[str, float]:
    tensors: Iterable[tuple[str, TensorProto]] = [(t.name, t) for t in model.graph.initializer]
    for node in model.graph.node:
        if node.op_type == "Constant":
            tensors = [*tensors, *((node.output[0], a.t) for a in node.attribute if a.name == "value")]
    return {
        name: float(numpy_helper.to_array(tensor).reshape(()))
        for name, tensor in tensors
        if int(np.prod(tensor.dims)) == 1 and tensor.data_type in _FLOATS and not is_external(tensor)
    }


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(skeleton(model)).graph
    known = {}
    for value in [*model.graph.value_info, *inferred.value_info, *inferred.input, *inferred.output]:
        if value.type.HasField("tensor_type"):
            known[value.name] = int(value.type.tensor_type.elem_type)
        elif value.type.WhichOneof("value"):
            known[value.name] = -1
    return {name: kind for name, kind in known.items() if kind != TensorProto.UNDEFINED}


def _reader_counts(model: onnx.ModelProto) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in [*(n for node in model.graph.node for n in node.input), *(o.name for o in model.graph.output)]:
        counts[name] = counts.get(name, 0) + 1
    return counts
