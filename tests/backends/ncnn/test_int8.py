"""Test the integer layers: factors from Q/DQ pairs, exact sums, the Winograd bound, and the emulation of all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeq.backends.ncnn.convert import lower
from edgeq.backends.ncnn.emulation import emulation
from edgeq.backends.ncnn.winograd import largest_sum, wrapping_layers
from edgeq.backends.ncnn.writer import DESCRIPTION, PARAM, members, write_ncnn
from edgeq.errors import ModelError
from edgeq.model.load import read_unchecked, save_model
from tests.backends.ncnn.networks import ncnn, run_ncnn, run_onnx, write
from tests.graphs import proto

STEP = np.float32(1 / 32)


def layer(channels: int, kernel: int, size: int, outputs: int, *, group: int = 1) -> str:
    """Return a network of one int8 convolution with padding."""
    pads = kernel // 2
    return f"""g (float[1,{channels},{size},{size}] x) => (float[1,{outputs},{size},{size}] y) {{
        [q] xq = QuantizeLinear(x, sx, z) [d] xd = DequantizeLinear(xq, sx, z)
        [w] wd = DequantizeLinear<axis=0>(wq, sw, zw)
        [conv] y = Conv<pads=[{pads},{pads},{pads},{pads}], group={group}>(xd, wd, b)
    }}"""


def constants(weights: NDArray[np.int8], **more: Any) -> dict[str, Any]:
    """Return the constants of `layer`, with scales that are powers of two, so that results are exact."""
    outputs = len(weights)
    return {
        "sx": STEP,
        "z": np.int8(0),
        "wq": weights,
        "sw": np.full(outputs, 2.0**-6, np.float32),
        "zw": np.zeros(outputs, np.int8),
        "b": np.zeros(outputs, np.float32),
        **more,
    }


def exact(integers: NDArray[Any], weights: NDArray[Any], group: int = 1) -> NDArray[np.int64]:
    """Return the sums of products of a convolution with padding, [outputs, rows, columns]."""
    outputs, _, kernel, _ = weights.shape
    pad, size = kernel // 2, integers.shape[-1]
    padded = np.pad(integers.astype(np.int64), ((0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
    parts = zip(np.split(windows, group), np.split(weights.astype(np.int64), group), strict=True)
    sums = [np.einsum("iabrc,oiab->orc", part, rows) for part, rows in parts]
    return np.concatenate(sums).reshape(outputs, size, size)


@ncnn
@pytest.mark.parametrize(
    ("channels", "kernel", "group"), [(3, 3, 1), (64, 1, 1), (256, 3, 1), (16, 3, 16), (12, 5, 12)]
)
def test_sums_of_the_largest_integers_are_exact(channels: int, kernel: int, group: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    outputs = 16 if group == 1 else channels
    weights = random.choice([-127, 127], (outputs, channels // group, kernel, kernel)).astype(np.int8)
    integers = random.choice([-127, 127], (channels, 8, 8))
    if group == 1:
        # The first channel has the largest sum that is possible in the middle of the image.
        weights[0], integers[:, 2:6, 2:6] = 127, 127
    _, file = write(tmp_path, layer(channels, kernel, 8, outputs, group=group), constants(weights))
    answers = run_ncnn(file, {"x": (integers * STEP)[None]})["y"]
    expected = exact(integers, weights, group) * np.float64(STEP) * 2.0**-6
    # On x86-64, ncnn's depthwise kernels divide by an approximate reciprocal.
    tolerance = 1e-3 if group > 1 else 0
    np.testing.assert_allclose(answers, expected.astype(np.float32).ravel(), rtol=tolerance, atol=tolerance)


def options(file: Path) -> dict[str, bool]:
    """Return the options that a file sets."""
    stated: dict[str, bool] = json.loads(members(file)[DESCRIPTION])["options"]
    return stated


@ncnn
def test_winograd_is_off_where_its_sums_wrap(tmp_path: Path) -> None:
    weights = np.full((16, 128, 3, 3), 127, np.int8)
    _, file = write(tmp_path, layer(128, 3, 12, 16), constants(weights))
    assert not options(file)["use_winograd43_convolution"]
    integers = np.full((128, 12, 12), 127)
    inputs, expected = {"x": (integers * STEP)[None]}, exact(integers, weights) * np.float64(STEP) * 2.0**-6
    np.testing.assert_array_equal(run_ncnn(file, inputs)["y"], expected.astype(np.float32).ravel())


def test_winograd_stays_on_if_no_sum_can_wrap(tmp_path: Path) -> None:
    limit = 3_728_270
    weights = np.zeros((2, 64, 3, 3), np.int8)
    weights.reshape(2, -1)[0, : limit // 127 // 127] = 127
    model, file = write(tmp_path, layer(64, 3, 12, 2), constants(weights))
    assert options(file)["use_winograd43_convolution"]
    (conv,) = [row for row in lower(read_unchecked(model), model).layers if row.kind == "Convolution"]
    assert limit - 127 * 127 < largest_sum(conv) <= limit
    weights.reshape(2, -1)[1, : limit // 127 // 127 + 1] = -127
    model, file = write(tmp_path, layer(64, 3, 12, 2), constants(weights))
    assert not options(file)["use_winograd43_convolution"]
    assert [row.node for row in wrapping_layers(lower(read_unchecked(model), model))] == ["conv"]


def test_a_pointwise_layer_never_uses_winograd(tmp_path: Path) -> None:
    weights = np.full((2, 512, 1, 1), 127, np.int8)
    _, file = write(tmp_path, layer(512, 1, 4, 2), constants(weights))
    assert options(file)["use_winograd43_convolution"]


@given(
    values=st.lists(st.floats(-200, 200, width=32), min_size=4, max_size=4),
    scale=st.floats(1 / 64, 3, width=32),
)
@settings(deadline=None, max_examples=50)
def test_the_emulation_rounds_half_away_from_zero_and_clips(values: list[float], scale: float) -> None:
    text = """g (float[1,4,1,1] x) => (float[1,4,1,1] y) {
        [q] xq = QuantizeLinear(x, sx, z) [d] xd = DequantizeLinear(xq, sx, z)
        [w] wd = DequantizeLinear<axis=0>(wq, sw, zw)
        [conv] y = Conv<group=4>(xd, wd)
    }"""
    more = {"sx": np.float32(scale), "sw": np.ones(4, np.float32)}
    numbers = constants(np.ones((4, 1, 1, 1), np.int8), **more)
    emulated = emulation(ir.serde.deserialize_model(proto(text, numbers)), Path("net.onnx"))
    inputs = np.array(values, np.float32).reshape(1, 4, 1, 1)
    factor = np.float32(1 / np.float64(np.float32(scale)))
    # The product is rounded to float32, as in ncnn.
    scaled = (inputs.ravel() * factor).astype(np.float64)
    integers = np.clip(np.sign(scaled) * np.floor(np.abs(scaled) + 0.5), -127, 127)
    expected = (integers * np.float64(np.float32(1) / factor)).astype(np.float32)
    np.testing.assert_array_equal(run_onnx(emulated, {"x": inputs})["y"], expected)


def test_the_emulation_splits_sums_that_float32_cannot_hold() -> None:
    random = np.random.default_rng(0)
    weights = random.integers(100, 127, (2, 300, 3, 3)).astype(np.int8)
    emulated = emulation(ir.serde.deserialize_model(proto(layer(300, 3, 4, 2), constants(weights))), Path("net.onnx"))
    assert sum(node.op_type == "Conv" for node in emulated.graph) > 1
    integers = random.integers(100, 127, (300, 4, 4))
    sums = exact(integers, weights)
    assert sums.max() > 2**24
    answers = run_onnx(emulated, {"x": (integers * STEP)[None]})["y"]
    np.testing.assert_array_equal(answers, (sums * np.float64(STEP) * 2.0**-6).astype(np.float32).ravel())


TWO = """g (float[1,8,9,9] x) => (float[1,6] y) {
    [q] xq = QuantizeLinear(x, sx, z) [d] xd = DequantizeLinear(xq, sx, z)
    [w] wd = DequantizeLinear<axis=0>(wq, sw, zw)
    [one] h = Conv<pads=[1,1,1,1]>(xd, wd, b) [relu] r = Relu(h)
    [rq] rq = QuantizeLinear(r, sr, z) [rd] rd = DequantizeLinear(rq, sr, z)
    [v] vd = DequantizeLinear<axis=0>(vq, sv, zw)
    [two] t = Conv(rd, vd) [pool] p = GlobalAveragePool(t)
    [pq] pq = QuantizeLinear(p, sp, z) [pd] pd = DequantizeLinear(pq, sp, z)
    [u] ud = DequantizeLinear<axis=0>(uq, su, zu)
    [head] f = Conv(pd, ud, bu) [flat] y = Flatten(f)
}"""


def two_layers() -> dict[str, Any]:
    """Return the constants of `TWO`."""
    random = np.random.default_rng(3)
    return {
        "sx": np.float32(0.031),
        "sr": np.float32(0.0173),
        "sp": np.float32(0.0091),
        "z": np.int8(0),
        "zw": np.zeros(16, np.int8),
        "zu": np.zeros(6, np.int8),
        "wq": random.integers(-127, 128, (16, 8, 3, 3)).astype(np.int8),
        "vq": random.integers(-127, 128, (16, 16, 1, 1)).astype(np.int8),
        "uq": random.integers(-127, 128, (6, 16, 1, 1)).astype(np.int8),
        "sw": random.uniform(0.001, 0.004, 16).astype(np.float32),
        "sv": random.uniform(0.001, 0.004, 16).astype(np.float32),
        "su": random.uniform(0.001, 0.004, 6).astype(np.float32),
        "b": random.normal(0, 0.2, 16).astype(np.float32),
        "bu": random.normal(0, 0.2, 6).astype(np.float32),
    }


@ncnn
def test_the_emulation_gives_the_answers_of_ncnn(tmp_path: Path) -> None:
    model, file = write(tmp_path, TWO, two_layers())
    emulated = emulation(read_unchecked(model), model)
    random = np.random.default_rng(5)
    for _ in range(8):
        inputs = {"x": random.normal(0, 1.5, (1, 8, 9, 9)).astype(np.float32)}
        expected = run_onnx(emulated, inputs)["y"]
        # Only the pool adds floats, in an order of its own.
        np.testing.assert_allclose(run_ncnn(file, inputs)["y"], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_layers_pass_integers_to_each_other(tmp_path: Path) -> None:
    _, file = write(tmp_path, TWO, two_layers())
    rows = {words[1]: words for words in map(str.split, members(file)[PARAM].decode().splitlines()) if len(words) > 3}
    settings_of = {words[0]: dict(w.split("=") for w in words if "=" in w) for words in rows.values()}
    first, second = (words for words in rows.values() if words[0] == "Convolution")
    assert "8=102" in first
    assert "8=2" in second
    # ncnn's int8 Convolution returns a wrong shape for a pooled blob.
    assert settings_of["InnerProduct"]["8"] == "2"


@ncnn
def test_integers_between_layers_change_no_answer(tmp_path: Path) -> None:
    constants_ = two_layers()
    _, file = write(tmp_path, TWO, constants_)
    inputs = {"x": np.random.default_rng(5).normal(0, 1.5, (1, 8, 9, 9)).astype(np.float32)}
    with_integers = run_ncnn(file, inputs)["y"]
    # A further reader in float keeps the tensor between the layers in float.
    text = TWO.replace("(float[1,6] y)", "(float[1,6] y, float[1,16,9,9] n)").replace(
        "[flat]", "[negative] n = Neg(r) [flat]"
    )
    _, file = write(tmp_path, text, constants_)
    assert "8=102" not in members(file)[PARAM].decode()
    np.testing.assert_array_equal(run_ncnn(file, inputs)["y"], with_integers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"z": np.int8(3)}, "its input has a zero point"),
        ({"zw": np.ones(16, np.int8)}, "its weights have a zero point"),
    ],
)
def test_a_zero_point_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        write(tmp_path, TWO, {**two_layers(), **changes})


@ncnn
def test_unsigned_integers_around_128_are_symmetric(tmp_path: Path) -> None:
    constants_ = two_layers()
    _, file = write(tmp_path, TWO, constants_)
    signed = file.read_bytes()
    _, file = write(tmp_path, TWO, {**constants_, "z": np.uint8(128)})
    assert file.read_bytes() == signed


def test_a_channel_without_weights_has_a_positive_factor(tmp_path: Path) -> None:
    constants_ = two_layers()
    constants_["wq"][3] = 0
    model, _ = write(tmp_path, TWO, constants_)
    network = lower(read_unchecked(model), model)
    assert all(np.all(row.scales.weights > 0) for row in network.layers if row.scales is not None)


def test_the_emulation_keeps_inputs_and_outputs(tmp_path: Path) -> None:
    model, _ = write(tmp_path, TWO, two_layers())
    emulated = emulation(read_unchecked(model), model)
    save_model(emulated, tmp_path / "emulation.onnx")
    read = read_unchecked(tmp_path / "emulation.onnx")
    assert [value.name for value in (*read.graph.inputs, *read.graph.outputs)] == ["x", "y"]
    assert not {node.op_type for node in read.graph} & {"QuantizeLinear", "DequantizeLinear"}


def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    model, file = write(tmp_path, TWO, two_layers())
    again = tmp_path / "again.ncnn"
    write_ncnn(model, again)
    assert again.read_bytes() == file.read_bytes()
