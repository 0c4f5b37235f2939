"""Test against Espressif's own C runtime, compiled for this machine: files are run there, and no integer may differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("rounding", ["half-up", "half-even"])
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_gives_the_integers_of_the_c_runtime(
    name: str, rounding: str, witness: Witness, tmp_path: Path
) -> None:
    shape = [d.dim_value for d in MODELS[name].graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).normal(size=(16, *shape[1:])).astype(np.float32)
    result, family = built(tmp_path, MODELS[name], x), portable(rounding)
    graph = lower_file(result.artifact.model, family)
    rows = first_rows(result.bench.samples, 16)
    file = tmp_path / "model.espdl"
    write_test_file(graph, family, rows[0], file)
    assert witness.passes(file, rounding)
    inputs, output = inputs_of(graph, family, rows), graph.outputs[0].tensor
    answers = witness.answers(
        file, rounding, np.stack([one[graph.inputs[0].tensor.name] for one in inputs]), output.type
    ).reshape(len(rows), *output.shape)
    for one, expected in zip(inputs, answers, strict=True):
        values = run(graph, one, family.arithmetic)[output]
        allowed = 1e-6 if output.type == "float32" else 0
        assert np.abs(values.astype(np.float64) - expected).max() <= allowed


def test_a_file_for_the_other_rounding_fails_its_self_test(witness: Witness, tmp_path: Path) -> None:
    result, family = built(tmp_path, MODELS["residual"]), portable("half-even")
    graph, file = lower_file(result.artifact.model, family), tmp_path / "model.espdl"
    write_test_file(graph, family, result.sample(), file)
    assert witness.passes(file, "half-even")
    assert not witness.passes(file, "half-up")
