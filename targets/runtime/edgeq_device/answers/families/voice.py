"""Voice activity: the probability of speech in each window of a recording, such as Silero's.

    probability [1, 1] of one window, [N, 1] or [1, N] of consecutive windows

`Model.answer` runs over a recording; see `edgeq_device.answers.recording` for the parameters. Speech begins where the
probability reaches "confidence", and ends where it falls below "release" (0.15 less) for at least "silence" seconds.
Shorter speech than "speech" seconds is dropped. Source: silero-vad, utils_vad.py, get_speech_timestamps.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.recording import RATES, WITH_CONTEXT, find_states


def decode(outputs: Outputs, head: Head, frame: Any) -> Answer:
    """Return the probability of each window, and the start and end of each speech in seconds."""
    del frame
    array = np.asarray(outputs[head.outputs["probability"]] if outputs else [], np.float64)
    if array.size != max(array.shape, default=0):
        raise ValueError("the probabilities are not one row")
    values = array.reshape(-1)
    step = head.parameters.get("window", 512) / max(1, head.parameters.get("rate", 16000))
    if step <= 0:
        raise ValueError("a window has no samples")
    thresholds = {**FAMILY.thresholds, **head.thresholds}
    return Answer("voice", vector=values, segments=find_speech(values, step, thresholds))


def find_speech(values: Any, step: float, thresholds: Any) -> Any:
    """Return the start and end of each speech in seconds, float64 [S, 2]. `step` is the length of a window."""
    begin = thresholds["confidence"]
    release = thresholds.get("release", max(begin - 0.15, 0.01))
    # A millionth of a window absorbs the rounding of the product.
    quiet_windows = thresholds["silence"] / step - 1e-6
    shortest = thresholds["speech"] / step - 1e-6
    segments: List[Tuple[int, int]] = []
    start = quiet = -1
    for place, value in enumerate(values):
        if value >= begin:
            start, quiet = (place if start < 0 else start), -1
        elif start >= 0 and value < release:
            quiet = place if quiet < 0 else quiet
            if place - quiet >= quiet_windows:
                segments.append((start, quiet))
                start = quiet = -1
    if start >= 0:
        segments.append((start, len(values)))
    return np.array([pair for pair in segments if pair[1] - pair[0] >= shortest], np.float64).reshape(-1, 2) * step


def fit(view: View) -> Optional[Fit]:
    """Accept the only output besides states if it is one probability a row, and the model has states and takes the
    rate. If the family is named, accept it without.
    """
    states = find_states(view.inputs, view.outputs)
    arrays = {name: array for name, array in view.outputs.items() if name not in states}
    if len(arrays) != 1:
        return None
    ((name, array),) = arrays.items()
    rates = {n: int(a.reshape(-1)[0]) for n, a in view.inputs.items() if n in RATES and a.size == 1}
    if array.dtype.kind != "f" or array.size != max(array.shape, default=0) or not are_scores(array):
        return None
    if not view.named and not (states and rates):
        return None
    parameters = {"states": states, "constants": rates, **({"rate": next(iter(rates.values()))} if rates else {})}
    main, waves = next(iter(view.inputs.items()), ("", None))
    if waves is not None and waves.ndim == 2 and waves.dtype.kind == "f":
        length = waves.shape[1]
        context = view.hints.get("context", length // 9 if length in WITH_CONTEXT.values() else 0)
        parameters.update(input=main, window=length - context, context=context)
    return Fit({"probability": name}, {key: value for key, value in parameters.items() if value or key == "context"})


FAMILY = Family(
    "voice",
    "voice",
    "probability [1, 1], and states",
    fit,
    decode=decode,
    thresholds={"confidence": 0.5, "speech": 0.25, "silence": 0.1},
)
