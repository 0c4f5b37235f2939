"""Implement `edgeq compare A B`, which compares two models or bundles on the same samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack

from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.claim import Claim
from edgeq_device.prepare.feeds import draw_feeds

from edgeq.data.open_source import Data, as_data, in_role
from edgeq.data.samples import Samples
from edgeq.errors import CheckFailedError, EdgeqError, UsageError
from edgeq.measure.accuracy import Accuracy, Evaluation, evaluate_sessions
from edgeq.measure.agreement import HEALTHY_DB, Agreement, OutputAgreement
from edgeq.measure.basis import sampled_basis
from edgeq.measure.bench import SAMPLES, Workload
from edgeq.measure.coverage import measure_coverage
from edgeq.measure.find_task import infer_task_name
from edgeq.measure.latency import Measurement, measure_models, read_speed
from edgeq.measure.loaded_head import judge_by_answers
from edgeq.measure.loaded_model import LoadedModel, Opener, open_model, refuse_ignored
from edgeq.measure.preprocess_search import open_or_search
from edgeq.measure.settle import settle
from edgeq.measure.task import Task, TaskOptions, as_task
from edgeq.measure.timed_model import bench_model, count_sessions
from edgeq.model.digests import model_digest
from edgeq.model.files import model_bytes
from edgeq.model.graph import GraphIndex
from edgeq.model.load import is_quantized
from edgeq.run.session import Engines, SessionSettings
from edgeq.signature import Signature, is_interchangeable, signature_differences
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.numbers import (
    decibels,
    difference,
    metric,
    metric_name,
    milliseconds,
    parse_drop,
    share,
    signed,
    size,
    times,
)
from edgeq.util.paths import path_of
from edgeq.util.records import marked, plain

Row = tuple[str, str, str, str]
A, B = "A", "B"
Outcome = Literal["held", "missed", "unsettled"]
HELD: Outcome = "held"
MISSED: Outcome = "missed"
UNSETTLED: Outcome = "unsettled"


@dataclass(frozen=True)
class LossLimits:
    """Limit how much worse B may be. None means no limit.

    Attributes:
        max_drop: the accuracy that B may lose, in the unit of the task's primary metric.
        min_speedup: the minimum speed of B, as a multiple of the speed of A.
        max_growth, max_memory_growth: the share by which B's size and peak memory may exceed A's.
    """

    max_drop: float | None = None
    min_speedup: float | None = None
    max_growth: float | None = None
    max_memory_growth: float | None = None


@dataclass(frozen=True)
class LimitCheck:
    """Report whether a comparison meets one limit.

    Attributes:
        what: "latency", "accuracy", "size" or "memory".
        limit: the share that is allowed or, for latency, the minimum speed of B as a multiple of the speed of A.
        text: the limit as text for users.
        outcome: "held", "missed" or "unsettled". It is unsettled if the measurement shows neither that the limit holds
            nor that it does not.
        sentence: the finding, or "" if the limit holds.
    """

    what: str
    limit: float
    text: str
    outcome: Outcome
    sentence: str = ""


@dataclass(frozen=True)
class Side:
    """Describe one of the two models.

    Attributes:
        bytes: the size of the model file with external data; None if the file cannot be read.
        coverage: the model's coverage on this machine, with the share of its MACs in int8; None if it was not measured.
        quantized: True if any operator is quantized.
    """

    path: Path
    variant: str | None
    bytes: int | None
    digest: str | None
    signature: Signature
    coverage: Mapping[str, Any] | None
    accuracy: Accuracy | None
    quantized: bool = False

    def same_as(self, side: Side) -> bool:
        """Return whether both models consist of the same bytes and run in the same way."""
        # A file that cannot be read has no digest, and two such files need not be the same.
        return self.digest is not None and (self.digest, self.variant) == (side.digest, side.variant)

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
    """Report a comparison. `agreement` compares B's outputs with A's."""

    a: Side
    b: Side
    signature_differences: tuple[str, ...]
    samples: int
    agreement: Agreement | None
    measurement: Measurement | None
    notes: tuple[str, ...]
    limits: LossLimits = field(default_factory=LossLimits)

    @property
    def same(self) -> bool:
        """Return whether both models consist of the same bytes and run in the same way. Then there is nothing to
        compare.
        """
        return self.a.same_as(self.b)

    @property
    def debuggable(self) -> tuple[Side, Side] | None:
        """Return the float model file and its quantized form, in this order, for `edgeq debug`. Return None unless one
        of A and B is a float model and the other is its quantized form.
        """
        pair = next(((a, b) for a, b in ((self.a, self.b), (self.b, self.a)) if b.quantized and not a.quantized), None)
        # `edgeq debug` takes the float model as a file, and a variant is not a file of its own.
        return pair if pair is not None and pair[0].variant is None else None

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the rows of a table with the columns: figure, A, B, B against A. Unknown figures have no row."""
        rows = _growth_rows("size", self.a.bytes, self.b.bytes)
        a, b = (side.coverage["int8_mac_share"] if side.coverage else None for side in (self.a, self.b))
        if a is not None and b is not None:
            rows.append(("MACs in int8, here", share(a), share(b), f"{signed(100 * (b - a), 1)} pt"))
        if self.a.accuracy is not None and self.b.accuracy is not None:
            for name, value in self.a.accuracy.metrics.items():
                value_of_b = self.b.accuracy.metrics[name]
                change = difference(name, value_of_b - value)
                rows.append((metric_name(name), metric(name, value), metric(name, value_of_b), change))
        for output in self.agreement.outputs if self.agreement is not None else ():
            rows += _output_rows(output)
        if self.measurement is not None:
            latencies = [self.measurement.latency(side) for side in (A, B)]
            for name in ("p50", "p90", "p99"):
                of_a, of_b = (milliseconds(latency[f"{name}_ms"]) for latency in latencies)
                rows.append(
                    (
                        f"latency {name}",
                        of_a,
                        of_b,
                        _describe_speed(read_speed(self.measurement, B)) if name == "p50" else "",
                    )
                )
        return rows + _growth_rows("peak memory", *_memories(self))

    def missed(self) -> tuple[str, ...]:
        """Return a sentence for each limit that was not shown to hold. This includes unsettled limits, because a build
        must not pass only because the machine was busy.
        """
        return tuple(check.sentence for check in check_limits(self) if check.outcome != HELD)

    def check(self) -> None:
        """Raise CheckFailedError if a limit was not shown to hold."""
        if missed := self.missed():
            raise CheckFailedError("; ".join(missed), "Keep A, or find the cause with `edgeq debug` and `edgeq bench`")

    def verdict(self) -> tuple[str, ...]:
        """Return sentences on what replacing A with B would gain and cost, most important first."""
        if self.same:
            return ("A and B are the same model.",)
        lines = []
        if self.measurement is not None:
            lines.append(f"{read_speed(self.measurement, B).sentence('B', 'A')}.")
        if self.a.accuracy is not None and self.b.accuracy is not None:
            lines.append(_accuracy_sentence(self.a.accuracy, self.b.accuracy))
        # Labels show whether B still does its task, so how closely it follows A matters only without them.
        elif self.agreement is not None:
            lines += _agreement_sentences(self.agreement)
        a, b = self.a.bytes, self.b.bytes
        if a and b and a != b:
            lines.append(f"B takes {share(b / a, 0)} of A's space." if b < a else f"B is {times(b / a)} A's size.")
        if self.signature_differences:
            lines.append("Their inputs or outputs differ.")
        return tuple(lines) or ("No difference between A and B was measured.",)

    def __brief__(self) -> dict[str, Any]:
        return {"a": self.a.path, "b": self.b.path, "samples": self.samples, "verdict": " ".join(self.verdict())}

    def __page__(self) -> dict[str, Any]:
        timed = self.measurement.notes if self.measurement is not None else ()  # shown next to the latencies
        return {
            "name": f"{self.a.path.name} and {self.b.path.name}",
            "bench": marked(self.measurement) if self.measurement is not None else None,
            "tables": [(" ".join(self.verdict()), ("", "A", "B", "B against A"), self.rows())],
            "notes": [*self.signature_differences, *(note for note in self.notes if note not in timed)],
        }

    def __record__(self) -> dict[str, Any]:
        return {**self.figures(), "verdict": self.verdict(), "limits": self.limits, "missed": self.missed()}

    def figures(self) -> dict[str, Any]:
        """Return all the measurements as plain values."""
        timed = self.measurement
        record: dict[str, Any] = plain(
            {
                "a": self.a,
                "b": self.b,
                "same": self.same,
                "signature_differences": self.signature_differences,
                "samples": self.samples,
                "agreement": self.agreement,
                "latency": timed and {A: timed.latency(A), B: timed.latency(B), "ratio": timed.ratio(B)},
                "bench": timed,
                "notes": self.notes,
            }
        )
        return record


def _memories(comparison: Comparison) -> tuple[int | None, int | None]:
    """Return the peak memory of A's session and of B's session in bytes, without the memory of the process itself. A
    value is None if it is not known.
    """
    models = comparison.measurement.models if comparison.measurement is not None else {}
    a, b = ((models.get(name, {}).get("memory") or {}).get("session_peak_bytes") for name in (A, B))
    return a, b


def _describe_speed(speedup: Claim) -> str:
    """Return B's speed as a multiple of A's, as text. The text includes the interval of a claimed speed, or the spread
    of an estimated speed. Return "" if the speed is not known.
    """
    for about, interval in (("", speedup.interval), ("about ", speedup.estimated)):
        if interval is not None:
            return f"{about}{times(interval[0])} the speed ({interval[1]:.2f} to {interval[2]:.2f})"
    return ""


def _growth_rows(title: str, a: int | None, b: int | None) -> list[Row]:
    return [(title, size(a), size(b), times(b / a))] if a and b else []


def _output_rows(output: OutputAgreement) -> Iterator[Row]:
    # An output without elements has no SQNR, and that of equal outputs is infinite.
    follows = decibels(output.sqnr_db) if math.isfinite(output.sqnr_db) and output.elements else "–"
    closeness = f"cosine {output.cosine:.5f}" if output.top1 is None else f"same top answer {share(output.top1)}"
    yield f"output {output.name}", "", "", f"{'equal' if output.equal else follows}, {closeness}"
    for part in output.slices:
        text = decibels(part.sqnr_db) if math.isfinite(part.sqnr_db) else "–"
        yield f"  {part.first}..{part.last} on axis {part.axis}", "", "", f"{text}, cosine {part.cosine:.5f}"


def _accuracy_sentence(a: Accuracy, b: Accuracy) -> str:
    name, value = a.primary, b.metrics[a.primary]
    if value == a.value:
        return f"Both have a {metric_name(name)} of {metric(name, value)}."
    # The verb states the direction, so a sign would state it twice.
    change = difference(name, value - a.value).lstrip("+−")
    verb = "better" if (value > a.value) == a.higher_is_better else "worse"
    return f"B's {metric_name(name)} is {change} {verb}: {metric(name, value)}."


def _agreement_sentences(agreement: Agreement) -> list[str]:
    outputs, samples = agreement.outputs, f"of {agreement.samples} samples"
    if not outputs:
        return ["They have no output in common."]
    if all(output.equal for output in outputs):
        return ["Their outputs are equal."]
    lines = []
    compared = [output for output in outputs if output.compared]
    # A bad part can hide in a good output, so the sentence names the worst of outputs and parts.
    parts = [part.sqnr_db for output in compared for part in output.slices]
    if finite := [db for db in (*parts, *(output.sqnr_db for output in compared)) if math.isfinite(db)]:
        top1 = f"with the same top answer in {share(agreement.top1)} {samples}" if agreement.top1 is not None else ""
        closeness = top1 or f"with a cosine of {min(output.least_cosine for output in compared):.5f}"
        lines.append(f"B's outputs follow A's at {decibels(min(finite))} SQNR, {closeness}.")
    lines += [f"{text[0].upper()}{text[1:]}." for output in outputs for text in (output.basis_note,) if text]
    lines += [
        f"{text[0].upper()}{text[1:]}."
        for output in compared
        for text in (output.level_note,)
        if text and output.least_db < min([HEALTHY_DB, *finite])
    ]
    return lines + [
        f"Output {output.name} has another size in {output.mismatched} {samples}, which are left out."
        for output in outputs
        if output.mismatched
    ]


def check_limits(comparison: Comparison, a: str = "A", b: str = "B") -> tuple[LimitCheck, ...]:
    """Check each limit. The sentences in the result call the two models `a` and `b`.

    If the figure for a limit could not be measured, the limit is missed. There is one exception: if the machine was too
    busy to measure the speed, that limit is unsettled. Accuracy has no uncertainty, because the limit is only about
    these samples.
    """
    limits = comparison.limits
    checks = []
    if limits.max_drop is not None:
        checks.append(_drop(comparison, limits.max_drop, b))
    if limits.min_speedup is not None:
        checks.append(_speedup(comparison, limits.min_speedup, a, b))
    for title, values, limit in (
        ("size", (comparison.a.bytes, comparison.b.bytes), limits.max_growth),
        ("memory", _memories(comparison), limits.max_memory_growth),
    ):
        if limit is not None:
            # A model cannot outgrow itself, even if its memory was not measured.
            sentence = "" if comparison.same else _growth(title, *values, limit, a, b)
            checks.append(LimitCheck(title, limit, f"{share(limit)} more", MISSED if sentence else HELD, sentence))
    # Terminals, JSON and JUnit XML get these texts. Only the report uses thin spaces.
    return tuple(
        replace(check, text=check.text.replace("\u202f", " "), sentence=check.sentence.replace("\u202f", " "))
        for check in checks
    )


def speed_outcome(speedup: Claim, limit: float) -> Outcome:
    """Return whether the measurement shows a speed of at least `limit`, a speed below `limit`, or neither."""
    interval = speedup.interval
    # With the limit inside the interval, the true speed may be on either side of it.
    if interval is None or interval[1] < limit <= interval[2]:
        return UNSETTLED
    return HELD if interval[1] >= limit else MISSED


def _speedup(comparison: Comparison, limit: float, a: str, b: str) -> LimitCheck:
    required = f"less than the {times(limit)} required"
    claim = (
        read_speed(comparison.measurement, B)
        if comparison.measurement is not None
        else Claim(reason="it was not timed")
    )
    outcome, said = speed_outcome(claim, limit), claim.sentence(b, a)
    if comparison.same:
        # Equal models are not timed, because their ratio is known to be 1.
        outcome, said = HELD if limit <= 1 else MISSED, f"{b} is the same model as {a} and as fast"
    sentences = {
        HELD: "",
        MISSED: f"{said}, {required}",
        UNSETTLED: f"it was not shown that {b} is {times(limit)} as fast as {a}: {said}; try a longer ⟨duration_s⟩",
    }
    return LimitCheck("latency", limit, f"at least {times(limit)} the speed", outcome, sentences[outcome])


def _drop(comparison: Comparison, limit: float, b: str) -> LimitCheck:
    accuracy_a, accuracy_b = comparison.a.accuracy, comparison.b.accuracy
    # A limit that could not be checked counts as missed. Otherwise a build would pass because a measurement failed.
    if comparison.same or accuracy_a is None or accuracy_b is None:
        sentence = "" if comparison.same else f"the accuracy that {b} loses could not be measured"
        return LimitCheck("accuracy", limit, f"a loss of {limit:g}", MISSED if sentence else HELD, sentence)
    lost, name = accuracy_b.loss_against(accuracy_a), accuracy_a.primary
    drop_text, allowed = (difference(name, value).lstrip("+") for value in (lost, limit))
    sentence = f"{b} loses {drop_text} of {metric_name(name)}, more than the {allowed} allowed" if lost > limit else ""
    return LimitCheck("accuracy", limit, f"a loss of {allowed}", MISSED if sentence else HELD, sentence)


def _growth(title: str, bytes_a: int | None, bytes_b: int | None, limit: float, a: str, b: str) -> str:
    """Return a sentence on growth beyond the limit, or "" if the limit holds."""
    if bytes_a is None or bytes_b is None:
        return f"the {title} could not be compared"
    if bytes_b <= bytes_a * (1 + limit):
        return ""
    # Growth from nothing is not a share, so the sentence gives the size.
    more = share(bytes_b / bytes_a - 1) if bytes_a else size(bytes_b)
    return f"{b}'s {title} is {size(bytes_b)}, {more} more than {a}'s {size(bytes_a)}; {share(limit)} is allowed"


class ComparePlace(Opener, Protocol):
    """Compare models in a place other than this machine."""

    @property
    def name(self) -> str:
        """Return the name of the place for users."""

    def measure(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Run `measure_models` in this place on the models that were opened there, each in the given number of
        sessions.
        """


@dataclass(frozen=True)
class CompareRequest:
    """Describe what to compare.

    Attributes:
        a, b: model files or bundles.
        data: samples for both models; see `edgeq.data.samples.open_samples`. With None, the comparison leaves out
            everything that needs samples.
        task: the task that measures accuracy against the labels of the samples. With None, only the outputs are
            compared.
        preprocess: the preprocessing of the samples, or None to use that of a bundle.
        labels, count: the labels of the samples, and their largest number; see `edgeq.Data`.
        threads: number of threads within an operator; 0 for one thread per core.
        timed: True to time both models.
        duration_s: the minimum time for each model, in seconds.
        attempts: the maximum number of speed measurements. Each measurement takes twice as long as the one before.
            edgeq stops measuring when the limit on speed is settled.
        sessions: the number of sessions in which small models are timed; None means the result of `sessions_to_time`.
        session_options: session options for model files. They take precedence over options in the files.
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
    limits: LossLimits = field(default_factory=LossLimits)
    session_options: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 1
    sessions: int | None = None


class CompareOptions(TypedDict, total=False):
    """List the arguments of `compare` that are fields of a `CompareRequest` unchanged."""

    preprocess: Any
    labels: Any
    count: int | None
    threads: int
    duration_s: float


def compare(
    a: str | Path,
    b: str | Path,
    data: Any = None,
    *,
    task: Task | str | None = None,
    options: TaskOptions | None = None,
    timed: bool = True,
    max_drop: float | str | None = None,
    min_speedup: float | None = None,
    session_options: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
    **others: Unpack[CompareOptions],
) -> Comparison:
    """Compare two models, two bundles, or one of each. If something cannot be compared, there is a note instead of an
    error.

    Args:
        a, b: model files or bundles.
        data: samples for both models; see `edgeq.open_samples`. With None, the comparison leaves out everything that
            needs samples.
        task: the task that measures accuracy against the labels of the samples, or its name. With None, only the
            outputs are compared.
        options: the options of a task that is given by name.
        preprocess: the preprocessing of the samples, or None to use that of a bundle.
        labels, count: the labels of the samples, and their largest number; see `edgeq.Data`.
        threads: number of threads within an operator; 0 for one thread per core.
        timed: True to time both models, interleaved.
        duration_s: the minimum time for each model, in seconds; by default 2.
        max_drop: the accuracy that B may lose on these samples, in the unit of the task's primary metric (0.01 is one
            point of a share). It needs `task`. `Comparison.check` raises if B loses more.
        min_speedup: the minimum speed of B, as a multiple of the speed of A. The lower end of the measured interval
            must reach this value.
        session_options: session options for model files. They take precedence over options in the files. A bundle has
            its own session options.

    Raises:
        UsageError: a task is given without data, or an option has a wrong value.
        EdgeqError: there is an error in a model, a bundle or the data.
    """
    # A number is in the metric's unit, which need not be a share.
    limits = LossLimits(parse_drop(max_drop) if isinstance(max_drop, str) else max_drop, min_speedup)
    request = CompareRequest(
        path_of(a),
        path_of(b),
        data,
        task,
        options or TaskOptions(),
        timed=timed,
        limits=limits,
        session_options=session_options or {},
        **others,
    )
    return run_comparison(request, progress=progress)


def run_comparison(
    request: CompareRequest, *, place: ComparePlace | None = None, progress: Progress = SILENT
) -> Comparison:
    """Run `compare` for a request on this machine or in another `place`. Coverage in int8 is measured only on this
    machine.
    """
    if request.task is None:
        # Annotations already name a task: detection.
        request = replace(request, task=infer_task_name(None, request.options))
    if request.task is not None and request.data is None:
        raise UsageError("a task needs samples", "Give ⟨data⟩")
    if request.data is None:
        # Without samples, these would be ignored silently.
        about = {"⟨preprocess⟩": request.preprocess, "⟨labels⟩": request.labels, "⟨count⟩": request.count}
        for option, value in about.items():
            if value is not None:
                raise UsageError(f"{option} is about samples", "Give them with ⟨data⟩, or leave it out")
    if request.task is None and request.options.given():
        raise UsageError("task options without a task", "Give a ⟨task⟩")
    if request.limits.max_drop is not None and request.data is None:
        raise UsageError("⟨max_drop⟩ needs samples", "Give ⟨data⟩, with labels for a ⟨task⟩")
    if request.limits.min_speedup is not None and not request.timed:
        raise UsageError("⟨min_speedup⟩ needs timing", "Leave out ⟨timed=False⟩")
    notes: list[str] = []
    settings = SessionSettings(config=request.session_options, intra_op_threads=request.threads)
    refuse_ignored(settings, request.a, request.b)
    with ExitStack() as stack:
        # Both stay open until the end, because the runs of the two models alternate.
        a, b = (stack.enter_context(open_model(path, settings, opener=place)) for path in (request.a, request.b))
        differences = signature_differences(a.signature, b.signature)
        fits = is_interchangeable(a.signature, b.signature)
        if not fits:
            notes.append("their inputs differ, so they cannot run on the same samples or be timed together")
        samples = _samples(request, a, b, progress)
        if samples is None:
            notes.append("without ⟨data⟩, their outputs are not compared")
        evaluation = None
        task = as_task(request.task, request.options) if request.task is not None else None
        if samples is not None and fits:
            if task is not None:
                task = settle(task, a.session, samples, progress=progress)
            else:  # Without labels, A's answers are the labels.
                task, samples = judge_by_answers(a, samples, progress=progress)
            if task is None and request.limits.max_drop is not None:
                raise UsageError("⟨max_drop⟩ needs a task", "Give a ⟨task⟩, and labelled samples as ⟨data⟩")
            evaluation = evaluate_sessions(
                {A: a.session, B: b.session},
                samples,
                task=task,
                reference=A,
                settings={A: a.settings, B: b.settings},
                basis=sampled_basis(GraphIndex(a.graph), a.session, samples),
                progress=progress,
            )
        is_local = place is None
        sides = [
            _read_side(loaded, key, samples, evaluation, notes, is_local=is_local) for key, loaded in ((A, a), (B, b))
        ]
        # If both models are the same and run in the same way, timing them would measure only the machine's noise.
        timed = request.timed and fits and not sides[0].same_as(sides[1])
        measurement = _time(request, a, b, samples, place, progress) if timed else None
    return Comparison(
        a=sides[0],
        b=sides[1],
        signature_differences=differences,
        samples=evaluation.samples if evaluation is not None else 0,
        agreement=evaluation.agreement[B] if evaluation is not None else None,
        measurement=measurement,
        notes=(*notes, *(measurement.notes if measurement is not None else ())),
        limits=request.limits,
    )


def _samples(request: CompareRequest, a: LoadedModel, b: LoadedModel, progress: Progress) -> Samples | None:
    if request.data is None:
        return None
    # Both models must get the same inputs, so the preprocessing of one serves both.
    preprocessings = [s.preprocess for s in (a, b) if s.preprocess is not None]
    preprocess = request.preprocess if request.preprocess is not None else next(iter(preprocessings), None)
    task = as_task(request.task, request.options) if request.task is not None else None
    return open_or_search(
        in_role(as_data(request.data) or Data(request.data), "validation"),
        a.signature,
        session=lambda: a.session,
        labelled_data=Data(request.data, labels=request.labels, role="validation"),
        task=task,
        preprocess=preprocess,
        labels=request.labels,
        count=request.count,
        model=request.a if a.variant is None else None,
        progress=progress,
    )


def _read_side(
    loaded: LoadedModel,
    key: str,
    samples: Samples | None,
    evaluation: Evaluation | None,
    notes: list[str],
    *,
    is_local: bool,
) -> Side:
    size = digest = None
    coverage: Mapping[str, Any] | None = None
    try:
        # A model that cannot be read or profiled still has its other figures, so an error here becomes a note.
        size = model_bytes(loaded.model, loaded.folder)
        digest = model_digest(loaded.model, loaded.folder)
        if is_local:
            first_feed = next(iter(samples)).inputs if samples is not None and evaluation is not None else None
            feed = first_feed or draw_feeds(loaded.session, count=1)[0]
            # There is no float model here, so the quantized graph takes its place. The MACs come from the graph's own
            # nodes and shapes.
            coverage = plain(measure_coverage(loaded.model, loaded.settings, feed, loaded.graph, lambda name, op: ""))
    except EdgeqError as error:
        notes.append(f"{key}: {error.text}")
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
    # Both models get the same number of sessions, because pairs of sessions are compared.
    count = min(count_sessions(side.model, side.folder) for side in (a, b))
    count = request.sessions or count if count > 1 else 1
    limit = request.limits.min_speedup
    for attempt in range(request.attempts):
        # A repeat of the same length would rarely narrow the interval enough to settle the limit.
        duration_s = request.duration_s * 2**attempt
        settings = BenchSettings(baseline=A, threads=request.threads, min_duration_s=duration_s)
        if place is not None:
            measurement = place.measure({A: a, B: b}, count, Workload(settings, feeds))
        else:
            with Engines() as engines:
                measurement = measure_models(
                    [
                        bench_model(key, s.model, s.settings, engines=engines, sessions=count)
                        for key, s in ((A, a), (B, b))
                    ],
                    settings,
                    feeds=None if feeds is None else lambda session: feeds,
                    progress=progress,
                )
        if limit is None or speed_outcome(read_speed(measurement, B), limit) != UNSETTLED:
            break
    return measurement
