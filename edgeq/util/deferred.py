"""Delay the import of slow modules until their first use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

# onnx_ir needs sympy for arithmetic with symbolic sizes. sympy takes half of the time of onnx_ir's import.
MODULES = frozenset({"sympy", "onnx_ir._symbolic_shapes"})


class _Deferring:
    """Find the same modules as Python's own finder, but delay the loading of modules in `MODULES` until their first
    use.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `MODULES`; see `importlib.abc.MetaPathFinder.find_spec`."""
        # Every other module goes to the next finder, so nothing else changes.
        spec = PathFinder.find_spec(fullname, path, target) if fullname in MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def defer_imports() -> None:
    """Delay the loading of `MODULES` until their first use. Only programs call this, because a library must not change
    its user's imports.
    """
    # In front, or Python's own finder would answer first.
    sys.meta_path.insert(0, _Deferring())
