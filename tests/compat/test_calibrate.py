from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper
from PIL import Image

from edgeq.compat.calibrate import command
from tests.graphs import proto

SIZE = 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    weights = {
        "w": (random.normal(0, 0.02, (8, 3, 3, 3))).astype(np.float32),
        "v": (random.normal(0, 0.1, (8 * SIZE * SIZE, 4))).astype(np.float32),
        "shape": np.int64([1, -1]),
    }
    body = f"""g (float[1, 3, {SIZE}, {SIZE}] x) => (float[1, 4] y) {{
        [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)
        [relu] r = Relu(c)
        [flat] f = Reshape(r, shape)
        [matmul] y = MatMul(f, v)
    }}"""
    path = tmp_path / "model.onnx"
    onnx.save(proto(body, weights, opset=13), path)
    return path


def pixels(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 3, SIZE, SIZE)).astype(np.float32)


def pb(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(numpy_helper.from_array(array).SerializeToString())


def dataset(kind: str, folder: Path) -> Path:
    """Write one of the four forms of a data set. The RISC-V fork failed on images and on a single stacked .pb."""
    stack = pixels(4)
    if kind == "images":
        folder.mkdir()
        for index, array in enumerate(stack):
            Image.fromarray(array.transpose(1, 2, 0).astype(np.uint8)).save(folder / f"{index}.jpg")
        return folder
    if kind == "cases":
        for index, array in enumerate(stack):
            pb(folder / f"test_data_set_{index}" / "input_0.pb", array[None])
        return folder
    if kind == "case":
        pb(folder / "input_0.pb", stack[:1])
        return folder
    pb(folder / "stack.pb", stack[:, None] if kind == "stack of batches" else stack)
    return folder / "stack.pb"


def run(model: Path, data: Path, output: Path, *more: str) -> Result:
    arguments = ["--model_path", str(model), "--dataset_path", str(data), "--output_model_path", str(output)]
    return CliRunner().invoke(command, [*arguments, *more])


@pytest.mark.parametrize("kind", ["images", "cases", "case", "stack", "stack of batches"])
@pytest.mark.parametrize("preprocess", ["caffe2", "mxnet"])
def test_every_form_of_data_set_works(model: Path, tmp_path: Path, kind: str, preprocess: str) -> None:
    output = tmp_path / "out.onnx"
    result = run(model, dataset(kind, tmp_path / "d"), output, "--data_preprocess", preprocess, "--static=True")
    assert result.exit_code == 0, result.output
    dialect = onnx.load(output)
    kinds = {node.op_type for node in dialect.graph.node}
    assert {"QLinearConv", "QLinearRelu"} <= kinds
    assert dialect.ir_version <= 7
    assert {entry.domain for entry in dialect.opset_import} == {"", "com.microsoft"}
    twin = tmp_path / "out.host.onnx"
    onnx.checker.check_model(onnx.load(twin))
    session = onnxruntime.InferenceSession(twin)
    assert session.run(None, {"x": pixels(1)})[0].shape == (1, 4)
    left = {path.name for path in tmp_path.iterdir()} - {"d", "model.onnx"}
    assert left == {"out.onnx", "out.host.onnx", "out.host.program.npz"}


def test_the_size_limits_the_data_set(model: Path, tmp_path: Path) -> None:
    data, outputs = dataset("stack", tmp_path / "d"), []
    for name, size in (("one", "1"), ("all", "0")):
        outputs.append(tmp_path / name)
        result = run(model, data, outputs[-1], "--data_preprocess", "None", "--static", "yes", "--dataset_size", size)
        assert result.exit_code == 0, result.output
    assert outputs[0].read_bytes() != outputs[1].read_bytes()


@pytest.mark.parametrize("preprocess", ["caffe2", "mxnet", "caffe", "method1", "method2", "None"])
def test_scales_are_those_of_the_preprocessed_values(model: Path, tmp_path: Path, preprocess: str) -> None:
    """The input's scale is its largest magnitude over 127. This test computes each named preprocessing by itself."""
    raw = pixels(4)
    mean = np.float32([103.939, 116.779, 123.68])[:, None, None]
    bgr = raw[:, ::-1]
    caffe = (bgr - np.float32([103.94, 116.78, 123.68])[:, None, None]) * np.float32(0.017)
    means, deviations = np.float32([[0.406, 0.456, 0.485], [0.225, 0.224, 0.229]])[:, :, None, None]
    scaled = raw / np.float32(127.5) - 1
    wanted = {
        "caffe2": bgr - mean,
        "mxnet": (bgr / 255 - means) / deviations,
        "caffe": caffe,
        "method1": scaled - scaled.mean(axis=(1, 2, 3), keepdims=True),
        "method2": raw - np.float32([123.68, 116.78, 103.94])[:, None, None],
        "None": raw,
    }[preprocess]
    output = tmp_path / "out.onnx"
    arguments = ("--data_preprocess", preprocess, "--static=True", "--mode=int8")
    result = run(model, dataset("cases", tmp_path / "d"), output, *arguments)
    assert result.exit_code == 0, result.output
    made = onnx.load(output)
    scales = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    entry = next(node for node in made.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "x")
    assert np.isclose(scales[entry.input[1]].item(), np.abs(wanted).max() / 127, rtol=1e-5)


def test_refuses_models_without_a_layer_for_the_array(tmp_path: Path) -> None:
    shape = f"float[1, 3, {SIZE}, {SIZE}]"
    path = tmp_path / "sine.onnx"
    onnx.save(proto(f"g ({shape} x) => ({shape} y) {{ [sine] y = Sin(x) }}", opset=13), path)
    result = run(path, dataset("case", tmp_path / "d"), tmp_path / "o.onnx", "--data_preprocess=None", "--static=true")
    assert result.exit_code == 3
    assert "no layer of it runs on the array" in result.output
    assert not (tmp_path / "o.onnx").exists()


def test_uint8_dynamic_and_node_lists(model: Path, tmp_path: Path) -> None:
    data = dataset("cases", tmp_path / "d")
    for more in (
        ["--static=1", "--mode=uint8", "--black_nodes", "matmul"],
        ["--static=1", "--mode=uint8", "--white_nodes", "conv,relu,flat"],
    ):
        result = run(model, data, tmp_path / "out.onnx", "--data_preprocess=None", *more)
        assert result.exit_code == 0, result.output
        kinds = {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
        assert {"QLinearConv", "MatMul"} <= kinds
    result = run(model, data, tmp_path / "dynamic.onnx", "--data_preprocess=None", "--static=no", "--op_types=MatMul")
    assert result.exit_code == 0, result.output
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / "dynamic.onnx").graph.node}


def test_mistakes_are_one_line(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "nowhere", tmp_path / "out.onnx", "--data_preprocess=None", "--static=true")
    assert result.exit_code == 4
    assert "nowhere" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out.onnx").exists()
    data = dataset("case", tmp_path / "d")
    result = run(model, data, tmp_path / "o", "--data_preprocess=None", "--static=true", "--white_nodes=nobody")
    assert result.exit_code == 2
    assert "'nobody'" in result.output


@pytest.mark.parametrize(
    ("mode", "conv", "matmul"),
    [((), "UINT8", "INT8"), (("--mode=uint8",), "UINT8", "UINT8"), (("--mode=int8",), "INT8", "INT8")],
    ids=str,
)
def test_without_static_all_becomes_integer_operators(
    model: Path, tmp_path: Path, mode: tuple[str, ...], conv: str, matmul: str
) -> None:
    data = dataset("case", tmp_path / "d")
    result = run(model, data, tmp_path / "out.onnx", "--data_preprocess=None", "--static=False", *mode)
    assert result.exit_code == 0, result.output
    graph = onnx.load(tmp_path / "out.onnx").graph
    weights = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
    found = {node.op_type: weights[node.input[1]] for node in graph.node if node.op_type.endswith("Integer")}
    assert found == {"ConvInteger": conv, "MatMulInteger": matmul}


def test_a_choice_of_no_nodes_is_refused(model: Path, tmp_path: Path) -> None:
    data = dataset("case", tmp_path / "d")
    arguments = ("--data_preprocess=None", "--static=False", "--black_nodes=conv,matmul")
    result = run(model, data, tmp_path / "out.onnx", *arguments)
    assert result.exit_code == 3
    assert "nothing in it was quantized. Exclude fewer nodes" in result.output
