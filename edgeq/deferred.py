"""Modules that a library imports in its first line and hardly ever needs: loaded when something of them is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

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
