"""The rows that the report draws of layers: errors and times, joined by node name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgeq.measure.error_sources import ErrorSource
from edgeq.measure.kernels import KernelTime
from edgeq.report.layers import Activation, LayersRecord

_SPREAD, _SPREAD_US = 0.2, 2.0
"""By how much two times of a layer differ without being pointed out: a share, and microseconds."""


@dataclass(frozen=True)
class Layer:
    """One layer, in execution order.

    Attributes:
        sqnr_db: of its output against the float model's, dB, with all errors of the layers before it.
        own_db: of what this layer alone makes of the float model's inputs: the error that arises here.
        saturated: share of its output's values at an end of the integer range.
        float_us, int8_us: median time of what runs it in either model, microseconds.
        error_source: named as one that costs accuracy.
        advice: what would be done about it.
    """

    name: str
    op_type: str = ""
    sqnr_db: float | None = None
    own_db: float | None = None
    cosine: float | None = None
    saturated: float | None = None
    float_us: float | None = None
    int8_us: float | None = None
    int8_kind: str = ""
    error_source: bool = False
    advice: str = ""

    @property
    def time_lost(self) -> float:
        """Microseconds that it takes longer in int8; negative where it takes less, 0 where that is not known."""
        return self.int8_us - self.float_us if self.int8_us is not None and self.float_us is not None else 0.0

    @property
    def made_slower(self) -> bool:
        """Whether integer kernels run it slower than float32 did, by more than the profiler's own cost and spread."""
        ran_in_int8 = self.int8_kind == "int8" and self.float_us is not None
        return ran_in_int8 and self.time_lost > max(_SPREAD_US, _SPREAD * (self.float_us or 0.0))

    def error_db(self, *, alone: bool) -> float | None:
        """What layers are ranked by: their own error, where that was measured at all (`alone`), else the error so far.

        A layer that adds no error has none to be ranked by.
        """
        return self.own_db if alone else self.sqnr_db


def measured_alone(layers: Sequence[Layer]) -> bool:
    """Whether it is known what layers add by themselves."""
    return any(layer.own_db is not None for layer in layers)


def layer_rows(
    record: LayersRecord | None, kernels: Mapping[str, Sequence[KernelTime]]
) -> tuple[tuple[Layer, ...], float | None]:
    """Layers in execution order, and what conversions (Q/DQ) take, microseconds; None where there are none.

    Args:
        kernels: by "float32" and "int8", in execution order.
    """
    record = record or LayersRecord()
    sources = {source.name: source for source in record.culprits}
    measured: dict[str, Activation] = {}
    for activation in record.activations:
        measured.setdefault(activation.node or activation.name, activation)
    before, after = _summed(kernels.get("float32", ())), _summed(kernels.get("int8", ()))
    order = dict.fromkeys([*measured, *before, *after] if measured else [*after, *before])
    conversions = [time.us for time in after.values() if time.kind == "conversion"]
    found = tuple(
        _layer(name, measured.get(name), before.get(name), after.get(name), sources)
        for name in order
        if name in measured or name in before or after[name].kind != "conversion"
    )
    return found, sum(conversions) if conversions else None


def _layer(
    name: str,
    activation: Activation | None,
    before: KernelTime | None,
    after: KernelTime | None,
    sources: Mapping[str, ErrorSource],
) -> Layer:
    seen = activation or Activation(name)
    source = sources.get(seen.name)
    kernel = before or after
    return Layer(
        name=name,
        op_type=seen.op_type or (kernel.op_type if kernel else ""),
        sqnr_db=seen.accumulated.sqnr_db,
        own_db=seen.layer.sqnr_db,
        cosine=seen.accumulated.cosine,
        saturated=seen.saturated.low + seen.saturated.high if seen.saturated else None,
        float_us=before.us if before else None,
        int8_us=after.us if after else None,
        int8_kind=after.kind if after else "",
        error_source=source is not None,
        advice=_advice(source) if source else "",
    )


def _advice(source: ErrorSource) -> str:
    """Why, and which nodes to keep in float."""
    flags = f"float: {', '.join(source.exclude[:8])}" if source.exclude else ""
    return "; ".join(part for part in (source.reason, flags) if part)


def _summed(times: Iterable[KernelTime]) -> dict[str, KernelTime]:
    """By node name; several kernels of one node count together, under the first one's type."""
    found: dict[str, KernelTime] = {}
    for time in times:
        known = found.get(time.name)
        found[time.name] = time if known is None else replace(known, us=known.us + time.us)
    return found
