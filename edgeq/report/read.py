"""What a report is made of: the record that a bundle keeps, of the types that the pipeline writes, and what is drawn of
it. Everything but the name may be missing; the page then leaves it out. Keys: docs/report.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import Agreement, OutputAgreement
from edgeq.measure.coverage import Coverage, KernelTime
from edgeq.report.histograms import TensorHistogram
from edgeq.report.layers import Layer, LayersRecord, layer_rows
from edgeq.report.numbers import Pairs, pairs, size, string
from edgeq.report.timing import (
    FLOAT,
    INT8,
    BenchReport,
    FleetRecord,
    Speed,
    Timing,
    bench_timing,
    finalists_timing,
    speed_timing,
)
from edgeq.report.tuning import Tuning, tuning_of
from edgeq.report.tuning_record import ModelRecord, TuningRecord
from edgeq.util.records import Count, Finite, Positive, Share, readable


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


_MOST_VARIANTS = 40
_MOST_HISTOGRAMS = 24
_MACHINE = ("cpu_name", "cpu", "board", "architecture", "cores", "threads", "memory_bytes", "os", "system", "governors")


def read_report(plain: Mapping[str, Any]) -> ReportData:
    """Whatever of a record makes sense. Nothing in it is an error: what cannot be used is left out."""
    record = readable(plain, ReportRecord) or ReportRecord()
    tuning = record.tuning or TuningRecord()
    timing = (bench_timing(record.bench) if record.bench else None) or finalists_timing(tuning)
    model = record.model or tuning.model or ModelRecord()
    identity = {**record.identity, "float32 model, sha256": model.sha256 or ""}
    variants = list(record.variants.items())[:_MOST_VARIANTS]
    return ReportData(
        name=record.name or model.name or "model",
        variants=tuple(_variant(name, body) for name, body in variants),
        float_bytes=model.bytes,
        tuning=tuning_of(tuning),
        timing=timing,
        fleet=record.fleet,
        machine=_machine(record.machine or tuning.machine) or (timing.machine if timing else ()),
        versions=pairs(record.versions or tuning.versions, 20) or (timing.versions if timing else ()),
        identity=pairs(identity, 20),
        commands=record.commands[:20],
        notes=record.notes[:40],
    )


def _variant(name: str, record: VariantRecord) -> Variant:
    layers, conversion = layer_rows(record.layers, record.kernels)
    outputs = record.agreement.outputs[:50] if record.agreement else ()
    sqnr = [output.least_db for output in outputs if math.isfinite(output.least_db) and output.same is None]
    top1 = [output.top1 for output in outputs if output.top1 is not None]
    facts = {
        "target": record.target,
        "profile": record.profile,
        "provider": record.provider,
        "engine": record.engine,
        "min_onnxruntime": record.min_onnxruntime,
        "checked": record.checked,
        "16-bit sums": record.saturation.why if record.saturation else "",
    }
    excluded = record.scheme.get("exclude")
    return Variant(
        name=name,
        title=record.title,
        bytes=record.bytes,
        native=record.native,
        facts=pairs(facts, 10),
        scheme=_scheme(record.scheme),
        session_options=pairs(record.session_options, 30),
        excluded=tuple(string(node) for node in excluded[:500]) if isinstance(excluded, list | tuple) else (),
        coverage=record.coverage,
        metrics=_metrics(record.accuracy),
        outputs=outputs,
        sqnr_db=min(sqnr) if sqnr else record.sqnr_db,
        top1=min(top1) if top1 else record.top1_agreement,
        samples=record.samples,
        held_out=record.held_out,
        timing=speed_timing(record.speed) if record.speed else None,
        layers=layers,
        conversion_us=conversion,
        histograms=record.histograms[:_MOST_HISTOGRAMS],
        warnings=record.warnings[:20],
    )


def _scheme(scheme: Mapping[str, Any]) -> Pairs:
    unused = "dynamic_weight_types" if scheme.get("mode") == "static" else "method"
    return tuple((k.replace("_", " "), v) for k, v in pairs(scheme, 30) if k not in ("exclude", unused))


def _metrics(accuracy: Mapping[str, Accuracy]) -> tuple[Metric, ...]:
    before, after = accuracy.get(FLOAT), accuracy.get(INT8)
    known = after or before
    if known is None:
        return ()
    values = [found.metrics if found else {} for found in (before, after)]
    names = list(dict.fromkeys([*values[1], *values[0]]))[:20]
    primary = known.primary if known.primary in names else names[0] if names else ""
    return tuple(
        Metric(
            name[:100],
            values[0].get(name),
            values[1].get(name),
            name == primary,
            known.higher_is_better or name != primary,
        )
        for name in names
    )


def _machine(plain: Mapping[str, Any]) -> Pairs:
    known = {key: plain.get(key) for key in _MACHINE}
    memory = known["memory_bytes"]
    known["memory_bytes"] = size(memory) if isinstance(memory, int) and 0 < memory < 1 << 64 else None
    found = [(key.replace("_bytes", "").replace("_", " "), value) for key, value in pairs(known, 20)]
    gpus = plain.get("gpus")
    for gpu in gpus[:8] if isinstance(gpus, list | tuple) else ():
        found.append(("gpu", string(gpu.get("name")) if isinstance(gpu, Mapping) else ""))
    return tuple((key, value) for key, value in found if value and value != "0")
