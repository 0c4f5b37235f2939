from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgeq.errors import CheckFailedError
from edgeq.retargeting.compare import USUAL, compare, compare_outputs
from tests.retargeting.networks import Net


def times(factor: float, folder: Path, name: str) -> Path:
    net = Net()
    net.add("Mul", ["x", net.constant("f", np.float32(factor))], "y")
    onnx.save(net.model(), folder / name)
    return folder / name


def test_measures_differences(tmp_path: Path) -> None:
    one, other = times(1.0, tmp_path, "one.onnx"), times(1.01, tmp_path, "other.onnx")
    same = compare_outputs(one, one)
    assert same is not None
    assert (same.identical, same.largest) == (True, 0.0)
    found = compare(one, other, same_operators=False)
    assert found is not None
    assert found.largest == pytest.approx(0.01, rel=1e-3)
    assert found.largest < USUAL
    with pytest.raises(CheckFailedError, match=r"differs from .*one\.onnx by 0\.01"):
        compare(one, other, same_operators=True)


def test_no_numbers_and_no_run_fail(tmp_path: Path) -> None:
    one = times(1.0, tmp_path, "one.onnx")
    with pytest.raises(CheckFailedError, match="NaN or infinity"):
        compare(one, times(np.inf, tmp_path, "infinite.onnx"), same_operators=False)
    net = Net()
    net.nodes.append(helper.make_node("Reshape", ["x", net.constant("s", np.int64([7, 7]))], ["y"], name="reshape"))
    broken = net.model()
    broken.graph.input[0].type.tensor_type.shape.dim[3].dim_param = "W"
    onnx.save(broken, tmp_path / "broken.onnx")
    with pytest.raises(CheckFailedError, match="does not run"):
        compare(one, tmp_path / "broken.onnx", same_operators=False)
