"""Samples through several sessions in one pass: what accuracy and agreement have in common.

Decoding a sample (JPEG, resize) often costs more than a small model, so sessions that are to be compared share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from edgeq_device.arrays import one_array
from numpy.typing import NDArray

from edgeq.errors import BoardError, DataError, EngineError, RuntimeUnavailableError
from edgeq.progress import SILENT, Progress

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

Outputs = Mapping[str, NDArray[Any]]
"""Output name → array, for one sample."""


class Session(Protocol):
    """The part of `onnxruntime.InferenceSession` that measuring needs."""

    def get_outputs(self) -> Sequence[Any]:
        """Objects with the `name` of each output."""
        ...

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """The named outputs (None for all) of one inference."""
        ...


def infer(session: Session, sample: Sample, *, model: str = "the model") -> Outputs:
    """Run one sample. Outputs that are no tensors become one array each, as `edgeq_device.arrays.one_array` has it.

    Raises:
        DataError: the session refuses the sample's names, dtypes or shapes.
        RuntimeUnavailableError: the runtime fails inside the model.
    """
    names = [output.name for output in session.get_outputs()]
    values = run_feed(session, names, sample.inputs, sample.name, model=model)
    return dict(zip(names, map(one_array, values), strict=True))


def run_feed(
    session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], where: str, *, model: str
) -> Sequence[Any]:
    """Run one feed, with the errors of `infer`.

    Args:
        where: names the feed in messages.
    """
    try:
        return session.run(names, dict(feed))  # type: ignore[no-any-return]
    except (BoardError, EngineError):  # each says what failed
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class below Exception
        text = " ".join(str(error).split())
        if type(error).__name__ in ("InvalidArgument", "ValueError"):
            raise DataError(
                f"{where}: {model} refuses it: {text}", "Compare with the inputs that `edgeq inspect` lists"
            ) from error
        raise RuntimeUnavailableError(
            f"{where}: onnxruntime fails in {model}: {text}", "Try another graph optimization level or provider"
        ) from error


def inferences(
    sessions: Mapping[str, Session],
    samples: Samples,
    *,
    count: int | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> Iterator[tuple[Sample, dict[str, Outputs]]]:
    """Each sample with what every session makes of it, in the order of `samples`; at most `count` samples.

    Args:
        known: what some of the sessions make of each sample, so that these are not run.

    Raises:
        DataError: there is no sample at all, or a session refuses one.
    """
    total = len(samples) if count is None else min(count, len(samples))
    seen = 0
    with progress.stage("Evaluating", total) as advance:
        for place, sample in enumerate(itertools.islice(iter(samples), count)):
            yield (
                sample,
                {
                    name: known[name][place] if name in known else infer(session, sample, model=name)
                    for name, session in sessions.items()
                },
            )
            seen += 1
            advance(1)
    if not seen:
        raise DataError(f"{samples.source}: no samples to evaluate", "Point --data at samples, or raise --count")
