"""Test pre-processing as in ONNX Runtime's documentation, for every kind of model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import quant_pre_process as theirs

from edgeq.compat.preprocess import command, quant_pre_process
from edgeq.compat.preprocess import quant_pre_process as under_its_older_name
from edgeq.compat.symbolic_shape_infer import command as shapes_command
from edgeq.errors import OutputError, UsageError
from edgeq.model.convert import from_proto
from edgeq.model.shapes import unknown_shapes
from tests.compat.models import MATRIX, batch, classifier
from tests.graphs import proto


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    dtype = np.float16 if session.get_inputs()[0].type == "tensor(float16)" else np.float32
    return session.run(None, {"x": batch(dtype=dtype)})[0]


def types(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(("kind", "opset"), MATRIX)
def test_every_kind_of_model(tmp_path: Path, kind: str, opset: int) -> None:
    source, output = classifier(tmp_path / "m.onnx", opset=opset, kind=kind), tmp_path / "out.onnx"
    quant_pre_process(source, output)
    onnx.checker.check_model(output)
    model = onnx.load(output)
    np.testing.assert_allclose(answer(output), answer(source), rtol=2e-2 if kind == "half" else 1e-5, atol=1e-5)
    assert [i.name for i in model.graph.input] == ["x"]
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    assert unknown_shapes(from_proto(model)) == ()
    assert "BatchNormalization" not in types(output)
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("skip", ["", "skip_optimization", "skip_onnx_shape", "skip_symbolic_shape"])
def test_the_same_graph_as_the_older_tool(tmp_path: Path, opset: int, skip: str) -> None:
    source = classifier(tmp_path / "m.onnx", opset=opset)
    ours, other = tmp_path / "ours.onnx", tmp_path / "theirs.onnx"
    options = {skip: True} if skip else {}
    quant_pre_process(source, ours, **options)
    theirs(str(source), str(other), **options)
    found, wanted = onnx.load(ours).graph, onnx.load(other).graph
    assert [(n.op_type, n.name, list(n.input), list(n.output)) for n in found.node] == [
        (n.op_type, n.name, list(n.input), list(n.output)) for n in wanted.node
    ]
    weights = {t.name: numpy_helper.to_array(t) for t in wanted.initializer}
    assert {t.name for t in found.initializer} == set(weights)
    for tensor in found.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])
    made = {o for node in wanted.node for o in node.output} - {o.name for o in wanted.output}
    assert {v.name for v in found.value_info} >= {v.name for v in wanted.value_info if v.name in made}


def test_documented_command_lines(tmp_path: Path) -> None:
    """The command lines of the quantization page and of the CPU example's ReadMe work."""
    source, output = classifier(tmp_path / "mobilenetv2-7.onnx"), tmp_path / "mobilenetv2-7-infer.onnx"
    assert run("--input", source, "--output", output).exit_code == 0
    assert types(output)["Conv"] == 1
    result = run("--input", source, "--output", output, "--skip_symbolic_shape", "True")
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(answer(output), answer(source), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("written", "skipped"),
    [
        (["--skip_optimization"], True),
        (["--skip_optimization", "True"], True),
        (["--skip_optimization=true"], True),
        (["--skip_optimization", "1"], True),
        (["--skip_optimization", "False"], False),
        (["--skip_optimization=false"], False),
        (["--skip_optimization", "0"], False),
        (["--skip_optimization", "--auto_merge"], True),
        (["--auto_merge", "False", "--guess_output_rank=True", "--verbose", "1", "--int_max", "1000"], False),
    ],
)
def test_booleans_mean_what_they_say(tmp_path: Path, written: list[str], skipped: bool) -> None:
    source, output = classifier(tmp_path / "m.onnx"), tmp_path / "out.onnx"
    result = run("--input", source, "--output", output, *written)
    assert result.exit_code == 0, result.output
    assert ("BatchNormalization" in types(output)) is skipped


def test_symbolic_sizes_reach_every_tensor(tmp_path: Path) -> None:
    body = """g (float[batch, 3, 4] x) => (float[] y) {
        [shape] s = Shape(x)
        [gather] n = Gather(s, first)
        [concat] target = Concat<axis = 0>(n, rest)
        [reshape] flat = Reshape(x, target)
        [matmul] y = MatMul(flat, w)
    }"""
    weights = {
        "first": np.array([0], np.int64),
        "rest": np.array([12], np.int64),
        "w": np.ones((12, 2), np.float32),
    }
    source, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(proto(body, weights), source)
    result = CliRunner().invoke(shapes_command, ["--input", str(source), "--output", str(output), "--auto_merge"])
    assert result.exit_code == 0, result.output
    assert "0 tensors of unknown shape" in result.output
    flat = next(v for v in onnx.load(output).graph.value_info if v.name == "flat")
    assert [d.dim_param or d.dim_value for d in flat.type.tensor_type.shape.dim] == ["batch", 12]
    assert run("--input", source, "--output", tmp_path / "both.onnx").exit_code == 0
    assert unknown_shapes(from_proto(onnx.load(tmp_path / "both.onnx"))) == ()


def test_external_data(tmp_path: Path) -> None:
    source = classifier(tmp_path / "m.onnx")
    one, each = tmp_path / "one" / "m.onnx", tmp_path / "each" / "m.onnx"
    common = ["--save_as_external_data", "--external_data_size_threshold", "100"]
    result = run(
        "--input", source, "--output", one, *common, "--all_tensors_to_one_file", "--external_data_location", "w.bin"
    )
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in one.parent.iterdir()) == ["m.onnx", "w.bin"]
    assert run("--input", source, "--output", each, *common).exit_code == 0
    assert len(list(each.parent.iterdir())) == 3
    # An input with external data works as well.
    assert run("--input", each, "--output", tmp_path / "again.onnx").exit_code == 0
    for path in (one, each, tmp_path / "again.onnx"):
        onnx.checker.check_model(path)
        np.testing.assert_allclose(answer(path), answer(source), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("location", ["../w.bin", "/w.bin", "a/b", "..", "m.onnx", "a\\b"])
def test_external_data_stays_beside_the_model(tmp_path: Path, location: str) -> None:
    source, output = classifier(tmp_path / "s.onnx"), tmp_path / "out" / "m.onnx"
    with pytest.raises(UsageError, match="location"):
        quant_pre_process(
            source,
            output,
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            external_data_location=location,
        )
    assert not output.parent.exists()


def test_a_model_in_memory_and_the_name_of_2022(tmp_path: Path) -> None:
    source = classifier(tmp_path / "m.onnx")
    quant_pre_process(onnx.load(source), tmp_path / "a.onnx")
    under_its_older_name(input_model_path=source, output_model_path=tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_mistakes(tmp_path: Path) -> None:
    source = classifier(tmp_path / "m.onnx")
    before = source.read_bytes()
    with pytest.raises(UsageError):
        quant_pre_process(source)
    with pytest.raises(UsageError, match="the model is given as bytes"):
        quant_pre_process(before, tmp_path / "out.onnx")  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="input"):
        quant_pre_process(source, source)
    assert source.read_bytes() == before
    result = run("--input", tmp_path / "nowhere.onnx", "--output", tmp_path / "out.onnx")
    assert result.exit_code == 3
    assert "Traceback" not in result.output
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.slow
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    """Models above 2 GB work. The nine weights of 256 MiB are zeros that use no space on the disk."""
    width, count = 8192, 9
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(count * width * width * 4)
    nodes = "".join(f"t{index + 1} = MatMul(t{index}, w{index}) " for index in range(count))
    model = proto(f"g (float[n, {width}] t0) => (float[n, {width}] t{count}) {{ {nodes} }}")
    for index in range(count):
        tensor = onnx.TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", "weights.bin"),
            ("offset", index * width * width * 4),
            ("length", width * width * 4),
        ):
            tensor.external_data.add(key=key, value=str(value))
        model.graph.initializer.append(tensor)
    source, output = tmp_path / "big.onnx", tmp_path / "out" / "big.onnx"
    source.write_bytes(model.SerializeToString())
    assert (tmp_path / "weights.bin").stat().st_size > 2**31
    quant_pre_process(source, output, skip_optimization=True)
    onnx.checker.check_model(output)
    written = onnx.load(output, load_external_data=False)
    assert unknown_shapes(from_proto(written)) == ()
    assert (output.parent / "big.onnx.data").stat().st_size > 2**31
