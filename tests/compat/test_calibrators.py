"""Test create_calibrator and its methods, and the calibration table."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest

from compat.networks import Reader, images, model_of, weights
from edgeq.calibration.table import read_tables
from edgeq.compat import CalibraterBase, CalibrationMethod, CalibratorBase, create_calibrator
from edgeq.compat.calibrate import CalibrationDataReader
from edgeq.compat.calibrators import write_calibration_table
from edgeq.errors import CalibrationError, DataError, UsageError


class DocumentedReader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self) -> None:
        self.samples = iter(images())

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


METHODS = {
    "MinMax": [{}, {"symmetric": True}, {"moving_average": True}, {"symmetric": True, "moving_average": True}],
    "Percentile": [
        {},
        *({"symmetric": s, "percentile": p} for s in (False, True) for p in (99.999, 99.03, 90.03, 50.03)),
    ],
    "Entropy": [{}, {"symmetric": True}, {"num_bins": 64, "num_quantized_bins": 64}],
}
"""With the same answer as onnxruntime's, but for the width of its bins."""


def both_calibrators(model: Path, method: str, types: list[str], options: dict[str, Any], samples: Any) -> list[Any]:
    """Return the results of compute_data of edgeq's and of onnxruntime's calibrator over the same samples."""
    found = []
    for create, reader in ((create_calibrator, Reader), (theirs.create_calibrator, Reader)):
        place = str(model.with_name(f"augmented-{create.__module__}.onnx"))
        calibrator = create(model, types, place, CalibrationMethod[method], extra_options=options)
        calibrator.collect_data(reader(samples))
        found.append(calibrator.compute_data())
    return found


@pytest.mark.parametrize(
    ("method", "options"), [(method, options) for method, all_ in METHODS.items() for options in all_], ids=str
)
def test_ranges_are_those_of_onnxruntime(model: Path, method: str, options: dict[str, Any]) -> None:
    """Ranges equal onnxruntime's, also of tensors with only one sign: Percentile limits symmetric ranges to the seen
    values.
    """
    ours, other = both_calibrators(model, method, [], options, images(6))
    extrema, _ = both_calibrators(model, "MinMax", [], {"symmetric": True}, images(6))
    assert ours.calibration_method == other.calibration_method
    assert set(ours.keys()) == set(other.keys()) >= {"x", "c1", "r1", "c2", "a", "r2", "y"}
    for name, expected in other.items():
        wanted = [float(np.asarray(end).reshape(-1)[0]) for end in expected.range_value]
        # Percentile returns the lower end of the bin with the threshold, one of 2048. edgeq's bins differ.
        allowed = float(extrema[name].range_value[1]) / 512 if method == "Percentile" else 0
        np.testing.assert_allclose(ours[name].range_value, wanted, rtol=1e-6, atol=allowed, err_msg=name)


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranges_of_channels_are_those_of_onnxruntime(tmp_path: Path, symmetric: bool) -> None:
    """Ranges of channels are along axis 1. A tensor with only one axis has one range."""
    nodes = """
        [conv] c = Conv(x, w)
        [relu] r = Relu(c)
        [mean] m = GlobalAveragePool(r)
        [rows] y = Reshape(m, shape)
    """
    constants = {"w": weights(5, 3, 3, 3), "shape": np.array([-1], np.int64)}
    onnx.save(model_of(nodes, constants), tmp_path / "f.onnx")
    options = {"per_channel": True, "symmetric": symmetric}
    ours, other = both_calibrators(tmp_path / "f.onnx", "MinMax", [], options, images(5))
    assert set(ours.keys()) == set(other.keys())
    assert ours["c"].range_value[0].shape == (5,)
    for name, expected in other.items():
        for end, wanted in zip(ours[name].range_value, expected.range_value, strict=True):
            np.testing.assert_allclose(end.reshape(-1), wanted, rtol=1e-6, err_msg=name)


def test_channels_have_no_moving_average(model: Path) -> None:
    calibrator = create_calibrator(model, extra_options={"per_channel": True, "moving_average": True})
    calibrator.collect_data(Reader())
    with pytest.raises(UsageError, match="per_channel and moving_average"):
        calibrator.compute_data()


def test_entropy_searches_where_there_are_more_bins_than_levels(tmp_path: Path) -> None:
    """With enough bins, the search cuts off a few distant values, as onnxruntime's search does."""
    onnx.save(model_of("[relu] y = Relu(x)", {}, inputs="float[1, 4096] x"), tmp_path / "f.onnx")
    values = np.random.default_rng(0).normal(size=(8, 1, 4096)).astype(np.float32)
    values[:, :, 0] = 100
    samples = [{"x": one} for one in values]
    options = {"num_bins": 2048, "num_quantized_bins": 128}
    ours, other = both_calibrators(tmp_path / "f.onnx", "Entropy", [], options, samples)
    for found in (ours, other):
        assert 3 < float(found["x"].range_value[1]) < 15
    whole, _ = both_calibrators(tmp_path / "f.onnx", "Entropy", [], {}, samples)
    assert float(whole["x"].range_value[1]) == 100


@pytest.mark.parametrize(
    "options", [{"num_bins": 1.5}, {"num_quantized_bins": 0}, {"percentile": 101}, {"percentile": "x"}]
)
def test_options_out_of_bounds_are_refused(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(next(iter(options.values()))))):
        create_calibrator(model, extra_options=options)


def test_the_chosen_types_alone_are_observed(model: Path, tmp_path: Path) -> None:
    ours = create_calibrator(model, ["Conv"], augmented_model_path=str(tmp_path / "unused.onnx"))
    ours.set_execution_providers(["CUDAExecutionProvider"])
    ours.collect_data(DocumentedReader())
    found = ours.compute_data()
    assert isinstance(found, theirs.TensorsData)
    assert set(found.keys()) == {"x", "c1", "r1", "c2"}
    for name, pair in ours.compute_range().items():
        assert pair == pytest.approx(found[name].range_value)


def test_more_data_widens_and_the_same_again_changes_nothing(model: Path) -> None:
    calibrator = create_calibrator(str(model))
    calibrator.collect_data(Reader(images(2)))
    first = calibrator.compute_range()
    calibrator.collect_data(Reader(images(2)))
    assert calibrator.compute_range() == first
    calibrator.collect_data(Reader(images(6, seed=3)))
    assert all(low <= first[n][0] and high >= first[n][1] for n, (low, high) in calibrator.compute_range().items())


def test_unknown_options_are_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # tests of the command line set another level
    create_calibrator(model, extra_options={"num_bins": 8, "symetric": True})
    assert [record.getMessage() for record in caplog.records] == [
        "unknown option 'symetric' of the calibrator is ignored"
    ]


def test_nothing_collected(model: Path) -> None:
    calibrator = create_calibrator(onnx.load(model))
    with pytest.raises(CalibrationError, match="no data was collected"):
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
    """Tables contain the largest magnitude. onnxruntime writes the upper end, which gives a tensor of negative numbers
    no range.
    """
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
