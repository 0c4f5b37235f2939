"""Test against Espressif's own C runtime, compiled for this machine: files are run there, and no integer may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.backends.espdl.convert import lower_file
from edgeq.backends.espdl.interpret import run
from edgeq.backends.espdl.selftest import first_rows
from tests.backends.espdl.build import Witness, built, find_witness, inputs_of, portable, write_test_file
from tests.backends.espdl.models import MODELS

# Compiling the runtime takes minutes, once for each checkout.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def witness() -> Witness:
    return find_witness()


ROUNDINGS = ("half-up", "half-even")
REAL = ("resnet20_cifar10", "lenet_mnist", "mlperf_tiny_kws", "mlperf_tiny_vww", "mobilenet_v1_0.25_224")


def compare(model: onnx.ModelProto, count: int, rounding: str, witness: Witness, folder: Path, **scheme: Any) -> None:
    """Compare the interpreter with the C runtime on random inputs."""
    shape = [dimension.dim_value for dimension in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).normal(size=(count, *shape[1:])).astype(np.float32)
    result, family = built(folder, model, x, **scheme), portable(rounding)
    graph = lower_file(result.artifact.model, family)
    rows = first_rows(result.bench.samples, count)
    file = folder / "model.espdl"
    write_test_file(graph, family, rows[0], file)
    assert witness.passes(file, rounding)
    inputs, output = inputs_of(graph, family, rows), graph.outputs[0].tensor
    stacked = np.stack([row[graph.inputs[0].tensor.name] for row in inputs])
    answers = witness.answers(file, rounding, stacked, output.type).reshape(len(rows), *output.shape)
    for row, expected in zip(inputs, answers, strict=True):
        values = run(graph, row, family.arithmetic)[output]
        allowed = 1e-6 if output.type == "float32" else 0
        assert np.abs(values.astype(np.float64) - expected).max() <= allowed


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_gives_the_integers_of_the_c_runtime(
    name: str, rounding: str, witness: Witness, tmp_path: Path
) -> None:
    compare(MODELS[name], 16, rounding, witness, tmp_path)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_with_16_bits_gives_the_integers_of_the_c_runtime(
    name: str, rounding: str, witness: Witness, tmp_path: Path
) -> None:
    compare(MODELS[name], 16, rounding, witness, tmp_path, wide=("*",))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", REAL)
def test_real_models_give_the_integers_of_the_c_runtime(
    name: str, rounding: str, witness: Witness, shared_data: Path, tmp_path: Path
) -> None:
    compare(onnx.load(shared_data / name / "model.onnx"), 3, rounding, witness, tmp_path)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", REAL)
def test_real_models_with_16_bits_give_the_integers_of_the_c_runtime(
    name: str, rounding: str, witness: Witness, shared_data: Path, tmp_path: Path
) -> None:
    compare(onnx.load(shared_data / name / "model.onnx"), 3, rounding, witness, tmp_path, wide=("*",))


def test_a_file_for_the_other_rounding_fails_its_self_test(witness: Witness, tmp_path: Path) -> None:
    result, family = built(tmp_path, MODELS["residual"]), portable("half-even")
    graph, file = lower_file(result.artifact.model, family), tmp_path / "model.espdl"
    write_test_file(graph, family, result.sample(), file)
    assert witness.passes(file, "half-even")
    assert not witness.passes(file, "half-up")
