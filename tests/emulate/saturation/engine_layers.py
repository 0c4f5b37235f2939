"""Make random layers for the kernels of plug-in engines that add two products in 16 bits, with their expected outputs.

Sums stay below 2^24, so float32 represents them exactly, and any difference is a wrong sum.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.emulate.kernels import multiply_exactly, multiply_saturating, sum_conv, sum_matmul
from edgeq.model.convert import from_proto
from edgeq.model.graph import is_depthwise
from edgeq.model.saturation import PAIR_LIMIT, SaturationTable, conv_rows, possible_sums, saturation_table
from edgeq.run.engines import Engine
from edgeq.run.session import SessionSettings, start_engine


@dataclass(frozen=True)
class Layer:
    """Hold one random layer, Q/DQ with scales of 1, and its expected outputs. "x" contains the integers as float32."""

    name: str
    model: bytes
    x: NDArray[np.float32]
    saturating: NDArray[np.int64]
    exact: NDArray[np.int64]


def random_layer(
    rng: np.random.Generator,
    op: str,
    table: SaturationTable,
    *,
    small: bool = False,
    plain: bool = False,
    fitted: bool = False,
) -> Layer:
    """Return a MatMul or Conv of sizes that kernels treat differently: odd channels, groups, strides, dilations,
    padding, zero points, both activation types. Half of all values are extreme.

    Args:
        small: weights of at most 64, which cannot saturate.
        plain: no groups, padding, strides or single channels, and at most 256 products in a MatMul.
        fitted: weights from `fit_pairs`, which must not saturate.
    """
    signed = bool(rng.integers(2))
    kind, low, high = ("int8", -128, 127) if signed else ("uint8", 0, 255)
    zero = int(rng.choice([0, rng.integers(low, high + 1)]))
    attributes = ""
    if op == "Conv":
        group, depthwise = int(rng.choice([1, 1, 1, 2, 4, 8])), rng.random() < 0.15
        ins, outs = int(rng.choice([1, 2, 3, 4, 5, 8, 16, 17])), int(rng.choice([1, 3, 4, 8, 16, 24]))
        if depthwise:
            group, ins, outs = int(rng.choice([4, 8, 16, 19])), 1, int(rng.choice([1, 1, 2]))
        taps, stride, dilation = (int(rng.choice(c)) for c in ([1, 1, 2, 3, 3, 5], [1, 1, 2], [1, 1, 1, 2]))
        pad = int(rng.choice([0, 0, taps // 2]))
        group, stride, pad, ins = (1, 1, 0, max(ins, 2)) if plain else (group, stride, pad, ins)
        size = max(int(rng.integers(1, 12)), (taps - 1) * dilation + 1)
        shape, weights = (1, ins * group, size, size), (outs * group, ins, taps, taps)
        attributes = (
            f"<kernel_shape=[{taps},{taps}], group={group}, strides=[{stride},{stride}], "
            f"dilations=[{dilation},{dilation}], pads=[{pad},{pad},{pad},{pad}]>"
        )
    else:
        rows, depth, columns = (
            int(v) for v in (rng.choice([1, 2, 5, 16]), rng.integers(1, 257 if plain else 300), rng.integers(1, 70))
        )
        shape, weights = (rows, depth), (depth, columns)
    x, w = rng.integers(low, high + 1, shape), rng.integers(-128, 128, weights)
    x = np.where(rng.random(shape) < 0.5, high, x)
    w = np.where(rng.random(weights) < 0.5, np.where(w < 0, -127, 127), w)
    w = (np.clip(w, -64, 64) if small else w).astype(np.int8)
    w = _fitted(w, op) if fitted else w
    model = _model(op, attributes, shape, w, kind, zero)
    node = next(node for node in from_proto(model).graph if node.op_type == op)
    saturating, exact = _answers(node, op, x, w, zero, 128 * signed, table)
    name = f"{op} {kind} zero point {zero} {list(shape)} by {list(weights)} {attributes}"
    return Layer(name, model.SerializeToString(), (x - zero).astype(np.float32), saturating, exact)


def _answers(
    node: ir.Node, op: str, x: NDArray[Any], w: NDArray[np.int8], zero: int, shift: int, table: SaturationTable
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    path = table.path("QLinearConv" if op == "Conv" else "QLinearMatMul", "uint8", "int8")
    assert path is not None
    moved, point = (x + shift).astype(np.uint8), np.array(zero + shift)
    if op == "MatMul":
        found = [sum_matmul(moved, w, point, None, product)[0] for product in (multiply_saturating, multiply_exactly)]
        return found[0], found[1]
    exact = sum_conv(node, moved, w, point, None, multiply_exactly)[0]
    if path.exact_depthwise and is_depthwise(node, w.shape):
        return exact, exact
    return sum_conv(node, moved, w, point, None, multiply_saturating, path)[0], exact


def _fitted(w: NDArray[np.int8], op: str) -> NDArray[np.int8]:
    """Scale down the weights of each output channel of `w` until its largest pair fits 16 bits."""
    rows = conv_rows(w) if op == "Conv" else w.T
    sums = possible_sums(rows, w.shape[1] if op == "Conv" else 0)
    worst = np.maximum(sums.max(axis=1, initial=0), PAIR_LIMIT)[:, None]
    rows = np.trunc(rows * (PAIR_LIMIT / worst)).astype(np.int8)
    if op != "Conv":
        return np.ascontiguousarray(rows.T)
    return np.ascontiguousarray(np.moveaxis(rows.reshape(len(w), *w.shape[2:], w.shape[1]), -1, 1))


def _model(op: str, attributes: str, shape: tuple[int, ...], w: NDArray[np.int8], kind: str, zero: int) -> Any:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        layer (float[{", ".join(map(str, shape))}] x) => (float{"[" + ", ".join("abcd"[: len(shape)]) + "]"} y)
        <float one = {{1}}, {kind} zero = {{{zero}}}, int8 none = {{0}}> {{
            q = QuantizeLinear(x, one, zero)
            d = DequantizeLinear(q, one, zero)
            f = DequantizeLinear(w, one, none)
            y = {op} {attributes} (d, f)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(w), "w"))
    return model


def compare(engine: Engine, environment: dict[str, str], op: str, count: int, seed: int = 0, **kind: bool) -> list[str]:
    """Run `count` random layers of a `kind` (see `random_layer`). Return a line for each one that differs from the
    model.

    Raises:
        EngineError: the engine crashes or refuses a layer.
    """
    wrong = []
    rng = np.random.default_rng(seed)
    level = next(level for level in engine.cap.levels if level.value in environment.values())
    table = saturation_table(engine.int8.saturation, frozenset(level.features))
    with start_engine(engine, environment=environment) as guest, tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            layer = random_layer(rng, op, table, **kind)
            file = Path(folder) / f"{number}.onnx"
            file.write_bytes(layer.model)
            session = guest.open(file, SessionSettings(engine=engine, intra_op_threads=1))
            given = session.run(None, {"x": layer.x})[0]
            session.close()
            if not np.array_equal(given, layer.saturating):
                how = (
                    "exact"
                    if np.array_equal(given, layer.exact)
                    else f"{np.mean(given != layer.saturating):.0%} differ"
                )
                wrong.append(f"{layer.name}: {how}")
    return wrong


def saturating_levels(engine: Engine) -> list[dict[str, str]]:
    """Return environments that restrict an engine to the kernels of CPUs on which it saturates."""
    without = set(engine.int8.saturates_without)
    levels = [level.value for level in engine.cap.levels if without and not without.intersection(level.features)]
    return [{engine.cap.variable: value} for value in levels]
