from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.backends.base import Artifact, backend_for
from edgeq.errors import CalibrationError, ModelError
from edgeq.hardware.target import resolve
from edgeq.scheme import ON_REQUEST

from .nets import CHANNELS, TARGET, Bench, bench, model, pairs, precisions, random, reasons, residual


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("residual"), residual())


@pytest.fixture(scope="module")
def built(small: Bench) -> Artifact:
    return small.build()


def test_every_layer_is_int8_and_the_rest_is_fp16_or_fused(built: Artifact) -> None:
    kinds = precisions(built)
    layers = {"stem", "one", "two", "three", "four", "shortcut", "fc"}
    assert {kinds[name] for name in layers} == {"int8"}
    assert {name for name, kind in kinds.items() if kind == "fp16"} == {"pool", "flatten"}
    assert {"add1", "add2", "relu0", "relu2"} <= {name for name, kind in kinds.items() if kind == "int8"}
    assert built.details["placement"]["findings"] == []
    assert built.coverage is not None
    assert built.coverage.int8_mac_share == 1.0


def test_only_the_skip_branch_of_an_add_is_quantized(built: Artifact) -> None:
    found = pairs(built)
    assert any("skip branch, fused into two" in use for use in found["r0"])
    assert "c2" not in found  # the main branch
    # Both branches end in a layer. The branch with only one layer is the skip.
    assert found["c5"] == ["Add add2: skip branch, fused into four"]
    assert "c4" not in found


def test_readers_share_a_pair(built: Artifact) -> None:
    quantizers = [n for n in onnx.load(built.model).graph.node if n.op_type == "QuantizeLinear"]
    assert len({n.input[0] for n in quantizers}) == len(quantizers)
    assert len(pairs(built)["r2"]) == 2  # it serves the layers "three" and "shortcut"


def test_biases_are_float_and_outputs_are_not_quantized(built: Artifact) -> None:
    graph = onnx.load(built.model).graph
    held = {t.name: t for t in graph.initializer}
    for layer in (n for n in graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > 2):
        assert held[layer.input[2]].data_type == onnx.TensorProto.FLOAT16
    quantized = {n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    assert quantized.isdisjoint({"c0", "c1", "c3", "y"})


def test_weights_have_a_scale_for_each_output(built: Artifact) -> None:
    graph = onnx.load(built.model).graph
    held = {t.name.removesuffix("_float16"): numpy_helper.to_array(t) for t in graph.initializer}
    axes = {n.input[0]: n.attribute[0].i for n in graph.node if n.op_type == "DequantizeLinear" and n.attribute}
    assert axes["w1_quantized"] == 0
    assert held["w1_scale"].shape == (CHANNELS,)
    assert held["wf_scale"].shape == (5,)
    assert held["w1_quantized"].dtype == np.int8
    assert np.abs(held["w1_quantized"].astype(int)).max() == 127


def test_excluded_layers_stay_in_fp16_with_that_reason(small: Bench) -> None:
    artifact = small.build(exclude=("two", "fc"))
    assert precisions(artifact)["two"] == precisions(artifact)["fc"] == "fp16"
    assert reasons(artifact)["two"] == ON_REQUEST
    # The Add has no int8 layer left to fuse into, so nothing is quantized for it.
    assert not any("add1" in use for uses in pairs(artifact).values() for use in uses)


def test_a_tensor_of_which_the_range_leaves_too_little_stays_in_fp16(small: Bench) -> None:
    target = resolve(TARGET)
    place = small.folder / "cut.onnx"
    backend = backend_for(target, small.observed, {"r1": 0.3, "r0": 0.05})
    artifact = backend.build(small.prepared, small.observed, target.profile.scheme, place)
    assert precisions(artifact)["two"] == "fp16"
    assert precisions(artifact)["one"] == "int8"
    assert "cuts off 30% of its power" in reasons(artifact)["two"]


def test_nothing_left_is_refused(small: Bench) -> None:
    everything = ("stem", "one", "two", "three", "four", "shortcut", "fc")
    with pytest.raises(ModelError, match=rf"nothing in it was quantized.*{ON_REQUEST}"):
        small.build(exclude=everything)


def test_a_missing_range_is_refused(small: Bench) -> None:
    ranges = {name: span for name, span in small.observed.items() if name != "r1"}
    crippled = Bench(small.prepared, small.samples, ranges, small.folder)
    with pytest.raises(CalibrationError, match="'r1' has no range"):
        crippled.build()


def test_tiny_convolutions_and_vectors_stay_out(tmp_path: Path) -> None:
    nodes = """
        [tiny] t = Conv<pads = [1, 1, 1, 1]>(x, wt)
        [depthwise] d = Conv<group = 4, pads = [1, 1, 1, 1]>(t, wd)
        [wide] c = Conv<pads = [1, 1, 1, 1]>(d, wc)
        [pool] p = GlobalAveragePool(c)
        [flatten] f = Flatten(p)
        [vector] y = MatMul(f, wv)
    """
    weights = {
        "wt": random(4, 3, 3, 3),
        "wd": random(4, 1, 3, 3),
        "wc": random(CHANNELS, 4, 3, 3),
        "wv": random(CHANNELS, 1),
    }
    artifact = bench(tmp_path, model(nodes, weights, shape=(1, 3, 8, 8))).build()
    assert precisions(artifact) == {
        "tiny": "fp16",
        "depthwise": "int8",
        "wide": "int8",
        "pool": "fp16",
        "flatten": "fp16",
        "vector": "fp16",
    }
    assert "fewer than 16" in reasons(artifact)["tiny"]
    assert "bound by memory" in reasons(artifact)["vector"]


def test_a_concat_and_what_it_joins_have_one_scale(tmp_path: Path) -> None:
    nodes = """
        [a] a = Conv<pads = [1, 1, 1, 1]>(x, wa)
        [b] b = Conv<pads = [1, 1, 1, 1]>(a, wb)
        [join] j = Concat<axis = 1>(a, b)
        [c] y = Conv<pads = [1, 1, 1, 1]>(j, wc)
    """
    square = random(CHANNELS, CHANNELS, 3, 3)
    weights = {"wa": square, "wb": square, "wc": random(CHANNELS, 2 * CHANNELS, 3, 3)}
    artifact = bench(tmp_path, model(nodes, weights)).build()
    held = {t.name: numpy_helper.to_array(t) for t in onnx.load(artifact.model).graph.initializer}
    scales = [value for name, value in held.items() if name.startswith(("a_scale", "j_scale"))]
    assert len(scales) == 2
    assert scales[0] == scales[1]


def test_matrix_products_of_activations_have_both_operands_quantized(tmp_path: Path) -> None:
    nodes = """
        [project] q = MatMul(x, w)
        [transpose] t = Transpose<perm = [0, 2, 1]>(q)
        [scores] y = MatMul(q, t)
    """
    artifact = bench(tmp_path, model(nodes, {"w": random(8, 8)}, shape=(1, 6, 8))).build()
    assert precisions(artifact)["project"] == precisions(artifact)["scores"] == "int8"
    assert set(pairs(artifact)) == {"x", "q", "t"}


def test_a_model_of_tiny_layers_alone_is_quantized_with_a_note(tmp_path: Path) -> None:
    nodes = """
        [tiny] t = Conv<pads = [1, 1, 1, 1]>(x, w)
        [pool] p = GlobalAveragePool(t)
        [flatten] f = Flatten(p)
        [vector] y = MatMul(f, v)
    """
    net = model(nodes, {"w": random(4, 3, 3, 3), "v": random(4, 1)}, shape=(1, 3, 8, 8))
    artifact = bench(tmp_path, net).build()
    assert precisions(artifact)["tiny"] == precisions(artifact)["vector"] == "int8"
    assert artifact.notes[0].startswith("no layer is expected to be faster in int8 (tiny: it has 3 and 4 channels")
