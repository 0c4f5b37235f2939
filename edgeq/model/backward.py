"""Build the model that computes gradients: v'dy/dx of inner tensors x of a float model, for directions v at its
outputs y.

The backward model reads the tensors of one run of the float model as inputs, so the float model runs once for any
number of directions. Its result is linear in the directions. The rules of the operators are in
`edgeq.model.gradients`. A node whose operator has no rule, such as a TopK or an LSTM, ends the graph: the float tensors
that it reads count as outputs, and get directions of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.gradients import elements, moves, products, sums
from edgeq.model.gradients.tape import OPSET, Rule, Tape, Term, is_float
from edgeq.model.graph import MAIN_DOMAINS, MICROSOFT, GraphIndex, is_op, name_of, reads

RULES: Mapping[str, Rule] = {**elements.RULES, **moves.RULES, **products.RULES, **sums.RULES}
"""Operator type → its rule."""
# Operators of onnxruntime that equal an ONNX operator of the same name, or are in no ONNX domain.
_MICROSOFT_RULES = frozenset({"Gelu", "QuickGelu"})
_IR_VERSION = 8
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Backward:
    """Hold a model that computes gradients.

    Attributes:
        model: the model. Its inputs are those of `reads` and `directions`, its outputs those of `gradients`.
        reads: input → tensor of the float model whose values it gets.
        directions: output of the float model, or tensor at which the graph ends → input for the direction there,
            float32 in the tensor's shape.
        gradients: (tensor, whether only the readers in `apart` count) → output, float32 in the tensor's shape. A
            tensor that nothing depends on is absent.
        settings: tensors whose values became constants of the model, with these values.
        shapes: tensor → shape for which the model was built.
    """

    model: ir.Model
    reads: Mapping[str, str]
    directions: Mapping[str, str]
    gradients: Mapping[tuple[str, bool], str]
    settings: Tensors
    shapes: Mapping[str, tuple[int, ...]]

    def serves(self, values: Tensors) -> bool:
        """Return whether the model is right for these values of the float model's tensors too."""
        return all(name in values and values[name].shape == shape for name, shape in self.shapes.items()) and all(
            np.array_equal(values[name], array) for name, array in self.settings.items()
        )

    def feed(self, values: Tensors) -> dict[str, NDArray[Any]]:
        """Return the inputs that do not depend on a direction."""
        arrays = {entry: values[name] for entry, name in self.reads.items()}
        return {n: np.asarray(a, np.float32) if is_float(a) else np.asarray(a) for n, a in arrays.items()}


def build_backward(
    graph: GraphIndex, tensors: Collection[str], values: Tensors, apart: Collection[tuple[str, str]] = ()
) -> Backward:
    """Build the backward model of a float model for the shapes of one sample.

    Args:
        tensors: names of the tensors to differentiate by. Tensors that are not float, and those that bodies of If, Loop
            and Scan compute, are left out.
        values: the values of the sample's inputs and of all tensors that nodes of the main graph compute, by name.
        apart: (tensor, node) pairs. These readers of a tensor count for the gradient (tensor, True), all others for
            (tensor, False). The node "" stands for the outputs of the model.
    """
    wanted = {name for name in tensors if name in values and is_float(values[name])}
    variables = _find_variables(graph, wanted, values)
    tape, readers = Tape(values, variables), set(apart)
    parts: dict[tuple[str, bool], list[Term]] = {}
    directions: dict[str, ir.Value] = {}

    def start(name: str, reader: str) -> None:
        """Let a tensor count as an output."""
        if name not in directions:
            directions[name] = tape.input(f"{name}/direction", values[name].shape)
            add(name, reader, Term(tape, directions[name]))

    def add(name: str, reader: str, gradient: Term) -> None:
        parts.setdefault((name, (name, reader) in readers), []).append(gradient)

    for value in graph.graph.outputs:
        if tape.is_variable(value):
            start(name_of(value), "")
    totals: dict[str, Term] = {}

    def total(name: str) -> Term | None:
        """Return the sum of the gradients of all readers. It is complete once all readers are done."""
        terms = [*parts.get((name, False), ()), *parts.get((name, True), ())]
        if terms and name not in totals:
            totals[name] = terms[0] if len(terms) == 1 else Term.of("Sum", *terms)
        return totals.get(name)

    for node in reversed(graph.graph):
        sources = [value for value in reads(node) if tape.is_variable(value)]
        if not sources or _reads_shapes(node):
            continue
        outputs = [total(name_of(output)) for output in node.outputs]
        rule = _rule_of(node)
        if rule is not None and not any(term is not None for term in outputs):
            # Nothing that is judged reads the node.
            continue
        # Rules start from the first output. Only a Split is indifferent to which of its outputs are read.
        starts = outputs[0] is not None or node.op_type == "Split"
        results = rule(tape, node, outputs) if rule is not None and starts else None
        if results is None:
            for value in sources:
                start(name_of(value), node.name or "")
            continue
        for place, gradient in enumerate(results):
            if gradient is not None and tape.is_variable(node.inputs[place]):
                add(name_of(node.inputs[place]), node.name or "", gradient)
    gradients: dict[tuple[str, bool], str] = {}
    for (name, is_apart), terms in parts.items():
        if name in wanted:
            term = terms[0] if len(terms) == 1 else Term.of("Sum", *terms)
            # A term may be the gradient of several tensors, or an input.
            output = term.apply("Identity").value
            gradients[name, is_apart] = f"{name}/{'apart' if is_apart else 'gradient'}"
            output.name, output.type = gradients[name, is_apart], ir.TensorType(ir.DataType.FLOAT)
            tape.graph.outputs.append(output)
    return Backward(
        model=ir.Model(tape.graph, ir_version=_IR_VERSION),
        reads={value.name or "": name for name, value in tape.reads.items()},
        directions={name: value.name or "" for name, value in directions.items()},
        gradients=gradients,
        settings=dict(tape.settings),
        shapes={name: array.shape for name, array in values.items()},
    )


def _find_variables(graph: GraphIndex, wanted: Collection[str], values: Tensors) -> frozenset[str]:
    """Return the float tensors that depend on the values of `wanted`, with these."""
    names = set(wanted)
    for node in graph.graph:
        if _reads_shapes(node) or not any(name_of(value) in names for value in reads(node)):
            continue
        outputs = map(name_of, node.outputs)
        names.update(name for name in outputs if name in values and is_float(values[name]))
    return frozenset(names)


def _reads_shapes(node: ir.Node) -> bool:
    """Return whether only the shape of the node's inputs matters."""
    return is_op(node, "Shape", "Size")


def _rule_of(node: ir.Node) -> Rule | None:
    if node.domain in MAIN_DOMAINS or (node.domain == MICROSOFT and node.op_type in _MICROSOFT_RULES):
        return RULES.get(node.op_type)
    return None


assert OPSET >= 16, "ScatterElements adds since opset 16"
