"""Test the documented command lines of static_quantize_runner, each against onnxruntime's own with the same options."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import static_quantize_runner as theirs

from tests.compat.models import batch, classifier

if importlib.util.find_spec("edgeq.compat.static_quantize_runner") is None:
    pytest.skip("edgeq.compat.static_quantize_runner is not in this checkout", allow_module_level=True)
run = importlib.import_module("edgeq.compat.static_quantize_runner").run


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Write a model and data next to it, as in the documentation."""
    folder = tmp_path / "resnet18-v1-7"
    folder.mkdir()
    classifier(folder / "model.onnx")
    for index in range(3):
        case = folder / f"test_data_set_{index}"
        case.mkdir()
        (case / "input_0.pb").write_bytes(numpy_helper.from_array(batch(index)).SerializeToString())
    (folder / "encoding.json").write_text(json.dumps({"c": [{"scale": 0.05, "zero_point": 12}]}))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--activation_type qint8 --weight_type qint16",
        "--activation_type qint16 --weight_type qint16 --quantize_bias",
        "--activation_type qint16 --weight_type qint8 --per_channel",
        "--tensor_quant_overrides encoding.json",
        "--quant_format qoperator",
        "--nodes_to_exclude conv gemm --calib_moving_average",
        "--nodes_to_quantize conv",
        "--dedicated_qdq_pair --disable_quantize_bias --op_types_to_exclude_output_quantization Conv MaxPool",
        "--minimum_real_range 0.01 --add_qdq_pair_to_weight",
        "--calib_tensor_range_symmetric --calibration_method entropy",
    ],
)
def test_the_same_model_as_the_older_command(work: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    monkeypatch.chdir(work)
    line = run(["-i", "model.onnx", "-o", "model_quant.onnx", *options.split()])
    assert line.startswith("model_quant.onnx")
    onnx.checker.check_model("model_quant.onnx")
    # The command no longer knows the documented --quantize_bias, and its output path needs a folder.
    arguments = ["-i", "./model.onnx", "-o", "theirs.onnx", *options.replace("--quantize_bias", "").split()]
    monkeypatch.setattr("sys.argv", ["runner", *arguments])
    theirs.main()
    ours, other = onnx.load("model_quant.onnx").graph, onnx.load("theirs.onnx").graph
    assert [(n.op_type, list(n.input), list(n.output)) for n in ours.node] == [
        (n.op_type, list(n.input), list(n.output)) for n in other.node
    ]
    values = {t.name: numpy_helper.to_array(t) for t in other.initializer}
    assert {t.name for t in ours.initializer} == set(values)
    for tensor in ours.initializer:
        found, wanted = numpy_helper.to_array(tensor), values[tensor.name]
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=1e-6)
    session = onnxruntime.InferenceSession("model_quant.onnx")
    assert session.run(None, {"x": batch()})[0].shape == (2, 4)


def test_a_relu_stays_where_a_symmetric_range_does_not_imply_it(work: Path) -> None:
    """The Relu stays. The older command drops it, and negative values pass."""
    run(["-i", str(work / "model.onnx"), "-o", str(work / "q.onnx"), "--calib_tensor_range_symmetric"])
    assert "Relu" in {node.op_type for node in onnx.load(work / "q.onnx").graph.node}
    found, wanted = (
        onnxruntime.InferenceSession(work / name).run(None, {"x": batch()})[0] for name in ("q.onnx", "model.onnx")
    )
    np.testing.assert_allclose(found, wanted, atol=0.05 * np.abs(wanted).max())


def test_an_axis_is_a_number(work: Path) -> None:
    """An axis on the command line is a number. The older command passes it on as text and fails."""
    output = work / "q.onnx"
    run(["-i", str(work / "model.onnx"), "-o", str(output), "--per_channel", "--op_per_channel_axis", "Gemm", "1"])
    scales = {t.name: list(t.dims) for t in onnx.load(output).graph.initializer if t.name.endswith("scale")}
    assert scales["fc_scale"] == [4]
