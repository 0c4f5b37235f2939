"""Read the content of a report from the record in a bundle. The record has the types that the pipeline writes.
Everything except the names of variants may be missing, and the page leaves out missing parts. docs/report.md lists the
keys.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from edgeq_device.measure.claim import FASTER, SLOWER, UNKNOWN, UNSETTLED, Claim

from edgeq.arguments import as_options
from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import HEALTHY_DB, Agreement, OutputAgreement
from edgeq.measure.answer_meter import HEALTHY
from edgeq.measure.answer_task import FloatAnswers
from edgeq.measure.coverage import Coverage
from edgeq.measure.kernel_times import KernelTime
from edgeq.reporting.figures import Pairs, pairs, string
from edgeq.reporting.layers import LayersRecord, LayerView, TensorHistogram, layer_rows
from edgeq.reporting.timing import (
    INT8,
    BenchReport,
    FleetRecord,
    SpeedRecord,
    TimingRecord,
    bench_timing,
    finalists_timing,
    speed_timing,
)
from edgeq.reporting.tuning_record import FLOAT, ModelRecord, TuningRecord
from edgeq.util.numbers import decibels, difference, metric, metric_name, share, size, times
from edgeq.util.records import Count, Finite, Positive, Share, readable


@dataclass(frozen=True)
class Saturation:
    """Hold a sentence on the decision about saturating kernels."""

    why: str = ""


@dataclass(frozen=True)
class Metric:
    """Hold one accuracy metric. `primary` is True for the metric that decides the verdict."""

    name: str
    float32: float | None
    int8: float | None
    primary: bool = False
    higher_is_better: bool = True

    @property
    def gain(self) -> float | None:
        """Return int8 minus float32."""
        return None if self.float32 is None or self.int8 is None else self.int8 - self.float32


# Bounds on what an untrusted record makes the page draw.
_MOST_PICTURES = 8
_MOST_VARIANTS, _MOST_OUTPUTS, _MOST_METRICS = 40, 50, 20


@dataclass(frozen=True)
class Repaired:
    """Hold a sentence on the repair of a poor result."""

    sentence: str = ""


_URI = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]{1,400000}={0,2}")


@dataclass(frozen=True)
class PicturePair:
    """Hold one image with the answers of both models.

    Attributes:
        sample: name of the image.
        figure: the primary figure of this image, from 0 to 1.
        float32, int8: the drawings as data URIs of JPEG files.
    """

    sample: str = ""
    figure: Finite = 0.0
    float32: str = ""
    int8: str = ""

    @property
    def safe(self) -> bool:
        """Return whether both drawings are data URIs of JPEG files. A record may be untrusted."""
        return all(_URI.fullmatch(uri) for uri in (self.float32, self.int8))


@dataclass(frozen=True)
class VariantRecord:
    """Describe one way to run the model, and its proof. The keys are those of the JSON of `edgeq package`, and also the
    name, `title`, `layers`, `kernels` and `histograms`. All but the name may be missing.

    Attributes:
        sqnr_db, top1_agreement: the manifest's figures, used if there is no `agreement`.
        checked: the checks, and the kernels on which they ran.
    """

    name: str = ""
    title: str = ""
    target: str | None = None
    profile: str | None = None
    provider: str | None = None
    engine: str | None = None
    min_onnxruntime: str | None = None
    checked: str = ""
    saturation: Saturation | None = None
    repair: Repaired | None = None
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
    speed: SpeedRecord | None = None
    layers: LayersRecord | None = None
    kernels: Mapping[str, tuple[KernelTime, ...]] = field(default_factory=dict)
    histograms: tuple[TensorHistogram, ...] = ()
    pictures: tuple[PicturePair, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def drawn_pictures(self) -> tuple[PicturePair, ...]:
        """Return the pictures that are safe to show."""
        return tuple(pair for pair in self.pictures[:_MOST_PICTURES] if pair.safe)

    @property
    def facts(self) -> Pairs:
        """Return where the variant runs and how it was checked."""
        values = {name: getattr(self, name) for name in ("target", "profile", "provider", "engine", "min_onnxruntime")}
        sums = self.saturation.why if self.saturation else ""
        repair = self.repair.sentence if self.repair else ""
        return pairs({**values, "checked": self.checked, "16-bit sums": sums, "repair": repair}, 10)

    @property
    def scheme_facts(self) -> Pairs:
        """Return how the variant is quantized, without fields that have no meaning in its mode."""
        # A scheme has fields for every mode. Those of another mode have their defaults and decide nothing.
        unused = "dynamic_weight_types" if self.scheme.get("mode") == "static" else "method"
        facts = pairs(self.scheme, 30)
        hidden = ("exclude", "exclude_reasons", unused)
        return tuple((key.replace("_", " "), value) for key, value in facts if key not in hidden)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Return the nodes that the scheme keeps in float. Text after a node states why edgeq itself chose the node."""
        nodes, reasons = self.scheme.get("exclude"), self.scheme.get("exclude_reasons")
        # A record may be untrusted, and its scheme may have any form.
        reasons_by_node = reasons if isinstance(reasons, Mapping) else {}
        listed = nodes[:500] if isinstance(nodes, list | tuple) else ()
        named = (
            (string(node), string(reasons_by_node.get(node) if isinstance(node, str) else None)) for node in listed
        )
        return tuple(f"{name}: {reason}" if reason else name for name, reason in named)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of both models, in the order in which the int8 model has them."""
        accuracies = [self.accuracy.get(name) for name in (INT8, FLOAT)]
        int8_values, float_values = (accuracy.metrics if accuracy else {} for accuracy in accuracies)
        names = list(dict.fromkeys([*int8_values, *float_values]))[:_MOST_METRICS]
        # A record may have the accuracy of only one of the models.
        available = accuracies[0] or accuracies[1]
        if available is None or not names:
            return ()
        primary = available.primary if available.primary in names else names[0]
        return tuple(
            Metric(
                n[:100],
                float_values.get(n),
                int8_values.get(n),
                n == primary,
                # A record states this only for the primary metric. Most other metrics are better if they are higher.
                available.higher_is_better or n != primary,
            )
            for n in names
        )

    @property
    def primary(self) -> Metric | None:
        """Return the primary metric, which decides the verdict."""
        return next((metric for metric in self.metrics if metric.primary), None)

    @property
    def by_answers(self) -> bool:
        """Return whether the accuracy is that of giving float32's answers again, not one by labels."""
        return any(accuracy.task == FloatAnswers.name for accuracy in self.accuracy.values())

    @property
    def outputs(self) -> tuple[OutputAgreement, ...]:
        """Return how closely each output matches that of float32."""
        return self.agreement.outputs[:_MOST_OUTPUTS] if self.agreement else ()

    @property
    def worst_db(self) -> float | None:
        """Return the SQNR of the worst output or slice in dB."""
        decibels = [
            # Integers have no SQNR, and that of identical outputs is infinite.
            output.least_db
            for output in self.outputs
            if math.isfinite(output.least_db) and output.same is None
        ]
        return min(decibels, default=self.sqnr_db)

    @property
    def top1(self) -> float | None:
        """Return the lowest top-1 agreement of an output: the share of samples whose top-1 is the float32 model's."""
        return min((output.top1 for output in self.outputs if output.top1 is not None), default=self.top1_agreement)

    @property
    def timing(self) -> TimingRecord | None:
        """Return the latencies in the variant's proof."""
        return speed_timing(self.speed) if self.speed else None

    @cached_property
    def drawn_layers(self) -> tuple[tuple[LayerView, ...], float | None]:
        """Return the variant's layers in execution order, and the time of conversions between float and int8 in
        microseconds.
        """
        layers = self.layers
        # In a model that is close to float32, the layers that lose most lose little, so none needs to be mended.
        return layer_rows(replace(layers, error_sources=()) if layers and self.healthy else layers, self.kernels)

    @property
    def healthy(self) -> bool:
        """Return whether the outputs follow float32's closely and no accuracy is lost."""
        primary = self.primary
        is_close = self.worst_db is not None and self.worst_db >= HEALTHY_DB
        return is_close and (primary is None or _accuracy_tone(self, primary, None) == "good")


@dataclass(frozen=True)
class ReportRecord:
    """Hold report.json, with tuning.json as `tuning`. `bench`, `fleet` and `machine` are set only if they were measured
    for this page.
    """

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
class ReportData:
    """Hold all the data that the page shows."""

    name: str
    variants: tuple[VariantRecord, ...] = ()
    float_bytes: float | None = None
    tuning: TuningRecord | None = None
    timing: TimingRecord | None = None
    fleet: FleetRecord | None = None
    machine: Pairs = ()
    versions: Pairs = ()
    identity: Pairs = ()
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> VariantRecord | None:
        """Return the variant that the verdict is about: a variant that was timed, or else one that was checked on its
        own kernels, or else the first variant.
        """
        timed = self.timing.models if self.timing else {}
        by_name = [v for v in self.variants if v.name in timed]
        native = [v for v in self.variants if v.native]
        return next(iter([*by_name, *native, *self.variants]), None)


# Facts about the machine, in the order of the page.
_MACHINE = ("cpu_name", "cpu", "board", "architecture", "cores", "threads", "memory_bytes", "os", "system", "governors")


_FORMER = {"count": "samples", "culprits": "error_sources"}
"""Current names of keys, by the names that edgeq 0.2 and older wrote."""


def _rename_keys(part: Any) -> Any:
    """Return a part of a variant's record with the current names of its keys."""
    return {_FORMER.get(key, key): value for key, value in part.items()} if isinstance(part, Mapping) else part


def _update_keys(body: Any) -> Any:
    """Return a variant's record in which the former keys of `accuracy`, `agreement` and `layers` are replaced."""
    if not isinstance(body, Mapping):
        return body
    parts = {name: _rename_keys(body[name]) for name in ("agreement", "layers") if name in body}
    if isinstance(accuracy := body.get("accuracy"), Mapping):
        parts["accuracy"] = {name: _rename_keys(values) for name, values in accuracy.items()}
    return {**body, **parts}


def read_report(values: Mapping[str, Any]) -> ReportData:
    """Read the valid parts of a record. Invalid parts are left out and never raise an error."""
    if isinstance(variants := values.get("variants"), Mapping):
        values = {**values, "variants": {name: _update_keys(body) for name, body in variants.items()}}
    record = readable(values, ReportRecord) or ReportRecord()
    tuning = record.tuning or TuningRecord()
    timing = bench_timing(record.bench) if record.bench else None
    # A measurement for this page is newer than the one of the tuning run.
    if timing is None and record.tuning is not None:
        timing = finalists_timing(tuning)
    model = record.model or tuning.model or ModelRecord()
    identity = {**record.identity, "float32 model, sha256": model.sha256 or ""}
    return ReportData(
        name=record.name or model.name or "model",
        variants=tuple(replace(body, name=name) for name, body in list(record.variants.items())[:_MOST_VARIANTS]),
        float_bytes=model.bytes,
        # Without candidates there is nothing to draw.
        tuning=tuning if tuning.candidates else None,
        timing=timing,
        fleet=record.fleet,
        machine=_machine(record.machine or tuning.machine) or (timing.machine if timing else ()),
        versions=pairs(record.versions or tuning.versions, 20) or (timing.versions if timing else ()),
        identity=pairs(identity, 20),
        commands=record.commands[:20],
        notes=record.notes[:40],
    )


def _machine(record: Mapping[str, Any]) -> Pairs:
    values = {key: record.get(key) for key in _MACHINE}
    memory = values["memory_bytes"]
    # The record may be untrusted: a number of more than 64 bits is not the size of a memory.
    values["memory_bytes"] = size(memory) if isinstance(memory, int) and 0 < memory < 1 << 64 else None
    facts = [(key.replace("_bytes", "").replace("_", " "), value) for key, value in pairs(values, 20)]
    gpus = record.get("gpus")
    for gpu in gpus[:8] if isinstance(gpus, list | tuple) else ():
        facts.append(("gpu", string(gpu.get("name")) if isinstance(gpu, Mapping) else ""))
    # Zero cores or bytes mean that the number is not known.
    return tuple((key, value) for key, value in facts if value and value != "0")


Tone = Literal["good", "bad", "neutral"]
_SMALL_LOSS = 0.01
"""If no limit is set, a loss below this value is not coloured as bad. This applies to metrics that are shares."""


@dataclass(frozen=True)
class Figure:
    """Describe one figure by its label, its value, and a note on what the value is compared with."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "neutral"


@dataclass(frozen=True)
class ReportVerdict:
    """Hold the result. `status` names it in a word or two; `sentence` explains it.

    Attributes:
        target: the target that the verdict is about, or "" if there is only one target.
        commands: commands that help to find the cause of a bad result.
    """

    tone: Tone
    status: str
    sentence: str
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...] = ()
    target: str = ""
    commands: tuple[str, ...] = ()


def verdict_of(data: ReportData, variant: VariantRecord | None) -> ReportVerdict:
    """Return the verdict on one variant. If there is no variant, the verdict is only about the tuning run."""
    timing, tuning = timing_of(data, variant), data.tuning if variant is data.main else None
    variant = variant or VariantRecord()
    claim = _claim(timing, variant)
    speed, accuracy, agreement = _speed_figure(claim), _accuracy_figure(variant, tuning), _agreement_figure(variant)
    ratio = variant.bytes / data.float_bytes if variant.bytes and data.float_bytes else None
    figures = (speed, accuracy, agreement, _size_figure(data, variant, ratio), _coverage_figure(variant.coverage))
    of_space = "" if ratio is None else f"takes {share(ratio, 0)} of its space"
    parts = [part for part in (_speed_text(claim), _accuracy_text(variant), of_space) if part]
    # Size and coverage have no limit here, so they cannot make a verdict bad.
    slow, *poor_figures = (figure is not None and figure.tone == "bad" for figure in (speed, accuracy, agreement))
    poor = any(poor_figures)
    unproven = claim is not None and claim.estimated is not None
    warnings = (*variant.warnings[:20], *([f"the speed is unproven: {claim.reason}"] if claim and unproven else []))
    # A green verdict would make readers skip the warnings.
    tone: Tone = "neutral" if warnings else "good"
    status, sentence = "Result", f"The int8 model {_join_phrases(parts)}."
    # The first rule that applies decides: a missed goal outweighs single figures, and a bad figure outweighs a goal
    # that was met.
    if tuning is not None and tuning.met is False:
        tone, status = "bad", "Goal not met"
        sentence = "No candidate keeps the required accuracy and is faster than float32."
        if tuning.chosen:
            sentence += f" {tuning.chosen} comes closest."
    elif not parts:
        tone, status, sentence = "neutral", "No measurements", "This model has not been measured yet."
    elif slow or poor:
        tone, status = "bad", "Look closer"
    elif tuning is not None and tuning.met:
        unknown = claim is not None and claim.verdict == UNKNOWN
        tone, status = ("neutral", "Speed unproven") if unknown else ("good", "Goal met")
        # If nobody showed that the model is faster, doubts about its accuracy come second.
        if not unknown and tuning.doubts:
            tone, status = "neutral", "Accuracy in doubt"
    return ReportVerdict(
        tone,
        status,
        sentence,
        tuple(figure for figure in figures if figure is not None),
        warnings,
        target=(variant.title or variant.name) if len(data.variants) > 1 else "",
        commands=tuple(map(as_options, _closer(data, variant, slow=slow, poor=poor, missed=status == "Goal not met"))),
    )


def _closer(data: ReportData, variant: VariantRecord, *, slow: bool, poor: bool, missed: bool) -> Iterator[str]:
    """Yield the commands that show the cause of a bad verdict. MODEL.onnx is the float32 model."""
    named = f" ⟨variant⟩ {shlex.quote(variant.name)}" if variant.name and len(data.variants) > 1 else ""
    if poor:
        yield f"edgeq debug MODEL.onnx BUNDLE{named} ⟨data⟩ SAMPLES"
    if slow:
        yield f"edgeq report BUNDLE ⟨bench⟩{named}"
    if missed:
        # A run that chose a candidate wrote a bundle, which the next run has to replace.
        over = "⟨force=True⟩ " if data.tuning is not None and data.tuning.chosen else ""
        yield f"edgeq tune MODEL.onnx ⟨data⟩ SAMPLES ⟨max_drop⟩ MORE ⟨resume=True⟩ {over}-o BUNDLE"


def timing_of(data: ReportData, variant: VariantRecord | None) -> TimingRecord | None:
    """Return the report's timing if it is about this variant. Otherwise return the variant's own timing."""
    if variant is not None and variant.timing is not None and data.timing is None:
        return variant.timing
    timing = data.timing
    # With several variants, the report's timing may be about another variant.
    if timing is None or variant is None or len(data.variants) <= 1:
        return timing
    return timing if variant.name in timing.models else variant.timing


def compared_model(timing: TimingRecord | None, variant: VariantRecord) -> str:
    """Return the name of the model that `timing` compares with the baseline. This is the variant, or else the first
    model that is not the baseline. Return "" if there is none.
    """
    if timing is None or timing.baseline not in timing.models:
        return ""
    names = [name for name in timing.models if name != timing.baseline]
    return variant.name if variant.name in names else next(iter(names), "")


def _claim(timing: TimingRecord | None, variant: VariantRecord) -> Claim | None:
    """Return the claim that can be made about the variant's speed, or None if the variant was not timed against
    float32.
    """
    return timing.ratios.get(compared_model(timing, variant)) if timing is not None else None


def _speed_figure(claim: Claim | None) -> Figure | None:
    if claim is None:
        return None
    about = claim.estimated
    if about is not None:
        return Figure("Speed", f"about {times(about[0])}", f"unproven: {claim.figures()}")
    if claim.interval is None:
        return Figure("Speed", "not measurable", claim.reason or f"only {claim.pairs} pairs of runs")
    tone: Tone = "good" if claim.verdict == FASTER else "bad" if claim.verdict == SLOWER else "neutral"
    return Figure("Speed", times(claim.interval[0]), claim.figures(), tone)


def _speed_text(claim: Claim | None) -> str:
    if claim is not None and claim.estimated is not None:
        return f"runs at about {times(claim.estimated[0])} the speed of float32, estimated and unproven"
    if claim is None or claim.interval is None:
        return ""
    if claim.verdict == UNSETTLED:
        return "is about as fast as float32 here"
    ratio = times(claim.interval[0])
    return f"runs {ratio} as fast as float32" if claim.verdict == FASTER else f"is slower than float32 ({ratio})"


def _accuracy_figure(variant: VariantRecord, tuning: TuningRecord | None) -> Figure | None:
    primary = variant.primary
    if primary is None or primary.int8 is None:
        return None
    name, value = metric_name(primary.name), metric(primary.name, primary.int8)
    if primary.gain is None:
        return Figure(name, value)
    change, float_value = difference(primary.name, primary.gain), metric(primary.name, primary.float32 or 0.0)
    return Figure(name, value, f"{change} against float32's {float_value}", _accuracy_tone(variant, primary, tuning))


def _accuracy_tone(variant: VariantRecord, primary: Metric, tuning: TuningRecord | None) -> Tone:
    """Return the colour for the loss of accuracy. The loss is compared with the goal of the tuning run or, without a
    goal, with a loss that is usually accepted.
    """
    gain = primary.gain or 0.0
    lost = -gain if primary.higher_is_better else gain
    if lost <= 0:
        return "good"
    limit = tuning.goal.max_drop if tuning is not None and tuning.metric.name == primary.name else None
    if limit is not None:
        return "good" if lost <= limit else "bad"
    if variant.by_answers:
        return "good" if (primary.int8 or 0.0) >= HEALTHY.get(primary.name, 1.0) else "bad"
    scale = abs(primary.float32 or 0.0) or 1.0
    # Where float32 itself is right in few cases, a point is a larger part of that.
    return "good" if lost <= _SMALL_LOSS * min(1.0, scale) else "bad"


def _accuracy_text(variant: VariantRecord) -> str:
    primary = variant.primary
    if primary is not None and primary.gain is not None and primary.int8 is not None:
        value = metric(primary.name, primary.int8)
        name = metric_name(primary.name)
        change = difference(primary.name, primary.gain)
        # A loss that rounds to nothing must not read as a loss.
        if change.startswith("0"):
            return f"keeps float32's {name} of {value}"
        if variant.by_answers:
            return f"gives {value} of float32's answers again"
        better = (primary.gain > 0) == primary.higher_is_better
        return f"{'gains' if better else 'loses'} {change.lstrip('+−')} of {name} ({value})"
    if variant.top1 is not None:
        return f"gives float32's top answer in {share(variant.top1)} of the samples"
    if variant.worst_db is not None:
        return f"follows float32's outputs at {decibels(variant.worst_db)} SQNR"
    return ""


def _agreement_figure(variant: VariantRecord) -> Figure | None:
    if variant.worst_db is None and variant.top1 is None:
        return None
    samples = f"{variant.samples} samples" if variant.samples else ""
    if variant.samples and variant.held_out is False:
        samples = f"{samples} of the calibration"
    if variant.worst_db is None:
        return Figure("Same top answer", share(variant.top1 or 0.0), samples)
    # With labels, accuracy decides, and noise alone is not bad.
    tone: Tone = "bad" if variant.primary is None and variant.worst_db < HEALTHY_DB else "neutral"
    top = f"same top answer in {share(variant.top1)}" if variant.top1 is not None else ""
    return Figure("Output SQNR", decibels(variant.worst_db), ", ".join(x for x in (top, samples) if x), tone)


def _size_figure(data: ReportData, variant: VariantRecord, ratio: float | None) -> Figure | None:
    if variant.bytes is None:
        return None
    note = "" if ratio is None else f"{ratio:.2f} of float32's {size(data.float_bytes or 0)}"
    return Figure("Size", size(variant.bytes), note)


def _coverage_figure(coverage: Coverage | None) -> Figure | None:
    if coverage is None:
        return None
    if coverage.int8_mac_share is None:
        return Figure("In int8", "not known", coverage.how)
    origin = coverage.origin or "measured"
    return Figure("In int8", share(coverage.int8_mac_share), f"of the multiply-accumulates, {origin}")


def _join_phrases(parts: list[str]) -> str:
    return "".join(parts) if len(parts) < 2 else f"{', '.join(parts[:-1])} and {parts[-1]}"
