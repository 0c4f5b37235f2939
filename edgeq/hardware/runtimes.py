"""Versions of the runtimes that are installed, from package metadata: importing them takes seconds and memory."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-gpu": ("onnxruntime-gpu",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
}


def detect_runtimes() -> dict[str, str]:
    """Version per runtime that is installed, and Python's own."""
    found = {name: version for name, packages in _DISTRIBUTIONS.items() if (version := _first_version(packages))}
    return {**found, "python": platform.python_version()}


def _first_version(packages: Iterable[str]) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
