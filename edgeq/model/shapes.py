"""Shapes of every tensor: symbolic inference, onnx's own where that gives up, and an upper bound on sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError, one_line
from edgeq.graph.convert import inner_graphs
from edgeq.graph.index import GraphIndex
from edgeq.model.skeleton import skeleton

MAX_ACTIVATION_BYTES = 2**36
"""Bytes. A static shape that needs more than this for one tensor is taken for an attack or an error."""
_WIDEST_ELEMENT = 16
SYMBOLIC_LIMIT_S = 10.0
SYMBOLIC_LIMIT_OF_NODE_S = 0.002
"""Processor time for symbolic inference, and what each node adds to it. It grows its expressions from node to node, in
some models without end."""


@dataclass(frozen=True)
class SymbolicOptions:
    """How ONNX Runtime's symbolic inference decides where a model leaves it a choice.

    Attributes:
        int_max: integers from this on stand for "to the end", as in Slice.
        auto_merge: make two symbols one where they must be equal; else the inference gives up there.
        guess_output_rank: give operators that it does not know the rank of their first input.
        verbose: 0 to 3, what it logs.
    """

    int_max: int = 2**31 - 1
    auto_merge: bool = True
    guess_output_rank: bool = False
    verbose: int = 0


def infer_shapes(
    model: ir.Model, symbolic: SymbolicOptions | None = SymbolicOptions()
) -> tuple[dict[str, ir.Value], str]:
    """Tensor name → a value with the type and shape of that tensor of the main graph; the model's own
    count where inference knows less.

    Weights may be external: they are not read.

    Args:
        symbolic: None leaves it to onnx's own inference.

    Returns:
        The values, and why symbolic inference could not be used ("" when it could).
    """
    bare = skeleton(model)
    known = {v.name: v for v in bare.graph.value_info}
    inferred, problem = _inferred(bare, symbolic)
    for value in _described(inferred.graph):
        if value.name not in known or _knowledge(value) >= _knowledge(known[value.name]):
            known[value.name] = value
    return {name: ir.serde.deserialize_value_info_proto(value, None) for name, value in known.items()}, problem


def _inferred(bare: onnx.ModelProto, symbolic: SymbolicOptions | None) -> tuple[onnx.ModelProto, str]:
    """What is inferred of a model without weights: by onnx itself where that finds all sizes, which takes milliseconds,
    else symbolically; and why that could not be done."""
    try:
        own = inferred_shapes(bare)
    except ModelError:
        own = None
    if own is not None and (symbolic is None or is_complete(own.graph)):
        return own, ""
    problem = ""
    if symbolic is not None:
        try:
            return _typed(_symbolic(bare, symbolic), own), ""
        except Exception as error:  # sympy, assertions and bare Exceptions of the tool: any of them means fallback
            problem = _sentence(error)
    return own or inferred_shapes(bare), problem


def is_complete(graph: onnx.GraphProto) -> bool:
    """Whether every tensor that a node makes has sizes that are numbers or the inputs' own symbols; a graph with bodies
    never counts as complete."""
    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
    symbols = {d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim} - {""}

    def sized(name: str) -> bool:
        """Whether every size of the tensor is known: a number, or a symbol of the inputs."""
        found = types.get(name)
        known = found is not None and found.HasField("shape")
        return known and all(d.HasField("dim_value") or d.dim_param in symbols for d in types[name].shape.dim)

    bodies = next(inner_graphs(graph.node), None)
    return bodies is None and all(sized(name) for node in graph.node for name in node.output if name)


def _typed(symbolic: onnx.ModelProto, own: onnx.ModelProto | None) -> onnx.ModelProto:
    """What symbolic inference gave, with the element types that onnx's own knows, in place: the former takes the int8
    of a QuantizeLinear that names its type by an attribute for uint8."""
    types = {} if own is None else {value.name: value.type.tensor_type.elem_type for value in _described(own.graph)}
    for value in _described(symbolic.graph):
        if types.get(value.name) and value.type.HasField("tensor_type"):
            value.type.tensor_type.elem_type = types[value.name]
    return symbolic


def inferred_shapes(bare: onnx.ModelProto, where: object = "the model", *, data_prop: bool = False) -> onnx.ModelProto:
    """What onnx's own inference makes of a model without its weights.

    Raises:
        ModelError: types or shapes contradict each other in a way that it cannot go on from.
    """
    try:
        return onnx.shape_inference.infer_shapes(bare, data_prop=data_prop)
    except Exception as error:  # its C++ side raises InferenceError, RuntimeError, IndexError and others
        text = one_line(error, most=300)
        raise ModelError(f"the shapes of {where} cannot be inferred: {text}", "Export the model again") from error


def _described(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """What a graph and the bodies in it say of their values; names are unique among them."""
    for scope in (*inner_graphs(graph.node), graph):
        yield from scope.value_info
        yield from scope.output


def write_shapes(model: ir.Model, symbolic: SymbolicOptions | None = SymbolicOptions()) -> str:
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
    """Write what onnx's own inference finds into the values between the nodes, in place.

    Without data propagation: that computes shapes only, while propagation computes values, however many there are.

    Args:
        path: the model's file, for messages.

    Raises:
        ModelError: a tensor is too large for any machine; nothing has tried to allocate it then.
    """
    inferred = inferred_shapes(skeleton(model), path).graph
    for info in [*inferred.input, *inferred.value_info, *inferred.output]:
        sizes = [d.dim_value for d in info.type.tensor_type.shape.dim if d.dim_value > 0]
        if math.prod(sizes) > MAX_ACTIVATION_BYTES // _WIDEST_ELEMENT:
            raise ModelError(
                f"{path}: tensor {info.name!r} has the shape {sizes}, more than {MAX_ACTIVATION_BYTES >> 30} GiB",
                "Give the model realistic input sizes; if it was downloaded, do not trust it",
            )
    found = {info.name: info for info in inferred.value_info}
    for node in model.graph:
        for value in node.outputs:
            if value.name in found and not value.is_graph_output():
                ir.serde.deserialize_value_info_proto(found[value.name], value)


def _symbolic(bare: onnx.ModelProto, options: SymbolicOptions) -> onnx.ModelProto:
    """ONNX Runtime's symbolic inference, step by step: its own driver leaves a file in the working directory where the
    inference is incomplete."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    inference = SymbolicShapeInference(options.int_max, options.auto_merge, options.guess_output_rank, options.verbose)
    inference._preprocess(bare)
    limit = SYMBOLIC_LIMIT_S + SYMBOLIC_LIMIT_OF_NODE_S * len(bare.graph.node)
    inference.dispatcher_ = {name: _within(limit, infer) for name, infer in inference.dispatcher_.items()}
    inference._onnx_infer_single_node = _within(limit, inference._onnx_infer_single_node)
    complete = False
    while inference.run_:
        complete = inference._infer_impl()
    inference._update_output_from_vi()
    if not complete:
        raise ValueError("some shapes could not be inferred")
    result: onnx.ModelProto = inference.out_mp_
    return result


def _within(limit: float, infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`infer` of a node, refused once this thread has used `limit` seconds more of the processor."""
    ends = time.thread_time() + limit

    def infer_in_time(node: Any) -> Any:
        """onnxruntime's inference of one node, unless the time is up."""
        if time.thread_time() > ends:
            raise TimeoutError(f"it takes more than {limit:.3g} s")
        return infer(node)

    return infer_in_time


def _sentence(error: Exception) -> str:
    """Why the inference gave up, for a reader who does not know its source."""
    text = one_line(error, most=200)
    if isinstance(error, AssertionError | LookupError | AttributeError | TypeError) or not text:
        return "it does not know how to treat these shapes"
    return text


def _knowledge(value: onnx.ValueInfoProto) -> tuple[bool, int]:
    """How much is known of a value's shape: (whether the rank is, how many sizes are)."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return False, 0
    return True, sum(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim)


def _element_type(value: ir.Value) -> ir.DataType:
    return value.type.dtype if isinstance(value.type, ir.TensorType) else ir.DataType.UNDEFINED
