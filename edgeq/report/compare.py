"""`edgeq compare A B`: two models, bundles, or one of each, measured on the same samples and side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from edgeq_device.arrays import random_feeds
from edgeq_device.bench import BenchSettings
from edgeq_device.claim import Claim

from edgeq.data.samples import Samples, open_samples
from edgeq.errors import EdgeqError, UsageError
from edgeq.measure.accuracy import Evaluation, evaluate_sessions
from edgeq.measure.bench import SAMPLES, LoadedModel, Opener, Workload, open_model, refuse_ignored
from edgeq.measure.coverage import measure_coverage
from edgeq.measure.latency import Measurement, bench_model, measure_models, sessions_to_time
from edgeq.measure.task import Task, TaskOptions, as_task
from edgeq.model.load import is_quantized, model_bytes, model_digest, path_of
from edgeq.report.comparison import UNSETTLED, A, B, Comparison, Limits, Side, speed_outcome
from edgeq.run.session import SessionSettings
from edgeq.signature import interchangeable, signature_differences
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import plain


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
