"""Channels go back to the float model's order: the same integers at the float model's indices."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.simulate import simulate
from edgeq.backends.systolic.to_onnx import host_reference_model, in_origin_order
from edgeq.model.convert import to_proto
from tests.backends.systolic.graphs import program_of, random_graph, run_all, signature_of
from tests.backends.systolic.test_order import chain


@pytest.mark.parametrize("seed", [-1, *range(12)])
def test_integers_are_those_of_the_array_in_the_float_models_order(seed: int) -> None:
    if seed < 0:
        builder, output = chain()
        model, samples = builder.model(output), builder.samples()
    else:
        model, samples = random_graph(seed)
    program = program_of(model, samples, ArrayConfig(dim=4))
    sorted_ones = {name: np.argsort(t.channels) for name, t in program.tensors.items() if t.channels is not None}
    assert sorted_ones or seed >= 0
    simulated = simulate(program, {"input": samples}, keep=list(program.tensors)).tensors
    names = [name for name, tensor in program.tensors.items() if tensor.dtype == "int8" and name in simulated]
    # A flattened tensor has its channels inside the rows, so it is left out.
    names = [name for name in names if name in sorted_ones or not sorted_ones or simulated[name].ndim > 2]
    tensors = run_all(to_proto(host_reference_model(in_origin_order(program), signature_of(model))), samples, names)
    for name in names:
        expected = simulated[name]
        np.testing.assert_array_equal(
            tensors[name], expected[:, sorted_ones[name]] if name in sorted_ones else expected
        )
