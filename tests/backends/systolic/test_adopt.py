"""Test models that are already quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq import demo
from edgeq.backends.systolic.lower import quantize_weights
from edgeq.backends.systolic.program import Conv, Fc
from edgeq.backends.systolic.save import load_program
from edgeq.data.open_source import Data
from edgeq.errors import ModelError
from edgeq.jobs.quantize import quantize
from edgeq.model.prepare import prepare_model
from edgeq.quantization.adopt import adopt
from edgeq.run.session import open_session
from tests import graphs


def quantized(path: Path, prepared: Path, **options: object) -> Path:
    """Quantize the demo model with ONNX Runtime, as a user would."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    with np.load(demo.CALIBRATION) as archive:
        images = archive["image"][:50]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rows = iter([{"image": image[None]} for image in images])

        def get_next(self) -> dict | None:
            return next(self.rows, None)

    unsigned = options.pop("unsigned", False)
    kind = QuantType.QUInt8 if unsigned else QuantType.QInt8
    extra = {"ActivationSymmetric": not unsigned}
    quantize_static(prepared, path, Reader(), activation_type=kind, extra_options=extra, **options)
    return path


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(demo.MODEL, tmp_path_factory.mktemp("float")).path


def top1(model: Path) -> float:
    import onnxruntime

    with np.load(demo.VALIDATION) as archive:
        images, labels = archive["image"][:200], archive["label"][:200]
    scores = onnxruntime.InferenceSession(model).run(None, {"image": images})[0]
    return float((scores.argmax(1) == labels).mean())


@pytest.mark.slow
def test_symmetric_parameters_are_kept(float_model: Path, tmp_path: Path) -> None:
    source = quantized(tmp_path / "qdq.onnx", float_model)
    report = quantize(source, Data(demo.CALIBRATION), tmp_path / "out.onnx", target="gemmini", timed=False)
    assert any("activation scales of the quantized model are kept" in note for note in report.notes)
    assert not any("WARNING" in note for note in report.notes)
    program = load_program(tmp_path / "out.program.npz")
    model = onnx.load(source)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    steps = {n.input[0]: constants[n.input[1]] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    scales = {t.origin: t.scale for t in program.tensors.values() if t.scale is not None}
    matches = [scales[name] == pytest.approx(float(steps[name]), rel=1e-6) for name in steps if name in scales]
    assert len(matches) > 10
    assert sum(matches) >= len(matches) - 3  # sums may need a larger scale
    for step in program.steps:
        if isinstance(step, Conv | Fc):
            source_weights = constants[f"{step.sources[0]}.weight_quantized"].reshape(len(step.bias), -1)
            own = step.weights.reshape(len(step.bias), -1).astype(np.float64)
            # Each tile has the same integers in another order, or a multiple of them.
            for tile in step.tiles:
                rows = own[tile.start : tile.stop]
                source_rows = {
                    tuple(sorted(np.abs(row) / max(np.abs(row).max(), 1))) for row in source_weights.astype(float)
                }
                assert {tuple(sorted(np.abs(row) / max(np.abs(row).max(), 1))) for row in rows} <= source_rows
    assert top1(tmp_path / "out.onnx") > 0.98


@pytest.mark.slow
def test_asymmetric_parameters_are_rescaled_with_a_warning(float_model: Path, tmp_path: Path) -> None:
    source = quantized(tmp_path / "qdq.onnx", float_model, unsigned=True, per_channel=True)
    adoption = adopt(source, tmp_path / "float.onnx")
    assert top1(adoption.model) > 0.98
    assert any(note.startswith("WARNING") and "steps grow by" in note for note in adoption.notes)
    report = quantize(source, Data(demo.CALIBRATION), tmp_path / "out.onnx", target="gemmini", timed=False)
    assert any("WARNING" in note for note in report.notes)
    assert top1(tmp_path / "out.onnx") > 0.97


def test_operator_form_is_refused(float_model: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantFormat

    source = quantized(tmp_path / "operators.onnx", float_model, quant_format=QuantFormat.QOperator)
    with pytest.raises(ModelError, match="is not a Q/DQ pair"):
        quantize(source, Data(demo.CALIBRATION), tmp_path / "out.onnx", target="gemmini", timed=False)


def test_a_grid_is_found_again() -> None:
    integers = np.random.default_rng(0).integers(-90, 91, (8, 12))
    integers[0, 0] = 90
    weights = (integers * np.float32(0.0123)).astype(np.float32).astype(np.float64)
    made, _, tiles = quantize_weights(
        weights, np.zeros(8), input_scale=0.1, output_scale=0.1, dim=16, powers_of_two=False
    )
    np.testing.assert_array_equal(made, integers)
    assert tiles[0].weight_scale == pytest.approx(0.0123)


def test_pairs_around_and_inside_control_flow_go(tmp_path: Path) -> None:
    text = """g (float[2] x, bool c) => (float[2] y)
        <float s = {0.5}, int8 z = {0}, float f = {3}, int8[2] w = {2, -4}> {
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        v = DequantizeLinear (w, s, z)
        y = If (c) <then_branch = one () => (float[2] a) { a = Mul (d, f) },
                    else_branch = two () => (float[2] b) { b = Add (d, v) }>
    }"""
    onnx.save(graphs.proto(text), tmp_path / "qdq.onnx")
    adoption = adopt(tmp_path / "qdq.onnx", tmp_path / "float.onnx")
    assert [node.op_type for node in onnx.load(adoption.model).graph.node] == ["If"]
    assert {name: (span.low, span.high) for name, span in adoption.ranges.items()} == {"x": (-63.5, 63.5)}
    session = open_session(adoption.model)
    x = np.array([0.25, 7], np.float32)
    assert session.run(None, {"x": x, "c": np.array(True)})[0].tolist() == [0.75, 21]
    assert session.run(None, {"x": x, "c": np.array(False)})[0].tolist() == [1.25, 5]


def test_a_quantized_output_keeps_its_name_and_its_relu(tmp_path: Path) -> None:
    text = """g (float[3] x) => (float[3] y) <float s = {0.5}, uint8 z = {0}> {
        [sum] h = Add (x, x)
        q = QuantizeLinear (h, s, z)
        y = DequantizeLinear (q, s, z)
    }"""
    onnx.save(graphs.proto(text), tmp_path / "qdq.onnx")
    adoption = adopt(tmp_path / "qdq.onnx", tmp_path / "float.onnx")
    found = open_session(adoption.model).run(["y"], {"x": np.array([-1, 0.1, 2], np.float32)})[0]
    assert found.tolist() == pytest.approx([0, 0.2, 4])
    assert {name: found.high for name, found in adoption.ranges.items()} == {"h/floor": 127.5}
    assert "steps grow by 2.01 times" in adoption.notes[0]


def test_computed_parameters_are_refused(tmp_path: Path) -> None:
    text = """g (float[3] x) => (float[3] y) <uint8 z = {0}> {
        s = ReduceMax <keepdims = 0> (x)
        q = QuantizeLinear (x, s, z)
        [back] y = DequantizeLinear (q, s, z)
    }"""
    onnx.save(graphs.proto(text), tmp_path / "qdq.onnx")
    with pytest.raises(ModelError, match="the scale of 'back' is computed"):
        adopt(tmp_path / "qdq.onnx", tmp_path / "float.onnx")
