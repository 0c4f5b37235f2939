"""Test the debugging functions against onnxruntime's own, and on every kind of model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, qdq_loss_debug, quantize_static
from onnxruntime.quantization import quantize_dynamic as dynamic
from PIL import Image

from edgeq.compat import qdq_loss_debug as ours
from edgeq.compat.preprocess import quant_pre_process
from edgeq.compat.run_qdq_debug import command
from edgeq.errors import DataError, UsageError
from tests.compat.models import MATRIX, SIZE, Reader, batch, classifier


class TheirReader(Reader, CalibrationDataReader): ...


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float")
    quant_pre_process(classifier(folder / "m.onnx"), folder / "p.onnx")
    return folder / "p.onnx"


def quantized(float_model: Path, form: str) -> Path:
    path = float_model.with_name(f"{form}.onnx")
    if path.exists():
        return path
    if form == "dynamic":
        dynamic(float_model, path, weight_type=QuantType.QUInt8)
        return path
    quantize_static(
        float_model,
        path,
        TheirReader(),
        quant_format=QuantFormat.QOperator if form == "QOperator" else QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        per_channel=form == "per channel",
        extra_options={"DedicatedQDQPair": form == "dedicated"},
    )
    return path


@pytest.mark.parametrize("form", ["QDQ", "per channel"])
def test_weights_are_those_of_the_older_tool(float_model: Path, form: str) -> None:
    path = quantized(float_model, form)
    found, wanted = (tool.create_weight_matching(str(float_model), str(path)) for tool in (ours, qdq_loss_debug))
    assert set(found) == set(wanted)
    for name, match in wanted.items():
        np.testing.assert_array_equal(found[name]["float"], match["float"])
        # The older tool dequantizes a bias in float64, and the runtime does it in float32.
        np.testing.assert_allclose(found[name]["dequantized"], match["dequantized"], rtol=1e-7)
    errors = ours.compute_weight_error(found)
    assert errors == pytest.approx(qdq_loss_debug.compute_weight_error(wanted), rel=1e-4)
    own = ours.compute_weight_error(found, lambda x, y: float(np.abs(x - y).max()))
    assert 0 < own["fc"] < 0.01


@pytest.mark.parametrize("form", ["QOperator", "dynamic"])
def test_weights_of_other_formats_too(float_model: Path, form: str) -> None:
    """edgeq matches weights in other formats. The older tool finds none there."""
    path = quantized(float_model, form)
    assert not qdq_loss_debug.create_weight_matching(str(float_model), str(path))
    errors = ours.compute_weight_error(ours.create_weight_matching(float_model, path))
    assert len(errors) >= 2
    assert all(error > 30 for error in errors.values())


def activations(tool: object, model: Path, folder: Path, reader: type = TheirReader) -> dict[str, list[np.ndarray]]:
    augmented = folder / f"{tool.__name__}.{model.name}"  # type: ignore[attr-defined]
    tool.modify_model_output_intermediate_tensors(str(model), str(augmented))  # type: ignore[attr-defined]
    onnx.checker.check_model(augmented)
    return tool.collect_activations(str(augmented), reader())  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("form", ["QDQ", "dedicated"])
def test_activations_are_those_of_the_older_tool(float_model: Path, tmp_path: Path, form: str) -> None:
    matches, errors = [], []
    for tool in (ours, qdq_loss_debug):
        collected = [activations(tool, m, tmp_path) for m in (quantized(float_model, form), float_model)]
        matches.append((collected, tool.create_activation_matching(*collected)))
        errors.append(tool.compute_activation_error(matches[-1][1]))
    (found, found_matches), (wanted, wanted_matches) = matches
    for one, other in zip(found, wanted, strict=True):
        assert set(one) == set(other)
        for name, arrays in other.items():
            for mine, theirs in zip(one[name], arrays, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    assert set(found_matches) >= set(wanted_matches)
    for name, match in wanted_matches.items():
        assert set(found_matches[name]) == set(match)
        assert errors[0][name] == pytest.approx(errors[1][name])


def test_the_quantized_model_alone(float_model: Path, tmp_path: Path) -> None:
    """The float model is optional, as documented. The older tool's compute_activation_error fails without it."""
    collected = activations(ours, quantized(float_model, "QDQ"), tmp_path, Reader)
    matched = ours.create_activation_matching(collected)
    assert set(matched["x"]) == {"pre_qdq", "post_qdq"}
    assert len(matched["x"]["pre_qdq"]) == 3
    errors = ours.compute_activation_error(matched)
    assert set(errors["x"]) == {"qdq_err"}
    assert 30 < errors["x"]["qdq_err"] < 70


def test_only_some_operator_types(float_model: Path, tmp_path: Path) -> None:
    augmented = tmp_path / "a.onnx"
    ours.modify_model_output_intermediate_tensors(float_model, augmented, ["Gemm"], save_as_external_data=True)
    assert set(ours.collect_activations(augmented, Reader())) == {"f", "y"}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    found = ours.collect_activations(augmented, Reader(), options, ["CPUExecutionProvider"])
    plain = onnxruntime.InferenceSession(float_model).run(None, {"x": batch()})[0]
    np.testing.assert_allclose(found["y"][0], plain.reshape(-1), rtol=1e-6)


@pytest.mark.parametrize(("kind", "opset"), MATRIX)
def test_every_kind_of_model(tmp_path: Path, kind: str, opset: int) -> None:
    source, augmented = classifier(tmp_path / "m.onnx", opset=opset, kind=kind), tmp_path / "a.onnx"
    dtype = np.float16 if kind == "half" else np.float32
    ours.modify_model_output_intermediate_tensors(source, augmented)
    onnx.checker.check_model(augmented)
    found = ours.collect_activations(augmented, Reader(2, dtype))
    assert set(found) >= {"x", "c", "n", "r", "p", "g", "f", "y"}
    session = onnxruntime.InferenceSession(source)
    for index in range(2):
        (wanted,) = session.run(None, {"x": batch(index, dtype=dtype)})
        np.testing.assert_allclose(found["y"][index], wanted.reshape(-1), rtol=2e-2 if kind == "half" else 1e-5)
        assert found["r"][index].min() == 0
        assert len(found["r"][index]) == 2 * 8 * SIZE * SIZE


def test_signal_to_noise() -> None:
    x = [np.float32([3, 4]), np.float32([0])]
    assert ours.compute_signal_to_quantization_noice_ratio(x, [np.float32([3, 3.5]), np.float32([0])]) == 20
    theirs = qdq_loss_debug.compute_signal_to_quantization_noice_ratio
    for one, other in ((x, x), (np.zeros(3), np.zeros(3)), (np.zeros(3), np.ones(3))):
        assert ours.compute_signal_to_quantization_noice_ratio(one, other) == pytest.approx(theirs(one, other))


def test_mistakes(float_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ours.compute_signal_to_quantization_noice_ratio(np.zeros(3), np.zeros(4))
    with pytest.raises(UsageError):
        ours.compute_signal_to_quantization_noice_ratio([], [])
    with pytest.raises(UsageError, match="the model is given as NoneType"):
        ours.modify_model_output_intermediate_tensors(None, tmp_path / "a.onnx")  # type: ignore[arg-type]
    ours.modify_model_output_intermediate_tensors(float_model, tmp_path / "a.onnx")
    with pytest.raises(DataError):
        ours.collect_activations(tmp_path / "a.onnx", [{"other": batch()}])
    with pytest.raises(DataError):
        ours.collect_activations(tmp_path / "a.onnx", Reader(0))


def test_documented_command_line(float_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "test_images"
    folder.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (12, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.jpg")
    arguments = ["--float_model", float_model, "--qdq_model", quantized(float_model, "QDQ")]
    result = CliRunner().invoke(command, [*map(str, arguments), "--calibrate_dataset", str(folder)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert sum(line.startswith("  ") and line.endswith("dB") for line in lines) >= 8
    wrong = CliRunner().invoke(command, [*map(str, arguments), "--calibrate_dataset", str(tmp_path / "none")])
    assert wrong.exit_code == 4
    assert "Traceback" not in wrong.output


def test_the_language_model_example(float_model: Path, tmp_path: Path) -> None:
    """The example's samples are protobufs: run_qdq_debug.py --calibrate_dataset ./test_input."""
    for index in range(2):
        case = tmp_path / "test_input" / f"test_data_set_{index}"
        case.mkdir(parents=True)
        (case / "input_0.pb").write_bytes(numpy_helper.from_array(batch(index)).SerializeToString())
    arguments = ["--float_model", float_model, "--qdq_model", quantized(float_model, "QDQ")]
    result = CliRunner().invoke(command, [*map(str, arguments), "--calibrate_dataset", str(tmp_path / "test_input")])
    assert result.exit_code == 0, result.output
    errors = [float(line.split()[1]) for line in result.output.split("Activations")[1].splitlines()[1:]]
    assert len(errors) >= 5
    # The result is better than on the images, because the model was calibrated on numbers like these.
    assert min(errors) > 25
