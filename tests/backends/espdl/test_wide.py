"""Test layers with 16-bit activations and weights against the formula of their Q/DQ model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeq.backends.espdl.backend import EspdlBackend
from edgeq.backends.espdl.chips import wide_kernels
from edgeq.backends.espdl.convert import lower_file
from edgeq.backends.espdl.interpret import run
from edgeq.backends.espdl.network import EspGraph
from edgeq.backends.espdl.reader import read
from edgeq.backends.espdl.selftest import encoded_inputs
from edgeq.backends.espdl.session import EspSession
from edgeq.backends.espdl.wide import weight_scale
from edgeq.backends.espdl.writer import write
from edgeq.errors import UsageError
from edgeq.hardware.target import find_target
from edgeq.jobs.quantize import quantize
from edgeq.measure.inference import infer
from edgeq.run.session import open_session
from edgeq.tuning.recover.base import RecoveryState
from edgeq.tuning.recover.methods.sequential_correction import SequentialCorrection
from edgeq.util.display import SILENT
from tests.backends.build import random
from tests.backends.espdl.build import Built, built
from tests.backends.espdl.models import CONV, MODELS, W, image

ALL = ("*",)
# One step of an 8-bit table is 256 steps of 16 bits. A result in the middle of two integers may take either.
STEPS = {"functions": 256}


def samples(model: onnx.ModelProto) -> NDArray[np.float32]:
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(1).normal(size=(4, *shape[1:])).astype(np.float32)


def widened(folder: Path, model: onnx.ModelProto, *names: str, target: str = "esp32-p4", **scheme: Any) -> Built:
    return built(folder, model, samples(model), target, wide=names or ALL, **scheme)


def noise(result: Built) -> float:
    """Return the largest distance of the chip's answers from the float model's, relative to the largest of these."""
    exact, session = open_session(result.bench.prepared.path), EspSession(result.graph(), result.family())
    pairs = [(infer(exact, row), infer(session, row)) for row in result.bench.samples]
    distance = max(float(np.abs(a[name] - b[name]).max()) for a, b in pairs for name in a)
    return distance / max(float(np.abs(values).max()) for a, _ in pairs for values in a.values())


def types_of(graph: EspGraph) -> dict[str, set[str]]:
    """Return the types that the nodes of each ONNX node read, without conversions."""
    types: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.kind != "RequantizeLinear":
            types.setdefault(node.source, set()).add(node.type)
    return types


@pytest.mark.parametrize("name", MODELS)
def test_the_integers_are_within_a_step_of_the_qdq_model(name: str, tmp_path: Path) -> None:
    result = widened(tmp_path, MODELS[name])
    graph = result.graph()
    assert result.artifact.details["wide_share"] > 0
    reference = open_session(result.artifact.model, result.artifact.proof_settings())
    session = EspSession(graph, result.family())
    output = graph.outputs[0].tensor
    # The sums of onnxruntime are float32, which has 24 of their 40 bits.
    step = STEPS.get(name, 1) * 2.0**output.exponent if output.type == "int16" else 1e-5
    for sample in result.bench.samples:
        expected, answer = infer(reference, sample), infer(session, sample)
        for port, values in expected.items():
            np.testing.assert_allclose(answer[port], values, rtol=0, atol=step)


@pytest.mark.parametrize("target", ["esp32-s3", "esp32-p4", "esp32-c6"])
def test_a_file_is_read_back_with_the_same_integers(target: str, tmp_path: Path) -> None:
    result = widened(tmp_path, MODELS["flat"], target=target)
    graph, family = result.graph(), result.family()
    file = read(write(graph, blocked=family.blocked), tmp_path / "model.espdl").graph
    inputs = encoded_inputs(graph, family, result.sample())
    first, second = (run(g, inputs, family.arithmetic)[g.outputs[0].tensor] for g in (graph, file))
    assert first.dtype == np.int16
    assert np.array_equal(first, second)


def test_only_the_named_layer_has_16_bits_between_conversions(tmp_path: Path) -> None:
    nodes = (
        "[first] a = Conv<pads = [1, 1, 1, 1]>(x, w) [wide] b = Conv<pads = [1, 1, 1, 1]>(a, w) [last] z = Conv(b, v)"
    )
    result = widened(tmp_path, image(nodes, {**W, "v": random(8, 8, 1, 1, seed=4)}), "wide")
    graph = result.graph()
    types = types_of(graph)
    assert (types["first"], types["wide"], types["last"]) == ({"int8"}, {"int16"}, {"int8"})
    conversions = [n for n in graph.nodes if n.kind == "RequantizeLinear"]
    assert [(n.data[0].type, n.outputs[0].type) for n in conversions] == [("int8", "int16"), ("int16", "int8")]
    layer = next(node for node in graph.nodes if node.type == "int16" and node.kind == "Conv")
    weights = layer.data[1].values
    assert weights is not None
    # The weights come from the float model, so they are no multiples of 8-bit ones.
    assert weights.dtype == np.int16
    assert np.unique(weights % 256).size > 100
    assert 0 < result.artifact.details["wide_share"] < 1


def test_a_relu_behind_a_named_layer_stays_a_part_of_it(tmp_path: Path) -> None:
    nodes = f"{CONV} [relu] z = Relu(c)"
    for name in ("conv", "relu"):
        folder = tmp_path / name
        folder.mkdir()
        graph = widened(folder, image(nodes, W), name).graph()
        (layer,) = (node for node in graph.nodes if node.kind == "Conv")
        assert (layer.type, layer.attributes["activation"]) == ("int16", "Relu")


def test_a_bias_has_64_bits(tmp_path: Path) -> None:
    graph = widened(tmp_path, MODELS["depthwise"]).graph()
    assert graph.nodes[0].data[2].type == "int64"


def test_16_bits_are_much_nearer_to_the_float_model(tmp_path: Path) -> None:
    results = {}
    for name, wide in (("narrow", ()), ("wide", ALL)):
        (tmp_path / name).mkdir()
        model = MODELS["residual"]
        results[name] = noise(built(tmp_path / name, model, samples(model), "esp32-s3", wide=wide))
    assert results["wide"] < results["narrow"] / 16


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        (f"{CONV} [turn] z = Tanh(c)", "turn"),
        (f"{CONV} [bound] z = Clip(c, low, high)", "conv"),
        (
            f'{CONV} [up] z = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",'
            ' nearest_mode = "floor">(c, "", scales)',
            "up",
        ),
    ],
)
def test_a_node_without_an_exact_kernel_keeps_8_bits_and_is_named(nodes: str, name: str, tmp_path: Path) -> None:
    constants = {"low": np.float32(0), "high": np.float32(0.7), "scales": np.array([1, 1, 2, 2], np.float32)}
    used = {key: value for key, value in constants.items() if key in nodes}
    result = widened(tmp_path, image(nodes, {**W, **used}), name)
    assert types_of(result.graph())[name] == {"int8"}
    assert any(note.endswith(f"keep 8 bits: {name}") for note in result.artifact.notes)
    assert result.artifact.details["wide_share"] == 0


def test_a_name_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"):
        widened(tmp_path, MODELS["residual"], "absent")


def test_a_correction_leaves_16_bit_weights_alone(tmp_path: Path) -> None:
    result = widened(tmp_path, MODELS["residual"], "conv")
    state = RecoveryState(result.bench.prepared, None, {}, result.artifact.scheme, result.artifact)
    (tmp_path / "corrected").mkdir()
    corrected = SequentialCorrection().apply(state, result.bench.samples, tmp_path / "corrected", SILENT).artifact
    assert corrected is not None

    def weights(model: Path) -> dict[str, bytes]:
        layers = (n for n in lower_file(model, result.family()).nodes if n.kind in ("Conv", "Gemm"))
        return {n.source: n.data[1].values.tobytes() for n in layers if n.data[1].values is not None}

    before, after = weights(result.artifact.model), weights(corrected.model)
    assert before["conv"] == after["conv"]
    assert before["fc"] != after["fc"]


def test_a_repair_gives_layers_16_bits_where_8_are_not_enough(tmp_path: Path) -> None:
    # One channel is 300 times the others and is cut off at once, so 8 bits leave the others no levels.
    weights = random(8, 8, 3, 3, seed=1)
    weights[0] *= 300
    body = f"{CONV} [cut] z = Slice(c, start, end, axes)"
    places = {name: np.array([place]) for name, place in (("start", 1), ("end", 8), ("axes", 1))}
    model, data = tmp_path / "m.onnx", tmp_path / "x.npz"
    model.write_bytes(image(body, {"w": weights, **places}, channels=7).SerializeToString())
    np.savez(data, x=random(16, 1, 8, 8, 8, seed=2))
    result = quantize(model, data, tmp_path / "int8.onnx", target="esp32-p4", timed=False, emulate=False)
    repair = result.proof.repair
    assert repair is not None
    assert repair.met
    assert "16 bits" in repair.steps[-1].name


def test_a_finished_build_proves_16_bit_layers_in_the_chips_integers(tmp_path: Path) -> None:
    result = widened(tmp_path, MODELS["residual"], target="esp32-s3")
    folder = tmp_path / "finished"
    folder.mkdir()
    backend = EspdlBackend(find_target("esp32-s3"))
    artifact = backend.finished(result.artifact, result.bench.prepared, result.bench.samples, folder)
    content = read(artifact.files["int8.espdl"].read_bytes(), folder / "int8.espdl")
    assert {values.dtype.name for values in content.tests.values()} == {"int16"}


@given(st.integers(0, 10**6), st.integers(1, 3000), st.floats(1e-6, 1e3), st.floats(0, 1e6), st.integers(-24, 4))
def test_a_scale_of_weights_is_the_finest_that_no_sum_can_exceed(
    seed: int, count: int, magnitude: float, offset: float, exponent: int
) -> None:
    kernels, data_scale = wide_kernels(), 2.0**exponent
    rows = (magnitude * np.random.default_rng(seed).choice([-1.0, 1.0], (3, count))).astype(np.float32)
    bias = np.array([offset, -offset, 0], np.float32)

    def fits(scale: float) -> bool:
        integers = [[round(float(w) / scale) for w in row] for row in rows]
        sums = [
            32768 * sum(map(abs, row)) + abs(round(float(b) / (data_scale * scale)))
            for row, b in zip(integers, bias, strict=True)
        ]
        return max(sums) < 2 ** (kernels.accumulator_bits - 1) and max(abs(w) for row in integers for w in row) < 2**15

    scale = weight_scale(rows, bias, data_scale, kernels)
    assert np.log2(scale) == int(np.log2(scale))
    assert fits(scale)
    assert scale == 2.0**-30 or not fits(scale / 2.0001)


def test_the_first_layer_reads_an_input_of_16_bits(tmp_path: Path) -> None:
    graph = widened(tmp_path, image("[conv] z = Conv<pads = [1, 1, 1, 1]>(x, w)", W), "conv").graph()
    assert graph.inputs[0].tensor.type == "int16"
