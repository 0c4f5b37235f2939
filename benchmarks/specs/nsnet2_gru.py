"""Preprocess audio for NSNet2 by turning 16 kHz int16 samples into log power spectra. This is an example of a
preprocessing function for audio.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.data.preprocess import register

FRAME, HOP = 320, 160


def window() -> NDArray[np.float64]:
    """Return the square root of a Hann window of FRAME - 1 samples, followed by one zero."""
    hann = 0.5 * (1 - np.cos(2 * np.pi * np.arange(FRAME - 1) / (FRAME - 1)))
    whole: NDArray[np.float64] = np.sqrt(np.append(hann, 0.0))
    return whole


@register(
    "nsnet2", title="320-sample sqrt-Hann STFT, hop 160, log10(max(|X|^2, 1e-12))", source={"key": "pcm", "layout": "T"}
)
def features(pcm: NDArray[np.int16]) -> NDArray[np.float32]:
    """Return the spectra, float32 [1, frames, 161], of a recording, int16 [samples]."""
    signal = pcm / 32767.0
    frames = np.stack([signal[i : i + FRAME] * window() for i in range(0, len(signal) - FRAME + 1, HOP)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    spectra: NDArray[np.float32] = np.log10(np.maximum(power, 1e-12)).astype(np.float32)
    return spectra[None]
