"""Report the operators of a .tflite file that an NPU's compiler is known to reject or to leave on the CPU.

The compilers cannot be had here. What is known about them is data in targets/litert/npus.toml, with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

from edgeq.backends.litert.network import TfliteOperator
from edgeq.errors import HardwareError, suggest
from edgeq.util.folders import shipped
from edgeq.util.record_files import read_toml

OPTION = "npu"
"""The key of [device] engine_options that names the NPU's compiler."""
# More sentences would hide the other notes.
_MOST_NAMED = 5
_EFFECTS = {
    "cpu": "stays on the CPU",
    "gpu": "runs on the GPU",
    "rejected": "is rejected",
}


@dataclass(frozen=True)
class NpuLimit:
    """Describe operators that a compiler does not take. targets/litert/npus.toml explains the fields."""

    case: str
    effect: Literal["cpu", "gpu", "rejected"]
    reason: str
    source: str
    kinds: tuple[str, ...] = ()
    most: int = 0

    def meets(self, operator: TfliteOperator) -> bool:
        """Return whether the limit applies to an operator."""
        return (not self.kinds or operator.kind in self.kinds) and CASES[self.case](operator, self.most)


@dataclass(frozen=True)
class NpuCompiler:
    """Describe a compiler. targets/litert/npus.toml explains the fields."""

    name: str
    title: str
    source: str
    listed: tuple[str, ...] = ()
    cuts: bool = False
    limit: tuple[NpuLimit, ...] = ()

    @property
    def rejected_cases(self) -> Mapping[str, NpuLimit]:
        """Return the limits beyond which the compiler fails, by their cases."""
        return {limit.case: limit for limit in self.limit if limit.effect == "rejected"}

    def find_limits(
        self, operators: Iterable[TfliteOperator], *, floats: bool
    ) -> Iterator[tuple[TfliteOperator, NpuLimit]]:
        """Yield each operator that the compiler does not take, with the first limit that applies.

        Args:
            floats: whether operators that compute in float count. They do not if the model is not quantized yet.
        """
        unlisted = NpuLimit("always", "cpu", "it is not one of the operators that the compiler takes", self.source)
        in_float = NpuLimit("always", "cpu", "it computes in float", self.source)
        for operator in operators:
            limit = next((limit for limit in self.limit if limit.meets(operator)), None)
            if limit is not None:
                yield operator, limit
            # A QUANTIZE reads the floats of an input.
            elif floats and operator.type == "float32" and operator.kind != "QUANTIZE":
                yield operator, in_float
            elif self.listed and operator.kind not in self.listed:
                yield operator, unlisted

    def notes(self, operators: Iterable[TfliteOperator], *, floats: bool = True) -> tuple[str, ...]:
        """Return a sentence for each operator that the compiler does not take. A long list is cut short.

        Args:
            operators, floats: see `find_limits`.
        """
        sentences = [
            f"{operator.kind} of {operator.node!r} {_EFFECTS[limit.effect]} in {self.title}: {limit.reason} "
            f"({limit.source})"
            for operator, limit in self.find_limits(operators, floats=floats)
        ]
        more = len(sentences) - _MOST_NAMED
        lines = sentences[:_MOST_NAMED] + ([f"{more} more operators do not run on the NPU"] if more > 0 else [])
        if sentences and self.cuts:
            lines.append(
                f"{self.title} also leaves every operator behind the first of these on the CPU ({self.source})"
            )
        return (*lines, f"{self.title} was not run: it cannot be had here")


@dataclass(frozen=True)
class _NpuTable:
    npu: tuple[NpuCompiler, ...]


@cache
def npu_compilers() -> Mapping[str, NpuCompiler]:
    """Return the compilers of targets/litert/npus.toml, by name."""
    table = read_toml(shipped("targets") / "litert" / "npus.toml", _NpuTable, HardwareError, "Install edgeq again")
    return {npu.name: npu for npu in table.npu}


def find_compiler(device: Mapping[str, Any]) -> NpuCompiler | None:
    """Return the compiler that the [device] table of a target names, or None if it names none.

    Raises:
        HardwareError: the name is unknown.
    """
    name = device.get("engine_options", {}).get(OPTION)
    if name is None:
        return None
    if name not in npu_compilers():
        raise HardwareError(f"unknown {OPTION} {name!r} in [device] engine_options", suggest(name, npu_compilers()))
    return npu_compilers()[name]


def _scales_per_channel(operator: TfliteOperator, most: int) -> bool:
    del most
    constants = (tensor for tensor in operator.inputs if tensor is not None and tensor.values is not None)
    return any(tensor.scales is not None and tensor.scales.scale.size > 1 for tensor in constants)


def _constant(operator: TfliteOperator, place: int) -> list[int]:
    tensor = operator.inputs[place] if place < len(operator.inputs) else None
    return [] if tensor is None or tensor.values is None else [int(number) for number in tensor.values.ravel()]


def _skips_elements(operator: TfliteOperator, most: int) -> bool:
    del most
    return any(step != 1 for step in _constant(operator, 3))


def _reduces_other_axes(operator: TfliteOperator, most: int) -> bool:
    del most
    source = operator.inputs[0]
    # The file stores images as [N, H, W, C].
    return source is None or len(source.shape) != 4 or not set(_constant(operator, 1)) <= {1, 2}


def _has_more_elements(operator: TfliteOperator, most: int) -> bool:
    return prod(operator.outputs[0].shape) > most


def _has_more_than_3_axes(operator: TfliteOperator, most: int) -> bool:
    del most
    return any(size > 1 for tensor in operator.outputs for size in tensor.shape[:-3])


_RESIZE_FACTORS = (1, 2, 4, 8)


def _resizes_by_other_factors(operator: TfliteOperator, most: int) -> bool:
    del most
    source, result = operator.inputs[0], operator.outputs[0]
    assert source is not None
    pairs = zip(source.shape[1:3], result.shape[1:3], strict=True)
    return any(after % before or after // before not in _RESIZE_FACTORS for before, after in pairs)


CASES: Mapping[str, Callable[[TfliteOperator, int], bool]] = {
    "per-channel": _scales_per_channel,
    "skips-elements": _skips_elements,
    "reduces-other-axes": _reduces_other_axes,
    "more-elements": _has_more_elements,
    "more-than-3-axes": _has_more_than_3_axes,
    "other-resize-factors": _resizes_by_other_factors,
}
"""The cases that targets/litert/npus.toml refers to by name. Each gets an operator and the limit's `most`."""
