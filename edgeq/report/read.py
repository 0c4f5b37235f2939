"""What a report is made of: the record that a bundle keeps, of the types that the pipeline writes, and what is drawn of
it. Everything but the name may be missing; the page then leaves it out. Keys: docs/report.md."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeq_device.claim import FASTER, SLOWER, UNKNOWN, UNSETTLED, Claim

from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import HEALTHY_DB, Agreement, OutputAgreement
from edgeq.measure.coverage import Coverage, KernelTime
from edgeq.report.histograms import TensorHistogram
from edgeq.report.layers import Layer, LayersRecord, layer_rows
from edgeq.report.numbers import Pairs, decibels, difference, metric, metric_name, pairs, share, size, string, times
from edgeq.report.timing import (
    FLOAT,
    INT8,
    BenchReport,
    FleetRecord,
    Latency,
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


Tone = Literal["good", "bad", "neutral"]
_SMALL_LOSS = 0.01
"""A loss of a share-like metric under this is not coloured as bad where no bar was set."""


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, its value, what it is compared with."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "neutral"


@dataclass(frozen=True)
class Verdict:
    """`status` says in one word how it went; `sentence` what came of it.

    Attributes:
        target: which of several targets it is about; "" where there is one.
        commands: what to type to look closer, where something is not good.
    """

    tone: Tone
    status: str
    sentence: str
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...] = ()
    target: str = ""
    commands: tuple[str, ...] = ()


def verdict_of(data: ReportData, variant: Variant | None) -> Verdict:
    """The verdict on one variant; on the tuning run alone where there is no variant."""
    timing, tuning = timing_of(data, variant), data.tuning if variant is data.main else None
    speed, accuracy, agreement = _speed(timing, variant), _accuracy(variant, tuning), _agreement(variant)
    shown = (speed, accuracy, agreement, _size(data, variant), _coverage(variant))
    parts = [p for p in (_speed_text(timing, variant), _accuracy_text(variant), _size_text(data, variant)) if p]
    slow, poor = _is_bad(speed), _is_bad(accuracy) or _is_bad(agreement)
    warnings = variant.warnings if variant else ()
    tone: Tone = "neutral" if warnings else "good"
    status, sentence = "Result", f"The int8 model {_listed(parts)}."
    if tuning is not None and tuning.met is False:
        tone, status = "bad", "Goal not met"
        sentence = "Nothing that was tried keeps the accuracy asked for and is faster than float32."
    elif not parts:
        tone, status, sentence = "neutral", "No measurements", "Nothing has been measured of this model yet."
    elif slow or poor:
        tone, status = "bad", "Look closer"
    elif tuning is not None and tuning.met:
        claim = _claim(timing, variant)
        unknown = claim is not None and claim.verdict == UNKNOWN
        tone, status = ("neutral", "Speed unknown") if unknown else ("good", "Goal met")
    return Verdict(
        tone,
        status,
        sentence,
        tuple(figure for figure in shown if figure is not None),
        warnings,
        target=(variant.title or variant.name) if variant is not None and len(data.variants) > 1 else "",
        commands=_closer(data, variant, slow=slow, poor=poor, missed=status == "Goal not met"),
    )


def _is_bad(figure: Figure | None) -> bool:
    return figure is not None and figure.tone == "bad"


def _closer(data: ReportData, variant: Variant | None, *, slow: bool, poor: bool, missed: bool) -> tuple[str, ...]:
    """The command lines that show what is behind a bad verdict. MODEL.onnx is the float32 model."""
    named = f" --variant {shlex.quote(variant.name)}" if variant is not None and len(data.variants) > 1 else ""
    lines = {
        f"edgeq debug MODEL.onnx BUNDLE{named} --data SAMPLES": poor,
        f"edgeq report BUNDLE --bench{named}": slow,
        "edgeq tune MODEL.onnx --data SAMPLES --max-drop MORE --resume -o BUNDLE": missed,
    }
    return tuple(line for line, wanted in lines.items() if wanted)


def timing_of(data: ReportData, variant: Variant | None) -> Timing | None:
    """The variant's own timing, else the report's where it is about this variant."""
    if variant is not None and variant.timing is not None and data.timing is None:
        return variant.timing
    timing = data.timing
    if timing is None or variant is None or len(data.variants) <= 1:
        return timing
    return timing if any(m.name == variant.name for m in timing.models) else variant.timing


def compared(timing: Timing | None, variant: Variant | None) -> tuple[Latency, Latency] | None:
    """The baseline's latency and the int8 model's."""
    if timing is None:
        return None
    base = next((m for m in timing.models if m.name == timing.baseline), None)
    others = [m for m in timing.models if m.name != timing.baseline]
    mine = [m for m in others if variant is not None and m.name == variant.name] or others
    return (base, mine[0]) if base is not None and mine else None


def _claim(timing: Timing | None, variant: Variant | None) -> Claim | None:
    """What can be claimed of its speed; None where it was not timed beside float32."""
    pair = compared(timing, variant)
    return timing.ratios.get(pair[1].name) if timing is not None and pair is not None else None


def _speed(timing: Timing | None, variant: Variant | None) -> Figure | None:
    found = _claim(timing, variant)
    if found is None:
        return None
    if found.interval is None:
        return Figure("Speed", "not measurable", found.reason or f"only {found.pairs} pairs of runs")
    tone: Tone = "good" if found.verdict == FASTER else "bad" if found.verdict == SLOWER else "neutral"
    return Figure("Speed", times(found.interval[0]), found.figures(), tone)


def _speed_text(timing: Timing | None, variant: Variant | None) -> str:
    found = _claim(timing, variant)
    if found is None or found.interval is None:
        return ""
    if found.verdict == UNSETTLED:
        return "is about as fast as float32 here"
    ratio = times(found.interval[0])
    return f"runs {ratio} as fast as float32" if found.verdict == FASTER else f"is slower than float32 ({ratio})"


def _accuracy(variant: Variant | None, tuning: Tuning | None) -> Figure | None:
    primary = variant.primary if variant else None
    if primary is None or primary.int8 is None:
        return None
    if primary.gain is None:
        return Figure(metric_name(primary.name), metric(primary.name, primary.int8))
    return Figure(
        metric_name(primary.name),
        metric(primary.name, primary.int8),
        f"{difference(primary.name, primary.gain)} against float32's {metric(primary.name, primary.float32 or 0.0)}",
        _accuracy_tone(primary, tuning),
    )


def _accuracy_tone(primary: Metric, tuning: Tuning | None) -> Tone:
    """By what was asked of the tuning run; where nothing was asked, by what is usually put up with."""
    gain = primary.gain or 0.0
    lost = -gain if primary.higher_is_better else gain
    if lost <= 0:
        return "good"
    if tuning is not None and tuning.metric == primary.name and tuning.allowed_loss is not None:
        return "good" if lost <= tuning.allowed_loss else "bad"
    scale = abs(primary.float32 or 0.0) or 1.0
    return "good" if lost <= _SMALL_LOSS * min(1.0, scale) else "bad"


def _accuracy_text(variant: Variant | None) -> str:
    if variant is None:
        return ""
    primary = variant.primary
    if primary is not None and primary.gain is not None and primary.int8 is not None:
        shown = metric(primary.name, primary.int8)
        name = metric_name(primary.name)
        change = difference(primary.name, primary.gain)
        if change.startswith("0"):
            return f"keeps float32's {name} of {shown}"
        better = (primary.gain > 0) == primary.higher_is_better
        return f"{'gains' if better else 'loses'} {change.lstrip('+−')} of {name} ({shown})"
    if variant.top1 is not None:
        return f"gives float32's top answer in {share(variant.top1)} of the samples"
    if variant.sqnr_db is not None:
        return f"follows float32's outputs at {decibels(variant.sqnr_db)} SQNR"
    return ""


def _agreement(variant: Variant | None) -> Figure | None:
    if variant is None or (variant.sqnr_db is None and variant.top1 is None):
        return None
    seen = f"{variant.samples} samples" if variant.samples else ""
    if variant.samples and variant.held_out is False:
        seen = f"{seen}, those of the calibration"
    if variant.sqnr_db is None:
        return Figure("Same top answer", share(variant.top1 or 0.0), seen)
    tone: Tone = "bad" if variant.primary is None and variant.sqnr_db < HEALTHY_DB else "neutral"
    top = f"same top answer in {share(variant.top1)}" if variant.top1 is not None else ""
    return Figure("Output SQNR", decibels(variant.sqnr_db), ", ".join(x for x in (top, seen) if x), tone)


def _size(data: ReportData, variant: Variant | None) -> Figure | None:
    if variant is None or variant.bytes is None:
        return None
    if data.float_bytes is None:
        return Figure("Size", size(variant.bytes))
    ratio = variant.bytes / data.float_bytes
    return Figure("Size", size(variant.bytes), f"{ratio:.2f} of float32's {size(data.float_bytes)}")


def _size_text(data: ReportData, variant: Variant | None) -> str:
    if variant is None or variant.bytes is None or data.float_bytes is None:
        return ""
    ratio = variant.bytes / data.float_bytes
    return f"takes {share(ratio, 0)} of its space"


def _coverage(variant: Variant | None) -> Figure | None:
    if variant is None or variant.coverage is None:
        return None
    coverage = variant.coverage
    if coverage.int8_mac_share is None:
        return Figure("In int8", "not known", coverage.how)
    origin = coverage.origin or "as they really run"
    return Figure("In int8", share(coverage.int8_mac_share), f"of the multiply-accumulates, {origin}")


def _listed(parts: list[str]) -> str:
    return "".join(parts) if len(parts) < 2 else f"{', '.join(parts[:-1])} and {parts[-1]}"
