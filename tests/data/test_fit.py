"""Test the meaning of the first axis of stored arrays, and the values that a model never gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from data.helpers import IMAGE_MODEL, signature, spec
from edgeq.data.fit import check_shapes, fit_inputs, fixed_batch
from edgeq.data.input_names import match_names
from edgeq.data.split import SplitPlan, plan_prepared
from edgeq.errors import DataError

ONE = signature(spec("x", 1, 3, 8, 8))
EIGHT = signature(spec("x", 8, 3, 8, 8))
AUDIO = signature(spec("x", 1, "T", 161))
FREE_TIME = signature(spec("x", "T", 161))
TEXT = signature(spec("ids", "N", "S", dtype=np.int64), spec("mask", "N", "S", dtype=np.int64))
STATE = signature(spec("x", 1, "T", 4), spec("h", 2, 1, 5))
SCALED = signature(spec("x", "N", 4), spec("scale"))
BOXES = signature(spec("a", 1, "S", 4), spec("b", 2, "S"))
DECODER = signature(spec("ids", 1, "T", dtype=np.int64), spec("past", 1, 4, "P", 16))
UNKNOWN = signature(spec("x", None, None))


@pytest.mark.parametrize(
    ("model", "shapes", "stack", "plan"),
    [
        (IMAGE_MODEL, {"x": (300, 3, 8, 8)}, None, SplitPlan("rows", 300, True)),
        (IMAGE_MODEL, {"x": (300, 3, 8, 8)}, False, SplitPlan("whole", 1, False)),
        (IMAGE_MODEL, {"x": (1, 3, 8, 8)}, None, SplitPlan("rows", 1, True)),
        (IMAGE_MODEL, {"x": (3, 8, 8)}, None, SplitPlan("single", 1, True)),
        (IMAGE_MODEL, {"x": (7, 1, 3, 8, 8)}, None, SplitPlan("items", 7, True)),
        (IMAGE_MODEL, {"x": (7, 2, 3, 8, 8)}, None, SplitPlan("items", 7, False)),
        (ONE, {"x": (1, 3, 8, 8)}, None, SplitPlan("whole", 1, True)),
        (ONE, {"x": (1, 3, 8, 8)}, True, SplitPlan("rows", 1, True)),
        (ONE, {"x": (5, 3, 8, 8)}, None, SplitPlan("rows", 5, True)),
        (EIGHT, {"x": (8, 3, 8, 8)}, None, SplitPlan("whole", 1, False)),
        (EIGHT, {"x": (20, 3, 8, 8)}, None, SplitPlan("rows", 20, True)),
        (EIGHT, {"x": (4, 8, 3, 8, 8)}, None, SplitPlan("items", 4, False)),
        (EIGHT, {"x": (3, 8, 8)}, None, SplitPlan("single", 1, True)),
        (AUDIO, {"x": (1, 77, 161)}, None, SplitPlan("whole", 1, True)),
        (AUDIO, {"x": (6, 77, 161)}, None, SplitPlan("rows", 6, True)),
        (AUDIO, {"x": (77, 161)}, None, SplitPlan("single", 1, True)),
        (FREE_TIME, {"x": (77, 161)}, False, SplitPlan("whole", 1, False)),
        (TEXT, {"ids": (5, 9), "mask": (5, 9)}, None, SplitPlan("rows", 5, True)),
        (TEXT, {"ids": (9,), "mask": (9,)}, None, SplitPlan("single", 1, True)),
        (STATE, {"x": (1, 6, 4), "h": (2, 1, 5)}, None, SplitPlan("whole", 1, False)),
        (STATE, {"x": (3, 1, 6, 4), "h": (3, 2, 1, 5)}, None, SplitPlan("items", 3, False)),
        (DECODER, {"ids": (1, 5), "past": (1, 4, 0, 16)}, None, SplitPlan("whole", 1, True)),
        (DECODER, {"ids": (7, 1, 5), "past": (7, 1, 4, 0, 16)}, None, SplitPlan("items", 7, True)),
        (UNKNOWN, {"x": (4, 2)}, None, SplitPlan("rows", 4, True)),
        (SCALED, {"x": (5, 4), "scale": ()}, None, SplitPlan("rows", 5, True)),
        (SCALED, {"x": (5, 4), "scale": (5,)}, None, SplitPlan("rows", 5, True)),
        (SCALED, {"x": (5, 2, 4), "scale": ()}, None, SplitPlan("items", 5, False)),
        (SCALED, {"x": (4,), "scale": ()}, None, SplitPlan("single", 1, True)),
        (SCALED, {"x": (5, 4), "scale": ()}, False, SplitPlan("whole", 1, False)),
    ],
)
def test_plans(model: Any, shapes: dict[str, tuple[int, ...]], stack: bool | None, plan: SplitPlan) -> None:
    assert plan_prepared(shapes, model, "f.npz", stack) == plan


@pytest.mark.parametrize(
    ("model", "shapes", "says"),
    [
        (IMAGE_MODEL, {"x": (8, 8, 3)}, r"f.npz: input 'x' has shape \[8, 8, 3\], the model takes x: float32\[N, 3"),
        (IMAGE_MODEL, {"x": (5, 8, 8, 3)}, "has shape"),
        (IMAGE_MODEL, {"x": (0, 3, 8, 8)}, "empty array"),
        (FREE_TIME, {"x": (5, 0, 161)}, "empty array"),
        (DECODER, {"ids": (0, 5), "past": (0, 4, 2, 16)}, "empty array"),
        (DECODER, {"ids": (1, 5), "past": (1, 0, 2, 16)}, "has shape"),
        (TEXT, {"ids": (5, 9), "mask": (4, 9)}, "disagree on the number"),
        (TEXT, {"ids": (5, 9), "mask": (5, 8)}, "input 'mask'"),
        (STATE, {"x": (1, 6, 4), "h": (3, 1, 5)}, "disagree"),
    ],
)
def test_unfit_shapes_are_named(model: Any, shapes: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(DataError, match=says):
        plan_prepared(shapes, model, "f.npz")


def test_names() -> None:
    assert match_names([""], IMAGE_MODEL, "f") == {"x": ""}
    assert match_names(["arr_0"], IMAGE_MODEL, "f") == {"x": "arr_0"}
    assert match_names(["arr_1", "arr_0"], TEXT, "f") == {"ids": "arr_0", "mask": "arr_1"}
    assert match_names(["mask", "ids", "labels"], TEXT, "f") == {"ids": "ids", "mask": "mask"}
    with pytest.raises(DataError, match=r"no array for the model input 'x'.*it holds X, Y"):
        match_names(["X", "Y"], IMAGE_MODEL, "f")
    with pytest.raises(DataError, match="holds 'z', which is not an input"):
        match_names(["x", "z"], IMAGE_MODEL, "f")


def test_fixed_batch() -> None:
    assert [fixed_batch(s) for s in (ONE, EIGHT, IMAGE_MODEL, STATE, UNKNOWN)] == [1, 8, None, None, None]
    assert fixed_batch(signature(spec("x", 8, 4), spec("scale"))) == 8


def test_types_unknown_to_numpy_ask_for_another_export() -> None:
    bfloat16 = signature(spec("x", "N", 4, dtype=onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)))
    with pytest.raises(DataError, match="Export the model with inputs of float32"):
        fit_inputs("f", {"x": np.zeros((1, 4), np.float32)}, bfloat16, prepared=True)


def test_scalars_stay_scalars() -> None:
    for value in (2.0, 2, np.array([2.0]), np.float16(2)):
        fitted = fit_inputs("f", {"x": np.zeros((1, 4)), "scale": np.asarray(value)}, SCALED, prepared=True)
        assert (fitted["scale"].shape, fitted["scale"].dtype, float(fitted["scale"])) == ((), np.float32, 2.0)
    with pytest.raises(DataError, match=r"'scale' has shape \[2\]"):
        check_shapes("f", {"x": np.zeros((1, 4)), "scale": np.zeros(2)}, SCALED)


def test_one_name_for_two_sizes_is_reported() -> None:
    with pytest.raises(DataError, match=r"size 'S' is both 9 \(input 'a'\) and 8 \(input 'b' .* different names"):
        check_shapes("f", {"a": np.zeros((1, 9, 4)), "b": np.zeros((2, 8))}, BOXES)
    with pytest.raises(DataError, match="size 'S' is both"):
        plan_prepared({"a": (1, 9, 4), "b": (2, 8)}, BOXES, "f.npz")


def fit(array: Any, dtype: Any, *, prepared: bool = True) -> np.ndarray:
    return fit_inputs("f", {"x": np.asarray(array)}, signature(spec("x", "N", dtype=dtype)), prepared=prepared)["x"]


def test_lossless_conversions() -> None:
    assert fit(np.array([1.5], np.float64), np.float32).dtype == np.float32
    assert fit(np.array([7], np.int32), np.int64).tolist() == [7]
    assert fit(np.array([7], np.int64), np.int32).dtype == np.int32
    assert fit(np.array([7], np.uint8), np.float32, prepared=False).tolist() == [7.0]
    assert fit(3.0, np.float32).shape == (1,)


@pytest.mark.parametrize(
    ("array", "dtype", "says"),
    [
        (np.array([7], np.uint8), np.float32, "uint8, the model takes float32.*`preprocess`"),
        (np.array([1.5]), np.int64, "float64, the model takes int64"),
        (np.array([1 << 40]), np.int32, "values that do not fit into int32"),
        (np.array([1e300]), np.float32, "values that do not fit into float32"),
        (np.array([np.nan], np.float32), np.float32, "holds NaN"),
        (np.array([np.inf], np.float32), np.float32, "holds infinity"),
        (np.array(["a"]), np.float32, "<U1, the model takes float32"),
        (np.array([None]), np.float32, "Python objects"),
    ],
)
def test_values_a_model_is_never_given(array: np.ndarray, dtype: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        fit(array, dtype)


def test_missing_and_unknown_inputs() -> None:
    with pytest.raises(DataError, match="nothing for the model input 'mask'"):
        fit_inputs("f", {"ids": np.zeros((1, 2), np.int64)}, TEXT, prepared=True)
    with pytest.raises(DataError, match="'idz' is not an input"):
        fit_inputs("f", {"idz": np.zeros((1, 2), np.int64)}, TEXT, prepared=True)


def test_shapes_are_exact_but_for_a_common_batch() -> None:
    check_shapes("f", {"x": np.zeros((3, 3, 8, 8))}, EIGHT)
    with pytest.raises(DataError, match="input 'h'"):
        check_shapes("f", {"x": np.zeros((1, 6, 4)), "h": np.zeros((3, 1, 5))}, STATE)
    with pytest.raises(DataError, match="input 'mask'"):
        check_shapes("f", {"ids": np.zeros((2, 6)), "mask": np.zeros((2, 5))}, TEXT)


GREY = signature(spec("x", "N", 1, 28, "W"))


def test_an_axis_that_lacks_is_named_as_the_step_that_adds_it() -> None:
    with pytest.raises(DataError, match="Add expand=0 to `preprocess`"):
        check_shapes("f", {"x": np.zeros((28, 28))}, GREY)
    with pytest.raises(DataError, match="Add expand=2 to `preprocess`"):
        check_shapes("f", {"x": np.zeros((49, 10))}, signature(spec("x", "N", 49, 10, 1)))
    with pytest.raises(DataError, match="name a `preprocess` with expand=0 in it"):
        plan_prepared({"x": (100, 28, 28)}, GREY, "f")
    with pytest.raises(DataError, match="Correct the data or its preprocessing"):
        check_shapes("f", {"x": np.zeros((27, 28))}, GREY)


def test_channels_in_another_place_are_named_as_the_step_that_moves_them() -> None:
    first, last = signature(spec("x", "N", 3, 8, 9)), signature(spec("x", "N", "H", "W", 3))
    with pytest.raises(DataError, match="Add layout=NCHW to `preprocess`"):
        check_shapes("f", {"x": np.zeros((1, 8, 9, 3))}, first)
    with pytest.raises(DataError, match="Add layout=NHWC to `preprocess`"):
        check_shapes("f", {"x": np.zeros((1, 3, 8, 9))}, last)
    with pytest.raises(DataError, match="name a `preprocess` with layout=NCHW in it"):
        plan_prepared({"x": (100, 8, 9, 3)}, first, "f")
    for shape in ((1, 9, 8, 3), (1, 3, 9, 8), (1, 8, 9, 4)):
        with pytest.raises(DataError, match="Correct the data or its preprocessing"):
            check_shapes("f", {"x": np.zeros(shape)}, first)


def test_steps_on_all_of_several_inputs_are_named() -> None:
    model = signature(spec("a", "N", 2), spec("b", "N", 2, dtype=np.int64))
    arrays = {"a": np.zeros((1, 2), np.float32), "b": np.zeros((1, 2), np.float32)}
    with pytest.raises(DataError, match="'b' is float32, the model takes int64") as caught:
        fit_inputs("x", arrays, model, prepared=False)
    assert "input=a" in caught.value.fix
    with pytest.raises(DataError, match="'b' is float32") as caught:
        fit_inputs("x", arrays, model, prepared=True)
    assert "input=" not in caught.value.fix
