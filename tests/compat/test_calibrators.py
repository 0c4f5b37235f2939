"""create_calibrator and its methods, and the calibration table."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest

from compat.networks import Reader, images
from edgeq.calibrate.table import read_tables
from edgeq.compat import CalibraterBase, CalibrationMethod, CalibratorBase, create_calibrator, write_calibration_table
from edgeq.compat.calibrate import CalibrationDataReader
from edgeq.errors import CalibrationError, DataError


class DocumentedReader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self) -> None:
        self.samples = iter(images())

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


def test_minmax_ranges_are_those_of_onnxruntime(model: Path, tmp_path: Path) -> None:
    other = theirs.create_calibrator(model, ["Conv"], augmented_model_path=str(tmp_path / "augmented.onnx"))
    other.collect_data(Reader())
    ours = create_calibrator(model, ["Conv"], augmented_model_path=str(tmp_path / "unused.onnx"))
    ours.set_execution_providers(["CUDAExecutionProvider"])
    ours.collect_data(DocumentedReader())
    found = ours.compute_data()
    assert isinstance(found, theirs.TensorsData)
    assert set(found.keys()) == set(other.compute_data().keys()) == {"x", "c1", "r1", "c2"}
    for name, expected in other.compute_data().items():
        # Zero is always inside: the quantizer widens onnxruntime's ranges by it later on.
        low, high = (float(np.asarray(v).reshape(-1)[0]) for v in expected.range_value)
        np.testing.assert_allclose(found[name].range_value, (min(low, 0), max(high, 0)), rtol=1e-6)
        assert ours.compute_range()[name] == pytest.approx(found[name].range_value)


def test_more_data_widens_and_the_same_again_changes_nothing(model: Path) -> None:
    calibrator = create_calibrator(str(model))
    calibrator.collect_data(Reader(images(2)))
    first = calibrator.compute_range()
    calibrator.collect_data(Reader(images(2)))
    assert calibrator.compute_range() == first
    calibrator.collect_data(Reader(images(6, seed=3)))
    assert all(low <= first[n][0] and high >= first[n][1] for n, (low, high) in calibrator.compute_range().items())


@pytest.mark.parametrize("method", ["MinMax", "Entropy", "Percentile"])
def test_methods_and_their_options(model: Path, method: str) -> None:
    calibrator = create_calibrator(
        model,
        calibrate_method=CalibrationMethod[method],
        providers=["CPUExecutionProvider"],
        extra_options={"symmetric": True, "num_bins": 2048, "percentile": 90.0, "moving_average": True},
    )
    calibrator.collect_data(Reader())
    for low, high in calibrator.compute_range().values():
        assert low == -high
    assert calibrator.compute_data().calibration_method == CalibrationMethod[method]


def test_unknown_options_are_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # the command line, which other tests run, sets another one
    create_calibrator(model, extra_options={"num_bins": 8, "symetric": True})
    assert [record.getMessage() for record in caplog.records] == [
        "unknown option 'symetric' of the calibrator is ignored"
    ]


def test_nothing_collected(model: Path) -> None:
    calibrator = create_calibrator(onnx.load(model))
    with pytest.raises(CalibrationError, match="nothing was collected"):
        calibrator.compute_data()
    with pytest.raises(DataError, match="no samples"):
        calibrator.collect_data(Reader([]))


def test_a_subclass_has_to_do_its_part(model: Path, tmp_path: Path) -> None:
    assert CalibratorBase is CalibraterBase

    class Unfinished(CalibraterBase):
        pass

    unfinished = Unfinished(model, augmented_model_path=str(tmp_path / "a.onnx"))
    for call in (unfinished.augment_graph, lambda: unfinished.collect_data(None), unfinished.compute_data):
        with pytest.raises(NotImplementedError, match="Unfinished"):
            call()


def test_tables_hold_the_largest_magnitude(model: Path, tmp_path: Path) -> None:
    """onnxruntime's writes the upper end, so a tensor of negative numbers would have no range at all."""
    calibrator = create_calibrator(model, [])
    calibrator.collect_data(Reader())
    ranges = calibrator.compute_range()
    for form in (ranges, calibrator.compute_data(), {n: max(-low, high) for n, (low, high) in ranges.items()}):
        write_calibration_table(form, dir=str(tmp_path))
        table = read_tables(tmp_path)
        assert table == {n: pytest.approx(max(-low, high), rel=1e-6) for n, (low, high) in ranges.items()}
    write_calibration_table({"cold": (-27.8, 0.0)}, tmp_path)
    assert float(json.loads((tmp_path / "calibration.json").read_text())["cold"]) == pytest.approx(27.8)


def test_the_table_goes_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_calibration_table({"t": np.float32(1.5)})
    assert read_tables(tmp_path) == {"t": 1.5}
