from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from edgeq.errors import HardwareError
from edgeq.run.session import SessionSettings, open_session

from .nets import CHANNELS, Bench, bench, model, precisions, random, reasons, residual


def conv_and(rest: str, outputs: tuple[str, ...] = ("y",), **weights: object) -> onnx.ModelProto:
    """Return a layer whose rectified result is "c", followed by `rest`."""
    layer = """
        [conv] c0 = Conv<pads = [1, 1, 1, 1]>(x, w)
        [first] c = Relu(c0)
    """
    return model(layer + rest, {"w": random(CHANNELS, CHANNELS, 3, 3), **weights}, outputs=outputs)


def types(artifact_model: Path) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(onnx.load(artifact_model), strict_mode=True).graph
    return {v.name: v.type.tensor_type.elem_type for v in [*inferred.value_info, *inferred.input, *inferred.output]}


def test_inputs_and_outputs_keep_their_types(tmp_path: Path) -> None:
    built = bench(tmp_path, residual()).build()
    kinds = types(built.model)
    assert kinds["x"] == kinds["y"] == TensorProto.FLOAT
    assert kinds["c1"] == TensorProto.FLOAT16


def test_no_cast_parts_a_pair_from_its_layer(tmp_path: Path) -> None:
    graph = onnx.load(bench(tmp_path, residual()).build().model).graph
    made = {o: n.op_type for n in graph.node for o in n.output}
    for layer in (n for n in graph.node if n.op_type in ("Conv", "Gemm")):
        assert [made[name] for name in layer.input[:2]] == ["DequantizeLinear"] * 2


def test_a_tensor_over_the_limit_keeps_its_nodes_in_fp32(tmp_path: Path) -> None:
    proto = conv_and(
        """
        ["blow-up"] m = Mul(c, big)
        [shrink] s = Mul(m, small)
        [relu] y = Relu(s)
    """,
        big=np.float32(3e4),
        small=np.float32(1e-4),
    )
    built = bench(tmp_path, proto).build()
    kinds = precisions(built)
    assert (kinds["conv"], kinds["blow-up"], kinds["shrink"], kinds["relu"]) == ("int8", "fp32", "fp32", "fp16")
    assert "tensor 'm' reaches" in reasons(built)["blow-up"]
    assert any("blow-up stays in fp32" in note for note in built.notes)


def test_constants_that_overflow_or_vanish_keep_their_nodes_in_fp32(tmp_path: Path) -> None:
    proto = conv_and(
        """
        [guard] e = Add(c, epsilon)
        [cap] y = Min(e, ceiling)
    """,
        epsilon=np.float32(1e-12),
        ceiling=np.float32(1e6),
    )
    built = bench(tmp_path, proto).build()
    assert precisions(built)["guard"] == precisions(built)["cap"] == "fp32"
    assert "which is 0 in float16" in reasons(built)["guard"]
    assert "more than the range of float16" in reasons(built)["cap"]


def test_a_layer_whose_result_overflows_is_int8_with_an_fp32_result(tmp_path: Path) -> None:
    built = bench(tmp_path, conv_and("[root] y = Sqrt(c)"), scale=1e5).build()
    assert types(built.model)["c"] == TensorProto.FLOAT
    assert precisions(built)["conv"] == "int8"
    assert np.isfinite(open_session(built.simulation).run(None, {"x": 1e5 * random(1, CHANNELS, 8, 8)})[0]).all()


def test_a_residual_add_that_overflows_takes_its_layer_along(tmp_path: Path) -> None:
    """An Add that overflows float16 runs in float32, and its layer as well. A Cast between the two would prevent their
    fusion, and the pair on the skip branch would serve nothing.
    """
    nodes = """
        [stem] c0 = Conv<pads = [1, 1, 1, 1]>(x, w0)
        [relu] r0 = Relu(c0)
        [big] m = Mul(r0, big)
        [main] c1 = Conv<pads = [1, 1, 1, 1]>(r0, w1)
        [add] y = Add(m, c1)
    """
    weights = {f"w{i}": random(CHANNELS, CHANNELS, 3, 3, seed=i) for i in range(2)}
    built = bench(tmp_path, model(nodes, {**weights, "big": np.float32(1e4)})).build()
    kinds = types(built.model)
    assert kinds["c1"] == kinds["y"] == TensorProto.FLOAT
    assert precisions(built)["add"] == precisions(built)["main"] == "int8"
    assert reasons(built)["add"] == "fused into main"


def test_operators_without_float16_get_float32(tmp_path: Path) -> None:
    proto = conv_and(
        '[resize] y = Resize<mode = "nearest">(c, "", scales)',
        scales=np.array([1, 1, 2, 2], np.float32),
    )
    built = bench(tmp_path, proto).build()
    graph = onnx.load(built.model).graph
    resize = next(n for n in graph.node if n.op_type == "Resize")
    held = {t.name: t.data_type for t in graph.initializer}
    assert held[resize.input[2]] == TensorProto.FLOAT
    assert types(built.model)["c"] == TensorProto.FLOAT16


def test_bodies_of_branches_read_what_they_did(tmp_path: Path) -> None:
    proto = conv_and(
        """
        [relu] r = Relu(c)
        [peak] peak = ReduceMax<keepdims = 0>(r)
        [compare] "is-positive" = Greater(peak, zero)
        [if] y = If("is-positive")<
            then_branch = then () => (float[] twice) { [twice] twice = Mul(r, two) },
            else_branch = else () => (float[] minus) { [minus] minus = Neg(r) }
        >
    """,
        two=np.float32(2),
        zero=np.float32(0),
    )
    built = bench(tmp_path, proto).build()
    assert precisions(built)["if"] == precisions(built)["relu"] == "fp32"
    x = random(1, CHANNELS, 8, 8)
    assert open_session(built.simulation, built.simulation_settings).run(None, {"x": x})[0].max() > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("residual"), residual())


def test_float32_is_left_alone(small: Bench) -> None:
    built = small.build(rest="float32")
    assert all(n.op_type != "Cast" for n in onnx.load(built.model).graph.node)
    assert [alternative.name for alternative in built.alternatives] == ["cpu-float32"]


def test_bfloat16_where_the_gpu_has_it(small: Bench) -> None:
    from edgeq.hardware.target import resolve

    with pytest.raises(HardwareError, match=r"nvidia-t4 has compute capability 7\.5, but bfloat16 needs 8\.0"):
        small.build(rest="bfloat16")
    built = small.build(target=resolve("nvidia-a100"), rest="bfloat16")
    assert types(built.model)["c1"] == TensorProto.BFLOAT16
    assert built.provider_options["trt_bf16_enable"] == "1"
    x = {"x": random(1, CHANNELS, 8, 8)}
    exact = open_session(small.prepared.path).run(None, x)[0]
    close = open_session(built.simulation, SessionSettings(optimization="none")).run(None, x)[0]
    assert np.linalg.norm(close - exact) < 0.1 * np.linalg.norm(exact)
