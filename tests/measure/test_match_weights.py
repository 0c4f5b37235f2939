from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeq.measure.layers import instrumented_session
from edgeq.measure.match_weights import (
    WeightComparison,
    compare_weights,
    count_quantized_weights,
    match_weights,
    weight_values,
)
from edgeq.model.convert import from_proto
from edgeq.model.graph import GraphIndex
from edgeq.run.session import SessionSettings
from tests.graphs import proto
from tests.measure.quantized_models import SCHEMES, STATIC, WEIGHTS, Quantized, float_model, quantize_all, read_graph


def compared(reference: GraphIndex, graph: GraphIndex) -> dict[str, WeightComparison]:
    return {w.name: w for w in compare_weights(reference, graph, match_weights(reference, graph))}


FC = "[fc] y = MatMul(x, w)"


def graph_of(nodes: str, constants: dict[str, np.ndarray], *more: onnx.TensorProto) -> GraphIndex:
    model = proto(f"g (float[N, 4] x) => (float[] y) {{ {nodes} }}", constants, opset=21, ir_version=10)
    model.graph.initializer.extend(more)
    return GraphIndex(from_proto(model))


@pytest.mark.parametrize("form", SCHEMES)
def test_every_format_holds_the_same_weights(quantized: Quantized, form: str) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models[form])
    weights = compared(reference, graph)
    assert set(weights) >= set(WEIGHTS)
    assert [name for name in weights if name.endswith(".weight")] == list(WEIGHTS), "not in order of execution"
    biases = {name for name in weights if name.endswith(".bias")}
    assert len(biases) == (4 if form in STATIC else 0)
    assert count_quantized_weights(graph) == len(weights)
    for name in WEIGHTS:
        weight = weights[name]
        assert 30 < weight.sqnr_db < 60
        assert (weight.bits, weight.changed, weight.channel_axis) == (8, False, 0)
        assert weight.node == name.removesuffix(".weight")


@pytest.mark.parametrize(("form", "name"), [("u8s8", "stem.weight"), ("qoperator", "depthwise.weight")])
def test_figures_are_those_of_the_definition(quantized: Quantized, form: str, name: str) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models[form])
    weight = compared(reference, graph)[name]
    w = reference.constant(name).astype(np.float64)
    integers, scale, zero = (graph.constant(f"{name}_{part}") for part in ("quantized", "scale", "zero_point"))
    shape = (-1, 1, 1, 1)
    values = (integers.astype(np.float64) - zero.reshape(shape)) * scale.reshape(shape)
    by_channel = 10 * np.log10((w**2).sum((1, 2, 3)) / ((w - values) ** 2).sum((1, 2, 3)))
    assert weight.sqnr_db == pytest.approx(10 * np.log10((w**2).sum() / ((w - values) ** 2).sum()), abs=1e-3)
    assert weight.max_abs_error == pytest.approx(np.abs(w - values).max(), rel=1e-4)
    assert [channel for channel, _ in weight.worst_channels] == np.argsort(by_channel)[:3].tolist()
    assert weight.worst_channels[0][1] == pytest.approx(by_channel.min(), abs=1e-3)
    extrema = np.abs(w).max((1, 2, 3))
    assert weight.range_ratio == pytest.approx(extrema.max() / np.median(extrema))
    assert weight.per_channel


def test_a_transposed_weight_is_turned_back(quantized: Quantized) -> None:
    # Dynamic quantization replaces a Gemm with transB by a MatMul and transposes its weight.
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models["dynamic"])
    match = next(m for m in match_weights(reference, graph) if m.name == "head.weight")
    assert match.transposed
    assert [array.shape for array in weight_values(reference, graph, match)] == [(5, 16), (5, 16)]


def test_a_square_transposed_weight_is_recognised_by_its_values() -> None:
    w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    reference = graph_of("[fc] y = Gemm<transB = 1>(x, w)", {"w": w})
    step = np.float32(np.abs(w).max() / 127)
    integers = np.rint(w.T / step).astype(np.int8)
    graph = graph_of(
        "w_dq = DequantizeLinear(w_quantized, s, z) [fc] y = MatMul(x, w_dq)",
        {"w_quantized": integers, "s": step, "z": np.int8(0)},
    )
    (match,) = match_weights(reference, graph)
    assert match.transposed
    assert compare_weights(reference, graph, [match])[0].sqnr_db > 35


def test_a_float_weight_quantized_at_run_time() -> None:
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    reference = graph_of(FC, {"w": w})
    step = (np.abs(w).max(0) / 127).astype(np.float32)
    nodes = """
        q = QuantizeLinear<axis = 1>(w, s, z)
        dq = DequantizeLinear<axis = 1>(q, s, z)
        [fc] y = MatMul(x, dq)
    """
    graph = graph_of(nodes, {"w": w, "s": step, "z": np.zeros(3, np.int8)})
    (weight,) = compare_weights(reference, graph, match_weights(reference, graph))
    rounded = np.rint(w / step) * step
    assert weight.sqnr_db == pytest.approx(10 * np.log10((w**2).sum() / ((w - rounded) ** 2).sum()), abs=1e-3)
    assert weight.channel_axis == 1


def test_other_names_are_matched_by_the_node_that_reads_them() -> None:
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    reference = graph_of(FC, {"w": w})
    nodes = "other = DequantizeLinear(anything, s) [fc] y = MatMul(x, other)"
    step = np.float32(np.abs(w).max() / 127)
    graph = graph_of(nodes, {"anything": np.rint(w / step).astype(np.int8), "s": step})
    (match,) = match_weights(reference, graph)
    assert (match.name, match.quantized, match.params.low) == ("w", "anything", -128)


def test_a_blocked_4_bit_weight() -> None:
    w = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    reference = graph_of(FC, {"w": w})
    scale = (np.abs(w).reshape(2, 4, 3).max(1) / 7).astype(np.float32)
    integers = np.rint(w / scale.repeat(4, 0)).astype(np.int8)
    graph = graph_of(
        "dq = DequantizeLinear<axis = 0, block_size = 4>(w_quantized, s) [fc] y = MatMul(x, dq)",
        {"s": scale},
        helper.make_tensor("w_quantized", TensorProto.INT4, (8, 3), integers.ravel().tolist()),
    )
    (weight,) = compare_weights(reference, graph, match_weights(reference, graph))
    values = integers * scale.repeat(4, 0)
    assert weight.bits == 4
    assert weight.sqnr_db == pytest.approx(10 * np.log10((w**2).sum() / ((w - values) ** 2).sum()), abs=1e-3)


@pytest.mark.parametrize("form", ["u8s8", "u8u8-per-tensor", "qoperator"])
def test_weights_of_an_equalized_model_are_distinguished_from_rounded_ones(
    quantized: Quantized, tmp_path: Path, form: str
) -> None:
    factors = np.linspace(0.5, 2, 16)
    equalized = quantize_all(tmp_path, float_model(scales={"pointwise.weight": factors}), (form,))
    weights = compared(read_graph(quantized.prepared.path), read_graph(equalized.models[form]))
    assert {w.name for w in weights.values() if w.changed} == {"pointwise.weight"}


def test_a_weight_of_another_shape_is_none() -> None:
    reference = graph_of(FC, {"w": np.ones((4, 3), np.float32)})
    graph = graph_of(
        "dq = DequantizeLinear(w_quantized, s) [fc] y = MatMul(x, dq)",
        {"w_quantized": np.ones((4, 5), np.int8), "s": np.float32(1)},
    )
    assert match_weights(reference, graph) == ()
    assert count_quantized_weights(graph) == 1


def test_external_data_is_read_where_it_lies(quantized: Quantized, tmp_path: Path) -> None:
    model = onnx.load(quantized.prepared.path)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    outside = read_graph(tmp_path / "m.onnx")
    graph = read_graph(quantized.models["u8s8"])
    assert compared(outside, graph) == compared(read_graph(quantized.prepared.path), graph)


def test_weights_that_are_listed_as_inputs_are_weights(quantized: Quantized, tmp_path: Path) -> None:
    listed = []
    for path in (quantized.prepared.path, quantized.models["u8s8"]):
        old = onnx.load(path)
        old.ir_version = 3
        old.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in old.graph.initializer
        )
        onnx.save(old, tmp_path / path.name)
        listed.append(read_graph(tmp_path / path.name))
    reference, graph = listed
    assert graph.inputs == ("x",)
    assert compared(reference, graph) == compared(
        read_graph(quantized.prepared.path), read_graph(quantized.models["u8s8"])
    )
    instrumented_session(graph.model, optimization="none", settings=SessionSettings())
