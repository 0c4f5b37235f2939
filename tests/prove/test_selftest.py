from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgeq_device.bundle.selftest import check_outputs

from edgeq.bundle.spec import SelfTestCase
from edgeq.prove.variants import expected_outputs
from tests import graphs


@pytest.mark.parametrize(
    ("native", "simulated", "allowed"),
    [(True, False, 0.1), (False, False, 0.5), (False, True, 1.0)],
)
def test_tolerances_depend_on_the_kernels_of_the_reference(
    native: bool, simulated: bool, allowed: float, tmp_path: Path
) -> None:
    """A device's outputs may differ by 2.5 % of the largest value, or by more if they were not computed natively.

    With other kernels the tolerance is at least the error of quantization. For a simulation it is at least twice that.
    """
    model = tmp_path / "float.onnx"
    model.write_bytes(graphs.proto("g (float[N] x) => (float[N] y) { y = Neg (x) }").SerializeToString())
    x = np.array([4.0, -3.0], np.float32)
    case = SelfTestCase({"x": x}, {"y": np.array([-4.0, 3.5], np.float32)})
    found = expected_outputs((case,), None, model, native=native, simulated=simulated)
    assert found.cases == (case,)
    assert found.tolerance == {"y": pytest.approx(allowed)}
    assert found.slices == {}


def test_outputs_that_depend_on_random_numbers_are_left_out(tmp_path: Path) -> None:
    model = tmp_path / "float.onnx"
    body = "g (float[2] x) => (float[2] y, float[2] z) { y = Neg (x) r = RandomNormalLike (x) z = Add (r, x) }"
    model.write_bytes(graphs.proto(body).SerializeToString())
    x = np.array([4.0, -3.0], np.float32)
    case = SelfTestCase({"x": x}, {"y": -x, "z": x})
    found = expected_outputs((case,), None, model, native=False, random=["z"])
    assert set(found.tolerance) == {"y"}
    assert [set(case.outputs) for case in found.cases] == [{"y"}]
    assert expected_outputs((case,), None, model, native=False, random=["y", "z"]).cases == ()


def detector(path: Path) -> tuple[Path, tuple[SelfTestCase, ...]]:
    """Return a model x [1, 12, 8] → y = x, and two cases: boxes up to 600 next to scores up to 0.14."""
    path.write_bytes(
        graphs.proto("g (float[1, 12, 8] x) => (float[1, 12, 8] y) { y = Identity (x) }").SerializeToString()
    )
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2):
        x = np.concatenate([rng.uniform(0, 600, (1, 4, 8)), rng.uniform(0, 0.14, (1, 8, 8))], axis=1)
        found.append(x.astype(np.float32))
    return path, tuple(SelfTestCase({"x": x}, {"y": x}) for x in found)


@pytest.mark.parametrize("native", [True, False])
def test_dead_scores_beside_boxes_fail_the_self_test(native: bool, tmp_path: Path) -> None:
    model, cases = detector(tmp_path / "float.onnx")
    found = expected_outputs(cases, None, model, native=native)
    (part,) = found.slices["y"]
    assert (part.axis, part.first, part.last) == (1, 4, 11)
    assert part.tolerance == pytest.approx(0.014, rel=0.1)
    assert found.tolerance["y"] > 10

    def answers(scale: float) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]]:
        changed = [
            np.concatenate([case.outputs["y"][:, :4], case.outputs["y"][:, 4:] * np.float32(scale)], 1)
            for case in cases
        ]
        return [
            ({"y": other}, dict(case.outputs), dict(case.inputs)) for other, case in zip(changed, cases, strict=True)
        ]

    assert all(check.passed for check in check_outputs(answers(1.05), found.tolerance, found.slices))
    whole, scores = check_outputs(answers(0.0), found.tolerance, found.slices)
    assert whole.passed
    assert (scores.name, scores.passed) == ("y, 4..11 on axis 1", False)


def test_quantization_on_one_scale_allows_a_slice_two_steps(tmp_path: Path) -> None:
    """A slice of small values may differ by two steps, because another machine may round to the neighbouring step."""
    model, cases = detector(tmp_path / "float.onnx")
    step = np.float32(600 / 255)
    on_grid = tuple(
        SelfTestCase(case.inputs, {"y": (np.round(np.concatenate([y[:, :4], y[:, 4:] * 120], 1) / step) * step)})
        for case in cases
        for y in (case.outputs["y"],)
    )
    (part,) = expected_outputs(on_grid, None, model, native=True).slices["y"]
    assert part.tolerance == pytest.approx(2 * step, rel=0.01)
