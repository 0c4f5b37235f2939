"""Generate the C source of one program: declarations for params.h, calls for main.c, and a buffer for each tensor.

Images are NHWC in C's memory and NCHW in the program. An order is an int array: element p of a sample in the C buffer
is element order[p] of the flattened program tensor.

The steps between the quantized inputs and the last integers become C. The host runs the float steps at both ends: edgeq
applies those before the first integers to the images in the bundle, and the user applies those after the last integers
to the outputs. A float step between integers cannot be written as C.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.program import Program, Step, Tile, step_inputs, step_outputs
from edgeq.backends.systolic.recognise import Windows
from edgeq.errors import ModelError

Order = NDArray[np.int64]


def c_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one sample in C: H, W, C for [1, C, H, W]. Other shapes stay the same, without the batch."""
    if len(shape) == 4:
        return shape[2], shape[3], shape[1]
    return tuple(shape[1:])


def c_order(shape: tuple[int, ...]) -> Order:
    """Return the order in memory that matches `c_shape`."""
    places = np.arange(math.prod(shape[1:]))
    if len(shape) == 4:
        return places.reshape(shape[1:]).transpose(1, 2, 0).ravel()
    return places


def c_axis(shape: tuple[int, ...], axis: int) -> int:
    """Return the position in C's layout of axis `axis` of `shape`. Both positions count the batch as axis 0."""
    return {1: 3, 2: 1, 3: 2}[axis] if len(shape) == 4 else axis


def moved(index: NDArray[np.int32], source: Order, target: Order) -> NDArray[np.int32]:
    """Translate an index table from program order to the orders of C buffers.

    Args:
        index: for each element of the target, the position of its source element; -1 means a zero.
        source, target: the orders of the two buffers.

    Returns:
        The same table, for elements in the order of the buffers.
    """
    places = np.empty(source.size, np.int64)
    places[source] = np.arange(source.size)
    source_places = index[target]
    return np.where(source_places < 0, -1, places[np.maximum(source_places, 0)]).astype(np.int32)


def is_identity(index: NDArray[np.int32], source_size: int) -> bool:
    """Return whether an index table copies all `source_size` elements of its source in order."""
    return index.size == source_size and bool(np.array_equal(index, np.arange(source_size)))


@dataclass(frozen=True)
class Region:
    """Describe the part of a program that runs in C.

    Attributes:
        inputs: int8 tensors that the host provides, in the order of the program.
        outputs: int8 tensors that the C code returns to the host.
        steps: the steps in C.
        leading, trailing: the float steps that the host runs before and after the steps in C.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    leading: tuple[Step, ...]
    trailing: tuple[Step, ...]


def c_region(program: Program) -> Region:
    """Split `program` into the part for C and the parts for the host.

    Raises:
        ModelError: the program has no integers, or a float step between integers. The message names the node and why it
            is in float.
    """
    available, leading = set(program.inputs), []
    for step in program.steps:
        if isinstance(step, steps.Float | steps.Quantize) and available.issuperset(step_inputs(step)):
            leading.append(step)
            available.update(step_outputs(step))
    ends = set(map(id, leading))
    inner_reads: set[str] = set()
    trailing: list[Step] = []
    for step in reversed(program.steps):
        if (
            isinstance(step, steps.Float | steps.Dequantize)
            and inner_reads.isdisjoint(step_outputs(step))
            and id(step) not in ends
        ):
            trailing.insert(0, step)
        else:
            inner_reads.update(step_inputs(step))
    ends.update(map(id, trailing))
    inner = tuple(step for step in program.steps if id(step) not in ends)
    for step in inner:
        if isinstance(step, steps.Float):
            node, reason = next(iter(step.reasons.items()), (step.name, "it has no integer form"))
            raise ModelError(
                f"node {node!r} runs in float between integer layers ({reason}), which a C bundle does not support",
                "Use the ONNX dialect file, or move the model's float operators to its ends",
            )
    if not inner:
        raise ModelError(
            "no part of this model runs on integers", "A C bundle would be empty. See the reasons for the float nodes"
        )
    computed = {name for step in inner for name in step_outputs(step)}
    inputs = dict.fromkeys(name for step in inner for name in step_inputs(step) if name not in computed)
    trailing_reads = [name for step in trailing for name in step_inputs(step)]
    outputs = dict.fromkeys(name for name in (*trailing_reads, *program.outputs) if name in computed)
    return Region(tuple(inputs), tuple(outputs), inner, tuple(leading), tuple(trailing))


_LINE = 110
_NAME_LENGTH = 60


def harmless(name: str) -> str:
    """Return a name that is safe in a C comment. All characters but letters, digits and _ . : - become _.

    Names that are too long are cut.
    """
    cleaned = re.sub(r"[^A-Za-z0-9_.:-]", "_", name)
    return cleaned if len(cleaned) <= _NAME_LENGTH else cleaned[: _NAME_LENGTH - 3] + "..."


def float_literal(value: float) -> str:
    """Return a C constant with the same float32 bits. Nine significant digits are enough for that.

    Raises:
        ValueError: the value is not finite.
    """
    single = np.float32(value)
    if not np.isfinite(single):
        raise ValueError(f"{value} is not finite")
    text = f"{float(single):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def int_literal(value: int) -> str:
    """Return an integer as C source.

    -2147483648 becomes an expression, because C reads it as the negative of 2147483648, which does not fit an int32.
    """
    return "(-2147483647 - 1)" if value == -(2**31) else str(value)


def designated(fields: Mapping[str, str | int | bool]) -> str:
    """Return {.a = 1, .b = 2.5f}, an initialiser that does not depend on the order of a structure's fields."""
    texts = ((k, str(v).lower() if isinstance(v, bool) else str(v)) for k, v in fields.items())
    return "{" + ", ".join(f".{key} = {value}" for key, value in texts) + "}"


def dimensions(shape: Sequence[int]) -> str:
    """Return a shape as the dimensions of a C declaration: [2][3]."""
    return "".join(f"[{extent}]" for extent in shape)


def array(kind: str, name: str, values: NDArray[np.generic], align: str = "") -> str:
    """Return a constant array with the shape of `values`, with a pair of braces for each row."""
    aligned = f" {align}" if align else ""
    return f"static const {kind} {name}{dimensions(values.shape)}{aligned} = {_braced(values)};\n"


def _braced(values: NDArray[np.generic]) -> str:
    if values.ndim > 1:
        return "{\n" + ",\n".join(_braced(row) for row in values) + "\n}"
    return "{" + "\n".join(wrapped(int_literal(v) for v in values.tolist())) + "}"


def buffer(name: str, shape: Sequence[int]) -> str:
    """Return the declaration of a static elem_t array without values."""
    return f"static elem_t {name}{dimensions(shape)} row_align(1);\n"


def wrapped(items: Iterable[str]) -> Iterable[str]:
    """Yield lines of limited length that contain `items`, separated by commas."""
    line: list[str] = []
    length = 0
    for item in items:
        if length + len(item) > _LINE:
            yield ",".join(line) + ","
            line, length = [], 0
        line.append(item)
        length += len(item) + 1
    yield ",".join(line)


Generation = Literal["2021", "2023"]


@dataclass(frozen=True)
class TensorLocation:
    """Locate a tensor in memory by a pointer expression. `order` is the order of a sample's elements there."""

    pointer: str
    order: Order


@dataclass(frozen=True)
class CLayer:
    """Describe a buffer that the C code fills with int8. The buffers are listed in the order in which their layers run.

    Attributes:
        label: the layer's label in the C source.
        buffer: name of the C array.
        tensor: the program tensor in the buffer.
        order: the order of the elements: element p of a sample in C is element order[p] of the flattened tensor.
    """

    label: str
    buffer: str
    tensor: str
    order: Order


@dataclass
class Builder:
    """Accumulate the C source.

    Attributes:
        declarations: C source for params.h, in the order of the steps.
        calls: C source for main.c, in the order of the steps.
        places: the place of each tensor, by name.
        patches, unpooled: sizes, in elements, of the two scratch buffers, each large enough for every convolution.
            `patches` is 0 if the program has no convolution.
    """

    program: Program
    generation: Generation
    batch: int
    declarations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    layers: list[CLayer] = field(default_factory=list)
    places: dict[str, TensorLocation] = field(default_factory=dict)
    patches: int = 0
    unpooled: int = 1
    _labels: Counter[str] = field(default_factory=Counter)
    _permuted: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def tensor(self, name: str) -> steps.Tensor:
        """Return a tensor's entry in the program's tensor table."""
        return self.program.tensors[name]

    def size(self, name: str) -> int:
        """Return the number of elements in one sample of a tensor."""
        return math.prod(self.tensor(name).shape[1:])

    def label(self, kind: str) -> str:
        """Return a new numbered label for a layer: conv_1, conv_2, add_1 …"""
        self._labels[kind] += 1
        return f"{kind}_{self._labels[kind]}"

    def call(self, label: str, names: tuple[str, ...], statement: str) -> None:
        """Add a statement to main.c, under a comment with the layer's label and the float model's node names."""
        listed = ", ".join(harmless(name) for name in names[:4]) + (" ..." if len(names) > 4 else "")
        self.calls.append(f"    /* {label}{': ' + listed if listed else ''} */\n    {statement}\n")

    def declare(self, *declarations: str) -> None:
        """Add declarations to params.h. Each is one or more complete lines of C."""
        self.declarations.extend(declarations)

    def output(self, label: str, tensor: str, *, suffix: str = "_out", order: Order | None = None) -> str:
        """Declare the buffer for `tensor`, the output of the layer `label`, and return a pointer to the buffer.

        Args:
            order: the order of the elements; None means the result of `c_order`.
        """
        shape = self.tensor(tensor).shape
        standard = c_order(shape)
        order = standard if order is None else order
        inner = c_shape(shape) if np.array_equal(order, standard) else (order.size,)
        pointer = self._buffer(label, suffix, tensor, order, inner)
        self.places[tensor] = TensorLocation(pointer, order)
        return pointer

    def request(self, tensor: str, order: Order) -> str:
        """Return a pointer to `tensor` in `order`. If the tensor has another order, first add a layer that permutes it.
        Further requests use the same layer.
        """
        place, key = self.places[tensor], (tensor, order.tobytes())
        if np.array_equal(place.order, order):
            return place.pointer
        if key not in self._permuted:
            label = self.label("order")
            index = moved(np.arange(order.size, dtype=np.int32), place.order, order)
            self.declare(array("int32_t", f"{label}_index", index))
            pointer = self._permuted[key] = self._buffer(label, "_out", tensor, order, (order.size,))
            self.rearrange(label, (), place, pointer, index.size)
        return self._permuted[key]

    def _buffer(self, label: str, suffix: str, tensor: str, order: Order, shape: tuple[int, ...]) -> str:
        self.declare(buffer(f"{label}{suffix}", (self.batch, *shape)))
        self.layers.append(CLayer(label, f"{label}{suffix}", tensor, order))
        return f"(elem_t *){label}{suffix}"

    def rearrange(self, label: str, names: tuple[str, ...], source: TensorLocation, target: str, size: int) -> None:
        """Add the call that permutes each sample of `source` by the table LABEL_index.

        Args:
            target: pointer to the result.
            size: number of elements of the result.
        """
        arguments = f"{source.pointer}, {source.order.size}, {target}, {size}, {label}_index, {self.batch}"
        self.call(label, names, f"eq_rearrange({arguments});")

    def require_image(self, tensor: str) -> str:
        """Return a pointer to `tensor` in C's standard order: NHWC for images."""
        return self.request(tensor, c_order(self.tensor(tensor).shape))


_MOST_SHIFT = 31


def output_scale(value: float, array: ArrayConfig, label: str) -> str:
    """Return an accumulator's multiplier as a C constant.

    Raises:
        ModelError: the array scales by shifting, and the multiplier is not 1 / 2^n.
    """
    if array.output_scale == "float":
        return float_literal(value)
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
    right = builder.request(step.right, place.order)
    target = builder.output(label, step.output, order=place.order)
    inner = c_shape(builder.tensor(step.output).shape)
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
