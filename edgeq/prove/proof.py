"""Check every build before it counts as finished."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.claim import SLOWER, Claim, make_claim
from edgeq_device.measure.latency import Distribution
from edgeq_device.measure.load import CompetingLoad

from edgeq.backends.base import Artifact
from edgeq.data.array_store import ArrayStore
from edgeq.data.samples import Samples, places, spread_over
from edgeq.distributed.workers import Workers
from edgeq.errors import CheckFailedError, RuntimeUnavailableError, UsageError
from edgeq.measure.accuracy import Accuracy, evaluate_sessions
from edgeq.measure.agreement import HEALTHY_DB, Agreement, closeness, worst_db
from edgeq.measure.answer_meter import HEALTHY
from edgeq.measure.answer_task import FloatAnswers, describe_answers
from edgeq.measure.baseline import LEAST_MARGIN_DB, BaselineMargin
from edgeq.measure.coverage import Coverage
from edgeq.measure.operating_point import OperatingPoint
from edgeq.measure.race import RacedFile, race_files
from edgeq.measure.shared_evaluation import ModelAt, evaluate_on
from edgeq.measure.skill import score_interval
from edgeq.measure.task import Task
from edgeq.measure.timed_evaluation import evaluate_timed
from edgeq.measure.timed_model import count_sessions
from edgeq.model.load import unchecked_signature
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.prove.opening import Opening, check_other_sizes, open_as_device
from edgeq.run.engines import DEFAULT
from edgeq.run.session import Engines, build_float_settings
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.numbers import difference, metric, metric_name, share

FLOAT, INT8 = "float32", "int8"

# Number of multiply-accumulates that a simulator of an engine's hardware computes in about half a minute.
_SIMULATED_MACS = 1_000_000_000
# Fewer samples say too little, even if the simulator takes minutes for these.
_LEAST_SIMULATED = 16
# The minimum SQNR in dB at a size other than that of the samples. Below this, half of the power or more is noise.
_WRONG_DB = 3.0
# The minimum SQNR in dB of a part of an output. Below this, half of the part's power or more is noise.
_DEAD_SQNR_DB = 3.0
POOR_DROP = 0.05
"""The loss of accuracy, as a fraction, above which there is a warning. `max_drop` sets the loss above which a result is
refused.
"""
# The minimum number of samples whose top-1 differs from that of float32. With fewer such samples, no conclusion about
# other samples is possible.
_LEAST_CHANGED = 3
# Below this share of the MACs in int8, there is a warning: float takes most of the time.
_POOR_COVERAGE = 0.25
# The minimum SQNR in dB of class scores that are judged by their classes. Below it, rare classes may be lost although
# the others are right.
_CLASSES_DB = 15.0
# Classes count as kept if, with 95 % confidence, no more than this share of them changes.
_MOST_CHANGED = 0.1
# Outputs this close to float32's hardly change a task's metric.
_CLOSE_DB = 30.0
FEWEST_SAMPLES = 8
"""With fewer samples and without labels, nothing is repaired. A repair would be fitted to these samples, and its SQNR
on other samples would be far lower.
"""


class NotFiniteError(CheckFailedError):
    """Report an output that is NaN or infinite although the float model's output is a finite number."""


@dataclass(frozen=True)
class FasterForm:
    """Describe another form of the model that is faster on this machine than the artifact, and about as accurate.

    Attributes:
        name: what runs: "float32", or the float model in another engine.
        ratio: the claim about its speed against float32; None for float32.
        loss: its loss of accuracy as a fraction; without labels, its noise power divided by its signal power.
        samples: number of samples on which `loss` was measured; 0 for float32.
        command: the command to type.
        sentence: a sentence on the form and on the command.
    """

    name: str
    ratio: Claim | None
    loss: float
    samples: int
    command: str
    sentence: str


@dataclass(frozen=True)
class SpeedComparison:
    """Compare the speeds of float32 and the artifact on this machine, in interleaved runs.

    Attributes:
        latency: the latencies by name. They come from the undisturbed runs, or from all runs if every run was
            disturbed.
        ratio: the claim that can be made about the artifact's speed against float32.
        alternative: a form of the model that is faster; None if no such form is known.
        advice: a sentence on an engine that is not installed and may be faster; "" if there is none.
    """

    latency: Mapping[str, Distribution]
    ratio: Claim
    alternative: FasterForm | None = None
    advice: str = ""


@dataclass(frozen=True)
class RepairStep:
    """Describe one change that was tried to repair a poor result.

    Attributes:
        name: what was changed in comparison with the plain build.
        loss: the loss as a fraction, measured as `Repair.basis` defines; None if the change was dropped before it was
            measured.
        samples: the number of samples that `loss` was measured on.
        int8_mac_share: the share of the multiply-accumulates that run in int8.
        reason: why the change was or was not chosen.
    """

    name: str
    loss: float | None
    samples: int
    int8_mac_share: float
    reason: str


@dataclass(frozen=True)
class Repair:
    """Record the changes that were tried on a poor result, and the outcome.

    Attributes:
        effort: "quick", "default" or "thorough".
        max_drop: the allowed loss as a fraction.
        basis: "labels", "answers" (those of the float model) or "noise". For "noise", the loss is the noise power of
            the worst output divided by its signal power.
        plain: the loss to expect of the plain build, at least that on the samples; for "noise", the noise on them.
        loss: the same for the chosen build.
        chosen: what was changed in the chosen build in comparison with the plain build.
        steps: all builds, in the order in which they were tried.
        noisiest: the layers that add most noise, if the target has no float and the chosen build loses too much.
    """

    effort: str
    max_drop: float
    basis: str
    plain: float
    loss: float
    chosen: str
    steps: tuple[RepairStep, ...]
    noisiest: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """Return whether the chosen result loses no more than is allowed."""
        return self.loss <= self.max_drop

    @property
    def sentence(self) -> str:
        """Return a sentence on the chosen change and its effect."""
        loss_before, loss_after, goal = (self.written(loss) for loss in (self.plain, self.loss, self.max_drop))
        unit, digits = ("%", 1) if self.basis == "answers" else ("points", 2)
        allowed = f"{100 * self.max_drop:.{digits}f} {unit} allowed"
        limit = f"{goal} wanted" if self.basis == "noise" else allowed
        named = f"; {', '.join(self.noisiest)} add most of the noise" if self.noisiest else ""
        builds = f"{_count_builds(len(self.steps))} compared{named}"
        if self.loss == self.plain:
            return f"no build that was tried is better than the plain one: {loss_before}; {limit} ({builds})"
        short = "" if self.met else f"; {limit}"
        return f"repaired: {self.chosen}: {loss_before} before, {loss_after} now{short} ({builds})"

    def written(self, loss: float) -> str:
        """Return a loss as text. `basis` determines its unit."""
        if self.basis == "noise":
            return "no noise" if loss <= 0 else f"{0 - 10 * math.log10(loss):.1f} dB SQNR"
        if self.basis == "answers":
            return f"{100 * max(loss, 0.0):.1f} % of float32's answers lost"
        return f"{100 * loss:.2f} points of loss"

    def __record__(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "met": self.met, "sentence": self.sentence}


@dataclass(frozen=True)
class Proof(Displayed):
    """Hold the measured figures of one artifact.

    Attributes:
        coverage: what runs in integers on the target after the runtime's optimisation, and how this is known.
        agreement: the comparison between the float model and the artifact, which uses the session options that ship.
        accuracy: the accuracy by labels, with the keys "float32" and "int8"; empty without a task.
        opening: the comparison between the shipped file as devices open it and the same file without optimisation.
        speed: the speed against float32; None if it was not measured.
        samples: the number of samples that `agreement` and `accuracy` were measured on.
        held_out: True if those samples are not among the calibration samples.
        engine: the engine that ran the artifact for these figures.
        repair: the attempts to repair a poor plain build; None if that build was good or no repair was requested.
        doubts: reasons to doubt the samples, one sentence each.
        drop_interval: the 95 % interval of `drop` over many other samples; None without a task, or if the task's meters
            do not show the spread of their metric.
        baseline: what the float model adds to its input in relation to the noise; None if no output resembles an input.
        unseen: inputs that are zero in all calibration samples.
        answers: whether the accuracy is one of answers that the whole output gives, such as boxes. Answers then decide
            about the build, whatever the noise of the tensors.
        operating: what the float model and the artifact find at the threshold; None if the task does not count objects.
        labelled: whether the accuracy is by labels, not by the float model's own answers.
    """

    coverage: Coverage
    agreement: Agreement
    accuracy: Mapping[str, Accuracy]
    opening: Opening
    speed: SpeedComparison | None
    samples: int
    held_out: bool
    engine: str = DEFAULT
    repair: Repair | None = None
    doubts: tuple[str, ...] = ()
    drop_interval: tuple[float, float] | None = None
    baseline: BaselineMargin | None = None
    unseen: tuple[str, ...] = ()
    answers: bool = False
    labelled: bool = True
    operating: OperatingPoint | None = None

    @property
    def drop(self) -> float | None:
        """Return the loss of accuracy against float32 in the task's primary metric, as a fraction, or None if there is
        no task.
        """
        return self.accuracy[INT8].loss_against(self.accuracy[FLOAT]) if self.accuracy else None

    @property
    def answers_sentence(self) -> str:
        """Return a sentence on the float model's answers that the artifact gives again; "" with labels."""
        if self.labelled or not self.accuracy:
            return ""
        accuracy = self.accuracy[INT8]
        return describe_answers(accuracy.metrics, accuracy.primary, accuracy.samples)

    @property
    def drop_sentence(self) -> str:
        """Return a sentence on the loss of accuracy and its interval; "" without a task."""
        if self.drop is None:
            return ""
        name = self.accuracy[FLOAT].primary
        lost = f"loss of {metric_name(name)}: {_points(name, self.drop)} on {self.samples} samples"
        if self.drop_interval is None:
            return lost
        low, high = (_points(name, end) for end in self.drop_interval)
        return f"{lost}; on many others, {low} to {high} (95 %)"

    @property
    def too_few(self) -> bool:
        """Return whether the agreement with float32 on so few samples cannot decide on a repair."""
        return not (self.accuracy and self.labelled) and self.samples < FEWEST_SAMPLES

    @property
    def same_classes(self) -> tuple[int, float, float] | None:
        """Return how many samples have the same top-1 as float32, and the 95 % interval of their share among many other
        samples. Return None if no output has class scores.
        """
        if self.agreement.top1 is None:
            return None
        agreeing, count = round(self.agreement.top1 * self.agreement.samples), max(1, self.agreement.samples)
        return agreeing, *score_interval(agreeing, count)

    @property
    def keeps_classes(self) -> bool:
        """Return whether the noise is moderate and certainly changes few classes. Class scores are judged by their
        classes, not by their noise.
        """
        noisy = [output for output in self.agreement.outputs if output.compared and output.least_db < HEALTHY_DB]
        if self.same_classes is None or not all(output.top1 is not None for output in noisy):
            return False
        return worst_db(self.agreement) >= _CLASSES_DB and self.same_classes[1] >= 1 - _MOST_CHANGED

    @property
    def adds_little(self) -> bool:
        """Return whether the noise has a quarter or more of the power of what the model adds to its input."""
        return not self.accuracy and self.baseline is not None and self.baseline.margin_db < LEAST_MARGIN_DB

    def falls_short(self, max_drop: float) -> bool:
        """Return whether labels or answers show a loss of more than `max_drop`, or an output has too much noise."""
        if self.answers:
            return (self.drop or 0.0) > max_drop
        noisy = self.agreement.compared and worst_db(self.agreement) < HEALTHY_DB and not self.keeps_classes
        return (self.drop or 0.0) > max_drop or noisy or self.adds_little

    def may_fall_short(self, max_drop: float) -> bool:
        """Return whether labels or answers show no certain loss of at most `max_drop`, and the outputs are not close to
        float32's. Where no layer can go to float, further builds are the only way to a surer result.
        """
        if self.drop_interval is None or not self.agreement.compared:
            return False
        return self.drop_interval[1] > max_drop and worst_db(self.agreement) < _CLOSE_DB

    def limit(self, max_drop: float) -> float:
        """Return the loss that a repair may leave. It is `max_drop`, or less noise if the model adds little to its
        input.
        """
        if not self.adds_little or self.baseline is None:
            return max_drop
        # The noise must fall as far as the margin is too small.
        noise_db = worst_db(self.agreement) + LEAST_MARGIN_DB - self.baseline.margin_db
        return min(max_drop, 10 ** (-noise_db / 10))

    @property
    def caveat(self) -> str:
        """Return a sentence on what the agreement with float32 does not show; "" if there are labels."""
        if self.accuracy or not self.agreement.compared:
            return ""
        if self.same_classes is not None:
            agreeing, low, high = self.same_classes
            return (
                f"top-1 is that of float32 in {agreeing} of {self.agreement.samples} samples, and in {low:.0%} to "
                f"{min(1, high):.0%} of many others; only labels show how often it is right"
            )
        if self.agreement.same is not None or self.agreement.sqnr_db == math.inf:
            return ""
        return "SQNR does not show whether the model still does its task: measure it with ⟨task⟩, or by your own metric"

    @property
    def optimiser(self) -> tuple[float, float]:
        """Return two SQNRs against float32 in dB, measured on the same samples. The first is that of the file as
        devices open it, the second that of the file without optimisation.
        """
        return self.opening.opened, self.opening.written

    def __brief__(self) -> dict[str, Any]:
        return {
            "int8_mac_share": self.coverage.int8_mac_share,
            "sqnr_db": self.agreement.sqnr_db,
            "top1_agreement": self.agreement.top1,
            "accuracy": {name: metric.value for name, metric in self.accuracy.items()},
            "drop": self.drop,
            "drop_interval": self.drop_interval,
            "speedup": self.speed.ratio.estimate if self.speed is not None else None,
            "samples": self.samples,
            "held_out": self.held_out,
            "warnings": self.warnings(),
        }

    def warnings(self, *, timed: bool = True) -> tuple[str, ...]:
        """Return warnings for the user, one sentence each. If `timed` is False, leave out those about speed."""
        sentences = list(self.doubts)
        count, worst = self.agreement.samples, self.agreement.worst
        changed = 0 if self.agreement.top1 is None else round((1 - self.agreement.top1) * count)
        slower = self.speed is not None and self.speed.ratio.verdict == SLOWER
        if timed and self.speed is not None and slower and self.speed.alternative is None:
            sentences.append(
                f"{self.speed.ratio.sentence('int8', 'float32')}; `edgeq tune` searches for a faster model"
            )
        verdict = closeness(self.agreement) if self.drop is None and self.agreement.compared else "healthy"
        unlike = worst.level_note if worst is not None else ""
        sqnr, measure = f"{self.agreement.sqnr_db:.1f} dB SQNR", "measure accuracy with ⟨task⟩ before you deploy it"
        short = self.repair is not None and not self.repair.met
        allowed = POOR_DROP if self.labelled or self.drop is None else 1 - HEALTHY[self.accuracy[FLOAT].primary]
        if self.drop is not None and (self.drop > allowed or short):
            loss = (
                f"accuracy falls from {_accuracy_text(self.accuracy[FLOAT])} to {_accuracy_text(self.accuracy[INT8])}"
                if self.labelled
                else f"only {share(self.accuracy[INT8].value)} of float32's answers are given again"
            )
            sentences.append(f"{loss}: {self._advice()}")
        # A metric may not notice that part of an output is useless, because it may read only other parts.
        by_part = self.drop is not None and not self.answers
        dead = by_part and worst is not None and unlike and worst.least_db < _DEAD_SQNR_DB
        if verdict == "poor" or dead:
            sentences.append(f"{unlike or f'the outputs follow float32 to only {sqnr}'}: {self._advice()}; {measure}")
        # With labels, the accuracy already shows what changed classes cost.
        elif self.drop is None and changed > POOR_DROP * count and changed >= _LEAST_CHANGED:
            sentences.append(
                f"int8 has another top-1 than float32 in {changed} of {count} samples: {self._advice()}; {measure}"
            )
        elif verdict == "noisy" and self.agreement.least_db < HEALTHY_DB and not self.keeps_classes:
            sentences.append(
                f"{unlike or f'the outputs follow float32 with noise ({sqnr})'}: {self._advice()}; {measure}"
            )
        if self.adds_little and self.baseline is not None:
            sentences.append(f"{self.baseline.sentence}: {self._advice()}; {measure}")
        if self.accuracy:
            sentences.extend(self.accuracy[FLOAT].doubts)
        left_out = self.agreement.mismatch_notes()
        sentences.extend(left_out)
        if self.drop is None and not self.agreement.compared and not left_out:
            sentences.append(f"no output could be compared with float32's: {measure}")
        largest_node = max(self.coverage.float_nodes, key=lambda n: n.macs, default=None)
        if largest_node is not None and (self.coverage.int8_mac_share or 0) < _POOR_COVERAGE and largest_node.macs:
            sentences.append(
                f"most of the arithmetic stays in float; the largest part is {largest_node.name} "
                f"({largest_node.op_type}: {largest_node.reason}); `edgeq tune` tries other schemes"
            )
        if self.opening.loss:
            sentences.append(self.opening.sentence)
        if self.samples < FEWEST_SAMPLES:
            samples_say = "1 sample says" if self.samples == 1 else f"{self.samples} samples say"
            sentences.append(
                f"{samples_say} little about others: give at least {FEWEST_SAMPLES}, and better 100, with ⟨val⟩"
            )
        if self.unseen:
            listed = ", ".join(map(repr, self.unseen))
            sentences.append(
                f"input {listed} is zero in all calibration samples: with other values, ranges that depend on it may "
                "be too narrow, and the outputs may follow float32 less closely; add samples with such values"
            )
        if not self.held_out:
            sentences.append("accuracy was measured on the calibration samples; give held-out samples with ⟨val⟩")
        return tuple(sentences)

    def _advice(self) -> str:
        """Return advice on how to improve a poor result."""
        closer = "`edgeq debug` names the layers that cause it"
        if self.repair is None and self.too_few:
            return f"nothing is repaired by fewer than {FEWEST_SAMPLES} samples; {closer}"
        if self.repair is None:
            return f"`⟨effort⟩ thorough` without ⟨effort=None⟩ and ⟨recover⟩ may repair it; {closer}"
        more = "" if self.repair.effort == "thorough" else "`⟨effort⟩ thorough` tries more; "
        return f"{self.repair.sentence}; {more}{closer}"

    def check(self, *, max_drop: float | None, require_coverage: float | None) -> None:
        """Raise CheckFailedError if the proof misses a limit that the user set. Raise RuntimeUnavailableError if a
        coverage is required and only a forecast of it exists.
        """
        lost = self.drop
        if max_drop is not None and lost is None:
            raise UsageError("a limit on the accuracy drop needs labels", "Give labelled ⟨val⟩ data")
        if max_drop is not None and lost is not None and lost > max_drop:
            name = self.accuracy[FLOAT].primary
            raise CheckFailedError(
                f"accuracy falls by {_points(name, lost)}, more than the {_points(name, max_drop)} allowed",
                f"{self._advice()}; or raise ⟨max_drop⟩",
            )
        share = self.coverage.int8_mac_share
        if require_coverage is not None and (share is None or not self.coverage.measured):
            coverage = self.coverage
            forecast = f"; {coverage.summary()}" if share is not None else ""
            raise unchecked((coverage.reason or coverage.how) + forecast)
        if require_coverage is not None and share is not None and share < require_coverage:
            worst = max(self.coverage.float_nodes, key=lambda n: n.macs, default=None)
            reason = f"; the largest operator in float is {worst.name} ({worst.reason})" if worst is not None else ""
            raise CheckFailedError(
                f"{share:.1%} of the multiply-accumulates run in int8, less than the "
                f"{require_coverage:.1%} required{reason}",
                "Lower ⟨require_coverage⟩, or see `edgeq inspect -v` for what could run in int8",
            )

    def __record__(self) -> dict[str, Any]:
        return {
            "coverage": self.coverage,
            "agreement": self.agreement,
            "accuracy": self.accuracy,
            "accuracy_drop": self.drop,
            "accuracy_drop_interval": self.drop_interval,
            "optimiser_sqnr_db": {"optimised": self.optimiser[0], "unoptimised": self.optimiser[1]},
            "speed": self.speed,
            "samples": self.samples,
            "held_out": self.held_out,
            "engine": self.engine,
            "repair": self.repair,
            "baseline": self.baseline,
            "caveat": self.caveat,
            "operating_point": self.operating,
            "warnings": self.warnings(),
        }


def _count_builds(count: int) -> str:
    return "1 build" if count == 1 else f"{count} builds"


def _accuracy_text(accuracy: Accuracy) -> str:
    return metric(accuracy.primary, accuracy.value).replace("\u202f", " ")


def _points(name: str, lost: float) -> str:
    return difference(name, lost).lstrip("+").replace("\u202f", " ")


def unchecked(reason: str) -> RuntimeUnavailableError:
    """Return the error for a required coverage that cannot be checked here. Neither the kernels of another CPU nor a
    forecast can prove a coverage.
    """
    return RuntimeUnavailableError(
        f"⟨require_coverage⟩ cannot be checked here: {reason}",
        "Enable its kernels here, check on such a device, or leave out ⟨require_coverage⟩",
    )


@dataclass(frozen=True)
class ProofSamples:
    """Hold the samples of a proof, and what is known about them.

    Attributes:
        held_out: whether the samples are not among the calibration samples.
        float_outputs: the float model's outputs by the sample's place. The float model runs only samples without
            outputs, and their outputs are added. None stores no outputs.
        basis: what the figures are taken over.
    """

    samples: Samples
    held_out: bool
    float_outputs: ArrayStore | None = None
    basis: Basis = EVERYTHING


def prove(
    prepared: PreparedModel,
    artifact: Artifact,
    source: ProofSamples,
    coverage: Coverage,
    *,
    task: Task | None = None,
    timed: bool = True,
    threads: int = 0,
    workers: Workers | None = None,
    count: int | None = None,
    progress: Progress = SILENT,
) -> Proof:
    """Load the artifact the way its device will load it, and measure it against the float model from which it was made.

    A plug-in engine runs the artifact in its own process. The float model runs on onnxruntime's own kernels, unless the
    target has only the engine's kernels.

    Args:
        source: the samples, with what is known about them.
        coverage: the coverage of the artifact on its target.
        workers: the processes that share the samples. Timed runs stay in this process.
        count: the number of samples to use, spread evenly over all. None means all samples, or `simulated_count`
            samples if the engine's hardware is simulated.

    Raises:
        RuntimeUnavailableError: the artifact does not load.
        NotFiniteError: the artifact outputs NaN or infinities, but the float model does not.
        CheckFailedError: the file gives different outputs when it is opened as on devices, or its outputs are wrong at
            another size that the model accepts.
    """
    samples, basis, float_outputs = source.samples, source.basis, source.float_outputs
    files = {FLOAT: prepared.path, INT8: artifact.proof_model}
    backend = artifact.plugin.engine.int8.backend if artifact.plugin is not None else ""
    settings = {FLOAT: build_float_settings(backend, threads), INT8: artifact.proof_settings(threads=threads)}
    count = simulated_count(prepared, artifact) if count is None else count
    if count is not None and count < len(samples):
        if float_outputs is not None:
            float_outputs = float_outputs.select(places(len(samples), count))
        samples = spread_over(samples, count)
    # The outputs are those of onnxruntime's own kernels.
    shared = float_outputs is not None and settings[FLOAT].engine is None
    known_outputs = {FLOAT: float_outputs} if float_outputs is not None and shared else {}
    # A simulation's time says nothing about the hardware.
    timed = timed and artifact.simulation is None
    latency: Mapping[str, Distribution] = {}
    with Engines(keep=True) as engines:
        with progress.stage("Opening the models"):
            singles = {name: engines.open(file, settings[name]) for name, file in files.items()}
        measured: dict[str, Any] = {"task": task, "reference": FLOAT, "settings": settings, "basis": basis}
        measured["progress"] = progress
        if workers is not None:
            models = {name: ModelAt(file, settings[name]) for name, file in files.items()}
            evaluation = evaluate_on(workers, models, samples, count=count, **measured)
        # One session is enough to time a large model, so its evaluation gives the times, too.
        elif timed and count_sessions(prepared.path) == 1:
            alone = {name: [session] for name, session in singles.items()}
            evaluation, latency = evaluate_timed(alone, samples, known_outputs=known_outputs, **measured)
        else:
            evaluation = evaluate_sessions(singles, samples, known_outputs=known_outputs, **measured)
        agreement = evaluation.agreement[INT8]
        broken = [output.name for output in agreement.outputs if output.nonfinite]
        # SQNR and accuracy of NaN would only hide the fault, so it ends the proof.
        if broken:
            raise NotFiniteError(
                f"{artifact.model.name}: output {broken[0]!r} is not finite, but the float model's is",
                "Keep the layers that cause it in float with ⟨min_sqnr_db⟩ 20, or see the ranges: `edgeq calibrate "
                "show`",
            )
        if artifact.plugin is None:
            check_other_sizes(
                prepared,
                (singles[FLOAT], singles[INT8]),
                samples,
                takes=unchecked_signature(artifact.model, artifact.model),
                form="its quantized form",
                sqnr_db=agreement.sqnr_db,
                least_db=_WRONG_DB,
                basis=basis,
            )
        load = CompetingLoad()
        with progress.stage("The optimiser's effect"):
            opening = open_as_device(
                artifact, singles, samples, threads=threads, known_outputs=known_outputs, basis=basis
            )
            # Before the timing, because a file that devices open differently must not be shipped at any speed.
            opening.check(artifact.model)
        if timed and not latency:
            with progress.stage("Timing int8 against float32") as advance:
                sessions = count_sessions(prepared.path)
                raced = {n: RacedFile(file, settings[n], singles[n], sessions) for n, file in files.items()}
                latency = race_files(engines, raced, next(iter(samples)).inputs, load, lambda: advance(0))
    return Proof(
        coverage=coverage,
        agreement=agreement,
        accuracy=evaluation.accuracy,
        opening=opening,
        speed=_speed(latency) if latency else None,
        samples=evaluation.samples,
        held_out=source.held_out,
        drop_interval=evaluation.loss_interval.get(INT8),
        baseline=evaluation.baseline.get(INT8),
        engine=artifact.engine.name if artifact.engine is not None and artifact.simulation is None else DEFAULT,
        unseen=prepared.unseen,
        answers=getattr(task, "reads_answers", False),
        labelled=not isinstance(task, FloatAnswers),
        operating=evaluation.operating.get(INT8),
    )


def simulated_count(prepared: PreparedModel, artifact: Artifact) -> int | None:
    """Return how many samples to run if the engine is a simulator, or None for all samples. The number depends only on
    the work per sample, so it is the same on every machine.
    """
    if not artifact.in_simulator:
        return None
    return max(_LEAST_SIMULATED, _SIMULATED_MACS // max(1, sum(node_macs(prepared.model).values())))


def _speed(latency: Mapping[str, Distribution]) -> SpeedComparison:
    speedup = make_claim(latency[FLOAT], latency[INT8])
    return SpeedComparison({name: distribution.drop_disturbed() for name, distribution in latency.items()}, speedup)
