"""A convolution as C: ConvParams, geometry that ConvParams cannot express, weights in the layout of the calls."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.emit_c import text
from edgeq.backends.systolic.emit_c.builder import Builder, Generation
from edgeq.backends.systolic.emit_c.scales import output_scale, tile_array
from edgeq.backends.systolic.program import Conv
from edgeq.backends.systolic.windows import Windows

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
