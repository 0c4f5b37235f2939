"""4-bit weights in blocks: edgeq beside ONNX Runtime's own MatMulNBitsQuantizer, which rounds between extremes.

    python benchmarks/blocks.py [--only decoder minilm] [--minilm MODEL.onnx] [--layers N] [--json FILE]

minilm: Spearman, bytes and latency beside the quantizer without an option; its model is made by shared/data's
make_model.py. Decoder: about 100 million weights of structure (low rank, channels of unlike size, heavy tails), made
here from a seed; its figure is the divergence of the next token's distribution from float32's, in nats a token (the
logarithm of what the perplexity grows by), all contenders with blocks of 32 and zero points. "exhaustive" has, in each
block, the best of a fine grid of ranges. Fifteen minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from contenders import edgeq_json
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from sequence import Contender, accuracy, cases, latencies
from tasks import shared_data

from edgeq.backends.block_products import find_blocks, store_blocks
from edgeq.backends.block_weights import BlockWeights, fit_blocks
from edgeq.model.load import read_model, save_model
from edgeq.session import SessionSettings, open_session

WIDTH, HEADS, VOCABULARY, BLOCK, TOKENS = 768, 12, 8192, 32, 96
CALIBRATION, JUDGED = 16, 12
Floats = NDArray[np.float32]


def structured(random: np.random.Generator, rows: int, columns: int) -> Floats:
    """A matrix whose products keep the size of what goes in."""
    rank = min(rows, columns) // 6
    low_rank = random.normal(size=(rows, rank)) @ random.normal(size=(rank, columns)) / np.sqrt(rank)
    whole = (low_rank + 0.5 * random.standard_t(4, (rows, columns))) * np.exp(0.4 * random.normal(size=columns))
    return np.asarray(whole / (np.sqrt(rows) * whole.std()), np.float32)


def decoder(path: Path, layers: int) -> Path:
    """ids int64 [1, s] → logits float32 [1, s, vocabulary]; each layer reads what is before it and itself."""
    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    held: dict[str, NDArray[Any]] = {
        "table": structured(random, VOCABULARY, WIDTH) * np.float32(np.sqrt(VOCABULARY)),
        "split": np.array([0, 0, HEADS, WIDTH // HEADS]),
        "joined": np.array([0, 0, WIDTH]),
        "scale": np.float32((WIDTH // HEADS) ** -0.5),
    }

    def node(op_type: str, inputs: list[str], made: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, inputs, [made], name=made, **attributes))
        return made

    def product(source: str, made: str, rows: int, columns: int, gain: float = 1.0) -> str:
        held[f"{made}.w"] = structured(random, rows, columns) * np.float32(gain)
        return node("MatMul", [source, f"{made}.w"], made)

    def norm(source: str, made: str) -> str:
        held[f"{made}.g"] = np.exp(0.3 * random.normal(size=WIDTH)).astype(np.float32)
        held[f"{made}.b"] = np.zeros(WIDTH, np.float32)
        return node("LayerNormalization", [source, f"{made}.g", f"{made}.b"], made)

    def heads(source: str, made: str, perm: list[int]) -> str:
        return node("Transpose", [node("Reshape", [source, "split"], f"{made}.r")], made, perm=perm)

    x = node("Gather", ["table", "ids"], "embedded")
    held["mask"] = np.triu(np.full((TOKENS, TOKENS), -1e9, np.float32), 1)
    for i in range(layers):
        n = norm(x, f"l{i}.n1")
        q = heads(product(n, f"l{i}.q", WIDTH, WIDTH), f"l{i}.qh", [0, 2, 1, 3])
        k = heads(product(n, f"l{i}.k", WIDTH, WIDTH), f"l{i}.kh", [0, 2, 3, 1])
        v = heads(product(n, f"l{i}.v", WIDTH, WIDTH), f"l{i}.vh", [0, 2, 1, 3])
        scores = node("Mul", [node("MatMul", [q, k], f"l{i}.qk"), "scale"], f"l{i}.s")
        weights = node("Softmax", [node("Add", [scores, "mask"], f"l{i}.m")], f"l{i}.a", axis=-1)
        mixed = node("Transpose", [node("MatMul", [weights, v], f"l{i}.av")], f"l{i}.t", perm=[0, 2, 1, 3])
        out = product(node("Reshape", [mixed, "joined"], f"l{i}.j"), f"l{i}.o", WIDTH, WIDTH, 0.5)
        x = node("Add", [x, out], f"l{i}.x1")
        up = product(norm(x, f"l{i}.n2"), f"l{i}.up", WIDTH, 4 * WIDTH)
        x = node("Add", [x, product(node("Relu", [up], f"l{i}.relu"), f"l{i}.down", 4 * WIDTH, WIDTH)], f"l{i}.x2")
    product(norm(x, "final"), "logits", WIDTH, VOCABULARY, 2.0)
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, TOKENS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, TOKENS, VOCABULARY])],
        [numpy_helper.from_array(values, name) for name, values in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def nearest(model: Path, output: Path, **options: Any) -> Path:
    quantizer = MatMulNBitsQuantizer(onnx.load(model), **options)
    quantizer.process()
    onnx.save(quantizer.model.model, output)
    return output


def in_blocks(model: Path, output: Path, *options: str) -> Path:
    edgeq_json("quantize", str(model), "--weight-only", "4", "--no-timing", "-o", str(output), *options)
    return output


def exhaustive(matrix: Floats) -> BlockWeights:
    """Of every pair of ends on a grid of 0.02, each with its least-squares scale, the best for each block."""
    found = fit_blocks(matrix, 4, BLOCK)
    padded = np.zeros((found.integers[0].size, matrix.shape[1]), np.float32)
    padded[: len(matrix)] = matrix
    x = padded.T.reshape(-1, BLOCK)
    scales, zeros = found.scales.ravel().copy(), found.zero_points.ravel().astype(np.float32)
    for first in range(0, len(x), 2048):
        part = slice(first, first + 2048)
        _exhaust(x[part], scales[part], zeros[part])
    integers = np.clip(np.rint(x / scales[:, None] + zeros[:, None]), 0, 15).astype(np.uint8)
    shape = found.scales.shape
    return BlockWeights(
        found.k, 4, integers.reshape(*shape, BLOCK), scales.reshape(shape), zeros.astype(np.uint8).reshape(shape), False
    )


def _exhaust(x: Floats, scales: Floats, zeros: Floats) -> None:
    low, high = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    best = np.full(len(x), np.inf)
    for ends in itertools.product(np.arange(0.6, 1.041, 0.02, dtype=np.float32), repeat=2):
        scale = np.maximum((ends[1] * high - ends[0] * low) / 15, np.float32(1e-30))
        zero = np.clip(np.rint(-ends[0] * low / scale), 0, 15)
        d = np.clip(np.rint(x / scale[:, None]), -zero[:, None], 15 - zero[:, None])
        power = (d * d).sum(1)
        scale = np.where(power > 0, (x * d).sum(1) / np.maximum(power, 1), scale).astype(np.float32)
        safe = np.where(scale == 0, np.float32(1), scale)
        d = np.clip(np.rint(x / safe[:, None]), -zero[:, None], 15 - zero[:, None])
        error = ((x - safe[:, None] * d) ** 2).sum(1)
        better = error < best
        best[better], scales[better], zeros[better] = error[better], safe[better], zero[better]


def divergence(model: Path, reference: list[Floats], ids: list[NDArray[np.int64]]) -> float:
    """Mean over tokens of KL(float32 || quantized), nats."""
    session = open_session(model, SessionSettings())
    total = []
    for wanted, sample in zip(reference, ids, strict=True):
        made = log_softmax(session.run(None, {"ids": sample})[0])
        total.append((np.exp(wanted) * (wanted - made)).sum(-1).mean())
    return float(np.mean(total))


def log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def decoder_figures(work: Path, layers: int) -> dict[str, float]:
    model = decoder(work / "decoder.onnx", layers)
    random = np.random.default_rng(1)
    draws = [random.integers(0, VOCABULARY, (1, TOKENS)) for _ in range(CALIBRATION + JUDGED)]
    data = work / "calibration.npz"
    np.savez(data, ids=np.concatenate(draws[:CALIBRATION]))
    session = open_session(model)
    judged = draws[CALIBRATION:]
    reference = [log_softmax(session.run(None, {"ids": ids})[0]) for ids in judged]
    del session
    common = ("--data", str(data), "--op-type", "MatMul")
    made = {
        "round to nearest": nearest(model, work / "nearest.onnx", bits=4, block_size=BLOCK, accuracy_level=4),
        "edgeq": in_blocks(model, work / "edgeq.onnx", *common),
        "edgeq, rounded": in_blocks(model, work / "rounded.onnx", *common, "--recover", "weight-rounding"),
    }
    searched = read_model(made["edgeq"])
    floats = read_model(model).graph.initializers
    for name, product in find_blocks(searched).items():
        tensor = floats[f"{name}.w"].const_value
        assert tensor is not None
        store_blocks(product, exhaustive(tensor.numpy()))
    made["exhaustive"] = work / "exhaustive.onnx"
    save_model(searched, made["exhaustive"])
    figures = {name: divergence(path, reference, judged) for name, path in made.items()}
    print(f"\ndecoder, {layers} layers: divergence from float32, nats a token")
    for name, value in figures.items():
        print(f"  {name:20} {value:9.5f}  {value / figures['exhaustive']:6.3f} of exhaustive")
    bar = min(1.1 * figures["exhaustive"], figures["round to nearest"])
    for name in ("edgeq", "edgeq, rounded"):
        met = "met   " if figures[name] <= bar else "MISSED"
        print(f"  {met} {name}: at most {bar:.5f} (1.1 of exhaustive, and the nearest's)")
    return figures


def minilm_figures(model: Path, work: Path) -> dict[str, Any]:
    root = shared_data()
    assert root is not None, "shared/data is not beside this checkout"
    (case,) = (c for c in cases(root, model, work) if c.name == "minilm_l6")
    data = ("--data", str(case.calibration), "--preprocess", case.preprocess)
    contenders = [
        Contender("float32", model),
        Contender("ONNX Runtime's default", nearest(model, work / "nearest.onnx")),
        Contender("edgeq", in_blocks(model, work / "edgeq.onnx", *data)),
        Contender("edgeq, rounded", in_blocks(model, work / "rounded.onnx", *data, "--recover", "weight-rounding")),
    ]
    metric = {c.name: accuracy(case, c) for c in contenders}
    p50 = latencies(case, contenders, 3.0, 1)
    size = {c.name: c.bytes() for c in contenders}
    peer = "ONNX Runtime's default"
    lost = {name: metric["float32"] - value for name, value in metric.items()}
    print(f"\nminilm_l6: Spearman, bytes, p50 in ms of {', '.join(p50)}")
    for name, value in metric.items():
        times = " ".join(f"{shape[name]:8.2f}" for shape in p50.values())
        print(f"  {name:24} {value:8.4f} {size[name]:11,} {times}")
    for name in ("edgeq", "edgeq, rounded"):
        slowest = max(shape[name] / shape[peer] for shape in p50.values())
        most = max(0.0, lost[peer] / 2)  # the peer may lose nothing
        for text, met in (
            (f"loses {lost[name]:.4f} (bar: {most:.4f}, half of what {peer} loses)", lost[name] <= most),
            (f"{size[name] / size[peer]:.2f} of its bytes (bar: 1.1)", size[name] <= 1.1 * size[peer]),
            (f"{slowest:.2f} of its latency (bar: 1.05)", slowest <= 1.05),
        ):
            print(f"  {'met   ' if met else 'MISSED'} {name}: {text}")
    return {"accuracy": metric, "bytes": size, "p50_ms": p50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("decoder", "minilm"), default=("decoder", "minilm"))
    parser.add_argument("--minilm", type=Path, help="the model that minilm_l6/make_model.py made")
    parser.add_argument("--layers", type=int, default=12, help="of the decoder (12)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if "decoder" in options.only:
            results["decoder"] = decoder_figures(work, options.layers)
        if "minilm" in options.only and options.minilm is not None:
            results["minilm"] = minilm_figures(options.minilm, work)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
