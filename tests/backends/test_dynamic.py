"""Test every mode of the CPU backend besides the static one, from a prepared model to an artifact that runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from edgeq.backends.base import Artifact
from edgeq.backends.cpu import CpuBackend
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import resolve
from edgeq.measure.coverage import Explain, measure_coverage
from edgeq.model.edit import from_proto, to_proto
from edgeq.model.int8_prediction import int8_rules, predict_int8
from edgeq.model.prepare import PreparedModel
from edgeq.prove.builds import explainer
from edgeq.prove.job import Built
from edgeq.quantization.recurrent import LEAST_MACS
from edgeq.quantization.weight_only import gemms_to_matmuls
from edgeq.run.session import open_session
from edgeq.scheme import IntegerType, Scheme
from tests.backends.networks import model_of, operators, prepared, recurrent, run, sqnr_db

pytestmark = pytest.mark.usefixtures("exact_kernels")

RANDOM = np.random.default_rng(0)
DYNAMIC = Scheme(
    mode="dynamic",
    dynamic_weight_types=dict.fromkeys(("MatMul", "Gemm", "LSTM", "GRU", "Gather"), "int8"),
    stored_types=("GRU", "RNN"),
)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)


def mlp() -> onnx.ModelProto:
    """Return x [N, 64] → MatMul 96 → Relu → LayerNormalization → Gemm 32 (transposed, with bias)."""
    nodes = """
        [first] a = MatMul(x, w1)
        [relu] b = Relu(a)
        [norm] c = LayerNormalization(b, g, s)
        [second] y = Gemm<transB = 1>(c, w2, bias)
    """
    weights = {
        "w1": normal(64, 96),
        "g": np.ones(96, np.float32),
        "s": np.zeros(96, np.float32),
        "w2": normal(32, 96),
        "bias": normal(32),
    }
    return model_of(nodes, "float[N, 64] x", weights)


def rows(count: int = 4) -> dict[str, np.ndarray]:
    return {"x": RANDOM.normal(0, 1, (count, 64)).astype(np.float32)}


@pytest.mark.parametrize(
    ("scheme", "kernel", "least_db"),
    [
        (DYNAMIC, "MatMulInteger", 30),
        (DYNAMIC.replace(per_channel=False), "MatMulInteger", 28),
        (Scheme(mode="weight-only", weight_bits=8, block_size=32), "MatMulNBits", 30),
        (Scheme(mode="weight-only", weight_bits=4, block_size=16), "MatMulNBits", 15),
    ],
)
def test_products_in_integers(tmp_path: Path, scheme: Scheme, kernel: str, least_db: float) -> None:
    model = prepared(mlp(), tmp_path)
    artifact = CpuBackend().build(model, {}, scheme, tmp_path / "q.onnx")
    assert operators(artifact.model).count(kernel) == 2
    data = rows()
    session = open_session(artifact.model, artifact.settings())
    made = session.run(None, data)[0]
    assert sqnr_db(run(model.path, data)["y"], made) > least_db
    assert artifact.model.stat().st_size < model.path.stat().st_size / 2


@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_that_are_no_matrix(tmp_path: Path, per_channel: bool) -> None:
    nodes = "[experts] a = MatMul(x, experts) [last] y = MatMul(a, w)"
    weights = {"experts": normal(4, 64, 32), "w": normal(32, 16)}
    model = prepared(model_of(nodes, "float[4, 3, 64] x", weights), tmp_path)
    artifact = CpuBackend().build(model, {}, DYNAMIC.replace(per_channel=per_channel), tmp_path / "q.onnx")
    data = {"x": normal(4, 3, 64)}
    assert sqnr_db(run(model.path, data)["y"], run(artifact.model, data)["y"]) > 28
    predicted = predict_int8(model.model, int8_rules("cpu"), artifact.scheme)
    assert [node.verdict for node in predicted] == (["float", "int8"] if per_channel else ["int8", "int8"])


def test_the_attention_of_opset_23_has_no_weights(tmp_path: Path) -> None:
    nodes = "".join(f"[project_{name}] {name} = MatMul(x, w{name}) " for name in "qkv")
    nodes += "[attend] y = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v)"
    weights = {f"w{name}": normal(32, 32) for name in "qkv"}
    net = model_of(nodes, "float[1, 6, 32] x", weights)
    net.opset_import[0].version = 23
    model = prepared(net, tmp_path)
    types = {**(DYNAMIC.dynamic_weight_types or {}), "Attention": "int8"}
    artifact = CpuBackend().build(model, {}, DYNAMIC.replace(dynamic_weight_types=types), tmp_path / "q.onnx")
    assert operators(artifact.model).count("Attention") == 1
    data = {"x": normal(1, 6, 32)}
    assert sqnr_db(run(model.path, data)["y"], run(artifact.model, data)["y"]) > 28


def explained(model: PreparedModel, artifact: Artifact) -> Explain:
    predicted = predict_int8(model.model, int8_rules("cpu"), artifact.scheme)
    return explainer(Built(resolve("cpu-any"), artifact), predicted)


def test_coverage_names_source_nodes_and_reasons(tmp_path: Path) -> None:
    model = prepared(mlp(), tmp_path)
    artifact = CpuBackend().build(model, {}, DYNAMIC.replace(exclude=("first",)), tmp_path / "q.onnx")
    explain = explained(model, artifact)
    found = measure_coverage(artifact.model, artifact.settings(), rows(4), model.model, explain)
    assert found.int8_macs == 4 * 96 * 32, "of the batch that ran"
    assert found.float_macs == 4 * 64 * 96
    reasons = {node.name: node.reason for node in found.float_nodes}
    assert reasons["first"] == "kept in float on request"
    assert reasons["norm"] == "LayerNormalization is not among the operator types that the scheme quantizes"
    assert "second" in {node.source for node in found.nodes if node.kind == "int8"}


def test_the_slow_fusion_is_left_out_where_there_is_something_to_fuse(tmp_path: Path) -> None:
    artifact = CpuBackend().build(prepared(mlp(), tmp_path), {}, DYNAMIC, tmp_path / "q.onnx")
    assert artifact.session_options == {"optimization.disable_specified_optimizers": "SkipLayerNormFusion"}
    other = tmp_path / "other"
    other.mkdir()
    plain = model_of("[only] y = MatMul(x, w)", "float[N, 64] x", {"w": normal(64, 96)})
    assert CpuBackend().build(prepared(plain, other), {}, DYNAMIC, other / "q.onnx").session_options == {}


def test_session_options_of_the_scheme_are_kept(tmp_path: Path) -> None:
    key = "optimization.disable_specified_optimizers"
    scheme = DYNAMIC.replace(session_options={key: "GeluFusion"})
    artifact = CpuBackend().build(prepared(mlp(), tmp_path), {}, scheme, tmp_path / "q.onnx")
    assert artifact.session_options[key] == "GeluFusion;SkipLayerNormFusion"


@pytest.mark.parametrize(("kind", "kernel"), [("LSTM", "DynamicQuantizeLSTM"), ("GRU", "Scan"), ("RNN", "RNN")])
def test_recurrent_layers(tmp_path: Path, kind: str, kernel: str) -> None:
    hidden = 256
    assert 3 * hidden * 2 * hidden > LEAST_MACS
    model = prepared(recurrent(kind, hidden=hidden, width=hidden, outputs=("y",)), tmp_path)
    scheme = DYNAMIC.replace(dynamic_weight_types={"LSTM": "int8", "GRU": "int8"})
    artifact = CpuBackend().build(model, {}, scheme, tmp_path / "q.onnx")
    assert kernel in operators(artifact.model)
    assert artifact.model.stat().st_size < 0.28 * model.path.stat().st_size
    data = {"x": RANDOM.normal(0, 1, (6, 2, hidden)).astype(np.float32)}
    session = open_session(artifact.model, artifact.settings())
    assert sqnr_db(run(model.path, data)["y"], session.run(None, data)[0]) > 28
    explain = explained(model, artifact)
    found = measure_coverage(artifact.model, artifact.settings(), data, model.model, explain)
    macs = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * hidden * 2 * hidden * 6 * 2
    assert found.int8_macs + found.float_macs == macs
    assert found.int8_mac_share == (0 if kind == "RNN" else 1)
    assert len(found.nodes) < 60, "the kernels of a loop are counted once each"


def test_a_narrow_gru_is_stored(tmp_path: Path) -> None:
    model = prepared(recurrent(hidden=64, width=64, outputs=("y",)), tmp_path)
    artifact = CpuBackend().build(model, {}, DYNAMIC, tmp_path / "q.onnx")
    assert operators(artifact.model) == ["Cast", "Mul", "Cast", "Mul", "GRU"]
    assert any("8-bit integers in the file" in note for note in artifact.notes)


def test_tables_become_integers(tmp_path: Path) -> None:
    nodes = '["look up"] a = Gather(table, ids) [product] y = MatMul(a, w)'
    model = model_of(nodes, "int64[N] ids", {"table": normal(200, 32), "w": normal(32, 16)})
    ready = prepared(model, tmp_path)
    data = {"ids": np.arange(7)}
    for number, scheme in enumerate((DYNAMIC, Scheme(mode="weight-only", block_size=32))):
        artifact = CpuBackend().build(ready, {}, scheme, tmp_path / f"q{number}.onnx")
        types = {t.data_type for t in onnx.load(artifact.model).graph.initializer if np.prod(t.dims) > 1000}
        assert types <= {TensorProto.INT8, TensorProto.UINT8}
        assert sqnr_db(run(ready.path, data)["y"], run(artifact.model, data)["y"]) > 28


@pytest.mark.parametrize(("weight_type", "least_db"), [("int8", 35), ("uint8", -1)])
def test_rows_of_a_table_have_their_scales(tmp_path: Path, weight_type: IntegerType, least_db: float) -> None:
    """Each row of an int8 table has its scale, because one scale would lose rows of small values. onnxruntime's
    quantizer writes unsigned tables.
    """
    table = normal(50, 32) * np.logspace(-4, 0, 50, dtype=np.float32)[:, None]
    nodes = """
        ["look up"] a = Gather(table, ids)
        [again] b = Gather(table, others)
        y = Concat<axis = 0>(a, b)
    """
    model = model_of(nodes, "int64[N] ids, int64[N] others", {"table": table})
    scheme = DYNAMIC.replace(dynamic_weight_types={"Gather": weight_type})
    artifact = CpuBackend().build(prepared(model, tmp_path), {}, scheme, tmp_path / "q.onnx")
    stored = {t.data_type for t in onnx.load(artifact.model).graph.initializer if np.prod(t.dims) > 1000}
    assert stored == {TensorProto.INT8 if weight_type == "int8" else TensorProto.UINT8}
    made = run(artifact.model, {"ids": np.arange(50), "others": np.arange(50)})["y"]
    assert min(sqnr_db(exact, row) for exact, row in zip(table, made[:50], strict=True)) > least_db
    assert np.array_equal(made[:50], made[50:])
    assert any("tables of 2 Gather" in note for note in artifact.notes) == (weight_type == "int8"), artifact.notes


def test_refuses_operators_without_a_dynamic_form(tmp_path: Path) -> None:
    ready, out = prepared(mlp(), tmp_path), tmp_path / "q.onnx"
    with pytest.raises(UsageError, match="no weight type for dynamic Conv"):
        CpuBackend().build(ready, {}, DYNAMIC.replace(op_types=("Conv",)), out)
    with pytest.raises(UsageError, match=r"no operator .Softmax. has an int8 form"):
        CpuBackend().build(ready, {}, DYNAMIC.replace(dynamic_weight_types={"Softmax": "int8"}), out)
    with pytest.raises(UsageError, match=r"no operator .Conv. has an int8 form"):
        CpuBackend().build(ready, {}, Scheme(mode="weight-only", op_types=("Conv",)), out)
    with pytest.raises(ModelError, match="no product with a constant matrix"):
        CpuBackend().build(ready, {}, Scheme(mode="weight-only", exclude=("first", "second")), out)


@pytest.mark.parametrize("options", ["", "<transB = 1>"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gemm_is_a_product_and_a_sum(options: str, bias: bool) -> None:
    weight = normal(16, 64) if options else normal(64, 16)
    node = f"[layer] y = Gemm{options}(x, w{', b' if bias else ''})"
    model = model_of(node, "float[N, 64] x", {"w": weight, "b": normal(16)} if bias else {"w": weight})
    data = rows()
    exact = run(model, data)["y"]
    graph = from_proto(model)
    assert gemms_to_matmuls(graph) == 1
    model = to_proto(graph)
    assert operators(model) == (["MatMul", "Add"] if bias else ["MatMul"])
    np.testing.assert_allclose(run(model, data)["y"], exact, rtol=1e-5, atol=1e-5)


def test_a_gemm_that_does_more_stays() -> None:
    for options in ("alpha = 2.0", "transA = 1"):
        model = model_of(f"[layer] y = Gemm<{options}>(x, w)", "float[64, 64] x", {"w": normal(64, 16)})
        assert gemms_to_matmuls(from_proto(model)) == 0
