"""Run a variant on tensors from files. The tensors are what the model takes: preprocessing has been done before."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np

from edgeq_device.arrays import DTYPES, one_array, read_arrays, write_npz
from edgeq_device.errors import BundleError, DataError, OutputError, RuntimeUnavailableError
from edgeq_device.manifest import MANIFEST, check_file_names, is_harmless
from edgeq_device.package import Bundle, beside
from edgeq_device.places import draft_of, move_new
from edgeq_device.signature import SIGNATURE


def read_feeds(session: Any, files: Sequence[str]) -> Dict[str, "np.ndarray[Any, Any]"]:
    """The model's inputs from `files`: .npz files whose keys are input names, `NAME=FILE.npy`, or one plain .npy.

    Raises:
        DataError: an input is missing, unknown, given twice, or has the wrong dtype or shape.
    """
    wanted = session.get_inputs()
    feeds: Dict[str, "np.ndarray[Any, Any]"] = {}
    for text in files:
        name, path = _split(text, [spec.name for spec in wanted])
        for key, array in read_arrays(Path(path)).items():
            key = key or name
            if not key and len(wanted) == 1:
                key = wanted[0].name
            if not key:
                names = ", ".join(spec.name for spec in wanted)
                raise DataError(f"{path}: the model has several inputs", f"Write NAME={path}, NAME one of {names}")
            if key in feeds:
                raise DataError(f"{path}: input {key!r} is given twice")
            feeds[key] = array
    check_feeds(session, feeds)
    return feeds


def _split(text: str, inputs: List[str]) -> "tuple[str, str]":
    name, equals, path = text.partition("=")
    return (name, path) if equals and name in inputs else ("", text)


def check_feeds(session: Any, feeds: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Hold `feeds` against the model's inputs: names, dtypes, shapes (named sizes fit anything)."""
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
        # A model that does not declare the rank looks like one that takes a scalar; onnxruntime runs both on any shape.
        if shape and not fits:
            raise DataError(f"input {name!r} has shape {list(array.shape)}, the model takes {shape}")


def infer(session: Any, feeds: Mapping[str, "np.ndarray[Any, Any]"]) -> Dict[str, "np.ndarray[Any, Any]"]:
    """All outputs by name."""
    names = [spec.name for spec in session.get_outputs()]
    try:
        results = session.run(names, dict(feeds))
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise RuntimeUnavailableError(f"onnxruntime fails on this input ({' '.join(str(error).split())})") from error
    return {name: one_array(result) for name, result in zip(names, results)}


def output_place(bundle: Bundle, wanted: Optional[Path]) -> Path:
    """Where outputs go: `wanted`, or beside the bundle where none is.

    Raises:
        OutputError: it is the bundle, or would become or replace a part of it, or make it unreadable.
    """
    root = bundle.source.resolve()
    wanted = beside(bundle.source, ".outputs.npz") if wanted is None else wanted
    place = wanted.absolute().parent.resolve() / wanted.name
    if place == root or (root in place.parents and not _may_join(bundle, place.relative_to(root).as_posix())):
        raise OutputError(f"{wanted} lies in the bundle, and would replace or join its files", "Write it elsewhere")
    return place


def _may_join(bundle: Bundle, name: str) -> bool:
    """Whether a file of this relative name may lie in the bundle's directory, on every system that it is copied to."""
    others = {MANIFEST, SIGNATURE, *bundle.files, *bundle.extra} - {name}
    try:
        check_file_names([*sorted(others), name], str(bundle.source))
    except BundleError:
        return False
    return is_harmless(name) and name not in (MANIFEST, SIGNATURE, *bundle.files)


def save_outputs(path: Path, outputs: Mapping[str, "np.ndarray[Any, Any]"], *, force: bool) -> None:
    """Write `outputs` as an .npz that appears whole or not at all.

    Raises:
        OutputError: `path` exists (without `force`), is no regular file (with it too), or cannot be written.
    """
    taken = OutputError(f"{path} exists already", "Pass --force to replace it, or choose another output")
    try:
        if os.path.lexists(path):
            if not force:
                raise taken
            if not stat.S_ISREG(path.lstat().st_mode):  # a rename would put a file in the place of a device or a link
                raise OutputError(f"{path} is no regular file, and is not replaced", "Choose another output")
        with draft_of(path) as draft:
            write_npz(draft, outputs)
            if force:
                draft.replace(path)
            else:
                move_new(draft, path)
    except FileExistsError as error:  # another process was faster
        raise taken from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror})", "Choose another output") from error
