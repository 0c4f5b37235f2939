"""One pass of a float model over samples: a session that gives tensors, and the observers that count them.

The outputs of the float model on the calibration samples, kept for a proof on the same samples.

A proof compares with them: where no other samples are given, the float model need not run over these again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibrate.histogram import EMPTY
from edgeq.calibrate.observer import Observer, Part, ReducedModel, Seen
from edgeq.calibrate.statistics import FINITE, TensorStatistics
from edgeq.calibrate.tensors import Derived, Plan
from edgeq.data.sample import Sample
from edgeq.errors import CalibrationError, DataError, EdgeqError
from edgeq.model.graph import name_of

_MOST_BYTES = 2**26
_LARGEST_ELEMENT = 8


class FloatOutputs:
    """What each sample gave; filled by several threads.

    Args:
        model: the float model.
        total: how many samples there are.

    Attributes:
        names: of the outputs; empty where they cannot be kept: too large, of sizes that depend on the sample, or made
            by no node.
    """

    def __init__(self, model: ir.Model, total: int) -> None:
        outputs = model.graph.outputs
        kept = total * sum(map(_most_bytes, outputs)) <= _MOST_BYTES
        self.names = tuple(map(name_of, outputs)) if kept else ()
        self._total = total
        self._by_place: dict[int, Mapping[str, NDArray[Any]]] = {}

    def keep(self, place: int, values: Mapping[str, Any]) -> None:
        """Keep the outputs of the sample at `place` among what was fetched of it."""
        self._by_place[place] = {name: values[name] for name in self.names}

    def all(self) -> Sequence[Mapping[str, NDArray[Any]]]:
        """Output name → array for each sample, in order; empty where not all of them were kept."""
        if not self.names or len(self._by_place) < self._total:
            return ()
        return tuple(self._by_place[place] for place in range(self._total))


def _most_bytes(output: ir.Value) -> float:
    """Bytes of one sample's output, whose first axis may be free; infinity where they are not known."""
    if output.producer() is None or output.shape is None:
        return math.inf
    known = [size for size in output.shape if isinstance(size, int)]
    free = len(output.shape) - len(known)
    first_alone = free == 0 or (free == 1 and not isinstance(output.shape[0], int))
    return math.prod(known) * _LARGEST_ELEMENT if first_alone else math.inf


_Arrays = list[tuple[str, NDArray[Any] | Part]]


class FloatPass:
    """The observers of one pass, and the threads that feed them.

    Args:
        model: gives the fetched tensors of `steps`.
        state: what was seen of each tensor before.
        at_once: samples run at the same time.
        outputs: takes the model's outputs, which `model` gives behind the fetched tensors where they are not among
            those.

    Attributes:
        running_s, counting_s: seconds that all threads together ran the model, and counted what it gave.
    """

    def __init__(
        self,
        model: ReducedModel,
        steps: Plan,
        state: Mapping[str, TensorStatistics],
        channels: Mapping[str, int],
        *,
        at_once: int,
        every_element: bool,
        outputs: FloatOutputs | None = None,
    ) -> None:
        self._outputs = outputs
        self._plan = steps
        self._model = model
        self._observers = {
            name: Observer(state[name], channels.get(name), every_element=every_element) for name in steps.names
        }
        self._pool = ThreadPoolExecutor(at_once)
        self._limit = at_once + 1
        self._pending: set[Future[None]] = set()
        self._failure: EdgeqError | None = None
        self._timing, self._counting = threading.Lock(), threading.Lock()
        self._uncounted: deque[tuple[Sample, int, _Arrays]] = deque()
        self.running_s = self.counting_s = 0.0

    def run(self, samples: Iterable[tuple[int, Sample]]) -> Iterator[int]:
        """Observe each sample, given with its place; gives 1 for every sample that is done."""
        for place, sample in samples:
            self._pending.add(self._pool.submit(self.observe, sample, place))
            while len(self._pending) >= self._limit:
                yield from self._finished(wait(self._pending, return_when=FIRST_COMPLETED).done)
        while self._pending:
            yield from self._finished(wait(self._pending, return_when=FIRST_COMPLETED).done)

    def so_far(self) -> dict[str, TensorStatistics]:
        """Statistics of the samples that were begun, on the way through them.

        Raises:
            EdgeqError: a sample failed.
        """
        for future in tuple(self._pending):
            future.result()
        return self.freeze()

    def end(self) -> dict[str, TensorStatistics]:
        """Statistics of the samples that were begun; what has not begun is forgotten.

        Raises:
            EdgeqError: a sample failed.
        """
        self.close()
        return self.freeze(last=True)

    def freeze(self, *, last: bool = False, derive: bool = True) -> dict[str, TensorStatistics]:
        """Statistics of the pass's tensors; only while no sample is half done.

        Args:
            last: free the memory.
            derive: also give the histograms that follow from others; else they are empty.

        Raises:
            EdgeqError: a sample failed.
        """
        if self._failure is not None:
            raise self._failure
        done = {name: self._observers[name].freeze(last=last) for name in self._plan.counted}
        nonfinite = {name: observer.nonfinite for name, observer in self._observers.items()}
        known = self._plan.histograms({n: one.histogram for n, one in done.items()}, nonfinite) if derive else {}
        for how in self._plan.derived:
            done[how.name] = self._observers[how.name].freeze(known.get(how.name, EMPTY))
        return done

    def close(self) -> None:
        """Finish the samples that are running and forget those that are not: what was observed is the first n."""
        self._pool.shutdown(cancel_futures=True)

    def _finished(self, done: set[Future[None]]) -> Iterator[int]:
        for future in done:
            self._pending.discard(future)
            future.result()
            yield 1

    def observe(self, sample: Sample, place: int) -> None:
        """Run and count one sample, the one at `place` of all.

        Raises:
            CalibrationError: an input has a value that is not finite, or an output has NaN or nothing finite.
            DataError: ONNX Runtime refuses the sample.
        """
        try:
            self._observe(sample, place)
        except EdgeqError as error:
            self._failure = error
            raise

    def _observe(self, sample: Sample, place: int) -> None:
        began = time.perf_counter()
        arrays = self._arrays(sample, place)
        with self._timing:
            self.running_s += time.perf_counter() - began
        # One thread counts at a time, and the others run what comes next: two that count pass Python's lock to and fro
        # with every array, which takes longer than the counting.
        self._uncounted.append((sample, place, arrays))
        while self._uncounted and self._counting.acquire(blocking=len(self._uncounted) > 1):
            began = time.perf_counter()
            try:
                while self._uncounted:
                    self._count(*self._uncounted.popleft())
            finally:
                self.counting_s += time.perf_counter() - began
                self._counting.release()

    def _count(self, sample: Sample, place: int, arrays: _Arrays) -> None:
        seen: dict[str, Seen] = {}
        while arrays:
            # Popped, so that each array is freed as soon as it is counted.
            name, values = arrays.pop()
            try:
                seen[name] = self._observers[name].observe(values, place)
            except CalibrationError as error:
                raise CalibrationError(
                    f"tensor {name!r} in sample {sample.name}: {error.problem}",
                    error.fix or "Check the sample and its preprocessing, or leave the tensor out",
                ) from error
        for derived in self._plan.derived:
            part = _derive(derived, [seen[source] for source in derived.sources])
            seen[derived.name] = part
            self._observers[derived.name].note(part)
        for name in self._plan.inputs:
            if seen[name].nonfinite:
                raise _refusal(name, sample, seen[name])
        for name in self._plan.outputs:
            if seen[name].nonfinite.nan or (seen[name].nonfinite and not seen[name].count):
                raise _refusal(name, sample, seen[name])

    def _arrays(self, sample: Sample, place: int) -> _Arrays:
        """What is counted of a sample, by tensor; the first one last."""
        for name in self._plan.inputs:
            if name not in sample.inputs:
                raise DataError(f"sample {sample.name} has no input {name!r}", "Give all inputs of the model")
        arrays: _Arrays = [(name, sample.inputs[name]) for name in self._plan.inputs]
        if self._plan.fetched:
            values = self._model.run(sample.inputs, sample.name, place)
            arrays += zip(self._plan.fetched, values, strict=self._outputs is None)
            if self._outputs is not None:
                self._outputs.keep(place, dict(zip(self._model.names, values, strict=True)))
        return arrays[::-1]


def _refusal(name: str, sample: Sample, seen: Seen) -> CalibrationError:
    return CalibrationError(
        f"tensor {name!r} in sample {sample.name}: it holds {seen.nonfinite}", "Check the sample and its preprocessing"
    )


def _derive(how: Derived, sources: list[Seen]) -> Seen:
    count = sum(s.count for s in sources)
    low, high = min(s.minimum for s in sources), max(s.maximum for s in sources)
    nonfinite = sum((s.nonfinite for s in sources), start=FINITE)
    if how.kind == "clip":
        moved, nonfinite = how.clipped(nonfinite)
        count += sum(number for number, _ in moved)
        low, high = min((low, *(bound for _, bound in moved))), max((high, *(bound for _, bound in moved)))
        if count:
            low, high = (min(max(v, how.low), how.high) + 0.0 for v in (low, high))
    return Seen(count, low, high, sources[0].dtype, nonfinite)
