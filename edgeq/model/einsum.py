"""Replace Einsum by the operators that it stands for: MatMul, or Mul and ReduceSum, with Transpose and Reshape around
them. Integer kernels exist for these, and for no Einsum.

The letters of two operands and of the result decide the form:

| letter | in the left operand | in the right operand | in the result |
|---|---|---|---|
| batch | yes | yes | yes |
| row | yes | no | yes |
| column | no | yes | yes |
| sum | yes | yes | no |

    MatMul: [batch..., rows, sums] x [batch..., sums, columns] -> [batch..., rows, columns]

A letter that only one operand has and the result lacks is summed first. Without sum letters, the form is a Mul.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import Editor, replace_node, rewrite_nodes
from edgeq.model.graph import constant, maker

# Letters for the axes of an ellipsis, which no equation contains. The last axis has the first of them.
_ELLIPSIS = 0xE000


def write_einsums(model: ir.Model) -> int:
    """Replace every Einsum of float32 tensors by products and sums, in place. Results stay the same to float32's
    accuracy.

    An Einsum stays if an operand repeats a letter, if the rank or too many sizes of an operand are unknown, or if axes
    of size 1 are broadcast to other sizes.

    Returns:
        The number of nodes that were replaced.
    """
    return rewrite_nodes(model, _write, "Einsum")


@dataclass(frozen=True, eq=False)
class _Step:
    """Describe a node to write. An input is a tensor of the model, a constant, or the result of another step."""

    op_type: str
    inputs: tuple[ir.Value | NDArray[Any] | _Step, ...]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _EinsumOperand:
    """Hold a tensor and a letter for each of its axes."""

    value: ir.Value | NDArray[Any] | _Step
    letters: str


class _CannotWriteError(Exception):
    """Report an Einsum that stays."""


def _write(node: ir.Node, editor: Editor) -> bool:
    values = [value for value in node.inputs if value is not None]
    if any(value.shape is None or value.dtype != ir.DataType.FLOAT for value in values):
        return False
    try:
        letters, result = _letters(node.attributes.get_string("equation", ""), values)
        plan = _plan(values, letters, result)
    except _CannotWriteError:
        return False
    outputs: dict[_Step, ir.Value] = {}
    final = _emit(plan, node, editor, outputs)
    # The last product stands for the Einsum in options and reports, so it gets the name.
    main = next((step for step in reversed(outputs) if step.op_type in ("MatMul", "Mul")), plan)
    final.shape, final.type = node.outputs[0].shape, node.outputs[0].type
    replace_node(node, final)
    maker(outputs[main]).name = node.name  # Arguments such as `exclude` use this name.
    return True


def _emit(step: _Step, node: ir.Node, editor: Editor, outputs: dict[_Step, ir.Value]) -> ir.Value:
    """Write a step and the steps that it needs before `node`, and return the result."""
    inputs = []
    for place, value in enumerate(step.inputs):
        if isinstance(value, _Step):
            value = _emit(value, node, editor, outputs)
        elif isinstance(value, np.ndarray):
            value = editor.constant(f"{node.name}/{step.op_type.lower()}/{place}", value)
        inputs.append(value)
    name = f"{node.name}/{step.op_type.lower()}"
    dtype = ir.DataType.FLOAT
    outputs[step] = editor.node(step.op_type, inputs, name, before=node, dtype=dtype, attributes=step.attributes)
    return outputs[step]


def _letters(equation: str, operands: Sequence[ir.Value]) -> tuple[list[str], str]:
    """Return a letter for each axis of each operand, and for each axis of the result."""
    operand_terms, arrow, result = equation.replace(" ", "").partition("->")
    terms = operand_terms.split(",")
    if len(terms) != len(operands):
        raise _CannotWriteError
    named = []
    for term, value in zip(terms, operands, strict=True):
        assert value.shape is not None
        missing = len(value.shape) - len(term.replace("...", ""))
        more = "".join(chr(_ELLIPSIS + place) for place in reversed(range(missing)))
        named.append(term.replace("...", more))
        # A repeated letter takes a diagonal, which none of the operators below can do.
        if missing < 0 or len(named[-1]) != len(value.shape) or len(set(named[-1])) != len(named[-1]):
            raise _CannotWriteError
    used = "".join(named)
    ellipsis_rank = max((ord(letter) - _ELLIPSIS + 1 for letter in used if ord(letter) >= _ELLIPSIS), default=0)
    ellipsis = "".join(chr(_ELLIPSIS + place) for place in reversed(range(ellipsis_rank)))
    # Without an arrow, the letters that occur once form the result, in alphabetical order.
    if not arrow:
        once = (letter for letter in set(used) - set(ellipsis) if used.count(letter) == 1)
        result = ellipsis + "".join(sorted(once))
    result = result.replace("...", ellipsis)
    if not set(ellipsis) <= set(result) <= set(used) or len(set(result)) != len(result):
        raise _CannotWriteError
    return named, result


def _sizes(letters: Iterable[str], operands: Iterable[ir.Value]) -> dict[str, int | None]:
    """Return the size of each letter; None if it is not known."""
    sizes: dict[str, int | None] = {}
    for term, value in zip(letters, operands, strict=True):
        assert value.shape is not None
        for letter, size in zip(term, value.shape, strict=True):
            number = size if isinstance(size, int) else None
            recorded = sizes.setdefault(letter, number)
            if None not in (number, recorded) and number != recorded:
                raise _CannotWriteError
            sizes[letter] = number if recorded is None else recorded
    return sizes


def _plan(values: Sequence[ir.Value], letters: Sequence[str], result: str) -> _Step:
    """Return the last of the steps that compute an Einsum. They join the operands from left to right."""
    sizes = _sizes(letters, values)
    constants = [constant(value) for value in values]
    operands = [
        _EinsumOperand(value if array is None else array, term)
        for value, array, term in zip(values, constants, letters, strict=True)
    ]
    current = operands[0]
    for place, factor in enumerate(operands[1:], 1):
        later = result + "".join(operand.letters for operand in operands[place + 1 :])
        current = _joined(current, factor, later, sizes)
    output = _arranged(_summed(current, result), result)
    return output.value if isinstance(output.value, _Step) else _Step("Identity", (output.value,))


def _joined(
    left_factor: _EinsumOperand, right_factor: _EinsumOperand, later: str, sizes: dict[str, int | None]
) -> _EinsumOperand:
    """Return the product of two operands.

    Args:
        later: the letters that the result or another operand has.
    """
    if isinstance(left_factor.value, np.ndarray):  # Layers have their constant weights on the right.
        left_factor, right_factor = right_factor, left_factor
    left_factor, right_factor = (
        _summed(left_factor, later + right_factor.letters),
        _summed(right_factor, later + left_factor.letters),
    )
    both = [letter for letter in left_factor.letters if letter in right_factor.letters]
    batch = "".join(letter for letter in both if letter in later)
    sums = "".join(letter for letter in both if letter not in later)
    rows, columns = (
        "".join(letter for letter in operand.letters if letter not in both) for operand in (left_factor, right_factor)
    )
    if not sums:
        letters = batch + rows + columns
        sides = [_raised(side, letters).value for side in (left_factor, right_factor)]
        return _EinsumOperand(_Step("Mul", tuple(sides)), letters)
    # Without batch letters, MatMul takes any number of rows.
    leading, merged = (batch, [rows]) if batch else (rows, [])
    ours, theirs = [*merged, sums], [sums, columns] if columns or batch else [sums]
    a = _grouped(_arranged(left_factor, leading + "".join(ours)), [*leading, *ours], sizes)
    b = _grouped(_arranged(right_factor, batch + "".join(theirs)), [*batch, *theirs], sizes)
    product = _EinsumOperand(_Step("MatMul", (a.value, b.value)), leading + "".join(merged) + columns)
    parts = [*leading, *merged, *theirs[1:]]
    if all(len(part) == 1 for part in parts):
        return product
    aligned = next(place for place, part in enumerate(parts) if len(part) != 1)
    shape = [0 if place < aligned else _count(letter, sizes) for place, letter in enumerate(product.letters)]
    return replace(product, value=_reshape(product.value, shape))


def _summed(operand: _EinsumOperand, later: str) -> _EinsumOperand:
    """Return an operand summed over the letters that are not in `later`."""
    axes = [place for place, letter in enumerate(operand.letters) if letter not in later]
    if not axes:
        return operand
    letters = "".join(letter for letter in operand.letters if letter in later)
    return _EinsumOperand(_Step("ReduceSum", (operand.value, np.array(axes, np.int64)), {"keepdims": 0}), letters)


def _arranged(operand: _EinsumOperand, letters: str) -> _EinsumOperand:
    """Return an operand with its axes in the order of `letters`."""
    if operand.letters == letters:
        return operand
    order = [operand.letters.index(letter) for letter in letters]
    # A constant is rearranged here, so that it stays a constant.
    if isinstance(operand.value, np.ndarray):
        return _EinsumOperand(np.ascontiguousarray(operand.value.transpose(order)), letters)
    return _EinsumOperand(_Step("Transpose", (operand.value,), {"perm": order}), letters)


def _raised(operand: _EinsumOperand, letters: str) -> _EinsumOperand:
    """Return an operand with an axis for each of `letters`. The axes that it lacks have the size 1."""
    operand = _arranged(operand, "".join(letter for letter in letters if letter in operand.letters))
    axes = [place for place, letter in enumerate(letters) if letter not in operand.letters]
    if not axes:
        return operand
    return _EinsumOperand(_Step("Unsqueeze", (operand.value, np.array(axes, np.int64))), letters)


def _grouped(operand: _EinsumOperand, groups: Sequence[str], sizes: dict[str, int | None]) -> _EinsumOperand:
    """Return an operand with one axis for each group of its letters. An empty group has the size 1."""
    if all(len(group) == 1 for group in groups):
        return operand
    aligned = next(place for place, group in enumerate(groups) if len(group) != 1)
    shape = [0 if place < aligned else _count(group, sizes) for place, group in enumerate(groups)]
    if isinstance(operand.value, np.ndarray):
        return replace(operand, value=operand.value.reshape([*operand.value.shape[:aligned], *shape[aligned:]]))
    return replace(operand, value=_reshape(operand.value, shape))


def _reshape(value: ir.Value | NDArray[Any] | _Step, shape: Sequence[int]) -> _Step:
    # A Reshape can compute one unknown size only.
    if list(shape).count(-1) > 1:
        raise _CannotWriteError
    return _Step("Reshape", (value, np.array(shape, np.int64)))


def _count(letters: str, sizes: dict[str, int | None]) -> int:
    """Return the number of elements on some axes, or -1 if it is not known."""
    lengths = [sizes[letter] for letter in letters]
    return -1 if None in lengths else math.prod(size for size in lengths if size is not None)
