"""Write each integer step of a program as C: its constants, its buffers and its call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.emit_c.builder import Builder, Generation, TensorLocation
from edgeq.backends.systolic.emit_c.layout import c_axis, c_order, c_shape, is_identity, moved
from edgeq.backends.systolic.emit_c.text import array, designated, float_literal
from edgeq.backends.systolic.program import Step, Tile
from edgeq.backends.systolic.recognise import Windows
from edgeq.errors import ModelError

# A larger shift of an int32 is not defined in C.
_MOST_SHIFT = 31


def output_scale(value: float, array: ArrayConfig, label: str) -> str:
    """Return an accumulator's multiplier as a C constant.

    Raises:
        ModelError: the array scales by shifting, and the multiplier is not 1 / 2^n.
    """
    if array.output_scale == "float":
        return float_literal(value)
    # Exact: a power of two has the mantissa 0.5.
    mantissa, exponent = math.frexp(value)
    shift = 1 - exponent
    if mantissa != 0.5 or not 0 <= shift <= _MOST_SHIFT:
        raise ModelError(
            f"{label}: the output multiplier {value:.9g} is not a right shift by 0 to {_MOST_SHIFT}",
            "Package for an array with a float output scale",
        )
    return str(shift)


def tile_array(label: str, tiles: Sequence[Tile], array: ArrayConfig) -> str:
    """Return the C array LABEL_tiles. It lists each tile's range of output channels and its multiplier."""
    rows = ",\n".join(
        f"    {{{tile.start}, {tile.stop}, {output_scale(tile.multiplier, array, label)}}}" for tile in tiles
    )
    return f"static const struct eq_tile {label}_tiles[{len(tiles)}] = {{\n{rows}\n}};\n"


Constants = dict[str, str | int | bool]


def emit_conv(builder: Builder, step: steps.Conv) -> None:
    """Add a convolution to the C source: parameters, weights [k·k·I][O] (HWIO), int32 biases, output, and the call.

    A depthwise convolution has its own call, which needs weights [C][k][k] and a single scale. If a depthwise layer has
    several scales, each channel is computed separately, as a slice of a convolution.
    """
    depthwise = step.depthwise and len(step.tiles) == 1
    label = builder.label("conv_dw" if step.depthwise else "conv")
    source = builder.require_image(step.input)
    _, channels, rows, cols = builder.tensor(step.input).shape
    _, outs, out_rows, out_cols = step.conv_shape
    target = builder.output(label, step.output, suffix="_out_pooled" if step.pool else "_out")
    kernel_rows, kernel_cols = step.weights.shape[2:]
    inner = kernel_rows * kernel_cols * step.weights.shape[1]
    weights = step.weights[:, 0] if depthwise else step.weights.transpose(2, 3, 1, 0).reshape(inner, outs)
    sizes: Constants = {"in_dim": rows, "out_dim": out_rows}
    if builder.generation != "2021":
        sizes = {"in_row_dim": rows, "in_col_dim": cols, "out_row_dim": out_rows, "out_col_dim": out_cols}
        sizes |= {"in_stride": channels, "weight_stride": outs, "out_stride": outs}
    # gemmini.h takes a pooling stride of 0 as "no pooling".
    pool = step.pool or steps.Pool(1, 0, 0)
    params: Constants = {
        "batch_size": builder.batch,
        **sizes,
        "kernel_size": kernel_rows,
        "in_channels": channels,
        "out_channels": outs,
        "stride": step.strides[0],
        "padding": step.pads[0],
        "bias": True,
        "depthwise": depthwise,
        "n_patches": builder.batch * out_rows * out_cols,
        "patch_size": inner,
        "output_scale": output_scale(step.tiles[0].multiplier, builder.program.array, label),
        "pool_size": pool.size,
        "pool_stride": pool.stride,
        "pool_padding": pool.padding,
        "out_dim_pooled": builder.tensor(step.output).shape[2],
        "I": builder.batch * out_rows * out_cols,
        "J": outs,
        "K": inner,
    }
    window: Constants = {
        "direct": is_direct(step, (rows, cols), builder.generation),
        "in_rows": rows,
        "in_cols": cols,
        "out_rows": out_rows,
        "out_cols": out_cols,
        "groups": step.groups,
        "kernel_rows": kernel_rows,
        "kernel_cols": kernel_cols,
        "stride_rows": step.strides[0],
        "stride_cols": step.strides[1],
        "dilation_rows": step.dilations[0],
        "dilation_cols": step.dilations[1],
        "top": step.pads[0],
        "left": step.pads[1],
        "weight_step": kernel_rows * kernel_cols if depthwise else outs // step.groups,
        "weight_row": 1 if depthwise else outs,
    }
    builder.declare(
        array("elem_t", f"{label}_w", weights, "row_align(1)"),
        array("acc_t", f"{label}_b", step.bias, "row_align_acc(1)"),
        tile_array(label, step.tiles, builder.program.array),
        f"static const struct ConvParams {label}_params = {designated(params)};\n",
        f"static const struct eq_window {label}_window = {designated(window)};\n",
    )
    # One scratch buffer serves all layers, because they run one after the other.
    builder.patches = max(builder.patches, out_rows * out_cols * inner)
    if step.pool:
        builder.unpooled = max(builder.unpooled, out_rows * out_cols * outs)
    activation = "RELU" if step.relu else "NO_ACTIVATION"
    builder.call(
        label,
        step.sources,
        f"eq_convolve(&{label}_params, &{label}_window, {label}_tiles, {len(step.tiles)}, {source},\n"
        f"                (const elem_t *){label}_w, {label}_b, {target}, {activation}, eq_patches,\n"
        "                eq_unpooled, mode);",
    )


def is_direct(step: steps.Conv, size: tuple[int, int], generation: Generation) -> bool:
    """Return whether gemmini.h's convolution calls can compute a layer. Other layers become patches and a product, with
    identical results.

    The calls need regular windows. The 2021 generation also needs square images. In that generation, layers with groups
    or several tiles are not direct either, because the depthwise call of that generation was wrong.
    """
    windows = Windows((step.weights.shape[2], step.weights.shape[3]), step.strides, step.dilations, step.pads)
    if generation == "2021":
        square = size[0] == size[1] and step.conv_shape[2] == step.conv_shape[3]
        return windows.regular and square and step.groups == 1 and len(step.tiles) == 1
    return windows.regular


def emit_step(builder: Builder, step: Step) -> None:
    """Add one integer step to the C source."""
    _EMITTED_BY[type(step)](builder, step)


def _fc(builder: Builder, step: steps.Fc) -> None:
    """Add a fully connected layer to the C source.

    If each sample is one row, the input keeps its order in memory, and the rows of the weights are permuted to match.
    For NHWC, the order of the rows changes from C, H, W to H, W, C.
    """
    label = builder.label("fc")
    outs, inner = step.weights.shape
    rows = builder.size(step.input) // inner
    weights = step.weights.T
    # Permuting the weights here costs nothing at run time.
    if rows == 1:
        place = builder.places[step.input]
        source, weights = place.pointer, weights[place.order]
    else:
        source = builder.request(step.input, np.arange(builder.size(step.input)))
    target = builder.output(label, step.output, order=np.arange(builder.size(step.output)))
    params: dict[str, str | int | bool] = {
        "batch_size": builder.batch,
        "in_features": inner,
        "out_features": outs,
        "output_scale": output_scale(step.tiles[0].multiplier, builder.program.array, label),
        "bias": True,
        "I": builder.batch * rows,
        "J": outs,
        "K": inner,
    }
    builder.declare(
        array("elem_t", f"{label}_w", weights, "row_align(1)"),
        array("acc_t", f"{label}_b", step.bias, "row_align_acc(1)"),
        tile_array(label, step.tiles, builder.program.array),
        f"static const struct FcParams {label}_params = {designated(params)};\n",
    )
    activation = "RELU" if step.relu else "NO_ACTIVATION"
    builder.call(
        label,
        step.sources,
        f"eq_fully_connected(&{label}_params, {label}_tiles, {len(step.tiles)}, {source}, (const elem_t *){label}_w,\n"
        f"                       {label}_b, {target}, {activation}, mode);",
    )


def _add(builder: Builder, step: steps.ResidualAdd) -> None:
    label = builder.label("add")
    place = builder.places[step.left]
    # The sum works element by element, so any order will do if both operands have it.
    right = builder.request(step.right, place.order)
    target = builder.output(label, step.output, order=place.order)
    inner = c_shape(builder.tensor(step.output).shape)
    # The call takes a matrix; rows of channels keep its transfers contiguous.
    columns = inner[-1] if inner else 1
    rows = builder.batch * builder.size(step.output) // columns
    left_scale, right_scale = (float_literal(m) for m in (step.left_multiplier, step.right_multiplier))
    builder.call(
        label,
        step.sources,
        f"tiled_resadd_auto({rows}, {columns}, {left_scale}, {right_scale}, ACC_SCALE_IDENTITY, {place.pointer},\n"
        f"                      {right}, {target}, {str(step.relu).lower()}, eq_adding(mode));",
    )


def _max_pool(builder: Builder, step: steps.MaxPool) -> None:
    label = builder.label("max_pool")
    _, _, statement = _pooling(builder, label, step, (*step.dilations, *step.pads[:2]))
    builder.call(label, step.sources, _loop(builder, statement, 4))


def _average_pool(builder: Builder, step: steps.AveragePool) -> None:
    label = builder.label("average_pool")
    source, target, on_core = _pooling(builder, label, step, (*step.pads[:2], float_literal(step.multiplier)))
    _, channels, rows, cols = builder.tensor(step.input).shape
    is_mean = np.float32(step.multiplier) == np.float32(1) / np.float32(rows * cols)
    is_global = step.kernel == (rows, cols) and builder.tensor(step.output).shape[2:] == (1, 1)
    # The array's own call averages whole square images, without a change of scale.
    if is_mean and is_global and rows == cols and not any(step.pads):
        on_array = f"tiled_global_average_auto({source}, {target}, {builder.batch}, {channels}, {rows}, WS);"
        statement = f"if (mode.type == WS)\n        {on_array}\n    else\n        {_loop(builder, on_core, 8)}"
        builder.call(label, step.sources, statement)
    else:
        builder.call(label, step.sources, _loop(builder, on_core, 4))


def _pooling(
    builder: Builder, label: str, step: steps.MaxPool | steps.AveragePool, arguments: Sequence[int | str]
) -> tuple[str, str, str]:
    """Return pointers to the input and output of a pooling, and the call that pools one image on the core.

    Args:
        arguments: the last arguments of the call, which follow the sizes, kernel and strides.
    """
    source = builder.require_image(step.input)
    target = builder.output(label, step.output)
    _, channels, rows, cols = builder.tensor(step.input).shape
    out_rows, out_cols = builder.tensor(step.output).shape[2:]
    # The label without its number is the name of the function.
    begin = f"eq_{label.rpartition('_')[0]}("
    geometry = ", ".join(map(str, (*step.kernel, *step.strides, *arguments)))
    call = (
        f"{begin}{source} + image * {rows * cols * channels}, {rows}, {cols}, {channels},\n{' ' * (8 + len(begin))}"
        f"{target} + image * {builder.size(step.output)}, {out_rows}, {out_cols}, {geometry});"
    )
    return source, target, call


def _clamp(builder: Builder, step: steps.Clamp) -> None:
    _emit_elementwise(builder, step, "clamp", "eq_clamp_all", f"{step.low}, {step.high}")


def _quantize(builder: Builder, step: steps.Quantize) -> None:
    _emit_elementwise(builder, step, "quantize", "eq_quantize", _scale(builder, step.output))


def _emit_elementwise(
    builder: Builder, step: steps.Clamp | steps.Quantize, kind: str, function: str, arguments: str
) -> None:
    """Add a call that computes each output element from the input element in the same position."""
    label = builder.label(kind)
    place = builder.places[step.input]
    target = builder.output(label, step.output, order=place.order)
    count = builder.batch * builder.size(step.output)
    names = step.sources if isinstance(step, steps.Clamp) else ()
    builder.call(label, names, f"{function}({place.pointer}, {target}, {count}, {arguments});")


def _concat(builder: Builder, step: steps.Concat) -> None:
    label = builder.label("concat")
    sources = [builder.require_image(name) for name in step.inputs]
    target = builder.output(label, step.output)
    shape = builder.tensor(step.output).shape
    # Without the batch.
    axis = c_axis(shape, step.axis) - 1
    inner = c_shape(shape)
    rows = builder.batch * math.prod(inner[:axis])
    row_size = math.prod(inner[axis:])
    statements, start = [], 0
    for name, source in zip(step.inputs, sources, strict=True):
        run = math.prod(c_shape(builder.tensor(name).shape)[axis:])
        statements.append(f"eq_place({source}, {target} + {start}, {rows}, {run}, {row_size});")
        start += run
    builder.call(label, step.sources, "\n    ".join(statements))


def _rearrange(builder: Builder, step: steps.Rearrange) -> None:
    """Add a data movement to the C source, if it moves anything.

    A reshape copies nothing, and some permutations of NCHW leave the order in NHWC unchanged. In both cases the output
    shares its input's buffer. A later layer that needs another order requests a copy. The exception is a fully
    connected layer with one row per sample, which does not need a copy.
    """
    place = builder.places[step.input]
    if step.index is None:
        builder.places[step.output] = TensorLocation(place.pointer, place.order)
        return
    order = c_order(builder.tensor(step.output).shape)
    index = moved(step.index, place.order, order)
    if is_identity(index, place.order.size):
        builder.places[step.output] = TensorLocation(place.pointer, order)
        return
    label = builder.label("move")
    builder.declare(array("int32_t", f"{label}_index", index))
    target = builder.output(label, step.output)
    builder.rearrange(label, step.sources, place, target, index.size)


def _dequantize(builder: Builder, step: steps.Dequantize) -> None:
    label = builder.label("real")
    place = builder.places[step.input]
    count = builder.batch * builder.size(step.input)
    # Floats go straight to the host, so this buffer is not compared with the simulator's int8.
    builder.declare(f"static float {label}_out[{count}];\n")
    builder.places[step.output] = TensorLocation(f"{label}_out", place.order)
    scale = _scale(builder, step.input)
    builder.call(label, (), f"eq_dequantize({place.pointer}, {label}_out, {count}, {scale});")


def _scale(builder: Builder, tensor: str) -> str:
    scale = builder.tensor(tensor).scale
    assert scale is not None, "an int8 tensor has a scale"
    return float_literal(scale)


def _loop(builder: Builder, statement: str, indent: int) -> str:
    return f"for (size_t image = 0; image < {builder.batch}; image++)\n{' ' * indent}    {statement}"


_EMITTED_BY: Mapping[type, Callable[[Builder, Any], None]] = {
    steps.Conv: emit_conv,
    steps.Fc: _fc,
    steps.ResidualAdd: _add,
    steps.MaxPool: _max_pool,
    steps.AveragePool: _average_pool,
    steps.Clamp: _clamp,
    steps.Concat: _concat,
    steps.Rearrange: _rearrange,
    steps.Dequantize: _dequantize,
    steps.Quantize: _quantize,
}
