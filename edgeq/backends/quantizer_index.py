"""Shortcuts for onnxruntime's quantizer, whose own way is most of its time: it goes through all weights or all nodes of
a model for every name that it looks up, spends a tenth of a millisecond on the scale of each channel, and infers shapes
that are known. What it writes is the same, byte by byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.graph.convert import to_proto
from edgeq.model.shapes import is_complete
from edgeq.model.skeleton import skeleton

_PACKAGE = "onnxruntime.quantization"
_INTEGERS = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
_LEAST_MAGNITUDE, _MOST_MAGNITUDE = 1e-30, 1e38
"""Of weights. Smaller ones have scales that onnxruntime replaces, larger ones overflow in some of its releases."""


class _Named:
    """A repeated field of protobuf messages, with the first message of each name. What is appended is indexed at the
    next lookup. What is removed goes all at once, at `settle`: in the field, each removal is a search."""

    def __init__(self, field: Any) -> None:
        self._field = field
        self._removed: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._first: dict[str, Any] = {}
        self._seen = 0

    def get(self, name: str) -> Any:
        """None where there is none."""
        for message in self._field[self._seen :]:
            self._first.setdefault(message.name, message)
        self._seen = len(self._field)
        return None if name in self._removed else self._first.get(name)

    def extend(self, messages: Sequence[Any]) -> None:
        """Append messages; one of a name that was removed but not dropped yet needs the field settled first."""
        if not self._removed.isdisjoint(message.name for message in messages):
            self.settle()
        self._field.extend(messages)

    def remove(self, name: str) -> None:
        """Note that the message of that name is gone; `settle` drops all that were noted in one pass."""
        self._removed.add(name)

    def settle(self) -> Any:
        """The field, without what was removed; to be called again after the field itself was changed."""
        for place in reversed(range(len(self._field))) if self._removed else ():
            if self._field[place].name in self._removed:
                del self._field[place]
        self._removed.clear()
        self._forget()
        return self._field

    def __iter__(self) -> Iterator[Any]:
        return iter(self.settle())

    def __len__(self) -> int:
        return len(self.settle())


class _Uses:
    """The nodes of a graph by the names on one side of them, a node once for each time that a name stands there."""

    def __init__(self, graph: Any, side: Literal["input", "output"]) -> None:
        self._graph, self._side = graph, side
        self.forget()

    def forget(self) -> None:
        """Read the graph anew at the next use: nodes were removed, or changed without `rename`."""
        self._users: dict[str, list[Any]] = {}
        self._seen = 0

    def by_name(self) -> dict[str, list[Any]]:
        """Nodes by the tensors on their side, up to date: only nodes appended since the last call are read."""
        nodes = self._graph.node
        for node in nodes[self._seen :]:
            for name in filter(None, getattr(node, self._side)):
                self._users.setdefault(name, []).append(node)
        self._seen = len(nodes)
        return self._users

    def rename(self, old: str, new: str) -> None:
        """Put `new` in the place of `old` in every node that names it."""
        for node in (users := self.by_name().pop(old, [])):
            names: Sequence[str] = getattr(node, self._side)
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new  # type: ignore[index]  # protobuf's own sequence
        if users:
            self._users.setdefault(new, []).extend(users)


@cache
def _indexed_model() -> type:
    """onnxruntime's `ONNXModel` with indices, for a quantizer that changes names only by its methods."""
    from onnxruntime.quantization.onnx_model import ONNXModel

    class IndexedModel(ONNXModel):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self._weights = _Named(model.graph.initializer)
            self._readers, self._makers = _Uses(model.graph, "input"), _Uses(model.graph, "output")

        def initializer(self) -> Any:
            return self._weights

        def get_initializer(self, name: str) -> Any:
            """The initializer of that name, or None; without a scan of the graph."""
            return self._weights.get(name)

        def add_initializer(self, tensor: Any) -> None:
            """Add an initializer, unless one of its name is there."""
            if self._weights.get(tensor.name) is None:
                self.initializer_extend([tensor])

        def initializer_extend(self, inits: Sequence[Any]) -> None:
            """Add initializers after onnxruntime's own check of each."""
            for tensor in inits:
                self._check_init(tensor)
            self._weights.extend(inits)

        def remove_initializer(self, tensor: Any) -> None:
            """Remove an initializer, and the graph input of its name where there is one (IR version 3)."""
            if any(value.name == tensor.name for value in self.model.graph.input):
                self._weights.settle()
                super().remove_initializer(tensor)
            self._weights.remove(tensor.name)

        def input_name_to_nodes(self) -> dict[str, list[Any]]:
            """Nodes by the tensors that they read."""
            return self._readers.by_name()

        def replace_input_of_all_nodes(self, old_input_name: str, new_input_name: str) -> None:
            self._readers.rename(old_input_name, new_input_name)

        def replace_output_of_all_nodes(self, old_output_name: str, new_output_name: str) -> None:
            self._makers.rename(old_output_name, new_output_name)

        def replace_input_of_nodes(self, *names: Any) -> None:
            super().replace_input_of_nodes(*names)
            self._readers.forget()

        def replace_output_of_nodes(self, *names: Any) -> None:
            super().replace_output_of_nodes(*names)
            self._makers.forget()

        def remove_node(self, node: Any) -> None:
            super().remove_node(node)
            self._forget()

        def remove_nodes(self, nodes_to_remove: Sequence[Any]) -> None:
            """Remove several nodes in one pass over the graph."""
            nodes, gone = self.model.graph.node, {id(node) for node in nodes_to_remove}
            for place in reversed([place for place, node in enumerate(nodes) if id(node) in gone]):
                del nodes[place]
            self._forget()

        def clean_initializers(self) -> Any:
            self._forget()
            cleaned = super().clean_initializers()
            self._forget()
            return cleaned

        def topological_sort(self) -> None:
            self._forget()
            super().topological_sort()
            self._forget()

        def _forget(self) -> None:
            self._weights.settle()
            self._readers.forget()
            self._makers.forget()

    return IndexedModel


class SymmetricParameters:
    """onnxruntime's `compute_data_quant_params`. For a symmetric range of integers a scale is twice the largest
    magnitude over the number of steps, and the zero point the same for all: both are taken from onnxruntime's answers.
    Where its scale of the first such range is another one, and for all other ranges, it answers itself."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        # By integer type and whether its range is reduced: zero point and steps; None where the formula is not theirs.
        self._known: dict[tuple[int, bool], tuple[Any, float] | None] = {}

    def __call__(
        self,
        data: Any,
        quant_type: int,
        symmetric: bool,
        reduce_range: bool = False,
        *more: Any,
        rmin_override: float | None = None,
        rmax_override: float | None = None,
        **named: Any,
    ) -> Any:
        plain = symmetric and quant_type in _INTEGERS and data.dtype == np.float32 and data.size
        if plain and not more and all(value is None for value in named.values()):
            low = data.min() if rmin_override is None else np.float32(rmin_override)
            high = data.max() if rmax_override is None else np.float32(rmax_override)
            largest = max(-float(low), float(high))
            if _LEAST_MAGNITUDE <= largest <= _MOST_MAGNITUDE:
                key = (quant_type, reduce_range)
                if key not in self._known:
                    self._known[key] = self._learned(largest, *key)
                found = self._known[key]
                if found is not None:
                    return found[0], np.array(2 * largest / found[1], np.float32)
        given = {"rmin_override": rmin_override, "rmax_override": rmax_override, **named}
        given = {name: value for name, value in given.items() if value is not None}
        return self._compute(data, quant_type, symmetric, reduce_range, *more, **given)

    def _learned(self, largest: float, quant_type: int, reduce_range: bool) -> tuple[Any, float] | None:
        zero_point, one = self._compute(np.array([-1, 1], np.float32), quant_type, True, reduce_range)
        steps = round(2 / float(one))
        _, scale = self._compute(np.array([largest], np.float32), quant_type, True, reduce_range)
        same = scale.dtype == np.float32 and scale == np.float32(2 * largest / steps)
        return (zero_point, steps) if same else None


@contextmanager
def indexed(model: ir.Model) -> Iterator[None]:
    """Let onnxruntime's quantizer of Q/DQ form work with indices inside, infer shapes only where one is missing, round
    all channels of a weight at once, and compute the scale of each by `SymmetricParameters`.

    Args:
        model: what the file holds that the quantizer reads.
    """
    from onnxruntime.quantization import base_quantizer, qdq_quantizer, quant_utils

    quantize = import_module(f"{_PACKAGE}.quantize")  # the package has a function of this name

    def find_by_name(name: str, messages: Any) -> Any:
        """onnxruntime's, but without a scan where the messages are indexed."""
        return messages.get(name) if isinstance(messages, _Named) else before(name, messages)

    def load_model(file: Path) -> onnx.ModelProto:
        """onnxruntime's `load_model_with_shape_infer`."""
        if not is_complete(skeleton(model).graph):
            inferred: onnx.ModelProto = infer(file)
            return inferred
        known = to_proto(model)
        onnx.load_external_data_for_model(known, str(file.parent))
        quant_utils.add_infer_metadata(known)
        return known

    def quantize_initializer(
        weight: Any, quant_type: Any, zero_point: Any, scale: Any, axis: int | None = None, **more: Any
    ) -> Any:
        if axis is not None and not more.get("block_size"):
            # Parameters of each element: the quantizer then takes the weight for one with a single scale.
            channels = [-1 if place == axis else 1 for place in range(len(weight.dims))]
            zero_point, scale = (np.broadcast_to(v.reshape(channels), weight.dims).ravel() for v in (zero_point, scale))
            axis = None
        return round_weight(weight, quant_type, zero_point, scale, axis, **more)

    before, round_weight = quant_utils.find_by_name, quant_utils.quantize_onnx_initializer
    infer = quant_utils.load_model_with_shape_infer
    modules = [module for name, module in sys.modules.items() if name.startswith(_PACKAGE)]
    with ExitStack() as stack:
        stack.enter_context(_replaced(base_quantizer, "ONNXModel", _indexed_model()))
        for module in modules:
            if getattr(module, "find_by_name", None) is before:
                stack.enter_context(_replaced(module, "find_by_name", find_by_name))
        stack.enter_context(_replaced(quantize, "load_model_with_shape_infer", load_model))
        stack.enter_context(_replaced(qdq_quantizer, "quantize_onnx_initializer", quantize_initializer))
        parameters = SymmetricParameters(quant_utils.compute_data_quant_params)
        stack.enter_context(_replaced(qdq_quantizer, "compute_data_quant_params", parameters))
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
