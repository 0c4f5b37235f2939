"""What must be the same in all processes for their results to be."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from edgeq import __version__
from edgeq.errors import RuntimeUnavailableError


def versions() -> dict[str, str]:
    """Of edgeq, numpy and onnxruntime, in this process; "none" for what is not installed."""
    found = {"edgeq": __version__}
    for name in ("numpy", "onnxruntime"):
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except ImportError:
            found[name] = "none"
    return found


def check_versions(expected: Mapping[str, str]) -> None:
    """Refuse to work in a process whose versions are others: its results would be.

    Raises:
        RuntimeUnavailableError: names the first one.
    """
    for name, here in versions().items():
        if here != expected.get(name):
            raise RuntimeUnavailableError(
                f"a worker has {name} {here}, and this process has {expected.get(name)}",
                "Install the same versions everywhere",
            )
