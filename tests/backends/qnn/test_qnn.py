"""Test the backend for Qualcomm's NPU: the file that it writes here, and the simulator's results if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from edgeq_device.engines.catalog import find_library, read_installed_version
from edgeq_device.errors import DeviceError
from onnx import TensorProto

from edgeq.backends.base import Artifact, backend_for
from edgeq.backends.qnn.backend import Delegation
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import Samples, open_samples
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import resolve
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.quantization.norms import norms_as_convolutions
from edgeq.run.engines import find_backend_engine
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.scheme import Scheme
from tests.backends.networks import sqnr_db
from tests.graphs import proto

ENGINE = find_backend_engine("qnn", {})
simulator = pytest.mark.skipif(
    not read_installed_version(ENGINE) or not ENGINE.simulated,
    reason="onnxruntime-qnn, the simulator, is not installed",
)
NET = """g (
    float[N,3,8,8] x, float[8,3,3,3] w, float[8] b, float[8,1,3,3] d, float[4,8] f, float[4] c
) => (float[N,4] y) <
    float[3] scale = {1.5, 0.5, 1.0}, float[3] bias = {0.1, 0.2, 0.3}, float[3] mean = {0.1, 0.0, 0.2},
    float[3] var = {1.0, 2.0, 3.0}
> {
    [norm] n = BatchNormalization(x, scale, bias, mean, var)
    [conv] h = Conv<pads=[1,1,1,1]>(n, w, b)
    [relu] r = Relu(h)
    [depthwise] e = Conv<pads=[1,1,1,1], group=8>(r, d)
    [add] a = Add(e, r)
    [pool] p = GlobalAveragePool(a)
    [flat] l = Flatten(p)
    [dense] y = Gemm<transB=1>(l, f, c)
}"""


def network(folder: Path, **options: Any) -> PreparedModel:
    """Prepare the network with random weights in place of every input but x."""
    random, onnx_model = np.random.default_rng(0), proto(NET)
    for value in list(onnx_model.graph.input)[1:]:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        array = random.normal(0, 0.4, shape).astype(np.float32)
        onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        onnx_model.graph.input.remove(value)
    folder.mkdir(exist_ok=True)
    onnx.save(onnx_model, folder / "net.onnx")
    return prepare_model(folder / "net.onnx", folder / "work", **options)


def samples_of(prepared: PreparedModel) -> Samples:
    random = np.random.default_rng(1)
    return open_samples(
        [{"x": random.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(8)], prepared.signature
    )


def built(prepared: PreparedModel, folder: Path, target: str = "hexagon-v73", **scheme: Any) -> Artifact:
    full_scheme = resolve(target).profile.scheme.replace(**scheme)
    ranges = derive_ranges(
        collect(prepared.model, samples_of(prepared), model_digest=prepared.digest), full_scheme.method
    )
    return backend_for(resolve(target)).build(prepared, ranges, full_scheme, folder / "int8.onnx")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return network(tmp_path_factory.mktemp("qnn") / "net", fix={"N": 1})


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the simulator appear not to be installed."""

    def missing(*arguments: object) -> Path:
        raise DeviceError("qnn needs the package onnxruntime-qnn, not installed here")

    monkeypatch.setattr("edgeq.backends.qnn.backend.find_library", missing)


def test_a_free_size_is_requested(tmp_path: Path, absent: None) -> None:
    with pytest.raises(ModelError, match=r"needs fixed sizes, but its inputs leave N free.*`fix` N=1"):
        built(network(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mode": "dynamic"}, "cannot build with mode = dynamic"),
        ({"activation_type": "int8"}, "cannot build with activation_type = int8"),
        ({"weight_type": "uint8"}, "weights with a scale per channel must be int8"),
        ({"wide": ("nowhere",)}, "no node is named 'nowhere'"),
    ],
)
def test_forms_without_npu_kernels_are_refused(
    prepared: PreparedModel, tmp_path: Path, absent: None, change: dict[str, Any], line: str
) -> None:
    with pytest.raises(UsageError, match=line):
        built(prepared, tmp_path, **change)


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of each tensor that a DequantizeLinear reads, by the tensor's name in the network."""
    initial = {t.name: t.data_type for t in model.graph.initializer}
    quantized = {n.output[0]: initial[n.input[2]] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    pairs = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
    return {n.output[0]: quantized.get(n.input[0], initial.get(n.input[0], 0)) for n in pairs}


def test_every_tensor_has_its_pair(prepared: PreparedModel, tmp_path: Path, absent: None) -> None:
    artifact = built(prepared, tmp_path)
    model = onnx.load(artifact.model)
    types = types_of(model)
    compute = [n for n in model.graph.node if n.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    assert compute
    assert "BatchNormalization" not in {node.op_type for node in compute}
    for node in compute:
        assert all(name in types for name in node.input if name not in {t.name for t in model.graph.initializer})
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert scales["w_scale"].shape == (8,)
    assert types["w_DequantizeLinear_Output"] == TensorProto.INT8
    assert set(types.values()) <= {TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32}
    assert artifact.device == "npu"
    assert artifact.simulation == artifact.model
    assert "not run in the simulator" in artifact.notes[-1]
    assert artifact.alternatives[0].artifact.model == artifact.model
    assert artifact.coverage is not None
    assert (artifact.coverage.basis, artifact.coverage.int8_mac_share) == ("forecast", 1.0)
    assert artifact.coverage.reason == "qnn needs the package onnxruntime-qnn, not installed here"


def test_transposed_convolutions_in_groups_have_one_scale(tmp_path: Path, absent: None) -> None:
    """A transposed convolution in groups gets one scale. With two groups, each scale along the axis of the outputs
    would apply to two outputs, but their bias needs one scale for each output.
    """
    onnx_model = proto("""g (float[1,3,8,8] x) => (float[1,6,8,8] y) {
        [conv] h = Conv (x, w) [up] y = ConvTranspose <group = 2> (h, t, b)
    }""")
    random = np.random.default_rng(0)
    for name, shape in (("w", (4, 3, 1, 1)), ("t", (4, 3, 1, 1)), ("b", (6,))):
        onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(random.normal(size=shape).astype("f4"), name))
    onnx.save(onnx_model, tmp_path / "net.onnx")
    artifact = built(prepare_model(tmp_path / "net.onnx", tmp_path / "work"), tmp_path)
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(artifact.model).graph.initializer}
    assert scales["w_scale"].shape == (4,)
    assert scales["t_scale"].shape == ()


def test_a_named_node_computes_on_16_bits(prepared: PreparedModel, tmp_path: Path, absent: None) -> None:
    types = types_of(onnx.load(built(prepared, tmp_path, wide=("depthwise",)).model))
    wide = {name for name, kind in types.items() if kind == TensorProto.UINT16}
    assert any(name.startswith("e") for name in wide)
    assert TensorProto.UINT8 in types.values()
    every = types_of(onnx.load(built(prepared, tmp_path, wide=("*",)).model))
    assert TensorProto.UINT8 not in every.values()
    assert TensorProto.INT8 in every.values()


def test_a_batch_normalization_that_nothing_folds_is_a_convolution(prepared: PreparedModel, tmp_path: Path) -> None:
    assert "BatchNormalization" in {node.op_type for node in prepared.model.graph}
    ranges = derive_ranges(collect(prepared.model, samples_of(prepared), model_digest=prepared.digest), "minmax")
    changed, _ = norms_as_convolutions(prepared, ranges, tmp_path / "changed.onnx")
    assert "BatchNormalization" not in {node.op_type for node in changed.model.graph}
    original, rewritten = open_session(prepared.path), open_session(changed.path)
    for sample in samples_of(prepared):
        np.testing.assert_allclose(
            rewritten.run(None, sample.inputs)[0], original.run(None, sample.inputs)[0], atol=1e-5
        )


@simulator
def test_the_model_is_delegated_whole_and_right(prepared: PreparedModel, tmp_path: Path) -> None:
    artifact = built(prepared, tmp_path)
    assert artifact.coverage is not None
    assert artifact.coverage.int8_mac_share == 1.0
    assert not artifact.coverage.float_nodes, artifact.notes
    assert any("nodes run on the NPU, in 1 graph" in note for note in artifact.notes)
    feeds = [dict(sample.inputs) for sample in samples_of(prepared)]
    with Engines() as engines:
        npu_session = engines.open(artifact.model, artifact.proof_settings())
        answers = np.concatenate([npu_session.run(None, feed)[0] for feed in feeds])
    cpu_session, right = open_session(artifact.model, SessionSettings(optimization="none")), open_session(prepared.path)
    assert sqnr_db(np.concatenate([cpu_session.run(None, feed)[0] for feed in feeds]), answers) > 24
    assert sqnr_db(np.concatenate([right.run(None, feed)[0] for feed in feeds]), answers) > 20


def test_a_split_is_shown(prepared: PreparedModel) -> None:
    names = [str(node.name) for node in prepared.model.graph]
    reasons = {"dense": "kept in float on request"}
    head, tail = frozenset(names[: names.index("add")]), frozenset(names[names.index("add") + 1 :])
    delegation = Delegation(prepared.model, (head, tail), reasons, "a test")
    crossing = {value.name for value in next(n for n in prepared.model.graph if n.name == "add").inputs}
    assert set(delegation.crossing()) == crossing | {"a"}
    assert delegation.notes() == (
        f"{len(names) - 1} of {len(names)} nodes run on the NPU, in 2 graphs",
        "in 16-bit floats there: dense (Gemm: kept in float on request)",
        "on the CPU: add (Add: the provider does not support it)",
        f"tensors that cross: {', '.join(delegation.crossing())}",
    )
    assert {node.name for node in delegation.coverage().float_nodes} == {"add", "dense"}


def test_the_library_is_found_by_its_metadata() -> None:
    if not read_installed_version(ENGINE):
        with pytest.raises(DeviceError, match="onnxruntime-qnn"):
            find_library(ENGINE, "1.31.1")


def test_scheme_says_what_is_wide() -> None:
    assert Scheme(wide=("a", "b")).title.endswith("2 nodes on 16-bit activations")
