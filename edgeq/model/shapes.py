"""Shapes of every tensor: symbolic inference, onnx's own where that gives up, and an upper bound on sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from edgeq_device.budget import VARIABLE, allowance, largest_sample
from edgeq_device.dtypes import ELEMENT_BITS

from edgeq.errors import ModelError, one_line
from edgeq.graph.convert import inner_graphs
from edgeq.graph.index import GraphIndex
from edgeq.model.skeleton import skeleton
from edgeq.model.symbolic import SymbolicOptions, reason, symbolic_shapes
from edgeq.model.tensors import weight_bytes

MAX_ACTIVATION_BYTES = 2**36
"""Bytes. A static shape that needs more than this for one tensor is taken for an attack or an error."""
_OF_WHAT_IS_THERE = 64
"""Bytes that one tensor may take for each byte of weights and inputs, beyond `sample` of the budget. Models of few
weights have results of 25 times their input; those with larger ones have the weights to make them."""
_COPIES = 32
"""Bytes that shape inference may take for each byte of a model without its weights."""
_DEFAULT = SymbolicOptions()
_PROPAGATED = 2**16
"""Elements of a vector of integers up to which onnx may follow the values in it from node to node."""


def infer_shapes(model: ir.Model, symbolic: SymbolicOptions | None = _DEFAULT) -> tuple[dict[str, ir.Value], str]:
    """Return a value with the type and shape of each tensor of the main graph by its name, and why symbolic inference
    could not be used ("" when it could).

    A size is a number or a symbol of the inputs only where it is the same at every size that the inputs allow: ONNX
    Runtime reuses memory and folds constants by what it reads in a file. What a file says of its own tensors may be
    left from other sizes, so that where inputs have free sizes no more than its ranks count. Weights may be external:
    they are not read.

    Args:
        symbolic: None leaves it to onnx's own inference.
    """
    bare = skeleton(model)
    symbols, fixed = _symbols(bare.graph), _has_fixed_inputs(bare.graph)
    claims, problem = _take_claims(bare.graph), ""
    known: dict[str, ir.Value] = {}
    own = _inferred_alone(bare)
    _add(known, _described(own.graph), symbols)
    if symbolic is not None and not is_complete(own.graph):
        try:
            _add(known, _described(symbolic_shapes(bare, symbolic).graph))
        except Exception as error:  # sympy, assertions and bare Exceptions of the tool: any of them means fallback
            problem = reason(error)
    _add(known, claims, numbers=fixed)
    return known, problem


def _symbols(graph: onnx.GraphProto) -> frozenset[str]:
    return frozenset(d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim) - {""}


def _has_fixed_inputs(graph: onnx.GraphProto) -> bool:
    tensors = [value.type.tensor_type for value in graph.input]
    return all(t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim) for t in tensors)


def _take_claims(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Remove from a graph and the bodies in it what they say of the shapes of their tensors, but for the outputs of
    bodies, and return it."""
    for body in inner_graphs(graph.node):
        del body.value_info[:]
    claims = [*graph.value_info, *(onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in graph.output)]
    del graph.value_info[:]
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return claims


def _inferred_alone(bare: onnx.ModelProto) -> onnx.ModelProto:
    """Return what onnx's own inference finds, which takes milliseconds: without values where that finds all sizes, or
    where there are vectors of integers that take long to follow."""
    own = inferred_shapes(bare)
    long = any(
        value.type.tensor_type.elem_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
        and [d.dim_value > _PROPAGATED for d in value.type.tensor_type.shape.dim] == [True]
        for value in _described(own.graph)
    )
    return own if long or is_complete(own.graph) else inferred_shapes(bare, data_prop=True)


def _add(
    known: dict[str, ir.Value],
    described: Iterable[onnx.ValueInfoProto],
    symbols: Collection[str] = (),
    *,
    numbers: bool = True,
) -> None:
    """Add what is described of tensors where less is known of them, in place: types, ranks, and of their sizes those
    that are one of `symbols` or, with `numbers`, a number."""
    for info in described:
        value = ir.serde.deserialize_value_info_proto(info, None)
        before = known.setdefault(info.name, value)
        before.type = before.type or value.type
        if value.shape is None:
            continue
        sizes = [size if _is_kept(size, symbols, numbers) else None for size in value.shape]
        if before is not value and before.shape is not None and len(before.shape) == len(sizes):
            sizes = [new if _is_open(old) else old for old, new in zip(before.shape, sizes, strict=True)]
        elif before is not value and before.shape is not None:
            continue
        before.shape = ir.Shape(sizes)


def _is_kept(size: int | ir.SymbolicDim, symbols: Collection[str], numbers: bool) -> bool:
    return numbers if isinstance(size, int) else size.value in symbols


def _is_open(size: int | ir.SymbolicDim) -> bool:
    return not isinstance(size, int) and size.value is None


def is_complete(graph: onnx.GraphProto) -> bool:
    """Whether every tensor that a node makes has sizes that are numbers or the inputs' own symbols; a graph with bodies
    never counts as complete."""
    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
    symbols = _symbols(graph)

    def sized(name: str) -> bool:
        """Whether every size of the tensor is known: a number, or a symbol of the inputs."""
        found = types.get(name)
        known = found is not None and found.HasField("shape")
        return known and all(d.HasField("dim_value") or d.dim_param in symbols for d in types[name].shape.dim)

    bodies = next(inner_graphs(graph.node), None)
    return bodies is None and all(sized(name) for node in graph.node for name in node.output if name)


def inferred_shapes(bare: onnx.ModelProto, where: object = "the model", *, data_prop: bool = False) -> onnx.ModelProto:
    """What onnx's own inference makes of a model without its weights.

    Raises:
        ModelError: types or shapes contradict each other in a way that it cannot go on from.
    """
    try:
        # A few nodes can double ranks, and values of shapes, until there is no memory.
        with allowance(largest_sample() + _COPIES * bare.ByteSize()):
            return onnx.shape_inference.infer_shapes(bare, data_prop=data_prop)
    except MemoryError as error:
        raise ModelError(
            f"the shapes of {where} take more than {largest_sample()} bytes",
            f"If it was downloaded, do not trust it; {VARIABLE} sets sample",
        ) from error
    except Exception as error:  # its C++ side raises InferenceError, RuntimeError, IndexError and others
        text = one_line(error, most=300)
        raise ModelError(f"the shapes of {where} cannot be inferred: {text}", "Export the model again") from error


def _described(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """What a graph and the bodies in it say of their values; names are unique among them."""
    for scope in (*inner_graphs(graph.node), graph):
        yield from scope.value_info
        yield from scope.output


def write_shapes(model: ir.Model, symbolic: SymbolicOptions | None = _DEFAULT) -> str:
    """Write what `infer_shapes` finds into the values between the nodes and the outputs that lack a shape, in place.

    Returns:
        Why symbolic inference could not be used; "" when it could.
    """
    shapes, problem = infer_shapes(model, symbolic)
    for node in model.graph:
        for value in node.outputs:
            found = shapes.get(value.name or "")
            if found is not None and (value.shape is None or not value.is_graph_output()):
                value.type, value.shape = found.type, found.shape
    return problem


def unknown_shapes(model: ir.Model) -> tuple[str, ...]:
    """Names of the tensors between nodes whose rank is not known."""
    made = [value for node in model.graph for value in node.outputs]
    return tuple(value.name for value in made if value.name and value.shape is None)


def element_types(model: ir.Model) -> dict[str, ir.DataType]:
    """Tensor name → element type, for the tensors of the main graph whose type the model has or onnx can infer;
    UNDEFINED for sequences, maps and other values that are no tensors."""
    values = GraphIndex(model).values
    known = {name: value for name, value in values.items() if value.type is not None}
    if len(known) < len(values):
        inferred = inferred_shapes(skeleton(model)).graph
        found = [ir.serde.deserialize_value_info_proto(v, None) for v in (*inferred.value_info, *inferred.output)]
        known = {value.name: value for value in found if value.name and value.type is not None} | known
    return {name: _element_type(value) for name, value in known.items()}


def describe(model: ir.Model, path: Path) -> None:
    """Write what onnx's own inference finds into the values between the nodes, in place of what the file says where
    inputs have free sizes; see `infer_shapes`.

    Args:
        path: the model's file, for messages.

    Raises:
        ModelError: a tensor is too large for any machine; nothing has tried to allocate it then.
    """
    check_sizes(model, path)
    write_shapes(model, None)
    graph = skeleton(model).graph
    # What computed shapes say is known now.
    _check_sizes(graph, weight_bytes(model), path)
    if not _has_fixed_inputs(graph):
        for value in (v for body in model.graphs() for node in body for v in node.outputs if body is not model.graph):
            value.shape = value.shape if value.is_graph_output() else None


def check_sizes(model: ir.Model, path: Path) -> None:
    """Refuse a model that makes much of little before anything follows its shapes further.

    Raises:
        ModelError: a tensor is too large for any machine.
    """
    bare = skeleton(model)
    _take_claims(bare.graph)
    # Without data propagation: that computes values, however many there are.
    _check_sizes(inferred_shapes(bare, path).graph, weight_bytes(model), path)


def _check_sizes(graph: onnx.GraphProto, weights: int, path: Path) -> None:
    """Refuse a model that makes much of little: a tensor of many times the bytes of its inputs and weights."""
    most = largest_sample() + _OF_WHAT_IS_THERE * (weights + sum(map(_least_bytes, graph.input)))
    limits = ((MAX_ACTIVATION_BYTES, graph.input), (min(most, MAX_ACTIVATION_BYTES), _described(graph)))
    for info, limit in ((info, limit) for limit, infos in limits for info in infos):
        size = _least_bytes(info)
        if size > limit:
            sizes = [d.dim_value for d in info.type.tensor_type.shape.dim if d.dim_value > 0]
            raise ModelError(
                f"{path}: tensor {info.name!r} has the shape {sizes}, {size} bytes, in a model of {weights} bytes",
                f"Do not trust the file; where you do, {VARIABLE}=sample={(size >> 20) + 1}MiB allows it",
            )


def _least_bytes(info: onnx.ValueInfoProto) -> int:
    """Return the bytes of a tensor whose open sizes are 1."""
    tensor = info.type.tensor_type
    elements: int = math.prod(d.dim_value for d in tensor.shape.dim if d.dim_value > 0)
    return elements * ELEMENT_BITS.get(tensor.elem_type, 8) // 8


def _element_type(value: ir.Value) -> ir.DataType:
    return value.type.dtype if isinstance(value.type, ir.TensorType) else ir.DataType.UNDEFINED
