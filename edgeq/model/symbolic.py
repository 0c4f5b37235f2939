"""ONNX Runtime's symbolic shape inference, kept to what is true at every size that the inputs allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx

from edgeq.errors import one_line

SYMBOLIC_LIMIT_S = 10.0
SYMBOLIC_LIMIT_OF_NODE_S = 0.002
"""Processor time for symbolic inference, and what each node adds to it. It grows its expressions from node to node, in
some models without end."""


@dataclass(frozen=True)
class SymbolicOptions:
    """Choices of ONNX Runtime's symbolic inference where a model leaves it one.

    Attributes:
        int_max: integers from this on stand for "to the end", as in Slice.
        guess_output_rank: give operators that it does not know the rank of their first input.
        verbose: 0 to 3, what it logs.
    """

    int_max: int = 2**31 - 1
    guess_output_rank: bool = False
    verbose: int = 0


def symbolic_shapes(bare: onnx.ModelProto, options: SymbolicOptions) -> onnx.ModelProto:
    """Infer the shapes of a model without weights, step by step: the tool's own driver leaves a file in the working
    directory where the inference is incomplete.

    Raises:
        Exception: of any kind, as sympy and the tool have it; `reason` words it.
    """
    inference = _cautious()(options.int_max, True, options.guess_output_rank, options.verbose)
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


def reason(error: Exception) -> str:
    """Say why the inference gave up, to a reader who does not know its source."""
    text = one_line(error, most=200)
    if isinstance(error, AssertionError | LookupError | AttributeError | TypeError) or not text:
        return "it does not know how to treat these shapes"
    return text


@cache
def _cautious() -> type:
    """Return onnxruntime's inference with a fresh symbol wherever that one assumes two sizes to be equal."""
    import sympy
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, is_literal

    class CautiousInference(SymbolicShapeInference):  # type: ignore[misc]
        def _forget(self, name: str, axes: Iterable[int]) -> None:
            """Make the sizes of a tensor on `axes` unrelated to all others."""
            for axis in axes:
                self.known_vi_[name].type.tensor_type.shape.dim[axis].dim_param = self._fresh()

        def _fresh(self) -> str:
            return str(self._new_symbolic_dim("unrelated", len(self.symbolic_dims_)))

        def _add_suggested_merge(self, symbols: Any, apply: bool = False) -> None:
            """Merge nothing."""

        def _merge_symbols(self, dims: Sequence[Any]) -> Any:
            """Return the size of tensors that are joined on another axis: they must have it in common."""
            return next(filter(is_literal, dims), dims[0])

        def _broadcast_shapes(self, shape1: Sequence[Any], shape2: Sequence[Any]) -> list[Any]:
            """Return the shape that two operands give; a number counts more than a symbol, which may be 1."""
            rank = max(len(shape1), len(shape2))
            padded = ([1] * (rank - len(shape)) + list(shape) for shape in (shape1, shape2))
            met = [{size for size in sizes if size != 1} or {1} for sizes in zip(*padded, strict=True)]
            return [next(filter(is_literal, sizes), None) or self._only(sizes) for sizes in met]

        def _only(self, sizes: Collection[Any]) -> Any:
            return next(iter(sizes)) if len(sizes) == 1 else self._fresh()

        def _onnx_infer_single_node(self, node: Any) -> None:
            """Infer what onnx knows, with symbols for the sizes that it leaves open: they would end the inference."""
            super()._onnx_infer_single_node(node)
            for name in filter(None, node.output):
                sizes = self.known_vi_[name].type.tensor_type.shape.dim
                open_ = (not size.HasField("dim_value") and self._is_open(size.dim_param) for size in sizes)
                self._forget(name, [axis for axis, is_open in enumerate(open_) if is_open])

        def _is_open(self, symbol: str) -> bool:
            return not symbol or bool(self._is_none_dim(symbol))

        def _infer_Slice(self, node: Any) -> None:  # noqa: N802
            """Keep a computed end for unknown: whether it lies within the tensor is a guess."""
            super()._infer_Slice(node)
            ends, axes = (self._try_get_value(node, place) for place in (2, 3))
            if ends is not None:
                places = range(len(ends)) if axes is None else axes
                self._forget(
                    node.output[0], [int(a) for a, end in zip(places, ends, strict=True) if not is_literal(end)]
                )

        def _infer_symbolic_compute_ops(self, node: Any) -> None:
            """Leave out what Equal says of sizes that may be equal; onnxruntime takes two expressions for two sizes."""
            if node.op_type != "Equal":
                super()._infer_symbolic_compute_ops(node)
                return
            self._compute_on_sympy_data(node, lambda pair: sympy.Eq(pair[0], pair[1]))
            found = self.sympy_data_.pop(node.output[0], None)
            if all(value in (True, False) for value in (found if isinstance(found, list) else [found])):
                self.sympy_data_[node.output[0]] = found

        def _onnx_infer_subgraph(self, node: Any, *given: Any, **named: Any) -> Any:
            """Infer a body without the values in it: onnxruntime uses a tool of its own for that, which merges."""
            inferred = super()._onnx_infer_subgraph(node, *given, **named)
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


def _within(limit: float, infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Refuse `infer` of a node once this thread has used `limit` seconds more of the processor."""
    ends = time.thread_time() + limit

    def infer_in_time(node: Any) -> Any:
        """Infer one node, unless the time is up."""
        if time.thread_time() > ends:
            raise TimeoutError(f"it takes more than {limit:.3g} s")
        return infer(node)

    return infer_in_time
