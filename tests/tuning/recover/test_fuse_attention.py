from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.backends.cpu import CpuBackend
from edgeq.model.convert import to_bytes
from edgeq.model.edit import set_constant
from edgeq.model.graph import GraphIndex
from edgeq.model.load import load_model
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.tuning.recover import fuse_attention as module
from edgeq.tuning.recover.fuse_attention import fuse_attention, may_have_attention, split_unsqueezes
from edgeq.tuning.recover.methods.smoothquant import find_product_groups
from tests.backends.networks import operators, prepared, recurrent, sqnr_db
from tests.tuning.recover.encoder import Sentences, encoder

pytestmark = pytest.mark.usefixtures("exact_kernels")


def answer(model: Path) -> np.ndarray:
    session = open_session(model)
    return np.concatenate([session.run(None, dict(s.inputs))[0].ravel() for s in Sentences()])


@pytest.mark.parametrize("unsqueeze_once", [False, True])
def test_attention_becomes_one_node(tmp_path: Path, unsqueeze_once: bool) -> None:
    plain = encoder(tmp_path, unsqueeze_once=unsqueeze_once)
    fused, count = fuse_attention(plain, Sentences(), tmp_path / "fused.onnx")
    assert count == 1
    assert operators(load_model(fused.path)).count("Attention") == 1
    assert "Softmax" not in operators(fused.path)
    assert sqnr_db(answer(plain.path), answer(fused.path)) > 80


def test_padding_on_the_left_is_masked_too(tmp_path: Path) -> None:
    plain = encoder(tmp_path)
    fused, _ = fuse_attention(plain, Sentences(), tmp_path / "fused.onnx")
    feed = dict(next(iter(Sentences())).inputs)
    feed["mask"] = np.array([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]], np.int64)
    exact, made = (open_session(m.path).run(None, feed)[0] for m in (plain, fused))
    kept = feed["mask"].astype(bool)
    assert sqnr_db(exact[kept], made[kept]) > 80


def test_it_becomes_qattention(tmp_path: Path) -> None:
    fused, _ = fuse_attention(encoder(tmp_path), Sentences(), tmp_path / "fused.onnx")
    scheme = Scheme(mode="dynamic", dynamic_weight_types={"MatMul": "int8", "Attention": "int8"})
    artifact = CpuBackend().build(fused, {}, scheme, tmp_path / "q.onnx")
    assert operators(artifact.model).count("QAttention") == 1
    assert sqnr_db(answer(fused.path), answer(artifact.model)) > 20


def test_its_input_can_be_smoothed(tmp_path: Path) -> None:
    fused, _ = fuse_attention(encoder(tmp_path), Sentences(), tmp_path / "fused.onnx")
    assert "norm0" in {group.tensor for group in find_product_groups(fused.model)}


def test_a_model_without_attention_comes_back(tmp_path: Path) -> None:
    plain = prepared(recurrent(), tmp_path)
    assert not may_have_attention(plain.model)
    assert fuse_attention(plain, Sentences(), tmp_path / "fused.onnx") == (plain, 0)
    assert not (tmp_path / "fused.onnx").exists()


def test_a_fusion_that_changes_the_answer_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = encoder(tmp_path)
    assert may_have_attention(plain.model)

    def spoil(model: ir.Model) -> int:
        weight = model.graph.initializers["v.w"]
        set_constant(weight, GraphIndex(model).constant("v.w") * np.float32(1.01))
        return 0

    monkeypatch.setattr(module, "split_unsqueezes", spoil)
    assert fuse_attention(plain, Sentences(), tmp_path / "fused.onnx") == (plain, 0)
    assert not (tmp_path / "fused.onnx").exists()


def test_one_unsqueeze_an_axis(tmp_path: Path) -> None:
    plain = encoder(tmp_path, unsqueeze_once=True)
    model = plain.model.clone()
    assert split_unsqueezes(model) == 1
    path = tmp_path / "split.onnx"
    path.write_bytes(to_bytes(model))
    assert operators(path).count("Unsqueeze") == 2
    onnx.checker.check_model(onnx.load(path), full_check=True)
    np.testing.assert_array_equal(answer(path), answer(plain.path))
    assert split_unsqueezes(model) == 0
