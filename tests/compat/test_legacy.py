"""Test quantize on a ModelProto: every mode of 2019 and 2020, and the faults of that time."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compat.networks import Reader, model_of, operators, relative_error, residual, run, values_of, weights
from edgeq.compat import QuantizationMode, calibrate, quantize
from edgeq.errors import ModelError, UsageError

pytestmark = pytest.mark.usefixtures("exact_kernels")

INTEGER, QLINEAR = QuantizationMode.IntegerOps, QuantizationMode.QLinearOps


def params_for(model: onnx.ModelProto, dtype: type = np.uint8) -> dict[str, list[Any]]:
    """Return the zero point and the scale of every tensor, from its values for one input."""
    found = {}
    for name, values in values_of(model).items():
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
        scale = np.float32((high - low) / 255)
        zero = np.round(-low / scale) + np.iinfo(dtype).min
        found[name] = [dtype(zero), scale]
    return found


def split(params: dict[str, list[Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return the same parameters as the two arguments of 2019."""
    return {
        "input_quantization_params": {name: params[name] for name in ("x", "r1", "r2")},
        "output_quantization_params": {name: params[name] for name in ("c1", "c2", "r1", "a", "r2", "y")},
    }


MODES = list(itertools.product((INTEGER, QLINEAR), (False, True)))


@pytest.mark.parametrize(("mode", "static"), MODES)
@pytest.mark.parametrize("signed", [False, True])
def test_era_a_2019(mode: Any, static: bool, signed: bool) -> None:
    model = residual(opset=9)
    given = split(params_for(model))
    if not static:
        del given["input_quantization_params"]
    quantized = quantize(
        model, per_channel=False, nbits=8, quantization_mode=mode, static=static, asymmetric_input_types=signed, **given
    )
    assert relative_error(run(quantized)[0], run(model)[0]) < 0.05
    kinds = {t.data_type for t in quantized.graph.initializer if t.name == "w1_quantized"}
    assert kinds == {onnx.TensorProto.INT8 if signed else onnx.TensorProto.UINT8}
    assert ("QLinearConv" if mode == QLINEAR else "ConvInteger") in operators(quantized)


@pytest.mark.parametrize(("mode", "static"), MODES)
def test_eras_b_to_d_2020(mode: Any, static: bool) -> None:
    model = residual(opset=11)
    params = params_for(model) if static or mode == QLINEAR else None
    for activation, weight in itertools.product((False, True), (False, True)):
        quantized = quantize(
            model,
            quantization_mode=mode,
            static=static,
            force_fusions=True,
            symmetric_activation=activation,
            symmetric_weight=weight,
            quantization_params=params,
            nodes_to_quantize=None,
            nodes_to_exclude=[],
            op_types_to_quantize=[],
        )
        onnx.checker.check_model(quantized)
        assert relative_error(run(quantized)[0], run(model)[0]) < 0.05


def test_qlinear_with_measured_inputs_and_a_bias() -> None:
    """A bias works with inputs measured at run time. Today's onnxruntime fails, because the bias's scale is known only
    then.
    """
    model = residual()
    outputs = {name: value for name, value in params_for(model).items() if name != "x"}
    for per_channel in (False, True):
        quantized = quantize(
            model, per_channel, quantization_mode=QLINEAR, static=False, output_quantization_params=outputs
        )
        assert operators(quantized).count("QLinearConv") == 2
        assert "DynamicQuantizeLinear" in operators(quantized)
        conv = next(node for node in quantized.graph.node if node.op_type == "QLinearConv")
        assert len(conv.input) == 9
        assert relative_error(run(quantized)[0], run(model)[0]) < 0.05


def test_per_channel_weights_with_qlinear_only() -> None:
    model = residual()
    quantized = quantize(
        model,
        True,
        quantization_mode=QLINEAR,
        static=True,
        quantization_params=params_for(model),
        symmetric_weight=True,
    )
    scales = {t.name: tuple(t.dims) for t in quantized.graph.initializer}
    assert scales["w1_scale"] == (6,)
    with pytest.raises(UsageError, match="ConvInteger has one weight scale"):
        quantize(model, per_channel=True, quantization_mode=INTEGER)
    without = quantize(model, per_channel=True, quantization_mode=INTEGER, op_types_to_quantize=["MatMul"])
    assert "MatMulInteger" in operators(without)


def test_seven_bits() -> None:
    quantized = quantize(residual(), nbits=7, symmetric_weight=True)
    weight = next(t for t in quantized.graph.initializer if t.name == "w1_quantized")
    assert np.abs(numpy_helper.to_array(weight).astype(int)).max() <= 64
    with pytest.raises(UsageError, match="nbits is 4"):
        quantize(residual(), nbits=4)


def test_zero_points_of_either_type_mean_the_same() -> None:
    model = residual()
    unsigned = quantize(model, quantization_mode=QLINEAR, static=True, quantization_params=params_for(model))
    signed = params_for(model, np.int8)
    shifted = quantize(model, quantization_mode=QLINEAR, static=True, quantization_params=signed)
    assert shifted.SerializeToString(deterministic=True) == unsigned.SerializeToString(deterministic=True)
    kept = quantize(
        model,
        quantization_mode=QLINEAR,
        static=True,
        quantization_params=signed,
        symmetric_activation=True,
        symmetric_weight=True,
    )
    zero = next(t for t in kept.graph.initializer if t.name == "x_zero_point")
    assert zero.data_type == onnx.TensorProto.INT8


def test_old_opsets_are_converted_not_relabelled() -> None:
    """Old opsets are converted. Clip had attributes until opset 10, and the older tool wrote them under opset 11, which
    lacks them.
    """
    nodes = "[conv] c = Conv<pads = [1, 1, 1, 1]>(x, w) [clip] y = Clip<min = -0.5, max = 0.5>(c)"
    model = model_of(nodes, {"w": weights(4, 3, 3, 3)}, opset=9)
    quantized = quantize(model)
    assert quantized.opset_import[0].version >= 13
    assert np.abs(run(quantized)[0]).max() == 0.5


@pytest.mark.parametrize(("opset", "warned"), [(9, True), (10, False), (12, False)])
def test_an_opset_without_quantized_operators_is_warned_of(
    opset: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    quantize(residual(opset))
    assert ("the model's opset is 9, and quantized operators exist from 10 on" in caplog.text) is warned


@pytest.mark.parametrize("bounds", [(0.0, 0.7), (-0.4, 0.7), (0.2, 0.7)])
def test_a_clip_goes_only_where_the_scale_does_its_work(bounds: tuple[float, float]) -> None:
    nodes = "[conv] c = Conv<pads = [1, 1, 1, 1]>(x, w) [clip] y = Clip(c, low, high)"
    constants = {"w": weights(4, 3, 3, 3), "low": np.float32(bounds[0]), "high": np.float32(bounds[1])}
    model = model_of(nodes, constants)
    wanted = run(model)[0]
    quantized = quantize(model, quantization_mode=QLINEAR, static=True, quantization_params=params_for(model))
    got = run(quantized)[0]
    assert np.abs(got - wanted).max() < 0.05
    assert got.min() >= bounds[0] - 0.01
    assert ("Clip" in operators(quantized)) == (bounds[0] > 0)
    # With the convolution's own scale, which reaches beyond both bounds, the Clip has to stay.
    wide = {name: value for name, value in params_for(model).items() if name != "y"}
    kept = quantize(model, quantization_mode=QLINEAR, static=True, quantization_params=wide)
    assert "Clip" in operators(kept)
    assert np.abs(run(kept)[0] - wanted).max() < 0.05


def test_params_of_calibrate_fit() -> None:
    model = residual()
    params = calibrate(model, Reader(), op_types=["Conv", "MatMul", "Add"])
    assert set(params) == {"x", "c1", "r1", "c2", "a", "r2", "y"}
    assert params["r1"][0] == params["c1"][0] == 0
    quantized = quantize(model, quantization_mode=QLINEAR, static=True, quantization_params=params)
    assert "Relu" not in operators(quantized)
    assert relative_error(run(quantized)[0], run(model)[0]) < 0.05


def test_chosen_nodes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = residual()
    assert operators(quantize(model, nodes_to_quantize=["conv1"])).count("ConvInteger") == 1
    assert operators(quantize(model, nodes_to_exclude=["conv1", "nothing"])).count("ConvInteger") == 1
    assert "no node is named 'nothing'" in caplog.text
    with pytest.raises(ModelError, match="nothing in the model can be quantized"):
        quantize(model, op_types_to_quantize=["Relu"])


def test_missing_and_wrong_parameters_are_named() -> None:
    model = residual()
    params = params_for(model)
    without = {name: value for name, value in params.items() if name not in ("c2", "a")}
    with pytest.raises(UsageError, match="needs the scale and zero point of 'c2', the output of 'conv2'"):
        quantize(model, quantization_mode=QLINEAR, static=True, quantization_params=without)
    with pytest.raises(UsageError, match="needs the scale and zero point of 'x', an input of 'conv1'"):
        quantize(model, static=True, quantization_params={"r1": params["r1"], "r2": params["r2"]})
    for wrong in ([np.uint8(3)], [np.uint8(3), np.float32(0)], [0.5, np.float32(1)], "no"):
        with pytest.raises(UsageError, match="quantization_params of 'x'"):
            quantize(model, static=True, quantization_params={**params, "x": wrong})
    with pytest.raises(UsageError, match="A tensor has one zero point"):
        quantize(
            model,
            static=True,
            input_quantization_params={"x": [np.uint8(0), np.float32(1)]},
            output_quantization_params={"x": [np.uint8(0), np.float32(2)]},
        )
    with pytest.raises(UsageError, match="QuantizationMode has no"):
        quantize(model, quantization_mode="Float")
    with pytest.raises(UsageError, match="takes a ModelProto"):
        quantize("model.onnx")


def test_unknown_tensors_are_ignored_in_the_open(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = residual()
    quantize(model, static=True, quantization_params={**params_for(model), "gone": [np.uint8(0), np.float32(1)]})
    assert "no tensor 'gone'" in caplog.text


def test_the_given_model_stays_as_it_is() -> None:
    model = residual(named=False)
    before = model.SerializeToString()
    quantize(model=model, quantization_mode=INTEGER)
    assert model.SerializeToString() == before


def test_a_gemm_is_a_matmul_and_an_add() -> None:
    constants = {"w": weights(5, 8), "b": weights(5, seed=1)}
    model = model_of("[gemm] y = Gemm<transB = 1>(x, w, b)", constants, inputs="float[2, 8] x")
    quantized = quantize(model)
    inputs = {"x": weights(2, 8, seed=2, scale=1.0)}
    assert "MatMulInteger" in operators(quantized)
    assert relative_error(run(quantized, inputs)[0], run(model, inputs)[0]) < 0.05
