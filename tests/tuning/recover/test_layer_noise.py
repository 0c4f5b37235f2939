"""Compare `edgeq.tuning.recover.layer_noise` with one model for each layer that quantizes only this layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from edgeq.backends.base import Artifact
from edgeq.model.convert import from_proto, to_proto
from edgeq.tuning.float_layers import RankedLayer
from edgeq.tuning.recover.layer_noise import ColumnNoise, rank_layers
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.nets import SCHEME, FewSamples, Net, few, job_of, run, target, two_gates, uneven

pytestmark = pytest.mark.usefixtures("exact_kernels")

SHAPE = [1, 3, 12, 12]
_PROBES = 24


def _chain() -> ir.Model:
    net = Net()
    x = net.conv("x", "first", 3, 8, channels=uneven(8) / 4)
    x = net.conv(net.node("Relu", [x], "first_r"), "second", 8, 8, 3, groups=2, bias=False)
    left = net.node("Relu", [net.conv(net.node("Relu", [x], "second_r"), "third", 8, 8, 1)], "third_r")
    net.conv(net.node("Add", [left, "second_r"], "sum"), "last", 8, 4, 1)
    return net.model({"x": SHAPE}, ["last_out"])


def _ranked(folder: Path, model: ir.Model, samples: FewSamples, form: str) -> tuple[dict[str, RankedLayer], Artifact]:
    job = job_of(model, folder, samples)
    state = Recoverer(job, target(), folder).state(SCHEME.replace(format=form), [], folder / "q.onnx")
    assert state.artifact is not None
    # With many directions, the estimate's spread is small.
    ranked = rank_layers(job.prepared, state.artifact, samples, count=len(samples), probes=_PROBES)
    return {r.name: r for r in ranked}, state.artifact


def _one_layer(model: ir.Model, quantized: onnx.ModelProto, unit: RankedLayer) -> ir.Model:
    """Return the float model with one unit's weights and outputs rounded as in the QDQ model."""
    constants = {t.name: t for t in quantized.graph.initializer}
    held = {name: numpy_helper.to_array(t) for name, t in constants.items()}
    nodes = {node.name: node for node in quantized.graph.node}
    dequantizers = {n.output[0]: n for n in quantized.graph.node if n.op_type == "DequantizeLinear"}
    made = to_proto(model)
    tensors = {value.name for node in model.graph if node.name in unit.nodes for value in node.outputs}
    for layer in find_layers(model):
        if layer.name in unit.nodes:
            for place, name in ((1, layer.weight), (2, layer.bias)):
                if not name:
                    continue
                integers, scale, *zero = dequantizers[nodes[layer.name].input[place]].input
                shape = (-1, *[1] * (held[integers].ndim - 1)) if held[scale].size > 1 else ()
                value = (held[integers].astype(np.float64) - (held[zero[0]].reshape(shape) if zero else 0)) * held[
                    scale
                ].reshape(shape)
                tensor = next(t for t in made.graph.initializer if t.name == name)
                tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))
    for node in quantized.graph.node:
        if node.op_type == "QuantizeLinear":
            tensor = node.input[0].removesuffix("_QuantizeLinear_Input")
            if tensor in tensors:
                _round(made.graph, tensor, [constants[name] for name in node.input[1:3]])
    return from_proto(made)


def _round(graph: onnx.GraphProto, tensor: str, how: list[onnx.TensorProto]) -> None:
    place = next(i for i, node in enumerate(graph.node) if tensor in node.output)
    graph.node[place].output[0] = f"{tensor}/exact"
    names = [t.name for t in how]
    graph.initializer.extend(t for t in how if t.name not in {i.name for i in graph.initializer})
    graph.node.insert(place + 1, helper.make_node("QuantizeLinear", [f"{tensor}/exact", *names], [f"{tensor}/q"]))
    graph.node.insert(place + 2, helper.make_node("DequantizeLinear", [f"{tensor}/q", *names], [tensor]))


def _noise(model: ir.Model, other: ir.Model, samples: FewSamples) -> float:
    pairs = [(run(model, s.inputs)[0], run(other, s.inputs, optimization="none")[0]) for s in samples]
    # The last axis has 12 columns and there are 48 rows, too few to judge each column.
    return sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((a**2).sum()) for a, _ in pairs)


def test_noise_is_that_of_quantizing_one_layer_alone(tmp_path: Path) -> None:
    """A layer's noise is that of quantizing only this layer, to about 1 dB."""
    model, samples = _chain(), few(12, SHAPE)
    ranked, artifact = _ranked(tmp_path, model, samples, "QDQ")
    quantized = onnx.load(artifact.model)
    assert set(ranked) == {"first", "second", "third", "sum_Add", "last"}
    for found in ranked.values():
        alone = _noise(model, _one_layer(model, quantized, found), samples)
        assert found.noise == pytest.approx(alone, rel=0.25)
    noises = [found.noise for found in ranked.values()]
    assert noises == sorted(noises, reverse=True)


def test_little_memory_takes_several_passes(tmp_path: Path) -> None:
    """With little memory, layers run one by one, and their noise is the same."""
    model, samples = two_gates(uneven), few(3, SHAPE)
    ranked, artifact = _ranked(tmp_path, model, samples, "QDQ")
    for found in rank_layers(
        job_of(model, tmp_path, samples).prepared, artifact, samples, count=3, memory=1, probes=_PROBES
    ):
        assert found.noise == pytest.approx(ranked[found.name].noise, rel=1e-4)


def test_units_of_several_tensors_come_close(tmp_path: Path) -> None:
    """The noise of a unit with several tensors is about right.

    The errors of its tensors count as independent, and the effect of the first on the second's rounding is left out.
    """
    model, samples = two_gates(uneven), few(3, SHAPE)
    ranked, artifact = _ranked(tmp_path, model, samples, "QDQ")
    quantized = onnx.load(artifact.model)
    for found in ranked.values():
        alone = _noise(model, _one_layer(model, quantized, found), samples)
        assert 10 * abs(np.log10(found.noise / alone)) < 2.0


@pytest.mark.usefixtures("only_exact_kernels")
def test_formats_agree(tmp_path: Path) -> None:
    model, samples = _chain(), few(3, SHAPE)
    found = {}
    for form in ("QDQ", "QOperator"):
        (tmp_path / form).mkdir()
        found[form], _ = _ranked(tmp_path / form, model, samples, form)
    assert set(found["QDQ"]) == set(found["QOperator"])
    for name in ("first", "second", "third", "last"):
        assert found["QOperator"][name].noise == pytest.approx(found["QDQ"][name].noise, rel=0.25)


def test_a_spoiled_layer_comes_first(tmp_path: Path) -> None:
    model, samples = _chain(), few(3, SHAPE)
    job = job_of(model, tmp_path, samples)
    state = Recoverer(job, target(), tmp_path).state(SCHEME, [], tmp_path / "q.onnx")
    assert state.artifact is not None
    quantized = onnx.load(state.artifact.model)
    weight = next(t for t in quantized.graph.initializer if t.name == "third_w_quantized")
    values = numpy_helper.to_array(weight)
    weight.CopyFrom(numpy_helper.from_array((values // 16 * 16).astype(np.int8), weight.name))
    state.artifact.model.write_bytes(quantized.SerializeToString())
    assert rank_layers(job.prepared, state.artifact, samples)[0].name == "third"


def test_columns_weigh_alike_and_sizes_may_change() -> None:
    columns = ColumnNoise()
    plain = np.ones((1, 64, 2)) * np.array([100.0, 1.0])
    columns.update({"y": plain}, {"y": plain + np.array([0.0, 0.1])})
    assert columns.noise == pytest.approx(0.5 * 0.01)
    whole = ColumnNoise()
    whole.update({"y": np.ones((3, 4))}, {"y": np.ones((2, 4))})
    assert whole.noise == 1
    whole.update({"y": np.ones((2, 5))}, {"y": np.ones((2, 5))})
    assert whole.noise == pytest.approx(12 / 22)


def test_leaves_out_values_that_are_not_numbers() -> None:
    columns = ColumnNoise()
    a = np.array([1.0, np.inf, np.nan, 2.0])
    columns.update({"y": a, "s": np.array(["a"])}, {"y": a * [1.0, 1.0, 1.0, 1.5], "s": np.array(["b"])})
    assert columns.noise == pytest.approx(1 / 5)
    assert ColumnNoise().noise == 0


def test_nonfinite_results_are_worse_than_any_rounding() -> None:
    reference = {"y": np.array([[1.0, 2.0, np.inf]])}
    rounded, broken = ColumnNoise(), ColumnNoise()
    rounded.update(reference, {"y": np.array([[1.5, 2.0, np.inf]])})
    broken.update(reference, {"y": np.array([[np.nan, 2.0, np.inf]])})
    assert rounded.noise == pytest.approx(0.25 / 5)
    assert broken.noise > 1000
