"""Write convolutions and matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Blob, LayerScales, Setting
from edgeq.backends.ncnn.operators.activations import FusedActivation, take_activation
from edgeq.backends.ncnn.quantize import layer_scales
from edgeq.model.graph import KernelGeometry, geometry, is_op, name_of, node_input


@dataclass(frozen=True, eq=False)
class _Numbers:
    """Hold the numbers of a layer: weights with the output channels first, a bias or None, and scales for int8."""

    weights: NDArray[Any]
    bias: NDArray[np.float32] | None
    scales: LayerScales | None

    @property
    def vectors(self) -> tuple[NDArray[np.float32], ...]:
        return () if self.bias is None else (self.bias,)


def write_conv(work: NcnnLowering, node: ir.Node) -> None:
    """Write Convolution or ConvolutionDepthWise, or InnerProduct for an image of one pixel."""
    layer = _layer(work, node, 0)
    shape, (channels, rows, columns), output = _window(work, node, layer.weights.shape[2:])
    groups, count = shape.group, layer.weights.shape[0]
    activation, result = take_activation(work, node.outputs[0])
    # In int8, ncnn's Convolution returns a wrong shape for a blob that global pooling made.
    single = (rows, columns) == (1, 1) and set(shape.kernel) == {1} and groups == 1 and not any(map(any, shape.pads))
    if single:
        _inner_product(work, work.shaped(work.blob(node.inputs[0]), (channels,)), layer, activation, result)
        return
    settings: dict[int, Setting] = {
        **_kernel_settings(count, shape),
        5: int(layer.bias is not None),
        6: layer.weights.size,
        **activation.settings(9, 10),
    }
    kind = "Convolution"
    if groups > 1:
        kind, settings[7] = "ConvolutionDepthWise", groups
    # The number of scales: one for each group, or one for each channel.
    if layer.scales is not None:
        settings[8] = 1 if groups > 1 else 2
    source = work.shaped(work.blob(node.inputs[0]), (channels, rows, columns))
    made = work.emit(
        kind, (source,), output, settings, weights=(layer.weights,), vectors=layer.vectors, scales=layer.scales
    )
    work.hold(result, made)


def write_conv_transpose(work: NcnnLowering, node: ir.Node) -> None:
    """Write Deconvolution or DeconvolutionDepthWise, which compute in float."""
    weights = work.floats(node.inputs[1])
    shape, source_dims, output = _window(work, node, weights.shape[2:])
    weights = weights.reshape(*weights.shape[:2], *shape.kernel)
    # The file has the output channels first, group by group.
    groups = shape.group
    parts = weights.reshape(groups, weights.shape[0] // groups, *weights.shape[1:]).transpose(0, 2, 1, 3, 4)
    count = weights.shape[1] * groups
    bias_value = node_input(node, 2)
    bias = work.floats(bias_value).ravel() if bias_value is not None else None
    activation, result = take_activation(work, node.outputs[0])
    full = [
        (size - 1) * stride + (kernel - 1) * dilation + 1
        for size, stride, kernel, dilation in zip(
            source_dims[1:], shape.strides, shape.kernel, shape.dilations, strict=True
        )
    ]
    settings = _kernel_settings(count, shape)
    # ONNX gives the padding at the end, or the output's size; the file has the number of rows to cut off or to add.
    for place, (cut, added) in enumerate(((16, 19), (15, 18))):
        after = full[place] - shape.pads[place][0] - output[1 + place]
        settings[cut], settings[added] = max(after, 0), max(-after, 0)
    settings |= {5: int(bias is not None), 6: weights.size, **activation.settings(9, 10)}
    kind = "Deconvolution"
    if groups > 1:
        kind, settings[7] = "DeconvolutionDepthWise", groups
    source = work.shaped(work.blob(node.inputs[0]), source_dims)
    vectors = () if bias is None else (bias,)
    work.hold(result, work.emit(kind, (source,), output, settings, weights=(parts,), vectors=vectors))


def write_gemm(work: NcnnLowering, node: ir.Node) -> None:
    """Write InnerProduct for a constant matrix."""
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    if (alpha, beta, node.attributes.get_int("transA", 0)) != (1, 1, 0):
        raise NotInNcnnError("its alpha or beta is not 1, or it transposes its input")
    _product(work, node, 0 if node.attributes.get_int("transB", 0) else 1)


def write_matmul(work: NcnnLowering, node: ir.Node) -> None:
    """Write InnerProduct for a constant matrix, or MatMul for two activations."""
    if work.is_constant(node.inputs[1]) and len(work.shape(node.inputs[1])) == 2:
        _product(work, node, 1)
        return
    shapes = [work.shape(value) for value in node.inputs[:2]]
    if min(map(len, shapes)) < 2:
        raise NotInNcnnError("it multiplies a matrix with a vector")
    rank = max(len(_without_units(shape)) for shape in shapes)
    sides = [
        work.shaped(work.blob(value), (*[1] * (rank - len(_without_units(shape))), *_without_units(shape)))
        for value, shape in zip(node.inputs, shapes, strict=False)
    ]
    batch = np.broadcast_shapes(*(side.dims[:-2] for side in sides))
    sides = [_repeated(work, side, batch) for side in sides]
    dims = (*batch, sides[0].dims[-2], sides[1].dims[-1])
    work.hold(node.outputs[0], work.emit("MatMul", sides, dims))


def _repeated(work: NcnnLowering, side: Blob, batch: tuple[int, ...]) -> Blob:
    """Return stacked matrices, repeated to the sizes `batch` if ncnn's MatMul cannot do that itself."""
    stack = side.dims[:-2]
    # ncnn repeats a side only over all stacked matrices.
    if stack in (batch, (1,) * len(batch)):
        return side
    repeats = (*(size // have for size, have in zip(batch, stack, strict=True)), 1, 1)
    return work.emit("Tile", (side,), (*batch, *side.dims[-2:]), {2: repeats})


def _without_units(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of stacked matrices without leading axes of size 1."""
    start = next((place for place, size in enumerate(shape[:-2]) if size != 1), len(shape) - 2)
    return shape[start:]


def _product(work: NcnnLowering, node: ir.Node, axis: int) -> None:
    """Write an InnerProduct with the weights `node.inputs[1]`, whose axis `axis` has the outputs."""
    layer = _layer(work, node, axis)
    if axis == 1:
        layer = _Numbers(np.ascontiguousarray(layer.weights.T), layer.bias, layer.scales)
    shape, output = work.shape(node.inputs[0]), node.outputs[0]
    if layer.bias is None:
        bias, output = _take_bias(work, output, layer.weights.shape[0])
        layer = _Numbers(layer.weights, bias, layer.scales)
    activation, result = take_activation(work, output)
    rows, features = prod(shape[:-1]), shape[-1]
    dims = (features,) if rows == 1 else (rows, features)
    _inner_product(work, work.shaped(work.blob(node.inputs[0]), dims), layer, activation, result)


def _inner_product(
    work: NcnnLowering, source: Blob, layer: _Numbers, activation: FusedActivation, result: ir.Value
) -> None:
    count = layer.weights.shape[0]
    settings: dict[int, Setting] = {
        0: count,
        1: int(layer.bias is not None),
        2: layer.weights.size,
        **activation.settings(9, 10),
    }
    if layer.scales is not None:
        settings[8] = 2
    dims = (*source.dims[:-1], count)
    made = work.emit(
        "InnerProduct", (source,), dims, settings, weights=(layer.weights,), vectors=layer.vectors, scales=layer.scales
    )
    work.hold(result, made)


def _layer(work: NcnnLowering, node: ir.Node, axis: int) -> _Numbers:
    """Return the numbers of a layer: integers if a pair rounds its input and its weights are integers."""
    bias_value = node_input(node, 2)
    params, stored = work.input_params(node.inputs[0]), work.integers(node.inputs[1])
    if params is not None and stored is not None:
        group = node.attributes.get_int("group", 1)
        weights, scales = layer_scales(*stored, params, axis, group)
    else:
        weights, scales = work.floats(node.inputs[1]), None  # type: ignore[assignment]
    count = weights.shape[axis]
    bias = None if bias_value is None else np.broadcast_to(work.floats(bias_value).ravel(), count)
    if bias_value is not None and work.floats(bias_value).size not in (1, count):
        raise NotInNcnnError("its bias differs from row to row")
    return _Numbers(weights, bias, scales)


def _take_bias(work: NcnnLowering, value: ir.Value, count: int) -> tuple[NDArray[np.float32] | None, ir.Value]:
    """Return the constant that the only reader of a product adds, and the output of the sum. If there is no such
    reader, return None and `value`.
    """
    reader = work.sole_reader(value)
    if reader is None or not is_op(reader, "Add"):
        return None, value
    added = next((v for v in reader.inputs if v is not value), None)
    if added is None or not work.is_constant(added):
        return None, value
    shape = work.shape(added)
    # Each output must get the same number in every row.
    if shape[-1:] != (count,) or prod(shape) != count or work.shape(reader.outputs[0]) != work.shape(value):
        return None, value
    return work.floats(added).ravel(), work.merge(reader)


def _kernel_settings(count: int, shape: KernelGeometry) -> dict[int, Setting]:
    (top, bottom), (left, right) = shape.pads
    return {
        0: count,
        1: shape.kernel[1],
        11: shape.kernel[0],
        2: shape.dilations[1],
        12: shape.dilations[0],
        3: shape.strides[1],
        13: shape.strides[0],
        4: left,
        15: right,
        14: top,
        16: bottom,
    }


def _window(
    work: NcnnLowering, node: ir.Node, kernel: tuple[int, ...]
) -> tuple[KernelGeometry, tuple[int, ...], tuple[int, ...]]:
    """Return how a kernel moves over an image, and the sizes of the input's and the output's blob. A sequence is an
    image of one row.
    """
    return window_of(node, kernel, work.shape(node.inputs[0]), work.shape(node.outputs[0]))


def window_of(
    node: ir.Node, kernel: tuple[int, ...], source: tuple[int, ...], output: tuple[int, ...]
) -> tuple[KernelGeometry, tuple[int, ...], tuple[int, ...]]:
    """Return the geometry of a node with windows, and the sizes of its input and output: (channels, rows, columns).

    Raises:
        NotInNcnnError: the images are not of one or two axes, or there are several of them.
    """
    if len(source) not in (3, 4):
        raise NotInNcnnError(f"its input has {len(source)} axes; edgeq writes windows on one or two axes")
    if source[0] != 1:
        raise NotInNcnnError(f"its input {name_of(node.inputs[0])!r} has {source[0]} images; ncnn takes one")
    shape = geometry(node, source[2:], tuple(kernel))
    if len(source) == 4:
        return shape, source[1:], output[1:]
    row = KernelGeometry(
        (1, *shape.kernel), (1, *shape.strides), (1, *shape.dilations), ((0, 0), *shape.pads), shape.group
    )
    return row, (source[1], 1, source[2]), (output[1], 1, output[2])
