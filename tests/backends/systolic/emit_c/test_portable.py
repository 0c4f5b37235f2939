"""Test the portable C of the gemmini.h calls against the same arithmetic in Python's integers."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.backends.systolic.arithmetic import multiply as simulated
from edgeq.backends.systolic.array import ArrayConfig, product_tiles
from edgeq.backends.systolic.emit_c.bundle import C, own_header
from tests.backends.systolic.emit_c.compilers import RISCV, done, need

OS, WS, CPU = 0, 1, 2
PORTABLE = C / "portable"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
Library = dict[str, ctypes.CDLL]
f32 = np.float32


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Compile the portable C by generation; "shift" is an array that shifts its outputs."""
    need("gcc")
    built: Library = {}
    for name, options in (("2021", ["-DEDGEQ_GENERATION=2021"]), ("2023", []), ("shift", [])):
        folder = tmp_path_factory.mktemp(f"portable_{name}")
        (folder / "include").mkdir()
        for file in ("gemmini.h", "gemmini_nn.h"):
            (folder / "include" / file).write_text((PORTABLE / "include" / file).read_text())
        array = ArrayConfig(output_scale="shift") if name == "shift" else ArrayConfig()
        (folder / "include" / "gemmini_params.h").write_text(own_header(array))
        source = folder / "gemmini_portable.c"  # a copy, because it includes the headers next to it
        source.write_text((PORTABLE / source.name).read_text())
        done("gcc", *FLAGS, *options, "-shared", "-fPIC", source, "-o", folder / "p.so")
        built[name] = ctypes.CDLL(str(folder / "p.so"))
    return built


def near_even(value: float) -> int:
    return int(np.clip(np.rint(f32(value)), -128, 127))


def as_header(value: float) -> int:
    """Round like the header: of i = trunc(v) and next = trunc(f32(v ± 1)), return the nearer one, on a tie the even
    one.
    """
    v = f32(value)
    if abs(v) > 1000:
        return 127 if v > 0 else -128
    i = int(v)
    following = int(f32(v - f32(1)) if v < 0 else f32(v + f32(1)))
    fraction = abs(f32(v - f32(i)))
    rounded = i if fraction < 0.5 else following if fraction > 0.5 else i if i % 2 == 0 else following
    return int(np.clip(rounded, -128, 127))


def scaled(acc: int, scale: float, kind: int) -> int:
    product = f32(f32(acc) * f32(scale))
    return as_header(product) if kind == CPU else near_even(product)


def wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def convolution(
    x: NDArray[Any],
    w: NDArray[Any],
    bias: Any,
    stride: int,
    dilation: int,
    pad: int,
    scale: float,
    relu: bool,
    kind: int,
) -> NDArray[np.int8]:
    """Convolve x [H, W, C] with w [k, k, C, O] in plain loops."""
    rows, cols, channels = x.shape
    k, _, _, outs = w.shape
    height = (rows + 2 * pad - dilation * (k - 1) - 1) // stride + 1
    width = (cols + 2 * pad - dilation * (k - 1) - 1) // stride + 1
    y = np.zeros((height, width, outs), np.int8)
    for r, c, o in itertools.product(range(height), range(width), range(outs)):
        acc = 0 if bias is None else int(bias[o])
        for i, j in itertools.product(range(k), range(k)):
            row, col = r * stride + i * dilation - pad, c * stride + j * dilation - pad
            if 0 <= row < rows and 0 <= col < cols:
                acc += sum(int(x[row, col, n]) * int(w[i, j, n, o]) for n in range(channels))
        value = scaled(wrapped(acc), scale, kind)
        y[r, c, o] = max(value, 0) if relu else value
    return y


def pooled(y: NDArray[np.int8], size: int, stride: int, pad: int) -> NDArray[np.int8]:
    padded = np.pad(y, ((pad, pad), (pad, pad), (0, 0)))
    rows, cols = ((extent - size) // stride + 1 for extent in padded.shape[:2])
    out = np.zeros((rows, cols, y.shape[2]), np.int8)
    for r, c in itertools.product(range(rows), range(cols)):
        out[r, c] = padded[r * stride : r * stride + size, c * stride : c * stride + size].max(axis=(0, 1))
    return out


def pointer(array: NDArray[Any] | None) -> Any:
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


def int8s(random: np.random.Generator, *shape: int) -> NDArray[np.int8]:
    return random.integers(-128, 128, shape).astype(np.int8)


@pytest.mark.parametrize("kind", [WS, CPU])
@pytest.mark.parametrize(
    ("k", "stride", "dilation", "pad", "pool", "relu", "biased"),
    [
        (3, 1, 1, 1, None, True, True),
        (3, 2, 1, 0, None, False, False),
        (1, 1, 1, 0, None, False, True),
        (2, 1, 2, 1, None, True, True),
        (3, 1, 1, 1, (3, 2, 1), True, True),
        (2, 1, 1, 0, (2, 2, 0), False, True),
        (3, 2, 1, 1, (2, 1, 1), False, False),
    ],
)
def test_convolutions(
    library: Library, kind: int, k: int, stride: int, dilation: int, pad: int, pool: Any, relu: bool, biased: bool
) -> None:
    random = np.random.default_rng(k * 100 + stride * 10 + pad)
    batch, size, channels, outs = 2, 7, 3, 70  # more outputs than the C computes at once
    scale = 0.004999999888241291
    x, w = int8s(random, batch, size, size, channels), int8s(random, k, k, channels, outs)
    bias = random.integers(-9000, 9000, outs).astype(np.int32) if biased else None
    expected = np.stack([convolution(image, w, bias, stride, dilation, pad, scale, relu, kind) for image in x])
    before = expected.shape[1]
    if pool:
        expected = np.stack([pooled(image, *pool) for image in expected])
    arguments = (False,) * 5, pointer(x), pointer(w), pointer(bias)
    tail = (*(pool or (1, 0, 0)), kind)
    shapes = (stride, 1, dilation, pad, k)
    for name in ("2021", "2023"):
        got = np.zeros_like(expected)
        sizes = (size, channels, outs, before) if name == "2021" else (size, size, channels, outs, before, before)
        shift = (ctypes.c_size_t(0),) if name == "2021" else ()
        call = library[name].tiled_conv_auto
        flags, *data = arguments
        call(batch, *sizes, *shapes, *flags, *data, pointer(got), int(relu), ctypes.c_float(scale), *shift, *tail)
        assert np.array_equal(got, expected), name
    got, half = np.zeros_like(expected), outs // 2
    for start in (0, half):  # two slices of the output channels
        sizes = (size, size, channels, half, before, before, *shapes, channels, outs, outs)
        flags, (inputs, *_) = arguments[0], arguments[1:]
        library["2023"].tiled_conv_stride_auto(
            batch, *sizes, *flags, inputs, pointer(w.reshape(-1, outs)[:, start:]),
            pointer(bias[start:]) if biased else None, pointer(got.reshape(-1)[start:]), int(relu),
            ctypes.c_float(scale), *tail,
        )  # fmt: skip
    assert np.array_equal(got, expected)


def test_depthwise(library: Library) -> None:
    random = np.random.default_rng(5)
    batch, rows, cols, channels, scale = 2, 6, 9, 5, 0.01
    x, w = int8s(random, batch, rows, cols, channels), int8s(random, channels, 3, 3)
    bias = random.integers(-900, 900, channels).astype(np.int32)
    expected = np.concatenate(
        [
            np.stack([convolution(i[..., [c]], w[c, :, :, None, None], bias[[c]], 2, 1, 1, scale, True, WS) for i in x])
            for c in range(channels)
        ],
        axis=3,
    )
    got = np.zeros_like(expected)
    library["2023"].tiled_conv_dw_auto(
        batch, rows, cols, channels, *expected.shape[1:3], 2, 1, 3, pointer(x), pointer(w), pointer(bias), pointer(got),
        1, ctypes.c_float(scale), 1, 0, 0, WS,
    )  # fmt: skip
    assert np.array_equal(got, expected)


def multiply(library: ctypes.CDLL, a: Any, b: Any, d: Any, kind: int, **given: Any) -> NDArray[Any]:
    """Call tiled_matmul_auto with the simplest value for every argument that is not in `given`."""
    i, k = a.shape[::-1] if given.get("transpose_a") else a.shape
    j = b.shape[0] if given.get("transpose_b") else b.shape[1]
    out = np.zeros((i, j), np.int32 if given.get("full") else np.int8)
    sizes = [ctypes.c_size_t(n) for n in (i, j, k)]
    strides = [ctypes.c_size_t(n) for n in (a.shape[1], b.shape[1], j, j)]
    scales = (ctypes.c_float(given.get("scale_a", 1)), ctypes.c_float(given.get("scale_b", 1)), 1)
    scale = given.get("shift", ctypes.c_float(given.get("scale", 1)))
    flags = (given.get("repeat", False), given.get("transpose_a", False), given.get("transpose_b", False))
    library.tiled_matmul_auto(
        *sizes, pointer(a), pointer(b), pointer(d), pointer(out), *strides, *scales, int(given.get("relu", False)),
        scale, 0 if "shift" in given else ctypes.c_float(0), *flags, given.get("full", False),
        given.get("low", False), 0, kind,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", [WS, CPU])
@pytest.mark.parametrize("transposed", ["", "a", "b"])
def test_products(library: Library, kind: int, transposed: str) -> None:
    random = np.random.default_rng(1)
    a, b, d = int8s(random, 9, 40), int8s(random, 40, 67), random.integers(-5000, 5000, (9, 67)).astype(np.int32)
    exact = a.astype(int) @ b.astype(int)
    scale = 0.0016
    operands = (
        np.ascontiguousarray(a.T) if transposed == "a" else a,
        np.ascontiguousarray(b.T) if transposed == "b" else b,
    )
    given = {f"transpose_{transposed}": True} if transposed else {}
    expected = [[max(scaled(int(v), scale, kind), 0) for v in row] for row in exact + d]
    assert multiply(library["2023"], *operands, d, kind, scale=scale, relu=True, **given).tolist() == expected
    repeated = multiply(library["2023"], *operands, d, kind, scale=scale, repeat=True, **given)
    assert repeated.tolist() == [[scaled(int(v), scale, kind) for v in row] for row in exact + d[0]]
    assert np.array_equal(multiply(library["2023"], *operands, d, kind, full=True, **given), exact + d)
    low = int8s(random, 9, 67)
    assert np.array_equal(multiply(library["2023"], *operands, low, kind, full=True, low=True, **given), exact + low)
    assert np.array_equal(multiply(library["2023"], *operands, None, kind, full=True, **given), exact)
    half = [[scaled(int(v), 0.3, kind) for v in row] for row in a]
    operand = np.ascontiguousarray(operands[0])
    halved = multiply(library["2023"], operand, operands[1], None, kind, full=True, scale_a=0.3, **given)
    assert np.array_equal(halved, np.array(half) @ b.astype(int))


def test_products_wrap_and_output_stationary_ones_clip_partial_sums(library: Library) -> None:
    a, b = np.full((1, 4096), -128, np.int8), np.full((4096, 1), -128, np.int8)
    top = np.int32([[2**31 - 5]])
    assert multiply(library["2023"], a, b, top, WS, full=True)[0, 0] == wrapped(2**31 - 5 + 4096 * 128 * 128)
    # With one row and one column, a tile is as deep as half of the scratchpad, so everything is one partial sum.
    assert multiply(library["2023"], a, b, None, OS, full=True)[0, 0] == 2**19 - 1
    assert multiply(library["2023"], a, -(b + 1), None, OS, full=True)[0, 0] == -(2**19)


@pytest.mark.parametrize("sizes", [(64, 96, 700), (300, 16, 1100), (16, 16, 9000), (500, 500, 40)])
def test_partial_sums_are_those_of_the_simulators_tiles(library: Library, sizes: tuple[int, int, int]) -> None:
    rows, columns, depth = sizes
    random = np.random.default_rng(6)
    a, b = int8s(random, rows, depth) // 4 + 90, int8s(random, depth, columns) // 2 + 40
    a, b = a.astype(np.int8), b.astype(np.int8)
    tile = product_tiles(rows, columns, depth, ArrayConfig()).k * 16
    expected = simulated(a.astype(float), b.astype(float), tile)
    assert np.array_equal(multiply(library["2023"], a, b, None, OS, full=True), expected)
    assert not np.array_equal(expected, a.astype(int) @ b.astype(int)) or depth < 100


def test_rounding_of_every_kind_of_value(library: Library) -> None:
    """Rounding is right around each half and power of two, where the two roundings differ, and far out of range."""
    edges = [f32(n / 2) for n in range(-300, 301)]
    values = [v for e in edges for v in (np.nextafter(e, f32(-1e9)), e, np.nextafter(e, f32(1e9)))]
    values += [f32(1e6), f32(-1e6), f32(3e9), f32(-3e9)]
    unit = np.int8([[1]])
    differ = 0
    for value in values:
        for kind in (WS, CPU):
            got = multiply(library["2023"], unit, unit, None, kind, scale=float(value))[0, 0]
            assert got == scaled(1, float(value), kind), (value, kind)
        differ += scaled(1, float(value), WS) != scaled(1, float(value), CPU)
    assert differ == 14


def test_shifts_round_half_to_even(library: Library) -> None:
    zero = np.int8([[0]])
    for acc in [*range(-40, 41), 2**31 - 1, -(2**31), 64 * 2**18 + 1, 129 * 2**17]:
        for shift in (0, 1, 2, 3, 18, 31):
            got = multiply(library["shift"], zero, zero, np.int32([[acc]]), WS, shift=shift)[0, 0]
            down, fraction = divmod(acc, 2**shift)
            up = 2 * fraction > 2**shift or (2 * fraction == 2**shift and down % 2 == 1)
            assert got == np.clip(down + up, -128, 127), (acc, shift)


@pytest.mark.parametrize("kind", [WS, CPU])
def test_additions(library: Library, kind: int) -> None:
    random = np.random.default_rng(2)
    a, b = int8s(random, 40, 16), int8s(random, 40, 16)
    for left, right, relu in ((0.33333331, 1.0, False), (0.77, 0.45, True), (1.9, 0.5, False)):
        out = np.zeros_like(a)
        sizes = (ctypes.c_size_t(40), ctypes.c_size_t(16))
        scales = (ctypes.c_float(left), ctypes.c_float(right), ctypes.c_float(1))
        library["2023"].tiled_resadd_auto(*sizes, *scales, pointer(a), pointer(b), pointer(out), relu, kind)
        sums = [scaled(int(p), left, kind) + scaled(int(q), right, kind) for p, q in zip(a.flat, b.flat, strict=True)]
        assert out.ravel().tolist() == [int(np.clip(s, 0 if relu else -128, 127)) for s in sums]


def test_global_averages(library: Library) -> None:
    random = np.random.default_rng(3)
    x = int8s(random, 2, 7, 7, 11)
    sums = x.astype(int).sum(axis=(1, 2))
    inverse = f32(1) / f32(49)
    for kind in (WS, CPU):
        out = np.zeros((2, 11), np.int8)
        library["2023"].tiled_global_average_auto(pointer(x), pointer(out), 2, 11, 7, kind)
        expected = [scaled(int(s), float(inverse), WS) if kind == WS else int((s + 24) / 49) for s in sums.flat]
        assert out.ravel().tolist() == expected


def test_calls_that_are_not_known_say_so(tmp_path: Path) -> None:
    need("gcc")
    call = "tiled_conv_auto(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, true, 0, 0, 0, 0, x, x, 0, y, 0, 1, 1, 0, 0, WS);"
    main = f"static const elem_t x[1]; static elem_t y[1];\nint main(void) {{ {call} return 0; }}\n"
    (tmp_path / "w.c").write_text(f'#include "include/gemmini.h"\n{main}')
    done("gcc", f"-I{PORTABLE}", "w.c", PORTABLE / "gemmini_portable.c", "-o", "w", folder=tmp_path)
    with pytest.raises(AssertionError, match="rotated weights are not known"):
        done("./w", folder=tmp_path)


@pytest.mark.slow
def test_riscv_computes_what_this_machine_does(tmp_path: Path) -> None:
    """A product, an addition and a pooled convolution of pseudo-random numbers give the same results natively and under
    qemu.
    """
    need("gcc", *RISCV)
    (tmp_path / "c.c").write_text(CALLS)
    sources = ["c.c", str(PORTABLE / "gemmini_portable.c"), f"-I{PORTABLE}", *FLAGS]
    done("gcc", *sources, "-o", "native", folder=tmp_path)
    done("riscv64-linux-gnu-gcc", "-static", *sources, "-o", "riscv", folder=tmp_path)
    native = done("./native", folder=tmp_path)
    assert len(set(native.split())) > 100
    assert done("qemu-riscv64", "./riscv", folder=tmp_path) == native


CALLS = """
#include <stdio.h>
#include "include/gemmini.h"
static uint32_t state = 1;
static int next(void) { state = state * 1664525u + 1013904223u; return (int8_t)(state >> 24); }
static elem_t x[12 * 12 * 8], w[9 * 8 * 24], y[12 * 12 * 24], z[12 * 12 * 24];
static acc_t b[24];
int main(void) {
    for (size_t n = 0; n < sizeof x; n++) x[n] = (elem_t)next();
    for (size_t n = 0; n < sizeof w; n++) w[n] = (elem_t)next();
    for (int n = 0; n < 24; n++) b[n] = 50 * next();
    for (int kind = WS; kind <= CPU; kind++) {
        tiled_conv_auto(1, 12, 12, 8, 24, 12, 12, 1, 1, 1, 1, 3, 0, 0, 0, 0, 0, x, w, b, y, RELU, 0.0007f, 3, 2, 1,
                        kind);
        tiled_matmul_auto(36, 24, 24, y, w, b, z, 24, 24, 24, 24, 1, 1, 1, 0, 0.003f, 0, 1, 0, 0, 0, 0, 0, kind);
        tiled_resadd_auto(36, 24, 0.9f, 0.33333331f, 1, y, z, z, 0, kind);
        for (int n = 0; n < 36 * 24; n++) printf("%d\\n", z[n]);
    }
    return 0;
}
"""
