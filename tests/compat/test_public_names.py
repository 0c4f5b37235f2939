"""edgeq.compat provides every public name of onnxruntime.quantization or leaves it out with a reason."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization as theirs
import pytest

import edgeq.compat
from compat.networks import Reader, model_of, residual, run, weights
from edgeq.compat._names import LEFT_OUT, ONNXRUNTIME, why
from edgeq.errors import ModelError, UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(theirs.__file__).parent


def modules() -> Iterator[str]:
    """Yield the names of all modules below onnxruntime.quantization. A folder without an __init__.py counts."""
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE)
        parts = place.parent.parts if file.name == "__init__.py" else (*place.parent.parts, file.stem)
        if parts:
            yield ".".join(parts)


def is_left_out(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LEFT_OUT)


def public(module: ModuleType) -> list[str]:
    """Return the classes and functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def missing() -> list[str]:
    """Return public names of onnxruntime.quantization and its modules that edgeq.compat neither has nor leaves out."""
    exported = [name for name in vars(theirs) if not name.startswith("_") and not is_left_out(name)]
    found = [name for name in exported if not hasattr(edgeq.compat, name)]
    for name in modules():
        if is_left_out(name):
            continue
        try:
            ours = importlib.import_module(f"edgeq.compat.{name}")
        except ModuleNotFoundError:
            found.append(name)
            continue
        defined = public(importlib.import_module(f"onnxruntime.quantization.{name}"))
        found += [f"{name}.{one}" for one in defined if not hasattr(ours, one)]
    return found


def test_every_public_name_is_provided_or_left_out() -> None:
    names = missing()
    if names and not onnxruntime.__version__.startswith(f"{ONNXRUNTIME}."):
        pytest.skip(f"the table is for {ONNXRUNTIME}; onnxruntime {onnxruntime.__version__} also has {names}")
    assert not names


def test_left_out_names_exist_and_say_why() -> None:
    page = (REPOSITORY / "docs" / "migration.md").read_text("utf-8")
    known = set(modules())
    for name, reason in LEFT_OUT.items():
        if onnxruntime.__version__.startswith(f"{ONNXRUNTIME}."):
            assert name in known
        with pytest.raises(ImportError) as refused:
            importlib.import_module(f"edgeq.compat.{name}")
        assert str(refused.value) == why(name)
        assert f"| `{name}` | {reason} |" in page
    with pytest.raises(
        AttributeError, match=r"edgeq\.compat has no fusions\. .* Call edgeq\.compat\.quant_pre_process"
    ):
        edgeq.compat.fusions  # noqa: B018
    with pytest.raises(ImportError, match=r"edgeq\.compat has no operators\. "):
        from edgeq.compat import operators  # noqa: F401
    assert not hasattr(edgeq.compat, "neural_compressor")


def test_modules_are_attributes() -> None:
    """Modules are attributes in a process that has imported nothing else."""
    code = """
import edgeq.compat as q
assert q.calibrate.CalibrationDataReader and callable(q.calibrate)
assert q.quantize.QuantizationMode and callable(q.quantize)
assert q.quant_utils.QuantType is q.QuantType
assert q.registry.QLinearOpsRegistry and q.CalTableFlatBuffers is not None
assert q.execution_providers is not None and q.qdq_quantizer.QDQQuantizer is q.QDQQuantizer
from edgeq.compat.CalTableFlatBuffers.TrtTable import TrtTable
from edgeq.compat.execution_providers.qnn.quant_config import get_qnn_qdq_config
"""
    paths = f"{REPOSITORY}:{REPOSITORY / 'targets' / 'runtime'}"
    subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}, check=True)


def test_forwarded_classes_work(tmp_path: Path) -> None:
    """A script with changed imports works: it calls the older quantizer itself, with edgeq's ranges."""
    from edgeq.compat.qdq_quantizer import QDQQuantizer
    from edgeq.compat.registry import QDQRegistry

    from edgeq.compat import QuantType, create_calibrator

    onnx.save(residual(), tmp_path / "f.onnx")
    calibrator = create_calibrator(tmp_path / "f.onnx", list(QDQRegistry))
    calibrator.collect_data(Reader())
    types, ranges = (QuantType.QInt8, QuantType.QUInt8), calibrator.compute_data()
    quantizer = QDQQuantizer(residual(), False, False, *types, ranges, [], [], list(QDQRegistry), {})
    quantizer.quantize_model()
    difference = run(quantizer.model.model)[0] - run(residual())[0]
    assert np.abs(difference).max() < 0.1 * np.abs(run(residual())[0]).max()


@pytest.fixture
def product(tmp_path: Path) -> Path:
    onnx.save(
        model_of("[product] y = MatMul(x, w)", {"w": weights(64, 32)}, inputs="float[2, 64] x"), tmp_path / "f.onnx"
    )
    return tmp_path / "f.onnx"


@pytest.mark.parametrize("form", [0, 1])
def test_weights_in_four_bit_floats(product: Path, form: int) -> None:
    from edgeq.compat import matmul_bnb4_quantizer

    output = product.with_name("q.onnx")
    arguments = ["--input_model", str(product), "--output_model", str(output), "--quant_type", str(form)]
    assert matmul_bnb4_quantizer.run(arguments) == f"{output}: {('FP4', 'NF4')[form]}, blocks of 64"
    inputs = {"x": weights(2, 64, seed=1)}
    difference = run(output, inputs)[0] - run(product, inputs)[0]
    assert 0 < np.abs(difference).max() < 0.3 * np.abs(run(product, inputs)[0]).max()
    with pytest.raises(UsageError, match="exists"):
        matmul_bnb4_quantizer.run(arguments)


def test_four_bit_floats_refuse_in_one_line(product: Path) -> None:
    from edgeq.compat.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    with pytest.raises(UsageError, match="quant_type is 2"):
        MatMulBnb4Quantizer(onnx.load(product), 2, 64)
    with pytest.raises(UsageError, match="block_size is 48"):
        MatMulBnb4Quantizer(product, MatMulBnb4Quantizer.NF4, 48)
    with pytest.raises(ModelError, match="no MatMul with a constant matrix"):
        MatMulBnb4Quantizer(product, MatMulBnb4Quantizer.NF4, 64, ["product"]).process()
