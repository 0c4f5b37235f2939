"""Compare the inputs of two sets of samples, to find sets that were prepared in different ways.

For each float input, edgeq reads the largest value, the mean and the spread of some samples. Samples that are zero
everywhere say nothing and are left out. A set's values cannot come from the same preparation as another set's if three
things are true:

- The median of the samples' largest values is at least 32 times that of the other set. Bytes (0 to 255) are about 100
  times as large as values around 0 with a deviation of 1, and 255 times as large as values from 0 to 1.
- The sets are apart: nine of ten samples of the larger set exceed twice the values of nine of ten samples of the other.
  So a dark image among others, or a loud recording among others, does not matter.
- The smaller set has at least four samples. One or two of them may be dark or silent.

Smaller differences are suspicious but possible, for example in a set with less contrast. They give a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.data.images import Picture
from edgeq.data.preprocess import Preprocess
from edgeq.data.samples import Samples, SourceSamples, spread_over
from edgeq.errors import DataError
from edgeq.signature import TensorSpec

Floats = NDArray[np.float64]

_READ = 32
_IMPOSSIBLE, _SUSPICIOUS = 32.0, 4.0
_LEAST_ITEMS = 4
# How far the larger set must be above the smaller one, and the share of the samples on each side that may be
# exceptions.
_APART, _EXCEPTIONS = 2.0, 0.1
# Share of the largest value that the negative values of a set must reach, if the other set has none.
_CLEARLY_NEGATIVE = 0.2
# Number of spreads between the means of two sets whose means are suspicious.
_MEANS_APART = 2.0
_MOST_CHANNELS = 4
_FIX = (
    "Prepare both as the model was trained: give the raw files of both with one ⟨preprocess⟩, or both as ready inputs; "
    "if both are right, put samples of both kinds into ⟨data⟩"
)


@dataclass(frozen=True)
class InputFigures:
    """Hold figures of one input, or of one of its channels: one value for each sample, [samples].

    Attributes:
        source: the origin of the samples, for messages.
        low, high: smallest and largest value.
        mean, spread: mean and standard deviation of the values.
        items: number of samples that the figures stand for.
        single: True if the input has only one element, such as a time step or a threshold.
    """

    source: str
    low: Floats
    high: Floats
    mean: Floats
    spread: Floats
    items: int
    single: bool = False

    @property
    def peak(self) -> Floats:
        """Return the largest absolute value of each sample, [samples]."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def __str__(self) -> str:
        return f"{self.low.min():.3g} to {self.high.max():.3g} in {self.source} ({self.items} samples)"


def measure_inputs(samples: Samples) -> dict[str, dict[str, InputFigures]]:
    """Return the figures of each float input: input name → part → figures. The part is "" for the whole input, or
    "channel N" for each channel of an image.

    At most 32 samples are read, spread over all.
    """
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for sample in spread_over(samples, _READ):
        for name, array in sample.inputs.items():
            if array.dtype.kind != "f":
                continue
            # Channels are looked at separately too: swapped or unnormalised channels hide in the figures of the whole
            # image.
            for part, values in _split_channels(array):
                finite = values[np.isfinite(values)].astype(np.float64)
                # A sample of zeros has no scale, so it cannot show how it was prepared.
                if finite.any():
                    row = finite.min(), finite.max(), finite.mean(), finite.std(), values.size
                    rows.setdefault((name, part), []).append(tuple(map(float, row)))
    inputs: dict[str, dict[str, InputFigures]] = {}
    for (name, part), figures in rows.items():
        low, high, mean, spread, size = np.array(figures).T
        part_figures = InputFigures(samples.source, low, high, mean, spread, len(figures), size.max() == 1)
        inputs.setdefault(name, {})[part] = part_figures
    return inputs


def _split_channels(array: NDArray[np.floating]) -> Iterator[tuple[str, NDArray[np.floating]]]:
    yield "", array
    small = [axis for axis in range(1, array.ndim) if 1 < array.shape[axis] <= _MOST_CHANNELS]
    if array.ndim == 4 and small:
        for channel, values in enumerate(np.moveaxis(array, small[0], 0)):
            yield f"channel {channel}", values


Figures = Mapping[str, Mapping[str, InputFigures]]


def find_differences(calibration: Figures, validation: Figures) -> tuple[str, ...]:
    """Return a warning for each input whose values differ suspiciously between the two sets.

    Raises:
        DataError: the sets cannot come from the same preparation.
    """
    names = sorted(calibration.keys() & validation.keys())
    return tuple(text for name in names for text in _compare_input(name, calibration[name], validation[name])[:1])


def _compare_input(
    name: str, calibration: Mapping[str, InputFigures], validation: Mapping[str, InputFigures]
) -> list[str]:
    """Return the differences in an input, those of the whole input first.

    Raises:
        DataError: the values cannot come from the same preparation.
    """
    texts = []
    for part in sorted(calibration.keys() & validation.keys()):
        a, b = calibration[part], validation[part]
        location = f"input {name!r}" + (f", {part}," if part else "")
        text = f"the calibration and validation inputs seem to be prepared differently: {location} is {a} and {b}"
        ratio, smaller = _compare_peaks(a, b)
        # Only the whole input can refuse the data. A single channel or number may really differ this much.
        if ratio >= _IMPOSSIBLE and smaller.items >= _LEAST_ITEMS and not (part or a.single):
            raise DataError(text.replace("seem to be", "are"), _FIX)
        if ratio >= _SUSPICIOUS:
            texts.append(f"{text}, {ratio:.0f} times as much. {_FIX}")
        elif _is_one_sided(a, b) or _is_one_sided(b, a):
            texts.append(f"{text}: only one of them has negative values. {_FIX}")
        elif _has_distant_means(a, b):
            texts.append(f"{text}: their means are {np.median(a.mean):.3g} and {np.median(b.mean):.3g}. {_FIX}")
    return texts


def _compare_peaks(a: InputFigures, b: InputFigures) -> tuple[float, InputFigures]:
    """Return how many times larger the values of one set are, and the smaller set. Return 1 if the sets overlap."""
    large, small = (a, b) if np.median(a.peak) >= np.median(b.peak) else (b, a)
    separated = np.quantile(large.peak, _EXCEPTIONS) > _APART * np.quantile(small.peak, 1 - _EXCEPTIONS)
    return (float(np.median(large.peak) / np.median(small.peak)) if separated else 1.0), small


def _is_one_sided(positive: InputFigures, signed: InputFigures) -> bool:
    """Return whether one set has no negative value, but nearly all samples of the other have."""
    if min(positive.items, signed.items) < _LEAST_ITEMS or positive.low.min() < 0:
        return False
    return bool(np.quantile(signed.low / signed.peak, 1 - _EXCEPTIONS) < -_CLEARLY_NEGATIVE)


def _has_distant_means(a: InputFigures, b: InputFigures) -> bool:
    """Return whether the sets' means differ by more than the values of any sample spread."""
    if min(a.items, b.items) < _LEAST_ITEMS:
        return False
    spread = max(float(a.spread.max()), float(b.spread.max()))
    gap = max(float(a.mean.min() - b.mean.max()), float(b.mean.min() - a.mean.max()))
    return gap > _MEANS_APART * spread


def warn_of_unlike_images(samples: Samples, figures: Figures) -> tuple[str, ...]:
    """Return a warning if the inputs are far from what their named preprocessing makes of black and white images. They
    are if the stored arrays were already prepared.
    """
    preprocess = samples.preprocess if isinstance(samples, SourceSamples) else None
    if preprocess is None or len(figures) != 1 or not isinstance(samples, SourceSamples):
        return ()
    (name, parts), spec = next(iter(figures.items())), samples.signature.inputs[0]
    bounds, whole_input = find_image_bounds(preprocess, spec), parts[""]
    if bounds is None or whole_input.items < _LEAST_ITEMS:
        return ()
    # Black and white are the extremes of any image, so every real image lies between their results.
    low, high = bounds
    reach, width = max(abs(low), abs(high)), float(np.median(whole_input.high - whole_input.low))
    if np.median(whole_input.peak) <= _SUSPICIOUS * reach and width >= (high - low) / _IMPOSSIBLE:
        return ()
    return (
        f"input {name!r} is {whole_input}, but preprocessing {preprocess.name} makes {low:.3g} to {high:.3g} of "
        "images: the files may already be prepared. Then leave ⟨preprocess⟩ out, or name the steps that are missing",
    )


def find_image_bounds(preprocess: Preprocess, spec: TensorSpec) -> tuple[float, float] | None:
    """Return the smallest and largest value that a preprocessing makes of an image. Return None if it does not take
    images.
    """
    if preprocess.spec is None or len(spec.shape or ()) != 4:
        return None
    ends = []
    for value in (0, 255):
        try:
            # 256 pixels are enough for the usual resize and crop to 224.
            array = preprocess(Picture(np.full((256, 256, 3), value, np.uint8)), spec).array
        except DataError:
            return None
        if isinstance(array, Mapping) or array.dtype.kind != "f":
            return None
        ends += [float(array.min()), float(array.max())]
    return min(ends), max(ends)
