"""Models with free sizes, run at sizes that no sample has: a file may be right at one size and wrong at the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.data.state import Array
from edgeq.errors import CheckFailedError, EdgeqError
from edgeq.graph.index import RANDOM
from edgeq.graph.query import every_node
from edgeq.measure.comparison import Comparison
from edgeq.measure.inference import Outputs, Session, infer
from edgeq.model.prepare import PreparedModel
from edgeq.session import open_session
from edgeq.signature import Signature

# The largest power of two that divides a size, up to this, divides the sizes that are tried too: strides need it.
_STEP = 32
_LOST_DB = 20.0
"""More than other values alone make of it. A wrong shape or a baked size loses all."""
_SIZED_BY_DATA = frozenset({"Compress", "Loop", "NonMaxSuppression", "NonZero", "Unique"})

Shapes = Mapping[str, tuple[int, ...]]
"""Input → shape."""


def check_other_sizes(
    prepared: PreparedModel,
    sessions: tuple[Session, Session],
    samples: Samples,
    *,
    takes: Signature,
    form: str,
    sqnr_db: float,
    least: float,
) -> None:
    """Run the first sample, repeated or cut to other sizes, where the source leaves sizes of its inputs free.

    Sizes that the source refuses count for nothing.

    Args:
        sessions: of the source or its prepared form, and of what was made of it, the candidate.
        takes: the inputs of the candidate; sizes that they rule out count for nothing either.
        form: the candidate in the message, as "its quantized form".
        sqnr_db: of the candidate against the reference at the samples' own sizes, in dB.
        least: dB that are enough at other sizes, however good the candidate is at the samples' own.

    Raises:
        CheckFailedError: the candidate fails, or gives something else, at a size that the source takes.
    """
    reference, candidate = sessions
    operators = {node.op_type for node in every_node(prepared.model)}
    if not operators.isdisjoint(RANDOM):
        return
    sizes_follow = operators.isdisjoint(_SIZED_BY_DATA)
    sample = next(iter(samples))
    given = {name: array.shape for name, array in sample.inputs.items()}
    for group in _groups(prepared.signature, given):
        for shapes in (shapes for shapes in group if _takes(takes, shapes)):
            inputs = {name: _resized(array, shapes[name]) for name, array in sample.inputs.items()}
            resized = replace(sample, name=f"{sample.name}, resized", inputs=inputs)
            wanted = _outputs(reference, resized)
            if wanted is None:
                continue
            problem = _problem(wanted, candidate, resized, min(least, sqnr_db - _LOST_DB), sizes_follow)
            if not problem:
                break
            if _outputs(open_session(prepared.source), resized) is not None:
                listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
                raise CheckFailedError(
                    f"{prepared.source}: {form} is wrong at a size that the model takes, {listed}: {problem}",
                    f"Fix the sizes that you need: {_fixes(prepared.signature, given, shapes)}",
                )


def _groups(signature: Signature, given: Shapes) -> Iterator[list[Shapes]]:
    """Yield groups of shapes to try, of which the first that the source takes stands for the others: another batch,
    larger sizes, smaller sizes without a common divisor. Names that differ get sizes that differ, where that works."""

    def shapes(axes: Callable[[int], bool], change: Callable[[int, int], int], *, apart: bool) -> Shapes:
        places: dict[object, int] = {}
        found = {}
        for spec in signature.inputs:
            sizes = list(given[spec.name])
            for axis, named in enumerate(spec.shape or ()):
                if not isinstance(named, int) and axes(axis):
                    place = places.setdefault(named or (axis, sizes[axis]), len(places)) if apart else 0
                    sizes[axis] = change(sizes[axis], place + 1)
            found[spec.name] = tuple(sizes)
        return found

    def larger(size: int, place: int) -> int:
        return size + place * _step(size)

    def smaller(size: int, place: int) -> int:
        return size - place * _step(size)

    def odd(size: int, place: int) -> int:
        return size - size // 4 - place

    batch = [shapes(lambda axis: axis == 0, lambda size, place: size + 1, apart=False)]
    even = [shapes(bool, change, apart=apart) for change in (larger, smaller) for apart in (True, False)]
    uneven = [shapes(bool, odd, apart=apart) for apart in (True, False)]
    for group in (batch, even, uneven):
        tried = [s for s in group if s != given and all(size > 0 for sizes in s.values() for size in sizes)]
        if tried:
            yield tried


def _step(size: int) -> int:
    return min(_STEP, size & -size) if size else 1


def _resized(array: Array, shape: tuple[int, ...]) -> Array:
    """Repeat or cut an array on each axis: its values stay those of a sample."""
    if not array.size:
        return np.zeros(shape, array.dtype)
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return array


def _takes(signature: Signature, shapes: Shapes) -> bool:
    """Tell whether no size contradicts a number in the shapes of inputs."""
    pairs = (pair for spec in signature.inputs for pair in zip(spec.shape or (), shapes[spec.name], strict=False))
    return all(not isinstance(own, int) or own == size for own, size in pairs)


def _outputs(session: Session, sample: Sample) -> Outputs | None:
    try:
        return infer(session, sample)
    except EdgeqError:
        return None


def _problem(wanted: Outputs, candidate: Session, sample: Sample, least: float, sizes_follow: bool) -> str:
    """Return what is wrong with what the candidate makes of a sample; "" where nothing is.

    Args:
        least: decibels against `wanted` that are enough.
        sizes_follow: whether the shapes of outputs follow from those of inputs.
    """
    comparison = Comparison()
    try:
        comparison.update(wanted, infer(candidate, sample))
    except EdgeqError as error:
        return error.problem
    found = comparison.result()
    for output in found.outputs:
        if output.mismatched and sizes_follow:
            return f"output {output.name!r} has another shape"
        if output.nonfinite:
            return f"output {output.name!r} is not finite"
    # Of whole outputs: in one sample, a small value beside large ones is no part of another unit.
    sqnr_db = min((output.sqnr_db for output in found.outputs if output.same is None), default=math.inf)
    return f"{sqnr_db:.1f} dB SQNR" if sqnr_db < least else ""


def _fixes(signature: Signature, given: Shapes, tried: Shapes) -> str:
    known: dict[str, int] = {}
    for spec in signature.inputs:
        for axis, named in enumerate(spec.shape or ()):
            if tried[spec.name][axis] != given[spec.name][axis]:
                known.setdefault(str(named or f"{spec.name}:{axis}"), given[spec.name][axis])
    return " ".join(f"--fix {name}={size}" for name, size in known.items())
