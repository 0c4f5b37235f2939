"""Test tensors that 8 bits would destroy: calibration finds them, and the quantized file is right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.backends.cpu import CpuBackend
from edgeq.backends.tensorrt.placement import plan_placement
from edgeq.calibration.collect import collect
from edgeq.calibration.hazards import find_hazards, hazard_notes, with_hazards
from edgeq.calibration.joins import COLUMNS, JOINED, TAIL
from edgeq.calibration.precision import ANGLE, DIVISOR, LOGARITHM, ROOT, root_snr
from edgeq.calibration.ranges import scheme_ranges
from edgeq.calibration.sentinels import NONFINITE, NOTHING, find_sentinel
from edgeq.calibration.spreads import ModelSpreads, Spread
from edgeq.calibration.statistics import TensorStatistics, histogram_of
from edgeq.calibration.unseen import find_unseen
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from tests.graphs import model, proto

from .models import ListSamples

SAMPLES = 24
Arrays = Mapping[str, Any]


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(np.float32)


W = {"w1": normal(24, 32, size=0.2), "w2": normal(32, 32, seed=1, size=0.2), "w3": normal(32, 8, seed=2, size=0.2)}
LAYERS = "[a] a = MatMul(x, w1) [b] b = Relu(a) [h] h = MatMul(b, w2)"
NUMBERS: Arrays = {
    "far": np.float32(-1e9), "low": np.float32(-np.inf), "one": np.float32(1), "zero": np.float32(0),
    "eps": np.float32(1e-6), "two": np.float32(2), "last": np.int64([2]),
}  # fmt: skip


def tokens(**others: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return samples of `x` [1, 16, 24] and of the inputs that the functions in `others` draw."""
    random = np.random.default_rng(7)
    x = (normal(1, 16, 24, seed=seed) for seed in range(SAMPLES))
    return [{"x": values, **{name: draw(random) for name, draw in others.items()}} for values in x]


def keep(random: np.random.Generator) -> np.ndarray[Any, Any]:
    return (np.arange(16) < random.integers(4, 16)).reshape(1, 16, 1)


def pooled(head: str, mask: str = "bool[1,16,1] keep") -> str:
    return f"""g (float[1,16,24] x, {mask}) => (float[1,8] y) {{
        {LAYERS} {head} [p] p = ReduceMax<axes = [1], keepdims = 0>(m) [y] y = MatMul(p, w3)
    }}"""


def token_wise(inner: str, last: str = "n") -> str:
    return f"g (float[1,16,24] x) => (float[1,16,8] y) {{ {LAYERS} {inner} [y] y = MatMul({last}, w3) }}"


WHERE = pooled("[m] m = Where(keep, h, far)")
INFINITE = pooled("[m] m = Where(keep, h, low)")
ADDED = pooled("[sub] s = Sub(one, keep) [far] f = Mul(s, far) [m] m = Add(h, f)", mask="float[1,16,1] keep")
GIVEN = pooled("[m] m = Add(h, keep)", mask="float[1,16,1] keep")
RMS = token_wise(
    "[q] q = Mul(h, h) [v] v = ReduceMean<axes = [2]>(q) [e] e = Add(v, eps) [r] r = Sqrt(e) [n] n = Div(h, r)"
)
SIGMOID = token_wise("[neg] k = Neg(h) [exp] e = Exp(k) [sum] s = Add(e, one) [n] n = Div(h, s)").replace(
    "w2)", "wide)"
)
ANGLES = token_wise("[t] t = Mul(h, turns) [n] n = Sin(t)")
LOG = """g (float[1,64,31] x) => (float[1,16,31] y) {
    [p] p = Mul(x, x) [m] m = MatMul(mel, p) [e] e = Add(m, eps) [l] l = Log(e) [y] y = MatMul(mix, l)
}"""
BOXES = """g (float[1,16,24] x) => (float[1,16,12] y) {
    [a] a = MatMul(x, w1) [b] b = Relu(a) [box] c = MatMul(b, w4) [s] s = MatMul(b, w3)
    [grid] d = Add(c, cells) [scale] f = Mul(d, stride) [sig] g = Sigmoid(s) [join] j = Concat<axis = 2>(f, g)
    [y] y = Identity(j)
}"""


def heard() -> list[dict[str, np.ndarray[Any, Any]]]:
    loud = np.exp(normal(SAMPLES, 1, 31, seed=3, size=1.5)) * np.exp(-np.arange(64) / 6)[None, :, None]
    return [{"x": (normal(1, 64, 31, seed=s) * loud[s]).astype(np.float32)} for s in range(SAMPLES)]


def mask(random: np.random.Generator) -> np.ndarray[Any, Any]:
    return keep(random).astype(np.float32)


CASES = {
    "where": (WHERE, tokens(keep=keep), {"m": NOTHING}),
    "infinite": (INFINITE, tokens(keep=keep), {"m": NONFINITE}),
    "added": (ADDED, tokens(keep=mask), {"m": NOTHING, "f": NOTHING}),
    "given": (GIVEN, tokens(keep=lambda r: -1e4 * (1 - mask(r))), {"m": NOTHING, "keep": NOTHING}),
    "norm": (RMS, tokens(), {"q": DIVISOR, "v": DIVISOR, "e": DIVISOR, "r": DIVISOR}),
    "sigmoid": (SIGMOID, tokens(), {"s": DIVISOR, "e": DIVISOR}),
    "angles": (ANGLES, tokens(), {"t": ANGLE, "h": ANGLE}),
    "log": (LOG, heard(), {"x": LOGARITHM, "p": LOGARITHM, "m": LOGARITHM, "e": LOGARITHM}),
    "boxes": (BOXES, tokens(), {"j": JOINED, "d": COLUMNS, "f": TAIL, "g": TAIL}),
}
WEIGHTS: Arrays = {
    **W, **NUMBERS, "wide": W["w2"] * 4, "turns": np.float32(2), "w4": normal(32, 4, seed=4, size=0.2),
    "mel": np.maximum(0, 1 - np.abs(np.arange(64) - 4 * np.arange(16)[:, None] - 2) / 5).astype(np.float32),
    "mix": normal(16, 16, seed=5, size=0.25), "stride": np.float32(80),
    "cells": np.arange(16, dtype=np.float32).reshape(1, 16, 1),
}  # fmt: skip


def read_by(body: str, weights: Arrays = WEIGHTS) -> Arrays:
    """Return the weights that a body reads."""
    words = set(re.findall(r"\w+", body))
    return {name: values for name, values in weights.items() if name in words}


def hazards_of(body: str, samples: Sequence[Arrays], weights: Arrays = WEIGHTS) -> Mapping[str, str]:
    net = model(body, read_by(body, weights))
    return find_hazards(net, collect(net, ListSamples(samples)))


@pytest.mark.parametrize("name", CASES)
def test_finds_hazards_with_their_reasons(name: str) -> None:
    body, samples, expected = CASES[name]
    found = hazards_of(body, samples)
    assert {tensor: reason for tensor, reason in found.items() if tensor in expected} == expected
    assert "a" not in found  # the tensor before it has ordinary values


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"given", "infinite"}))
def test_the_quantized_file_is_right_and_still_quantized(name: str, tmp_path: Path) -> None:
    body, samples, _ = CASES[name]
    path = tmp_path / "m.onnx"
    path.write_bytes(proto(body, read_by(body)).SerializeToString())
    prepared = prepare_model(path, tmp_path / "work")
    statistics = collect(prepared.model, ListSamples(samples))
    prepared = with_hazards(prepared, statistics)
    scheme = Scheme()
    built = CpuBackend().build(prepared, scheme_ranges(statistics, scheme), scheme, tmp_path / "int8.onnx")
    # Without optimization, the sums are exact: fused kernels saturate on processors without VNNI.
    exact = SessionSettings(intra_op_threads=1, optimization="none", config=built.session_options)
    given, made = (
        np.concatenate([open_session(file, settings).run(None, s)[0] for s in samples])
        for file, settings in ((path, SessionSettings(intra_op_threads=1)), (built.model, exact))
    )
    error = (given - made)[..., -8:]  # only the scores, if the output is boxes and scores
    assert 10 * np.log10(np.sum(given[..., -8:] ** 2.0) / np.sum(error**2.0)) > 27
    predicted = predict_int8(prepared.model, int8_rules("cpu"), scheme, hazards=prepared.hazards)
    assert any(node.verdict == "int8" and node.macs for node in predicted)
    reasons = {node.reason for node in predicted if node.verdict == "float"}
    assert any(reason.startswith("tensor '") for reason in reasons)
    assert all(note.startswith("in float: tensor '") for note in hazard_notes(prepared.hazards, "in float"))


def test_a_backend_that_quantizes_operands_leaves_out_those(tmp_path: Path) -> None:
    body, samples, _ = CASES["log"]
    net = model(body, read_by(body))
    hazards = find_hazards(net, collect(net, ListSamples(samples)))
    plan = plan_placement(net, int8_rules("tensorrt"), hazards=hazards)
    assert {edge.node for edge in plan.edges} == {"y"}
    assert plan.reasons["m"].startswith(f"tensor 'p' {LOGARITHM}")


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        ("[c] c = Sigmoid(h) [d] d = Add(c, one) [n] n = Div(h, d)", "a divisor of 1 to 2"),
        ("[n] n = Div(h, two)", "a constant divisor"),
        ("[c] c = Abs(h) [d] d = Add(c, far) [e] e = Abs(d) [n] n = Div(h, e)", "a divisor far from zero"),
        ("[c] c = Relu(h) [n] n = Concat<axis = 1>(c, h)", "a join of like ranges"),
    ],
)
def test_finds_no_hazard_in_tensors_that_8_bits_represent(inner: str, why: str) -> None:
    assert hazards_of(token_wise(inner), tokens()) == {}, why


def test_padding_with_an_ordinary_number_is_quantized() -> None:
    body = """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
        [pad] p = Pad(x, around, VALUE) [y] y = Conv(p, kernel)
    }"""
    weights = {"around": np.int64([0, 0, 1, 1, 0, 0, 1, 1]), "kernel": normal(4, 3, 3, 3), "v": np.float32(0)}
    for value, expected in ((25.0, set()), (-1e4, {"p"})):
        net = model(body.replace("VALUE", "v"), {**weights, "v": np.float32(value)})
        samples = ListSamples([{"x": normal(1, 3, 8, 8, seed=seed)} for seed in range(4)])
        assert set(find_hazards(net, collect(net, samples))) == expected


def test_an_ordinary_outlier_means_something() -> None:
    """An outlier that does not come from a constant is not a hazard."""
    body = (
        "g (float[1,16,24] x) => (float[1,16,8] y) { [h] h = MatMul(x, w) [r] r = Reshape(h, s) [y] y = MatMul(r, w3) }"
    )
    weights = {"w": W["w1"].copy(), "w3": W["w3"], "s": np.int64([1, 16, 32])}
    weights["w"][:, 3] *= 3000
    assert hazards_of(body, tokens(), weights) == {}


def test_a_join_that_a_layer_reads_is_kept_where_the_layer_would_lose_it() -> None:
    body = """g (float[1,16,24] x) => (float[1,16,8] y) {
        [a] a = MatMul(x, loud) [b] b = MatMul(x, w1) [j] j = Concat<axis = 2>(a, b) [y] y = MatMul(j, both)
    }"""
    quiet, equal = np.concatenate([W["w3"] / 3000, W["w3"]]), np.concatenate([W["w3"], W["w3"]])
    for both, expected in ((quiet, {"j": JOINED}), (equal, {})):
        assert hazards_of(body, tokens(), {**W, "loud": W["w1"] * 3000, "both": both}) == expected


def test_columns_in_other_units_keep_the_last_layer_in_float() -> None:
    body = "g (float[1,16,24] x) => (float[1,16,8] y) { [h] h = MatMul(x, w1) [r] r = Relu(h) [y] y = MatMul(r, u) }"
    for units, expected in ((np.logspace(-2, 2, 8), {"y": COLUMNS}), (np.linspace(1, 4, 8), {})):
        assert hazards_of(body, tokens(), {**W, "u": (W["w3"] * units).astype(np.float32)}) == expected


NODES = {
    "conv": "Conv<pads = [1, 1, 1, 1]>({0}, k)",
    "relu": "Relu({0})",
    "clip": "Clip({0}, zero, six)",
    "sigmoid": "Sigmoid({0})",
    "add": "Add({0}, {1})",
    "mul": "Mul({0}, half)",
    "pool": "MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>({0})",
    "softmax": "Softmax<axis = 1>({0})",
}


@settings(max_examples=15)
@given(st.lists(st.sampled_from(sorted(NODES)), min_size=2, max_size=8), st.integers(0, 99))
def test_ordinary_networks_have_none(kinds: list[str], seed: int) -> None:
    lines, known = ["[first] t0 = Conv<pads = [1, 1, 1, 1]>(x, k)"], ["t0"]
    for place, kind in enumerate(kinds, 1):
        lines.append(f"[n{place}] t{place} = {NODES[kind].format(known[-1], known[len(known) // 2])}")
        known.append(f"t{place}")
    lines.append(f"[last] y = Conv<pads = [1, 1, 1, 1]>({known[-1]}, k)")
    body = f"g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{ {' '.join(lines)} }}"
    weights = {
        "k": normal(4, 4, 3, 3, seed=seed, size=0.2),
        "zero": np.float32(0),
        "six": np.float32(6),
        "half": np.float32(0.5),
    }
    assert hazards_of(body, [{"x": normal(1, 4, 8, 8, seed=seed + place)} for place in range(3)], weights) == {}


def spread_of(values: Sequence[float] | np.ndarray[Any, Any]) -> Spread:
    array = np.float32(values)
    low, high = float(array.min()), float(array.max())
    return Spread.of(
        TensorStatistics(samples=1, count=array.size, minimum=low, maximum=high, histogram=histogram_of(array))
    )


without_gap = st.floats(0.5, 4, width=16) | st.floats(-4, -0.5, width=16) | st.just(0.0)


@given(st.lists(without_gap, min_size=20, max_size=60), st.sampled_from([200, 1e4, 1e9, 3.4e38]))
def test_only_a_number_beyond_a_gap_means_nothing(values: list[float], far: float) -> None:
    assert find_sentinel(spread_of(values)) == 0
    magnitudes = {abs(value) for value in np.float32(values)} - {0}
    gone = find_sentinel(spread_of([*values, -far, -far]))
    assert gone == (0 if len(magnitudes) < 2 else float(np.float32(-far)))


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 3.0])
def test_the_error_of_roots_is_that_of_rounding_the_values(spread: float) -> None:
    values = np.exp(spread * normal(2000))
    step = values.max() / 255
    error = np.sum((np.sqrt(np.round(values / step) * step) - np.sqrt(values)) ** 2)
    # The histogram keeps ten bits of each value.
    assert root_snr(spread_of(values)) == pytest.approx(np.sum(values) / error, rel=0.1)


def test_a_root_of_small_values_is_kept() -> None:
    body = token_wise("[q] q = Mul(h, h) [c] c = Mul(q, q) [d] d = Mul(c, c) [n] n = Sqrt(d)")
    assert hazards_of(body, tokens())["d"] == ROOT


UNUSED = {
    "a second camera": (
        "g (float[1, 8] x, float[1, 8] c) => (float[1, 8] y) "
        "{ a = MatMul (x, w) b = MatMul (c, w) d = Add (b, bias) e = Relu (d) f = Add (a, e) y = MatMul (f, w) }",
        {"c", "b", "d", "e", "f"},
    ),
    "a gate": (
        "g (float[1, 8] x, float[1, 8] c) => (float[1, 8] y) "
        "{ a = MatMul (x, w) b = Mul (a, c) f = Add (a, b) y = MatMul (f, w) }",
        {"c", "b", "f"},
    ),
    "a mask of integers": (
        "g (float[1, 8] x, int64[1, 8] c) => (float[1, 8] y) "
        "{ a = Cast <to = 1> (c) b = Mul (a, bias) f = Add (x, b) y = MatMul (f, w) }",
        {"a", "b", "f"},
    ),
    "an empty cache": (
        "g (float[1, 8] x, float[n, 8] c) => (float[m, 8] y) { a = Concat <axis = 0> (c, x) y = MatMul (a, w) }",
        {"c"},
    ),
    "a Relu without positive inputs": (
        "g (float[1, 8] x, float[1, 8] c) => (float[1, 8] y) "
        "{ a = MatMul (x, w) b = Sub (a, far) d = Relu (b) e = MatMul (d, w) s = Add (e, a) y = Add (s, c) }",
        {"c", "y"},
    ),
    "a product with zero": (
        "g (float[1, 8] x, float[1, 8] c) => (float[1, 8] y) { a = Mul (x, zero) s = Add (a, x) y = Add (s, c) }",
        {"c", "y"},
    ),
}


@pytest.mark.parametrize("kind", UNUSED)
def test_tensors_that_the_samples_leave_empty_stay_in_float(kind: str, tmp_path: Path) -> None:
    body, expected = UNUSED[kind]
    weights = {"w": normal(8, 8), "bias": normal(8, seed=1), "far": np.float32(1e4), "zero": np.float32(0)}
    made = proto(body, {name: values for name, values in weights.items() if name in body})
    source = tmp_path / "m.onnx"
    source.write_bytes(made.SerializeToString())
    rows = 0 if "cache" in kind else 1
    empty = np.zeros((rows, 8), np.int64 if "integers" in kind else np.float32)
    samples = ListSamples([{"x": normal(1, 8, seed=seed), "c": empty} for seed in range(4)])
    prepared = prepare_model(source, tmp_path / "work", simplify=False)
    statistics = collect(prepared.graph, samples)
    assert find_unseen(ModelSpreads(prepared.graph, statistics)) == dict.fromkeys(expected, "c")
    found = with_hazards(prepared, statistics)
    assert found.unseen == (() if "integers" in kind else ("c",))
    assert expected <= set(found.hazards)
    assert any("depends on values of input 'c'" in note for note in hazard_notes(found.hazards, "in float"))


def test_samples_that_use_an_input_are_evidence(tmp_path: Path) -> None:
    made = proto(UNUSED["a gate"][0], {"w": normal(8, 8)})
    source = tmp_path / "m.onnx"
    source.write_bytes(made.SerializeToString())
    samples = ListSamples([{"x": normal(1, 8), "c": np.eye(1, 8, dtype=np.float32)}])
    prepared = prepare_model(source, tmp_path / "work")
    assert with_hazards(prepared, collect(prepared.graph, samples)).unseen == ()
