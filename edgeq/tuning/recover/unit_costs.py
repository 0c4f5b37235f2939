"""Measure what each unit of a float model costs in float and in integers, by the runtime's own profile.

A unit in float costs the time of its nodes in float minus their time in integers. The time of a conversion is added
wherever a tensor goes from a unit in float to a unit in integers, or back. The conversion time per element comes from
the conversions in the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.measure.kernels import KernelRun, time_kernels
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.run.session import SessionSettings
from edgeq.tuning.float_layers import MacCosts
from edgeq.tuning.recover.units import Unit

# A single run of the profiler is noisy; more runs would add time to every ranking.
_RUNS = 5
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
# Microseconds per element if the profile contains no conversion.
_CONVERSION_US = 1e-4
_TRUST = 2.0
"""Factor by which the times of a whole model may differ from those of its profile before the profile decides: it prices
single nodes only roughly.
"""


@dataclass(frozen=True)
class Costs:
    """Hold costs in microseconds.

    Attributes:
        float_us, int8_us: time in float and in integers, by unit.
        conversion_us: time to convert each tensor that goes from one unit to another.
        makers: the unit that computes each of these tensors.
        readers: the units that read each of these tensors.
    """

    float_us: Mapping[str, float]
    int8_us: Mapping[str, float]
    conversion_us: Mapping[str, float]
    makers: Mapping[str, str]
    readers: Mapping[str, tuple[str, ...]]

    @property
    def span(self) -> float:
        """Return the microseconds of all units in float minus those of all units in integers, without conversions."""
        return sum(self.float_us.values()) - sum(self.int8_us.values())

    def extra_cost(self, name: str, float_names: Set[str]) -> float:
        """Return the microseconds that one more unit in float costs if the units in `float_names` are already in float.
        The result is negative if the unit saves more by fewer conversions than it costs.
        """
        touched = self._touched.get(name, ())
        return (
            self._difference(name)
            + self._converted(touched, float_names | {name})
            - self._converted(touched, float_names - {name})
        )

    def predict_speed(self, float_names: Set[str], plain_speed: float) -> float:
        """See `LayerCosts.predict_speed`.

        The time of the plain build, as a share of float32's, is 1 / `plain_speed`. The units in float add their cost to
        it. The scale is that by which all units in float give the time of float32, unless this is more than `_TRUST`
        times the profile's own scale, or less than its inverse.
        """
        plain_share, float_us = 1 / plain_speed, sum(self.float_us.values())
        if float_us <= 0:
            return plain_speed
        scale = 1 / float_us
        if self.span > 0:
            scale = min(max((1 - plain_share) / self.span, scale / _TRUST), scale * _TRUST)
        # Even a set that the profile believes to save time cannot take none.
        return 1 / max(plain_share + scale * self.set_cost(float_names), plain_share / _TRUST)

    def set_cost(self, float_names: Set[str]) -> float:
        """Return the microseconds that the units in `float_names` cost in float together, with their conversions."""
        return sum(map(self._difference, float_names)) + self._converted(self.conversion_us, float_names)

    def _difference(self, name: str) -> float:
        return self.float_us.get(name, 0.0) - self.int8_us.get(name, 0.0)

    def _converted(self, tensors: Iterable[str], float_names: Set[str]) -> float:
        return sum(
            self.conversion_us[tensor]
            for tensor in tensors
            if len({unit in float_names for unit in (self.makers[tensor], *self.readers[tensor])}) > 1
        )

    @cached_property
    def _touched(self) -> Mapping[str, Sequence[str]]:
        """Map each unit to the tensors that it exchanges with other units."""
        tensors_by_unit: dict[str, list[str]] = {}
        for tensor in self.conversion_us:
            for unit in {self.makers[tensor], *self.readers[tensor]}:
                tensors_by_unit.setdefault(unit, []).append(tensor)
        return tensors_by_unit


def measure_costs(
    units: Sequence[Unit],
    prepared: PreparedModel,
    int8_model: Path,
    settings: SessionSettings,
    feed: Mapping[str, Any],
) -> Costs:
    """Measure costs: run the float model and the quantized model under the runtime's profiler.

    Args:
        units: units of the float model, which is `prepared`.
        settings: settings of the quantized model; the float model gets the same threads.
        feed: inputs of one sample.
    """
    names: dict[str, str] = {}
    makers: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for unit in units:
        # Kernels are named after a node or after a tensor that it computes, so both lead to the unit.
        names.update(dict.fromkeys((*unit.nodes, *unit.tensors), unit.name))
        makers.update(dict.fromkeys(unit.tensors, unit.name))
        for tensor in unit.reads:
            readers.setdefault(tensor, []).append(unit.name)
    threads = settings.intra_op_threads
    floats = time_kernels(prepared.path, SessionSettings(intra_op_threads=threads), feed, runs=_RUNS).kernels
    integers = time_kernels(int8_model, settings, feed, runs=_RUNS).kernels
    us_per_element = _measure_conversion(integers)
    sizes = _count_elements(prepared.model)
    # Only tensors between units can be converted. Those inside a unit are always of one kind.
    handed = [tensor for tensor in makers if tensor in readers]
    return Costs(
        _sum_by_unit(floats, names),
        _sum_by_unit(integers, names),
        {tensor: us_per_element * sizes.get(tensor, 0) for tensor in handed},
        {tensor: makers[tensor] for tensor in handed},
        {tensor: tuple(readers[tensor]) for tensor in handed},
    )


def find_unit(kernel: str, names: Mapping[str, str]) -> str | None:
    """Return the unit that a kernel belongs to; None if the unit is unknown. The kernel's name begins with the name of
    the node or tensor that it was fused from.
    """
    end = len(kernel)
    # Fused kernels have a suffix after the name of a node, and the longest known name is the right one.
    while end > 0:
        unit = names.get(kernel[:end])
        if unit is not None and not kernel[end : end + 1].isalnum():
            return unit
        end -= 1
    return None


def _sum_by_unit(kernels: Sequence[KernelRun], names: Mapping[str, str]) -> dict[str, float]:
    total: dict[str, float] = {}
    for kernel in kernels:
        unit = find_unit(kernel.name, names) if kernel.op_type not in _CONVERSIONS else None
        if unit is not None:
            total[unit] = total.get(unit, 0.0) + kernel.us
    return total


def _measure_conversion(kernels: Sequence[KernelRun]) -> float:
    conversions = [kernel for kernel in kernels if kernel.op_type in _CONVERSIONS and kernel.outputs]
    elements = sum(math.prod(kernel.outputs[0][1]) for kernel in conversions)
    return sum(kernel.us for kernel in conversions) / elements if elements else _CONVERSION_US


def _count_elements(model: ir.Model) -> dict[str, int]:
    """Return the number of elements of each tensor of the main graph that has a shape. Unknown sizes count as 1."""
    values = [output for node in model.graph for output in node.outputs]
    return {
        value.name: math.prod(max(1, size) if isinstance(size, int) else 1 for size in value.shape)
        for value in values
        if value.name and value.shape is not None
    }


def mac_costs(units: Sequence[Unit], model: ir.Model) -> MacCosts:
    """Return the multiply-accumulates of each unit of `model`."""
    macs = node_macs(model)
    return MacCosts({unit.name: sum(macs.get(node, 0) for node in unit.nodes) for unit in units})
