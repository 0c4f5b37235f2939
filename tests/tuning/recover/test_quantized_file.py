"""Test `edgeq.tuning.recover.quantized_file`: integers of every format and type are read as real values, and edited."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.scheme import Scheme
from edgeq.tuning.recover.layers import Weights, find_layers
from edgeq.tuning.recover.quantized_file import QuantizedFile
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, run, target

SCHEMES = {
    f"{form} {activation}{weight} {'channels' if per_channel else 'tensor'}": SCHEME.replace(
        format=form,
        activation_type=activation,
        activation_symmetric=activation == "int8",
        weight_type=weight,
        weight_symmetric=weight == "int8",
        per_channel=per_channel,
    )
    for form in ("QDQ", "QOperator")
    for activation, weight in (("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8"))
    for per_channel in (False, True)
}


def _net() -> Net:
    net = Net()
    net.conv("x", "grouped", 4, 8, 3, groups=2, channels=[0.2, 5] * 4)
    net.node("Relu", ["grouped_out"], "r")
    net.conv("r", "depthwise", 8, 8, 3, groups=8, bias=False)
    net.node("GlobalAveragePool", ["depthwise_out"], "p")
    net.node("Flatten", ["p"], "f")
    for name, source, inputs, turned in (("g", "f", 8, 1), ("h", "g", 6, 0)):
        shape = (6, inputs) if turned else (inputs, 6)
        net.node("Gemm", [source, net.constant(f"{name}_w", net.random.normal(size=shape)),
                          net.constant(f"{name}_b", net.random.normal(size=6))], name, transB=turned)  # fmt: skip
    net.node("MatMul", ["h", net.constant("m", net.random.normal(size=(6, 4)))], "y")
    return net


def _built(folder: Path, scheme: Scheme, net: Net | None = None) -> tuple[QuantizedFile, ir.Model, Path]:
    model = (net or _net()).model({"x": [1, 4, 6, 6]}, ["y"])
    job = job_of(model, folder, few(4, [1, 4, 6, 6]))
    state = Recoverer(job, target(), folder).state(scheme, [], folder / "q.onnx")
    assert state.artifact is not None
    return QuantizedFile.load(state.artifact.model), model, state.artifact.model


@pytest.mark.parametrize("name", SCHEMES)
def test_integers_stand_for_the_weights_and_biases(tmp_path: Path, name: str) -> None:
    file, model, _ = _built(tmp_path, SCHEMES[name])
    found = file.integer_layers(find_layers(model))
    assert [f.layer.name for f in found] == ["grouped", "depthwise", "g_Gemm", "h_Gemm", "y_MatMul"]
    for integer in found:
        rows = Weights(model).rows(integer.layer)
        step = integer.per_row(integer.params.scale)
        assert np.all(np.abs(rows - file.weight(integer) * step) <= 0.5001 * step)
        assert (integer.bias is not None) == bool(integer.layer.bias)
        if integer.bias is not None:
            wanted = Weights(model).array(integer.layer.bias)
            assert np.all(np.abs(file.bias(integer) - wanted) <= 0.5001 * integer.bias_scale)
        assert not integer.has_other_readers


@pytest.mark.parametrize("name", SCHEMES)
def test_models_run_with_the_weights_that_were_set(tmp_path: Path, name: str) -> None:
    """A model runs with the weights that were set: with zeros, the last layer gives zeros."""
    file, model, path = _built(tmp_path, SCHEMES[name])
    (last,) = [f for f in file.integer_layers(find_layers(model)) if f.layer.name == "y_MatMul"]
    file.set_weight(last, np.zeros_like(file.weight(last)))
    np.testing.assert_array_equal(file.weight(last), 0)
    file.save(path)
    x = few(1, [1, 4, 6, 6]).samples[0].inputs
    np.testing.assert_array_equal(run(path, x)[0], 0)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_biases_move_the_output(tmp_path: Path, form: str) -> None:
    net = Net()
    net.conv("x", "y_conv", 4, 4, 1)
    net.nodes[-1].output[0] = "y"
    file, model, path = _built(tmp_path, SCHEME.replace(format=form), net)
    x = few(1, [1, 4, 6, 6]).samples[0].inputs
    before = run(path, x)[0]
    (integer,) = file.integer_layers(find_layers(model))
    change = np.array([0.5, -0.5, 0.0, 0.25])
    added = file.add_to_bias(integer, change)
    np.testing.assert_allclose(added, change, atol=float(integer.bias_scale.max()))
    file.save(path)
    moved = (run(path, x)[0] - before).mean((0, 2, 3))
    low, high = file.output_range(integer)
    np.testing.assert_allclose(moved, change, atol=(high - low) / 255)


def test_ranges_of_outputs(tmp_path: Path) -> None:
    for form in ("QDQ", "QOperator"):
        (tmp_path / form).mkdir()
        file, model, _ = _built(tmp_path / form, SCHEME.replace(format=form))
        found = {f.layer.name: file.output_range(f) for f in file.integer_layers(find_layers(model))}
        assert abs(found["grouped"][0]) < 1e-6, "it carries the range of the Relu behind it"
        assert found["depthwise"][0] < -0.1
        assert all(low < high < np.inf for low, high in found.values())


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_reports_shared_weights(tmp_path: Path, form: str) -> None:
    net = Net()
    net.conv("x", "first", 4, 4, 3)
    net.conv("first_out", "second", 4, 4, 3)
    net.nodes[-1].input[1] = "first_w"
    net.conv("second_out", "third", 4, 4, 3)
    net.node("Relu", ["third_out"], "y")
    del net.weights[2]
    file, model, _ = _built(tmp_path, SCHEME.replace(format=form), net)
    found = {f.layer.name: f.has_other_readers for f in file.integer_layers(find_layers(model))}
    assert found == {"first": True, "second": True, "third": False}


def test_layers_in_float_are_none_of_its_integer_layers(tmp_path: Path) -> None:
    file, model, _ = _built(tmp_path, SCHEME.replace(exclude=("depthwise", "g_Gemm")))
    names = [f.layer.name for f in file.integer_layers(find_layers(model))]
    assert names == ["grouped", "h_Gemm", "y_MatMul"]
