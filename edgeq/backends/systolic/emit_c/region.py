"""Which steps become C: everything between the quantized inputs and the last integers.

Float steps at the ends stay with the host: what comes before the first integers is done to the images that travel with
the bundle, what comes after the last ones is left to whoever reads the outputs. A float step between integers has no C.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.backends.systolic.program import (
    Dequantize,
    Float,
    Program,
    Quantize,
    Step,
    step_inputs,
    step_outputs,
)
from edgeq.errors import ModelError


@dataclass(frozen=True)
class Region:
    """The part of a program that C does.

    Attributes:
        inputs: int8 tensors that come from the host, in the order of the program.
        outputs: int8 tensors that go back to it.
        steps: what is done in between.
        before, after: the steps at the ends, which are the host's.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    before: tuple[Step, ...]
    after: tuple[Step, ...]


def c_region(program: Program) -> Region:
    """Split `program`.

    Raises:
        ModelError: a float step between integers, or no integers at all; names the node and why it is float.
    """
    before = _before(program)
    after = _after(program, {id(step) for step in before})
    ends = {id(step) for step in (*before, *after)}
    steps = tuple(step for step in program.steps if id(step) not in ends)
    for step in steps:
        if isinstance(step, Float):
            node, reason = next(iter(step.reasons.items()), (step.name, "it has no integer form"))
            raise ModelError(
                f"node {node!r} runs in float between integer layers ({reason}), which the C bundle cannot do",
                "Use the ONNX dialect file, or change the model so that float operators stand at its ends",
            )
    if not steps:
        raise ModelError("nothing of this model runs on integers", "A C bundle would be empty; see the reasons given")
    made = {name for step in steps for name in step_outputs(step)}
    read = [name for step in steps for name in step_inputs(step)]
    inputs = tuple(dict.fromkeys(name for name in read if name not in made))
    wanted = [name for step in after for name in step_inputs(step)]
    outputs = tuple(dict.fromkeys(name for name in (*wanted, *program.outputs) if name in made))
    return Region(inputs, outputs, steps, before, after)


def _before(program: Program) -> tuple[Step, ...]:
    """Float and Quantize steps that depend on no integer layer."""
    known, found = set(program.inputs), []
    for step in program.steps:
        if isinstance(step, Float | Quantize) and known.issuperset(step_inputs(step)):
            found.append(step)
            known.update(step_outputs(step))
    return tuple(found)


def _after(program: Program, before: set[int]) -> tuple[Step, ...]:
    """Float and Dequantize steps that no integer layer depends on."""
    needed: set[str] = set()
    found: list[Step] = []
    for step in reversed(program.steps):
        free = needed.isdisjoint(step_outputs(step))
        if isinstance(step, Float | Dequantize) and free and id(step) not in before:
            found.append(step)
        else:
            needed.update(step_inputs(step))
    return tuple(reversed(found))
