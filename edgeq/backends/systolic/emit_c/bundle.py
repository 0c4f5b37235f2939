"""A C bundle on disk: a program and a few images, with the simulator's results for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from numpy.typing import NDArray

from edgeq.backends.systolic.emit_c.builder import CLayer, Generation
from edgeq.backends.systolic.emit_c.header import own_header, read_header
from edgeq.backends.systolic.emit_c.region import c_region
from edgeq.backends.systolic.emit_c.sources import Values, c_sources
from edgeq.backends.systolic.program import Program, step_outputs
from edgeq.backends.systolic.simulate import simulate
from edgeq.errors import DataError, UsageError


@dataclass(frozen=True)
class CBundle:
    """What was written.

    Attributes:
        files: by their place in the bundle's folder, sorted.
        layers: what `net dump` writes, in its order.
        inputs, outputs: the int8 tensors that the host gives and gets.
        notes: what a reader should know.
    """

    directory: Path
    files: tuple[str, ...]
    layers: tuple[CLayer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]


def write_c_bundle(
    program: Program,
    inputs: Mapping[str, NDArray[Any]],
    directory: Path,
    *,
    generation: Generation = "2023",
    params_header: Path | None = None,
) -> CBundle:
    """Write C that computes the integers of `program`, with `inputs` quantized as test images.

    Args:
        inputs: float samples [N, ...] by the program's input names; N is the batch that the C is made for.
        directory: made if it does not exist; files in it are replaced.
        generation: of gemmini.h: "2021" (square images; no slices of channels) or "2023".
        params_header: the chip's gemmini_params.h; None writes one for the program's array.

    Raises:
        UsageError: an unknown generation.
        HardwareError: the header is of another array.
        ModelError: a float operator stands between integer layers, or a scale that the array cannot express.
        DataError: the samples do not fit the program.
    """
    if generation not in get_args(Generation):
        known = ", ".join(get_args(Generation))
        raise UsageError(f"gemmini.h has no generation {generation!r}", f"Known are {known}")
    header, notes = own_header(program.array), tuple[str, ...]()
    if params_header is not None:
        header, array, notes = read_header(params_header, program.array)
        program = dataclasses.replace(program, array=array)
    region = c_region(program)
    if not all(len(values) for values in inputs.values()):
        raise DataError("there are no samples for the C bundle", "Give at least one")
    keep = (*region.inputs, *(name for step in region.steps for name in step_outputs(step)))
    modes: dict[str, Values] = {
        "ws": simulate(program, inputs, keep=keep).tensors,
        "os": simulate(program, inputs, keep=keep, dataflow="OS").tensors,
        "cpu": simulate(program, inputs, keep=keep, rounding="header").tensors,
    }
    sources = c_sources(program, modes, header, generation)
    for name, content in sources.files.items():
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content, encoding="utf-8", newline="\n")
    return CBundle(directory, tuple(sources.files), sources.layers, region.inputs, region.outputs, notes)
