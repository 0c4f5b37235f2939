"""Test that every operator gives the integers of the Q/DQ model, and that what ESP-DL cannot compute is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.espdl.network import EspGraph
from edgeq.backends.espdl.session import EspSession
from edgeq.errors import ModelError
from edgeq.measure.inference import infer
from edgeq.run.session import open_session
from tests.backends.build import model, random
from tests.backends.espdl.build import built
from tests.backends.espdl.models import CONV, MODELS, W, convolution, image


def samples(name: str) -> np.ndarray:
    shape = [d.dim_value for d in MODELS[name].graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(1).normal(size=(6, *shape[1:])).astype(np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_the_integers_equal_the_qdq_model_where_the_chip_rounds_half_to_even(name: str, tmp_path: Path) -> None:
    result = built(tmp_path, MODELS[name], samples(name), "esp32-p4")
    reference = open_session(result.artifact.model, result.artifact.proof_settings())
    session = EspSession(result.graph(), result.family())
    for sample in result.bench.samples:
        expected, answer = infer(reference, sample), infer(session, sample)
        for output, values in expected.items():
            # Softmax depends on the C library's exponential. Tables come from float64, and onnxruntime computes
            # functions in float32, so a result in the middle of two integers may differ.
            step = 2.0 ** result.graph().outputs[0].tensor.exponent if name == "functions" else 1e-6
            np.testing.assert_allclose(answer[output], values, rtol=1e-5, atol=step)


def test_rounding_half_up_gives_other_integers_and_hardly_other_answers(tmp_path: Path) -> None:
    result = built(tmp_path, MODELS["residual"], samples("residual"))
    up, even = result.answer("half-up").astype(int), result.answer("half-even").astype(int)
    assert 0 < np.abs(up - even).max() <= 4


def kinds(graph: EspGraph) -> list[str]:
    return [node.kind for node in graph.nodes]


def test_a_relu_becomes_part_of_the_layer_before_it(tmp_path: Path) -> None:
    graph = built(tmp_path, convolution(4, 6), random(4, 4, 9, 7)).graph()
    assert kinds(graph) == ["Conv"]
    assert graph.nodes[0].attributes["activation"] == "Relu"


def test_a_layer_before_a_flatten_is_moved_into_the_models_order_once(tmp_path: Path) -> None:
    graph = built(tmp_path, MODELS["flat"]).graph()
    assert kinds(graph).count("Transpose") == 1


def test_a_pool_of_the_whole_image_needs_no_transpose(tmp_path: Path) -> None:
    assert "Transpose" not in kinds(built(tmp_path, MODELS["residual"]).graph())


def test_both_inputs_of_a_sum_get_the_exponent_of_the_result(tmp_path: Path) -> None:
    model_ = image(f"{CONV} [big] b = Mul(x, k) [add] z = Add(b, c)", {**W, "k": np.float32(64)})
    graph = built(tmp_path, model_).graph()
    (node,) = [node for node in graph.nodes if node.kind == "Add"]
    assert len({tensor.exponent for tensor in (*node.data, *node.outputs)}) == 1
    assert "RequantizeLinear" in kinds(graph)


def test_a_result_finer_than_the_sums_is_shifted_afterwards(tmp_path: Path) -> None:
    # The weights cancel, so the result is far smaller than products of the largest weight.
    weights = np.zeros((8, 8, 1, 1), np.float32)
    weights[:, 0], weights[:, 1] = 64.0, -64.0
    x = random(4, 8, 8, 8)
    x[:, 1] = x[:, 0] + 1e-4
    graph = built(tmp_path, image("[conv] z = Conv(x, w)", {"w": weights}), x).graph()
    for node in graph.nodes:
        if node.kind == "Conv":
            data, filters = node.data[:2]
            assert node.outputs[0].exponent >= data.exponent + filters.exponent
    assert "RequantizeLinear" in kinds(graph)


def test_a_softmax_of_large_numbers_runs_in_sixteen_bits(tmp_path: Path) -> None:
    weights = {"w": 200 * random(8, 8, 1, 1, seed=1), "dims": np.array([1, 512])}
    large = model("[c] c = Conv(x, w) [r] r = Reshape(c, dims) [s] y = Softmax(r)", weights)
    result = built(tmp_path, large)
    (node,) = [node for node in result.graph().nodes if node.kind == "Softmax"]
    assert node.type == "int16"
    assert np.isfinite(result.answer()).all()
    assert result.answer().sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("nodes", "weights", "reason"),
    [
        ("[g] z = Conv<group = 2>(x, w)", {"w": random(8, 4, 1, 1)}, "2 groups"),
        (f"{CONV} [p] z = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(c)", W, "counts the padding"),
        (
            f'{CONV} [p] z = Pad<mode = "reflect">(c, pads)',
            {**W, "pads": np.array([0, 0, 1, 1] * 2)},
            "with a constant",
        ),
        (f"{CONV} [e] z = Erf(c)", W, "no kernel"),
    ],
)
def test_an_operator_that_the_runtime_cannot_compute_is_refused_by_name(
    nodes: str, weights: dict[str, np.ndarray], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        built(tmp_path, image(nodes, weights))


def test_an_open_size_is_refused_with_the_option_that_fixes_it(tmp_path: Path) -> None:
    from tests.graphs import proto

    open_model = proto("g (float[1, 8, h, 8] x) => (float[] y) { [c] y = Conv(x, w) }", {"w": random(8, 8, 1, 1)})
    with pytest.raises(ModelError, match="no fixed size on axis 2"):
        built(tmp_path, open_model, random(4, 8, 8, 8))
