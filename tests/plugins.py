"""Mark tests that need a real plug-in engine. They run if it is installed and supports this machine's CPU."""

from __future__ import annotations

import onnxruntime
import pytest
from edgeq_device.engines.catalog import describe_problem

from edgeq.run.engines import load_engines


def needs_plugin(name: str) -> pytest.MarkDecorator:
    """Skip a test if that engine cannot be used here, and give the reason."""
    problem = describe_problem(load_engines()[name], onnxruntime.__version__)
    return pytest.mark.skipif(bool(problem), reason=problem)
