"""Make up inputs for a model, for measurements without data."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.errors import DataError, UsageError
from edgeq_device.model.tensors import DTYPES

_MAX_BYTES = 1 << 31
_MADE_UP = {**DTYPES, "tensor(string)": "object"}


def parse_shapes(texts: Sequence[str]) -> Dict[str, Tuple[int, ...]]:
    """Return shapes by input name from texts such as "name=1,3,224,224" ("name=" means a scalar).

    Raises:
        UsageError: a text has another form, a size is less than 1, or a name occurs twice.
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


def find_input_specs(session: Any, shapes: Mapping[str, Sequence[int]]) -> Dict[str, Tuple[np.dtype, Tuple[int, ...]]]:
    """Return each input's dtype and concrete shape, keyed by input name. A shape in `shapes` takes precedence over the
    model's shape. In the model's shape, each open size becomes 1.

    Raises:
        UsageError: `shapes` contains an unknown input, or a shape that contradicts the model's.
        DataError: edgeq cannot make up values for an input, because it is a sequence or has an element type that numpy
            does not have.
    """
    specs = {}
    inputs = session.get_inputs()
    names = [i.name for i in inputs]
    for name in shapes:
        if name not in names:
            raise UsageError(f"the model has no input {name!r}", f"Its inputs are {', '.join(names)}")
    for tensor in inputs:
        if tensor.type not in _MADE_UP:
            raise DataError(
                f"values for the input {tensor.name!r} of type {tensor.type} cannot be made up", "Give data"
            )
        sizes: List[Optional[int]] = [d if isinstance(d, int) and d > 0 else None for d in tensor.shape]
        shape = tuple(shapes.get(tensor.name, [d or 1 for d in sizes]))
        # An input of unknown rank looks like a scalar here, so any shape is accepted for an input without sizes.
        if sizes and (len(shape) != len(sizes) or any(o is not None and o != s for o, s in zip(sizes, shape))):
            wants = ", ".join("?" if d is None else str(d) for d in sizes)
            raise UsageError(f"the input {tensor.name!r} has the shape [{wants}], not {list(shape)}", "Correct --shape")
        specs[tensor.name] = (np.dtype(_MADE_UP[tensor.type]), shape)
    return specs


def draw_feeds(
    session: Any, shapes: Optional[Mapping[str, Sequence[int]]] = None, *, count: int = 8, seed: int = 0
) -> List[Dict[str, np.ndarray]]:
    """Return `count` random samples that fit the inputs of the session.

    Floats are uniform in [0, 1). Integers are 0 or 1, which is valid for ids, masks and lengths alike. Strings are
    empty.

    Raises:
        UsageError, DataError: for the same reasons as `find_input_specs`, or if one sample would take more than 2 GiB.
    """
    specs = find_input_specs(session, shapes or {})
    size = sum(dtype.itemsize * int(np.prod(shape, dtype=object)) for dtype, shape in specs.values())
    # Shapes come from a command line, where a digit too many is easily typed.
    if size > _MAX_BYTES:
        raise UsageError(f"one sample would take {size >> 20} MiB", "Give smaller shapes")
    # All samples together stay below an eighth of the limit.
    count = max(1, min(count, _MAX_BYTES // 8 // max(1, size)))
    random = np.random.default_rng(seed)
    return [{name: _draw_values(random, dtype, shape) for name, (dtype, shape) in specs.items()} for _ in range(count)]


def _draw_values(random: np.random.Generator, dtype: np.dtype, shape: Tuple[int, ...]) -> np.ndarray:
    if dtype.kind == "f":
        return np.asarray(random.random(shape)).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, "", np.object_)
    return np.asarray(random.integers(0, 2, shape)).astype(dtype)
