"""Inputs made up from a session's own signature, for timing where no data is at hand."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.dtypes import DTYPES
from edgeq_device.errors import DataError, UsageError

_MAX_BYTES = 1 << 31
_MADE_UP = {**DTYPES, "tensor(string)": "object"}


def parse_shapes(texts: Sequence[str]) -> Dict[str, Tuple[int, ...]]:
    """Shapes by input name from "name=1,3,224,224" each ("name=" is a scalar).

    Raises:
        UsageError: anything else, a size under 1, or a name twice.
    """
    shapes: Dict[str, Tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        if not equals or not name or not re.fullmatch(r"([1-9]\d{0,9}([,x][1-9]\d{0,9})*)?", sizes):
            raise UsageError(f"{text!r} is not a shape", "Write it like input=1,3,224,224")
        if name in shapes:
            raise UsageError(f"two shapes are given for the input {name!r}", "Leave one out")
        shapes[name] = tuple(int(n) for n in re.split("[,x]", sizes)) if sizes else ()
    return shapes


def input_specs(session: Any, shapes: Mapping[str, Sequence[int]]) -> Dict[str, Tuple[np.dtype, Tuple[int, ...]]]:
    """dtype and concrete shape by input name: what is given, else the model's own with 1 for each open size.

    Raises:
        UsageError: a shape for an unknown input, or one that contradicts the model's.
        DataError: an input that cannot be made up (a sequence, or an element type that numpy has not).
    """
    specs = {}
    inputs = session.get_inputs()
    names = [i.name for i in inputs]
    for name in shapes:
        if name not in names:
            raise UsageError(f"the model has no input {name!r}", f"Its inputs are {', '.join(names)}")
    for given in inputs:
        if given.type not in _MADE_UP:
            raise DataError(f"values for the input {given.name!r} of type {given.type} cannot be made up", "Give data")
        own: List[Optional[int]] = [d if isinstance(d, int) and d > 0 else None for d in given.shape]
        shape = tuple(shapes.get(given.name, [d or 1 for d in own]))
        # An unknown rank looks like a scalar here, so a shape given for "no sizes" is let through.
        if own and (len(shape) != len(own) or any(o is not None and o != s for o, s in zip(own, shape))):
            wants = ", ".join("?" if d is None else str(d) for d in own)
            raise UsageError(f"the input {given.name!r} has the shape [{wants}], not {list(shape)}", "Correct --shape")
        specs[given.name] = (np.dtype(_MADE_UP[given.type]), shape)
    return specs


def random_feeds(
    session: Any, shapes: Optional[Mapping[str, Sequence[int]]] = None, *, count: int = 8, seed: int = 0
) -> List[Dict[str, np.ndarray]]:
    """`count` samples by the session's signature.

    Floats are uniform in [0, 1); integers are 0 or 1, which is valid for ids, masks and lengths alike; strings empty.

    Raises:
        UsageError, DataError: see `input_specs`; also more than 2 GiB.
    """
    specs = input_specs(session, shapes or {})
    size = sum(dtype.itemsize * int(np.prod(shape, dtype=object)) for dtype, shape in specs.values())
    if size > _MAX_BYTES:
        raise UsageError(f"one sample would take {size >> 20} MiB", "Give smaller shapes")
    count = max(1, min(count, _MAX_BYTES // 8 // max(1, size)))
    random = np.random.default_rng(seed)
    return [{name: _values(random, dtype, shape) for name, (dtype, shape) in specs.items()} for _ in range(count)]


def _values(random: np.random.Generator, dtype: np.dtype, shape: Tuple[int, ...]) -> np.ndarray:
    if dtype.kind == "f":
        return np.asarray(random.random(shape)).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, "", np.object_)
    return np.asarray(random.integers(0, 2, shape)).astype(dtype)
