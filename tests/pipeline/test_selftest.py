from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.bundle.write import SelfTestCase
from edgeq.pipeline.selftest import expected_outputs
from tests import graphs


@pytest.mark.parametrize(
    ("native", "simulated", "allowed"),
    [(True, False, 0.1), (False, False, 0.5), (False, True, 1.0)],
)
def test_what_a_device_may_differ_by(native: bool, simulated: bool, allowed: float, tmp_path: Path) -> None:
    """2.5 % of the largest value; where the kernels are others', at least what quantization changed; where the answers
    are a simulation's, twice that."""
    model = tmp_path / "float.onnx"
    model.write_bytes(graphs.proto("g (float[N] x) => (float[N] y) { y = Neg (x) }").SerializeToString())
    x = np.array([4.0, -3.0], np.float32)
    case = SelfTestCase({"x": x}, {"y": np.array([-4.0, 3.5], np.float32)})
    cases, found = expected_outputs((case,), None, model, native=native, simulated=simulated)
    assert cases == (case,)
    assert found == {"y": pytest.approx(allowed)}
