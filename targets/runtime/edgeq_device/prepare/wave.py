"""Read recordings: .wav files of PCM samples, with the standard library alone."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

from edgeq_device.errors import DataError
from edgeq_device.system.files import open_file

# Four hours at 48 kHz in stereo.
_MOST_BYTES = 1 << 32


def read_wave(item: Any, rate: int) -> Any:
    """Return a recording as float32 [n] from -1 to 1, the mean of its channels.

    Args:
        item: path of a .wav file with 8, 16, 24 or 32 bits a sample, or samples [n] or [n, channels] at the model's
            rate, as integers or as floats from -1 to 1.
        rate: samples a second that the model takes. Another rate is refused, because resampling needs a choice of
            filter.

    Raises:
        DataError: the file cannot be read, or has another rate.
    """
    if not isinstance(item, np.ndarray):
        item = _read_file(Path(item), rate)
    if item.ndim not in (1, 2) or item.dtype.kind not in "iuf":
        raise DataError(f"a recording is {item.dtype}{list(item.shape)}", "Give samples [n], or a .wav file")
    if item.dtype.kind == "u":
        # Only PCM of 8 bits is unsigned.
        item = item.astype(np.float32) - 128
        scale = 128.0
    else:
        scale = float(2 ** (8 * item.dtype.itemsize - 1)) if item.dtype.kind == "i" else 1.0
    samples = np.asarray(item, np.float64) / scale
    return (samples.mean(axis=1) if samples.ndim == 2 else samples).astype(np.float32)


def _read_file(path: Path, rate: int) -> Any:
    fix = "Convert it to a .wav file of PCM samples"
    try:
        with open_file(path) as stream, wave.open(stream) as recording:
            width, channels, own_rate = recording.getsampwidth(), recording.getnchannels(), recording.getframerate()
            if own_rate != rate:
                raise DataError(f"{path} has {own_rate} samples a second, the model takes {rate}", "Resample it")
            if recording.getnframes() * width * channels > _MOST_BYTES:
                raise DataError(f"{path} has more than {_MOST_BYTES} bytes of samples", "Cut it")
            data = recording.readframes(recording.getnframes())
    except (wave.Error, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a recording ({error})", fix) from error
    data = data[: len(data) // (width * channels) * width * channels]
    if width == 3:
        # numpy has no integers of three bytes: they become the upper three of four.
        parts = np.frombuffer(data, np.uint8).reshape(-1, 3)
        values = np.pad(parts, ((0, 0), (1, 0))).reshape(-1).view("<i4")
    else:
        values = np.frombuffer(data, {1: "u1", 2: "<i2", 4: "<i4"}[width])
    return values.reshape(-1, channels)
