"""Plug-in engines in tests: the real ones run where they are installed and take this machine's CPU."""

from __future__ import annotations

import onnxruntime
import pytest
from edgeq_device.engines import problem_of

from edgeq.run.engines import load_engines


def needs_plugin(name: str) -> pytest.MarkDecorator:
    """Leaves a test out where that engine cannot be used, and says why."""
    problem = problem_of(load_engines()[name], onnxruntime.__version__)
    return pytest.mark.skipif(bool(problem), reason=problem)
