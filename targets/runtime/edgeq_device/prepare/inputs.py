"""Read a model's inputs from files, and compare them with what the model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

import numpy as np

from edgeq_device.errors import DataError
from edgeq_device.model.tensors import DTYPES
from edgeq_device.prepare.arrays import read_arrays


def read_feeds(session: Any, files: Sequence[str]) -> Dict[str, "np.ndarray[Any, Any]"]:
    """Read the model's inputs from `files`. Each entry is an .npz whose keys are input names, `NAME=FILE.npy`, or a
    plain .npy for a single input.

    Raises:
        DataError: an input is missing, unknown, given twice, or has the wrong dtype or shape.
    """
    input_names = [spec.name for spec in session.get_inputs()]
    feeds: Dict[str, "np.ndarray[Any, Any]"] = {}
    for text in files:
        name, equals, path = text.partition("=")
        if not equals or name not in input_names:
            name, path = "", text
        for key, array in read_arrays(Path(path)).items():
            # An .npy has no name of its own.
            key = key or name or (input_names[0] if len(input_names) == 1 else "")
            if not key:
                names = ", ".join(input_names)
                raise DataError(f"{path}: the model has several inputs", f"Write NAME={path}, with NAME one of {names}")
            if key in feeds:
                raise DataError(f"{path}: input {key!r} is given twice")
            feeds[key] = array
    check_feeds(session, feeds)
    return feeds


def check_feeds(session: Any, feeds: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Compare the names, dtypes and shapes of `feeds` with the model's inputs. A named size accepts any number.

    Raises:
        DataError: an input is missing or unknown, or has the wrong dtype or shape.
    """
    specs = {spec.name: spec for spec in session.get_inputs()}
    names = ", ".join(specs)
    for name in feeds:
        if name not in specs:
            raise DataError(f"the model has no input {name!r}", f"Its inputs are {names}")
    for name, spec in specs.items():
        if name not in feeds:
            raise DataError(f"input {name!r} is missing", f"The model takes {names}")
        array, dtype = feeds[name], DTYPES.get(spec.type)
        if dtype is not None and array.dtype != np.dtype(dtype):
            raise DataError(f"input {name!r} is {array.dtype}, the model takes {dtype}", "Convert it before saving")
        shape = list(spec.shape)
        fits = len(shape) == array.ndim and all(
            not isinstance(size, int) or size == have for size, have in zip(shape, array.shape)
        )
        # An input of unknown rank looks like a scalar; onnxruntime runs both on any shape.
        if shape and not fits:
            raise DataError(f"input {name!r} has shape {list(array.shape)}, the model takes {shape}")
