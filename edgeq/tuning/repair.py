"""Repair a poor build with few further builds. Changes that cost no speed come first, changes that cost speed last.

1. All recoveries that help the model, in one build. Each of them decides from statistics whether it has something to
   do, so they need no comparison of builds.
2. If little is missing: the same with other ranges. If products dominate the model: ranges measured at run time.
3. One set of layers in float, or of tensors in 16 bits. A ranking predicts the noise that each of them causes at the
   outputs, so the size of the set follows from the loss so far.
4. One correction of that size, by the loss that step 3 leaves.

The repair ends at the first build that is good enough, or after three builds.

On hardware without float, nothing else makes up for a poor build. So steps 1 and 2 try more combinations: all
recoveries, only those that leave the model as it is, and none, each with several ranges. Steps 3 and 4 follow only if
the hardware has 16 bits.

A build is good enough if it loses no more than is allowed. With labels or with the float model's answers, the loss is
that on the samples: more samples narrow its interval, layers in float do not. Without them, the loss is noise power
over signal power in the worst output, or in the worst slice of an output. A loss of one point is then an SQNR of 20 dB.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edgeq.backends.base import backend_named
from edgeq.data.samples import spread_over
from edgeq.errors import UsageError
from edgeq.hardware.profile import Profile
from edgeq.hardware.target import Target
from edgeq.measure.agreement import worst_db
from edgeq.measure.task import Task
from edgeq.model.macs import node_macs
from edgeq.prove.job import Built, Job
from edgeq.prove.proof import Proof, Repair, RepairStep
from edgeq.prove.request import Effort
from edgeq.run.engines import EngineChoice
from edgeq.run.session import Engines
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.tuning.accuracy_estimate import name_basis
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.float_layers import EIGHT_BIT, EXCLUDE, LayerRanking, RankedLayer, find_affordable
from edgeq.tuning.goal import Goal
from edgeq.tuning.judge import build_and_assess
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.measurements import Assessment
from edgeq.tuning.pace import Pace
from edgeq.tuning.recover.methods import recoveries
from edgeq.tuning.sentences import describe_allowed_loss, describe_loss
from edgeq.tuning.space import WORTH_A_TRY, Candidate, product_share, sequence_candidates, with_scheme
from edgeq.tuning.trials import Trial, Trials

PLAIN = "the plain build"
# Largest numbers of multiply-accumulates, for one pass over the calibration samples and for one pass over the
# validation samples.
_CALIBRATED_MACS, _VALIDATED_MACS = 20_000_000_000, 200_000_000_000
_MIN_SAMPLES = 32
_FIELD_TITLES = {"exclude": "nodes in float", "wide": "tensors in 16 bits", "eight_bit": "products in 8 bits"}
_PRECISION_REASON = "kept in float by the repair, to lose less accuracy"
# Share of the allowed loss. Losses that differ by less are considered equal.
_EQUAL_LOSS = 0.25
# Multiple of the allowed loss. Other ranges cost no speed, but with a larger loss than this, they are unlikely to
# suffice.
_RANGES_MAY_HELP = 5.0
# A set of layers aims at a loss a little below the allowed loss, because the ranking only predicts it.
_AIM = 0.8
# A set that leaves less than this share of the allowed loss is larger than necessary, so a smaller one is built.
_WASTEFUL = 0.4
# Losses are not exactly proportional to the predicted noise. The exponent that two measurements give is trusted only
# between these limits.
_EXPONENTS = 0.4, 2.5
# Largest cost of a set, as a share of the cost of all layers in float: with almost all layers in float, a model is
# hardly quantized.
_MOST_FLOAT = 0.9
# Number of layers to name if a result that has no float layers loses more than is allowed.
_NAMED_LAYERS = 3
_BUILDS: dict[Effort, int] = {"quick": 1, "default": 3, "thorough": 8}
"""Largest number of builds, in addition to the plain one."""
_INTEGER_BUILDS: dict[Effort, int] = {"quick": 2, "default": 8, "thorough": 16}
"""The same, on hardware without float."""
# A repair judges a build on all samples at once, unless a few samples show that it is far from good enough.
_PACE = Pace(halvings=4)


def repair(
    job: Job,
    target: Target,
    scheme: Scheme,
    destination: Path,
    *,
    proof: Proof | None,
    max_drop: float,
    effort: Effort,
    fixed_fields: Collection[str] = (),
    engine: EngineChoice | None = None,
) -> tuple[Built | None, Repair | None]:
    """Find a replacement for the plain build of `scheme`, and build it at `destination`. Return the new build with a
    record of what was tried.

    Args:
        proof: the proof of the plain build; None if its outputs are not finite.
        max_drop: the allowed loss, as a fraction.
        fixed_fields: fields of the scheme that the user has set; they stay as they are.
        engine: the engine that runs the build; None means onnxruntime's own kernels.

    Returns:
        (the build, or None if the plain build is the best; the record, or None if the plain build loses no more than is
            allowed).

    Raises:
        EdgeqError: a stage of the repair fails.
    """
    assessment = _read_assessment(proof, job.task)
    # Further builds cost no speed where all of them are in integers, so they may also make a result surer.
    surely = target.profile.integer_only and assessment.basis != "noise"
    if (assessment.high if surely else assessment.bound) <= max_drop:
        return None, None
    job.progress.note(
        f"{PLAIN} {describe_loss(assessment)}; {describe_allowed_loss(assessment, max_drop)}: trying to repair it"
    )
    if effort != "thorough":
        job = _limit_samples(job)
    speed = _read_speed(proof)
    # The folder is next to the prepared model, because an artifact may refer to files there until the job ends.
    workdir = Path(tempfile.mkdtemp(prefix="repair-", dir=job.folder))
    plain = with_scheme(Candidate("", scheme, engine=engine), scheme)
    with Engines(keep=True) as engines:
        evaluator = LocalEvaluator(
            job,
            target,
            workdir,
            counts=True,
            repairs=True,
            profiled=speed is not None,
            engines=engines,
            progress=job.progress,
        )
        trials = Trials(evaluator, Goal(max_drop=max_drop, strict=True), BudgetClock(None), job.progress, _PACE)
        limit = (_INTEGER_BUILDS if target.profile.integer_only else _BUILDS)[effort]
        start = Trial(plain, assessment=assessment)
        # A proof knows only the labels. The estimate that is compared here also uses float32's probabilities.
        if surely and proof is not None and (again := build_and_assess(trials, plain, "recovery", "")).assessment:
            start = again
        attempts = _Attempts(trials, start, limit, speed, surely=surely)
        _try_changes(attempts, job, target, effort, fixed_fields)
        best = attempts.best
        noisiest: tuple[str, ...] = ()
        closest, loss = (plain, start.loss) if best is None else (best.candidate, best.loss)
        if loss > max_drop and target.profile.integer_only:
            ranking = evaluator.rank(closest, headroom=1.0, seconds=math.inf)
            noisiest = tuple(layer.name for layer in ranking.layers[:_NAMED_LAYERS])
        record = Repair(
            effort=effort,
            max_drop=max_drop,
            basis=assessment.basis,
            plain=start.loss,
            loss=loss,
            noisiest=noisiest,
            chosen=PLAIN if best is None else _describe_changes(best.candidate, plain),
            steps=tuple(
                _describe_step(trial, plain) for trial in trials if trial.screening is not None and trial is not start
            ),
        )
        built = None if best is None else evaluator.builder.build(best.candidate, destination)
    for folder in workdir.glob("candidate-*"):
        shutil.rmtree(folder)
    if built is not None and engine is not None:
        built = replace(built, artifact=built.artifact.in_engine(engine))
    return built, record


def _read_assessment(proof: Proof | None, task: Task | None) -> Assessment:
    """Return the loss of the plain build that its proof measured. Without a proof, everything is lost."""
    basis = name_basis(task, "noise")
    if proof is None:
        return Assessment(0, True, basis, drop=1.0, low=1.0, high=1.0, expected=1.0)
    drop = 10 ** (-worst_db(proof.agreement) / 10) if proof.drop is None else proof.drop
    low, high = proof.drop_interval or (drop, drop)
    sqnr_db = proof.agreement.least_db
    return Assessment(proof.samples, True, basis, drop=drop, low=low, high=high, expected=drop, sqnr_db=sqnr_db)


def _read_speed(proof: Proof | None) -> float | None:
    """Return the speed of the plain build relative to float32's, measured or estimated; None if it was not timed."""
    if proof is None or proof.speed is None:
        return None
    about = proof.speed.ratio.interval or proof.speed.ratio.estimated
    return about[0] if about is not None else None


class _Attempts:
    """Build and assess changes of the plain build, and count the builds.

    Args:
        plain: the plain build with its assessment.
        limit: largest number of builds.
        speed: measured speed of the plain build relative to float32; None if the target has no clock here.
        surely: whether a build is good enough only if it certainly loses no more than is allowed. The best of all
            builds is chosen if none does.
    """

    def __init__(self, trials: Trials, plain: Trial, limit: int, speed: float | None, *, surely: bool = False) -> None:
        self.trials = trials
        self.plain = plain
        self.speed = speed
        self._surely = surely
        self._remaining = limit

    @property
    def max_drop(self) -> float:
        """Return the allowed loss."""
        return self.trials.goal.limit

    @property
    def used_up(self) -> bool:
        """Return whether no further build is allowed."""
        return self._remaining <= 0

    @property
    def ended(self) -> bool:
        """Return whether a build is good enough, or no further build is allowed."""
        return self.used_up or any(self._suffices(trial) for trial in self.trials)

    @property
    def met(self) -> bool:
        """Return whether a build loses no more than is allowed, by the best estimate."""
        return self.plain.loss <= self.max_drop or any(self.trials.meets(trial) for trial in self.trials)

    def _suffices(self, trial: Trial) -> bool:
        assessment = trial.final_assessment
        surely = not self._surely or (assessment is not None and assessment.high <= self.max_drop)
        return surely and self.trials.meets(trial)

    def add(self, candidate: Candidate) -> Trial:
        """Build and assess a candidate, and return its trial. Its loss is infinite if it cannot be built."""
        self._remaining -= 1
        return build_and_assess(self.trials, candidate, "recovery", self.plain.name)

    @property
    def best(self) -> Trial | None:
        """Return the build that loses no more than is allowed and has the most in int8. If there is none, return the
        one that loses least or, among several that lose about as little, the one with the most in int8. Return None if
        none of them loses less than the plain build.
        """
        assessed = [trial for trial in self.trials if trial.loss < self.plain.loss]
        least = min((trial.loss for trial in assessed), default=math.inf)
        limit = max(self.max_drop, least + _EQUAL_LOSS * self.max_drop if least > self.max_drop else 0.0)
        return min((t for t in assessed if t.loss <= limit), key=lambda t: (t.latency, t.loss), default=None)

    @property
    def closest_static(self) -> Trial:
        """Return the trial with ranges from calibration, the plain build included, that loses least."""
        static = [trial for trial in self.trials if trial.candidate.scheme.mode == self.plain.candidate.scheme.mode]
        return min([self.plain, *static], key=lambda trial: trial.loss)


def _try_changes(attempts: _Attempts, job: Job, target: Target, effort: Effort, fixed_fields: Collection[str]) -> None:
    """Try changes, those that cost no speed first, until a build is good enough or no further build is allowed."""
    plain, profile = attempts.plain.candidate, target.profile
    products_dominate = product_share(job.prepared.model) >= WORTH_A_TRY
    groups = attempts.trials.evaluator.recovery_groups()
    names = _list_recoveries(groups, plain.scheme, products_dominate=products_dominate)
    if profile.integer_only and plain.scheme.mode == "static":
        _combine(attempts, names, [] if "method" in fixed_fields else _list_other_ranges(plain.scheme, profile, effort))
    elif names:
        first = attempts.add(plain.replace(name=f"{plain.name} + recoveries", recoveries=names))
        gentle = _list_gentle(names)
        # A change of the model may do harm that its own figures do not show.
        if not attempts.ended and first.loss > attempts.plain.loss and gentle not in ((), names):
            attempts.add(plain.replace(name=f"{plain.name} + {' + '.join(gentle)}", recoveries=gentle))
        elif first.loss <= _RANGES_MAY_HELP * attempts.max_drop and "method" not in fixed_fields:
            for scheme in _list_other_ranges(plain.scheme, profile, effort):
                if attempts.ended:
                    return
                variant = with_scheme(plain, scheme)
                attempts.add(variant.replace(name=f"{variant.name} + recoveries", recoveries=names))
    # With ranges measured at run time, everything but the products computes in float.
    measures_ranges = plain.scheme.mode == "static" and "mode" not in fixed_fields and not profile.integer_only
    if products_dominate and measures_ranges:
        for candidate in _list_other_modes(job, target, plain.scheme, effort):
            if attempts.ended:
                return
            attempts.add(candidate)
    integers_suffice = profile.integer_only and (attempts.met or "wide" not in profile.search)
    if attempts.ended or "exclude" in fixed_fields or integers_suffice:
        return
    _raise_precision(attempts)


def _combine(attempts: _Attempts, names: tuple[str, ...], other_ranges: Sequence[Scheme]) -> None:
    """Try all recoveries, only the gentle ones, and none of them, each with the plain build's and with other ranges."""
    plain = attempts.plain.candidate
    for chosen in dict.fromkeys((names, _list_gentle(names), ())):
        for scheme in (plain.scheme, *other_ranges):
            variant = with_scheme(plain, scheme)
            # The plain build is assessed already.
            if attempts.ended or (scheme == plain.scheme and not chosen):
                continue
            attempts.add(variant.replace(name=" + ".join((variant.name, *chosen)), recoveries=chosen))


def _list_gentle(names: Sequence[str]) -> tuple[str, ...]:
    """Return the recoveries that leave the float model and its ranges as they are."""
    return tuple(name for name in names if recoveries()[name].stage == "artifact")


def _list_recoveries(groups: Sequence[Sequence[str]], scheme: Scheme, *, products_dominate: bool) -> tuple[str, ...]:
    """Return the names of the recoveries that apply to `scheme`, without those that are only for products if these do
    not dominate the model.
    """
    every = recoveries()
    names = (name for group in groups for name in group if scheme.mode in every[name].modes)
    return tuple(name for name in names if products_dominate or every[name].searched)


def _list_other_ranges(scheme: Scheme, profile: Profile, effort: Effort) -> list[Scheme]:
    """Return the scheme with the most promising range method that it does not have or, with much effort, with each of
    them. The profile lists the methods, the most promising first.
    """
    methods = [method for method in profile.search.get("method", ()) if method != scheme.method]
    schemes = [scheme.replace(method=method, method_options={}) for method in methods]
    return schemes if effort == "thorough" else schemes[:1]


def _list_other_modes(job: Job, target: Target, scheme: Scheme, effort: Effort) -> Iterator[Candidate]:
    """Yield candidates in another mode than static, for a model in which products dominate."""
    # Weights are fitted to pairs only in static mode.
    dynamic = scheme.replace(mode="dynamic", fit_pairs=False, fit_seen=False)
    try:
        backend_named(target.backend).check(dynamic)
    except UsageError:  # the backend does not have this mode
        return
    yield with_scheme(Candidate("", dynamic), dynamic)
    if effort == "thorough":
        yield from sequence_candidates(job, target)


def _raise_precision(attempts: _Attempts) -> None:
    """Give layers float, or tensors 16 bits, until the loss is small enough. The first set is sized by the predicted
    noise, each further set by the losses so far. No set is predicted to make the model slower than float32.
    """
    base, speed = attempts.closest_static, attempts.speed
    ranking = attempts.trials.evaluator.rank(base.candidate, headroom=1.0, seconds=math.inf)
    layers = find_affordable(ranking, math.inf if ranking.field == EIGHT_BIT else _MOST_FLOAT)
    if speed is not None and ranking.field == EXCLUDE:
        layers = layers[: _count_faster(ranking, speed)]
    title = _FIELD_TITLES[ranking.field]
    share, sets = _AIM * attempts.max_drop / base.loss, set[tuple[RankedLayer, ...]]()
    while layers and not attempts.used_up:
        members = ranking.select_quieting(share, layers)
        if members in sets:
            return
        sets.add(members)
        nodes = ranking.nodes(members)
        candidate = base.candidate.replace(
            name=f"{base.name}, {len(nodes)} {title} (set {len(sets)})",
            scheme=_with_precision(base.candidate.scheme, ranking, nodes),
        )
        trial = attempts.add(candidate)
        if _WASTEFUL * attempts.max_drop <= trial.loss <= attempts.max_drop:
            return
        share = _correct_share(ranking.remaining(members), trial.loss / base.loss, attempts.max_drop / base.loss)


def _count_faster(ranking: LayerRanking, speed: float) -> int:
    """Return how many layers, in the order of the ranking, can be in float until the model is as slow as float32.

    Args:
        speed: measured speed of the plain build relative to float32.
    """
    names = [layer.name for layer in ranking.layers]
    counts = range(1, len(names) + 1)
    faster = (count for count in counts if ranking.costs.predict_speed(frozenset(names[:count]), speed) > 1)
    return max(faster, default=0)


def _correct_share(remaining: float, loss: float, allowed: float) -> float:
    """Return the share of the predicted noise that may remain, by one measurement.

    Losses follow the noise by a power law whose exponent the measurement gives: loss = remaining ** exponent.

    Args:
        remaining: the share of the predicted noise that the measured set leaves.
        loss, allowed: the measured and the allowed loss, as a share of the loss without any set.
    """
    low, high = _EXPONENTS
    loss = max(loss, 1e-3 * allowed)
    # A set that the prediction calls useless, or that does harm, says nothing about the exponent.
    informative = 0 < remaining < 1 and 0 < loss < 1
    exponent = min(max(math.log(loss) / math.log(remaining), low), high) if informative else 1.0
    return float(max(remaining, 1e-9) * (_AIM * allowed / loss) ** (1 / exponent))


def _with_precision(scheme: Scheme, ranking: LayerRanking, nodes: Sequence[str]) -> Scheme:
    """Return the scheme with more precision for `nodes`, of the kind that the ranking is about."""
    if ranking.field == EXCLUDE:
        return scheme.keep_in_float(nodes, _PRECISION_REASON)
    return scheme.replace(**{ranking.field: (*getattr(scheme, ranking.field), *nodes)})


def _limit_samples(job: Job) -> Job:
    """Return the job with fewer samples, spread evenly over all samples: as many as a repair can use in the time of
    about three builds.
    """
    macs = max(1, sum(node_macs(job.prepared.model).values()))
    calibration = job.calibration
    if calibration is not None:
        calibration = spread_over(calibration, max(_MIN_SAMPLES, _CALIBRATED_MACS // macs))
    return replace(job.with_validation(max(_MIN_SAMPLES, _VALIDATED_MACS // macs)), calibration=calibration)


def _describe_step(trial: Trial, plain: Candidate) -> RepairStep:
    """Return the record of one build."""
    screening, assessment = trial.screening, trial.assessment
    assert screening is not None
    return RepairStep(
        name=_describe_changes(trial.candidate, plain),
        loss=assessment.bound if assessment is not None else None,
        samples=assessment.samples if assessment is not None else 0,
        int8_mac_share=screening.int8_mac_share,
        reason=trial.reason,
    )


def _describe_changes(candidate: Candidate, plain: Candidate) -> str:
    """Return a title that distinguishes a candidate from the plain build."""
    scheme, plain_scheme, parts = candidate.scheme, plain.scheme, []
    if scheme.mode != plain_scheme.mode:
        parts.append(candidate.name)
    elif scheme.method != plain_scheme.method:
        parts.append(f"ranges by {scheme.method}")
    parts += candidate.recoveries
    for field, title in _FIELD_TITLES.items():
        count = len(set(getattr(scheme, field)) - set(getattr(plain_scheme, field)))
        if ALL_NODES in getattr(scheme, field):
            parts.append(f"all {title}")
        elif count:
            parts.append(f"{count} {title}")
    return ", ".join(parts) or candidate.name
