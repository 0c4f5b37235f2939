"""Find edgeq's data files, and load slow modules at their first use.

Where the files that ship with edgeq lie: `profiles/` and `targets/`.

In a wheel they are inside the package; in a checkout or an editable install they stand at the top of the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType
from typing import Literal

import platformdirs
from edgeq_device.errors import DeviceError

from edgeq import errors
from edgeq.errors import EdgeqError

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """The directory `name` ("profiles" or "targets") as shipped."""
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def user_folder(kind: Literal["config", "cache", "state"]) -> Path | None:
    """Return edgeq's folder of that kind among the user's own; None where there is none.

    Containers run as users without a home: HOME, the XDG variables and the entry in the list of users are all missing.
    """
    try:
        found = Path(getattr(platformdirs, f"user_{kind}_path")("edgeq"))
    except (RuntimeError, KeyError):  # by the version of platformdirs, or of Python
        return None
    return found if found.is_absolute() else None


# sympy takes half of onnx_ir's import, for arithmetic with sizes that have names.
MODULES = frozenset({"sympy", "onnx_ir._symbolic_shapes"})


class _Deferring:
    """A finder that finds what Python's own does, for modules that load at their first use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        found = PathFinder.find_spec(fullname, path, target) if fullname in MODULES else None
        if found is not None and found.loader is not None:
            found.loader = LazyLoader(found.loader)
        return found


def defer_imports() -> None:
    """Load `MODULES` at their first use from now on. For programs: what a library finds is its user's business."""
    sys.meta_path.insert(0, _Deferring())


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise the device side's errors as edgeq's of the same name."""
    try:
        yield
    except DeviceError as error:
        kind: type[EdgeqError] = getattr(errors, type(error).__name__, EdgeqError)
        raise kind(error.problem, error.fix) from error
