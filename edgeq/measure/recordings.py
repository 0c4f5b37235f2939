"""Turn recordings into samples of a model that hears them window by window, with the states of the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.family import View, load_family
from edgeq_device.answers.head import Head
from edgeq_device.answers.recording import RATES, WITH_CONTEXT, run_windows
from edgeq_device.engines.runtime import infer
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.prepare.wave import read_wave

from edgeq.data.images import Array
from edgeq.data.open_source import Data, find_files
from edgeq.data.samples import places
from edgeq.errors import DataError
from edgeq.measure.find_head import NONE, HeadChoice
from edgeq.signature import Signature
from edgeq.util.device_errors import device_errors

# More windows of the same recordings hardly change ranges or figures.
_MOST_WINDOWS = 1024
_ARRAYS = (".npy", ".npz")


@device_errors()
def cut_recordings(
    data: Data, session: Callable[[], Any], signature: Signature, choice: HeadChoice | None, folder: Path
) -> Data:
    """Return the data with recordings (.wav files, or arrays of samples [n]) replaced by the inputs of the runs over
    them, in a file in `folder`. Other data are returned unchanged.

    Args:
        session: opens the float model, whose states go from each window to the next.
        choice: the user's head. Only a head for voice runs over recordings.

    Raises:
        DataError: a recording cannot be read, or has another rate than the model takes.
    """
    runs_over_time = choice is not None and choice.family != NONE and load_family(choice.family).task == "voice"
    if choice is None or not runs_over_time or not isinstance(data.source, str | Path):
        return data
    head = find_loop(session(), signature, choice)
    paths = find_files(data.source, paths=True).files
    recordings = [array for path in paths if (array := _read_recording(path, head)) is not None] if head else []
    if head is None or not recordings:
        return data
    if len(recordings) < len(paths):
        raise DataError(f"{data.source} holds files that are not recordings", "Give only recordings, or model inputs")
    window = head.parameters["window"]
    count = sum(-(-len(array) // window) for array in recordings)
    selected = set(places(count, min(count, data.count or _MOST_WINDOWS, _MOST_WINDOWS)))
    runs = [feeds for place, feeds in enumerate(_list_runs(session(), head, recordings)) if place in selected]
    target = folder / f"{data.role or 'all'}-windows.npz"
    np.savez(target, allow_pickle=False, **{name: np.stack([feeds[name] for feeds in runs]) for name in runs[0]})
    return replace(data, source=target, count=None)


def find_loop(session: Any, signature: Signature, choice: HeadChoice) -> Head | None:
    """Return the head of a model that runs over recordings, or None. The model runs once on zeros, because its outputs
    show which of its inputs are states.
    """
    hints = choice.parameters
    rate = hints.get("rate", 16000)
    length = hints.get("window", 0) + hints.get("context", 0) or WITH_CONTEXT.get(rate, 512)
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        shape = [size if isinstance(size, int) else 1 for size in spec.shape or ()]
        if not inputs and spec.shape and not isinstance(spec.shape[-1], int):
            shape[-1] = length
        inputs[spec.name] = np.full(shape, rate if spec.name in RATES else 0, spec.dtype)
    family = load_family(choice.family)
    fit = family.fit(View(infer(session, inputs), (0, 0), hints=hints, inputs=inputs, named=True))
    if fit is None or "window" not in fit.parameters:
        return None
    return Head(family.name, fit.outputs, {**fit.parameters, **hints})


def _read_recording(path: Path, head: Head) -> Array | None:
    rate = int(head.parameters.get("rate", 16000))
    if path.suffix.lower() == ".wav":
        return np.asarray(read_wave(path, rate))
    if path.suffix.lower() not in _ARRAYS:
        return None
    arrays = list(read_arrays(path).values())
    # Windows that are prepared already are shorter or have another rank.
    length = head.parameters["window"] + head.parameters.get("context", 0)
    if len(arrays) != 1 or arrays[0].ndim != 1 or len(arrays[0]) <= length:
        return None
    return np.asarray(read_wave(arrays[0], rate))


def _list_runs(float_session: Any, head: Head, recordings: list[Array]) -> Iterator[dict[str, Array]]:
    for array in recordings:
        for feeds, _ in run_windows(float_session, partial(infer, float_session), head, array):
            yield feeds
