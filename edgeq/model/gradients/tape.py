"""Write the nodes of a backward graph: terms with operators, so that a rule reads like its formula."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import constant_tensor, name_of

OPSET = 17
"""Operator set of backward graphs. It does not depend on the float model's."""
Number = float | int
Shape = tuple[int, ...]


class Tape:
    """Write a backward graph for one sample.

    Args:
        values: the sample's values of all tensors of the forward graph that are not constants, by name.
        variables: names of the tensors that need a gradient.

    Attributes:
        graph: the graph so far.
        reads: forward tensor → input of the backward graph that has the tensor's values.
        settings: forward tensor → values that became constants of the backward graph, such as the start of a Slice.
    """

    def __init__(self, values: Mapping[str, NDArray[Any]], variables: Collection[str]) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="backward")
        self.reads: dict[str, ir.Value] = {}
        self.settings: dict[str, NDArray[Any]] = {}
        self._values, self._variables = values, variables
        self._constants: dict[object, Term] = {}
        self._count = 0

    def is_variable(self, value: ir.Value | None) -> bool:
        """Return whether a forward tensor needs a gradient."""
        return name_of(value) in self._variables

    def shape(self, value: ir.Value | None) -> Shape:
        """Return the shape of a forward tensor in the sample."""
        assert value is not None
        tensor = constant_tensor(value)
        return self._values[name_of(value)].shape if tensor is None else tensor.numpy().shape

    def numbers(self, value: ir.Value | None) -> NDArray[Any]:
        """Return the values of a forward tensor in the sample, to be written into the graph as constants."""
        assert value is not None
        tensor = constant_tensor(value)
        if tensor is not None:
            return np.asarray(tensor.numpy())
        return self.settings.setdefault(name_of(value), self._values[name_of(value)])

    def read(self, value: ir.Value | None) -> Term:
        """Return the values of a forward tensor, floats as float32."""
        assert value is not None
        name, tensor = name_of(value), constant_tensor(value)
        if tensor is not None:
            if name not in self._constants:
                floating = tensor.dtype.is_floating_point() and tensor.dtype is not ir.DataType.FLOAT
                self._constants[name] = self._initializer(
                    ir.tensor(np.asarray(tensor.numpy(), np.float32)) if floating else tensor
                )
            return self._constants[name]
        if name not in self.reads:
            array = self._values[name]
            dtype = ir.DataType.FLOAT if is_float(array) else ir.DataType.from_numpy(array.dtype)
            self.reads[name] = self.input(f"{name}/value", array.shape, dtype)
        return Term(self, self.reads[name])

    def input(self, name: str, shape: Shape, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """Add an input to the backward graph."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def constant(self, values: Any, dtype: Any = np.float32) -> Term:
        """Return a constant of the backward graph."""
        array = np.ascontiguousarray(np.asarray(values, dtype)).reshape(np.shape(values))
        key = (array.tobytes(), array.shape, array.dtype.str) if array.size <= _SMALL else object()
        if key not in self._constants:
            self._constants[key] = self._initializer(ir.tensor(array))
        return self._constants[key]

    def indices(self, values: Iterable[int]) -> Term:
        """Return a constant vector of int64."""
        return self.constant(list(values), np.int64)

    def zeros(self, shape: Shape) -> Term:
        """Return zeros of a shape. They take no place in the file."""
        return Term.of("Expand", self.constant(0.0), self.indices(shape))

    def nodes(self, op_type: str, inputs: Sequence[Term | None], outputs: int, **attributes: Any) -> list[Term]:
        """Write a node with several outputs and return them."""
        self._count += 1
        values = [ir.Value(name=f"{op_type}_{self._count}_{place}") for place in range(outputs)]
        node = ir.Node(
            "",
            op_type,
            [None if term is None else term.value for term in inputs],
            attributes=[
                ir.convenience.convert_attribute(name, value) for name, value in attributes.items() if value is not None
            ],
            outputs=values,
            name=f"{op_type}_{self._count}",
        )
        self.graph.append(node)
        return [Term(self, value) for value in values]

    def _initializer(self, tensor: ir.TensorProtocol) -> Term:
        self._count += 1
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=f"constant_{self._count}", type=kind, const_value=tensor)
        self.graph.register_initializer(value)
        return Term(self, value)


# Larger constants are not compared with earlier ones.
_SMALL = 64


@dataclass(frozen=True, eq=False)
class Term:
    """Hold a value of a backward graph. Operators between terms, and between terms and numbers, write nodes."""

    tape: Tape
    value: ir.Value

    @staticmethod
    def of(op_type: str, *inputs: Term | None, **attributes: Any) -> Term:
        """Write a node with one output and return the output."""
        tape = next(term.tape for term in inputs if term is not None)
        return tape.nodes(op_type, inputs, 1, **attributes)[0]

    def apply(self, op_type: str, *operands: Term | None, **attributes: Any) -> Term:
        """Write a node that reads this term first."""
        return Term.of(op_type, self, *operands, **attributes)

    def __add__(self, term: Term | Number) -> Term:
        return self.apply("Add", self._term(term))

    def __sub__(self, term: Term | Number) -> Term:
        return self.apply("Sub", self._term(term))

    def __rsub__(self, number: Number) -> Term:
        return self._term(number).apply("Sub", self)

    def __mul__(self, term: Term | Number) -> Term:
        return self.apply("Mul", self._term(term))

    def __truediv__(self, term: Term | Number) -> Term:
        return self.apply("Div", self._term(term))

    def __rtruediv__(self, number: Number) -> Term:
        return self._term(number).apply("Div", self)

    def __neg__(self) -> Term:
        return self.apply("Neg")

    def __gt__(self, term: Term | Number) -> Term:
        return self.apply("Greater", self._term(term))

    def __ge__(self, term: Term | Number) -> Term:
        return self.apply("GreaterOrEqual", self._term(term))

    def __lt__(self, term: Term | Number) -> Term:
        return self.apply("Less", self._term(term))

    def __le__(self, term: Term | Number) -> Term:
        return self.apply("LessOrEqual", self._term(term))

    def __and__(self, term: Term) -> Term:
        return self.apply("And", term)

    def choose(self, true: Term | Number, false: Term | Number) -> Term:
        """Return `true` where this term, a truth value, is true, and `false` elsewhere."""
        return self.apply("Where", self._term(true), self._term(false))

    def finite(self) -> Term:
        """Return the term with zeros in place of elements that are not finite. Such an element would spread over the
        whole gradient.
        """
        # Only numbers of moderate size pass: NaN fails every comparison.
        return (self.apply("Abs") < _HUGE).choose(self, 0.0)

    def reshape(self, shape: Shape) -> Term:
        """Return the term in another shape."""
        # A size of 0 is an empty axis, not "as in the input".
        return self.apply("Reshape", self.tape.indices(shape), allowzero=1 if 0 in shape else None)

    def sum(self, axes: Iterable[int]) -> Term:
        """Return the sums over some axes, which keep the size 1."""
        return self.apply("ReduceSum", self.tape.indices(axes), keepdims=1)

    def expand(self, shape: Shape) -> Term:
        """Return the term, repeated to a shape."""
        return self.apply("Expand", self.tape.indices(shape))

    def transpose(self, perm: Sequence[int]) -> Term:
        """Return the term with its axes in the order `perm`."""
        return self.apply("Transpose", perm=list(perm))

    def reduce_to(self, start: Shape, shape: Shape) -> Term:
        """Return the sum over all axes that were broadcast from `shape` to `start`, which is the term's shape."""
        padded = (1,) * (len(start) - len(shape)) + shape
        axes = [axis for axis, (size, target) in enumerate(zip(start, padded, strict=True)) if size != target]
        total = self.sum(axes) if axes else self
        return total if start == shape else total.reshape(shape)

    def fit(self, start: Shape, begins: Sequence[int], sizes: Shape) -> Term:
        """Return the part of the term that begins at `begins`, in the shape `sizes`. Begins may be negative, and what
        lies outside of the term is zero. `start` is the term's shape.
        """
        ends = [size - length + begin for length, begin, size in zip(start, begins, sizes, strict=True)]
        pads = [*(-begin for begin in begins), *ends]
        return self.apply("Pad", self.tape.indices(pads)) if any(pads) else self

    def spread(self, start: Shape, steps: Sequence[int]) -> tuple[Term, Shape]:
        """Return the term with step - 1 zeros behind each element along each axis, and the new shape. `start` is the
        term's shape.
        """
        shape = tuple(size * step for size, step in zip(start, steps, strict=True))
        if shape == start:
            return self, start
        # An axis of its own takes the zeros of each axis that gets some.
        pairs = [(size, step) for size, step in zip(start, steps, strict=True)]
        split = tuple(n for size, step in pairs for n in ((size, 1) if step > 1 else (size,)))
        zeros = [n for _, step in pairs for n in ((0, step - 1) if step > 1 else (0,))]
        padded = self.reshape(split).apply("Pad", self.tape.indices([0] * len(zeros) + zeros))
        return padded.reshape(shape), shape

    def along(self, start: Shape, axis: int, matrix: NDArray[Any]) -> Term:
        """Return the term multiplied by `matrix` [size of the axis, new size] along an axis. `start` is its shape."""
        if axis == len(start) - 1:
            return self.apply("MatMul", self.tape.constant(matrix))
        before, behind = prod(start[:axis]), prod(start[axis + 1 :])
        product = self.tape.constant(matrix.T).apply("MatMul", self.reshape((before, start[axis], behind)))
        return product.reshape((*start[:axis], matrix.shape[1], *start[axis + 1 :]))

    def _term(self, operand: Term | Number) -> Term:
        return operand if isinstance(operand, Term) else self.tape.constant(operand)


_HUGE = 1e30

Gradients = Sequence[Term | None]
Rule = Callable[[Tape, ir.Node, Gradients], Gradients | None]
"""Function from the gradients of a node's outputs to those of its inputs. An input or output without a gradient has
None. A result of None means that the rule does not cover the node's settings."""


def first_of(gradients: Gradients) -> Term:
    """Return the gradient of a node's first output, from which rules start."""
    gradient = gradients[0]
    assert gradient is not None
    return gradient


def is_float(array: NDArray[Any]) -> bool:
    """Return whether an array contains floats, those of 16 bits among them, which numpy does not know."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"
