"""Each step of a program as C: declarations for params.h, a call for main.c, a buffer for what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.emit_c import builder as text
from edgeq.backends.systolic.emit_c.builder import (
    Builder,
    Generation,
    Place,
    c_axis,
    c_order,
    c_shape,
    is_identity,
    moved,
    output_scale,
    rearranged,
    tile_array,
)
from edgeq.backends.systolic.lower import Windows
from edgeq.backends.systolic.program import (
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    MaxPool,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
)

Constants = dict[str, str | int | bool]


def emit_conv(builder: Builder, step: Conv) -> None:
    """Add the C of a convolution: its parameters, weights as `c_weights` has them, int32 biases, output, call."""
    depthwise = _as_depthwise(step)
    label = builder.label("conv_dw" if step.depthwise else "conv")
    source = builder.require_image(step.input)
    _, channels, rows, cols = builder.tensor(step.input).shape
    _, outs, out_rows, out_cols = step.conv_shape
    target = builder.output(label, step.output, suffix="_out_pooled" if step.pool else "_out")
    kernel_rows, kernel_cols = step.weights.shape[2:]
    inner = kernel_rows * kernel_cols * step.weights.shape[1]
    scale = output_scale(step.tiles[0].multiplier, builder.program.array, label)
    square: Constants = {"in_dim": rows, "out_dim": out_rows}
    rectangular: Constants = {
        "in_row_dim": rows,
        "in_col_dim": cols,
        "out_row_dim": out_rows,
        "out_col_dim": out_cols,
        "in_stride": channels,
        "weight_stride": outs,
        "out_stride": outs,
    }
    pooled = builder.tensor(step.output).shape[2] if step.pool else out_rows
    params: Constants = {
        "batch_size": builder.batch,
        **(square if builder.generation == "2021" else rectangular),
        "kernel_size": kernel_rows,
        "in_channels": channels,
        "out_channels": outs,
        "stride": step.strides[0],
        "padding": step.pads[0],
        "bias": True,
        "depthwise": depthwise,
        "n_patches": builder.batch * out_rows * out_cols,
        "patch_size": inner,
        "output_scale": scale,
        "pool_size": step.pool.size if step.pool else 1,
        "pool_stride": step.pool.stride if step.pool else 0,
        "pool_padding": step.pool.padding if step.pool else 0,
        "out_dim_pooled": pooled,
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
        text.array("elem_t", f"{label}_w", c_weights(step, depthwise=depthwise), "row_align(1)"),
        text.array("acc_t", f"{label}_b", step.bias, "row_align_acc(1)"),
        tile_array(label, step.tiles, builder.program.array),
        f"static const struct ConvParams {label}_params = {text.designated(params)};\n",
        f"static const struct eq_window {label}_window = {text.designated(window)};\n",
    )
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


def is_direct(step: Conv, size: tuple[int, int], generation: Generation) -> bool:
    """Whether the convolution calls can do it; else it goes by patches and a product, with the same integers.

    They need regular windows; those of 2021 also square images, and support neither slices of channels nor groups
    (their depthwise call was wrong).
    """
    windows = Windows((step.weights.shape[2], step.weights.shape[3]), step.strides, step.dilations, step.pads)
    if generation == "2021":
        square = size[0] == size[1] and step.conv_shape[2] == step.conv_shape[3]
        return windows.regular and square and step.groups == 1 and len(step.tiles) == 1
    return windows.regular


def _as_depthwise(step: Conv) -> bool:
    """The depthwise call takes one scale; with several, the channels go one by one as slices."""
    return step.depthwise and len(step.tiles) == 1


def c_weights(step: Conv, *, depthwise: bool) -> NDArray[np.int8]:
    """[k·k·I][O] (HWIO), or [C][k][k] of a depthwise convolution."""
    if depthwise:
        return step.weights[:, 0]
    return step.weights.transpose(2, 3, 1, 0).reshape(-1, step.weights.shape[0])


def emit_step(builder: Builder, step: Step) -> None:
    """Add the C of one step, which is not in float."""
    _EMITTED_BY[type(step)](builder, step)


def _fc(builder: Builder, step: Fc) -> None:
    """With one row a sample, the input keeps its order in memory and the rows of the weights are permuted to match:
    from C, H, W to H, W, C for NHWC."""
    label = builder.label("fc")
    outs, inner = step.weights.shape
    rows = builder.size(step.input) // inner
    weights = step.weights.T
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
        text.array("elem_t", f"{label}_w", weights, "row_align(1)"),
        text.array("acc_t", f"{label}_b", step.bias, "row_align_acc(1)"),
        tile_array(label, step.tiles, builder.program.array),
        f"static const struct FcParams {label}_params = {text.designated(params)};\n",
    )
    activation = "RELU" if step.relu else "NO_ACTIVATION"
    builder.call(
        label,
        step.sources,
        f"eq_fully_connected(&{label}_params, {label}_tiles, {len(step.tiles)}, {source}, (const elem_t *){label}_w,\n"
        f"                       {label}_b, {target}, {activation}, mode);",
    )


def _add(builder: Builder, step: ResidualAdd) -> None:
    label = builder.label("add")
    place = builder.places[step.left]
    right = builder.request(step.right, place.order)
    target = builder.output(label, step.output, order=place.order)
    inner = c_shape(builder.tensor(step.output).shape)
    columns = inner[-1] if inner else 1
    rows = builder.batch * builder.size(step.output) // columns
    left_scale, right_scale = (text.float_literal(m) for m in (step.left_multiplier, step.right_multiplier))
    builder.call(
        label,
        step.sources,
        f"tiled_resadd_auto({rows}, {columns}, {left_scale}, {right_scale}, ACC_SCALE_IDENTITY, {place.pointer},\n"
        f"                      {right}, {target}, {str(step.relu).lower()}, eq_adding(mode));",
    )


def _max_pool(builder: Builder, step: MaxPool) -> None:
    label = builder.label("max_pool")
    source = builder.require_image(step.input)
    target = builder.output(label, step.output)
    _, channels, rows, cols = builder.tensor(step.input).shape
    out_rows, out_cols = builder.tensor(step.output).shape[2:]
    geometry = (*step.kernel, *step.strides, *step.dilations, step.pads[0], step.pads[1])
    statement = (
        f"eq_max_pool({source} + image * {rows * cols * channels}, {rows}, {cols}, {channels},\n"
        f"                    {target} + image * {builder.size(step.output)}, {out_rows}, {out_cols}, "
        f"{', '.join(map(str, geometry))});"
    )
    builder.call(label, step.sources, _loop(builder, statement, 4))


def _average_pool(builder: Builder, step: AveragePool) -> None:
    label = builder.label("average_pool")
    source = builder.require_image(step.input)
    target = builder.output(label, step.output)
    _, channels, rows, cols = builder.tensor(step.input).shape
    out_rows, out_cols = builder.tensor(step.output).shape[2:]
    geometry = (*step.kernel, *step.strides, step.pads[0], step.pads[1])
    on_core = (
        f"eq_average_pool({source} + image * {rows * cols * channels}, {rows}, {cols}, {channels},\n"
        f"                        {target} + image * {builder.size(step.output)}, {out_rows}, {out_cols}, "
        f"{', '.join(map(str, geometry))}, {text.float_literal(step.multiplier)});"
    )
    plain = np.float32(step.multiplier) == np.float32(1) / np.float32(rows * cols)
    if plain and rows == cols and step.kernel == (rows, cols) and (out_rows, out_cols) == (1, 1) and not any(step.pads):
        on_array = f"tiled_global_average_auto({source}, {target}, {builder.batch}, {channels}, {rows}, WS);"
        statement = f"if (mode.type == WS)\n        {on_array}\n    else\n        {_loop(builder, on_core, 8)}"
        builder.call(label, step.sources, statement)
    else:
        builder.call(label, step.sources, _loop(builder, on_core, 4))


def _clamp(builder: Builder, step: Clamp) -> None:
    label = builder.label("clamp")
    place = builder.places[step.input]
    target = builder.output(label, step.output, order=place.order)
    count = builder.batch * builder.size(step.output)
    builder.call(label, step.sources, f"eq_clamp_all({place.pointer}, {target}, {count}, {step.low}, {step.high});")


def _concat(builder: Builder, step: Concat) -> None:
    label = builder.label("concat")
    sources = [builder.require_image(name) for name in step.inputs]
    target = builder.output(label, step.output)
    shape = builder.tensor(step.output).shape
    axis = c_axis(shape, step.axis) - 1
    inner = c_shape(shape)
    rows = builder.batch * math.prod(inner[:axis])
    whole = math.prod(inner[axis:])
    statements, start = [], 0
    for name, source in zip(step.inputs, sources, strict=True):
        run = math.prod(c_shape(builder.tensor(name).shape)[axis:])
        statements.append(f"eq_place({source}, {target} + {start}, {rows}, {run}, {whole});")
        start += run
    builder.call(label, step.sources, "\n    ".join(statements))


def _rearrange(builder: Builder, step: Rearrange) -> None:
    """A reshape copies nothing, and a permutation in NCHW may be none in NHWC: then the tensor shares its input's
    buffer. A layer that needs another order requests a copy (a fully connected layer does not need one)."""
    place = builder.places[step.input]
    if step.index is None:
        builder.places[step.output] = Place(place.pointer, place.order)
        return
    order = c_order(builder.tensor(step.output).shape)
    index = moved(step.index, place.order, order)
    if is_identity(index, place.order.size):
        builder.places[step.output] = Place(place.pointer, order)
        return
    label = builder.label("move")
    builder.declare(text.array("int32_t", f"{label}_index", index))
    target = builder.output(label, step.output)
    size = place.order.size
    builder.call(label, step.sources, rearranged(place.pointer, size, target, label, index.size, builder.batch))


def _dequantize(builder: Builder, step: Dequantize) -> None:
    label = builder.label("real")
    place = builder.places[step.input]
    count = builder.batch * builder.size(step.input)
    builder.declare(f"static float {label}_out[{count}];\n")
    builder.places[step.output] = Place(f"{label}_out", place.order)
    scale = _scale(builder, step.input)
    builder.call(label, (), f"eq_dequantize({place.pointer}, {label}_out, {count}, {scale});")


def _quantize(builder: Builder, step: Quantize) -> None:
    label = builder.label("quantize")
    place = builder.places[step.input]
    target = builder.output(label, step.output, order=place.order)
    count = builder.batch * builder.size(step.output)
    scale = _scale(builder, step.output)
    builder.call(label, (), f"eq_quantize({place.pointer}, {target}, {count}, {scale});")


def _scale(builder: Builder, tensor: str) -> str:
    scale = builder.tensor(tensor).scale
    assert scale is not None, "an int8 tensor has a scale"
    return text.float_literal(scale)


def _loop(builder: Builder, statement: str, indent: int) -> str:
    return f"for (size_t image = 0; image < {builder.batch}; image++)\n{' ' * indent}    {statement}"


_EMITTED_BY: Mapping[type, Callable[[Builder, Any], None]] = {
    Conv: emit_conv,
    Fc: _fc,
    ResidualAdd: _add,
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    Clamp: _clamp,
    Concat: _concat,
    Rearrange: _rearrange,
    Dequantize: _dequantize,
    Quantize: _quantize,
}
