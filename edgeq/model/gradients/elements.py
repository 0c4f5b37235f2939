"""Rules for operators that compute each element from elements at the same place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgeq.model.gradients.tape import Gradients, Rule, Tape, Term, first_of
from edgeq.model.graph import node_input

# The constants of ONNX's tanh form of Gelu.
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class _ElementPoint:
    """Give the input `x`, the output `y` and the attributes of a function of one tensor."""

    tape: Tape
    node: ir.Node

    @property
    def x(self) -> Term:
        return self.tape.read(self.node.inputs[0])

    @property
    def y(self) -> Term:
        return self.tape.read(self.node.outputs[0])

    def number(self, name: str, default: float) -> float:
        return float(self.node.attributes.get_float(name, default))

    def bound(self, place: int, default: float) -> float:
        value = node_input(self.node, place)
        return default if value is None else float(self.tape.numbers(value).reshape(()))


def _gelu(p: _ElementPoint) -> Term:
    x = p.x
    if p.node.attributes.get_string("approximate", "none") == "tanh":
        t = (x * _TANH_SCALE * (x * x * _TANH_CUBE + 1)).apply("Tanh")
        inner = (x * x * (3 * _TANH_CUBE) + 1) * _TANH_SCALE
        return (t + 1) * 0.5 + x * 0.5 * (1 - t * t) * inner
    return ((x * math.sqrt(0.5)).apply("Erf") + 1) * 0.5 + x * (x * x * -0.5).apply("Exp") * (
        1 / math.sqrt(2 * math.pi)
    )


def _mish(p: _ElementPoint) -> Term:
    x = p.x
    t = x.apply("Softplus").apply("Tanh")
    return t + x * (1 - t * t) * x.apply("Sigmoid")


def _swish(x: Term, alpha: float) -> Term:
    s = (x * alpha).apply("Sigmoid")
    return s + x * alpha * s * (1 - s)


def _clip(p: _ElementPoint) -> Term:
    x, low, high = p.x, p.bound(1, -math.inf), p.bound(2, math.inf)
    return ((x >= low) & (x <= high)).choose(1.0, 0.0)


_DERIVATIVES: Mapping[str, Callable[[_ElementPoint], Term]] = {
    "Abs": lambda p: p.x.apply("Sign"),
    "Celu": lambda p: (p.x > 0).choose(1.0, (p.x / p.number("alpha", 1.0)).apply("Exp")),
    "Clip": _clip,
    "Cos": lambda p: -p.x.apply("Sin"),
    "Elu": lambda p: (p.x > 0).choose(1.0, p.y + p.number("alpha", 1.0)),
    "Erf": lambda p: (-(p.x * p.x)).apply("Exp") * (2 / math.sqrt(math.pi)),
    "Exp": lambda p: p.y,
    "Gelu": _gelu,
    "HardSigmoid": lambda p: ((p.y > 0) & (p.y < 1)).choose(p.number("alpha", 0.2), 0.0),
    "HardSwish": lambda p: (p.x.apply("Abs") < 3).choose(p.x * (1 / 3) + 0.5, (p.x >= 3).choose(1.0, 0.0)),
    "LeakyRelu": lambda p: (p.x >= 0).choose(1.0, p.number("alpha", 0.01)),
    "Log": lambda p: (1 / p.x).finite(),
    "Mish": _mish,
    "Neg": lambda p: p.tape.constant(-1.0),
    "QuickGelu": lambda p: _swish(p.x, p.number("alpha", 1.702)),
    "Reciprocal": lambda p: -(p.y * p.y).finite(),
    "Relu": lambda p: (p.y > 0).choose(1.0, 0.0),
    "Selu": lambda p: (p.x > 0).choose(
        p.number("gamma", 1.0507010), p.y + p.number("gamma", 1.0507010) * p.number("alpha", 1.6732632)
    ),
    "Sigmoid": lambda p: p.y * (1 - p.y),
    "Sin": lambda p: p.x.apply("Cos"),
    "Softplus": lambda p: p.x.apply("Sigmoid"),
    "Softsign": lambda p: 1 / ((p.x.apply("Abs") + 1) * (p.x.apply("Abs") + 1)),
    "Sqrt": lambda p: (0.5 / p.y).finite(),
    "Swish": lambda p: _swish(p.x, p.number("alpha", 1.0)),
    "Tanh": lambda p: 1 - p.y * p.y,
}


def _function(derivative: Callable[[_ElementPoint], Term]) -> Rule:
    def rule(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
        return [first_of(gradients) * derivative(_ElementPoint(tape, node))]

    return rule


def _operands(partial: Callable[[Tape, ir.Node, Term, int], Term | None]) -> Rule:
    """Return a rule for operands that are broadcast. `partial` returns the gradient of the operand at a place, in the
    output's shape; None if it does not cover this operand.
    """

    def rule(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
        gradient, shape = first_of(gradients), tape.shape(node.outputs[0])
        parts: list[Term | None] = []
        for place, value in enumerate(node.inputs):
            part = partial(tape, node, gradient, place) if tape.is_variable(value) else None
            if part is None and tape.is_variable(value):
                return None
            parts.append(None if part is None else part.reduce_to(shape, tape.shape(value)))
        return parts

    return rule


def _div(tape: Tape, node: ir.Node, gradient: Term, place: int) -> Term:
    if place == 0:
        return gradient * (1 / tape.read(node.inputs[1])).finite()
    return gradient * (-tape.read(node.outputs[0]) / tape.read(node.inputs[1])).finite()


def _pow(tape: Tape, node: ir.Node, gradient: Term, place: int) -> Term | None:
    base, exponent = node.inputs
    if place == 1 or tape.is_variable(exponent):
        return None
    power = tape.read(exponent).apply("Cast", to=int(ir.DataType.FLOAT))
    return gradient * (power * tape.read(base).apply("Pow", power - 1)).finite()


def _extreme(tape: Tape, node: ir.Node, gradient: Term, place: int) -> Term:
    return tape.read(node.inputs[place]).apply("Equal", tape.read(node.outputs[0])).choose(gradient, 0.0)


def _where(tape: Tape, node: ir.Node, gradient: Term, place: int) -> Term:
    mask = tape.read(node.inputs[0])
    return mask.choose(gradient, 0.0) if place == 1 else mask.choose(0.0, gradient)


def _prelu(tape: Tape, node: ir.Node, gradient: Term, place: int) -> Term | None:
    if place == 1:
        return None
    return (tape.read(node.inputs[0]) >= 0).choose(gradient, gradient * tape.read(node.inputs[1]))


RULES: Mapping[str, Rule] = {
    **{op_type: _function(derivative) for op_type, derivative in _DERIVATIVES.items()},
    "Add": _operands(lambda tape, node, gradient, place: gradient),
    "Div": _operands(_div),
    "Max": _operands(_extreme),
    "Min": _operands(_extreme),
    "Mul": _operands(lambda tape, node, gradient, place: gradient * tape.read(node.inputs[1 - place])),
    "PRelu": _operands(_prelu),
    "Pow": _operands(_pow),
    "Sub": _operands(lambda tape, node, gradient, place: gradient if place == 0 else -gradient),
    "Sum": _operands(lambda tape, node, gradient, place: gradient),
    "Where": _operands(_where),
}
