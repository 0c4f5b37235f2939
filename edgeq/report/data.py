"""What a report is made of: the record that a bundle keeps, of the types that the pipeline writes, and what is drawn of
it. Everything but the name may be missing; the page then leaves it out. Keys: docs/report.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import Agreement, OutputAgreement
from edgeq.measure.coverage import Coverage
from edgeq.measure.kernels import KernelTime
from edgeq.records import Count, Finite, Positive, Share
from edgeq.report.facts import Pairs
from edgeq.report.fleet import FleetRecord
from edgeq.report.histograms import TensorHistogram
from edgeq.report.layer_rows import Layer
from edgeq.report.layers import LayersRecord
from edgeq.report.timing import BenchReport, Speed, Timing
from edgeq.report.tuning import Tuning
from edgeq.report.tuning_record import ModelRecord, TuningRecord


@dataclass(frozen=True)
class Saturation:
    """What was done about saturating kernels, in a sentence."""

    why: str = ""


@dataclass(frozen=True)
class VariantRecord:
    """What `edgeq package --json` says of a variant, with `title`, `layers`, `kernels` and `histograms`.

    Attributes:
        sqnr_db, top1_agreement: what the manifest says where there is no `agreement`.
        checked: which checks were made on whose kernels.
    """

    title: str = ""
    target: str | None = None
    profile: str | None = None
    provider: str | None = None
    engine: str | None = None
    min_onnxruntime: str | None = None
    checked: str = ""
    saturation: Saturation | None = None
    native: bool | None = None
    scheme: Mapping[str, Any] = field(default_factory=dict)
    session_options: Mapping[str, Any] = field(default_factory=dict)
    bytes: Positive | None = None
    coverage: Coverage | None = None
    agreement: Agreement | None = None
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)
    sqnr_db: Finite | None = None
    top1_agreement: Share | None = None
    samples: Count | None = None
    held_out: bool | None = None
    speed: Speed | None = None
    layers: LayersRecord | None = None
    kernels: Mapping[str, tuple[KernelTime, ...]] = field(default_factory=dict)
    histograms: tuple[TensorHistogram, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportRecord:
    """report.json, with tuning.json as `tuning`, and `bench`, `fleet` and `machine` where they were taken now."""

    name: str = ""
    model: ModelRecord | None = None
    variants: Mapping[str, VariantRecord] = field(default_factory=dict)
    tuning: TuningRecord | None = None
    bench: BenchReport | None = None
    fleet: FleetRecord | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One accuracy metric; `primary` is the one that decides."""

    name: str
    float32: float | None
    int8: float | None
    primary: bool = False
    higher_is_better: bool = True

    @property
    def gain(self) -> float | None:
        """int8 minus float32."""
        return None if self.float32 is None or self.int8 is None else self.int8 - self.float32


@dataclass(frozen=True)
class Variant:
    """One way to run the model that the bundle carries, and its proof, as drawn.

    Attributes:
        sqnr_db, top1: of the worst output; SQNR of its worst slice.
        excluded: nodes that were kept in float on request.
        conversion_us: what conversions between float and int8 take, microseconds.
    """

    name: str
    title: str = ""
    bytes: float | None = None
    native: bool | None = None
    facts: Pairs = ()
    scheme: Pairs = ()
    session_options: Pairs = ()
    excluded: tuple[str, ...] = ()
    coverage: Coverage | None = None
    metrics: tuple[Metric, ...] = ()
    outputs: tuple[OutputAgreement, ...] = ()
    sqnr_db: float | None = None
    top1: float | None = None
    samples: Count | None = None
    held_out: bool | None = None
    timing: Timing | None = None
    layers: tuple[Layer, ...] = ()
    conversion_us: float | None = None
    histograms: tuple[TensorHistogram, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def primary(self) -> Metric | None:
        """The metric that decides; the first where none is named."""
        return next((m for m in self.metrics if m.primary), self.metrics[0] if self.metrics else None)


@dataclass(frozen=True)
class ReportData:
    """All that is drawn."""

    name: str
    variants: tuple[Variant, ...] = ()
    float_bytes: float | None = None
    tuning: Tuning | None = None
    timing: Timing | None = None
    fleet: FleetRecord | None = None
    machine: Pairs = ()
    versions: Pairs = ()
    identity: Pairs = ()
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Variant | None:
        """What the verdict is about: the variant that was timed, else one checked on its own kernels, else any."""
        timed = {m.name for m in self.timing.models} if self.timing else set()
        by_name = [v for v in self.variants if v.name in timed]
        native = [v for v in self.variants if v.native]
        return next(iter([*by_name, *native, *self.variants]), None)
