"""Compare the errors that one quantized model has in two runtimes, on the same samples.

Both runtimes are compared with the float model. r is the float model's output, h the output on this machine and t the
output on the target:

    loss     10 log10(sum (t - r)^2 / sum (h - r)^2)    how many dB the target's SQNR is lower, paired by sample
    level    10 log10(sum h^2 / sum (t - h)^2)          SQNR of the target's outputs against this machine's

A network amplifies roundings, so two right runtimes may differ by as much as quantization itself. Such differences are
as often gains as losses. So only a loss that the samples prove counts against a runtime. The interval of the loss comes
from the jackknife over the samples (B. Efron: The jackknife, the bootstrap and other resampling plans, 1982), with a
quantile of Student's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import pair_outputs
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.measure.accuracy import RunningEvaluation
from edgeq.measure.inference import Outputs
from edgeq.measure.power_ratios import decibels
from edgeq.measure.resample import SURE, ResampledMeter, loss_error
from edgeq.measure.rows import split_rows
from edgeq.measure.task import Task

MOST_LOSS_DB = 3.0
"""Largest loss in dB that different roundings explain. Kernels that saturate lose more."""
# The expansion of Student's quantile needs two degrees of freedom.
_FEWEST = 3
# At this SQNR, outputs differ from float32's by a thousandth of their size. A loss above it changes no answer.
_EXACT_DB = 60.0
# Half the width of the interval with fewer samples, in dB: one bit of every value.
_UNKNOWN_DB = 6.0


@dataclass(frozen=True)
class PairedLoss:
    """Hold the loss of one output.

    Attributes:
        name: name of the output.
        here_db, there_db: SQNR in dB against the float model on this machine and on the target.
        level_db: SQNR in dB of the target's outputs against this machine's.
        reach_db: half the width of the 95 % interval of `loss_db`.
        level_reach_db: half the width of the 95 % interval of `level_db`.
        samples: number of samples.
    """

    name: str
    here_db: float
    there_db: float
    level_db: float
    reach_db: float
    level_reach_db: float
    samples: int

    @property
    def loss_db(self) -> float:
        """Return how many dB the SQNR on the target is lower."""
        return 0.0 if self.here_db == self.there_db else self.here_db - self.there_db

    @property
    def proven(self) -> bool:
        """Return whether the whole interval of the loss is above the loss that roundings explain. If the target's
        outputs are almost exact, no loss counts.
        """
        return self.there_db < _EXACT_DB and self.loss_db - self.reach_db > MOST_LOSS_DB

    @property
    def sentence(self) -> str:
        """Return the figures as one clause."""
        count = f"{self.samples} sample{'s' * (self.samples != 1)}"
        return (
            f"output {self.name!r} has {self.there_db:.1f} dB SQNR against float32 there, but {self.here_db:.1f} dB on "
            f"this machine ({count}, at least {self.loss_db - self.reach_db:.1f} dB less)"
        )


@dataclass
class PairedErrors:
    """Collect the power of both errors of each float output, sample by sample.

    Attributes:
        powers: for each output, one row for each sample: the power of the float model's output, of this machine's
            error, of the target's error, of this machine's output, and of the difference between the two.
    """

    powers: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    def update(
        self,
        reference: Outputs,
        local_outputs: Outputs,
        target_outputs: Outputs,
        inputs: Outputs = MappingProxyType({}),
        basis: Basis = EVERYTHING,
    ) -> None:
        """Add the outputs of one sample. Elements that do not count in one of the two comparisons are left out, and so
        are outputs whose rows have no fixed place.
        """
        local_pairs, target_pairs = (
            {pair.name: pair for pair in pair_outputs(basis, reference, outputs, inputs)}
            for outputs in (local_outputs, target_outputs)
        )
        for name in local_pairs:
            if name not in target_pairs:
                continue
            pairs = local_pairs[name], target_pairs[name]
            if any(pair.ranked is not None or pair.candidate.shape != pair.reference.shape for pair in pairs):
                continue
            if pairs[0].reference.dtype.kind != "f":
                continue
            (r, h), (_, t) = (pair.to_numbers() for pair in pairs)
            # An element counts only if it counts in both comparisons. A zero adds no power.
            for pair in pairs:
                if pair.mask is not None:
                    r, h, t = (np.where(pair.mask, array, 0.0) for array in (r, h, t))
            powers = (array.reshape(-1) for array in (r, h - r, t - r, h, t - h))
            self.powers.setdefault(name, []).append(tuple(map(_power, powers)))

    def result(self) -> tuple[PairedLoss, ...]:
        """Return the loss of each output."""
        losses = []
        for name, samples in self.powers.items():
            powers = np.array(samples)
            signal, local_noise, target_noise, local_power, difference = (float(total) for total in powers.sum(0))
            losses.append(
                PairedLoss(
                    name,
                    decibels(signal, local_noise),
                    decibels(signal, target_noise),
                    decibels(local_power, difference),
                    _reach_db(powers[:, 1], powers[:, 2]),
                    _reach_db(powers[:, 3], powers[:, 4]),
                    len(samples),
                )
            )
        return tuple(losses)


class PairedEvaluation:
    """Measure one model in two runtimes on the same samples.

    Args:
        names: names of all sessions.
        task: task that measures accuracy by labels; None measures only agreement.
        reference: the session that the others are compared with.
        local_name, target_name: names of the sessions of this machine and of the target.
        basis: what the figures are taken over.

    Attributes:
        evaluation: accuracy and agreement of the sessions.
        errors: the errors of both runtimes against the reference.
    """

    def __init__(
        self,
        names: Sequence[str],
        task: Task | None,
        reference: str,
        local_name: str,
        target_name: str,
        basis: Basis = EVERYTHING,
    ) -> None:
        self._basis = basis
        self._names = (reference, local_name, target_name)
        self._meters = {name: ResampledMeter(task) for name in (local_name, target_name)} if task is not None else {}
        self.evaluation, self.errors = RunningEvaluation(names, task, reference, basis), PairedErrors()

    def update(self, sample: Sample, outputs: dict[str, Outputs]) -> None:
        """Add a sample and each session's outputs for it."""
        self.evaluation.update(sample, outputs)
        reference, local_outputs, target_outputs = (outputs[name] for name in self._names)
        self.errors.update(reference, local_outputs, target_outputs, sample.inputs, self._basis)
        for row, row_outputs in split_rows(sample, outputs) if self._meters else ():
            for name, meter in self._meters.items():
                meter.update(row_outputs[name], row)

    def drop_error(self) -> float | None:
        """Return the standard error of the loss of accuracy between the two runtimes; None if it is not known."""
        if not self._meters:
            return None
        local_meter, target_meter = self._meters.values()
        # One more row may differ, even if all rows so far agree.
        return loss_error(local_meter.measured(), target_meter.measured(), further=1 / local_meter.rows)


def measure_paired_losses(
    reference: Sequence[Outputs], local_outputs: Sequence[Outputs], target_outputs: Sequence[Outputs]
) -> tuple[PairedLoss, ...]:
    """Return the loss of each output. The arguments have one entry for each sample."""
    errors = PairedErrors()
    for outputs in zip(reference, local_outputs, target_outputs, strict=True):
        errors.update(*outputs)
    return errors.result()


def _power(values: NDArray[np.float64]) -> float:
    return float(values @ values)


def _reach_db(denominators: NDArray[np.float64], numerators: NDArray[np.float64]) -> float:
    """Return half the width of the 95 % interval of the ratio of two powers in dB. Both are [samples]."""
    count = len(denominators)
    if count < _FEWEST:
        return _UNKNOWN_DB
    # Each entry leaves one sample out. Rounding must not make a power negative.
    without = [np.maximum(powers.sum() - powers, 0.0) for powers in (denominators, numerators)]
    if not (without[0] > 0).all() or not (without[1] > 0).all():
        return 0.0  # one of the two is exact, so nothing is left to chance
    ratios = 10 * np.log10(without[1] / without[0])
    return _student(count - 1) * math.sqrt((count - 1) / count * float(np.square(ratios - ratios.mean()).sum()))


def _student(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution, by the expansion of Abramowitz and Stegun, 26.7.5
    (error below 4 % from 2 degrees of freedom on).
    """
    z = SURE
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum((term / freedom**power for power, term in enumerate(terms)), 0.0)
