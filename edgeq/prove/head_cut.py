"""End a float model in front of its last steps, which the runner then takes: selecting the best boxes, and joining
boxes with scores in one tensor.

An int8 tensor has one scale. In a row of a box in pixels and of scores from 0 to 1, that scale leaves no step to the
scores. Moreover, NPUs do not run TopK and Gather, so a graph that selects its answers leaves the NPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.decode import decode
from edgeq_device.answers.head import Head
from numpy.typing import NDArray

from edgeq.data.images import find_frame
from edgeq.data.samples import Samples
from edgeq.errors import DataError, ModelError
from edgeq.measure.inference import infer
from edgeq.model.clean import tidy
from edgeq.model.edit import Editor
from edgeq.model.graph import constant, is_constant, is_op, named_values, sizes
from edgeq.model.load import save_model
from edgeq.run.session import open_session

_SELECTORS = ("TopK", "NonMaxSuppression")
_GATHERS = ("Gather", "GatherElements", "GatherND")
_SHAPERS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast")
_LARGEST = ("ReduceMax", "GlobalMaxPool")
# Operator → the constant that changes nothing.
_NEUTRAL = {"Mul": 1, "Add": 0, "Sub": 0, "Div": 1}
# Largest difference between the answers of both models: in pixels, and in scores.
_PIXELS, _SCORES = 0.01, 1e-3
_COMPARED = 4
_ONE_TENSOR = "boxes and scores come from one tensor, so the graph cannot end in front of their join"
# Columns of a box.
_BOX = 4


@dataclass(frozen=True)
class HeadCut:
    """Hold a float model that ends in front of its last steps, and the head that reads its outputs."""

    model: ir.Model
    head: Head


@dataclass(frozen=True)
class _Piece:
    """Name the columns `start` to `end` on the axis `axis` of a tensor, and the operators with constants that follow in
    the graph for these columns alone.
    """

    value: ir.Value
    axis: int
    start: int
    end: int
    steps: tuple[tuple[str, NDArray[Any]], ...] = ()

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.end - self.start


def cut_head(model: ir.Model, head: Head, samples: Samples, folder: Path) -> HeadCut:
    """Return the cut model and its head. Both together give the answers of the whole model on real samples.

    Args:
        model: the float model with the shapes of its tensors. It is not changed.
        samples: samples of the proof; the first few are compared.
        folder: private folder, for the models that are compared.

    Raises:
        ModelError: the outputs are not joined or selected in a way that can be cut, or the answers would differ.
    """
    complete = folder / "complete.onnx"
    save_model(model.clone(), complete)
    session, compared = open_session(complete), list(itertools.islice(samples, _COMPARED))
    expected = [decode(infer(session, sample), head, find_frame(sample.context)) for sample in compared]
    if not any(len(answer) for answer in expected):
        raise ModelError("the float model finds no object in the first samples, so a cut could not be checked")
    for number, cut in enumerate(_propose(model, head)):
        place = folder / f"cut-{number}.onnx"
        save_model(cut.model.clone(), place)
        session = open_session(place)
        try:
            answers = [decode(infer(session, sample), cut.head, find_frame(sample.context)) for sample in compared]
        except DataError:
            continue  # the proposal reads the tensors in another way than the model
        if all(map(are_equal, expected, answers)):
            return cut
    raise ModelError("no cut in front of the last steps gives the answers of the model")


def are_equal(expected: Answer, answer: Answer) -> bool:
    """Return whether two answers have the same objects, in any order."""
    if len(expected) != len(answer):
        return False
    free = np.ones(len(answer), bool)
    for place in range(len(expected)):
        same = free & (answer.classes == expected.classes[place])
        same &= np.abs(answer.scores - expected.scores[place]) <= _SCORES
        for name in ("boxes", "keypoints"):
            reference, actual = getattr(expected, name), getattr(answer, name)
            if (reference is None) != (actual is None):
                return False
            if reference is not None:
                differences = np.abs(actual - reference[place]).reshape(len(answer), -1)
                same &= (differences <= _PIXELS).all(axis=1)
        if expected.masks is not None and answer.masks is not None:
            same &= [np.mean(mask != expected.masks[place]) < _SCORES for mask in answer.masks]
        if not same.any():
            return False
        free[np.flatnonzero(same)[0]] = False
    return True


def _propose(model: ir.Model, head: Head) -> Iterator[HeadCut]:
    """Yield the cuts that the structure of the graph allows, most likely first."""
    name = head.outputs.get("rows", "")
    output = next((value for value in model.graph.outputs if value.name == name), None)
    if output is None:
        raise ModelError(f"the head {head.family} has no rows in one tensor")
    if _selects(model.graph, output):
        # Masks and keypoints would have to be selected with the boxes.
        if len(head.outputs) > 1:
            raise ModelError(f"the head {head.family} reads other outputs besides selected rows")
        for selector in (node for node in model.graph if node.op_type in _SELECTORS):
            yield from _propose_unselected(model, head, selector)
        return
    size = _shape(output)
    axis = 1 if len(size) == 3 and size[1] < size[2] else 2
    pieces = list(_split(_Piece(output, axis, 0, size[axis])))
    parts = _group(pieces)
    boxes = {piece.value for piece in parts["boxes"]}
    if len(parts) < 2 or any(piece.value in boxes for name in parts if name != "boxes" for piece in parts[name]):
        raise ModelError(_ONE_TENSOR)
    others = {role: value for role, value in head.outputs.items() if role != "rows"}
    if len({piece.axis for piece in pieces}) > 1:
        raise ModelError("the parts of the rows differ in the order of their axes")
    cut, roles = _end_at(model, others, parts)
    joined = {"rows": list(parts), "axes": [pieces[0].axis, axis]}
    yield HeadCut(cut, replace(head, outputs=roles, parameters={**head.parameters, **joined}))


def _propose_unselected(model: ir.Model, head: Head, selector: ir.Node) -> Iterator[HeadCut]:
    """Yield the cuts in front of a selection, one for each way of reading the boxes and scores there."""
    tensors = _find_unselected(model.graph, selector)
    if tensors is None:
        return
    cut, roles = _end_at(model, {}, tensors)
    axes = [pieces[0].axis for pieces in tensors.values()]
    for boxes, unit, scores in itertools.product(("corners", "centre"), ("pixel", "share"), ("scores", "logits")):
        parameters = {**head.parameters, "boxes": boxes, "unit": unit, "scores": scores, "axes": axes}
        yield HeadCut(cut, replace(head, family="pairs", outputs=roles, parameters=parameters))


def _selects(graph: ir.Graph, output: ir.Value) -> bool:
    return any(output in _depends(graph, node.outputs) for node in graph if node.op_type in _SELECTORS)


def _depends(graph: ir.Graph, values: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the values that are computed from any of `values`, with these themselves."""
    reached = set(values)
    for node in graph:
        if reached.intersection(value for value in node.inputs if value is not None):
            reached.update(node.outputs)
    return reached


def _find_unselected(graph: ir.Graph, selector: ir.Node) -> dict[str, list[_Piece]] | None:
    """Return the boxes [1, N, 4] and the scores [1, N, C] in front of a selection, or None if it does not select from
    such tensors. Repeating a NonMaxSuppression could give other answers, so only a TopK counts.
    """
    scores = _find_rows(selector.inputs[0]) if selector.op_type == "TopK" else None
    if scores is None:
        return None
    selected, others = _depends(graph, selector.outputs), set()
    for node in graph:
        if is_op(node, *_GATHERS) and node.inputs[1] in selected:
            data = node.inputs[0]
            if data is not None and data not in selected and not is_constant(data):
                others.add(_find_rows(data))
    others.discard(scores)
    boxes = others.pop() if len(others) == 1 else None
    if boxes is None or _shape(boxes)[2] < _BOX:
        return None
    return {"boxes": _unite(_Piece(boxes, 2, 0, _BOX)), "scores": _unite(_Piece(scores, 2, 0, _shape(scores)[2]))}


def _find_rows(value: ir.Value | None) -> ir.Value | None:
    """Return the tensor [1, N, columns] from which `value` differs only in its shape, or in taking each row's largest.
    Return None if there is none.
    """
    while value is not None:
        shape, node = sizes(value), value.producer()
        # One column may also be the largest of a row.
        if shape is not None and len(shape) == 3 and shape[0] == 1 and not is_op(node, *_LARGEST):
            return value
        value = node.inputs[0] if node is not None and is_op(node, *_SHAPERS, *_LARGEST) else None
    return None


def _unite(piece: _Piece) -> list[_Piece]:
    """Return the pieces of a tensor if all lie on the same axis, or else the tensor itself."""
    pieces = list(_split(piece))
    return pieces if len({part.axis for part in pieces}) == 1 else [piece]


def _group(pieces: Sequence[_Piece]) -> dict[str, list[_Piece]]:
    """Return the pieces of rows by part: those of the box, then each of the others."""
    parts: dict[str, list[_Piece]] = {}
    column = 0
    for piece in pieces:
        if column < _BOX < column + piece.width:
            raise ModelError(_ONE_TENSOR)
        name = "boxes" if column < _BOX else "scores" if "scores" not in parts else f"part{len(parts)}"
        parts.setdefault(name, []).append(piece)
        column += piece.width
    return parts


def _split(piece: _Piece) -> Iterator[_Piece]:
    """Yield the tensors that were joined to the columns of a piece, in their order."""
    node = piece.value.producer()
    parts = list(_split_once(node, piece)) if node is not None else []
    if not parts:
        yield piece
        return
    for part in parts:
        inner = list(_split(part))
        # Without a join in front of it, an operator with a constant stays in the graph.
        if is_op(node, *_NEUTRAL) and len(inner) == 1:
            yield piece
            return
        yield from inner


def _split_once(node: ir.Node, piece: _Piece) -> Iterator[_Piece]:
    data = node.inputs[0] if node.inputs else None
    if data is None or node.domain not in ("", "ai.onnx"):
        return
    start, end, axis = piece.start, piece.end, piece.axis
    rank = len(_shape(piece.value))
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) % rank == axis:
        offset = 0
        for value in node.inputs:
            assert value is not None
            width = _shape(value)[axis]
            low, high = max(start - offset, 0), min(end - offset, width)
            if low < high:
                columns = range(offset + low - start, offset + high - start)
                steps = tuple((name, _take(factor, columns, axis)) for name, factor in piece.steps)
                yield replace(piece, value=value, start=low, end=high, steps=steps)
            offset += width
    elif node.op_type == "Split" and node.attributes.get_int("axis", 0) % rank == axis:
        sizes_before = [_shape(value)[axis] for value in node.outputs[: list(node.outputs).index(piece.value)]]
        yield replace(piece, value=data, start=start + sum(sizes_before), end=end + sum(sizes_before))
    elif node.op_type == "Slice" and (begin := _find_begin(node, axis, _shape(data))) is not None:
        yield replace(piece, value=data, start=start + begin, end=end + begin)
    elif node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
        if not piece.steps:
            yield replace(piece, value=data, axis=order[axis])
    elif node.op_type == "Identity":
        yield replace(piece, value=data)
    elif node.op_type in _NEUTRAL and _shape(data) == _shape(piece.value):
        values = constant(node.inputs[1])
        if values is not None and values.ndim <= rank:
            values = values.reshape((1,) * (rank - values.ndim) + values.shape)
            step = node.op_type, _take(values, range(start, end), axis)
            yield replace(piece, value=data, steps=(step, *piece.steps))


def _take(values: NDArray[Any], columns: range, axis: int) -> NDArray[Any]:
    """Return a constant for some columns. A constant with one number for all columns is the same for a part of them."""
    return values.take(columns, axis) if values.shape[axis] > 1 else values


def _find_begin(node: ir.Node, axis: int, shape: Sequence[int]) -> int | None:
    """Return the first column of a Slice of a tensor of `shape`, or None if it selects on another axis or in steps."""
    settings = [constant(value) for value in node.inputs[1:]]
    if len(settings) < 3 or any(values is None for values in settings):
        return None
    starts, ends, places, *steps = (values for values in settings if values is not None)
    if any((step != 1).any() for step in steps):
        return None
    begin = 0
    for start, end, place in zip(starts.tolist(), ends.tolist(), places.tolist(), strict=True):
        if place % len(shape) == axis and start >= 0:
            begin = start
        elif start != 0 or end < shape[place]:
            return None
    return begin


def _shape(value: ir.Value) -> tuple[int, ...]:
    shape = sizes(value)
    if shape is None:
        raise ModelError(f"the shape of tensor {value.name!r} is not known")
    return shape


def _end_at(
    model: ir.Model, others: Mapping[str, str], parts: Mapping[str, Sequence[_Piece]]
) -> tuple[ir.Model, dict[str, str]]:
    """Return a copy of the model that has the parts as outputs, and the name of the output of each role.

    Args:
        others: role → output that stays an output.
    """
    cut = model.clone()
    values, editor = named_values(cut.graph), Editor(cut)
    outputs = [value for value in cut.graph.outputs if value.name in others.values()]
    roles = dict(others)
    for role, pieces in parts.items():
        columns = [_write_piece(editor, replace(piece, value=values[str(piece.value.name)])) for piece in pieces]
        axis = pieces[0].axis
        value = columns[0]
        if len(columns) > 1:
            value = editor.node("Concat", columns, f"{role}/joined", attributes={"axis": axis}, dtype=columns[0].dtype)
        shape = [*_shape(pieces[0].value)]
        shape[axis] = sum(piece.width for piece in pieces)
        value.shape, value.type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        if value.is_graph_input() or value in outputs:
            value = editor.node("Identity", [value], f"{role}/output", like=value)
        outputs.append(value)
        roles[role] = str(value.name)
    cut.graph.outputs[:] = outputs
    tidy(cut)
    return cut, roles


def _write_piece(editor: Editor, piece: _Piece) -> ir.Value:
    value, name = piece.value, str(piece.value.name)
    if piece.width < _shape(value)[piece.axis]:
        bounds = [editor.constant(f"{name}/bound", np.array([n])) for n in (piece.start, piece.end, piece.axis)]
        value = editor.node("Slice", [value, *bounds], f"{name}/columns", dtype=value.dtype)
    for op_type, values in piece.steps:
        if (values != _NEUTRAL[op_type]).any():
            factor = editor.constant(f"{name}/factor", values)
            value = editor.node(op_type, [value, factor], f"{name}/{op_type}", like=value)
    return value
