"""Rank preprocessings by the accuracy of a model on labelled data.

edgeq measures the float model, because a wrong preprocessing costs more than any quantization. Calibration on wrongly
prepared samples gives wrong ranges without an error message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeq.data.preprocess import Preprocess, candidates, load_preprocess
from edgeq.errors import CheckFailedError, DataError, EdgeqError, UsageError
from edgeq.measure.accuracy import Accuracy
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.util.display import SILENT, Progress

PLAIN = {"divide=255,layout=model": "0..1", "none": "as they are"}
"""Further candidates, for models whose inputs are not images: value of `preprocess` → title."""


@dataclass(frozen=True)
class Try:
    """Describe one candidate: its accuracy, or the reason why it does not fit the data or the model."""

    preprocess: str
    title: str
    accuracy: Accuracy | None
    reason: str | None

    def __record__(self) -> dict[str, Any]:
        metrics = self.accuracy.metrics if self.accuracy else {}
        return {"preprocess": self.preprocess, "title": self.title, "metrics": metrics, "reason": self.reason}


@dataclass(frozen=True)
class PreprocessRanking:
    """List the candidates, the best first. Candidates that do not fit come last.

    Attributes:
        tied: the best candidate, and the candidates that this number of samples cannot distinguish from it.
    """

    request: EvalRequest
    task: str
    primary: str
    samples: int
    tries: tuple[Try, ...]
    tied: tuple[str, ...]

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": str(self.request.model),
            "data": str(self.request.data),
            "samples": self.samples,
            "task": self.task,
            "primary": self.primary,
            "best": self.tries[0].preprocess,
            "tied": self.tied,
            "candidates": self.tries,
        }


def try_preprocess(
    request: EvalRequest, candidates: Sequence[str] | None = None, *, progress: Progress = SILENT
) -> PreprocessRanking:
    """Evaluate `request` once with each candidate preprocessing.

    Args:
        request: a request with a task. If it has a preprocessing, this is also a candidate, and its source options
            (key, label, layout …) apply to all candidates.
        candidates: preprocessings, in any form that `preprocess` accepts; None tries the common preprocessings and
            those in `PLAIN`.

    Raises:
        UsageError: the request has no task, or has a reference.
        EdgeqError: no candidate fits. The error is that of the first candidate.
    """
    if request.task is None:
        raise UsageError("preprocessings are compared by accuracy", "Give a ⟨task⟩, and labelled data")
    if request.reference is not None:
        raise UsageError("⟨try_preprocess⟩ takes one model", "Leave ⟨reference⟩ out")
    measured: list[tuple[Try, Accuracy]] = []
    failed: list[tuple[Try, EdgeqError]] = []
    for name, preprocess in _load_candidates(request, candidates).items():
        title = preprocess.title or PLAIN.get(name, "")
        try:
            result = run_evaluation(dataclasses.replace(request, preprocess=preprocess), progress=progress)
        except (DataError, CheckFailedError) as error:
            failed.append((Try(name, title, None, error.problem), error))
        else:
            assert result.accuracy is not None, "there is a task"
            measured.append((Try(name, title, result.accuracy, None), result.accuracy))
    if not measured:
        raise failed[0][1]
    sign = -1 if measured[0][1].higher_is_better else 1
    # The sort is stable, so equally accurate candidates keep the order in which they were tried.
    ranked = sorted(measured, key=lambda pair: sign * pair[1].value)
    best = ranked[0][1]
    # Twice the standard error of a share that is measured on this number of samples; 0 for a metric that is not a
    # share.
    noise = 2 * math.sqrt(best.value * (1 - best.value) / best.samples) if 0 <= best.value <= 1 else 0.0
    tied = [attempt.preprocess for attempt, accuracy in ranked if abs(accuracy.value - best.value) <= noise]
    tries = tuple(attempt for attempt, _ in (*ranked, *failed))
    return PreprocessRanking(request, best.task, best.primary, best.samples, tries, tuple(tied))


def _load_candidates(request: EvalRequest, names: Sequence[str] | None) -> Mapping[str, Preprocess]:
    """Return the candidates by name. Each reads the data with the source options of the request's own preprocessing."""
    listed = list(names) if names is not None else list(dict.fromkeys([*candidates(), *PLAIN]))
    if request.preprocess is None:
        return {name: load_preprocess(name) for name in listed}
    requested = load_preprocess(request.preprocess)
    preprocesses: dict[str, Preprocess] = {requested.name: requested}
    for name in listed:
        preprocess = load_preprocess(name)
        # A user's function has no options of a source, so it cannot read the data differently.
        if preprocess.spec is not None:
            spec = dataclasses.replace(preprocess.spec, source=requested.source)
            preprocesses.setdefault(name, dataclasses.replace(preprocess, spec=spec, source=requested.source))
    return preprocesses
