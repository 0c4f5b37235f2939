"""Test the examples of ONNX Runtime's quantization documentation, old and new, with the import changed and a small
model.

Each example has to run, and its output has to pass the checker and ONNX Runtime. test_legacy.py has the options of the
older README. test_static.py and test_dynamic.py have those of the functions. Pre-processing, debugging and the commands
of the example folders have their own tests.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compat.networks import constants_of, images, operators, relative_error, residual, run
from edgeq.compat import static_quantize_runner
from edgeq.errors import ModelError, UsageError

REPOSITORY = Path(__file__).resolve().parents[2]


DYNAMIC_QDQ = """<ir_version: 8, opset_import: ["": 15, "com.microsoft": 1]>
g (float[N, 6] x) => (float[N, 3] y) {
  scale, zero = com.microsoft.ComputeQuantizationParameters (x)
  quantized = QuantizeLinear (x, scale, zero)
  a = DequantizeLinear (quantized, scale, zero)
  b = DequantizeLinear (q, qs, qz)
  y = MatMul (a, b)
}
<domain: "com.microsoft", opset_import: ["": 15]>
ComputeQuantizationParameters (cqp) => (scale, zero) {
  levels = Constant <value = float {127.0}> ()
  magnitude = Abs (cqp)
  top = ReduceMax <keepdims = 0> (magnitude)
  scale = Div (top, levels)
  offset = Constant <value = float {0.0}> ()
  zero = Cast <to = 3> (offset)
}"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working directory with model.onnx and test_data_set_N folders."""
    onnx.save(residual(), tmp_path / "model.onnx")
    for number, sample in enumerate(images()):
        folder = tmp_path / f"test_data_set_{number}"
        folder.mkdir()
        (folder / "input_0.pb").write_bytes(numpy_helper.from_array(sample["x"], "x").SerializeToString())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(path: str | Path, bar: float = 0.06) -> None:
    onnx.checker.check_model(onnx.load(path))
    assert relative_error(run(Path(path))[0], run(Path("model.onnx"))[0]) < bar


def test_dynamic_quantization(workdir: Path) -> None:
    from edgeq.compat import QuantType
    from edgeq.compat.files import quantize_dynamic

    quantize_dynamic("model.onnx", "model.quant.onnx")
    check("model.quant.onnx")
    quantize_dynamic("model.onnx", "model.quant.onnx", weight_type=QuantType.QUInt8)
    check("model.quant.onnx")
    quantize_dynamic("model.onnx", "model.quant.onnx", op_types_to_quantize=["MatMul"], per_channel=True)
    check("model.quant.onnx")


def test_dynamic_quantization_in_qdq(workdir: Path) -> None:
    """quantize_dynamic accepts quant_format, as in the documentation of 2022, but refuses QDQ."""
    from edgeq.compat import QuantFormat
    from edgeq.compat.files import quantize_dynamic

    quantize_dynamic("model.onnx", "model.quant.onnx", quant_format=QuantFormat.QOperator)
    with pytest.raises(UsageError, match="Leave quant_format out"):
        quantize_dynamic("model.onnx", "model.quant.onnx", quant_format=QuantFormat.QDQ)


def test_a_model_in_dynamic_qdq(workdir: Path) -> None:
    """A model with a function that computes scales at run time can be read and run. Rewriting it fails with the command
    to type.
    """
    from edgeq.compat.files import quantize_qat
    from edgeq.model.inspect import inspect_model

    model = onnx.parser.parse_model(DYNAMIC_QDQ)
    arrays = {"q": np.arange(-9, 9, dtype=np.int8).reshape(6, 3), "qs": np.float32(0.1), "qz": np.int8(0)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    onnx.save(model, "dynamic.onnx")
    counts = {entry.op_type: entry.count for entry in inspect_model(Path("dynamic.onnx")).operators}
    assert counts["MatMul"] == 1
    assert sum("ComputeQuantizationParameters" in name for name in counts) == 1
    with pytest.raises(ModelError, match=r"edgeq quantize FLOAT\.onnx --dynamic"):
        quantize_qat("dynamic.onnx", "model.quant.onnx")


def test_static_quantization(workdir: Path) -> None:
    from edgeq.compat.calibrate import CalibrationDataReader
    from edgeq.compat.quant_utils import QuantFormat, QuantType
    from edgeq.compat.quantize import quantize_static

    class ResNet50DataReader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
        def __init__(self) -> None:
            self.enum_data: Any = None

        def get_next(self) -> dict[str, np.ndarray] | None:
            if self.enum_data is None:
                self.enum_data = iter(images())
            return next(self.enum_data, None)

        def rewind(self) -> None:
            self.enum_data = None

    reader = ResNet50DataReader()
    for quant_format in QuantFormat:
        quantize_static(
            "model.onnx",
            "model.quant.onnx",
            reader,
            quant_format=quant_format,
            per_channel=False,
            weight_type=QuantType.QInt8,
        )
        check("model.quant.onnx")
        reader.rewind()


def test_recommended_parameters(workdir: Path) -> None:
    from edgeq.compat import QuantFormat, QuantType
    from edgeq.compat.files import quantize_static

    quantize_static(
        model_input="model.onnx",
        model_output="model_quant.onnx",
        calibration_data_reader=images(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=True,
        per_channel=False,
    )
    check("model_quant.onnx")
    assert (
        max(
            np.abs(v.astype(int)).max()
            for n, v in constants_of(Path("model_quant.onnx")).items()
            if n == "w1_quantized"
        )
        <= 64
    )


def test_configurations(workdir: Path) -> None:
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    from compat.networks import Reader
    from edgeq.compat import DynamicQuantConfig, QuantType, StaticQuantConfig, get_qdq_config, quantize

    configurations = [
        StaticQuantConfig(Reader(), per_channel=True),
        DynamicQuantConfig(weight_type=QuantType.QUInt8),
        get_qdq_config("model.onnx", Reader(), nodes_to_exclude=["conv1"], calibrate_args={"percentile": 99.9}),
        get_qnn_qdq_config("model.onnx", Reader(), activation_type=QuantType.QUInt16, weight_type=QuantType.QUInt8),
    ]
    for configuration in configurations:
        written = quantize("model.onnx", "model.quant.onnx", configuration)
        assert written is not None
        check("model.quant.onnx")
    quantize(onnx.load("model.onnx"), model_output=Path("model.quant.onnx"), quant_config=DynamicQuantConfig())
    check("model.quant.onnx")
    with pytest.raises(UsageError, match="is not a quantization configuration"):
        quantize("model.onnx", "model.quant.onnx", object())


def test_the_example_for_qualcomm_s_provider(workdir: Path) -> None:
    """The ranges are edgeq's. 16-bit activations are Q/DQ pairs of onnxruntime's own domain."""
    from edgeq.compat.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    from compat import networks as data_reader
    from edgeq.compat import QuantType, quantize

    input_model_path = "model.onnx"
    output_model_path = "model.qdq.onnx"
    my_data_reader = data_reader.Reader()
    preproc_model_path = "model.preproc.onnx"
    model_changed = qnn_preprocess_model(input_model_path, preproc_model_path)
    model_to_quantize = preproc_model_path if model_changed else input_model_path
    qnn_config = get_qnn_qdq_config(
        model_to_quantize, my_data_reader, activation_type=QuantType.QUInt16, weight_type=QuantType.QUInt8
    )
    quantize(model_to_quantize, output_model_path, qnn_config)
    check(output_model_path)


def test_names_of_modules_that_are_not_there() -> None:
    from edgeq.compat.execution_providers import qnn

    from edgeq.compat import quant_utils

    for module in (quant_utils, qnn):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing


def test_weights_of_four_bits(workdir: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig

    from edgeq.compat import quantize
    from edgeq.compat.quant_utils import QuantFormat

    config = DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=True, accuracy_level=4, quant_format=QuantFormat.QOperator
    )
    quantize("model.onnx", "model.int4.onnx", config)
    check("model.int4.onnx", bar=0.2)
    assert "MatMulNBits" in operators(Path("model.int4.onnx"))


def test_quantization_aware_training(workdir: Path) -> None:
    from edgeq.compat.files import quantize_qat, quantize_static

    quantize_static("model.onnx", "trained.onnx", images(), activation_type="QUInt8")
    quantize_qat("trained.onnx", "model.quant.onnx")
    assert "QLinearConv" in operators(Path("model.quant.onnx"))
    check("model.quant.onnx")


def test_a_table_for_tensorrt(workdir: Path) -> None:
    from compat.networks import Reader
    from edgeq.compat import create_calibrator
    from edgeq.compat.calibrators import write_calibration_table

    calibrator = create_calibrator("model.onnx", [], augmented_model_path="augmented_model.onnx")
    calibrator.set_execution_providers(["CUDAExecutionProvider"])
    calibrator.collect_data(Reader())
    write_calibration_table(calibrator.compute_data())
    assert set(json.loads(Path("calibration.json").read_text())) == {"x", "c1", "r1", "c2", "a", "r2", "y"}


def test_quantize_in_memory_2019(workdir: Path) -> None:
    from edgeq.compat.quantize import QuantizationMode, quantize

    model = onnx.load("model.onnx")
    onnx.save(quantize(model, quantization_mode=QuantizationMode.IntegerOps), "model.quant.onnx")
    check("model.quant.onnx")
    onnx.save(quantize(model, quantization_mode=QuantizationMode.IntegerOps, static=False), "model.quant.onnx")
    check("model.quant.onnx")


def test_calibrate_and_quantize_2020(workdir: Path) -> None:
    from compat.networks import Reader
    from edgeq.compat import QuantizationMode, calibrate, quantize

    params = calibrate("model.onnx", Reader())
    quantized = quantize(
        onnx.load("model.onnx"),
        quantization_mode=QuantizationMode.QLinearOps,
        force_fusions=False,
        quantization_params=params,
    )
    onnx.save(quantized, "model.quant.onnx")
    check("model.quant.onnx")


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--activation_type", "qint8", "--weight_type", "qint16"],
        ["--activation_type", "qint16", "--weight_type", "qint16", "--quantize_bias"],
        ["--activation_type", "qint16", "--weight_type", "qint8", "--per_channel"],
        ["--tensor_quant_overrides", "encoding.json"],
        ["--quant_format", "qoperator", "--nodes_to_exclude", "conv1", "add", "--disable_quantize_bias"],
        ["--calibration_method", "percentile", "--op_per_channel_axis", "MatMul", "1", "--dedicated_qdq_pair"],
    ],
    ids=" ".join,
)
def test_the_static_runner(workdir: Path, options: list[str]) -> None:
    (workdir / "encoding.json").write_text(json.dumps({"r1": [{"scale": 0.05, "zero_point": 12}]}))
    done = static_quantize_runner.run(["-i", "model.onnx", "-o", "model_quant.onnx", *options])
    assert done.startswith("model_quant.onnx: ")
    check("model_quant.onnx")
    if "encoding.json" in options:
        assert constants_of(Path("model_quant.onnx"))["r1_scale"] == np.float32(0.05)


def test_the_runner_is_a_command_that_ends_in_one_line(workdir: Path) -> None:
    (workdir / "bad.json").write_text("[]")
    command = [sys.executable, "-P", "-m", "edgeq.compat.static_quantize_runner", "-i", "model.onnx", "-o", "q.onnx"]
    paths = f"{REPOSITORY}:{REPOSITORY / 'targets' / 'runtime'}"
    done = subprocess.run(
        [*command, "--tensor_quant_overrides", "bad.json"],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == UsageError.exit_code
    assert done.stderr.startswith("edgeq: bad.json is not a JSON object")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["quantize", "calibrate", "quant_utils"])
def test_modules_have_every_public_name_of_onnxruntimes(name: str) -> None:
    theirs = importlib.import_module(f"onnxruntime.quantization.{name}")
    ours = importlib.import_module(f"edgeq.compat.{name}")
    for attribute, value in vars(theirs).items():
        if getattr(value, "__module__", None) == theirs.__name__ and not attribute.startswith("_"):
            assert getattr(ours, attribute) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        ours.nothing_of_the_kind  # noqa: B018
