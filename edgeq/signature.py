"""Describe a model's inputs and outputs: names, dtypes, shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Dimension = int | str | None
"""A size, the name of a symbolic size, or None if nothing is known."""


@dataclass(frozen=True)
class TensorSpec:
    """Describe one model input or output. `shape` is None if even the rank is unknown."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[Dimension, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype}[?]"
        return f"{self.name}: {self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class Signature:
    """Describe the inputs and outputs of a model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def signature_differences(a: Signature, b: Signature) -> tuple[str, ...]:
    """Return one sentence for each input or output that is missing, added or changed, in the order of `a` and then of
    `b`.
    """
    differences = []
    for kind, specs_a, specs_b in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        in_a, in_b = ({spec.name: spec for spec in specs} for specs in (specs_a, specs_b))
        for name in dict.fromkeys([*in_a, *in_b]):
            if name not in in_b:
                differences.append(f"only A has the {kind} {in_a[name]}")
            elif name not in in_a:
                differences.append(f"only B has the {kind} {in_b[name]}")
            elif str(in_a[name]) != str(in_b[name]):
                differences.append(f"the {kind} is {in_a[name]} in A and {in_b[name]} in B")
    return tuple(differences)


def is_interchangeable(a: Signature, b: Signature) -> bool:
    """Return whether each model accepts the inputs of the other. Names and dtypes must be the same, and fixed sizes
    must not differ.
    """
    inputs_a, inputs_b = ({spec.name: spec for spec in s.inputs} for s in (a, b))
    return inputs_a.keys() == inputs_b.keys() and all(_agree(inputs_a[name], inputs_b[name]) for name in inputs_a)


def _agree(a: TensorSpec, b: TensorSpec) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.shape is None or b.shape is None:
        return True
    fixed = [(x, y) for x, y in zip(a.shape, b.shape, strict=False) if isinstance(x, int) and isinstance(y, int)]
    return len(a.shape) == len(b.shape) and all(x == y for x, y in fixed)
