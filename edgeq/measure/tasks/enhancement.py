"""Measure speech enhancement and separation: the scale-invariant signal-to-distortion ratio (SI-SDR) in dB.

    SI-SDR = 10 log10(|a s|^2 / |a s - x|^2)    a = x s / |s|^2

s is the clean wave (the label) and x the model's, both without their mean. Source: J. Le Roux et al., "SDR - half-baked
or well done?", 2019. The figure is the mean over samples; a perfect wave counts as 100 dB, and silence as -100 dB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.arrays import ArrayFile, load_labels
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import read_label
from edgeq.measure.inference import Outputs
from edgeq.measure.task import TaskKind
from edgeq.measure.task_inputs import pick_output
from edgeq.util.display import Displayed

_MOST_DB = 100.0


def compute_si_sdr(wave: NDArray[Any], clean: NDArray[Any]) -> float:
    """Return the SI-SDR of a wave [N] in dB, from -100 to 100.

    Raises:
        ValueError: the clean wave is silent.
    """
    x, s = (np.asarray(values, np.float64) - np.mean(values) for values in (wave, clean))
    power = float(s @ s)
    if not power:
        raise ValueError("the clean wave is silent")
    target = (float(x @ s) / power) * s
    signal, noise = float(target @ target), float(((target - x) ** 2).sum())
    if not math.isfinite(signal) or not signal:
        return -_MOST_DB
    return max(min(10 * math.log10(signal / noise), _MOST_DB), -_MOST_DB) if noise else _MOST_DB


@dataclass(frozen=True)
class Enhancement(Displayed):
    """Compare the model's wave with the clean wave. The label is an array of its size, or the path of a .npy file."""

    output: str | None = None
    name: str = "enhancement"
    primary: str = "si_sdr"
    higher_is_better: bool = True

    def start(self) -> EnhancementMeter:
        """Return a meter for SI-SDR."""
        return EnhancementMeter(self)


class EnhancementMeter:
    """Measure the mean SI-SDR. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Enhancement) -> None:
        self._task = task
        self._figures: list[float] = []

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the wave of one sample.

        Raises:
            DataError: the label is not a wave of the output's size, or is silent.
        """
        wave = np.asarray(pick_output(outputs, self._task.output, sample), np.float64).reshape(-1)
        label = read_label(sample)
        if isinstance(label, Path):
            with ArrayFile(label) as file:
                label = load_labels(file, "")
        clean = np.asarray(label).reshape(-1)
        if clean.dtype.kind not in "iuf" or clean.size != wave.size:
            raise DataError(f"{sample.name}: {clean.size} values for a wave of {wave.size}", "Give the clean wave")
        try:
            self._figures.append(compute_si_sdr(wave, clean))
        except ValueError as error:
            raise DataError(f"{sample.name}: {error}", "Leave the sample out") from error

    def collected(self) -> list[float]:
        """Return the figure of each sample."""
        return self._figures

    def take(self, collected: Sequence[float]) -> None:
        """Add the samples of another meter."""
        self._figures += collected

    def scores(self) -> NDArray[np.float64]:
        """Return the SI-SDR of each sample in dB."""
        return np.array(self._figures, np.float64)

    def result(self) -> Mapping[str, float]:
        """Return "si_sdr" in dB."""
        return {"si_sdr": float(np.mean(self._figures))}


TASK = TaskKind(
    "enhancement",
    "SI-SDR in dB of a wave against the clean one",
    lambda options: Enhancement(output=options.output),
    frozenset({"output"}),
)
