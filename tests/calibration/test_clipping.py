from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import Range, clipped_power
from edgeq.calibration.statistics import Statistics
from edgeq.data.samples import open_samples
from edgeq.model.load import model_signature, read_model

from .models import write


def statistics(folder: Path, values: np.ndarray) -> Statistics:
    size = values.size
    path = write(folder / "model.onnx", f"g (float[1, {size}] x) => (float[1, {size}] y) {{ [neg] y = Neg(x) }}")
    np.savez(folder / "x.npz", x=values.reshape(1, 1, -1).astype(np.float32)[0])
    return collect(read_model(path), open_samples(folder / "x.npz", model_signature(path)))


@pytest.mark.parametrize("limit", [0.5, 2.0, 7.0])
def test_against_the_values_themselves(tmp_path: Path, limit: float) -> None:
    values = np.random.default_rng(0).standard_t(3, 4000)
    found = clipped_power(statistics(tmp_path, values), {"x": Range(-limit, limit)})["x"]
    exact = np.sum((values - np.clip(values, -limit, limit)) ** 2) / np.sum(values**2)
    assert found == pytest.approx(exact, rel=0.02, abs=1e-4)


def test_nothing_is_cut_off_inside_the_range_or_known_of_others(tmp_path: Path) -> None:
    seen = statistics(tmp_path, np.array([-1.0, 3.0]))
    assert clipped_power(seen, {"x": Range(-1.0, 3.0), "elsewhere": Range(0.0, 1.0)}) == {"x": 0.0}


def test_all_zero(tmp_path: Path) -> None:
    assert clipped_power(statistics(tmp_path, np.zeros(4)), {"x": Range(0.0, 0.0)}) == {"x": 0.0}
