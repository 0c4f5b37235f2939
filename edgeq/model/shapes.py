"""Shapes of every tensor: symbolic inference, onnx's own where that gives up, and bounds on what they may say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import onnx

from edgeq.errors import ModelError
from edgeq.model.skeleton import skeleton

MAX_ACTIVATION_BYTES = 2**36
"""Bytes. A static shape that needs more than this for one tensor is taken for an attack or an error."""
_WIDEST_ELEMENT = 16


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
    model: onnx.ModelProto, symbolic: SymbolicOptions | None = SymbolicOptions()
) -> tuple[dict[str, onnx.ValueInfoProto], str]:
    """Type and shape of each tensor of the main graph, by name; what the model says itself is the last resort.

    Weights may be external: they are not read.

    Args:
        symbolic: None leaves it to onnx's own inference.

    Returns:
        The shapes, and why symbolic inference could not be used ("" when it could).
    """
    bare = skeleton(model)
    known = {v.name: v for v in model.graph.value_info}
    problem = ""
    try:
        inferred = onnx.shape_inference.infer_shapes(bare) if symbolic is None else _symbolic(bare, symbolic)
    except (
        Exception
    ) as error:  # sympy, assertions and bare Exceptions of the inference tool: any of them means fallback
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        inferred = onnx.shape_inference.infer_shapes(bare)
    for value in [*inferred.graph.value_info, *inferred.graph.output]:
        if value.name not in known or _knowledge(value) >= _knowledge(known[value.name]):
            known[value.name] = value
    return known, problem


def write_shapes(model: onnx.ModelProto, symbolic: SymbolicOptions | None = SymbolicOptions()) -> str:
    """Write what `infer_shapes` finds into the model's `value_info` and its outputs that lack a shape, in place.

    Returns:
        Why symbolic inference could not be used; "" when it could.
    """
    shapes, problem = infer_shapes(model, symbolic)
    outputs = {o.name for o in model.graph.output}
    made = [o for node in model.graph.node for o in node.output if o in shapes and o not in outputs]
    infos = [shapes[name] for name in made]
    for output in model.graph.output:
        if not output.type.tensor_type.HasField("shape") and output.name in shapes:
            output.CopyFrom(shapes[output.name])
    del model.graph.value_info[:]
    model.graph.value_info.extend(infos)
    return problem


def unknown_shapes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the tensors between nodes whose rank is not known."""
    shaped = {v.name for v in [*model.graph.value_info, *model.graph.input, *model.graph.output] if _knowledge(v)[0]}
    return tuple(o for node in model.graph.node for o in node.output if o and o not in shaped)


def describe(model: onnx.ModelProto, path: Path) -> None:
    """Write what onnx's own inference finds into `model.graph.value_info`, in place, and refuse a model that announces
    a tensor too large for any machine, before something tries to allocate it.

    Without data propagation: that computes shapes only, while propagation computes values, however many there are.
    """
    inferred = onnx.shape_inference.infer_shapes(skeleton(model))
    for value in [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]:
        sizes = [d.dim_value for d in value.type.tensor_type.shape.dim if d.dim_value > 0]
        if math.prod(sizes) > MAX_ACTIVATION_BYTES // _WIDEST_ELEMENT:
            raise ModelError(
                f"{path}: tensor {value.name!r} has the shape {sizes}, more than {MAX_ACTIVATION_BYTES >> 30} GiB",
                "Give the model realistic input sizes; if it was downloaded, do not trust it",
            )
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)


def _symbolic(bare: onnx.ModelProto, options: SymbolicOptions) -> onnx.ModelProto:
    """ONNX Runtime's symbolic inference, step by step: its own driver leaves a file in the working directory where the
    inference is incomplete."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    inference = SymbolicShapeInference(options.int_max, options.auto_merge, options.guess_output_rank, options.verbose)
    inference._preprocess(bare)
    complete = False
    while inference.run_:
        complete = inference._infer_impl()
    inference._update_output_from_vi()
    if not complete:
        raise ValueError("some shapes could not be inferred")
    result: onnx.ModelProto = inference.out_mp_
    return result


def _knowledge(value: onnx.ValueInfoProto) -> tuple[bool, int]:
    """How much a value's shape says: (rank known, sizes known)."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return False, 0
    return True, sum(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim)
