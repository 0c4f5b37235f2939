"""Estimate one candidate's accuracy against float32, sample by sample, with its uncertainty.

With labels, the loss is the drop in the task's metric. Its standard error comes from the samples: see
`edgeq.measure.task`.

Without labels, or in addition to them, the loss is estimated from float32's own probabilities. For class scores, let p
be float32's probabilities: the scores if they sum to one, else their softmax.

    regret        mean over rows of p[float32's class] - p[candidate's class]
    disagreement  share of rows whose classes differ

If p is right, the regret is the expected loss of top-1. Even if p is wrong, the loss of top-1 cannot be larger than the
disagreement. For other outputs, the loss is 1 - cosine of the worst output, or of the worst slice of an output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.measure.agreement import worst_db
from edgeq.measure.answer_task import FloatAnswers
from edgeq.measure.class_scores import is_class_scores, probabilities
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Outputs
from edgeq.measure.resample import RowMetrics, loss_error
from edgeq.measure.task import Task
from edgeq.tuning.measurements import Assessment, Basis

_TOP1 = "top1"
LossKind = Literal["expected", "seen", "noise"]
"""The figure that is compared with the allowed loss.

- "expected": the loss to expect on other samples.
- "seen": the loss on these samples, as a proof of the same model reports it: by labels, else the share of rows whose
  top-1 changes, else 1 - cosine.
- "noise", without labels: noise power over signal power in the worst output, or in the worst slice of an output.
"""
# The noise on an eighth of the samples differs from the noise on all samples by at most this factor.
_NOISE_SPREAD = 2.0
# Standard deviation of the error with which the regret estimates the loss, as a share of the regret: float32 may
# misjudge itself by this much.
_FLOAT_ERROR = 0.5
_QUANTILE_95 = 1.96  # two-sided 95 % of the normal distribution


@dataclass
class Regret:
    """Hold running sums over the rows of one output of class scores."""

    rows: int = 0
    sum: float = 0.0
    squares: float = 0.0
    changed: int = 0
    fits: bool = True
    leads: list[NDArray[np.float64]] = field(default_factory=list)
    moves: list[NDArray[np.float64]] = field(default_factory=list)

    def update(self, reference: NDArray[Any], candidate: NDArray[Any]) -> None:
        """Add rows of scores [N, ...] of float32 and of the candidate."""
        self.fits = self.fits and is_class_scores(reference) and reference.shape == candidate.shape
        if not self.fits:
            return
        scores = reference.reshape(len(reference), -1).astype(np.float64)
        candidate_scores = candidate.reshape(len(candidate), -1).astype(np.float64)
        p = probabilities(scores)
        every = np.arange(len(p))
        float_class, candidate_class = (
            scores.argmax(1),
            np.where(np.isnan(candidate_scores), -np.inf, candidate_scores).argmax(1),
        )
        lost = p[every, float_class] - p[every, candidate_class]
        self.rows += len(p)
        self.sum += float(lost.sum())
        self.squares += float((lost**2).sum())
        self.changed += int((float_class != candidate_class).sum())
        lead = _lead(scores, float_class)
        self.leads.append(lead)
        with np.errstate(invalid="ignore"):  # the scores of an excluded class may be -inf in both models
            self.moves.append(lead - _lead(candidate_scores, float_class))

    @property
    def mean(self) -> float:
        """Return the regret, which is a probability."""
        return self.sum / self.rows

    @property
    def error(self) -> float:
        """Return the standard error of `mean`."""
        variance = max(0.0, self.squares / self.rows - self.mean**2)
        return math.sqrt(variance / self.rows)

    @property
    def changing(self) -> float:
        """Return how many rows are expected to change class in another set of rows of the same size.

        The lead of each row's class is compared with the changes of the lead in all rows. So the result may be positive
        even if no class has changed in these rows.
        """
        leads, moves = np.concatenate(self.leads), np.sort(np.concatenate(self.moves))
        return float((1 - np.searchsorted(moves, leads) / self.rows).sum())


def _lead(scores: NDArray[np.float64], best: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return, for each row, the lead of its class `best` over the next class: [rows, classes] and [rows] to [rows]."""
    every = np.arange(len(scores))
    rivals = scores.copy()
    rivals[every, best] = -np.inf
    lead: NDArray[np.float64] = scores[every, best] - rivals.max(1)
    return lead


@dataclass
class AgreementEstimate:
    """Compare one candidate's outputs with float32's, over all rows."""

    comparison: OutputSums = field(default_factory=OutputSums)
    regrets: dict[str, Regret] = field(default_factory=dict)

    def update(self, reference: Outputs, candidate: Outputs, sample: Sample, *, rows: int = 1) -> None:
        """Add one or more rows: the outputs of both models by name, and the sample that both were computed from."""
        self.comparison.update(reference, candidate, sample.inputs, rows=rows)
        for name, array in reference.items():
            if name in candidate and array.dtype.kind == "f":
                self.regrets.setdefault(name, Regret()).update(array, candidate[name])

    @property
    def regret(self) -> Regret | None:
        """Return the regret of the output that contains class scores. Return None if there is no such output, or if
        float32 is not sure enough of its own classes.
        """
        for output in self.comparison.result().outputs:
            regret = self.regrets.get(output.name)
            if output.top1 is not None and regret is not None and regret.fits and regret.rows:
                return regret if self.comparison.outputs[output.name].classes.confident else None
        return None


def assess(
    agreement: AgreementEstimate,
    labels: tuple[Task, RowMetrics, RowMetrics] | None,
    *,
    complete: bool,
    loss_kind: LossKind = "expected",
) -> Assessment:
    """Return the assessment from the samples seen so far.

    Args:
        labels: the task, and its measurements of float32 and of the candidate on the same rows; None without labels.
        complete: whether all samples have been seen.
        loss_kind: the figure to compare with the allowed loss; see `LossKind`.
    """
    compared = agreement.comparison.result()
    regret = agreement.regret
    figures: dict[str, Any] = {
        "samples": compared.samples,
        "complete": complete,
        "basis": name_basis(labels[0] if labels else None, loss_kind),
        "sqnr_db": compared.least_db,
        "cosine": min((o.least_cosine for o in compared.outputs if o.compared), default=0.0),
        "disagreement": regret.changed / regret.rows if regret else None,
    }
    # Outputs without a finite value cannot be compared, so the whole accuracy counts as lost.
    if any(o.nonfinite or o.mismatched for o in compared.outputs):
        return Assessment(**figures, drop=1.0, low=1.0, high=1.0, expected=1.0)
    if labels is not None:
        task, reference, candidate = labels
        sign = 1 if task.higher_is_better else -1
        drop = sign * (reference.metrics[task.primary] - candidate.metrics[task.primary])
        error = loss_error(reference, candidate, further=rare_row_error(candidate, regret, compared.samples))
        figures["metrics"] = candidate.metrics
        low, high = confidence_interval(drop, error)
        if error is None:
            return Assessment(**figures, drop=drop, low=low, high=high, expected=drop)
        by_float = regret if task.primary == _TOP1 else None
        expected, doubt = (drop, 0.0) if loss_kind == "seen" else _combine(drop, error, by_float)
        return Assessment(**figures, drop=drop, low=low, high=high, expected=expected, doubt=doubt)
    if loss_kind == "noise":
        # Noise over signal power is a fraction, so it can be compared with the allowed loss.
        noise = 10 ** (-worst_db(compared) / 10)
        return Assessment(**figures, drop=noise, low=noise / _NOISE_SPREAD, high=noise * _NOISE_SPREAD, expected=noise)
    if loss_kind == "seen":
        top1 = compared.top1
        drop = 1 - (figures["cosine"] if top1 is None else top1)
        return Assessment(**figures, drop=drop, low=0.0, high=1.0, expected=drop)
    if regret is not None:
        mean, reach = regret.mean, _QUANTILE_95 * regret.error
        return Assessment(**figures, drop=mean, low=mean - reach, high=mean + reach, expected=mean, doubt=regret.error)
    drop = 1 - figures["cosine"]
    return Assessment(**figures, drop=drop, low=0.0, high=1.0, expected=drop)


def name_basis(task: Task | None, loss_kind: LossKind) -> Basis:
    """Return the name of what a loss is measured by."""
    if task is not None:
        return "answers" if isinstance(task, FloatAnswers) else "labels"
    return "noise" if loss_kind == "noise" else "agreement"


def rare_row_error(measured: RowMetrics, regret: Regret | None, rows: int) -> float:
    """Return the part of a loss's standard error that is due to rare rows: rows that change class, but that happen not
    to be among the `rows` rows seen.

    For a mean of scores, this part is the weight of one row. For any other metric of classes, it is the error of two
    rows, one for each direction (D. Bonett, R. Price: Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data, 2012). If fewer than two rows are expected to change, the error is that of the
    expected number. If float32 is not sure of its classes, the error is 0, because then every row has a little
    influence.
    """
    if measured.scores is not None:
        return 1 / rows
    return 0.0 if regret is None else math.sqrt(min(2.0, regret.changing)) / rows


def confidence_interval(drop: float, error: float | None, further: float = 0.0) -> tuple[float, float]:
    """Return the 95 % interval of the loss `drop` with the standard error `error`. If the error is not known, return
    the whole scale.

    Args:
        further: half the width of the 95 % interval of an independent quantity that is added to the loss.
    """
    if error is None:
        return -1.0, 1.0
    reach = math.hypot(_QUANTILE_95 * error, further)
    return drop - reach, drop + reach


def _combine(drop: float, error: float, regret: Regret | None) -> tuple[float, float]:
    """Return the loss to expect on other samples, and its standard error. For top-1, combine the measured loss and the
    regret, weighted by the inverse of their variances. For other metrics, return the measured loss.

    The loss by labels is unbiased but noisy: it depends only on rows that change between right and wrong, and a few
    hundred samples contain about a dozen such rows. The regret is steady but may be biased, so its standard error
    includes half its size. A candidate that seems better than float32 counts as equal. Otherwise the search would
    choose a candidate that was merely lucky on the few samples.
    """
    if regret is None:
        return max(drop, 0.0), error
    # Float32 may misjudge itself, so half of the regret's size counts as an error of it.
    trusted = math.hypot(regret.error, _FLOAT_ERROR * regret.mean)
    return _weigh((max(drop, 0.0), error), (regret.mean, trusted))


def estimate_extra_loss(
    native: Assessment, engine: Assessment, error: float | None, overall: Assessment, between_db: float
) -> tuple[float, float | None]:
    """Return how much more a model loses in an engine than in this machine's kernels, and the standard error of the
    difference.

    On few samples, the difference measured by labels is unbiased but noisy, because few of the samples change class.
    The noise of the outputs is steady, because every sample shows it, and losses grow with its power. With noise N in
    this machine's kernels and N' in the engine, the engine's loss is estimated as N' / N times this machine's loss. The
    standard error of this estimate is sqrt(D / N) / 2 times the largest likely loss on this machine. D is the power of
    the difference between the engine's outputs and this machine's. The largest likely loss is taken to be at least two
    samples out of all. If only roundings differ, the standard error is small. If the engine computes something else, it
    is large, and the labels decide.

    Args:
        native, engine: assessments of the model on the same samples in this machine's kernels and in the engine.
        error: standard error of the difference between their losses; None if it is not known.
        overall: the assessment in this machine's kernels on all samples.
        between_db: SQNR of the engine's outputs against this machine's outputs.
    """
    more = engine.drop - native.drop
    if error is None:
        return more, None
    native_noise, engine_noise, difference = (10 ** (-db / 10) for db in (native.sqnr_db, engine.sqnr_db, between_db))
    if difference == 0:
        return 0.0, 0.0
    if native_noise in (0, math.inf):
        return more, error
    expected = max(0.0, overall.drop) * (engine_noise / native_noise - 1)
    largest_loss = max(overall.high, 2 / overall.samples)
    return _weigh((more, error), (expected, _FLOAT_ERROR * largest_loss * math.sqrt(difference / native_noise)))


def _weigh(*estimates: tuple[float, float]) -> tuple[float, float]:
    """Combine estimates of one value and their standard errors, weighted by the inverse of their variances."""
    weights = [1 / max(error**2, 1e-12) for _, error in estimates]
    total = sum(weights)
    return sum(weight * value for weight, (value, _) in zip(weights, estimates, strict=True)) / total, total**-0.5
