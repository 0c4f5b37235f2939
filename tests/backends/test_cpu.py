"""Test the files of the CPU backend by how ONNX Runtime runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from edgeq_device.engines.options import read_model_options
from onnx import numpy_helper

from edgeq.backends.base import backend_named
from edgeq.backends.cpu import CpuBackend
from edgeq.errors import CalibrationError, HardwareError, ModelError, UsageError
from edgeq.model.files import model_files
from edgeq.model.load import save_model
from edgeq.quantization import quantizer
from edgeq.quantization.float_guard import float_compute_nodes
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from tests.backends.build import Bench, bench, mixed, operators, quantized, random, residual, stacked, weights
from tests.graphs import proto

pytestmark = pytest.mark.usefixtures("exact_kernels")

DISABLED = "optimization.disable_specified_optimizers"
COMPUTE = ["first", "depthwise", "last", "fc"]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("residual"), residual())


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("mixed"), mixed())


def test_static_runs_in_integers_throughout(net: Bench) -> None:
    artifact = net.build()
    coverage = net.coverage(artifact)
    assert coverage.int8_mac_share == 1
    assert coverage.int8_macs == (8 * 8 * 9 + 8 * 9 + 8 * 8 * 9) * 64 + 5 * 8
    assert net.sqnr(artifact) > 25
    assert artifact.provider == "CPUExecutionProvider"
    assert (artifact.session_options, artifact.notes) == ({}, ())


def test_types_and_symmetry_are_those_of_the_scheme(net: Bench) -> None:
    unsigned = weights(net.build("u8s8.onnx"))
    assert unsigned["x_zero_point"].dtype == np.uint8
    signed = weights(net.build("s8s8.onnx", activation_type="int8"))
    assert signed["x_zero_point"].dtype == np.int8
    assert signed["r1_zero_point"] == -128, "the range of a Relu starts at zero"
    symmetric = weights(net.build("s8s8_symmetric.onnx", activation_type="int8", activation_symmetric=True))
    assert symmetric["r1_zero_point"] == 0
    for weights_by_name in (unsigned, signed, symmetric):
        assert weights_by_name["w1_quantized"].dtype == np.int8
        assert not weights_by_name["w1_zero_point"].any()


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_that_are_no_matrix_have_one_scale_or_stay_float(tmp_path: Path, form: str, per_channel: bool) -> None:
    net = bench(tmp_path, stacked())
    artifact = net.build("q.onnx", format=form, per_channel=per_channel)
    assert net.sqnr(artifact) > 25
    assert (net.coverage(artifact).int8_mac_share == 1) is not per_channel


def test_unsigned_weights(net: Bench) -> None:
    artifact = net.build("u8u8.onnx", weight_type="uint8", weight_symmetric=False)
    assert weights(artifact)["w1_quantized"].dtype == np.uint8
    assert net.coverage(artifact).int8_mac_share == 1


def test_per_channel_is_worth_it(net: Bench) -> None:
    channel, tensor = net.build("channel.onnx"), net.build("tensor.onnx", per_channel=False)
    assert weights(channel)["w1_scale"].shape == (8,)
    assert weights(tensor)["w1_scale"].shape == ()
    assert net.sqnr(channel) > net.sqnr(tensor)


def test_reduce_range_leaves_seven_bits(net: Bench) -> None:
    held = weights(net.build("reduced.onnx", reduce_range=True))
    assert max(np.abs(held[f"w{n}_quantized"].astype(int)).max() for n in (1, 2, 3, 4)) <= 64
    assert np.abs(weights(net.build())["w1_quantized"].astype(int)).max() == 127


def test_operators_in_place_of_pairs(net: Bench) -> None:
    artifact = net.build("operators.onnx", format="QOperator")
    weights = operators(artifact)
    assert weights.count("QLinearConv") == 3
    assert "Conv" not in weights
    assert net.sqnr(artifact) > 25
    assert net.coverage(artifact).int8_mac_share == 1


def test_only_the_types_that_were_asked_for(net: Bench) -> None:
    artifact = net.build("gemm.onnx", op_types=("Gemm",))
    by_name = {node.name: node for node in net.coverage(artifact).float_nodes}
    assert set(COMPUTE) & set(by_name) == {"first", "depthwise", "last"}


@pytest.mark.parametrize("name", ["depthwise", "last"])
def test_an_excluded_node_stays_float_on_the_optimised_graph(net: Bench, name: str) -> None:
    """An excluded node between integer tensors stays float. ONNX Runtime would quantize its weights at load, per
    tensor. The form of the graph prevents that without a session option, which a file taken out of its bundle would
    lose.
    """
    artifact = net.build(f"without_{name}.onnx", exclude=(name,))
    assert artifact.session_options == {}
    assert read_model_options(artifact.model, "m") == {}
    assert "stay in float" in artifact.notes[0]
    float_nodes = [node for node in net.coverage(artifact).float_nodes if node.macs]
    assert [node.name for node in float_nodes] == [name]
    assert net.sqnr(artifact) >= net.sqnr(net.build()) - 0.5


def test_the_options_of_the_scheme_travel_in_the_file(net: Bench) -> None:
    options = {DISABLED: "ConstantSharing", "session.x64quantprecision": "1"}
    artifact = net.build(exclude=("last",), session_options=options)
    assert artifact.session_options == read_model_options(artifact.model, "m") == options
    opened = open_session(artifact.model).get_session_options()
    assert {key: opened.get_session_config_entry(key) for key in options} == options


def test_an_unknown_node_is_refused_with_the_nearest_names(net: Bench) -> None:
    with pytest.raises(UsageError, match="no node is named 'depthwize'") as caught:
        net.build(exclude=("depthwize",))
    assert caught.value.fix == "Did you mean depthwise?"
    assert "model.onnx" in caught.value.problem, "the user's file, not the prepared one"


def test_an_old_opset_is_raised_to_where_per_channel_is_valid(tmp_path: Path) -> None:
    old = bench(tmp_path, residual(opset=11))
    artifact = old.build()
    proto = onnx.load(artifact.model)
    assert next(o.version for o in proto.opset_import if not o.domain) >= 13
    onnx.checker.check_model(proto)
    axes = {
        attribute.i
        for node in proto.graph.node
        if node.name.startswith("w1_")
        for attribute in node.attribute
        if attribute.name == "axis"
    }
    assert axes == {0}
    assert old.coverage(artifact).int8_mac_share == 1


def namesakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Change to a folder that contains data files with the same names as those to be written elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"another model's")
    monkeypatch.chdir(folder)


def test_weights_beyond_the_limit_go_to_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = bench(tmp_path, residual(width=32))  # the quantizer keeps weights below 1 KiB in the model
    inside = wide.sqnr(wide.build("inside.onnx"))
    monkeypatch.setattr(quantizer, "_EXTERNAL_DATA_FROM", 1)
    monkeypatch.setitem(save_model.__kwdefaults__, "inline_limit", 1)
    namesakes(tmp_path, monkeypatch, "static.onnx.data", "operators.onnx.data", "again.onnx.data")
    for name, scheme in (("static.onnx", {}), ("operators.onnx", {"format": "QOperator"})):
        artifact = wide.build(name, **scheme)
        assert [file.name for file in model_files(artifact.model)] == [name, f"{name}.data"]
        assert wide.coverage(artifact).int8_mac_share == 1
    assert wide.sqnr(wide.build("again.onnx")) == inside


def test_dynamic_weights_beyond_the_limit_go_to_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = bench(tmp_path, mixed(width=32))
    types = {"Conv": "uint8", "MatMul": "int8"}
    inside = wide.sqnr(wide.build("inside.onnx", mode="dynamic", dynamic_weight_types=types))
    monkeypatch.setattr(quantizer, "_EXTERNAL_DATA_FROM", 1)
    namesakes(tmp_path, monkeypatch, "outside.onnx.data")
    artifact = wide.build("outside.onnx", mode="dynamic", dynamic_weight_types=types)
    assert [file.name for file in model_files(artifact.model)] == ["outside.onnx", "outside.onnx.data"]
    assert wide.sqnr(artifact) == inside


def test_dynamic_has_a_weight_type_per_operator_type(kinds: Bench) -> None:
    types = {"Conv": "uint8", "MatMul": "int8", "Gemm": "int8"}
    artifact = kinds.build("three.onnx", mode="dynamic", dynamic_weight_types=types)
    assert [w.dtype for w in quantized(artifact, "w1", "w2", "w3")] == [np.uint8, np.int8, np.int8]
    assert operators(artifact).count("ConvInteger") == 1
    assert operators(artifact).count("MatMulInteger") == 2
    assert kinds.sqnr(artifact) > 35
    assert kinds.coverage(artifact).int8_mac_share == 1


def test_dynamic_leaves_unnamed_types_in_float(kinds: Bench) -> None:
    artifact = kinds.build("two.onnx", mode="dynamic", dynamic_weight_types={"MatMul": "int8", "Gemm": "int8"})
    coverage = kinds.coverage(artifact)
    assert [node.name for node in coverage.float_nodes if node.macs] == ["conv"]
    only = kinds.build("one.onnx", mode="dynamic", dynamic_weight_types={"MatMul": "int8", "Conv": "uint8"},
                       op_types=("MatMul",))  # fmt: skip
    assert operators(only).count("ConvInteger") == 0
    assert operators(only).count("MatMulInteger") == 1


def test_dynamic_tells_a_gemm_from_a_matmul(kinds: Bench) -> None:
    """Types and exclusions apply to the original operator, although the quantizer turns a Gemm into a MatMul first."""
    both = kinds.build(mode="dynamic", dynamic_weight_types={"MatMul": "int8", "Gemm": "uint8"})
    assert [w.dtype for w in quantized(both, "w2", "w3")] == [np.int8, np.uint8]
    assert not quantized(kinds.build(mode="dynamic", dynamic_weight_types={"Gemm": "int8"}), "w2")


@pytest.mark.parametrize("name", ["matmul", "fc"])
def test_dynamic_keeps_excluded_nodes(kinds: Bench, name: str) -> None:
    types = {"MatMul": "int8", "Gemm": "int8"}
    artifact = kinds.build("excluded.onnx", mode="dynamic", dynamic_weight_types=types, exclude=(name,))
    float_nodes = [node.name for node in kinds.coverage(artifact).float_nodes if node.macs]
    assert sorted(float_nodes) == ["conv", name]
    assert operators(artifact).count("MatMulInteger") == 1


def test_a_missing_range_is_refused(net: Bench, tmp_path: Path) -> None:
    ranges = net.ranges(Scheme())
    del ranges["r1"]
    with pytest.raises(CalibrationError, match="r1") as caught:
        CpuBackend().build(net.prepared, ranges, Scheme(), tmp_path / "int8.onnx")
    assert "calibrate" in caught.value.fix
    assert "model.onnx" in caught.value.problem


@pytest.mark.parametrize(
    ("scheme", "fix"),
    [
        ({"op_types": ("MatMul",)}, "is not among the operator types to quantize (MatMul)"),
        ({"exclude": ("first", "relu", "depthwise", "add", "last", "pool", "flatten", "fc")}, "Exclude fewer nodes"),
    ],
)
def test_an_artifact_without_anything_quantized_is_refused(net: Bench, scheme: dict[str, tuple[str]], fix: str) -> None:
    with pytest.raises(ModelError, match="nothing in it was quantized") as caught:
        net.build(**scheme)
    assert fix in caught.value.fix


def test_the_reason_is_that_of_the_node_with_most_of_the_work(tmp_path: Path) -> None:
    body = "g (float[N, 8, 8, 8] x) => (float[N, 4, 8, 8] y) { e = Erf (x) y = Conv (e, w) }"
    model = proto(body)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 8, 1, 1), np.float32), "w"))
    with pytest.raises(ModelError) as caught:
        bench(tmp_path, model).build(mode="dynamic", dynamic_weight_types={"MatMul": "int8"})
    assert caught.value.fix.startswith("It contains Conv, which is not among the operator types to quantize (MatMul)")


@pytest.mark.parametrize(
    ("scheme", "problem"),
    [
        ({"activation_type": "int8", "weight_type": "uint8"}, "int8 activations with uint8 weights"),
        ({"op_types": ("Conv", "Cnov")}, "no operator 'Cnov'"),
        ({"mode": "dynamic"}, "a weight type per operator type"),
        (
            {"mode": "dynamic", "dynamic_weight_types": {"MatMul": "int8"}, "op_types": ("Conv",)},
            "no weight type for dynamic Conv",
        ),
        ({"mode": "dynamic", "dynamic_weight_types": {"Erf": "int8"}, "op_types": ("Erf",)}, "no operator 'Erf'"),
    ],
)
def test_schemes_that_no_model_can_be_built_with(scheme: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        CpuBackend().check(Scheme(**scheme))


def test_a_float_model_has_nothing_to_be_requantized(net: Bench) -> None:
    assert float_compute_nodes(net.prepared.model) == ()


def test_the_same_build_gives_the_same_bytes(net: Bench) -> None:
    one_build, second = net.build("a.onnx"), net.build("b.onnx")
    assert one_build.model.read_bytes() == second.model.read_bytes()


def test_backends_are_found_by_name() -> None:
    assert isinstance(backend_named("cpu"), CpuBackend)
    with pytest.raises(HardwareError, match="unknown backend 'abacus'") as caught:
        backend_named("abacus")
    assert "cpu" in caught.value.fix


@pytest.mark.parametrize("far", [-1e4, -np.inf])
def test_a_masked_softmax_keeps_telling_scores_apart(tmp_path: Path, far: float) -> None:
    mask = np.triu(np.full((8, 8), far, np.float32), 1)
    net = proto(
        """g (float[1,8,8,8] x) => (float[1,8,8,8] y) {
        q = MatMul(x, w) k = Transpose<perm = [0, 1, 3, 2]>(x) scores = MatMul(q, k) masked = Add(scores, mask)
        shares = Softmax<axis = -1>(masked) y = MatMul(shares, x)
    }""",
        {"w": random(8, 8) / 3},
    )
    net.graph.initializer.append(onnx.numpy_helper.from_array(mask, "mask"))
    masked = bench(tmp_path, net)
    assert masked.sqnr(masked.build()) > 25


NETWORK = """g (float[1, 8, 8, 8] x) => (float[1, 8, 4, 4] y OUTPUT)
    <float[8, 8, 3, 3] w, float low = {LOW}, float high = {2}> {
    [first] a = Conv (x, w)
    [clip] b = Clip (a, low, high)
    [last] y = Conv (b, w)
}"""


def clipped(tmp_path: Path, *, low: float, output: str = "") -> Bench:
    """Return a model of convolutions around a Clip, with samples."""
    onnx_model = proto(NETWORK.replace("LOW", str(low)).replace("OUTPUT", output))
    onnx_model.graph.initializer.append(numpy_helper.from_array(random(8, 8, 3, 3) / 8, "w"))
    return bench(tmp_path, onnx_model)


@pytest.mark.usefixtures("only_exact_kernels")
def test_a_clip_whose_bounds_leave_out_zero_stays(tmp_path: Path) -> None:
    bounded = clipped(tmp_path, low=0.5)
    artifact = bounded.build()
    assert "Clip" in operators(artifact)
    assert bounded.sqnr(artifact) > 30


def test_an_output_before_a_clip_keeps_its_range(tmp_path: Path) -> None:
    """A graph's output before a Clip keeps its own range. onnxruntime's quantizer would give it the Clip's range."""
    artifact = clipped(tmp_path, low=0, output=", float[1, 8, 6, 6] a").build()
    x = random(1, 8, 8, 8)
    (float_output,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["a"], {"x": x})
    (int8_output,) = onnxruntime.InferenceSession(artifact.model).run(["a"], {"x": x})
    assert np.corrcoef(float_output.ravel(), int8_output.ravel())[0, 1] > 0.999


SHARED = """g (float[1, 8, 8, 8] x) => (float[1, 8, 6, 6] y) <float[8, 8, 3, 3] w> {
    [first] a = Conv (x, w)
    [relu] b = Relu (a)
    [last] c = Conv<pads = [1, 1, 1, 1]> (b, w)
    [add] y = Add (c, a)
}"""


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_relu_whose_input_has_another_reader_is_computed(tmp_path: Path, form: str) -> None:
    onnx_model = proto(SHARED)
    onnx_model.graph.initializer.append(numpy_helper.from_array(random(8, 8, 3, 3) / 8, "w"))
    shared = bench(tmp_path, onnx_model)
    assert shared.sqnr(shared.build(format=form)) > 30


@pytest.mark.parametrize(
    ("weight", "nodes", "scheme", "words"),
    [
        ((1, 8, 4), "y = MatMul (x, w)", {}, "per_channel=False"),
        ((8, 4), "t = MatMul (x, w) y = Where (c, t, z)", {"format": "QOperator"}, "Choose `format` QDQ"),
    ],
)
def test_models_without_int8_say_why(
    tmp_path: Path, weight: tuple[int, ...], nodes: str, scheme: dict[str, Any], words: str
) -> None:
    onnx_model = proto(
        "g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 4] y) "
        f"<float{list(weight)} w, bool[8, 1] c = {{1, 0, 1, 0, 1, 0, 1, 0}}, float z = {{0}}> {{ {nodes} }}"
    )
    onnx_model.graph.initializer.append(numpy_helper.from_array(random(*weight), "w"))
    with pytest.raises(ModelError, match=words):
        bench(tmp_path, onnx_model).build(**scheme)
