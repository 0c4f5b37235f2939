"""Compare two models, bundles, or one of each, on the same samples and side by side: `edgeq compare A B`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from edgeq_device.arrays import random_feeds
from edgeq_device.bench import BenchSettings
from edgeq_device.claim import Claim

from edgeq.data.samples import Samples, open_samples
from edgeq.errors import CheckFailedError, EdgeqError, UsageError
from edgeq.measure.accuracy import Accuracy, Evaluation, evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.bench import SAMPLES, LoadedModel, Opener, Workload, open_model, refuse_ignored
from edgeq.measure.coverage import measure_coverage
from edgeq.measure.latency import Measurement, bench_model, measure_models, sessions_to_time
from edgeq.measure.task import Task, TaskOptions, as_task
from edgeq.model.load import is_quantized, model_bytes, model_digest, path_of
from edgeq.report.numbers import decibels, difference, metric, metric_name, milliseconds, share, signed, size, times
from edgeq.run.session import SessionSettings
from edgeq.signature import Signature, interchangeable, signature_differences
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.records import plain

Row = tuple[str, str, str, str]


def comparison_rows(found: Mapping[str, Any]) -> list[Row]:
    """What, A, B, and B against A; only what is known."""
    return [
        *_size(found),
        *_coverage(found),
        *_accuracy(found),
        *_agreement(found),
        *_latency(found),
        *_memory(found),
    ]


def sentences(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The verdict, from A's point of view: what taking B instead would bring and cost."""
    if found["same"]:
        return ("A and B are the same model.",)
    lines = []
    ratio = (found["latency"] or {}).get("ratio")
    if ratio:
        lines.append(f"{Claim.read(ratio).sentence('B', 'A')}.")
    decisive = primary(found)
    if decisive is not None:
        name, before, after, higher = decisive
        gain = after - before
        change = difference(name, gain)
        if gain == 0:
            lines.append(f"Both have a {metric_name(name)} of {metric(name, after)}.")
        else:
            verb = "better" if (gain > 0) == higher else "worse"
            lines.append(f"B's {metric_name(name)} is {change.lstrip('+−')} {verb}: {metric(name, after)}.")
    elif found["agreement"]:
        lines += _agreement_text(found["agreement"])
    a, b = found["a"]["bytes"], found["b"]["bytes"]
    if a and b and a != b:
        lines.append(f"B takes {share(b / a, 0)} of A's space." if b < a else f"B is {times(b / a)} A's size.")
    if found["signature_differences"]:
        lines.append("Their inputs or outputs differ.")
    return tuple(lines) or ("Nothing that could be measured tells A and B apart.",)


def _agreement_text(agreement: Mapping[str, Any]) -> list[str]:
    outputs = agreement["outputs"]
    if not outputs:
        return ["They have no output in common."]
    if all(output["equal"] for output in outputs):
        return ["Their answers are equal."]
    parts = [part for o in outputs for part in (o, *o.get("slices", ())) if o["elements"]]
    worst = min((part["sqnr_db"] for part in parts if part["sqnr_db"] is not None), default=None)
    top1 = [o["top1"] for o in outputs if o["top1"] is not None]
    same = f", with the same top answer in {share(min(top1))} of {agreement['count']} samples" if top1 else ""
    same = same or f", with a cosine of {min((part['cosine'] for part in parts), default=0.0):.5f}"
    followed = [f"B's outputs follow A's at {decibels(worst)} SQNR{same}."] if worst is not None else []
    left = [
        f"Of output {o['name']}, {o['mismatched']} of {agreement['count']} samples have another size, and are left out."
        for o in outputs
        if o["mismatched"]
    ]
    return followed + left


def _size(found: Mapping[str, Any]) -> list[Row]:
    a, b = found["a"]["bytes"], found["b"]["bytes"]
    return [("size", size(a), size(b), times(b / a))] if a and b else []


def memory(found: Mapping[str, Any], name: str) -> int | None:
    """Peak memory in bytes of the session of "A" or "B", above the process without it; None where it is not known."""
    measured = ((found.get("bench") or {}).get("models") or {}).get(name) or {}
    peak: int | None = (measured.get("memory") or {}).get("session_peak_bytes")
    return peak


def _memory(found: Mapping[str, Any]) -> list[Row]:
    a, b = memory(found, "A"), memory(found, "B")
    return [("peak memory", size(a), size(b), times(b / a))] if a and b else []


def _coverage(found: Mapping[str, Any]) -> list[Row]:
    before, after = ((found[side]["coverage"] or {}).get("int8_mac_share") for side in ("a", "b"))
    if before is None or after is None:
        return []
    return [("MACs in int8, here", share(before), share(after), f"{signed(100 * (after - before), 1)} pt")]


def _accuracy(found: Mapping[str, Any]) -> list[Row]:
    a, b = found["a"]["accuracy"], found["b"]["accuracy"]
    if not a or not b:
        return []
    return [
        (metric_name(name), metric(name, value), metric(name, other), difference(name, other - value))
        for name, value in a["metrics"].items()
        for other in (b["metrics"][name],)
    ]


def primary(found: Mapping[str, Any]) -> tuple[str, float, float, bool] | None:
    """Name of the primary metric, its value of both, and whether more is better; None without labels."""
    a, b = found["a"]["accuracy"], found["b"]["accuracy"]
    if not a or not b:
        return None
    name = a["primary"]
    return name, a["metrics"][name], b["metrics"][name], a["higher_is_better"]


def _agreement(found: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for output in (found["agreement"] or {}).get("outputs", ()):
        known = output["sqnr_db"] is not None and output["elements"]
        lines = "equal" if output["equal"] else decibels(output["sqnr_db"]) if known else "–"
        cosine = f", cosine {output['cosine']:.5f}"
        top1 = f", same top answer {share(output['top1'])}" if output["top1"] is not None else cosine
        rows.append((f"output {output['name']}", "", "", f"{lines}{top1}"))
        for part in output.get("slices", ()):
            shown = decibels(part["sqnr_db"]) if part["sqnr_db"] is not None else "–"
            place = f"{part['first']}..{part['last']} on axis {part['axis']}"
            rows.append((f"  {place}", "", "", f"{shown}, cosine {part['cosine']:.5f}"))
    return rows


def _latency(found: Mapping[str, Any]) -> list[Row]:
    latency = found["latency"]
    if not latency:
        return []
    rows = []
    for name in ("p50", "p90", "p99"):
        a, b = latency["A"][f"{name}_ms"], latency["B"][f"{name}_ms"]
        rows.append((f"latency {name}", milliseconds(a), milliseconds(b), ""))
    return rows


Outcome = Literal["held", "missed", "unsettled"]
HELD: Outcome = "held"
MISSED: Outcome = "missed"
UNSETTLED: Outcome = "unsettled"


@dataclass(frozen=True)
class Limits:
    """What B must keep to; None for no limit.

    Attributes:
        max_drop: accuracy that it may lose, in the unit of the task's deciding metric.
        min_speedup: how many times A's speed it must have.
        max_growth, max_memory_growth: by what share of A's its size, and its peak memory, may be larger.
    """

    max_drop: float | None = None
    min_speedup: float | None = None
    max_growth: float | None = None
    max_memory_growth: float | None = None


@dataclass(frozen=True)
class LimitCheck:
    """One limit and what became of it.

    Attributes:
        what: "latency", "accuracy", "size" or "memory".
        limit: for people.
        outcome: unsettled where the measurement shows neither that the limit holds nor that it does not.
        sentence: what was found; "" where the limit holds.
    """

    what: str
    limit: str
    outcome: Outcome
    sentence: str = ""


def check_limits(found: Mapping[str, Any], limits: Limits, a: str = "A", b: str = "B") -> tuple[LimitCheck, ...]:
    """What became of each limit, by the plain values of a comparison; `a` and `b` are what sentences call the two.

    A limit on what could not be measured is missed, but for a speed that the machine was too busy to tell. Accuracy is
    that of these samples, which is exact for them.
    """
    memories = (memory(found, "A"), memory(found, "B"))
    sizes = (found["a"].get("bytes"), found["b"].get("bytes"))
    return (
        *_drop(found, limits.max_drop, b),
        *_speedup(found, limits.min_speedup, a, b),
        *_growth("size", sizes, found["same"], limits.max_growth, a, b),
        *_growth("memory", memories, found["same"], limits.max_memory_growth, a, b),
    )


def missed(found: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    """A sentence for each limit that is not shown to hold, an unsettled one too: a build must not pass because the
    machine was busy."""
    return tuple(check.sentence for check in check_limits(found, limits) if check.outcome != HELD)


def speed_outcome(found: Claim, limit: float) -> Outcome:
    """Whether a speed is at least `limit`, at most below it, or neither is shown."""
    interval = found.interval
    if interval is None or interval[1] < limit <= interval[2]:
        return UNSETTLED
    return HELD if interval[1] >= limit else MISSED


def _speedup(found: Mapping[str, Any], limit: float | None, a: str, b: str) -> Iterator[LimitCheck]:
    if limit is None:
        return
    allowed = f"at least {times(limit)} the speed"
    if found["same"]:
        outcome: Outcome = HELD if limit <= 1 else MISSED
        sentence = f"{b} is the same model as {a}, as fast, less than the {times(limit)} required"
        yield LimitCheck("latency", allowed, outcome, "" if outcome == HELD else sentence)
        return
    claim = Claim.read((found["latency"] or {}).get("ratio") or {"reason": "it was not timed"})
    outcome = speed_outcome(claim, limit)
    sentences = {
        HELD: "",
        MISSED: f"{claim.sentence(b, a)}, less than the {times(limit)} required",
        UNSETTLED: f"that {b} is {times(limit)} as fast as {a} was not shown: {claim.sentence(b, a)}; "
        "try a longer --duration",
    }
    yield LimitCheck("latency", allowed, outcome, sentences[outcome])


def _drop(found: Mapping[str, Any], limit: float | None, b: str) -> Iterator[LimitCheck]:
    if limit is None:
        return
    decisive = primary(found)
    if found["same"] or decisive is None:
        sentence = "" if found["same"] else f"how much accuracy {b} loses could not be measured"
        yield LimitCheck("accuracy", f"a loss of {limit:g}", MISSED if sentence else HELD, sentence)
        return
    name, before, after, higher = decisive
    lost = before - after if higher else after - before
    shown, allowed = (difference(name, value).lstrip("+") for value in (lost, limit))
    sentence = f"{b} loses {shown} of {metric_name(name)}, more than the {allowed} allowed" if lost > limit else ""
    yield LimitCheck("accuracy", f"a loss of {allowed}", MISSED if sentence else HELD, sentence)


def _growth(
    what: str, values: tuple[int | None, int | None], same: bool, limit: float | None, a: str, b: str
) -> Iterator[LimitCheck]:
    if limit is None:
        return
    before, after = values
    sentence = ""
    if not same and (before is None or after is None):
        sentence = f"the {what} could not be compared"
    elif not same and before is not None and after is not None and after > before * (1 + limit):
        more = share(after / before - 1) if before else size(after)
        sentence = f"{b}'s {what} is {size(after)}, {more} more than {a}'s {size(before)}; {share(limit)} is allowed"
    yield LimitCheck(what, f"{share(limit)} more", MISSED if sentence else HELD, sentence)


A, B = "A", "B"


@dataclass(frozen=True)
class Side:
    """What is known of one of the two: `bytes` of its model file with external data, int8 share of its MACs, and
    whether any operator is quantized."""

    path: Path
    variant: str | None
    bytes: int | None
    digest: str | None
    signature: Signature
    coverage: Mapping[str, Any] | None
    accuracy: Accuracy | None
    quantized: bool = False

    def same_as(self, other: Side) -> bool:
        """Whether both are the same bytes, run the same way."""
        return self.digest is not None and (self.digest, self.variant) == (other.digest, other.variant)

    def __record__(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "variant": self.variant,
            "bytes": self.bytes,
            "sha256": self.digest,
            "inputs": [str(spec) for spec in self.signature.inputs],
            "outputs": [str(spec) for spec in self.signature.outputs],
            "coverage": self.coverage,
            "accuracy": self.accuracy,
        }


@dataclass(frozen=True)
class Comparison(Page):
    """What was found; `agreement` is B's with A."""

    a: Side
    b: Side
    signature_differences: tuple[str, ...]
    samples: int
    agreement: Agreement | None
    measurement: Measurement | None
    notes: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)

    @property
    def same(self) -> bool:
        """Whether there is nothing to compare: the same bytes, run the same way."""
        return self.a.same_as(self.b)

    @property
    def debuggable(self) -> tuple[Side, Side] | None:
        """The float model file and the quantized form that `edgeq debug` can compare, in this order; None where A and B
        are not one of each."""
        found = next(((a, b) for a, b in ((self.a, self.b), (self.b, self.a)) if b.quantized and not a.quantized), None)
        return found if found is not None and found[0].variant is None else None

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table: what, A, B, B against A."""
        return comparison_rows(self.figures())

    def missed(self) -> tuple[str, ...]:
        """A sentence for each limit that was not shown to hold."""
        return missed(self.figures(), self.limits)

    def check(self) -> None:
        """Raise CheckFailedError where a limit was not shown to hold."""
        if found := self.missed():
            raise CheckFailedError("; ".join(found), "Keep A, or see `edgeq debug` and `edgeq bench` for what costs it")

    def verdict(self) -> tuple[str, ...]:
        """What it comes to, the most important first."""
        return sentences(self.figures())

    def __brief__(self) -> dict[str, Any]:
        return {"a": self.a.path, "b": self.b.path, "samples": self.samples, "verdict": " ".join(self.verdict())}

    def __page__(self) -> dict[str, Any]:
        timed = self.measurement.notes if self.measurement is not None else ()  # they stand beside the latencies
        return {
            "name": f"{self.a.path.name} and {self.b.path.name}",
            "bench": plain(self.measurement) if self.measurement is not None else None,
            "tables": [(" ".join(self.verdict()), ("", "A", "B", "B against A"), self.rows())],
            "notes": [*self.signature_differences, *(note for note in self.notes if note not in timed)],
        }

    def __record__(self) -> dict[str, Any]:
        return {**self.figures(), "verdict": self.verdict(), "limits": self.limits, "missed": self.missed()}

    def figures(self) -> dict[str, Any]:
        """All that was measured, plain values."""
        latency = None
        if self.measurement is not None:
            latency = {
                A: dict(self.measurement.latency(A)),
                B: dict(self.measurement.latency(B)),
                "ratio": dict(self.measurement.ratio(B)),
            }
        found: dict[str, Any] = plain(
            {
                "a": self.a,
                "b": self.b,
                "same": self.same,
                "signature_differences": self.signature_differences,
                "samples": self.samples,
                "agreement": self.agreement,
                "latency": latency,
                "bench": self.measurement,
                "notes": self.notes,
            }
        )
        return found


class ComparePlace(Opener, Protocol):
    """Where models are compared, if not here."""

    @property
    def name(self) -> str:
        """For people."""

    def measure(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """`measure_models` of what was opened there, each in so many sessions."""


@dataclass(frozen=True)
class CompareRequest:
    """What to compare.

    Attributes:
        a, b: model files or bundles.
        data: samples for both, as `edgeq.data.samples.open_samples` takes them; None compares what needs none.
        task: what to measure against their labels; None compares the outputs alone.
        preprocess: None takes what a bundle says.
        timed: whether to time them.
        duration_s: seconds for each at least.
        attempts: how often they are timed at most, each time for twice as long, until a limit on speed is settled.
        sessions: in how many sessions small models are timed; None: `sessions_to_time`.
        session_options: of model files, over those that they carry.
    """

    a: Path
    b: Path
    data: Any = None
    task: Task | str | None = None
    options: TaskOptions = field(default_factory=TaskOptions)
    preprocess: Any = None
    labels: Any = None
    count: int | None = None
    threads: int = 0
    timed: bool = True
    duration_s: float = 2.0
    limits: Limits = field(default_factory=Limits)
    session_options: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 1
    sessions: int | None = None


def compare(
    a: str | Path,
    b: str | Path,
    data: Any = None,
    *,
    task: Task | str | None = None,
    options: TaskOptions | None = None,
    preprocess: Any = None,
    labels: Any = None,
    count: int | None = None,
    threads: int = 0,
    timed: bool = True,
    duration_s: float = 2.0,
    max_drop: float | None = None,
    min_speedup: float | None = None,
    session_options: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
) -> Comparison:
    """Compare two models, two bundles, or one of each. What cannot be compared is a note, not an error.

    Args:
        a, b: model files or bundles.
        data: samples for both, as `edgeq.open_samples` takes them; None compares what needs none.
        task: what to measure against their labels, a task or its name; None compares the outputs alone.
        options: of a task that is named.
        preprocess: None takes what a bundle says.
        timed: whether to time them, interleaved; `duration_s` is seconds for each at least.
        max_drop: accuracy that B may lose on these samples, in the unit of the task's primary metric (0.01 is one point
            of a share); needs `task`. `Comparison.check` raises where more is lost.
        min_speedup: how many times A's speed B must have; shown by the lower end of the interval.
        session_options: to run model files with, over those that they carry; a bundle brings its own.

    Raises:
        UsageError: a task without data, or an option that makes no sense.
        EdgeqError: whatever is wrong with a model, a bundle or the data.
    """
    options = options or TaskOptions()
    limits, config = Limits(max_drop, min_speedup), session_options or {}
    a, b = path_of(a), path_of(b)
    request = CompareRequest(
        a, b, data, task, options, preprocess, labels, count, threads, timed, duration_s, limits, config
    )
    return run_comparison(request, progress=progress)


def run_comparison(
    request: CompareRequest, *, place: ComparePlace | None = None, progress: Progress = SILENT
) -> Comparison:
    """`compare` of a request, here or at another `place`, where what runs in int8 is not looked at."""
    if request.task is not None and request.data is None:
        raise UsageError("a task needs samples", "Give --data")
    if request.data is None:
        about = {"--preprocess": request.preprocess, "--labels": request.labels, "--count": request.count}
        for option, given in about.items():
            if given is not None:
                raise UsageError(f"{option} is about samples", "Give them with --data, or leave it out")
    if request.task is None and request.options.given():
        raise UsageError("task options without a task", "Give a --task")
    if request.limits.max_drop is not None and request.task is None:
        raise UsageError("--max-drop needs a task", "Give a --task, and labelled samples as --data")
    if request.limits.min_speedup is not None and not request.timed:
        raise UsageError("--min-speedup needs timing", "Leave --no-timing out")
    notes: list[str] = []
    settings = SessionSettings(config=request.session_options, intra_op_threads=request.threads)
    refuse_ignored(settings, request.a, request.b)
    with ExitStack() as stack:
        a, b = (stack.enter_context(open_model(path, settings, opener=place)) for path in (request.a, request.b))
        differences = signature_differences(a.signature, b.signature)
        fits = interchangeable(a.signature, b.signature)
        if not fits:
            notes.append("their inputs differ, so that they can be neither run on the same samples nor timed together")
        samples = _samples(request, a, b, progress)
        if samples is None:
            notes.append("without --data their answers are not compared")
        evaluation = _evaluate(request, a, b, samples, progress) if samples is not None and fits else None
        here = place is None
        sides = [_side(loaded, key, samples, evaluation, notes, here=here) for key, loaded in ((A, a), (B, b))]
        # The same bytes run the same way: timing them would measure the machine's noise.
        timed = request.timed and fits and not sides[0].same_as(sides[1])
        measurement = _time(request, a, b, samples, place, progress) if timed else None
    return Comparison(
        a=sides[0],
        b=sides[1],
        signature_differences=differences,
        samples=evaluation.count if evaluation is not None else 0,
        agreement=evaluation.agreement[B] if evaluation is not None else None,
        measurement=measurement,
        notes=(*notes, *(measurement.notes if measurement is not None else ())),
        limits=request.limits,
    )


def _samples(request: CompareRequest, a: LoadedModel, b: LoadedModel, progress: Progress) -> Samples | None:
    if request.data is None:
        return None
    preprocessings = [s.preprocess for s in (a, b) if s.preprocess is not None]
    preprocess = request.preprocess if request.preprocess is not None else next(iter(preprocessings), None)
    return open_samples(
        request.data,
        a.signature,
        preprocess=preprocess,
        labels=request.labels,
        count=request.count,
        model=request.a if a.variant is None else None,
        progress=progress,
    )


def _evaluate(
    request: CompareRequest, a: LoadedModel, b: LoadedModel, samples: Samples, progress: Progress
) -> Evaluation:
    return evaluate_sessions(
        {A: a.session, B: b.session},
        samples,
        task=as_task(request.task, request.options),
        reference=A,
        settings={A: a.settings, B: b.settings},
        progress=progress,
    )


def _side(
    loaded: LoadedModel,
    key: str,
    samples: Samples | None,
    evaluation: Evaluation | None,
    notes: list[str],
    *,
    here: bool,
) -> Side:
    size = digest = None
    coverage: Mapping[str, Any] | None = None
    try:
        size = model_bytes(loaded.model, loaded.folder)
        digest = model_digest(loaded.model, loaded.folder)
        if here:
            first = next(iter(samples)).inputs if samples is not None and evaluation is not None else None
            feed = first or random_feeds(loaded.session, count=1)[0]
            # A quantized graph stands in for its float model: MACs come from its own nodes and shapes.
            coverage = plain(measure_coverage(loaded.model, loaded.settings, feed, loaded.graph, lambda name, op: ""))
    except EdgeqError as error:
        notes.append(f"{key}: {error}")
    accuracy = evaluation.accuracy.get(key) if evaluation is not None else None
    quantized = is_quantized(loaded.graph)
    return Side(loaded.path, loaded.variant, size, digest, loaded.signature, coverage, accuracy, quantized)


def _time(
    request: CompareRequest,
    a: LoadedModel,
    b: LoadedModel,
    samples: Samples | None,
    place: ComparePlace | None,
    progress: Progress,
) -> Measurement:
    feeds: Sequence[Mapping[str, Any]] | None = None
    if samples is not None:
        feeds = [sample.inputs for sample in itertools.islice(samples, SAMPLES)]
    # As many of both: what is compared are pairs of sessions.
    count = min(sessions_to_time(side.model, side.folder) for side in (a, b))
    count = request.sessions or count if count > 1 else 1
    limit = request.limits.min_speedup
    for attempt in range(request.attempts):
        duration_s = request.duration_s * 2**attempt
        settings = BenchSettings(baseline=A, threads=request.threads, min_duration_s=duration_s)
        if place is not None:
            measurement = place.measure({A: a, B: b}, count, Workload(settings, feeds))
        else:
            measurement = measure_models(
                [replace(bench_model(key, s.model, s.settings), sessions=count) for key, s in ((A, a), (B, b))],
                settings,
                feeds=None if feeds is None else lambda session: feeds,
                progress=progress,
            )
        if limit is None or speed_outcome(Claim.read(measurement.ratio(B)), limit) != UNSETTLED:
            break
    return measurement
