from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.backends.tensorrt.implicit import check_version, native_version, write_implicit
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range
from edgeq.calibration.table import read_native, read_tables
from edgeq.errors import CalibrationError, HardwareError, ModelError, UsageError
from edgeq.hardware.target import Target, resolve
from edgeq.model.convert import from_proto
from edgeq.model.load import read_model

from .nets import Bench, bench, residual


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("implicit"), residual())


def orin(**runtime: str) -> Target:
    target = resolve("jetson-orin")
    return dataclasses.replace(target, runtime={**target.runtime, **runtime})


def read_by_onnxruntime(path: Path) -> dict[str, float]:
    from onnxruntime.quantization.CalTableFlatBuffers.TrtTable import TrtTable

    table = TrtTable.GetRootAs(path.read_bytes(), 0)
    entries = [table.Dict(i) for i in range(table.DictLength())]
    return {entry.Key().decode(): float(entry.Value()) for entry in entries}


def test_every_float_tensor_has_a_range_and_a_shape(small: Bench) -> None:
    built = small.build(target=orin(), format="table")
    model = onnx.load(built.model)
    tensors = set(quantizable_tensors(from_proto(model)))
    assert read_by_onnxruntime(built.tables[0]).keys() == tensors
    shaped = {v.name for v in [*model.graph.value_info, *model.graph.input, *model.graph.output]}
    assert tensors <= shaped
    assert not any(n.op_type == "QuantizeLinear" for n in model.graph.node)


def test_the_four_tables_say_the_same(small: Bench) -> None:
    built = small.build(target=orin(), format="table")
    table = read_tables(built.tables[0].parent)
    native = read_native(built.tables[3])
    assert native.keys() == table.keys()
    assert all(native[name] == pytest.approx(value, rel=1e-6) for name, value in table.items())
    assert built.tables[3].read_text().startswith("TRT-100300-EntropyCalibration2\n")


def test_options_name_the_table_and_devices_are_held_to_old_tensorrt(small: Bench) -> None:
    built = small.build(target=orin(), format="table")
    assert built.provider_options["trt_int8_calibration_table_name"] == built.tables[0].name
    assert built.provider_options["trt_int8_use_native_calibration_table"] == "0"
    assert built.requires["below_tensorrt"] == "11.0"
    assert any("TensorRT chooses" in note for note in built.notes)


def test_negative_tensors_and_outliers_by_their_absolute_maximum(small: Bench, tmp_path: Path) -> None:
    model = small.prepared.model.clone()
    ranges = dict(small.observed)
    ranges["c1"] = Range(-27.8, 0.0)
    ranges["c2"] = Range(-1.0, 3e4)
    write_implicit(model, ranges, tmp_path, "10.3")
    table = read_by_onnxruntime(tmp_path / "calibration.flatbuffers")
    assert table["c1"] == np.float32(27.8)
    assert table["c2"] == 3e4


def test_an_incomplete_table_is_refused(small: Bench, tmp_path: Path) -> None:
    ranges = {name: span for name, span in small.observed.items() if name != "c1"}
    with pytest.raises(CalibrationError, match=r"'c1' has no range \(missing: 1\)"):
        write_implicit(small.prepared.model.clone(), ranges, tmp_path, "10.3")
    assert not list(tmp_path.iterdir())


def test_a_model_with_pairs_is_refused(small: Bench, tmp_path: Path) -> None:
    model = read_model(small.build().model)
    with pytest.raises(ModelError, match="these or a table, not both"):
        write_implicit(model, small.observed, tmp_path, "10.3")


def test_tensorrt_11_is_refused_with_the_way_out(small: Bench) -> None:
    with pytest.raises(HardwareError, match=r"TensorRT 11\.2.*removed implicit int8.*Use `format` QDQ"):
        small.build(target=orin(tensorrt="11.2"), format="table")


def test_an_unknown_tensorrt_is_refused() -> None:
    with pytest.raises(HardwareError, match="does not name its TensorRT version"):
        check_version("", "nvidia-sm86")


def test_choices_that_a_table_does_not_leave(small: Bench) -> None:
    with pytest.raises(UsageError, match="TensorRT itself chooses"):
        small.build(target=orin(), format="table", exclude=("one",))


@pytest.mark.parametrize(("version", "spelled"), [("8.6.1", "8601"), ("10.3", "100300"), ("10.0.1", "100001")])
def test_versions_as_the_native_table_spells_them(version: str, spelled: str) -> None:
    assert native_version(version) == spelled
