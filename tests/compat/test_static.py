"""Test quantize_static against onnxruntime's own with the same options."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest
from edgeq_device.engines.options import read_model_options
from onnx import TensorProto, helper

from compat.networks import (
    PartialReader,
    Reader,
    assert_same_quantization,
    constants_of,
    images,
    model_of,
    operators,
    relative_error,
    residual,
    run,
    weights,
)
from edgeq.compat import CalibraterBase, QuantFormat, QuantType
from edgeq.compat.files import quantize_static
from edgeq.errors import CalibrationError, DataError, ModelError, UsageError

pytestmark = pytest.mark.usefixtures("exact_kernels")


def both(model: Path, **options: Any) -> tuple[Path, Path]:
    """Write edgeq's file and onnxruntime's file with the same options."""
    ours, other = model.with_name("ours.onnx"), model.with_name("theirs.onnx")
    quantize_static(model, ours, Reader(images(8)), **options)
    theirs.quantize_static(model, other, Reader(images(8)), **options)
    return ours, other


@pytest.mark.parametrize(
    ("format_", "activation", "per_channel"),
    list(itertools.product(QuantFormat, (QuantType.QInt8, QuantType.QUInt8), (False, True))),
)
def test_weights_and_scales_are_those_of_onnxruntime(
    model: Path, format_: Any, activation: Any, per_channel: bool
) -> None:
    options = {"quant_format": format_, "activation_type": activation, "per_channel": per_channel}
    ours, other = both(model, **options)
    assert_same_quantization(ours, other)
    onnx.checker.check_model(onnx.load(ours))
    np.testing.assert_array_equal(run(ours)[0], run(other)[0])


@pytest.mark.parametrize(
    "extra",
    [
        {"ActivationSymmetric": True},
        {"WeightSymmetric": False},
        {"AddQDQPairToWeight": True},
        {"DedicatedQDQPair": True},
        {"ForceQuantizeNoInputCheck": True},
        {"MatMulConstBOnly": True},
        {"OpTypesToExcludeOutputQuantization": ["Conv"]},
        {"QDQOpTypePerChannelSupportToAxis": {"MatMul": 1}},
        {"CalibMaxIntermediateOutputs": 3},
        {"QuantizeBias": False},
        {"MinimumRealRange": 100.0},
        {"UseQDQContribOps": True},
        {"QDQKeepRemovableActivations": True},
        {"QDQDisableWeightAdjustForInt32Bias": True},
        {"TensorQuantOverrides": {"c2": [{"scale": np.array(0.5, "f4"), "zero_point": np.array(3, "i1")}]}},
        {"TensorQuantOverrides": {"w1": [{"quant_type": QuantType.QUInt8, "symmetric": True}]}},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_extra_options_mean_the_same(model: Path, extra: dict[str, Any]) -> None:
    ours, other = both(model, per_channel=True, extra_options=extra)
    # nothing to compare: onnxruntime's calibrator loses the data that it clears
    if "CalibMaxIntermediateOutputs" not in extra:
        assert_same_quantization(ours, other)
    assert np.isfinite(run(ours)[0]).all()


def test_moving_average_is_the_mean_over_samples(model: Path) -> None:
    ours, other = both(model, extra_options={"CalibMovingAverage": True})
    one, two = constants_of(ours), constants_of(other)
    for name in one:
        if name.endswith("_scale"):
            np.testing.assert_allclose(one[name], two[name], rtol=1e-6)


def sqnr(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / np.square(got - wanted).sum()))


@pytest.mark.parametrize("format_", QuantFormat)
@pytest.mark.parametrize("activation", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("method", ["MinMax", "Percentile", "Entropy"])
@pytest.mark.parametrize("symmetric", [None, False, True])
def test_every_method_is_as_good_as_onnxruntimes(
    model: Path, method: str, symmetric: bool | None, activation: str, format_: Any
) -> None:
    """Every method is as good as onnxruntime's. With MinMax, onnxruntime drops a Relu that a symmetric range does not
    replace.
    """
    options: dict[str, Any] = {"CalibPercentile": 99.9}
    if symmetric is not None:
        options["CalibTensorRangeSymmetric"] = symmetric
    chosen = {"calibrate_method": theirs.CalibrationMethod[method], "extra_options": options}
    ours, other = both(model, **chosen, quant_format=format_, activation_type=QuantType[activation])
    inputs = [{"x": sample["x"]} for sample in images(8)]
    wanted, got, same = (np.stack([run(file, one)[0] for one in inputs]) for file in (model, ours, other))
    assert sqnr(got, wanted) > sqnr(same, wanted) - 1
    assert sqnr(got, wanted) > 20
    one, two = constants_of(ours), constants_of(other)
    for name in {name for name in one.keys() & two.keys() if name.endswith("_scale")} - {"c1_scale", "a_scale"}:
        np.testing.assert_allclose(one[name], two[name], rtol=5e-3, err_msg=name)


def test_a_dead_relu_stays(tmp_path: Path) -> None:
    """A Relu whose output is always zero stays. Its range is empty, so onnxruntime's quantizer uses a scale of 1, in
    int8 around zero.
    """
    constants = {"w": weights(4, 3, 3, 3), "b": np.full(4, -50, np.float32), "w2": weights(4, 4, 1, 1, seed=1)}
    nodes = "[conv] c = Conv(x, w, b) [relu] r = Relu(c) [conv2] y = Conv(r, w2)"
    onnx.save(model_of(nodes, constants), tmp_path / "f.onnx")
    for format_ in QuantFormat:
        quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(), format_)
        np.testing.assert_array_equal(run(tmp_path / "q.onnx")[0], 0)


@pytest.mark.parametrize(
    "types", [("QInt16", "QInt8"), ("QUInt16", "QInt16"), ("QUInt8", "QUInt8"), ("QInt8", "QInt4")]
)
def test_other_integer_types(model: Path, types: tuple[str, str]) -> None:
    ours, other = both(model, activation_type=QuantType[types[0]], weight_type=QuantType[types[1]])
    np.testing.assert_allclose(run(ours)[0], run(other)[0], rtol=1e-5, atol=1e-6)


def test_names_of_enumerations_and_models_in_memory_do(tmp_path: Path) -> None:
    given = residual()
    before = given.SerializeToString()
    written = quantize_static(given, tmp_path / "q.onnx", Reader(), "QOperator", activation_type="QUInt8")
    assert given.SerializeToString() == before
    assert written.output == tmp_path / "q.onnx"
    assert "QLinearConv" in operators(tmp_path / "q.onnx")


def test_chosen_nodes_and_types_are_quantized(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for options in (
        {"nodes_to_quantize": ["conv1", "conv9"]},
        {"nodes_to_exclude": ["conv2", "add"]},
        {"op_types_to_quantize": ["Conv"]},
    ):
        assert_same_quantization(*both(model, **options))
    assert "no node is named 'conv9'" in caplog.text


def test_data_of_any_kind_is_taken(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", np.concatenate([sample["x"] for sample in images()]))
    quantize_static(model, tmp_path / "reader.onnx", Reader())
    wanted = (tmp_path / "reader.onnx").read_bytes()
    for number, data in enumerate((images(), tmp_path / "samples.npy", PartialReader())):
        options = {"CalibStridedMinMax": 2} if isinstance(data, PartialReader) else None
        quantize_static(model, tmp_path / f"{number}.onnx", data, extra_options=options)
        assert (tmp_path / f"{number}.onnx").read_bytes() == wanted


def test_samples_of_different_shapes(tmp_path: Path) -> None:
    """Samples may differ in shape. onnxruntime's Percentile and Entropy fail on them."""
    net = model_of("[matmul] y = MatMul(x, m)", {"m": weights(4, 5)}, inputs="float[?, 4] x")
    onnx.save(net, tmp_path / "f.onnx")
    samples = [{"x": weights(rows, 4, seed=rows)} for rows in (1, 3, 2)]
    for method in ("MinMax", "Percentile", "Entropy"):
        quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(samples), calibrate_method=method)
        assert relative_error(run(tmp_path / "q.onnx", samples[1])[0], run(tmp_path / "f.onnx", samples[1])[0]) < 0.1


def test_ranges_are_kept_and_read_in_a_cache(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "ranges.json"
    quantize_static(model, tmp_path / "1.onnx", Reader(), calibration_cache_path=cache)
    quantize_static(model, tmp_path / "2.onnx", None, calibration_cache_path=cache)
    theirs.quantize_static(model, tmp_path / "3.onnx", None, calibration_cache_path=cache)
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()
    assert_same_quantization(tmp_path / "1.onnx", tmp_path / "3.onnx")
    with pytest.raises(CalibrationError, match="made with MinMax"):
        quantize_static(model, tmp_path / "4.onnx", None, calibration_cache_path=cache, calibrate_method="Entropy")
    cache.write_text("{}")
    with pytest.raises(CalibrationError, match="not a calibration cache"):
        quantize_static(model, tmp_path / "4.onnx", None, calibration_cache_path=cache)


def test_an_onnxruntime_cache_is_read(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "ranges.json"
    theirs.quantize_static(model, tmp_path / "1.onnx", Reader(), calibration_cache_path=cache)
    quantize_static(model, tmp_path / "2.onnx", None, calibration_cache_path=cache)
    assert_same_quantization(tmp_path / "1.onnx", tmp_path / "2.onnx")


def test_a_relu_stays_where_others_read_its_input(tmp_path: Path) -> None:
    """A Relu stays if others read its input. onnxruntime's QOperator drops it, so the integers that both share are not
    clamped.
    """
    nodes = """
        [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)
        [relu] r = Relu(c)
        [conv2] d = Conv<pads = [1, 1, 1, 1]>(r, w2)
        [add] y = Add(d, c)
    """
    model = model_of(nodes, {"w": weights(4, 3, 3, 3), "w2": weights(4, 4, 3, 3, seed=1)})
    onnx.save(model, tmp_path / "f.onnx")
    ours, other = both(tmp_path / "f.onnx", quant_format=QuantFormat.QOperator, activation_type=QuantType.QUInt8)
    wanted = run(tmp_path / "f.onnx")[0]
    assert relative_error(run(ours)[0], wanted) < 0.05
    assert relative_error(run(other)[0], wanted) > 0.2, "onnxruntime does it right now: this guard can go"


def test_a_clip_away_from_zero_stays(tmp_path: Path) -> None:
    nodes = "[conv] c = Conv<pads = [1, 1, 1, 1]>(x, w) [clip] y = Clip(c, low, high)"
    constants = {"w": weights(4, 3, 3, 3), "low": np.float32(0.5), "high": np.float32(2)}
    onnx.save(model_of(nodes, constants), tmp_path / "f.onnx")
    for format_ in QuantFormat:
        quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(), format_, activation_type=QuantType.QUInt8)
        assert run(tmp_path / "q.onnx")[0].min() > 0.49


@pytest.mark.parametrize("format_", QuantFormat)
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 1.0), (1.0, 2.0), (-0.5, 3.0)])
def test_factors_of_a_gemm_are_multiplied_in(tmp_path: Path, format_: Any, alpha: float, beta: float) -> None:
    """The factors of a Gemm become part of its constants. onnxruntime applies beta twice, and scales a QGemm's bias
    without alpha.
    """
    constants = {"w": weights(5, 8), "b": weights(5, seed=1)}
    nodes = f"[gemm] y = Gemm<alpha = {alpha}, beta = {beta}, transB = 1>(x, w, b)"
    onnx.save(model_of(nodes, constants, inputs="float[4, 8] x"), tmp_path / "f.onnx")
    samples = [{"x": weights(4, 8, seed=seed, scale=1.0)} for seed in range(2, 10)]
    quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(samples), format_)
    wanted = run(tmp_path / "f.onnx", samples[0])[0]
    assert relative_error(run(tmp_path / "q.onnx", samples[0])[0], wanted) < 0.05


@pytest.mark.parametrize("format_", QuantFormat)
def test_a_gemm_of_two_computed_matrices_keeps_its_factors(tmp_path: Path, format_: Any) -> None:
    nodes = "[gemm] g = Gemm<alpha = 0.5, beta = 2.0>(x, x, b) [matmul] y = MatMul(g, w)"
    constants = {"w": weights(8, 5), "b": weights(8, seed=1)}
    onnx.save(model_of(nodes, constants, inputs="float[8, 8] x"), tmp_path / "f.onnx")
    samples = [{"x": weights(8, 8, seed=seed, scale=1.0)} for seed in range(2, 10)]
    quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(samples), format_)
    wanted = run(tmp_path / "f.onnx", samples[0])[0]
    assert relative_error(run(tmp_path / "q.onnx", samples[0])[0], wanted) < 0.05


@pytest.mark.parametrize("shape", [(), (1,), (1, 5)])
def test_a_bias_of_another_shape_is_quantized_per_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    constants = {"w": weights(8, 5), "b": weights(*shape)}
    onnx.save(model_of("[gemm] y = Gemm(x, w, b)", constants, inputs="float[4, 8] x"), tmp_path / "f.onnx")
    samples = [{"x": weights(4, 8, seed=seed, scale=1.0)} for seed in range(2, 10)]
    quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(samples), per_channel=True)
    wanted = run(tmp_path / "f.onnx", samples[0])[0]
    assert relative_error(run(tmp_path / "q.onnx", samples[0])[0], wanted) < 0.05


@pytest.mark.parametrize("shape", [(4, 5), (4, 1)])
def test_a_bias_that_differs_from_row_to_row_is_refused_per_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    constants = {"w": weights(8, 5), "b": weights(*shape)}
    onnx.save(model_of("[gemm] y = Gemm(x, w, b)", constants, inputs="float[4, 8] x"), tmp_path / "f.onnx")
    samples = [{"x": weights(4, 8)}]
    with pytest.raises(ModelError, match="refuses it"):
        quantize_static(tmp_path / "f.onnx", tmp_path / "q.onnx", Reader(samples), per_channel=True)


class Lengthless(Reader, theirs.CalibrationDataReader):
    """Inherit the length and `set_range` of onnxruntime's base class, which raise errors."""


class RangesOfMyOwn(CalibraterBase):
    """Calibrate as a user's class of 2021 does: augment the graph, open the session, return pairs."""

    def augment_graph(self) -> None:
        self.names = sorted(self.select_tensors_to_calibrate(self.model)[0])
        known = {o.name for o in self.model.graph.output}
        for name in self.names:
            if name not in known:
                self.model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        onnx.save(self.get_augment_model(), self.augmented_model_path)

    def collect_data(self, data_reader: Any) -> None:
        self.ranges: dict[str, tuple[float, float]] = {}
        names = [o.name for o in self.infer_session.get_outputs()]
        while (inputs := data_reader.get_next()) is not None:
            found = dict(zip(names, self.infer_session.run(None, inputs), strict=True)) | inputs
            for name in self.names:
                low, high = self.ranges.get(name, (0.0, 0.0))
                values = found[name]
                self.ranges[name] = (min(low, float(values.min())), max(high, float(values.max())))

    def compute_range(self) -> dict[str, tuple[float, float]]:
        return self.ranges


def test_a_users_calibrator_is_taken(model: Path, tmp_path: Path) -> None:
    quantize_static(model, tmp_path / "minmax.onnx", Reader())
    quantize_static(model, tmp_path / "mine.onnx", Reader(), calibrate_method=RangesOfMyOwn)
    assert_same_quantization(tmp_path / "minmax.onnx", tmp_path / "mine.onnx")
    ready = RangesOfMyOwn(str(model), [], augmented_model_path=str(tmp_path / "augmented.onnx"))
    ready.augment_graph()
    ready.set_execution_providers(["CPUExecutionProvider"])
    quantize_static(model, tmp_path / "mine2.onnx", Reader(), calibrate_method=ready)
    assert_same_quantization(tmp_path / "minmax.onnx", tmp_path / "mine2.onnx")


def test_refuses_unsupported_static_requests_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "q.onnx"
    output.write_text("what was there")
    with pytest.raises(UsageError, match="SmoothQuant"):
        quantize_static(model, output, Reader(), extra_options={"SmoothQuant": True})
    with pytest.raises(UsageError, match="uint8 weights"):
        quantize_static(model, output, Reader(), activation_type="QInt8", weight_type="QUInt8")
    with pytest.raises(UsageError, match="FLOAT8"):
        quantize_static(model, output, Reader(), activation_type="QFLOAT8E4M3FN", weight_type="QFLOAT8E4M3FN")
    with pytest.raises(UsageError, match="Distribution"):
        quantize_static(model, output, Reader(), calibrate_method="Distribution")
    with pytest.raises(UsageError, match="QuantFormat has no 'Nonsense'"):
        quantize_static(model, output, Reader(), "Nonsense")
    with pytest.raises(UsageError, match="neither a calibration_data_reader nor"):
        quantize_static(model, output)
    with pytest.raises(DataError, match="no samples"):
        quantize_static(model, output, Reader([]))
    for stride in (3, "3"):
        with pytest.raises(UsageError, match=r"CalibStridedMinMax is '?3"):
            quantize_static(model, output, PartialReader(), extra_options={"CalibStridedMinMax": stride})
    with pytest.raises(UsageError, match="CalibStridedMinMax is 2, but Lengthless has no length or no set_range"):
        quantize_static(model, output, Lengthless(), extra_options={"CalibStridedMinMax": 2})
    for percentile in (0, "high"):
        with pytest.raises(UsageError, match=r"ercentile is .*(0|high)"):
            quantize_static(
                model, output, Reader(), calibrate_method="Percentile", extra_options={"CalibPercentile": percentile}
            )
    with pytest.raises(UsageError, match="extra_options are given as str"):
        quantize_static(model, output, Reader(), extra_options="ActivationSymmetric")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the model is given as bytes"):
        quantize_static(model.read_bytes(), output, Reader())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the output is given as NoneType"):
        quantize_static(model, None, Reader())  # type: ignore[arg-type]
    quantize_static(model, tmp_path / "once.onnx", Reader())
    with pytest.raises(ModelError, match="edgeq retarget"):
        quantize_static(tmp_path / "once.onnx", output, Reader())
    assert output.read_text() == "what was there"


def test_one_name_is_a_list_of_one(model: Path, tmp_path: Path) -> None:
    node = next(node.name for node in onnx.load(model).graph.node if node.op_type == "Conv")
    written = {}
    for number, given in enumerate((node, [node])):
        quantize_static(model, tmp_path / f"{number}.onnx", Reader(), nodes_to_exclude=given)
        quantize_static(model, tmp_path / f"{number}n.onnx", Reader(), nodes_to_quantize=given)
        quantize_static(
            model, tmp_path / f"{number}t.onnx", Reader(), op_types_to_quantize="Conv" if number else ["Conv"]
        )
        written[number] = [(tmp_path / f"{number}{kind}.onnx").read_bytes() for kind in ("", "n", "t")]
    assert written[0] == written[1]
    assert len(set(written[0])) == 3


def test_unknown_options_are_named(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        quantize_static(model, tmp_path / "q.onnx", Reader(), extra_options={"ActivationSymetric": True})
    assert "did you mean ActivationSymmetric?" in caplog.text


def test_reports_the_session_options_that_the_model_needs(model: Path, tmp_path: Path) -> None:
    """The option that a float Conv between integers needs is reported, because ONNX Runtime would quantize its weights
    at load. The file contains the option for edgeq's own commands.
    """
    written = quantize_static(model, tmp_path / "q.onnx", Reader(), nodes_to_exclude=["conv2"])
    assert written.session_options == {"optimization.disable_specified_optimizers": "WeightBiasQuantization"}
    assert read_model_options(tmp_path / "q.onnx", "q") == written.session_options
    assert any("stay in float" in note for note in written.notes)


def test_a_relu_stays_where_its_scale_is_the_users(model: Path, tmp_path: Path) -> None:
    """If the user's range reaches below zero, the Relu stays, because it has to clamp again."""
    overrides = {"r1": [{"scale": np.array(0.05, "f4"), "zero_point": np.array(12, "u1")}]}
    options: dict[str, Any] = {"activation_type": "QUInt8", "extra_options": {"TensorQuantOverrides": overrides}}
    for format_ in QuantFormat:
        quantize_static(model, tmp_path / "q.onnx", Reader(), format_, **options)
        assert constants_of(tmp_path / "q.onnx")["r1_scale"] == np.float32(0.05)
        assert relative_error(run(tmp_path / "q.onnx")[0], run(model)[0]) < 0.06
