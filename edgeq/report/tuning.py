"""Latency against accuracy, a mark a candidate: every candidate that was measured, and the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from edgeq.report.figures import (
    EM,
    Box,
    Pairs,
    Scale,
    axis_width,
    difference,
    figure,
    fitted,
    is_share,
    join,
    label,
    metric,
    metric_name,
    milliseconds,
    pairs,
    place_label,
    scale_for,
    tag,
    text_width,
    x_axis,
    y_axis,
)
from edgeq.report.tuning_record import Assessment, GoalRecord, Timing, TrialRecord, TuningRecord
from edgeq.run.engines import DEFAULT

MOST_CANDIDATES = 300
_AGAINST_FLOAT = ("top-1 agreement", "agreement", "cosine")
"""Metrics of agreement with float32, which by nature has 1."""
# What a scheme has where nothing special was chosen: not worth a line in each candidate's settings.
_USUAL = {"mode": "static", "weight_symmetric": "yes", "activation_symmetric": "no", "reduce_range": "no"}
_STATUS = {"chosen": "chosen", "short": "short", "eliminated": "dropped", "slow": "slow"}


@dataclass(frozen=True)
class Candidate:
    """One candidate of a tuning run.

    Attributes:
        accuracy: in the tuning's metric; None where it was dropped before that was measured.
        latency_ms: median; `low_ms` and `high_ms` bound it.
        status: "chosen", "front", "behind", "short" (of the accuracy), "slow" (than float32), "dropped" or "float32".
        reason: why it is not the chosen one.
        engine: what runs it, with its precision; "" for onnxruntime's own kernels.
    """

    name: str
    settings: Pairs = ()
    accuracy: float | None = None
    latency_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    bytes: float | None = None
    coverage: float | None = None
    status: str = "behind"
    reason: str = ""
    engine: str = ""


@dataclass(frozen=True)
class Tuning:
    """What was searched and what came of it.

    Attributes:
        met: whether a candidate meets what was asked; None where the record does not say.
        least_accuracy: what was asked for, in the metric's unit; `allowed_loss` as a loss against float32.
        facts: what else is worth a line: objective, budget, seconds, candidates tried.
    """

    metric: str
    candidates: tuple[Candidate, ...]
    higher_is_better: bool = True
    least_accuracy: float | None = None
    allowed_loss: float | None = None
    met: bool | None = None
    facts: Pairs = ()
    notes: tuple[str, ...] = ()
    left_out: int = 0

    @property
    def engines(self) -> tuple[str, ...]:
        """Return those that run candidates, besides onnxruntime's own kernels."""
        return tuple(dict.fromkeys(c.engine for c in self.candidates if c.engine))


def tuning_of(record: TuningRecord) -> Tuning | None:
    """Read what was searched; None where there are no candidates."""
    trials = record.candidates
    if not trials:
        return None
    metric, higher = record.metric.name, record.metric.higher_is_better
    base = record.float32.accuracy.get(metric, 1.0 if metric in _AGAINST_FLOAT else None)
    drop = record.goal.max_drop
    # The chosen ones first, so that a limit never takes them away.
    order = sorted(range(len(trials)), key=lambda i: (trials[i].status != "chosen", not trials[i].pareto))
    kept = [trials[i] for i in sorted(order[:MOST_CANDIDATES])]
    baseline = Candidate(
        name="float32",
        accuracy=base,
        latency_ms=_latency(record.float32.timing, "p50_ms"),
        bytes=record.float32.bytes,
        status="float32",
    )
    sign = 1.0 if higher else -1.0
    return Tuning(
        metric=metric,
        candidates=(baseline, *(_candidate(trial, metric, base, sign) for trial in kept)),
        higher_is_better=higher,
        least_accuracy=None if base is None or drop is None else base - sign * drop,
        allowed_loss=drop,
        met=None if record.chosen == "" else record.chosen is not None,
        facts=_facts(record, metric),
        notes=(*record.verdict[:12], *record.needed[:12]),
        left_out=len(trials) - len(kept),
    )


def _candidate(trial: TrialRecord, metric: str, base: float | None, sign: float) -> Candidate:
    status = _STATUS.get(trial.status, "behind")
    return Candidate(
        name=trial.name,
        settings=_settings(trial),
        accuracy=_accuracy(trial.accuracy, metric, base, sign),
        latency_ms=_latency(trial.timing, "p50_ms"),
        low_ms=_latency(trial.timing, "low_ms"),
        high_ms=_latency(trial.timing, "high_ms"),
        bytes=trial.screening.bytes if trial.screening else None,
        coverage=trial.screening.int8_mac_share if trial.screening else None,
        status="front" if trial.pareto and status != "chosen" else status,
        reason=trial.reason,
        engine=trial.engine if trial.engine != DEFAULT else "",
    )


def _settings(trial: TrialRecord) -> Pairs:
    scheme = [(key, value) for key, value in pairs(trial.scheme, 30) if _USUAL.get(key) != value]
    rest = {
        "engine": trial.engine,
        "precision": trial.precision,
        "recoveries": trial.recoveries,
        "threads": trial.threads or "",
        "builder": trial.builder,
        "parent": trial.parent,
    }
    return (*scheme, *pairs(rest, 10))


def _accuracy(found: Assessment | None, metric: str, base: float | None, sign: float) -> float | None:
    """The value of the metric. Of what was measured on a part of the samples only the loss can be compared with others,
    because float32 has another value on that part."""
    if found is None:
        return None
    if metric in found.metrics and found.complete:
        return found.metrics[metric]
    return None if base is None else base - sign * found.drop


def _latency(timing: Timing | None, key: str) -> float | None:
    value = timing.latency.get(key, 0.0) if timing is not None else 0.0
    return value if 0 < value < 1e200 else None


def _facts(record: TuningRecord, metric: str) -> Pairs:
    goal: GoalRecord = record.goal
    drop = goal.max_drop
    facts = [
        ("objective", goal.objective),
        (
            "allowed loss",
            difference(metric, drop).lstrip("+") + f" of {metric_name(metric)}" if drop is not None else "",
        ),
        ("budget", _seconds(goal.budget_s)),
        ("took", _seconds(record.elapsed_s)),
        ("candidates", str(len(record.candidates))),
        ("order of the finalists", {True: "settled", False: "not settled", None: ""}[record.settled]),
        ("ended", "by the budget" if record.out_of_time else ""),
    ]
    return tuple((key, value) for key, value in facts if value)


def _seconds(value: float | None) -> str:
    if value is None or value >= 1e9:
        return ""
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s" if value < 10 else f"{seconds} s"


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
    "front": "on the front: nothing is both faster and more accurate",
    "behind": "behind the front",
    "short": "ruled out",
    "off": "less accurate than the plot reaches",
}
_DASHES = (None, "5 3", "1.5 3")
_DRAWN_LAST = ("float32", "front", "chosen")
_WINDOW = 5.0
"""The accuracy axis reaches this many times the allowed loss below the best; what is further down sits on its edge."""


@dataclass(frozen=True)
class _Point:
    index: int
    candidate: Candidate
    x: float
    y: float
    off: bool


def mark(status: str, x: float = 0, y: float = 0) -> Markup:
    """Return the shape of a status."""
    shown = status if status in SHAPES else "behind"
    moved = f"translate({x:.1f} {y:.1f})" if x or y else None
    return tag("path", d=SHAPES[shown], class_=f"mark {shown}", transform=moved)


def ring(engine: str, engines: Sequence[str], x: float = 0, y: float = 0) -> Markup:
    """The ring around the mark of a candidate that `engine`, one of `engines`, runs; nothing for "" and others."""
    if engine not in engines:
        return Markup()
    dashes = _DASHES[engines.index(engine) % len(_DASHES)]
    return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=10, class_="mark ring", stroke_dasharray=dashes)


def pareto(tuning: Tuning, width: float, height: float) -> Markup:
    """The plot; empty where fewer than two candidates have both figures. Marks carry `data-candidate`, their place in
    `tuning.candidates`, and can be reached with the keyboard."""
    measured = [(i, c) for i, c in enumerate(tuning.candidates) if c.accuracy is not None and (c.latency_ms or 0.0) > 0]
    if len(measured) < 2:
        return Markup()
    factor = 100.0 if is_share(tuning.metric) else 1.0
    ys = _accuracy_scale(tuning, [c for _, c in measured], factor, height - 52.0, 30.0)
    left = axis_width(ys)
    latencies = [v for _, c in measured for v in (c.latency_ms, c.low_ms, c.high_ms) if v is not None and v > 0]
    xs = scale_for(latencies, left, width - 14.0)
    frame = Box(left, ys.end, xs.end - left, ys.start - ys.end)
    points = [
        _Point(i, c, xs(c.latency_ms or 0.0), ys(factor * (c.accuracy or 0.0)), not 0 <= ys.share(_y(c, factor)) <= 1)
        for i, c in measured
    ]
    points.sort(key=lambda p: _DRAWN_LAST.index(p.candidate.status) + 1 if p.candidate.status in _DRAWN_LAST else 0)
    unit = " (%)" if factor == 100 else ""
    direction = "" if tuning.higher_is_better else ", lower is better"
    return figure(
        width,
        height,
        f"Scatter plot of {len(points)} candidates: median latency against {metric_name(tuning.metric)}",
        x_axis(xs, ys.start, ys.end, "median latency (ms)"),
        y_axis(ys, left, xs.end, f"{metric_name(tuning.metric)}{unit}{direction}"),
        _bar(tuning, ys, xs, factor),
        _front(points),
        join(_whisker(p, xs) for p in points),
        _labels(points, frame),
        join(_mark(p, tuning) for p in points),
        class_="pareto",
    )


def measured_texts(candidate: Candidate, tuning: Tuning) -> list[str]:
    """Write latency and accuracy, as far as they are known."""
    texts = [milliseconds(candidate.latency_ms)] if candidate.latency_ms else []
    if candidate.accuracy is not None:
        texts.append(f"{metric_name(tuning.metric)} {metric(tuning.metric, candidate.accuracy)}")
    return texts


def _y(candidate: Candidate, factor: float) -> float:
    return factor * (candidate.accuracy or 0.0)


def _accuracy_scale(tuning: Tuning, measured: Sequence[Candidate], factor: float, start: float, end: float) -> Scale:
    values = [_y(c, factor) for c in measured]
    sign = 1.0 if tuning.higher_is_better else -1.0
    best = max(values, key=lambda v: sign * v)
    if tuning.least_accuracy is not None:
        bar = factor * tuning.least_accuracy
        keep = [_y(c, factor) for c in measured if c.status in ("chosen", "front", "float32")] + [bar]
        window = max(_WINDOW * abs(best - bar), *(abs(best - v) for v in keep))
        values = [v for v in values if sign * (best - v) <= window] + [bar]
    return scale_for(values, start, end, log=False, pad=0.08)


def _bar(tuning: Tuning, ys: Scale, xs: Scale, factor: float) -> Markup | None:
    if tuning.least_accuracy is None:
        return None
    y = ys(factor * tuning.least_accuracy)
    text = "at least" if tuning.higher_is_better else "at most"
    shown = f"{text} {metric(tuning.metric, tuning.least_accuracy)}"
    below = y + EM * 1.2 if y + EM * 1.4 < ys.start else y - 5
    return join(
        [
            tag("line", x1=xs.start, x2=xs.end, y1=y, y2=y, class_="asked"),
            label(xs.end, below, shown, anchor="end", class_="asked-label"),
        ]
    )


def _front(points: Sequence[_Point]) -> Markup | None:
    """Return the border of what can be had, as a staircase."""
    on = sorted((p for p in points if p.candidate.status in ("front", "chosen")), key=lambda p: p.x)
    if len(on) < 2:
        return None
    steps = [f"M{on[0].x:.1f},{on[0].y:.1f}"] + [f"H{p.x:.1f}V{p.y:.1f}" for p in on[1:]]
    return tag("path", d="".join(steps), class_="front-line")


def _whisker(point: _Point, xs: Scale) -> Markup | None:
    low, high = point.candidate.low_ms, point.candidate.high_ms
    if low is None or high is None or not 0 < low < high:
        return None
    return tag("line", x1=xs(low), x2=xs(high), y1=point.y, y2=point.y, class_="whisker")


def _labels(points: Sequence[_Point], frame: Box) -> Markup:
    """Write the names of what matters, where there is space: the chosen one and float32 first, then the front."""
    taken = [Box(p.x - 6, p.y - 6, 12, 12) for p in points]
    parts = []
    wanted = [p for status in ("chosen", "float32", "front") for p in points if p.candidate.status == status]
    for point in wanted:
        for share in (0.5, 0.25):
            name = fitted(point.candidate.name, frame.width * share)
            place = place_label(point.x, point.y, text_width(name), frame, taken, gap=12)
            if place is not None:
                x, y, anchor, box = place
                taken.append(box)
                parts.append(label(x, y, name, anchor=anchor, class_="name"))
                break
    return tag("g", *parts, aria_hidden="true")


def _mark(point: _Point, tuning: Tuning) -> Markup:
    found = point.candidate
    text = ", ".join(
        [found.name, *measured_texts(found, tuning), found.reason or NAMES.get(found.status, found.status)]
    )
    if point.off:
        text += ", off the scale"
        # An arrow at the edge, pointing out of the plot.
        turn = "" if tuning.higher_is_better else " scale(1 -1)"
        y = point.y - 6 if tuning.higher_is_better else point.y + 6
        shape = tag("path", d="M-5,-4H5L0,5Z", class_="mark off", transform=f"translate({point.x:.1f} {y:.1f}){turn}")
    else:
        around = ring(found.engine, tuning.engines, point.x, point.y)
        shape = join([mark(point.candidate.status, point.x, point.y), around])
    target = tag("circle", cx=point.x, cy=point.y, r=12, class_="target")
    return tag("g", target, shape, tabindex=0, role="img", aria_label=text, data_candidate=point.index, class_="point")
