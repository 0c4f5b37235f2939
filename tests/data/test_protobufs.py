"""Test TensorProto files, by case and as stacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from data.helpers import IMAGE_MODEL, floats, signature, spec
from edgeq.data.array_files import find_cases, open_cases, open_stacked
from edgeq.data.arrays import read_tensor
from edgeq.errors import DataError

TWO = signature(spec("a", "N", 2), spec("b", "N", 3))


def save(path: Path, array: np.ndarray, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(numpy_helper.from_array(array, name).SerializeToString())


def test_cases_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        save(tmp_path / f"test_data_set_{number}" / "input_0.pb", np.full((1, 2), number, np.float32))
        save(tmp_path / f"test_data_set_{number}" / "input_1.pb", np.full((1, 3), number, np.float32))
        save(tmp_path / f"test_data_set_{number}" / "output_0.pb", np.zeros(1, np.float32))
    cases = open_cases(tmp_path, find_cases(tmp_path), TWO, prepared=True)
    got = [(r.raw["a"][0, 0], r.raw["b"].shape, r.context["file"]) for r in cases.read_records(range(3))]
    assert got == [(n, (1, 3), f"test_data_set_{n}") for n in (0, 2, 10)]


def test_a_folder_that_is_one_case(tmp_path: Path) -> None:
    save(tmp_path / "input_0.pb", floats(1, 3, 8, 8))
    assert find_cases(tmp_path) == (tmp_path,)


def test_names_decide_where_they_are_the_models(tmp_path: Path) -> None:
    save(tmp_path / "input_0.pb", floats(1, 3), "b")
    save(tmp_path / "input_1.pb", floats(1, 2), "a")
    record = next(iter(open_cases(tmp_path, (tmp_path,), TWO, prepared=True).read_records(range(1))))
    assert record.raw["a"].shape == (1, 2)


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    save(tmp_path / "input_0.pb", floats(1, 2))
    with pytest.raises(DataError, match=r"holds 1 inputs \(input_0.pb\), the model takes 2 \(a, b\)"):
        open_cases(tmp_path, (tmp_path,), TWO, prepared=True)


@pytest.mark.parametrize(
    ("shape", "layout", "prepared", "items"),
    [
        ((5, 3, 8, 8), None, True, [(1, 3, 8, 8)] * 5),
        ((5, 1, 3, 8, 8), None, True, [(1, 3, 8, 8)] * 5),
        ((3, 8, 8), None, True, [(3, 8, 8)]),
        ((192,), None, True, [(1, 3, 8, 8)]),
        ((5, 1, 3, 9, 9), "CHW", False, [(3, 9, 9)] * 5),
        ((3, 9, 9), "CHW", False, [(3, 9, 9)]),
    ],
)
def test_stacks(
    tmp_path: Path, shape: tuple[int, ...], layout: str | None, prepared: bool, items: list[tuple[int, ...]]
) -> None:
    array = floats(*shape)
    save(tmp_path / "x.pb", array)
    stacked = open_stacked(tmp_path / "x.pb", IMAGE_MODEL, layout, None, prepared=prepared)
    got = [record.raw["x"] for record in stacked.read_records(range(len(stacked)))]
    assert [item.shape for item in got] == items
    assert np.array_equal(np.concatenate([item.ravel() for item in got]), array.ravel())


def test_a_stack_is_for_models_of_one_input(tmp_path: Path) -> None:
    save(tmp_path / "x.pb", floats(5, 3))
    with pytest.raises(DataError, match="Store cases in folders"):
        open_stacked(tmp_path / "x.pb", TWO, None, None, prepared=True)


def hostile() -> dict[str, tuple[bytes, str]]:
    outside = onnx.TensorProto(data_type=1, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../../secret")
    return {
        "text": (b"\xff\xfehello", "not a TensorProto"),
        "empty": (b"", "known dtype"),
        "huge": (onnx.TensorProto(data_type=1, dims=[1 << 30, 1 << 30]).SerializeToString(), "claims shape"),
        "negative": (onnx.TensorProto(data_type=1, dims=[-4]).SerializeToString(), "known dtype"),
        "short": (onnx.TensorProto(data_type=1, dims=[4], raw_data=b"\0" * 8).SerializeToString(), "cannot be read"),
        "external": (outside.SerializeToString(), "another file"),
        "model": (
            onnx.ModelProto(ir_version=8, producer_name="x").SerializeToString(),
            "known dtype|not a TensorProto",
        ),
    }


@pytest.mark.parametrize("kind", sorted(hostile()))
def test_hostile_files(tmp_path: Path, kind: str) -> None:
    data, says = hostile()[kind]
    (tmp_path / "input_0.pb").write_bytes(data)
    with pytest.raises(DataError, match=says) as caught:
        read_tensor(tmp_path / "input_0.pb")
    assert "input_0.pb" in str(caught.value)
    assert "\n" not in str(caught.value)
