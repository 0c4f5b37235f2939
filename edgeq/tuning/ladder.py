"""Repair a poor build. Changes that cost nothing are tried first, and changes that cost speed last. The repair ends
when the result is good enough or nothing is left to try.

The steps are those of the search (`edgeq.tuning.search`), but speed is counted in multiply-accumulates, not timed. So
the steps are the same on every machine and for every target:

- the end of the model in float: what follows the last layers, and these layers
- other range methods, applied to the same statistics
- recoveries
- ranges measured at run time, or weights in blocks, if products dominate
- as few layers in float, or tensors in 16 bits, as necessary; on hardware without float, no layers in float

A build is good enough if it loses no more than is allowed. With labels, the loss is the loss to expect on other
samples. Without labels, the loss is noise power over signal power in the worst output, or in the worst slice of an
output. A loss of one point is then an SQNR of 20 dB.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from edgeq.backends.base import backend_named
from edgeq.data.samples import spread_over
from edgeq.errors import UsageError
from edgeq.hardware.profile import Profile
from edgeq.hardware.target import Target
from edgeq.model.graph import before_layers, operator_of
from edgeq.model.int8_prediction import hazardous_nodes
from edgeq.model.macs import node_macs
from edgeq.prove.job import Built, Job
from edgeq.prove.proof import Repair, RepairStep
from edgeq.prove.request import Effort
from edgeq.run.engines import EngineChoice
from edgeq.run.session import Engines
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.goal import Goal
from edgeq.tuning.judge import build_and_assess
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.measurements import Assessment
from edgeq.tuning.pace import EFFORTS
from edgeq.tuning.recover.methods.sequential_correction import SequentialCorrection
from edgeq.tuning.recover.methods.smoothquant import SmoothQuant
from edgeq.tuning.recover.run import find_ineffective
from edgeq.tuning.search import search
from edgeq.tuning.sentences import describe_allowed_loss, describe_loss
from edgeq.tuning.space import WORTH_A_TRY, Candidate, product_share, sequence_candidates, with_scheme
from edgeq.tuning.trials import Outcome, Trial, Trials

PLAIN = "the plain build"
# Largest numbers of multiply-accumulates, for one pass over the calibration samples and for one pass over the
# validation samples.
_CALIBRATED_MACS, _VALIDATED_MACS = 20_000_000_000, 200_000_000_000
_MIN_SAMPLES = 32
_FIELD_TITLES = {"exclude": "nodes in float", "wide": "tensors in 16 bits", "eight_bit": "products in 8 bits"}
# Share of the allowed loss. Losses that differ by less are considered equal.
_EQUAL_LOSS = 0.25
_ENDS = "kept in float by the repair: it belongs to the end of the model"
_HEADS = ("its end in float", "its last layers in float")
# A head in float must leave half of the work in integers, and is worth it if it takes away half of the noise.
_HEAD_SHARE = 0.5
# The inputs of products often have a few wide channels, which leave few levels to the others.
_SMOOTHED = (SmoothQuant.name, SequentialCorrection.name)
_TAILS = "percentile"
_BLOCKS = "weight-only 8 bits"
# Number of layers to name if a result that has no float layers loses more than is allowed.
_NAMED_LAYERS = 3


def climb(
    job: Job,
    target: Target,
    scheme: Scheme,
    destination: Path,
    *,
    max_drop: float,
    effort: Effort,
    fixed_fields: Collection[str] = (),
    engine: EngineChoice | None = None,
) -> tuple[Built | None, Repair | None]:
    """Find a replacement for the plain build of `scheme`, and build it at `destination`. Return the new build with a
    record of what was tried.

    Args:
        max_drop: the allowed loss, as a fraction.
        fixed_fields: fields of the scheme that the user has set; they stay as they are.
        engine: the engine that runs the build; None means onnxruntime's own kernels.

    Returns:
        (the build, or None if the plain build is the best; the record, or None if the plain build loses no more than is
            allowed).

    Raises:
        EdgeqError: a stage of the search fails.
    """
    progress, pace = job.progress, EFFORTS[effort]
    if effort != "thorough":
        job = _limit_samples(job)
    # The folder is next to the prepared model, because an artifact may refer to files there until the job ends.
    workdir = Path(tempfile.mkdtemp(prefix="ladder-", dir=job.folder))
    baseline = with_scheme(Candidate("", scheme, engine=engine), scheme)
    with Engines(keep=True) as engines:
        evaluator = LocalEvaluator(
            job,
            target,
            workdir,
            task=job.task,
            counts=True,
            repairs=True,
            engines=engines,
            progress=progress,
        )
        assessment = evaluator.assess([baseline], evaluator.total)[baseline.name]
        if assessment.bound <= max_drop:
            return None, None
        progress.note(
            f"{PLAIN} {describe_loss(assessment)}; {describe_allowed_loss(assessment, max_drop)}: trying to repair it"
        )
        goal = Goal(max_drop=max_drop, strict=True)
        run = Trials(evaluator, goal, BudgetClock(None), progress, pace)
        trials = (
            [] if "exclude" in fixed_fields or target.profile.integer_only else _try_float_heads(run, baseline, job)
        )
        best = min(trials, key=lambda trial: trial.loss, default=None)
        if best is None or best.loss > max_drop:
            # A head that causes most of the noise stays in float, whatever else is tried.
            start = best.candidate if best is not None and best.loss < _HEAD_SHARE * assessment.bound else baseline
            outcome = search(
                [start, *_further_candidates(job, target, start.scheme, fixed_fields, effort)],
                _limit_search(target.profile, fixed_fields),
                evaluator,
                goal,
                BudgetClock(None),
                pace=pace,
                progress=progress,
            )
            trials += [trial for trial in outcome.trials if trial.name not in {former.name for former in trials}]
            nearest = outcome.winner or _find_nearest(outcome, evaluator, max_drop)
            best = nearest if best is None or (nearest is not None and nearest.loss < best.loss) else best
        better = best if best is not None and best.name != baseline.name and best.loss < assessment.bound else None
        closest, loss = (baseline, assessment.bound) if better is None else (better.candidate, better.loss)
        noisiest: tuple[str, ...] = ()
        if loss > max_drop and target.profile.integer_only:
            ranking = evaluator.rank(closest, headroom=1.0, seconds=math.inf)
            noisiest = tuple(layer.name for layer in ranking.layers[:_NAMED_LAYERS])
    for folder in workdir.glob("candidate-*"):
        shutil.rmtree(folder)
    repair = Repair(
        effort=effort,
        max_drop=max_drop,
        basis=assessment.basis,
        plain=assessment.bound,
        loss=loss,
        noisiest=noisiest,
        chosen=PLAIN if better is None else _describe_changes(better.candidate, baseline),
        steps=tuple(_describe_step(trial, baseline, assessment) for trial in trials if trial.screening is not None),
    )
    if better is None:
        return None, repair
    built = evaluator.builder.build(better.candidate, destination)
    return (replace(built, artifact=built.artifact.in_engine(engine)) if engine else built), repair


def _try_float_heads(trials: Trials, baseline: Candidate, job: Job) -> list[Trial]:
    """Build and assess the plain build with its head in float: first what follows the last layers, then these layers
    too. Stop at the first build that is good enough.

    The last layers often write several quantities, or a quantity far from zero, with one scale. Nothing after them can
    mend this, and they are a small part of the work.
    """
    model = job.prepared.model
    leading, macs = before_layers(model), node_macs(model)
    ends = [node for node in model.graph if node not in leading]
    tail = {node.name for node in ends if node.name and not operator_of(node).mac_rule}
    layers = {node.name for node in ends if node.name and operator_of(node).mac_rule}
    little = sum(macs.get(name, 0) for name in layers) <= _HEAD_SHARE * sum(macs.values())
    heads = [tail, tail | layers] if little else [tail]
    float_nodes = set(baseline.scheme.exclude) | set(hazardous_nodes(model, job.prepared.hazards))
    built: list[Trial] = []
    for place, head in enumerate(heads):
        if not head - float_nodes:
            continue
        float_nodes |= head
        scheme = baseline.scheme.keep_in_float(sorted(head), _ENDS)
        candidate = baseline.replace(name=f"{baseline.name}, {_HEADS[place]}", scheme=scheme)
        built.append(build_and_assess(trials, candidate, "exclusion", baseline.name))
        if trials.meets(built[-1]):
            break
    return built


def _limit_samples(job: Job) -> Job:
    """Return the job with fewer samples, spread evenly over all samples: as many as a repair can use in the time of
    about three builds.
    """
    macs = max(1, sum(node_macs(job.prepared.model).values()))
    calibration = job.calibration
    if calibration is not None:
        calibration = spread_over(calibration, max(_MIN_SAMPLES, _CALIBRATED_MACS // macs))
    validation = spread_over(job.validation, max(_MIN_SAMPLES, _VALIDATED_MACS // macs))
    return replace(job, calibration=calibration, validation=validation, float_outputs=())


def _limit_search(profile: Profile, fixed_fields: Collection[str]) -> Profile:
    """Return the profile with a search table that leaves out the fields that the user has set."""
    return replace(
        profile, search={name: values for name, values in profile.search.items() if name not in fixed_fields}
    )


def _further_candidates(
    job: Job, target: Target, scheme: Scheme, fixed_fields: Collection[str], effort: Effort
) -> Iterator[Candidate]:
    """Yield further candidates for a model in which products dominate, unless the user has set the scheme's mode."""
    if scheme.mode != "static" or "mode" in fixed_fields or product_share(job.prepared.model) < WORTH_A_TRY:
        return
    smoothed = tuple(name for name in _SMOOTHED if name not in find_ineffective(target))
    if job.calibration is not None and smoothed:
        methods = [scheme] if "method" in fixed_fields else [scheme, scheme.replace(method=_TAILS, method_options={})]
        for candidate in (with_scheme(Candidate("", method), method) for method in methods):
            name = " + ".join((candidate.name, *smoothed))
            yield candidate.replace(name=name, recoveries=smoothed)
    dynamic = scheme.replace(mode="dynamic")
    try:
        backend_named(target.backend).check(dynamic)
    except UsageError:  # the backend does not have this mode
        return
    yield with_scheme(Candidate("", dynamic), dynamic)
    for candidate in sequence_candidates(job, target):
        if effort == "thorough" or candidate.name == _BLOCKS:
            yield candidate


def _find_nearest(outcome: Outcome, evaluator: LocalEvaluator, max_drop: float) -> Trial | None:
    """Return the trial that loses least, measured on all samples. If several lose about as little, return the one with
    the most in int8. Return None if nothing was built.
    """
    built = [trial for trial in outcome.trials if trial.assessment is not None]
    if not built:
        return None
    limit = min(trial.loss for trial in built) + _EQUAL_LOSS * max_drop
    nearest = min((t for t in built if t.loss <= limit), key=lambda t: (t.latency, t.loss))
    assessment = evaluator.assess([nearest.candidate], evaluator.total)[nearest.name]
    return nearest.replace(assessment=assessment)


def _describe_step(trial: Trial, baseline: Candidate, baseline_assessment: Assessment) -> RepairStep:
    """Return the record of one build. `baseline_assessment` is the assessment of the plain build."""
    screening, assessment = trial.screening, baseline_assessment if trial.name == baseline.name else trial.assessment
    assert screening is not None
    return RepairStep(
        name=_describe_changes(trial.candidate, baseline),
        loss=assessment.bound if assessment is not None else None,
        samples=assessment.samples if assessment is not None else 0,
        int8_mac_share=screening.int8_mac_share,
        reason=trial.reason,
    )


def _describe_changes(candidate: Candidate, baseline: Candidate) -> str:
    """Return a title that distinguishes a candidate from the plain build."""
    if candidate.name == baseline.name:
        return PLAIN
    scheme, base_scheme, parts = candidate.scheme, baseline.scheme, []
    if scheme.mode != base_scheme.mode:
        parts.append(candidate.name)
    elif (scheme.method, scheme.method_options) != (base_scheme.method, base_scheme.method_options):
        options = "".join(f" {value:g}" for value in scheme.method_options.values())
        parts.append(f"ranges by {scheme.method}{options}")
    parts += candidate.recoveries
    for field, spared in _FIELD_TITLES.items():
        count = len(set(getattr(scheme, field)) - set(getattr(base_scheme, field)))
        if ALL_NODES in getattr(scheme, field):
            parts.append(f"all {spared}")
        elif count:
            parts.append(f"{count} {spared}")
    return ", ".join(parts) or candidate.name
