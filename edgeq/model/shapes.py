"""Infer the shape of every tensor, and check that sizes are within limits. If symbolic inference fails, edgeq uses
onnx's own inference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from edgeq_device.model.onnxfile import ELEMENT_BITS
from edgeq_device.system.budget import VARIABLE, limit_step, read_largest_sample

from edgeq.errors import ModelError, one_line
from edgeq.model.convert import inner_graphs
from edgeq.model.graph import GraphIndex, indexed
from edgeq.model.skeleton import skeleton
from edgeq.model.tensors import weight_bytes

SYMBOLIC_LIMIT_S = 10.0
SYMBOLIC_LIMIT_OF_NODE_S = 0.002
"""CPU time in seconds that is allowed for symbolic inference, and the time that each node adds. In some models the
expressions grow without end."""


@dataclass(frozen=True)
class SymbolicOptions:
    """Hold the options of ONNX Runtime's symbolic inference.

    Attributes:
        int_max: integers of at least this value mean "to the end", for example in Slice.
        guess_output_rank: whether the output of an unknown operator gets the rank of its first input.
        verbose: amount of logging, 0 to 3.
    """

    int_max: int = 2**31 - 1
    guess_output_rank: bool = False
    verbose: int = 0


def symbolic_shapes(bare: onnx.ModelProto, options: SymbolicOptions) -> onnx.ModelProto:
    """Infer the shapes of a model without weights. edgeq calls the steps of the inference one by one, because the
    tool's own driver leaves a file in the working directory if the inference is incomplete.

    Raises:
        Exception: any exception that sympy and the tool raise; `reason` turns it into a message.
    """
    inference = _cautious()(options.int_max, True, options.guess_output_rank, options.verbose)
    inference._preprocess(bare)
    limit = SYMBOLIC_LIMIT_S + SYMBOLIC_LIMIT_OF_NODE_S * len(bare.graph.node)
    inference.dispatcher_ = {name: _limit_time(limit, infer) for name, infer in inference.dispatcher_.items()}
    inference._onnx_infer_single_node = _limit_time(limit, inference._onnx_infer_single_node)
    complete = False
    while inference.run_:
        complete = inference._infer_impl()
    inference._update_output_from_vi()
    if not complete:
        raise ValueError("some shapes could not be inferred")
    result: onnx.ModelProto = inference.out_mp_
    return result


def reason(error: Exception) -> str:
    """Return why the inference failed, for a user who does not know the inference tool."""
    text = one_line(error, most=200)
    if isinstance(error, AssertionError | LookupError | AttributeError | TypeError) or not text:
        return "it does not know how to treat these shapes"
    return text


@cache
def _cautious() -> type:
    """Return a variant of onnxruntime's inference class. Wherever the original assumes that two sizes are equal, the
    variant uses a new symbol.
    """
    import sympy
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, is_literal

    class CautiousInference(SymbolicShapeInference):  # type: ignore[misc]
        def _forget(self, name: str, axes: Iterable[int]) -> None:
            """Replace the sizes of a tensor on `axes` by new symbols, which are unrelated to all other sizes."""
            for axis in axes:
                self.known_vi_[name].type.tensor_type.shape.dim[axis].dim_param = self._fresh()

        def _fresh(self) -> str:
            return str(self._new_symbolic_dim("unrelated", len(self.symbolic_dims_)))

        def _add_suggested_merge(self, symbols: Any, apply: bool = False) -> None:
            """Do nothing, so no symbols are merged."""

        def _merge_symbols(self, dims: Sequence[Any]) -> Any:
            """Return the common size of tensors that are joined along another axis. If one of `dims` is a number,
            return the number.
            """
            return next(filter(is_literal, dims), dims[0])

        def _broadcast_shapes(self, shape1: Sequence[Any], shape2: Sequence[Any]) -> list[Any]:
            """Return the broadcast shape of two operands. If a number meets a symbol, the result is the number, because
            the symbol may be 1.
            """
            rank = max(len(shape1), len(shape2))
            padded = ([1] * (rank - len(shape)) + list(shape) for shape in (shape1, shape2))
            met = [{size for size in sizes if size != 1} or {1} for sizes in zip(*padded, strict=True)]
            return [next(filter(is_literal, sizes), None) or self._only(sizes) for sizes in met]

        def _only(self, sizes: Collection[Any]) -> Any:
            return next(iter(sizes)) if len(sizes) == 1 else self._fresh()

        def _onnx_infer_single_node(self, node: Any) -> None:
            """Infer the outputs of a node with onnx. Sizes that onnx leaves open would end the inference, so they get
            new symbols.
            """
            super()._onnx_infer_single_node(node)
            for name in filter(None, node.output):
                sizes = self.known_vi_[name].type.tensor_type.shape.dim
                open_ = (not size.HasField("dim_value") and self._is_open(size.dim_param) for size in sizes)
                self._forget(name, [axis for axis, is_open in enumerate(open_) if is_open])

        def _is_open(self, symbol: str) -> bool:
            return not symbol or bool(self._is_none_dim(symbol))

        def _infer_Slice(self, node: Any) -> None:  # noqa: N802
            """Treat a computed end as unknown. The original only guesses whether such an end is inside the tensor."""
            super()._infer_Slice(node)
            ends, axes = (self._try_get_value(node, place) for place in (2, 3))
            if ends is not None:
                places = range(len(ends)) if axes is None else axes
                self._forget(
                    node.output[0], [int(a) for a, end in zip(places, ends, strict=True) if not is_literal(end)]
                )

        def _infer_symbolic_compute_ops(self, node: Any) -> None:
            """Discard the result of Equal if the two sizes may be equal. The original assumes that two different
            expressions are never equal.
            """
            if node.op_type != "Equal":
                super()._infer_symbolic_compute_ops(node)
                return
            self._compute_on_sympy_data(node, lambda pair: sympy.Eq(pair[0], pair[1]))
            equality = self.sympy_data_.pop(node.output[0], None)
            if all(value in (True, False) for value in (equality if isinstance(equality, list) else [equality])):
                self.sympy_data_[node.output[0]] = equality

        def _onnx_infer_subgraph(self, node: Any, *arguments: Any, **named: Any) -> Any:
            """Infer a body and discard the values in it. onnxruntime infers a body with its original class, which
            merges symbols.
            """
            inferred = super()._onnx_infer_subgraph(node, *arguments, **named)
            inferred.sympy_data_.clear()
            return inferred

        def _infer_If(self, node: Any) -> None:  # noqa: N802
            super()._infer_If(node)
            self._forget_all(node)

        def _infer_Loop(self, node: Any) -> None:  # noqa: N802
            super()._infer_Loop(node)
            self._forget_all(node)

        def _infer_Scan(self, node: Any) -> None:  # noqa: N802
            super()._infer_Scan(node)
            self._forget_all(node)

        def _forget_all(self, node: Any) -> None:
            for name in filter(None, node.output):
                self._forget(name, range(len(self.known_vi_[name].type.tensor_type.shape.dim)))

    return CautiousInference


def _limit_time(limit: float, infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `infer` with a time limit. It raises TimeoutError once this thread has used `limit` more seconds of CPU
    time.
    """
    ends = time.thread_time() + limit

    def infer_in_time(node: Any) -> Any:
        """Infer one node if there is time left."""
        if time.thread_time() > ends:
            raise TimeoutError(f"it takes more than {limit:.3g} s")
        return infer(node)

    return infer_in_time


MAX_ACTIVATION_BYTES = 2**36
"""Largest permitted size of one tensor, in bytes. A larger static shape is treated as an attack or an error."""
# Number of bytes that one tensor may need for each byte of weights and inputs, in addition to `sample` of the budget.
# Real models with few weights have results of up to 25 times the size of their input. Models with larger results have
# more weights.
_BYTES_PER_INPUT_BYTE = 64
# Number of bytes that shape inference may use for each byte of a model without its weights.
_COPIES = 32
_DEFAULT = SymbolicOptions()
_ELEMENT_TYPES = frozenset(onnx.TensorProto.DataType.values())
# Largest number of elements of an integer vector whose values onnx may propagate from node to node.
_PROPAGATED = 2**16


def infer_shapes(
    model: ir.Model, symbolic: SymbolicOptions | None = _DEFAULT, bare: onnx.ModelProto | None = None
) -> tuple[dict[str, ir.Value], str]:
    """Infer the types and shapes of the tensors of the main graph.

    In the result, a size is a number or a symbol of the inputs only if it is correct for all possible sizes of the
    inputs. This matters because ONNX Runtime uses the sizes in a file to reuse memory and to fold constants. The shapes
    that a file states for inner tensors may come from other input sizes. So if inputs have free sizes, only the ranks
    of these shapes are used. Weights may be external and are not read.

    Args:
        symbolic: options of symbolic inference; None uses only onnx's own inference.
        bare: the model's skeleton, if the caller already has it; it is changed.

    Returns:
        Tensor name → value with type and shape; and the reason why symbolic inference failed, "" if it did not.
    """
    bare = bare or skeleton(model)
    symbols, fixed = _symbols(bare.graph), _has_fixed_inputs(bare.graph)
    claims, problem = _take_claims(bare.graph), ""
    values: dict[str, ir.Value] = {}
    inferred = _infer_with_onnx(bare)
    _add(values, _described(inferred.graph), symbols)
    if symbolic is not None and not is_complete(inferred.graph):
        try:
            _add(values, _described(symbolic_shapes(bare, symbolic).graph))
        # sympy's errors, assertions and bare Exceptions of the tool; in all cases onnx's own inference is used
        except Exception as error:
            problem = reason(error)
    _add(values, claims, numbers=fixed)
    return values, problem


def _symbols(graph: onnx.GraphProto) -> frozenset[str]:
    return frozenset(d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim) - {""}


def _has_fixed_inputs(graph: onnx.GraphProto) -> bool:
    tensors = [value.type.tensor_type for value in graph.input]
    return all(t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim) for t in tensors)


def _take_claims(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Remove the stated shapes of tensors from a graph and its bodies, in place. Return the stated shapes of the main
    graph. Outputs of bodies keep their shapes.
    """
    for body in inner_graphs(graph.node):
        del body.value_info[:]
    claims = [*graph.value_info, *(onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in graph.output)]
    claims = [claim for claim in claims if _is_stated(claim.type)]
    del graph.value_info[:]
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return claims


def _is_stated(kind: onnx.TypeProto) -> bool:
    """Return whether a type is complete, including the element type of a sequence or optional value."""
    name = kind.WhichOneof("value")
    if name in ("sequence_type", "optional_type"):
        return _is_stated(getattr(kind, name).elem_type)
    return name in ("tensor_type", "sparse_tensor_type") and getattr(kind, name).elem_type in _ELEMENT_TYPES


def _infer_with_onnx(bare: onnx.ModelProto) -> onnx.ModelProto:
    """Return the result of onnx's own inference, which takes milliseconds. edgeq lets it propagate values only if sizes
    are still missing, and if no vector of integers is so long that propagation takes much time.
    """
    inferred = inferred_shapes(bare)
    long = any(
        value.type.tensor_type.elem_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
        and [d.dim_value > _PROPAGATED for d in value.type.tensor_type.shape.dim] == [True]
        for value in _described(inferred.graph)
    )
    return inferred if long or is_complete(inferred.graph) else inferred_shapes(bare, data_prop=True)


def _add(
    values: dict[str, ir.Value],
    described: Iterable[onnx.ValueInfoProto],
    symbols: Collection[str] = (),
    *,
    numbers: bool = True,
) -> None:
    """Add types, ranks and sizes from `described` to `values`, in place, wherever `values` lacks them. A size is added
    only if it is a symbol in `symbols`, or a number and `numbers` is True.
    """
    for info in described:
        try:
            value = ir.serde.deserialize_value_info_proto(info, None)
        except ir.serde.SerdeError:  # a type that onnx_ir cannot represent, such as an opaque one, says nothing here
            continue
        entry = values.setdefault(info.name, value)
        entry.type = entry.type or value.type
        if value.shape is None:
            continue
        sizes = [size if _is_kept(size, symbols, numbers) else None for size in value.shape]
        if entry is not value and entry.shape is not None and len(entry.shape) == len(sizes):
            sizes = [new if _is_open(old) else old for old, new in zip(entry.shape, sizes, strict=True)]
        elif entry is not value and entry.shape is not None:
            continue
        entry.shape = ir.Shape(sizes)


def _is_kept(size: int | ir.SymbolicDim, symbols: Collection[str], numbers: bool) -> bool:
    return numbers if isinstance(size, int) else size.value in symbols


def _is_open(size: int | ir.SymbolicDim) -> bool:
    return not isinstance(size, int) and size.value is None


def is_complete(graph: onnx.GraphProto) -> bool:
    """Return whether, for every tensor that a node computes, all sizes are numbers or symbols of the inputs. A graph
    with bodies is never complete.
    """
    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
    symbols = _symbols(graph)

    def sized(name: str) -> bool:
        """Return whether every size of the tensor is a number or a symbol of the inputs."""
        tensor_type = types.get(name)
        has_shape = tensor_type is not None and tensor_type.HasField("shape")
        return has_shape and all(d.HasField("dim_value") or d.dim_param in symbols for d in types[name].shape.dim)

    bodies = next(inner_graphs(graph.node), None)
    return bodies is None and all(sized(name) for node in graph.node for name in node.output if name)


def inferred_shapes(bare: onnx.ModelProto, label: object = "the model", *, data_prop: bool = False) -> onnx.ModelProto:
    """Return the result of onnx's own inference on a model without its weights.

    Raises:
        ModelError: inference failed because types or shapes contradict each other, or because they need too much
            memory.
    """
    try:
        # A few nodes are enough to double ranks and shape values until memory runs out.
        with limit_step(read_largest_sample() + _COPIES * bare.ByteSize()):
            return onnx.shape_inference.infer_shapes(bare, data_prop=data_prop)
    except MemoryError as error:
        raise ModelError(
            f"the shapes of {label} take more than {read_largest_sample()} bytes",
            f"If it was downloaded, do not trust it; {VARIABLE} sets sample",
        ) from error
    except Exception as error:  # The C++ code raises InferenceError, RuntimeError, IndexError and others.
        text = one_line(error, most=300)
        raise ModelError(f"the shapes of {label} cannot be inferred: {text}", "Export the model again") from error


def _described(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the descriptions of values in a graph and its bodies. All names are unique."""
    for scope in (*inner_graphs(graph.node), graph):
        yield from scope.value_info
        yield from scope.output


def write_shapes(
    model: ir.Model, symbolic: SymbolicOptions | None = _DEFAULT, bare: onnx.ModelProto | None = None
) -> str:
    """Write the result of `infer_shapes` to all inner tensors, and to outputs without a shape, in place.

    Args:
        symbolic, bare: see `infer_shapes`.

    Returns:
        Why symbolic inference failed; "" if it did not.
    """
    shapes, problem = infer_shapes(model, symbolic, bare)
    for node in model.graph:
        for value in node.outputs:
            described = shapes.get(value.name or "")
            if described is not None and (value.shape is None or not value.is_graph_output()):
                value.type, value.shape = described.type, described.shape
    return problem


def unknown_shapes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of the node outputs whose rank is not known."""
    outputs = [value for node in model.graph for value in node.outputs]
    return tuple(value.name for value in outputs if value.name and value.shape is None)


def element_types(model: ir.Model | GraphIndex) -> dict[str, ir.DataType]:
    """Return tensor name → element type, for tensors of the main graph whose type the model states or onnx can infer.
    The type of sequences, maps and other values that are not tensors is UNDEFINED. An index stores the result for later
    calls.
    """
    graph = indexed(model)
    return graph.once("element types", lambda: _element_types(graph))


def _element_types(graph: GraphIndex) -> dict[str, ir.DataType]:
    values = graph.values
    typed_values = {name: value for name, value in values.items() if value.type is not None}
    if len(typed_values) < len(values):
        inferred = inferred_shapes(skeleton(graph.model)).graph
        infos = [ir.serde.deserialize_value_info_proto(v, None) for v in (*inferred.value_info, *inferred.output)]
        typed_values = {value.name: value for value in infos if value.name and value.type is not None} | typed_values
    return {name: _element_type(value) for name, value in typed_values.items()}


def describe(model: ir.Model, path: Path, bare: onnx.ModelProto | None = None) -> None:
    """Write the result of onnx's own inference to the inner tensors, in place. If inputs have free sizes, the result
    replaces the shapes in the file; see `infer_shapes`.

    Args:
        path: the model's file, for messages.
        bare: the model's skeleton, if the caller already has it; it is changed.

    Raises:
        ModelError: a tensor is too large for any machine. It has not been allocated.
    """
    bare = bare or skeleton(model)
    check_sizes(model, path, bare)
    write_shapes(model, None, bare)
    # Now the results of shape arithmetic are known.
    outputs = (value for graph in model.graphs() for node in graph for value in node.outputs)
    every = dict.fromkeys((*outputs, *(value for graph in model.graphs() for value in graph.outputs)))
    _check_sizes(bare.graph.input, map(ir.serde.serialize_value, every), weight_bytes(model), path)
    if not _has_fixed_inputs(bare.graph):
        for value in (v for body in model.graphs() for node in body for v in node.outputs if body is not model.graph):
            value.shape = value.shape if value.is_graph_output() else None


def check_sizes(model: ir.Model, path: Path, bare: onnx.ModelProto | None = None) -> None:
    """Refuse a model with a tensor far larger than its inputs and weights, before the tensor's shape is used.

    Args:
        bare: the model's skeleton, if the caller already has it.

    Raises:
        ModelError: a tensor is too large for any machine.
    """
    unclaimed = onnx.ModelProto()
    unclaimed.CopyFrom(bare or skeleton(model))
    _take_claims(unclaimed.graph)
    # Data propagation stays off, because it may compute an unlimited number of values.
    inferred = inferred_shapes(unclaimed, path).graph
    _check_sizes(inferred.input, _described(inferred), weight_bytes(model), path)


def _check_sizes(
    inputs: Sequence[onnx.ValueInfoProto], computed: Iterable[onnx.ValueInfoProto], weights: int, path: Path
) -> None:
    """Refuse a tensor that needs many times the bytes of the model's inputs and weights."""
    budget = read_largest_sample() + _BYTES_PER_INPUT_BYTE * (weights + sum(map(_least_bytes, inputs)))
    limits = ((MAX_ACTIVATION_BYTES, inputs), (min(budget, MAX_ACTIVATION_BYTES), computed))
    for info, limit in ((info, limit) for limit, infos in limits for info in infos):
        size = _least_bytes(info)
        if size > limit:
            sizes = [d.dim_value for d in info.type.tensor_type.shape.dim if d.dim_value > 0]
            raise ModelError(
                f"{path}: tensor {info.name!r} has the shape {sizes}, {size} bytes, in a model of {weights} bytes",
                f"Do not trust the file; if you do, {VARIABLE}=sample={(size >> 20) + 1}MiB allows it",
            )


def _least_bytes(info: onnx.ValueInfoProto) -> int:
    """Return the size of a tensor in bytes, with 1 for each open size."""
    tensor = info.type.tensor_type
    elements: int = math.prod(d.dim_value for d in tensor.shape.dim if d.dim_value > 0)
    return elements * ELEMENT_BITS.get(tensor.elem_type, 8) // 8


def _element_type(value: ir.Value) -> ir.DataType:
    return value.type.dtype if isinstance(value.type, ir.TensorType) else ir.DataType.UNDEFINED
