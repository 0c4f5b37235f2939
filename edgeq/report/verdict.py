"""What it all comes to: one sentence, and the few figures that it rests on."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from edgeq_device.claim import FASTER, SLOWER, UNKNOWN, UNSETTLED, Claim

from edgeq.measure.agreement import HEALTHY_DB
from edgeq.report.numbers import decibels, difference, metric, metric_name, share, size, times
from edgeq.report.read import Metric, ReportData, Variant
from edgeq.report.timing import Latency, Timing
from edgeq.report.tuning import Tuning

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
