"""Versions of the runtimes that are installed, from package metadata: importing them takes seconds and memory."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from edgeq_device.engines import installed_versions

_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-gpu": ("onnxruntime-gpu",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
}


def detect_runtimes() -> dict[str, str]:
    """Version per runtime that is installed, and Python's own."""
    return runtimes_among(installed_versions(PACKAGES), platform.python_version())


PACKAGES = tuple(package for packages in _DISTRIBUTIONS.values() for package in packages)
"""Packages whose versions `runtimes_among` looks at."""


def runtimes_among(versions: Mapping[str, str], python: str) -> dict[str, str]:
    """The same from the versions of packages, as far as they are installed."""
    found = {
        name: next(versions[package] for package in packages if package in versions)
        for name, packages in _DISTRIBUTIONS.items()
        if any(package in versions for package in packages)
    }
    return {**found, "python": python}
