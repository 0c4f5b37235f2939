"""With indices onnxruntime's quantizer writes what it writes without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeq.backends import quantizer
from edgeq.backends.quantizer import quantize_with_ranges
from edgeq.backends.quantizer_index import SymmetricParameters, indexed
from edgeq.calibrate.ranges import Range
from edgeq.graph.query import constant
from edgeq.model.prepare import PreparedModel, prepare_model
from tests.backends.build import residual
from tests.graphs import proto


def shared() -> onnx.ModelProto:
    """A weight and a bias that two layers share, a tensor that two read, removed and kept activations, an output that
    is read on, data-movement operators, a Softmax."""
    body = """
    g (float[1,4,6,6] x) => (float[1,4,6,6] a, float[1,8] y) {
      [c1] c1 = Conv <pads = [1,1,1,1]> (x, w, b)
      [r1] r1 = Relu (c1)
      [c2] c2 = Conv <pads = [1,1,1,1]> (r1, w, b)
      [l2] l2 = Clip (c2, low, high)
      [a] a = Add (l2, r1)
      [t] t = Transpose <perm = [0, 1, 3, 2]> (a)
      [m] m = Concat <axis = 1> (t, r1)
      [p] p = GlobalAveragePool (m)
      [f] f = Flatten (p)
      [d] d = MatMul (f, v)
      [y] y = Softmax (d)
    }"""
    model = proto(body)
    random = np.random.default_rng(0)
    held = {
        "w": random.normal(size=(4, 4, 3, 3)), "b": random.normal(size=4) * 50, "v": random.normal(size=(8, 8)),
        "low": np.array(0.0), "high": np.array(6.0),
    }  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in held.items())
    return model


@pytest.fixture(scope="module", params=[residual, shared])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder = tmp_path_factory.mktemp("index")
    source = folder / "model.onnx"
    source.write_bytes(request.param().SerializeToString())
    return prepare_model(source, folder / "work")


def _written(prepared: PreparedModel, file: Path, **options: Any) -> bytes:
    values = [v.name or "" for node in prepared.model.graph for v in node.outputs]
    names = [*values, *(v.name or "" for v in prepared.model.graph.inputs)]
    ranges = {name: Range(-1.0 - i % 3, 2.0 + i % 5) for i, name in enumerate(names)}
    quantize_with_ranges(prepared, file, ranges, float_nodes=(), fix="", fix_ranges="", **options)
    return file.read_bytes()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("extra", [{}, {"ActivationSymmetric": True}, {"DedicatedQDQPair": True}])
def test_the_file_is_the_same(
    prepared: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_channel: bool, extra: dict[str, Any]
) -> None:
    _check_same(prepared, tmp_path, monkeypatch, per_channel=per_channel, extra_options=extra)


def test_the_file_is_the_same_with_given_ranges_of_channels(
    prepared: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = next(node.inputs[1] for node in prepared.model.graph if node.op_type == "Conv")
    weight = constant(value)
    assert value is not None
    assert weight is not None
    ranges = [{"rmin": -1.0 - place, "rmax": 9.0} for place in range(len(weight))]
    overrides = {value.name: [{"axis": 0, **ranges[0]}, *ranges[1:]]}
    _check_same(prepared, tmp_path, monkeypatch, per_channel=True, extra_options={"TensorQuantOverrides": overrides})


def _check_same(prepared: PreparedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """With the shortcuts and without, the same bytes are written."""
    found = _written(prepared, folder / "indexed.onnx", **options)

    def plain(model: ir.Model) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(quantizer, "indexed", plain)
    assert found == _written(prepared, folder / "plain.onnx", **options)


def test_onnxruntime_is_left_as_it_was() -> None:
    from onnxruntime.quantization import base_quantizer, qdq_quantizer

    def parts() -> tuple[object, ...]:
        searches = base_quantizer.ONNXModel, base_quantizer.find_by_name, qdq_quantizer.find_by_name
        loader = import_module("onnxruntime.quantization.quantize").load_model_with_shape_infer
        return *searches, qdq_quantizer.quantize_onnx_initializer, qdq_quantizer.compute_data_quant_params, loader

    before = parts()
    with indexed(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)):
        assert not set(parts()) & set(before)
    assert parts() == before


def test_no_search_goes_through_all_weights_or_nodes(prepared: PreparedModel, tmp_path: Path) -> None:
    from onnxruntime.quantization.onnx_model import ONNXModel

    slow = [ONNXModel.replace_input_of_all_nodes, ONNXModel.replace_output_of_all_nodes, ONNXModel.get_initializer]
    called = []
    with pytest.MonkeyPatch.context() as patch:
        for function in slow:
            patch.setattr(ONNXModel, function.__name__, lambda *args: called.append(args))
        _written(prepared, tmp_path / "model.onnx")
    assert not called


def test_shapes_that_are_known_are_not_inferred(prepared: PreparedModel, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(onnx.shape_inference, "infer_shapes_path")
        _written(prepared, tmp_path / "model.onnx")


def test_few_channels_are_worked_out_by_onnxruntime(prepared: PreparedModel, tmp_path: Path) -> None:
    from onnxruntime.quantization import quant_utils

    compute, calls = quant_utils.compute_data_quant_params, []

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return compute(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quant_utils, "compute_data_quant_params", counted)
        _written(prepared, tmp_path / "model.onnx", per_channel=True)
    assert calls
    assert all(array.size <= 2 for array, *_ in calls)


@given(
    values=arrays(np.float32, st.integers(1, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    quant_type=st.sampled_from([onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16]),
    symmetric=st.booleans(),
    reduce_range=st.booleans(),
    least=st.sampled_from([None, 0.5]),
    low=st.none() | st.floats(-1e30, 1e30),
    high=st.none() | st.floats(-1e30, 1e30),
)
def test_parameters_are_those_of_onnxruntime(
    values: np.ndarray,
    quant_type: int,
    symmetric: bool,
    reduce_range: bool,
    least: float | None,
    low: float | None,
    high: float | None,
) -> None:
    from onnxruntime.quantization.quant_utils import compute_data_quant_params

    with np.errstate(over="ignore"):  # of its own, where a range is nearly all of float32
        given = {"min_real_range": least, "rmin_override": low, "rmax_override": high}
        right = compute_data_quant_params(values, quant_type, symmetric, reduce_range, **given)
        mine = SymmetricParameters(compute_data_quant_params)
        for _ in range(2):
            found = mine(values, quant_type, symmetric, reduce_range=reduce_range, **given)
            for one, other in zip(found, right, strict=True):
                np.testing.assert_array_equal(one, other)
                assert (one.dtype, one.shape) == (other.dtype, other.shape)


def test_another_formula_is_found_out() -> None:
    def compute(data: np.ndarray, quant_type: int, symmetric: bool, reduce_range: bool = False) -> Any:
        return np.int8(0), np.float32(np.abs(data).max() ** 2)

    mine = SymmetricParameters(compute)
    for value in (3.0, 5.0):
        assert mine(np.array([value], np.float32), onnx.TensorProto.INT8, True)[1] == value**2
