"""Split a program into the part that becomes C and the parts that stay with the host.

The steps between the quantized inputs and the last integers become C. The host runs the float steps at both ends: edgeq
applies those before the first integers to the images in the bundle, and the user applies those after the last integers
to the outputs. A float step between integers cannot be written as C.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Program, Step, step_inputs, step_outputs
from edgeq.errors import ModelError


@dataclass(frozen=True)
class Region:
    """Describe the part of a program that runs in C.

    Attributes:
        inputs: int8 tensors that the host provides, in the order of the program.
        outputs: int8 tensors that the C code returns to the host.
        steps: the steps in C.
        leading, trailing: the float steps that the host runs before and after the steps in C.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    leading: tuple[Step, ...]
    trailing: tuple[Step, ...]


def c_region(program: Program) -> Region:
    """Split `program` into the part for C and the parts for the host.

    Raises:
        ModelError: the program has no integers, or a float step between integers. The message names the node and why it
            is in float.
    """
    available, leading = set(program.inputs), []
    # From the front: everything that depends only on the model's inputs.
    for step in program.steps:
        if isinstance(step, steps.Float | steps.Quantize) and available.issuperset(step_inputs(step)):
            leading.append(step)
            available.update(step_outputs(step))
    ends = set(map(id, leading))
    # From the back: float steps whose results no later integer step reads.
    inner_reads: set[str] = set()
    trailing: list[Step] = []
    for step in reversed(program.steps):
        if (
            isinstance(step, steps.Float | steps.Dequantize)
            and inner_reads.isdisjoint(step_outputs(step))
            # A step without integers behind it may belong to both ends; the front has it already.
            and id(step) not in ends
        ):
            trailing.insert(0, step)
        else:
            inner_reads.update(step_inputs(step))
    ends.update(map(id, trailing))
    inner = tuple(step for step in program.steps if id(step) not in ends)
    for step in inner:
        if isinstance(step, steps.Float):
            node, reason = next(iter(step.reasons.items()), (step.name, "it has no integer form"))
            raise ModelError(
                f"node {node!r} runs in float between integer layers ({reason}), which a C bundle does not support",
                "Use the ONNX dialect file, or move the model's float operators to its ends",
            )
    if not inner:
        raise ModelError(
            "no part of this model runs on integers", "A C bundle would be empty. See the reasons for the float nodes"
        )
    computed = {name for step in inner for name in step_outputs(step)}
    inputs = dict.fromkeys(name for step in inner for name in step_inputs(step) if name not in computed)
    trailing_reads = [name for step in trailing for name in step_inputs(step)]
    # A dictionary keeps the order and drops duplicates.
    outputs = dict.fromkeys(name for name in (*trailing_reads, *program.outputs) if name in computed)
    return Region(tuple(inputs), tuple(outputs), inner, tuple(leading), tuple(trailing))
