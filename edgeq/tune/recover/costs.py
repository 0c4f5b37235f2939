"""What it costs to keep units in float, from the runtime's own profile of the float and of the quantized model.

A set of units in float costs, for each, the time of its nodes in float less that in integers, and a conversion wherever
a tensor goes from a unit of one kind to one of the other. Conversions take a time per element that is read off the
conversions that the profile has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.measure.profile import KernelRun, timed_profile
from edgeq.model.prepare import PreparedModel
from edgeq.session import SessionSettings
from edgeq.tune.recover.units import Unit

_RUNS = 5
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
# Microseconds an element where the profile has no conversion to go by.
_CONVERSION_US = 1e-4


@dataclass(frozen=True)
class Costs:
    """Microseconds.

    Attributes:
        float_us, int8_us: by unit.
        conversion_us: of each tensor that units hand to each other, if it has to be converted.
        makers: tensor → the unit that makes it; readers: tensor → the units that read it; of these tensors.
    """

    float_us: Mapping[str, float]
    int8_us: Mapping[str, float]
    conversion_us: Mapping[str, float]
    makers: Mapping[str, str]
    readers: Mapping[str, tuple[str, ...]]

    @property
    def span(self) -> float:
        """Microseconds of all units in float over all in integers, conversions left out."""
        return sum(self.float_us.values()) - sum(self.int8_us.values())

    def further(self, name: str, kept: Set[str]) -> float:
        """Microseconds that one unit more in float costs beside `kept`; negative where it saves conversions."""
        touched = self._touched.get(name, ())
        return self._own(name) + self._converted(touched, kept | {name}) - self._converted(touched, kept - {name})

    def _own(self, name: str) -> float:
        return self.float_us.get(name, 0.0) - self.int8_us.get(name, 0.0)

    def _converted(self, tensors: Iterable[str], kept: Set[str]) -> float:
        return sum(
            self.conversion_us[tensor]
            for tensor in tensors
            if len({unit in kept for unit in (self.makers[tensor], *self.readers[tensor])}) > 1
        )

    @cached_property
    def _touched(self) -> Mapping[str, Sequence[str]]:
        """Unit → tensors that it hands to others or gets from them."""
        found: dict[str, list[str]] = {}
        for tensor in self.conversion_us:
            for unit in {self.makers[tensor], *self.readers[tensor]}:
                found.setdefault(unit, []).append(tensor)
        return found


def measure_costs(
    units: Sequence[Unit],
    prepared: PreparedModel,
    int8_model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
) -> Costs:
    """Run the float and the quantized model under the runtime's profiler.

    Args:
        units: of the float model, which is `prepared`.
        settings: of the quantized model; its threads count for both.
        feed: one sample.
    """
    names: dict[str, str] = {}
    makers: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for unit in units:
        names.update(dict.fromkeys((*unit.nodes, *unit.tensors), unit.name))
        makers.update(dict.fromkeys(unit.tensors, unit.name))
        for tensor in unit.reads:
            readers.setdefault(tensor, []).append(unit.name)
    threads = settings.intra_op_threads
    floats = timed_profile(prepared.path, SessionSettings(intra_op_threads=threads), feed, runs=_RUNS).kernels
    integers = timed_profile(int8_model, settings, feed, runs=_RUNS).kernels
    each = _conversion_us(integers)
    sizes = _elements(prepared.model)
    handed = [tensor for tensor in makers if tensor in readers]
    return Costs(
        _by_unit(floats, names),
        _by_unit(integers, names),
        {tensor: each * sizes.get(tensor, 0) for tensor in handed},
        {tensor: makers[tensor] for tensor in handed},
        {tensor: tuple(readers[tensor]) for tensor in handed},
    )


def unit_of(kernel: str, names: Mapping[str, str]) -> str | None:
    """The unit of a kernel, whose name begins with that of the node or tensor that it was fused from."""
    end = len(kernel)
    while end > 0:
        known = names.get(kernel[:end])
        if known is not None and not kernel[end : end + 1].isalnum():
            return known
        end -= 1
    return None


def _by_unit(kernels: Sequence[KernelRun], names: Mapping[str, str]) -> dict[str, float]:
    total: dict[str, float] = {}
    for kernel in kernels:
        unit = unit_of(kernel.name, names) if kernel.op_type not in _CONVERSIONS else None
        if unit is not None:
            total[unit] = total.get(unit, 0.0) + kernel.us
    return total


def _conversion_us(kernels: Sequence[KernelRun]) -> float:
    found = [kernel for kernel in kernels if kernel.op_type in _CONVERSIONS and kernel.outputs]
    elements = sum(math.prod(kernel.outputs[0][1]) for kernel in found)
    return sum(kernel.us for kernel in found) / elements if elements else _CONVERSION_US


def _elements(model: ir.Model) -> dict[str, int]:
    """Elements of each tensor of the main graph with a shape, sizes that are not known counted as 1."""
    values = [output for node in model.graph for output in node.outputs]
    return {
        value.name: math.prod(max(1, size) if isinstance(size, int) else 1 for size in value.shape)
        for value in values
        if value.name and value.shape is not None
    }
