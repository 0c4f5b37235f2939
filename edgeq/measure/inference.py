"""Run samples through open sessions, and raise edgeq's errors where a session refuses a sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from edgeq_device.prepare.arrays import to_array
from numpy.typing import NDArray

from edgeq.data.array_store import ArrayStore
from edgeq.data.samples import Sample, Samples
from edgeq.errors import BoardError, DataError, EngineError, RuntimeUnavailableError
from edgeq.util.display import SILENT, Progress

Outputs = Mapping[str, NDArray[Any]]
"""Output name → array, for one sample."""


class Session(Protocol):
    """Define the part of the interface of `onnxruntime.InferenceSession` that the measurements use."""

    def get_outputs(self) -> Sequence[Any]:
        """Return an object with a `name` for each output."""

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Return the named outputs (None for all) of one inference."""


def infer(session: Session, sample: Sample, *, model: str = "the model") -> Outputs:
    """Run one sample and return the outputs by name.

    An output that is not a tensor becomes one array: see `edgeq_device.prepare.arrays.one_array`.

    Raises:
        DataError: the session refuses the sample's names, dtypes or shapes.
        RuntimeUnavailableError: the runtime fails inside the model.
    """
    names = [output.name for output in session.get_outputs()]
    values = run_feed(session, names, sample.inputs, sample.name, model=model)
    return dict(zip(names, map(to_array, values), strict=True))


def infer_once(
    session: Session, sample: Sample, known_outputs: ArrayStore | None, place: int, *, model: str = "the model"
) -> Outputs:
    """Return the known outputs of a sample. If there are none, run the sample and add its outputs.

    Args:
        known_outputs: the model's outputs by the sample's place; None computes the outputs without storing them.
    """
    if known_outputs is not None and place in known_outputs:
        return known_outputs.get(place)
    outputs = infer(session, sample, model=model)
    if known_outputs is not None:
        known_outputs.add(place, outputs)
    return outputs


def run_feed(
    session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], feed_name: str, *, model: str
) -> Sequence[Any]:
    """Run a session on one feed. For the errors, see `infer`.

    Args:
        names: the outputs to compute; None computes all.
        feed_name: name of the feed in messages.
    """
    try:
        return session.run(names, dict(feed))  # type: ignore[no-any-return]
    except (BoardError, EngineError):  # The messages of these errors already name what failed.
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class below Exception
        text = " ".join(str(error).split())
        if type(error).__name__ in ("InvalidArgument", "ValueError"):
            raise DataError(
                f"{feed_name}: {model} refuses it: {text}", "Compare with the inputs that `edgeq inspect` lists"
            ) from error
        raise RuntimeUnavailableError(
            f"{feed_name}: onnxruntime fails in {model}: {text}", "Try another graph optimization level or provider"
        ) from error


def run_samples(
    sessions: Mapping[str, Session],
    samples: Samples,
    *,
    count: int | None = None,
    known_outputs: Mapping[str, ArrayStore] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> Iterator[tuple[Sample, dict[str, Outputs]]]:
    """Yield each sample with the outputs of every session, in the order of `samples`, for at most `count` samples.

    Args:
        known_outputs: session name → its outputs by the sample's place. What is missing is computed and added.

    Raises:
        DataError: there are no samples, or a session refuses one.
    """
    total = len(samples) if count is None else min(count, len(samples))
    sample_count = 0
    with progress.stage("Evaluating", total) as advance:
        for place, sample in enumerate(itertools.islice(iter(samples), count)):
            yield (
                sample,
                {
                    name: infer_once(session, sample, known_outputs.get(name), place, model=name)
                    for name, session in sessions.items()
                },
            )
            sample_count += 1
            advance(1)
    if not sample_count:
        raise DataError(f"{samples.source}: no samples to evaluate", "Point ⟨data⟩ at samples, or raise ⟨count⟩")
