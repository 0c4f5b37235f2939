"""Compare edgeq's 4-bit weights in blocks with ONNX Runtime's own MatMulNBitsQuantizer, which rounds between the
extremes of each block.

    python benchmarks/blocks.py [--only decoder minilm] [--minilm MODEL.onnx] [--layers N] [--json FILE]

minilm: Spearman correlation, bytes and latency, compared with the quantizer without options. make_model.py of
shared/data makes the model. For each shape, `edgeq quantize` makes a model from samples of that shape, because the
samples decide the type in which products are computed. Timings use all cores.

decoder: about 100 million structured weights (low rank, channels of different magnitudes, heavy tails), made here from
a seed. The benchmark measures how far the distribution of the next token diverges from that of float32, in nats per
token. This is the logarithm of the factor by which perplexity grows. All contenders have blocks of 32 and zero points.
"exhaustive" uses, in each block, the best range of a fine grid. This search covers an eighth of each product's outputs,
chosen at random. For a fair comparison, the divergence of each contender is also measured with only these outputs in
blocks.

Each part takes about five minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from contenders import edgeq_json
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from sequence import Case, Contender, Feed, accuracy, cases, latencies
from tasks import shared_data

from edgeq.data.samples import open_samples
from edgeq.model.load import model_signature, read_model
from edgeq.quantization.block_products import find_blocks, read_blocks
from edgeq.run.session import SessionSettings, open_session

WIDTH, HEADS, VOCABULARY, BLOCK, TOKENS = 768, 12, 8192, 32, 96
CALIBRATION, JUDGED = 16, 12
# The exhaustive search covers one in this many outputs of each product.
PART = 8
Floats = NDArray[np.float32]


def structured(random: np.random.Generator, rows: int, columns: int) -> Floats:
    """Return a random matrix whose product with a vector has about the same magnitude as the vector."""
    rank = min(rows, columns) // 6
    low_rank = random.normal(size=(rows, rank)) @ random.normal(size=(rank, columns)) / np.sqrt(rank)
    whole = (low_rank + 0.5 * random.standard_t(4, (rows, columns))) * np.exp(0.4 * random.normal(size=columns))
    return np.asarray(whole / (np.sqrt(rows) * whole.std()), np.float32)


def decoder(path: Path, layers: int) -> Path:
    """Write a decoder: ids int64 [1, s] → logits float32 [1, s, vocabulary]. Each token attends to itself and to the
    tokens before it.
    """
    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    held: dict[str, NDArray[Any]] = {
        "table": structured(random, VOCABULARY, WIDTH) * np.float32(np.sqrt(VOCABULARY)),
        "split": np.array([0, 0, HEADS, WIDTH // HEADS]),
        "joined": np.array([0, 0, WIDTH]),
        "scale": np.array((WIDTH // HEADS) ** -0.5, np.float32),
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
    """Quantize a model with MatMulNBitsQuantizer and the given `options`, and return `output`."""
    quantizer = MatMulNBitsQuantizer(onnx.load(model), **options)
    quantizer.process()
    onnx.save(quantizer.model.model, output)
    return output


def in_blocks(model: Path, output: Path, *options: str) -> tuple[Path, dict[str, Any]]:
    """Quantize a model with edgeq, and return `output` and edgeq's record."""
    return output, edgeq_json("quantize", str(model), "--weight-only", "4", "-o", str(output), *options)


def exhaustive(matrix: Floats) -> Floats:
    """Return the matrix (float32 [k, n]) with the best quantization of each block. The search tries every pair of range
    ends on a grid of 0.02, each with the least-squares scale.
    """
    k, n = matrix.shape
    padded = np.zeros((-(-k // BLOCK) * BLOCK, n), np.float32)
    padded[:k] = matrix
    blocks = padded.reshape(-1, BLOCK, n)
    for first, block in itertools.product(range(0, n, 2048), range(len(blocks))):
        part = blocks[block, :, first : first + 2048]
        part[:] = _exhaust(np.ascontiguousarray(part))
    return padded[:k]


def _exhaust(x: Floats) -> Floats:
    """Return the best quantization of each block in `x`, which is float32 [BLOCK, number of blocks]."""

    def rounded(scale: Floats, zero: Floats) -> Floats:
        found: Floats = np.minimum(np.maximum(np.rint(x / scale), -zero), 15 - zero)
        return found

    low, high = np.minimum(x.min(0), 0), np.maximum(x.max(0), 0)
    least, best = np.full(x.shape[1], np.inf, np.float32), np.zeros_like(x)
    for ends in itertools.product(np.arange(0.6, 1.041, 0.02, dtype=np.float32), repeat=2):
        scale = np.maximum((ends[1] * high - ends[0] * low) / 15, np.float32(1e-30))
        zero = np.clip(np.rint(-ends[0] * low / scale), 0, 15)
        d = rounded(scale, zero)
        power, along = np.einsum("sr,sr->r", d, d), np.einsum("sr,sr->r", x, d)
        scale = np.where((power > 0) & (along != 0), along / np.maximum(power, 1), scale)
        made = scale * rounded(scale, zero)
        error = np.square(x - made).sum(0)
        better = error < least
        least[better], best[:, better] = error[better], made[:, better]
    return best


def with_columns(model: Path, output: Path, columns: Mapping[str, tuple[NDArray[np.int64], Floats]]) -> Path:
    """Replace some columns of the matrices in a float model's matrix products, and return `output`."""
    changed = onnx.load(model)
    for tensor in changed.graph.initializer:
        if tensor.name.removesuffix(".w") in columns:
            values = numpy_helper.to_array(tensor).copy()
            chosen, made = columns[tensor.name.removesuffix(".w")]
            values[:, chosen] = made
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(changed, output)
    return output


def divergence(model: Path, reference: list[Floats], ids: list[NDArray[np.int64]]) -> float:
    """Return the mean over tokens of KL(float32 || quantized), in nats."""
    session = open_session(model, SessionSettings())
    total = []
    for wanted, sample in zip(reference, ids, strict=True):
        made = log_softmax(session.run(None, {"ids": sample})[0])
        total.append((np.exp(wanted) * (wanted - made)).sum(-1).mean())
    return float(np.mean(total))


def log_softmax(logits: Floats) -> Floats:
    """Return the logarithm of the softmax over the last axis in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def decoder_figures(work: Path, layers: int) -> dict[str, dict[str, float]]:
    """Measure and print the divergence and size of each decoder. Return these figures and the divergence for the
    randomly chosen columns.
    """
    model = decoder(work / "decoder.onnx", layers)
    random = np.random.default_rng(1)
    draws = [random.integers(0, VOCABULARY, (1, TOKENS)) for _ in range(CALIBRATION + JUDGED)]
    data = work / "calibration.npz"
    np.savez(data, ids=np.concatenate(draws[:CALIBRATION]))
    session = open_session(model)
    judged = draws[CALIBRATION:]
    reference = [log_softmax(session.run(None, {"ids": ids})[0]) for ids in judged]
    del session
    data_option = ("--data", str(data), "--preprocess", "none", "--no-timing")
    common = (*data_option, "--op-type", "MatMul")
    made = {
        "round to nearest": nearest(model, work / "nearest.onnx", bits=4, block_size=BLOCK, accuracy_level=4),
        "edgeq": in_blocks(model, work / "edgeq.onnx", *common)[0],
        "edgeq, rounded": in_blocks(model, work / "rounded.onnx", *common, "--recover", "weight-rounding")[0],
        "edgeq, table in 8 bits": in_blocks(model, work / "table.onnx", *data_option)[0],
    }
    figures = {name: divergence(path, reference, judged) for name, path in made.items()}
    bytes_: dict[str, float] = {name: path.stat().st_size for name, path in made.items()}
    print(f"\ndecoder, {layers} layers: divergence from float32, nats a token; bytes of {model.stat().st_size:,}")
    for name, value in figures.items():
        print(f"  {name:24} {value:9.5f} {bytes_[name]:12,}")
    floats = {
        tensor.name.removesuffix(".w"): numpy_helper.to_array(tensor)
        for tensor in onnx.load(model).graph.initializer
        if tensor.name.endswith(".w")
    }
    drawn = {n: np.sort(random.choice(w.shape[1], w.shape[1] // PART, replace=False)) for n, w in floats.items()}
    parts = {"exhaustive": {name: (drawn[name], exhaustive(w[:, drawn[name]])) for name, w in floats.items()}}
    for name in ("round to nearest", "edgeq", "edgeq, rounded"):
        found = find_blocks(read_model(made[name]))
        parts[name] = {n: (drawn[n], read_blocks(p).of_outputs(drawn[n]).matrix()) for n, p in found.items()}
        assert parts[name].keys() == floats.keys(), name
    share = {}
    for name, columns in parts.items():
        share[name] = divergence(with_columns(model, work / "part.onnx", columns), reference, judged)
    print(f"  of these, where 1 of {PART} outputs of each product is in blocks")
    for name, value in share.items():
        print(f"  {name:24} {value:9.5f}  {value / share['exhaustive']:6.3f} of exhaustive")
    for name in ("edgeq", "edgeq, rounded"):
        for text, value, bar in (
            ("of round to nearest", figures[name] / figures["round to nearest"], 1.0),
            ("of exhaustive", share[name] / share["exhaustive"], 1.1),
        ):
            print(f"  {'met   ' if value <= bar else 'MISSED'} {name}: {value:.3f} {text} (bar: {bar})")
    return {"whole": figures, "part": share, "bytes": bytes_}


def shaped(case: Case, make: Callable[[Feed], Feed], path: Path) -> tuple[str, ...]:
    """Write the calibration samples to `path` in another shape, and return the options that name this file."""
    samples = open_samples(case.calibration, model_signature(case.model), preprocess=case.preprocess)
    feeds = [make(dict(sample.inputs)) for sample in samples]
    stacked: dict[str, Any] = {name: np.stack([feed[name] for feed in feeds]) for name in feeds[0]}
    np.savez(path, **stacked)
    return ("--data", str(path), "--preprocess", "none")


def minilm_figures(model: Path, work: Path) -> dict[str, Any]:
    """Measure and print the Spearman correlation, bytes and latency of minilm's models, and return these figures."""
    root = shared_data()
    assert root is not None, "shared/data is not next to this checkout"
    (case,) = (c for c in cases(root, model, work) if c.name == "minilm_l6")
    peer = Contender("ONNX Runtime's default", nearest(model, work / "nearest.onnx"))
    plain = Contender("float32", model)
    known: dict[bytes, float] = {}

    def measured(contender: Contender) -> float:
        content = hashlib.sha256(contender.path.read_bytes()).digest()
        if content not in known:
            known[content] = accuracy(case, contender)
        return known[content]

    exact = measured(plain)
    # the other tool's model may lose nothing, so avoid a division by zero
    most = max(0.0, (exact - measured(peer)) / 2)
    print(f"\nminilm_l6: float32 {exact:.4f}, {peer.name} {measured(peer):.4f} and {peer.bytes():,} bytes")
    results: dict[str, Any] = {"float32": exact, peer.name: measured(peer)}
    for shape, make in case.shapes.items():
        like_it = ("--data", str(case.calibration), "--preprocess", case.preprocess)
        data = like_it if shape == next(iter(case.shapes)) else shaped(case, make, work / "shaped.npz")
        ours = []
        for name, options in {"edgeq": (), "edgeq, rounded": ("--recover", "weight-rounding")}.items():
            path, made = in_blocks(model, work / f"{len(results)} {name}.onnx", *data, *options)
            print(f"  {name}, of samples like {shape}: {made['block_compute']['why']}")
            ours.append(Contender(name, path))
        p50 = latencies(replace(case, shapes={shape: make}), [plain, peer, *ours], 3.0, 0)[shape]
        results[shape] = {"p50_ms": p50, "accuracy": {c.name: measured(c) for c in ours}}
        for one in ours:
            slower, lost, size = p50[one.name] / p50[peer.name], exact - measured(one), one.bytes() / peer.bytes()
            for text, met in (
                (f"{slower:.2f} of its latency, {p50[one.name]:.2f} ms (bar: 1.05)", slower <= 1.05),
                (f"loses {lost:.4f} (bar: {most:.4f}, half of what {peer.name} loses)", lost <= most),
                (f"{size:.2f} of its bytes (bar: 1.1)", size <= 1.1),
            ):
                print(f"  {'met   ' if met else 'MISSED'} {one.name}, {shape}: {text}")
    return results


def main() -> None:
    """Run the chosen parts, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("decoder", "minilm"), default=[])
    parser.add_argument("--minilm", type=Path, help="the model that minilm_l6/make_model.py made")
    parser.add_argument("--layers", type=int, default=12, help="number of layers of the decoder (default: 12)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    if "minilm" in options.only and options.minilm is None:
        parser.error("minilm needs --minilm MODEL")
    chosen = options.only or ["decoder", *(["minilm"] if options.minilm is not None else [])]
    logging.getLogger().setLevel(logging.WARNING)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if "decoder" in chosen:
            results["decoder"] = decoder_figures(work, options.layers)
        if "minilm" in chosen:
            results["minilm"] = minilm_figures(options.minilm, work)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
