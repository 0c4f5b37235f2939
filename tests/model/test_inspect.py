from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, numpy_helper

from edgeq.cli import group
from edgeq.errors import HardwareError, ModelError, UsageError
from edgeq.model.inspect import inspect_model
from edgeq.scheme import Scheme

from .build import model, node, small_cnn, write


def test_reports_the_producer_sizes_and_parameters(tmp_path: Path) -> None:
    proto = small_cnn()
    proto.producer_name, proto.producer_version = "maker", "1.2"
    path = write(tmp_path / "m.onnx", proto)
    report = inspect_model(path)
    assert report.producer == "maker 1.2"
    assert report.opsets == {"ai.onnx": 17}
    assert report.ir_version == 8
    assert report.parameters == 8 * 27 + 4 * 8 + 40 + 5
    assert report.parameter_bytes == 4 * report.parameters
    assert report.macs == 8 * 8 * 8 * 27 + 40
    assert [(o.op_type, o.count) for o in report.operators][:2] == [("Conv", 1), ("Gemm", 1)]
    assert sum(o.macs for o in report.operators) == report.macs
    assert report.dynamic == ("x[0] N",)
    assert report.bytes == path.stat().st_size
    assert report.targets == ()
    assert not report.quantized


def test_forecasts_are_of_the_prepared_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", small_cnn(opset=11))
    report = inspect_model(path, [("here", "cpu", Scheme()), ("there", "systolic", Scheme())])
    assert [t.target for t in report.targets] == ["here", "there"]
    assert report.preparation == ("opset 11 → 17", "1 BatchNormalization folded")
    assert report.targets[0].int8_mac_share == 1.0
    assert any("quantizing raises it to 17" in note for note in report.notes)
    assert "BatchNormalization" not in {n.op_type for n in report.targets[0].nodes}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]


def test_external_data_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(small_cnn(), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    report = inspect_model(path)
    assert report.files == (path, tmp_path / "w.bin")
    assert report.bytes == path.stat().st_size + (tmp_path / "w.bin").stat().st_size
    assert report.parameters == 8 * 27 + 4 * 8 + 40 + 5


def test_quantized_models_get_no_forecast(tmp_path: Path) -> None:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    proto = model(nodes, {"x": [2]}, weights={"s": np.float32(1), "z": np.uint8(0)})
    report = inspect_model(write(tmp_path / "m.onnx", proto), [("here", "cpu", Scheme())])
    assert report.quantized
    assert report.targets == ()
    assert any("quantized already" in note for note in report.notes)


def test_notes(tmp_path: Path) -> None:
    proto = model(
        [node("Gelu", ["x"], ["a"], domain="com.microsoft"), node("MatMul", ["a", "w"], ["y"])],
        {"x": [1, 2]},
        dtype=TensorProto.FLOAT16,
        domains=["com.microsoft"],
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), np.float16), "w"))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", TensorProto.FLOAT16, [2, 2]))
    notes = " ".join(inspect_model(write(tmp_path / "m.onnx", proto)).notes)
    assert "com.microsoft" in notes
    assert "16-bit" in notes
    assert "weights also listed as inputs: 1" in notes


def test_an_output_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    proto = small_cnn()
    kind = onnx.helper.make_map_type_proto(TensorProto.INT64, onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    kind = onnx.helper.make_sequence_type_proto(kind)
    zip_map = {"classlabels_int64s": list(range(5)), "domain": "ai.onnx.ml"}
    proto.graph.node.append(onnx.helper.make_node("ZipMap", [proto.graph.output[0].name], ["zipped"], **zip_map))
    proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    proto.graph.output.append(onnx.helper.make_value_info("zipped", kind))
    with pytest.raises(ModelError, match=r"'zipped' is a map.*'zipmap': False"):
        inspect_model(write(tmp_path / "m.onnx", proto))


def test_unknown_backend_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="abacus"):
        inspect_model(tmp_path / "no.onnx", [("x", "abacus", Scheme())])
    with pytest.raises(ModelError, match="does not exist"):
        inspect_model(tmp_path / "no.onnx")


class TestCommand:
    def run(self, *arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(group, ["inspect", *arguments])
        return result.exit_code, result.stdout, result.stderr

    def test_json(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.onnx", small_cnn())
        code, out, _ = self.run(str(path), "-t", "gemmini", "--json")
        assert code == 0
        content = json.loads(out)
        assert content["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["N", 3, 8, 8]}]
        assert content["outputs"][0]["shape"] is None
        (target,) = content["targets"]
        assert target["target"] == "gemmini"
        assert target["backend"] == "systolic"
        assert target["int8_mac_share"] == 1.0
        floats = [n["op_type"] for n in target["nodes"] if n["verdict"] == "float"]
        assert floats == []
        assert target["float_nodes"] == 0

    def test_human(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m[bold].onnx", small_cnn())
        code, out, _ = self.run(str(path), "-t", "nvidia-t4", "-t", "gemmini")
        assert code == 0
        for expected in (
            "m[bold].onnx",
            "float32[N, 3, 8, 8]",
            "Conv",
            "nvidia-t4 (tensorrt): about 0.3%",
            "fewer than 16",
            "gemmini (systolic): about 100.0%",
        ):
            assert expected in out

    def test_verbose_lists_every_node(self, tmp_path: Path) -> None:
        _, out, _ = self.run(str(write(tmp_path / "m.onnx", small_cnn())), "-t", "gemmini", "-v")
        assert "int8" in out
        assert "conv: runs on the array" in out

    def test_this_machine_by_default(self, tmp_path: Path) -> None:
        code, out, _ = self.run(str(write(tmp_path / "m.onnx", small_cnn())), "--json")
        assert code == 0
        assert [t["target"] for t in json.loads(out)["targets"]] == ["this-machine"]

    @pytest.mark.parametrize(
        ("content", "code"),
        [(None, 3), (b"", 3), (b"text", 3), (b"PK\x03\x04....", 3)],
        ids=["missing", "", "text", "zip"],
    )
    def test_bad_input_is_one_line(self, tmp_path: Path, content: bytes | None, code: int) -> None:
        path = tmp_path / "m.onnx"
        if content is not None:
            path.write_bytes(content)
        exit_code, out, err = self.run(str(path), "-t", "gemmini")
        assert exit_code == code
        assert out == ""
        assert err.count("\n") == 1
        assert str(path) in err

    def test_unknown_target(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.onnx", small_cnn())
        code, _, err = self.run(str(path), "-t", "gemini")
        assert code == 5
        assert "gemmini" in err


def test_open_sizes_are_assumed_and_reported_or_given(tmp_path: Path) -> None:
    path = model_file(
        tmp_path,
        """<ir_version: 8, opset_import: ["": 17]> g (float[N,3,H,W] x) => (float[N,4,H,W] y)
        { w = Constant <value = float[4,3,1,1] {1,1,1,1,1,1,1,1,1,1,1,1}> ()
        y = Conv (x, w) }""",
    )
    report = inspect_model(path)
    assert (report.parameters, report.parameter_bytes) == (12, 48), "in a Constant node"
    assert report.assumed == {"x": (1, 3, 224, 224)}
    assert report.macs == 12 * 224 * 224
    assert any("counted with x = 1,3,224,224" in note and "⟨shapes⟩" in note for note in report.notes)
    batch = write(tmp_path / "batch.onnx", model([node("Relu", ["x"], ["y"])], {"x": ["N", 4]}, outputs=("y",)))
    assert not any("counted with" in note for note in inspect_model(batch).notes), "one sample is not an assumption"
    given = inspect_model(path, shapes={"x": (2, 3, 10, 10)})
    assert given.macs == 2 * 12 * 100
    assert not any("counted with" in note for note in given.notes)
    for wrong in ({"z": (1,)}, {"x": (1, 4, 2, 2)}, {"x": (1, 3)}):
        with pytest.raises(UsageError, match=r"`shapes`"):
            inspect_model(path, shapes=wrong)


def model_file(folder: Path, text: str) -> Path:
    return write(folder / "m.onnx", onnx.parser.parse_model(text))
