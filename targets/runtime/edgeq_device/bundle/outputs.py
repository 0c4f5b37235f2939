"""Write a model's outputs next to a bundle, never over its files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import numpy as np

from edgeq_device.bundle.content import is_harmless
from edgeq_device.bundle.manifest import MANIFEST
from edgeq_device.bundle.names import check_file_names
from edgeq_device.bundle.package import Bundle, path_next_to
from edgeq_device.errors import BundleError, OutputError
from edgeq_device.prepare.npz import write_npz
from edgeq_device.system.places import make_draft
from edgeq_device.system.renaming import move_new
from edgeq_device.trust.signature import SIGNATURE


def choose_output_path(bundle: Bundle, path: Optional[Path]) -> Path:
    """Return the path for outputs: `path`, or one next to the bundle if `path` is None.

    Raises:
        OutputError: the path is the bundle itself, or is inside the bundle and would replace one of its files or make
            the bundle invalid.
    """
    root = bundle.source.resolve()
    path = path_next_to(bundle.source, ".outputs.npz") if path is None else path
    # Resolve the folder, but not the name: a link of that name must be refused, not followed.
    place = path.absolute().parent.resolve() / path.name
    if place == root or (root in place.parents and not _can_join(bundle, place.relative_to(root).as_posix())):
        raise OutputError(f"{path} is in the bundle, and would replace or add to its files", "Write it elsewhere")
    return place


def _can_join(bundle: Bundle, name: str) -> bool:
    """Return whether a file with this relative name may be in the bundle's directory on every system."""
    names = {MANIFEST, SIGNATURE, *bundle.files, *bundle.extra} - {name}
    try:
        check_file_names([*sorted(names), name], str(bundle.source))
    except BundleError:
        return False
    return is_harmless(name) and name not in (MANIFEST, SIGNATURE, *bundle.files)


def save_outputs(path: Path, outputs: Mapping[str, "np.ndarray[Any, Any]"], *, force: bool) -> None:
    """Write `outputs` as an .npz; see `save_file`."""
    save_file(path, lambda draft: write_npz(draft, outputs), force=force)


def check_replaceable(path: Path, *, force: bool) -> None:
    """Refuse an output before the work for it begins.

    Raises:
        OutputError: `path` exists (without `force`), or is not a regular file (even with `force`).
    """
    if os.path.lexists(path):
        if not force:
            raise _exists_error(path)
        if not stat.S_ISREG(path.lstat().st_mode):  # a rename would replace a device or a link with a file
            raise OutputError(f"{path} is not a regular file, so it is not replaced", "Choose another output")


def save_file(path: Path, write: Callable[[Path], object], *, force: bool) -> None:
    """Write a file with `write`, which takes a path. Either the complete file appears, or no file.

    Raises:
        OutputError: see `check_replaceable`; or `path` cannot be written.
    """
    try:
        check_replaceable(path, force=force)
        # A draft first, so that a full disk leaves no half file.
        with make_draft(path) as draft:
            write(draft)
            if force:
                draft.replace(path)
            else:
                move_new(draft, path)
    except FileExistsError as error:  # another process was faster
        raise _exists_error(path) from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror})", "Choose another output") from error


def _exists_error(path: Path) -> OutputError:
    return OutputError(f"{path} exists already", "Pass --force to replace it, or choose another output")
