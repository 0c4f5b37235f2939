"""Run a model over a recording, window by window, and feed the states that it returns back to it.

The parameters of the head describe the loop:

    input: name of the input that takes samples, float [1, context + window]
    window: new samples in each run
    context: samples of the window before, in front of the new ones; zeros in the first run
    rate: samples a second
    states: output → input to which its value goes in the next run; zeros in the first run
    constants: input → number that never changes, such as the rate
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Mapping, Tuple

import numpy as np

from edgeq_device.answers.head import Head
from edgeq_device.errors import BundleError
from edgeq_device.prepare.feeds import find_input_specs
from edgeq_device.prepare.wave import read_wave

Arrays = Dict[str, Any]
_MOST_SAMPLES = 1 << 24
WITH_CONTEXT = {16000: 576, 8000: 288}
"""Rate → samples of one run of Silero's model. A ninth of them are context from the window before."""
RATES = ("sr", "sample_rate", "sampling_rate")
"""Names of inputs that take the rate."""
_DEFAULTS: Dict[str, Any] = {"input": "", "window": 0, "context": 0, "rate": 16000, "states": {}, "constants": {}}


def runs_over_recordings(head: Head) -> bool:
    """Return whether the head describes a loop over a recording."""
    return "window" in head.parameters


def run_windows(
    session: Any, run: Callable[[Arrays], Mapping[str, Any]], head: Head, samples: Any
) -> Iterator[Tuple[Arrays, Mapping[str, Any]]]:
    """Yield the inputs and the outputs of each run over the recording. Zeros fill the last window.

    Args:
        session: the session, for the shapes and dtypes of its inputs.
        run: runs the session on inputs by name.
        samples: float32 [n] from -1 to 1.

    Raises:
        BundleError: the head's parameters do not describe a loop over this model.
    """
    specs = find_input_specs(session, {})
    parameters = _read_parameters(session, head, specs)
    window, context = parameters["window"], parameters["context"]
    states, constants = parameters["states"], parameters["constants"]
    padded = np.concatenate([np.zeros(context), samples, np.zeros(-len(samples) % window)])
    name = parameters["input"]
    feeds = {key: np.full(shape, constants.get(key, 0), dtype) for key, (dtype, shape) in specs.items() if key != name}
    for start in range(0, len(padded) - context, window):
        feeds = {**feeds, name: padded[None, start : start + context + window].astype(specs[name][0])}
        outputs = run(feeds)
        yield feeds, outputs
        # A new dict, because the caller may keep the inputs of this run.
        feeds = {**feeds, **{key: outputs[output] for output, key in states.items()}}


def _read_parameters(session: Any, head: Head, specs: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the checked parameters of the loop, because a bundle is untrusted."""
    parameters = {**_DEFAULTS, **head.parameters}
    sizes = [parameters[key] for key in ("window", "context", "rate")]
    states, constants = parameters["states"], parameters["constants"]
    names = {tensor.name for tensor in session.get_outputs()}
    if (
        not all(isinstance(size, int) and 0 <= size <= _MOST_SAMPLES for size in sizes)
        or not sizes[0]
        or not sizes[2]
        or not isinstance(states, dict)
        or not isinstance(constants, dict)
        or not all(isinstance(value, (int, float)) for value in constants.values())
        or not all(isinstance(name, str) for name in (parameters["input"], *states.values()))
        or not {parameters["input"], *states.values(), *constants} <= set(specs)
        or not {*states, *head.outputs.values()} <= names
    ):
        raise BundleError("the head does not say how the model runs over a recording", "Feed single windows by name")
    return parameters


def run_recording(session: Any, run: Callable[[Arrays], Mapping[str, Any]], head: Head, item: Any) -> Arrays:
    """Return the outputs of all runs over a recording, joined along the first axis, for `decode`. States are left out.

    Args:
        item: a .wav file, or samples [n] at the model's rate; see `read_wave`.

    Raises:
        DataError: the recording cannot be read.
        BundleError: the head's parameters do not describe a loop over this model.
    """
    samples = read_wave(item, _read_parameters(session, head, find_input_specs(session, {}))["rate"])
    names = set(head.outputs.values())
    runs = [{name: outputs[name] for name in names} for _, outputs in run_windows(session, run, head, samples)]
    return {name: np.concatenate([one[name] for one in runs]) for name in names} if runs else {}


def find_states(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Dict[str, str]:
    """Return the pairs output → input of states that a model passes on: arrays of one shape, of rank 2 or more, in the
    order in which the model lists them.
    """
    states: Dict[str, str] = {}
    for name, array in list(inputs.items())[1:]:
        alike = [n for n, a in outputs.items() if n not in states and a.shape == array.shape and a.dtype == array.dtype]
        if array.ndim > 1 and alike:
            states[alike[0]] = name
    return states
