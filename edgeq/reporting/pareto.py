"""Plot latency against accuracy, with a mark for every candidate that was measured, including the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from edgeq.reporting.figures import (
    EM,
    Box,
    Scale,
    axis_width,
    figure,
    fitted,
    join,
    label,
    place_label,
    scale_for,
    tag,
    text_width,
    x_axis,
    y_axis,
)
from edgeq.reporting.tuning_record import TrialRecord, TuningRecord
from edgeq.util.numbers import difference, is_share, metric, metric_name, milliseconds

# The shapes differ as well as the colours, for readers who cannot tell the colours apart.
SHAPES = {
    "chosen": "M0,-9L9,0L0,9L-9,0Z",
    "float32": "M-6,-6H6V6H-6Z",
    "front": "M-5.5,0A5.5,5.5 0 1 1 5.5,0A5.5,5.5 0 1 1 -5.5,0Z",
    "behind": "M-4.5,0A4.5,4.5 0 1 1 4.5,0A4.5,4.5 0 1 1 -4.5,0Z",
    "short": "M-4.5,-4.5L4.5,4.5M-4.5,4.5L4.5,-4.5",
    "slow": "M-4.5,-4.5L4.5,4.5M-4.5,4.5L4.5,-4.5",
    "dropped": "M-4.5,-4.5L4.5,4.5M-4.5,4.5L4.5,-4.5",
    "off": "M-5,-4H5L0,5Z",
}
NAMES = {
    "chosen": "chosen",
    "float32": "float32",
    "front": "on the front: none is both faster and more accurate",
    "behind": "behind the front",
    "short": "ruled out",
    "off": "less accurate than the plot shows",
}
# A pattern for each engine. A fourth engine gets the first pattern again.
_DASHES = (None, "5 3", "1.5 3")
# A mark covers those drawn before it, so the important marks come last.
_DRAWN_LAST = ("float32", "front", "chosen")
_WINDOW = 5.0
"""The accuracy axis extends below the best candidate by this many times the allowed loss. Worse candidates are drawn at
the edge of the axis.
"""


@dataclass(frozen=True)
class _Point:
    index: int
    trial: TrialRecord
    x: float
    y: float
    off: bool


def mark(status: str, x: float = 0, y: float = 0) -> Markup:
    """Return the shape that marks a status."""
    shape = status if status in SHAPES else "behind"
    moved = f"translate({x:.1f} {y:.1f})" if x or y else None
    return tag("path", d=SHAPES[shape], class_=f"mark {shape}", transform=moved)


def ring(engine: str, engines: Sequence[str], x: float = 0, y: float = 0) -> Markup:
    """Return the ring around the mark of a candidate that runs in `engine`. Return empty markup if `engine` is not in
    `engines`.
    """
    if engine not in engines:
        return Markup()
    dashes = _DASHES[engines.index(engine) % len(_DASHES)]
    return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=10, class_="mark ring", stroke_dasharray=dashes)


def pareto(tuning: TuningRecord, width: float, height: float) -> Markup:
    """Draw the plot. Return empty markup if fewer than two candidates have both a latency and an accuracy.

    Each mark carries `data-candidate`, its index in `tuning.drawn`, and can be reached with the keyboard. A candidate
    that was ruled out on part of the samples has no mark, because its accuracy cannot be compared with that of the
    others.
    """
    factor = 100.0 if is_share(tuning.metric.name) else 1.0
    complete = [(i, trial) for i, trial in enumerate(tuning.drawn) if not trial.partial]
    figures = ((i, trial, tuning.latency_of(trial), tuning.accuracy_of(trial)) for i, trial in complete)
    measured = [
        (i, trial, ms, factor * value) for i, trial, ms, value in figures if ms is not None and value is not None
    ]
    # One point shows no trade-off.
    if len(measured) < 2:
        return Markup()
    ys = _accuracy_scale(tuning, [(trial.mark, y) for _, trial, _, y in measured], factor, height - 52.0, 30.0)
    margin = axis_width(ys)
    xs = scale_for([ms for _, _, ms, _ in measured], margin, width - 14.0)
    frame = Box(margin, ys.end, xs.end - margin, ys.start - ys.end)
    points = [_Point(i, trial, xs(ms), ys(y), not 0 <= ys.share(y) <= 1) for i, trial, ms, y in measured]
    points.sort(key=lambda p: _DRAWN_LAST.index(p.trial.mark) + 1 if p.trial.mark in _DRAWN_LAST else 0)
    steps = [(p.x, p.y) for p in sorted(points, key=lambda p: p.x) if p.trial.pareto]
    bar = None if tuning.least_accuracy is None else Box(margin, ys(factor * tuning.least_accuracy) - 1, frame.width, 2)
    unit = " (%)" if factor == 100 else ""
    direction = "" if tuning.metric.higher_is_better else ", lower is better"
    name = metric_name(tuning.metric.name)
    return figure(
        width,
        height,
        f"Scatter plot of {len(points)} candidates: median latency against {name}",
        x_axis(xs, ys.start, ys.end, "median latency (ms)"),
        y_axis(ys, margin, xs.end, f"{name}{unit}{direction}"),
        _front(steps),
        _bar(tuning, ys, xs, factor),
        _labels(points, frame, _lines(steps, bar)),
        join(_mark(p, tuning) for p in points),
        class_="pareto",
    )


def measured_texts(trial: TrialRecord, tuning: TuningRecord) -> list[str]:
    """Return the latency and accuracy as texts, if they are known."""
    latency, accuracy = tuning.latency_of(trial), accuracy_text(trial, tuning)
    texts = [milliseconds(latency)] if latency else []
    return [*texts, f"{metric_name(tuning.metric.name)} {accuracy}"] if accuracy else texts


def accuracy_text(trial: TrialRecord, tuning: TuningRecord) -> str:
    """Return a candidate's accuracy as text. If only its loss on part of the samples is known, return that loss. If
    neither is known, return "".
    """
    value, name = tuning.accuracy_of(trial), tuning.metric.name
    if value is None:
        return ""
    if trial.accuracy is None or not trial.partial:
        return metric(name, value)
    return f"{difference(name, -trial.accuracy.drop)} on {trial.accuracy.samples}"


def _accuracy_scale(
    tuning: TuningRecord, measured: Sequence[tuple[str, float]], factor: float, start: float, end: float
) -> Scale:
    """Return the scale for `measured`. Each item contains a candidate's mark, and the candidate's accuracy multiplied
    by `factor`.
    """
    values = [y for _, y in measured]
    sign = 1.0 if tuning.metric.higher_is_better else -1.0
    best = max(values, key=lambda v: sign * v)
    if tuning.least_accuracy is not None:
        bar = factor * tuning.least_accuracy
        # Readers look for these marks, so none of them is off the scale.
        keep = [y for status, y in measured if status in ("chosen", "front", "float32")] + [bar]
        window = max(_WINDOW * abs(best - bar), *(abs(best - v) for v in keep))
        values = [v for v in values if sign * (best - v) <= window] + [bar]
    return scale_for(values, start, end, log=False, pad=0.08)


def _bar(tuning: TuningRecord, ys: Scale, xs: Scale, factor: float) -> Markup | None:
    if tuning.least_accuracy is None:
        return None
    y = ys(factor * tuning.least_accuracy)
    text = "at least" if tuning.metric.higher_is_better else "at most"
    title = f"{text} {metric(tuning.metric.name, tuning.least_accuracy)}"
    # The text goes below the line if it fits into the plot there.
    below = y + EM * 1.2 if y + EM * 1.4 < ys.start else y - 5
    return join(
        [
            tag("line", x1=xs.start, x2=xs.end, y1=y, y2=y, class_="asked"),
            label(xs.end, below, title, anchor="end", class_="asked-label"),
        ]
    )


def _front(steps: Sequence[tuple[float, float]]) -> Markup | None:
    """Return the Pareto front as a staircase through `steps`."""
    if len(steps) < 2:
        return None
    # Between two candidates of the front there is none, so the line has steps instead of slopes.
    (x, y), *further = steps
    return tag(
        "path", d="".join([f"M{x:.1f},{y:.1f}", *(f"H{x:.1f}V{y:.1f}" for x, y in further)]), class_="front-line"
    )


def _lines(steps: Sequence[tuple[float, float]], bar: Box | None) -> list[Box]:
    """Return the boxes that the lines of the plot occupy, so that labels avoid them."""
    lines = [bar] if bar is not None else []
    for (x, y), (next_x, next_y) in pairwise(steps):
        lines += [Box(x, y - 1, next_x - x, 2), Box(next_x - 1, min(y, next_y), 2, abs(next_y - y))]
    return lines


def _labels(points: Sequence[_Point], frame: Box, lines: Sequence[Box]) -> Markup:
    """Write the names of important candidates where there is space. First write those of the chosen candidate and
    float32, then those of the front.
    """
    occupied = [*(Box(p.x - 6, p.y - 6, 12, 12) for p in points), *lines]
    parts = []
    labelled = [p for status in ("chosen", "float32", "front") for p in points if p.trial.mark == status]
    for point in labelled:
        # Try a shorter form of the name before leaving it out.
        for share in (0.5, 0.25):
            name = fitted(point.trial.name, frame.width * share)
            place = place_label(point.x, point.y, text_width(name), frame, occupied, gap=12)
            if place is not None:
                x, y, anchor, box = place
                occupied.append(box)
                parts.append(label(x, y, name, anchor=anchor, class_="name"))
                break
    return tag("g", *parts, aria_hidden="true")


def _mark(point: _Point, tuning: TuningRecord) -> Markup:
    trial = point.trial
    why = trial.reason or NAMES.get(trial.mark, trial.mark)
    text = ", ".join([trial.name, *measured_texts(trial, tuning), why])
    if point.off:
        text += ", off the scale"
        # At the edge, draw an arrow that points out of the plot.
        turn = "" if tuning.metric.higher_is_better else " scale(1 -1)"
        y = point.y - 6 if tuning.metric.higher_is_better else point.y + 6
        shape = tag("path", d="M-5,-4H5L0,5Z", class_="mark off", transform=f"translate({point.x:.1f} {y:.1f}){turn}")
    else:
        around = ring(trial.plugin, tuning.engines, point.x, point.y)
        shape = join([mark(trial.mark, point.x, point.y), around])
    target = tag("circle", cx=point.x, cy=point.y, r=12, class_="target")
    return tag("g", target, shape, tabindex=0, role="img", aria_label=text, data_candidate=point.index, class_="point")
