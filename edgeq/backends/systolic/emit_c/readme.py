"""The README of a C bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgeq.backends.systolic.emit_c.builder import Builder
from edgeq.backends.systolic.emit_c.layout import c_shape
from edgeq.backends.systolic.emit_c.region import Region
from edgeq.backends.systolic.emit_c.text import harmless
from edgeq.backends.systolic.program import Float, Program, Step

_TEMPLATE = Path(__file__).parent / "c" / "README.md"


def readme(program: Program, region: Region, builder: Builder) -> str:
    """Markdown: the array that the C is for, shapes and scales of inputs and outputs, what is left to the host."""
    host = ""
    if floats := [*_float_steps(region.before, "before the inputs"), *_float_steps(region.after, "after the outputs")]:
        host = "\n## Left to the host, in float\n\n" + "\n".join(floats) + "\n"
    filled = {
        "@DIM@": str(program.array.dim),
        "@SCALE@": "float" if program.array.output_scale == "float" else "right shift as",
        "@GENERATION@": builder.generation,
        "@INPUTS@": _tensors(program, region.inputs, builder.batch),
        "@OUTPUTS@": _tensors(program, region.outputs, builder.batch),
        "@HOST@": host,
    }
    made = _TEMPLATE.read_text()
    for mark, value in filled.items():
        made = made.replace(mark, value)
    return made


def _tensors(program: Program, names: tuple[str, ...], batch: int) -> str:
    rows = []
    for name in names:
        tensor = program.tensors[name]
        shape = " x ".join(str(extent) for extent in (batch, *c_shape(tensor.shape)))
        layout = ", NHWC" if len(tensor.shape) == 4 else ""
        rows.append(
            f"- `{harmless(tensor.origin or name)}`: int8 {shape}{layout}, scale {np.float32(tensor.scale):.9g}"
        )
    return "\n".join(rows)


def _float_steps(steps: tuple[Step, ...], where: str) -> list[str]:
    return [
        f"- {where}: " + ", ".join(f"`{harmless(name)}`" for name in step.sources)
        for step in steps
        if isinstance(step, Float)
    ]
