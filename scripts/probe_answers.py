"""Make models whose exact outputs are known, one for each operator and pair of types. `probe_runtime.py` runs them in
each onnxruntime release.

A model contains its operator in several shapes, each with its own input and output. The file next to it, NAME.npz,
contains the inputs ("x0" ...) and the expected outputs ("y0" ...). Weights are at most 64 in magnitude, so that kernels
that add two products in 16 bits give the same outputs. The models called "extreme" use all byte values, including -128
times -128.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

PAIRS = (("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8"), ("int8", "uint8"))
_SHORT = {"uint8": "u8", "int8": "s8"}
_KINDS = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "int32": TensorProto.INT32, "float": TensorProto.FLOAT}
# (rows, products, columns), with sizes near the limits at which kernels split a matrix.
_PRODUCTS = (
    (1, 4, 4), (1, 96, 33), (2, 27, 16), (5, 32, 32), (6, 64, 8), (16, 65, 24), (31, 64, 16), (32, 64, 64),
    (33, 128, 48), (48, 27, 32), (100, 256, 17),
)  # fmt: skip
# (channels, image size, output channels, kernel size, stride, groups).
_CONVOLUTIONS = (
    (3, 32, 24, 3, 2, 1), (8, 8, 16, 1, 1, 1), (16, 9, 33, 3, 1, 1), (64, 8, 64, 1, 1, 1), (16, 8, 16, 3, 1, 16),
    (8, 8, 12, 3, 1, 2),
)  # fmt: skip
# The padding of the height and of the width, which a kernel may take for one number.
_PADDINGS = {"": ((0, 0), (1, 1)), " with uneven padding": ((0, 1), (1, 0), (1, 2))}
_INTEGER = ("MatMulInteger", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "ConvInteger", "QLinearConv")
_CONTRIB = frozenset({"QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits", "QLinearAdd"})

Array = NDArray[Any]


class _Model:
    """Collect the nodes of a model. Each node has its own input and output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.arrays: dict[str, Array] = {}

    def add(self, op: str, x: Array, answer: Array, constants: list[Array | None], **attributes: Any) -> None:
        number = len(self.nodes)
        names = []
        for place, array in enumerate(constants):
            names.append("" if array is None else f"c{number}_{place}")
            if array is not None:
                self.constants.append(numpy_helper.from_array(array, names[-1]))
        domain = "com.microsoft" if op in _CONTRIB else ""
        self.nodes.append(helper.make_node(op, [f"x{number}", *names], [f"y{number}"], domain=domain, **attributes))
        self.arrays |= {f"x{number}": x, f"y{number}": answer}

    def save(self, path: Path) -> None:
        def infos(letter: str) -> list[Any]:
            return [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in self.arrays.items()
                if name.startswith(letter)
            ]

        graph = helper.make_graph(self.nodes, "answers", infos("x"), infos("y"), self.constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
        np.savez(path.with_suffix(".npz"), **self.arrays)


def write_answers(folder: Path) -> None:
    """Write the models `answer OPERATOR TYPES.onnx`, each with a file of its expected outputs next to it."""
    rng = np.random.default_rng(0)
    for op in _INTEGER:
        for a, b in PAIRS:
            for extreme in (False, True):
                model = _Model()
                for shape in _CONVOLUTIONS if "Conv" in op else _PRODUCTS:
                    for fill in (None, "least", "most") if extreme else (None,):
                        _integer(model, op, _bytes(rng, a, b, shape, "Conv" in op, extreme, fill), shape)
                model.save(folder / f"answer {op} {_SHORT[a]}{_SHORT[b]}{' extreme' * extreme}.onnx")
    for bits in (4, 8):
        for symmetric in (True, False):
            model = _Model()
            for rows in (1, 2, 8):
                for block in (16, 32, 64, 128):
                    _nbits(model, rng, rows, bits, block, symmetric)
            model.save(folder / f"answer MatMulNBits {bits} {'' if symmetric else 'a'}symmetric.onnx")
    for b in ("uint8", "int8"):
        model = _Model()
        for shape in _PRODUCTS:
            x, w, _, zero = _bytes(rng, "uint8", b, shape, False, False, None)
            x.ravel()[:2] = 0, 255  # with these values, the measured range has a step of 1
            values = x.astype(np.float32)
            answer = (x.astype(np.int64) @ (w.astype(np.int64) - int(zero))).astype(np.float32)
            model.add("DynamicQuantizeMatMul", values, answer, [w, np.float32(1)[None], zero[None]])
        model.save(folder / f"answer DynamicQuantizeMatMul {_SHORT[b]}.onnx")
    for kind in ("uint8", "int8"):
        model = _Model()
        one, zero = np.array(1, np.float32), np.array(3, kind)
        for size in (1, 15, 64, 1000):
            x, y = (_values(rng, kind, (size,)) for _ in range(2))
            total = x.astype(np.int64) + y - 3
            model.add("QLinearAdd", x, _cut(total, kind), [one, zero, y, one, zero, one, zero])
        model.save(folder / f"answer QLinearAdd {_SHORT[kind]}.onnx")

    for suffix, paddings in _PADDINGS.items():
        model = _Model()
        for height, width in paddings:
            x, w = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((1, 16, 10, 12), (32, 16, 3, 3)))
            padded = np.pad(x, ((0, 0), (0, 0), (height, height), (width, width)))
            model.add("Conv", x, _convolution(padded, w, 1, 1, pad=False), [w], pads=[height, width] * 2)
        model.save(folder / f"answer Conv f32{suffix}.onnx")


def _values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    levels = np.iinfo(kind)
    return rng.integers(levels.min, levels.max, shape, kind, endpoint=True)


def _bytes(
    rng: np.random.Generator, a: str, b: str, shape: tuple[int, ...], conv: bool, extreme: bool, fill: str | None
) -> tuple[Array, Array, Array, Array]:
    """Return an activation, a weight, and their zero points."""
    if conv:
        channels, size, outs, kernel, _, groups = shape
        left, right = (1, channels, size, size), (outs, channels // groups, kernel, kernel)
    else:
        left, right = (shape[0], shape[1]), (shape[1], shape[2])
    zeros = [np.array(128 if kind == "uint8" else 0, kind) for kind in (a, b)]
    x, w = _values(rng, a, left), _values(rng, b, right)
    if fill is not None:
        x, w = (np.full(v.shape, getattr(np.iinfo(v.dtype), "min" if fill == "least" else "max")) for v in (x, w))
        x, w = x.astype(a), w.astype(b)
    if not extreme:
        w = (rng.integers(-64, 64, right) + int(zeros[1])).astype(b)
    return x, w, zeros[0], zeros[1]


def _integer(model: _Model, op: str, operands: tuple[Array, Array, Array, Array], shape: tuple[int, ...]) -> None:
    x, w, x_zero, w_zero = operands
    left, right = x.astype(np.int64) - int(x_zero), w.astype(np.int64) - int(w_zero)
    attributes: dict[str, Any] = {}
    if "Conv" in op:
        sums = _convolution(left, right, shape[4], shape[5])
        attributes = {"strides": [shape[4]] * 2, "group": shape[5], "pads": [w.shape[2] // 2] * 4}
    else:
        sums = left @ right
    # A power of two, so that each value is rounded only once.
    shift = max(0, int(np.ceil(np.log2(max(1, int(np.abs(sums).max())) / 120))))
    one, scale, y_zero = np.array(1, np.float32), np.array(2.0**shift, np.float32), np.array(1, x.dtype)
    quantized = _cut(np.rint(sums / 2.0**shift).astype(np.int64) + 1, x.dtype)
    whole, real = sums.astype(np.int32), sums.astype(np.float32)
    answer, constants = {
        "MatMulInteger": (whole, [w, x_zero, w_zero]),
        "ConvInteger": (whole, [w, x_zero, w_zero]),
        "QLinearMatMul": (quantized, [one, x_zero, w, one, w_zero, scale, y_zero]),
        "QLinearConv": (quantized, [one, x_zero, w, one, w_zero, scale, y_zero]),
        "QGemm": (quantized, [one, x_zero, w, one, w_zero, None, scale, y_zero]),
        "MatMulIntegerToFloat": (real, [w, one, one, x_zero, w_zero]),
    }[op]
    model.add(op, x, answer, list(constants), **attributes)


def _convolution(x: Array, w: Array, stride: int, groups: int, *, pad: bool = True) -> Array:
    kernel = w.shape[2]
    padded = np.pad(x, ((0, 0), (0, 0), *[(kernel // 2,) * 2] * 2)) if pad else x
    view = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]
    parts = [
        np.einsum("ncijkl,ockl->noij", part, weights)
        for part, weights in zip(np.split(view, groups, 1), np.split(w, groups), strict=True)
    ]
    return np.concatenate(parts, 1)


def _nbits(model: _Model, rng: np.random.Generator, rows: int, bits: int, block: int, symmetric: bool) -> None:
    depth, columns = 256, 96
    blocks = depth // block
    x = rng.integers(-127, 128, (rows, depth))
    x[:, ::16] = 127  # the step of every block is 1
    w = rng.integers(0, 2**bits, (columns, depth))
    zeros = np.full((columns, blocks), 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, (columns, blocks))
    answer = x @ (w - np.repeat(zeros, block, 1)).T
    packed = (w[:, 0::2] | w[:, 1::2] << 4) if bits == 4 else w
    points = np.pad(zeros, ((0, 0), (0, blocks % 2))) if bits == 4 else zeros
    points = (points[:, 0::2] | points[:, 1::2] << 4) if bits == 4 else points
    scales = np.ones(columns * blocks, np.float32)
    constants = [packed.astype(np.uint8).reshape(columns, blocks, -1), scales]
    if not symmetric:
        constants.append(points.astype(np.uint8).ravel())
    attributes = {"K": depth, "N": columns, "bits": bits, "block_size": block, "accuracy_level": 4}
    model.add("MatMulNBits", x.astype(np.float32), answer.astype(np.float32), list(constants), **attributes)


def _cut(values: Array, kind: Any) -> Array:
    levels = np.iinfo(kind)
    return np.clip(values, levels.min, levels.max).astype(kind)
