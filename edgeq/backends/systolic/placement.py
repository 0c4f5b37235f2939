"""Where each layer of a program runs: on the array, in integers on the core, or in float on the core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgeq.backends.systolic.program import (
    Clamp,
    Conv,
    Dequantize,
    Fc,
    Float,
    Program,
    Quantize,
    ResidualAdd,
    Step,
)
from edgeq.graph.convert import from_bytes
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import Kind, NodeRun

Place = Literal["array", "core", "float"]


@dataclass(frozen=True)
class Placed:
    """One layer: its place and multiply-accumulates for one sample; `depthwise` ones use one column of the array."""

    name: str
    kind: str
    place: Place
    macs: int
    depthwise: bool


@dataclass(frozen=True)
class Placement:
    """Attributes:
    layers: in the order of the program; conversions and clamps are none.
    float_macs: of float nodes, by node name.
    """

    layers: tuple[Placed, ...]
    float_macs: Mapping[str, int]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample, float layers included."""
        return sum(layer.macs for layer in self.layers)

    @property
    def array_share(self) -> float:
        """Share of multiply-accumulates on the array; 0 where there are none."""
        return sum(layer.macs for layer in self.layers if layer.place == "array") / self.macs if self.macs else 0.0

    @property
    def depthwise_share(self) -> float:
        """Share of multiply-accumulates in depthwise layers, wherever they run; 0 where there are none."""
        return sum(layer.macs for layer in self.layers if layer.depthwise) / self.macs if self.macs else 0.0

    def sentence(self) -> str:
        """A summary of one line for the user."""
        text = f"{self.array_share:.1%} of the multiply-accumulates run on the array"
        if self.depthwise_share:
            off = [layer for layer in self.layers if layer.depthwise and layer.place == "core"]
            share = sum(layer.macs for layer in off) / self.macs
            text += f"; depthwise layers are {self.depthwise_share:.1%}, which fill one column of it"
            if off:
                text += f", and {len(off)} of them ({share:.1%}) run on the core, each channel with a scale of its own"
        return text


def place(program: Program, macs: Mapping[str, int] | None = None) -> Placement:
    """Where the layers of `program` run.

    Args:
        macs: multiply-accumulates of the float model's nodes (`edgeq.model.macs.node_macs`), for its float parts.
    """
    layers = []
    floats: dict[str, int] = {}
    for step in program.steps:
        if isinstance(step, Quantize | Dequantize | Clamp):
            continue
        count = step_macs(program, step)
        where: Place = "core"
        if isinstance(step, Float):
            own = {name: (macs or {}).get(name, 0) for name in step.reasons}
            floats.update(own)
            count, where = sum(own.values()), "float"
        elif isinstance(step, Fc | ResidualAdd) or (isinstance(step, Conv) and on_array(step, program.array.dim)):
            where = "array"
        depthwise = isinstance(step, Conv) and step.depthwise
        layers.append(Placed(step.name, type(step).__name__, where, count, depthwise))
    return Placement(tuple(layers), floats)


def on_array(step: Conv, dim: int) -> bool:
    """Whether a convolution runs on the array: its tiles are as wide as that, but for the last."""
    return all((tile.stop - tile.start) % dim == 0 for tile in step.tiles[:-1])


def step_macs(program: Program, step: Step) -> int:
    """Multiply-accumulates of one sample."""
    if isinstance(step, Conv):
        return math.prod(step.conv_shape) * int(step.weights[0].size)
    if isinstance(step, Fc):
        return math.prod(program.tensors[step.output].shape) * int(step.weights.shape[1])
    return 0


def coverage(program: Program, macs: Mapping[str, int]) -> Coverage:
    """The program in the terms of `edgeq.measure.coverage`: integers wherever they are computed, and float nodes with
    their reasons."""
    runs: list[NodeRun] = []
    reasons: dict[str, str] = {}
    for step in program.steps:
        kind: Kind = "conversion" if isinstance(step, Quantize | Dequantize) else "int8"
        if isinstance(step, Float):
            op_types = {node.name: node.op_type for node in from_bytes(step.model).graph}
            runs += [NodeRun(n, n, op_types.get(n, ""), "float", macs.get(n, 0)) for n in step.reasons]
            reasons |= step.reasons
            continue
        source = step.sources[0] if not isinstance(step, Quantize | Dequantize) and step.sources else step.name
        runs.append(NodeRun(step.name, source, type(step).__name__, kind, step_macs(program, step)))
    how = "the program that was compiled for the array"
    return coverage_of(runs, lambda run: reasons[run.name], basis="modelled", how=how)
