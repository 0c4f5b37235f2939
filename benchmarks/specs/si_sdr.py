"""Measure SI-SDR of a denoising mask over a short-time spectrum (nsnet2_gru.py). This is an example of a user's own
task.

    --task benchmarks/specs/si_sdr.py:task --annotations FOLDER

FOLDER contains recordings of one utterance with different noises. Each is a file FILE.npz with `pcm` (int16). The
model's output [1, frames, bins] is the gain of each bin. The denoised recording is compared with the mean of the other
recordings. In this mean, the noises average out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DataError, UsageError
from edgeq.measure.task import TaskOptions

FRAME, HOP = 320, 160
LEAST_GAIN = 1e-4
Signal = NDArray[np.float64]


@dataclass(frozen=True)
class SiSdr:
    """Define the task. Its metric is the mean SI-SDR in dB over all samples."""

    folder: Path
    name: str = "si-sdr"
    primary: str = "si_sdr_db"
    higher_is_better: bool = True

    def start(self) -> Meter:
        return Meter(recordings(self.folder))


def task(options: TaskOptions) -> SiSdr:
    """Return the task for the recordings in the folder of --annotations.

    Raises:
        UsageError: --annotations does not name a folder.
    """
    if options.annotations is None:
        raise UsageError("si-sdr needs the recordings", "Give their folder with --annotations")
    return SiSdr(options.annotations)


class Meter:
    """Collect the SI-SDR of each sample."""

    def __init__(self, signals: Mapping[str, Signal]) -> None:
        self._signals = signals
        self._found: list[float] = []

    def update(self, outputs: Mapping[str, Any], sample: Any) -> None:
        name = str(sample.context.get("file"))
        if name not in self._signals:
            raise DataError(f"{sample.name} is not one of the recordings", f"There are {', '.join(self._signals)}")
        signal = self._signals[name]
        reference = np.mean([other for key, other in self._signals.items() if key != name], axis=0)
        gain = np.asarray(next(iter(outputs.values())), np.float64)[0]
        self._found.append(si_sdr(reference, denoised(signal, gain)))

    def result(self) -> Mapping[str, float]:
        return {"si_sdr_db": float(np.mean(self._found))}


def recordings(folder: Path) -> dict[str, Signal]:
    """Return file name → samples (between -1 and 1) for each recording in `folder`.

    Raises:
        DataError: there are fewer than two recordings.
    """
    found: dict[str, Signal] = {}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file, allow_pickle=False) as archive:
            found[file.name] = archive["pcm"] / 32767.0
    if len(found) < 2:
        raise DataError(f"{folder} contains {len(found)} recordings (.npz with pcm)", "Give at least two")
    return found


def denoised(signal: Signal, gain: NDArray[np.float64]) -> Signal:
    """Multiply the short-time spectrum by `gain` [frames, bins], and return the signal that overlap-add
    reconstructs.
    """
    hann = 0.5 * (1 - np.cos(2 * np.pi * np.arange(FRAME - 1) / (FRAME - 1)))
    window = np.sqrt(np.append(hann, 0.0))
    made = np.zeros(len(signal))
    for frame, start in enumerate(range(0, len(signal) - FRAME + 1, HOP)):
        spectrum = np.fft.rfft(signal[start : start + FRAME] * window) * np.clip(gain[frame], LEAST_GAIN, 1)
        made[start : start + FRAME] += np.fft.irfft(spectrum, FRAME) * window
    return made


def si_sdr(reference: Signal, estimate: Signal) -> float:
    """Return the SI-SDR in dB (Le Roux et al. 2019). The reference is scaled to fit the estimate. SI-SDR is the energy
    of the scaled reference divided by the energy of its difference to the estimate.
    """
    target = (reference @ estimate) / (reference @ reference) * reference
    rest = estimate - target
    return float(10 * np.log10((target @ target) / (rest @ rest)))
