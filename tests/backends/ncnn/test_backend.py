"""Test the whole way from a float model to the Q/DQ model, its emulation and the file for ncnn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.backends.base import Artifact, backend_named
from edgeq.backends.ncnn.backend import NcnnBackend
from edgeq.backends.ncnn.emulation import emulation
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import resolve
from edgeq.model.edit import set_constant
from edgeq.model.graph import constant_values
from edgeq.model.load import read_unchecked, save_model
from edgeq.model.prepare import prepare_model
from edgeq.scheme import Scheme
from edgeq.tuning.recover.run import Recoverer
from tests.backends.ncnn.networks import ncnn, run_ncnn, run_onnx, sqnr_db
from tests.graphs import proto
from tests.tuning.recover.nets import few, job_of, two_gates, uneven

SCHEME = Scheme(
    mode="static", format="QDQ", activation_type="int8", activation_symmetric=True, weight_type="int8", per_channel=True
)
NET = """g (float[N,3,8,8] x) => (float[N,4] y) {
    [conv] h = Conv<pads=[1,1,1,1]>(x, w, b)
    [gate] s = Sigmoid(h)
    [silu] m = Mul(h, s)
    [depthwise] e = Conv<pads=[1,1,1,1], group=8>(m, d)
    [relu] r = Relu(e)
    [point] t = Conv(r, p)
    [join] j = Concat<axis=1>(t, m)
    [pool] a = GlobalAveragePool(j)
    [flat] l = Flatten(a)
    [dense] c = Gemm<transB=1>(l, f, n)
    [soft] y = Softmax<axis=-1>(c)
}"""


def built(folder: Path, text: str = NET, **changes: Any) -> Artifact:
    """Build the network and return the artifact, `folder` / "q.onnx"."""
    random = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "b": (8,), "d": (8, 1, 3, 3), "p": (8, 8, 1, 1), "f": (4, 16), "n": (4,)}
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    onnx.save(proto(text, weights), folder / "net.onnx")
    np.savez(folder / "data.npz", x=random.normal(0, 1, (8, 3, 8, 8)).astype(np.float32))
    prepared = prepare_model(folder / "net.onnx", folder / "prepared")
    samples = open_samples(folder / "data.npz", prepared.signature)
    ranges = derive_ranges(
        collect(prepared.model, samples, model_digest=prepared.digest), activation_type="int8", symmetric=True
    )
    return NcnnBackend().build(prepared, ranges, SCHEME.replace(**changes), folder / "q.onnx")


def test_only_layers_are_quantized(tmp_path: Path) -> None:
    artifact = built(tmp_path)
    graph = read_unchecked(artifact.model).graph
    readers = {use.node.name for node in graph if node.op_type == "DequantizeLinear" for use in node.outputs[0].uses()}
    assert readers == {"conv", "point", "dense"}
    biases = [node.inputs[2] for node in graph if node.op_type in ("Conv", "Gemm") and len(node.inputs) > 2]
    assert all(constant_values(bias).dtype == np.float32 for bias in biases)


def test_a_depthwise_layer_stays_in_float_with_the_reason(tmp_path: Path) -> None:
    artifact = built(tmp_path)
    assert artifact.coverage is not None
    (node,) = [node for node in artifact.coverage.float_nodes if node.name == "depthwise"]
    assert "8 groups" in node.reason
    assert 0.5 < artifact.coverage.int8_mac_share < 1


@ncnn
def test_the_file_computes_what_the_proof_computes(tmp_path: Path) -> None:
    artifact = built(tmp_path)
    assert artifact.proof_model != artifact.model
    NcnnBackend().write_file(artifact.model, tmp_path / "q.ncnn")
    inputs = {"x": np.random.default_rng(1).normal(0, 1, (1, 3, 8, 8)).astype(np.float32)}
    expected = run_onnx(artifact.proof_model, inputs)["y"]
    assert sqnr_db(expected, run_ncnn(tmp_path / "q.ncnn", inputs)["y"]) > 60
    assert sqnr_db(run_onnx(tmp_path / "net.onnx", inputs)["y"], expected) < 60


def test_an_edited_model_gets_a_new_emulation(tmp_path: Path) -> None:
    artifact = built(tmp_path)
    assert artifact.simulation is not None
    old = artifact.simulation.read_bytes()
    model = read_unchecked(artifact.model)
    (weights,) = [value for name, value in model.graph.initializers.items() if name == "p_quantized"]
    set_constant(weights, -constant_values(weights))
    save_model(model, tmp_path / "edited.onnx")
    edited = NcnnBackend().edited(replace(artifact, model=tmp_path / "edited.onnx"))
    assert edited.simulation is not None
    assert edited.simulation.read_bytes() != old
    assert artifact.simulation.read_bytes() == old


def test_an_excluded_layer_stays_in_float(tmp_path: Path) -> None:
    artifact = built(tmp_path, exclude=("point",))
    graph = read_unchecked(artifact.model).graph
    readers = {use.node.name for node in graph if node.op_type == "DequantizeLinear" for use in node.outputs[0].uses()}
    assert readers == {"conv", "dense"}


def test_a_model_without_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no layer can run in int8 in ncnn"):
        built(tmp_path, "g (float[N,3,8,8] x) => (float[N,3,8,8] y) { [relu] y = Relu(x) }")


@pytest.mark.parametrize(
    ("field", "value"),
    [("activation_symmetric", False), ("activation_type", "uint8"), ("reduce_range", True), ("mode", "dynamic")],
)
def test_a_scheme_that_ncnn_cannot_run_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"ncnn backend cannot build with {field}"):
        NcnnBackend().check(SCHEME.replace(**{field: value}))


def test_refusals_name_each_node_before_a_build(tmp_path: Path) -> None:
    text = """g (float[1,4,6,8] x) => (float[1,4,12,16] y) {
        [odd] h = Det(x) [cubic] z = Resize<mode="cubic">(x, , s) [fine] y = Relu(z)
    }"""
    onnx.save(proto(text, {"s": np.array([1, 1, 2, 2], np.float32)}), tmp_path / "net.onnx")
    model = read_unchecked(tmp_path / "net.onnx")
    refused = backend_named("ncnn").refusals(model, tmp_path / "net.onnx")
    # An operator without a reader is not part of the file.
    assert refused == {"cubic": "its mode is cubic; edgeq writes nearest and linear"}


SHARED = ("resnet20_cifar10", "mobilenet_v1_0.25_224", "yolox_nano", "mlperf_tiny_kws", "lenet_mnist", "lprnet")


@ncnn
@pytest.mark.parametrize("name", SHARED)
def test_a_float_model_gives_the_answers_of_onnxruntime(name: str, shared_data: Path, tmp_path: Path) -> None:
    model = shared_data / name / "model.onnx"
    (shape,) = [list(value.shape or ()) for value in read_unchecked(model).graph.inputs]
    NcnnBackend().write_file(model, tmp_path / "net.ncnn")
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    name_of_input = str(read_unchecked(model).graph.inputs[0].name)
    inputs = {name_of_input: np.random.default_rng(0).uniform(0, 1, sizes).astype(np.float32)}
    expected, actual = run_onnx(model, inputs), run_ncnn(tmp_path / "net.ncnn", inputs)
    assert {output for output in expected if sqnr_db(expected[output], actual[output]) < 95} == set()


def test_a_recovery_that_edits_the_model_leaves_a_fitting_emulation(tmp_path: Path) -> None:
    samples = few(40, [1, 3, 12, 12])
    job, target = job_of(two_gates(uneven), tmp_path, samples), resolve("raspberry-pi-5-ncnn")
    recoverer = Recoverer(job, target, tmp_path)
    emulations = {}
    for names in ((), ("sequential-correction",)):
        artifact = recoverer.build(target.profile.scheme, names, tmp_path / f"{len(names)}.onnx").artifact
        expected = emulation(read_unchecked(artifact.model), artifact.model)
        inputs = {"x": np.random.default_rng(1).normal(0, 1, (1, 3, 12, 12)).astype(np.float32)}
        emulations[names] = run_onnx(artifact.proof_model, inputs)
        for name, values in run_onnx(expected, inputs).items():
            np.testing.assert_array_equal(emulations[names][name], values)
    plain, corrected = emulations.values()
    assert any(not np.array_equal(plain[name], corrected[name]) for name in plain)
