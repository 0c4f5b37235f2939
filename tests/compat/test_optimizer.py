"""Test the optimizer step for transformers, followed by dynamic quantization of its output."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_dynamic as theirs
from onnxruntime.transformers.fusion_options import FusionOptions

from edgeq.compat import optimizer as module
from edgeq.compat.optimizer import check_same, command, optimize_model
from edgeq.compat.qdq_loss_debug import collect_activations, modify_model_output_intermediate_tensors
from edgeq.errors import CheckFailedError, ModelError, RuntimeUnavailableError, UsageError
from tests.compat.models import classifier
from tests.graphs import proto
from tests.tuning.recover.encoder import Sentences, encoder

OPERATORS = ["Attention", "EmbedLayerNormalization", "Gather", "MatMul"]


def operators(model: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(model).graph.node)


def answers(model: Path) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model)
    return [session.run(None, dict(sample.inputs))[0] for sample in Sentences()]


def sqnr_db(exact: list[np.ndarray], other: list[np.ndarray]) -> float:
    x, y = (np.concatenate([a.ravel() for a in arrays]).astype(np.float64) for arrays in (exact, other))
    return float(20 * np.log10(np.linalg.norm(x) / np.linalg.norm(x - y)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return encoder(tmp_path, unsqueeze_once=True).path


@pytest.mark.parametrize("more", [[], ["--opt_level", "0"], ["--opt_level=1", "--num_heads", "4"]])
def test_documented_command_line(bert: Path, tmp_path: Path, more: list[str]) -> None:
    """The command line works without PyTorch, and with a mask that onnxruntime's optimizer alone does not recognise."""
    output = tmp_path / "bert.opt.onnx"
    result = run("--input", bert, "--output", output, "--model_type", "bert", *more)
    assert result.exit_code == 0, result.output
    assert "1 Attention" in result.output
    assert operators(output)["Attention"] == 1
    assert sqnr_db(answers(bert), answers(output)) > 80


def test_documented_example(bert: Path, tmp_path: Path) -> None:
    """The example works: optimize_model with options, save_model_to_file, quantize_dynamic."""
    options = FusionOptions("bert")
    options.enable_embed_layer_norm = False
    made = optimize_model(str(bert), "bert", num_heads=4, hidden_size=32, optimization_options=options)
    output, quantized = tmp_path / "bert.opt.onnx", tmp_path / "bert.opt.quant.onnx"
    made.save_model_to_file(str(output))
    assert operators(output)["Attention"] == 1
    theirs(output, quantized, weight_type=QuantType.QInt8, extra_options={"DefaultTensorType": TensorProto.FLOAT})
    onnx.checker.check_model(quantized)
    assert operators(quantized)["QAttention"] == 1
    assert sqnr_db(answers(bert), answers(quantized)) > 20
    in_memory = optimize_model(onnx.load(bert), "bert", opt_level=0)
    assert in_memory.get_fused_operator_statistics()["Attention"] == 1


def embedding_model(path: Path) -> Path:
    """Write what the optimizer makes of a BERT's input: EmbedLayerNormalization, then Attention."""
    random, width = np.random.default_rng(0), 16
    weights = {
        "word": random.normal(size=(50, width)),
        "position": random.normal(size=(12, width)),
        "segment": random.normal(size=(2, width)),
        "gamma": np.ones(width),
        "beta": np.zeros(width),
        "qkv": random.normal(0, 0.2, (width, 3 * width)),
        "qkv.bias": random.normal(0, 0.2, 3 * width),
        "w": random.normal(0, 0.2, (width, 4)),
    }
    body = """g (int32[batch, length] ids, int32[batch, length] segments, int32[batch, length] mask)
        => (float[batch, length, 4] y) {
        [embed] embedded, length = com.microsoft.EmbedLayerNormalization(
            ids, segments, word, position, segment, gamma, beta, mask)
        [attention] attended = com.microsoft.Attention<num_heads = 2>(embedded, qkv, "qkv.bias", length)
        [matmul] y = MatMul(attended, w)
    }"""
    onnx.save(proto(body, {name: values.astype(np.float32) for name, values in weights.items()}, opset=14), path)
    return path


def quantize_dynamic() -> object:
    if importlib.util.find_spec("edgeq.compat.files") is None:
        pytest.skip("edgeq.compat.quantize_dynamic is not in this checkout")
    return importlib.import_module("edgeq.compat").quantize_dynamic


def test_attention_and_embeddings_are_quantized_as_by_the_older_tool(tmp_path: Path) -> None:
    source = embedding_model(tmp_path / "bert.opt.onnx")
    ours, other = tmp_path / "ours.onnx", tmp_path / "theirs.onnx"
    quantize_dynamic()(source, ours, op_types_to_quantize=OPERATORS, weight_type=QuantType.QUInt8)  # type: ignore[operator]
    theirs(source, other, op_types_to_quantize=OPERATORS, weight_type=QuantType.QUInt8)
    onnx.checker.check_model(ours)
    assert operators(ours) == operators(other)
    assert {"QAttention", "QEmbedLayerNormalization", "MatMulInteger"} <= set(operators(ours))
    one, two = ({t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer} for path in (ours, other))
    assert set(one) == set(two)
    for name, value in two.items():
        np.testing.assert_array_equal(one[name], value)
    feed = {
        "ids": np.arange(8, dtype=np.int32).reshape(2, 4),
        "segments": np.zeros((2, 4), np.int32),
        "mask": np.ones((2, 4), np.int32),
    }
    exact, made = ([onnxruntime.InferenceSession(p).run(None, feed)[0]] for p in (source, ours))
    assert sqnr_db(exact, made) > 20


def test_activations_of_fused_operators_can_be_saved(tmp_path: Path) -> None:
    """Activations of fused operators can be saved. onnx's own inference, which the older tool uses, stops at the first
    of them.
    """
    source, augmented = embedding_model(tmp_path / "bert.opt.onnx"), tmp_path / "augmented.onnx"
    modify_model_output_intermediate_tensors(source, augmented)
    onnx.checker.check_model(augmented)
    feed = {name: np.ones((2, 4), np.int32) for name in ("ids", "segments", "mask")}
    found = collect_activations(augmented, [feed])
    assert set(found) == {"embedded", "attended", "y"}
    assert found["attended"][0].shape == (2 * 4 * 16,)


def test_mistakes(bert: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    with pytest.raises(UsageError, match="model type"):
        optimize_model(bert, "nobody")
    with pytest.raises(UsageError):
        optimize_model(bert, "bert", nonsense=1)
    with pytest.raises(ModelError):
        optimize_model(tmp_path / "nowhere.onnx")
    for arguments, code in (
        (["--input", tmp_path / "nowhere.onnx", "--output", output], 3),
        (["--input", bert, "--output", output, "--nonsense"], 2),
        (["--input", bert, "--output", bert], 6),
    ):
        result = run(*arguments)
        assert result.exit_code == code, result.output
        assert not output.exists()


def test_missing_pytorch_is_named(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed")
    with pytest.raises(RuntimeUnavailableError, match="torch"):
        optimize_model(bert, "bert", opt_level=2)


def test_a_changed_answer_is_refused(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.load(bert)
    weight = next(t for t in model.graph.initializer if t.name == "v.w")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.1), "v.w"))
    spoiled = tmp_path / "spoiled.onnx"
    onnx.save(model, spoiled)
    with pytest.raises(CheckFailedError):
        check_same(bert, spoiled)
    check_same(bert, bert)

    def spoil(source: Path, draft: Path, extra_arguments: object) -> None:
        del source, extra_arguments
        onnx.save(model, draft)

    monkeypatch.setattr(module, "_theirs", spoil)
    result = run("--input", bert, "--output", tmp_path / "out.onnx")
    assert result.exit_code == CheckFailedError.exit_code
    assert not (tmp_path / "out.onnx").exists()


def test_a_model_without_a_transformer_stays_what_it_is(tmp_path: Path) -> None:
    source, output = classifier(tmp_path / "m.onnx"), tmp_path / "out.onnx"
    result = run("--input", source, "--output", output, "--model_type", "bert")
    assert result.exit_code == 0, result.output
    assert "fused: nothing" in result.output
    assert operators(output)["Conv"] == 1
