"""Weights in blocks run as in onnxruntime's documentation and lose less than onnxruntime's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.compat import matmul_4bits_quantizer, matmul_nbits_quantizer, quantize
from edgeq.errors import ModelError, RuntimeUnavailableError, UsageError
from edgeq.model.load import read_model
from edgeq.quantization.block_products import block_products, read_blocks
from edgeq.run.session import open_session
from tests.graphs import proto

WORDS = np.random.default_rng(1).integers(0, 40, (2, 8))
NET = """g (int64[N, 8] x) => (float[N, 8, 48] y) {
    [table] e = Gather (t, x)
    [first] a = MatMul (e, w)
    [bend] h = Tanh (a)
    [last] y = MatMul (h, v)
}"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a table and two products to the working directory."""
    monkeypatch.chdir(tmp_path)
    made, random = proto(NET, opset=21), np.random.default_rng(0)
    for name, shape in {"t": (40, 128), "w": (128, 256), "v": (256, 48)}.items():
        values = (random.standard_t(4, size=shape) / 16).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(made, "model.onnx")
    return Path("model.onnx")


def answer(path: str | Path) -> np.ndarray[Any, Any]:
    (found,) = open_session(Path(path)).run(None, {"x": WORDS})
    return np.asarray(found)


def noise(path: str | Path) -> float:
    """Return the noise of the outputs over their power."""
    exact = answer("model.onnx")
    return float(np.square(answer(path) - exact).sum() / np.square(exact).sum())


def operators(path: str | Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def products(path: str | Path) -> list[dict[str, Any]]:
    """Return the attributes of the products in blocks."""
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"]
    return [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]


def test_the_example_of_the_documentation_runs_as_written(model: Path) -> None:
    from edgeq.compat import matmul_4bits_quantizer, quant_utils

    model_fp32_path = "model.onnx"
    model_int4_path = "int4.onnx"
    quant_config = matmul_4bits_quantizer.DefaultWeightOnlyQuantConfig(
        block_size=128,
        is_symmetric=True,
        accuracy_level=4,
        quant_format=quant_utils.QuantFormat.QOperator,
        op_types_to_quantize=("MatMul", "Gather"),
        quant_axes=(("MatMul", 0), ("Gather", 1)),
    )
    loaded = quant_utils.load_model_with_shape_infer(Path(model_fp32_path))
    quant = matmul_4bits_quantizer.MatMul4BitsQuantizer(
        loaded, nodes_to_exclude=None, nodes_to_include=None, algo_config=quant_config
    )
    quant.process()
    quant.model.save_model_to_file(model_int4_path, True)
    assert operators("int4.onnx") == ["GatherBlockQuantized", "MatMulNBits", "Tanh", "MatMulNBits"]
    assert [(p["accuracy_level"], p["block_size"], p["bits"]) for p in products("int4.onnx")] == [(4, 128, 4)] * 2
    assert noise("int4.onnx") < 0.1


def weight_errors(path: str | Path) -> list[float]:
    """Return the squared errors of the weights of the products in blocks."""
    exact = [np.asarray(numpy_helper.to_array(t)) for t in onnx.load("model.onnx").graph.initializer if t.name != "t"]
    held = [read_blocks(node).matrix() for node in block_products(read_model(Path(path))).values()]
    return [float(np.square(one - other).sum()) for one, other in zip(exact, held, strict=True)]


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (4, True), (8, False), (8, True)])
def test_the_same_file_loses_less_than_onnxruntime_s(model: Path, bits: int, symmetric: bool) -> None:
    from onnxruntime.quantization import matmul_nbits_quantizer as theirs

    for package, name in ((theirs, "theirs.onnx"), (matmul_nbits_quantizer, "ours.onnx")):
        config = package.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=symmetric, bits=bits)
        quant = package.MatMulNBitsQuantizer(onnx.load(model), bits=bits, algo_config=config)
        quant.process()
        quant.model.save_model_to_file(name, False)
    assert products("ours.onnx") == products("theirs.onnx")
    assert operators("ours.onnx") == operators("theirs.onnx")
    assert Path("ours.onnx").stat().st_size <= 1.02 * Path("theirs.onnx").stat().st_size
    for ours, other in zip(weight_errors("ours.onnx"), weight_errors("theirs.onnx"), strict=True):
        assert ours < other


def test_arguments_without_a_configuration(model: Path) -> None:
    quant = matmul_4bits_quantizer.MatMul4BitsQuantizer(str(model), 64, True, nodes_to_exclude=["last"])
    quant.process()
    onnx.save(quant.model.model, "some.onnx")
    assert operators("some.onnx") == ["Gather", "MatMulNBits", "Tanh", "MatMul"]
    (only,) = products("some.onnx")
    assert (only["bits"], only["block_size"]) == (4, 64)
    assert "accuracy_level" not in only


@pytest.mark.parametrize("given", [{"quant_format": "QDQ"}, {"bits": 2}])
def test_leaves_other_forms_to_onnxruntime(model: Path, given: dict[str, Any]) -> None:
    quant = matmul_nbits_quantizer.MatMulNBitsQuantizer(onnx.load(model), block_size=32, **given)
    quant.process()
    made = {node.op_type for node in quant.model.model.graph.node}
    assert made & {"DequantizeLinear", "MatMulNBits"}


def test_float16_stays_float16(model: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(onnx.load(model))
    quant = matmul_nbits_quantizer.MatMulNBitsQuantizer(half, block_size=32)
    quant.process()
    types = {t.data_type for t in quant.model.model.graph.initializer if t.name.endswith("_scales")}
    assert types == {onnx.TensorProto.FLOAT16}


def test_the_function_takes_the_configuration(model: Path) -> None:
    quantize(model, "int4.onnx", matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig(block_size=32))
    assert operators("int4.onnx").count("MatMulNBits") == 2
    assert noise("int4.onnx") < 0.1


def test_another_algorithm_is_onnxruntime_s(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = matmul_nbits_quantizer.HQQWeightOnlyQuantConfig(block_size=32)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeUnavailableError, match="the algorithm HQQ needs torch"):
        quantize(model, "hqq.onnx", config)


@pytest.mark.parametrize("algorithm", ["RTN", "KQuant"])
def test_algorithms_that_fit_blocks_are_edgeq_s(model: Path, algorithm: str) -> None:
    """edgeq's own algorithms fit the blocks. onnxruntime's fail on a matrix with as many rows as a block has."""
    quantize(model, "fit.onnx", getattr(matmul_nbits_quantizer, f"{algorithm}WeightOnlyQuantConfig")())
    assert [(p["bits"], p["block_size"]) for p in products("fit.onnx")] == [(4, 128)] * 2
    assert noise("fit.onnx") < 0.1


def command(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["matmul_nbits_quantizer", *line.split()])
    try:
        matmul_nbits_quantizer.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--block_size 64 --symmetric False --accuracy_level 4 --bits 8",
        "--quant_method k_quant --nodes_to_exclude first",
        "--op_types_to_quantize MatMul Gather --quant_axes MatMul:0 Gather:1 -v",
        "--quant_format QDQ --symmetric",
    ],
)
def test_the_command(
    model: Path, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"--input_model model.onnx --output_model q.onnx {more}", monkeypatch) == 0
    assert capsys.readouterr().out.startswith("q.onnx: ")
    assert noise("q.onnx") < 0.2
    assert command(f"--input_model model.onnx --output_model q.onnx {more}", monkeypatch) == 2
    assert "q.onnx exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("--quant_method gptq", "edgeq quantize model.onnx --weight-only 4 --recover weight-rounding"),
        ("--bits 3", "bits"),
        ("--block_size 24", "block"),
        ("--symmetric maybe", "neither True nor False"),
        ("--quant_axes MatMul", "is not OP_TYPE:AXIS"),
        ("--input_model absent.onnx", "absent.onnx"),
    ],
)
def test_refuses_wrong_options_in_one_line(
    model: Path, more: str, refused: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"--input_model model.onnx --output_model q.onnx {more}", monkeypatch) in (2, 3)
    printed = capsys.readouterr().err
    assert refused in printed
    assert printed.count("\n") == 1
    assert not Path("q.onnx").exists()


def test_a_model_without_a_product_is_refused(tmp_path: Path) -> None:
    onnx.save(proto("g (float[1, 4] x) => (float[1, 4] y) { y = Relu (x) }"), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="nothing in it was quantized"):
        quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig())


def test_a_model_whose_products_have_no_matrix_is_named(tmp_path: Path) -> None:
    path = tmp_path / "both.onnx"
    onnx.save(proto("g (float[2, 4] a, float[4, 2] b) => (float[2, 2] y) { y = MatMul (a, b) }"), path)
    with pytest.raises(ModelError, match=f"{re.escape(str(path))}: it has no product with a constant matrix"):
        quantize(path, tmp_path / "q.onnx", matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig())


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = matmul_nbits_quantizer.nothing
    with pytest.raises(UsageError, match="QuantFormat has no 'Other'"):
        matmul_nbits_quantizer.MatMulNBitsQuantizer(onnx.ModelProto(), quant_format="Other")
    for size in (7, 8, "32"):
        with pytest.raises(UsageError, match=f"block_size is {size!r}. Give a power of two, 16 or more"):
            matmul_nbits_quantizer.MatMulNBitsQuantizer(onnx.ModelProto(), block_size=size)  # type: ignore[arg-type]
