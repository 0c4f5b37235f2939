"""Test tables of embeddings: a table tied to a product reads the product's integers, and others have a scale for each
row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.backends.base import Artifact
from edgeq.backends.cpu import CpuBackend
from edgeq.calibration.ranges import Range
from edgeq.model.compatibility import compatibility
from edgeq.model.graph import constant
from edgeq.model.load import read_model
from edgeq.quantization.block_weights import block_products, read_blocks
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import SYMMETRIC_BLOCKS, Scheme
from tests.backends.networks import operators, prepared, sqnr_db
from tests.graphs import proto

ROWS = 40
IDS = {"ids": np.array([[0, 3, ROWS - 1, -1], [7, 7, 0, 1]])}
HEADS = {
    "MatMul": ("h = Transpose<perm = [1, 0]>(t) [head] y = MatMul(r, h)", ""),
    "Gemm": ("f = Reshape(r, flat) [head] y = Gemm<transB = 1>(f, t)", ", int64[2] flat = {-1, WIDTH}"),
}


def net(head: str, width: int, *, tied: bool = True) -> onnx.ModelProto:
    nodes, more = HEADS[head]
    body = f"""g (int64[B,S] ids) => (float[] y, float[B,S,{width}] e) <float[{ROWS},{width}] t, float[{ROWS},{width}] o
        {more.replace("WIDTH", str(width))}> {{
        [embed] e = Gather(t, ids) [relu] r = Relu(e) {nodes if tied else nodes.replace("(t)", "(o)")}
    }}"""
    model = proto(body)
    random = np.random.default_rng(0)
    for name in "to":
        values = random.standard_t(4, (ROWS, width)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def built(folder: Path, model: onnx.ModelProto, bits: int, size: int = 32, **options: object) -> Artifact:
    scheme = Scheme(mode="weight-only", weight_bits=bits, block_size=size, weight_symmetric=SYMMETRIC_BLOCKS[bits])
    return CpuBackend().build(prepared(model, folder), {}, scheme.replace(**options), folder / "q.onnx")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (4, True), (8, True), (8, False)])
def test_a_tied_table_is_that_of_the_product(tmp_path: Path, head: str, bits: int, symmetric: bool) -> None:
    model = net(head, 128)
    artifact = built(tmp_path, model, bits, weight_symmetric=symmetric)
    found = operators(artifact.model)
    assert (found.count("GatherBlockQuantized"), found.count("Gather")) == (1, 0)
    file = read_model(artifact.model)
    table = read_blocks(block_products(file)["head"]).matrix().T
    for optimization in ("all", "none"):
        session = open_session(artifact.model, SessionSettings(optimization=optimization))
        np.testing.assert_allclose(session.run(["e"], IDS)[0], table[IDS["ids"]], rtol=1e-5, atol=1e-6)
    exact = open_session(tmp_path / "work" / "prepared.onnx").run(["y"], IDS)[0]
    assert sqnr_db(exact, session.run(["y"], IDS)[0]) > (15 if bits == 4 else 30)
    assert artifact.model.stat().st_size < ROWS * 128 * bits / 8 * 1.4 + 2000
    assert "share the integers of a product: 1; they need onnxruntime 1.23" in " ".join(artifact.notes)
    assert compatibility(file, "x86_64").requirements[0].since == "1.23"


@pytest.mark.parametrize(
    ("model", "options", "types"),
    [
        (net("MatMul", 128, tied=False), {}, ["int8", "float32"]),
        (net("MatMul", 96), {}, ["int8", "float32"]),  # three blocks of 4 bits: 1.5 bytes of zero points for each row
        (net("MatMul", 100), {}, ["int8", "float32"]),
        (net("MatMul", 128), {"op_types": ("MatMul",)}, ["float32"]),
        (net("MatMul", 128), {"exclude": ("embed",)}, ["float32"]),
    ],
    ids=["not tied", "half a byte", "half a block", "products only", "excluded"],
)
def test_tables_that_share_no_weight(
    tmp_path: Path, model: onnx.ModelProto, options: dict[str, object], types: list[str]
) -> None:
    artifact = built(tmp_path, model, 4, **options)
    gathers = [node for node in read_model(artifact.model).graph if node.op_type.startswith("Gather")]
    tables = [constant(node.inputs[0]) for node in gathers]
    assert [str(table.dtype) for table in tables if table is not None] == types
    exact = open_session(tmp_path / "work" / "prepared.onnx").run(["e"], IDS)[0]
    assert sqnr_db(exact, open_session(artifact.model).run(["e"], IDS)[0]) > 38


def test_rows_of_unlike_size_each_have_their_scale(tmp_path: Path) -> None:
    """Each row has its scale. With one scale for the table, small rows were lost: 15 dB for minilm_l6's position
    embeddings.
    """
    model = net("MatMul", 128, tied=False)
    table = next(t for t in model.graph.initializer if t.name == "t")
    values = numpy_helper.to_array(table) * np.logspace(-4, 0, ROWS, dtype=np.float32)[:, None]
    values[3] = 0
    table.CopyFrom(numpy_helper.from_array(values, "t"))
    artifact = built(tmp_path, model, 8)
    made = open_session(artifact.model).run(["e"], IDS)[0]
    for exact, row in zip(values[IDS["ids"]].reshape(-1, 128), made.reshape(-1, 128), strict=True):
        assert np.array_equal(exact, row) or sqnr_db(exact, row) > 35


def test_static_quantization_stores_tables_in_rows(tmp_path: Path) -> None:
    """The scales of the rows stay float32, however many they are."""
    table = np.random.default_rng(0).standard_t(4, (2048, 32)).astype(np.float32)
    model = proto(
        """g (int64[B,S] ids) => (float[B,S,8] y) {
            e = Gather(t, ids) [head] y = MatMul(e, w)
        }""",
        {"t": table, "w": np.random.default_rng(1).normal(0, 1, (32, 8)).astype(np.float32)},
    )
    ready = prepared(model, tmp_path)
    spans = {"e": Range(float(table.min()), float(table.max())), "y": Range(-30, 30)}
    artifact = CpuBackend().build(ready, spans, Scheme(stored_types=("Gather",)), tmp_path / "q.onnx")
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(artifact.model).graph.initializer}
    assert (stored["t_Q8"], stored["t_scales"]) == (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT)
    exact, made = (open_session(path).run(None, IDS)[0] for path in (ready.path, artifact.model))
    assert sqnr_db(exact, made) > 28
