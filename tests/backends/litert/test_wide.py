"""Test 16-bit activations in .tflite files: the operators of the file, and their answers in each runtime."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import edgeq
from edgeq.backends.base import Artifact, backend_for
from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.dialect import wide_operators
from edgeq.backends.litert.fuse import fuse_activations
from edgeq.backends.litert.network import Port, Scales, TfliteNetwork, TfliteOperator, TfliteTensor
from edgeq.backends.litert.rules import problems
from edgeq.backends.litert.writer import write
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.hardware.target import resolve
from edgeq.model.load import read_unchecked
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings, open_session
from tests.backends.litert.files import MICRO, RUNTIMES, answers, installed, litert
from tests.graphs import proto

micro = pytest.mark.skipif(not installed("tflite_micro"), reason="tflite-micro is not installed")
SAMPLES = np.random.default_rng(1).normal(0, 1, (12, 4, 8, 8)).astype(np.float32)
# The nodes between a convolution's result h and the output y, and the output's shape.
CASES = {
    "Add": ("y = Add(h, h2)", "1,4,8,8"),
    "AveragePool": ("y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)", "1,4,4,4"),
    "Clip": ("y = Clip(h, low, high)", "1,4,8,8"),
    "Concat": ("y = Concat<axis=1>(h, h2)", "1,8,8,8"),
    "Conv": ("r = Conv<pads=[1,1,1,1], group=4>(h, d, c)\n y = Relu(r)", "1,4,8,8"),
    "ConvTranspose": ("y = ConvTranspose<strides=[2,2]>(h, t, c)", "1,4,17,17"),
    "Flatten": ("y = Flatten(h)", "1,256"),
    "Gather": ("y = Gather<axis=1>(h, places)", "1,2,8,8"),
    "Gemm": ("f = Flatten(h)\n y = Gemm<transB=1>(f, g, c)", "1,4"),
    "GlobalAveragePool": ("y = GlobalAveragePool(h)", "1,4,1,1"),
    "Identity": ("i = Identity(h)\n y = Mul(i, h2)", "1,4,8,8"),
    "LeakyRelu": ("y = LeakyRelu<alpha=0.1>(h)", "1,4,8,8"),
    "MatMul": ("y = MatMul(h, m)", "1,4,8,3"),
    "Max": ("y = Max(h, h2)", "1,4,8,8"),
    "MaxPool": ("y = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(h)", "1,4,8,8"),
    "Min": ("y = Min(h, h2)", "1,4,8,8"),
    "Mul": ("y = Mul(h, k)", "1,4,8,8"),
    "Pad": ("y = Pad(h, pads)", "1,4,10,8"),
    "ReduceMean": ("y = ReduceMean<axes=[2,3], keepdims=0>(h)", "1,4"),
    "Relu": ("a = Add(h, h2)\n y = Relu(a)", "1,4,8,8"),
    "Reshape": ("y = Reshape(h, shape)", "1,8,32"),
    "Resize": (
        'y = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(h, , factors)',
        "1,4,16,16",
    ),
    "Sigmoid": ("y = Sigmoid(h)", "1,4,8,8"),
    "Slice": ("y = Slice(h, starts, ends)", "1,4,8,8"),
    "Softmax": ("y = Softmax<axis=1>(h)", "1,4,8,8"),
    "SpaceToDepth": ("y = SpaceToDepth<blocksize=2>(h)", "1,16,4,4"),
    "Split": ("p, q = Split<axis=1>(h, sizes)\n y = Sub(p, q)", "1,2,8,8"),
    "Squeeze": ("e = ReduceMean<axes=[2], keepdims=1>(h)\n y = Squeeze(e, two)", "1,4,8"),
    "Sub": ("y = Sub(k, h)", "1,4,8,8"),
    "Tanh": ("y = Tanh(h)", "1,4,8,8"),
    "Transpose": ("y = Transpose<perm=[0,3,1,2]>(h)", "1,8,4,8"),
    "Unsqueeze": ("f = Flatten(h)\n g2 = Gemm<transB=1>(f, g, c)\n y = Unsqueeze(g2, two)", "1,4,1"),
}
# A step of h may become several of y. The kernels of these operators interpolate in a table: up to 7 steps of error.
STEPS = {"Sigmoid": 10, "Tanh": 10, "Softmax": 10}


def constants() -> dict[str, NDArray[Any]]:
    """Return the weights and the other constants of the cases."""
    random = np.random.default_rng(0)
    shapes = {"w": (4, 4, 1, 1), "w2": (4, 4, 1, 1), "d": (4, 1, 3, 3), "t": (4, 4, 3, 3), "g": (4, 256), "m": (8, 3)}
    shapes |= {"g64": (4, 64)}
    shapes |= {"b": (4,), "c": (4,), "k": (1, 4, 1, 1)}
    numbers = {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    integers = {"places": [2, 0], "pads": [0, 0, 1, 0, 0, 0, 1, 0], "shape": [1, 8, 32], "starts": [0, 0, 0, 0]}
    integers |= {"ends": [1, 4, 8, 8], "sizes": [2, 2], "two": [2]}
    numbers |= {
        "low": np.array(0, np.float32),
        "high": np.array(1, np.float32),
        "factors": np.array([1, 1, 2, 2], np.float32),
    }
    numbers["threefold"] = np.array([1, 1, 3, 3], np.float32)
    return {**numbers, **{name: np.array(values, np.int64) for name, values in integers.items()}}


@dataclass(frozen=True)
class Built:
    """Hold an artifact and the operators of its file."""

    artifact: Artifact
    network: TfliteNetwork

    def answers(self, runtime: str, sample: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the numbers that the file's answer in a runtime stands for, in the model's order of axes."""
        (port,), (result,) = self.network.inputs, self.network.outputs
        steps = sample.transpose(port.order)
        if port.tensor.scales is not None:
            limits = np.iinfo(port.tensor.type)
            steps = np.rint(steps / port.tensor.scales.scale[0]) + port.tensor.scales.zero[0]
            steps = np.clip(steps, limits.min, limits.max).astype(port.tensor.type)
        (integers,) = answers(write(self.network), runtime, [steps])
        assert result.tensor.scales is not None
        numbers = (integers.astype(np.float64) - result.tensor.scales.zero[0]) * result.tensor.scales.scale[0]
        return np.asarray(numbers.transpose(np.argsort(result.order)), np.float32)

    def formula(self, sample: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the answer of the Q/DQ model, computed as its nodes state it."""
        session = open_session(self.artifact.model, SessionSettings(optimization="none"))
        return np.asarray(session.run(None, {"x": sample})[0])


def build(folder: Path, nodes: str, shape: str, target: str = "android-xnnpack", **options: Any) -> Built:
    """Build the nodes behind two convolutions, h and h2."""
    text = f"""g (float[1,4,8,8] x) => (float[{shape}] y) {{
        [first] h = Conv(x, w, b)
        [second] h2 = Conv(x, w2)
        {nodes}
    }}"""
    # Without readers, the second convolution would be dead code.
    text = text if "h2" in nodes else text.replace("[second] h2 = Conv(x, w2)", "")
    used = {name: values for name, values in constants().items() if re.search(rf"\b{name}\b", text)}
    onnx.save(proto(text, used), folder / "net.onnx")
    np.savez(folder / "data.npz", x=SAMPLES)
    prepared = prepare_model(folder / "net.onnx", folder / "prepared")
    samples = open_samples(folder / "data.npz", prepared.signature)
    place = resolve(target)
    ranges = derive_ranges(collect(prepared.model, samples, model_digest=prepared.digest), "minmax")
    scheme = place.profile.scheme.replace(**options)
    artifact = backend_for(place).configured(place, {}, {}).build(prepared, ranges, scheme, folder / "q.onnx")
    return Built(artifact, lower(read_unchecked(artifact.model), folder / "net.onnx"))


def types_of(network: TfliteNetwork) -> dict[str, set[str]]:
    """Return the types of each node's results."""
    types: dict[str, set[str]] = {}
    for operator in network.operators:
        types.setdefault(operator.node, set()).update(tensor.type for tensor in operator.outputs)
    return types


def test_every_operator_with_16_bit_kernels_has_a_case() -> None:
    assert set(CASES) == wide_operators()


@litert
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("operator", sorted(CASES))
def test_an_operator_on_16_bits_gives_the_numbers_of_its_formula(tmp_path: Path, operator: str, runtime: str) -> None:
    if runtime == MICRO and operator == "Gather":
        pytest.skip("TFLite Micro has no 16-bit kernel of it")
    built = build(tmp_path, *CASES[operator], wide=("*",))
    assert {operator.type for operator in built.network.operators} <= {"int16", None}
    assert not list(problems(built.network))
    assert built.artifact.details["wide_share"] == 1
    (port,) = built.network.outputs
    assert port.tensor.scales is not None
    for sample in SAMPLES[:3, np.newaxis]:
        differences = np.abs(built.answers(runtime, sample) - built.formula(sample))
        assert differences.max() <= (STEPS.get(operator, 4) + 0.5) * port.tensor.scales.scale[0]


@litert
def test_only_the_named_nodes_have_16_bits(tmp_path: Path) -> None:
    nodes = "[wide] r = Conv<pads=[1,1,1,1], group=4>(h, d, c)\n [narrow] y = Add(r, h2)"
    built = build(tmp_path, nodes, "1,4,8,8", wide=("wide",))
    types = types_of(built.network)
    assert (types["first"], types["wide"], types["narrow"]) == ({"int8"}, {"int16"}, {"int8"})
    conversions = [o for o in built.network.operators if o.kind == "QUANTIZE"]
    assert [(o.inputs[0].type, o.outputs[0].type) for o in conversions if o.inputs[0] is not None] == [
        ("int8", "int16"),
        ("int16", "int8"),
    ]
    assert 0 < built.artifact.details["wide_share"] < 1


@litert
def test_a_relu_survives_where_16_bits_do_not_end_at_zero(tmp_path: Path) -> None:
    built = build(tmp_path, "[clamp] r = Relu(h)\n [last] y = Add(r, h2)", "1,4,8,8", wide=("first", "last"))
    layer = next(operator for operator in built.network.operators if operator.kind == "CONV_2D")
    assert layer.options["fusedActivationFunction"] == "RELU"
    for sample in SAMPLES[:3, np.newaxis]:
        np.testing.assert_allclose(built.answers("XNNPACK", sample), built.formula(sample), atol=1e-3)


@litert
def test_16_bits_are_nearer_to_float(tmp_path: Path) -> None:
    def noise(folder: str, **options: Any) -> float:
        (tmp_path / folder).mkdir()
        built = build(tmp_path / folder, "p = Mul(h, h2)\n y = Mul(p, h)", "1,4,8,8", **options)
        session = open_session(tmp_path / folder / "net.onnx", SessionSettings())
        errors = [built.answers("reference", s) - session.run(None, {"x": s})[0] for s in SAMPLES[:, np.newaxis]]
        return float(np.square(errors).mean())

    assert noise("wide", wide=("*",)) < noise("narrow") / 4


LINEAR = 'y = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(h, , factors)'


@litert
@pytest.mark.parametrize(("target", "kind"), [("android-xnnpack", "int16"), ("cortex-m7", "int8")])
def test_a_node_without_a_kernel_in_the_engine_keeps_8_bits(tmp_path: Path, target: str, kind: str) -> None:
    built = build(tmp_path, f"[grow] {LINEAR}", "1,4,16,16", target, wide=("first", "grow"))
    results = {o.outputs[0].type for o in built.network.operators if o.kind == "RESIZE_BILINEAR"}
    assert results == {kind}
    assert any("grow" in note for note in built.artifact.notes) == (kind == "int8")


@litert
def test_a_note_names_the_slower_kernels(tmp_path: Path) -> None:
    built = build(tmp_path, *CASES["Add"], wide=("*",))
    assert any("XNNPACK has no 16-bit kernels" in note for note in built.artifact.notes)


@litert
@micro
def test_quantize_proves_a_file_of_16_bits(tmp_path: Path) -> None:
    build(tmp_path, *CASES["Gemm"])
    model, data = tmp_path / "net.onnx", tmp_path / "data.npz"
    report = edgeq.quantize(
        model, data, tmp_path / "net.tflite", target="cortex-m7", overrides={"wide": ("*",)}, timed=False
    )
    assert report.proof.engine == "tflite-micro"
    assert report.proof.agreement.sqnr_db > 30
    assert report.scheme.wide == ("*",)


def test_a_repair_for_microcontrollers_tries_16_bits() -> None:
    assert "wide" in resolve("cortex-m7").profile.search
    assert "wide" in resolve("ethos-u55-128").profile.search


def _relu_behind(readers: int) -> TfliteNetwork:
    scales = Scales.of(0.1, 0, "int16")
    x, s, r, y = (TfliteTensor(name, (1, 4), "int16", scales) for name in "xsry")
    operators = [TfliteOperator("ADD", (x, x), (s,)), TfliteOperator("RELU", (s,), (r,))]
    operators += [TfliteOperator("MUL", (s if readers > 1 else r, r), (y,))]
    return TfliteNetwork((Port("x", x, (0, 1)),), (Port("y", y, (0, 1)),), tuple(operators))


@pytest.mark.parametrize(("readers", "kinds"), [(1, ["ADD", "MUL"]), (2, ["ADD", "RELU", "MUL"])])
def test_a_clamp_merges_only_if_nothing_else_reads_its_input(readers: int, kinds: list[str]) -> None:
    fused = fuse_activations(_relu_behind(readers))
    assert [operator.kind for operator in fused.operators] == kinds
    assert not list(problems(fused))
