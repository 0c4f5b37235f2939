"""Define the quantized integer program: what the array and its core compute, step by step.

The simulator runs the program. The dialect file, the reference model and the C bundle are translations of the program.
All of them compute the same integers. Before scales are chosen, the same steps form a `Network`. It has float64 weights
and biases, no tiles or multipliers, and the tensor names of the float model.

Notation: rne = round half to even; f32() = round to float32; sat8 = clamp to -128..127. Integer tensors are int8 with
zero point 0: the real value is q · scale. Activations are NCHW (or [N, features]). Shapes have batch 1 as first axis. A
program can run several samples at once, and computes each one independently.

The step formulas (docs/systolic.md has their sources):

    Quantize      q = sat8(rne(f32(x / scale)))
    Dequantize    x = f32(q · scale)
    Conv, Fc      acc = bias + Σ a·w (int32, wraps);  y = sat8(rne(f32(f32(acc) · multiplier)));  relu: y = max(y, 0)
    ResidualAdd   y = sat8(sat8(rne(f32(a · left))) + sat8(rne(f32(b · right))));  relu: y = max(y, 0)
    AveragePool   y = sat8(rne(f32(f32(Σ a) · multiplier)))
    MaxPool       the largest value in each window; padding is never chosen
    Clamp         y = min(max(a, low), high)
    Concat        the inputs one after the other; all scales are equal
    Rearrange     the same integers in other positions
    Float         an ONNX model on float32 tensors
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.model.quant_params import QuantParams

# Limits of int8.
LEAST, LARGEST = -128, 127
Array = NDArray[Any]
Floats = NDArray[np.float64]
Int8s = NDArray[np.int8]
Int32s = NDArray[np.int32]
Pair = tuple[int, int]
Pads = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tensor:
    """Describe one entry of the tensor table.

    Attributes:
        name: a unique name in the program.
        shape: the shape, with batch 1 as first axis.
        dtype: "int8" for integers with a scale. For other tensors, such as those of Float steps and the model's inputs,
            it is the numpy name of the dtype ("float32").
        scale: a float32 value above 0 for int8 tensors; None for others.
        origin: name of the tensor of the float model that this tensor represents. A float tensor represents itself.
        channels: the order of the channels (axis 1) if they were reordered: position i has channel channels[i] of
            `origin`. None means the order of `origin`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "int8"
    scale: float | None = None
    origin: str = ""
    channels: tuple[int, ...] | None = None

    @property
    def params(self) -> QuantParams:
        """Return the scale (float32) and zero point 0 of an int8 tensor."""
        assert self.scale is not None
        return QuantParams(np.asarray(self.scale, np.float32), np.zeros((), np.int8), ir.DataType.INT8)


@dataclass(frozen=True)
class Tile:
    """Describe output channels start..stop-1 of a layer, which share a weight scale and therefore an output multiplier.

    The tiles of a layer cover all its output channels without gaps. A layer with one scale has one tile. If there are
    several tiles, the width of each tile but the last is a multiple of the array's dim, so tiles cost the array
    nothing. Only a depthwise layer that runs on the core may have narrower tiles, down to one channel. A grouped layer
    that is not depthwise has one tile.

    Attributes:
        weight_scale: float32 value; the real weight is w · weight_scale.
        multiplier: f32(f32(input scale · weight_scale) / output scale). It is a power of two on an array that shifts.
    """

    start: int
    stop: int
    weight_scale: float
    multiplier: float


@dataclass(frozen=True)
class Pool:
    """Describe a square max pooling that the array applies to a convolution's output before storing it.

    The hardware limits the pooling: window, stride and padding are at most 3, and the output has at most 255 rows and
    columns. Padding counts as 0, so it is allowed only after a relu, where 0 cannot exceed a real value.
    """

    size: int
    stride: int
    padding: int


@dataclass(frozen=True)
class Unary:
    """Describe a step from one tensor to one tensor."""

    name: str
    input: str
    output: str


@dataclass(frozen=True)
class Quantize(Unary):
    """Quantize float32 tensor `input` to int8 tensor `output`, with the output's scale."""


@dataclass(frozen=True)
class Dequantize(Unary):
    """Dequantize int8 tensor `input` to float32 tensor `output`, with the input's scale."""


@dataclass(frozen=True)
class Conv(Unary):
    """Compute a 2-D convolution, followed by max pooling if `pool` is set.

    Attributes:
        weights: int8 [O, I / groups, kh, kw]; float64 in a network.
        bias: int32 [O], zeros if the model has no bias; float64 in a network. The scale of the bias is input scale ·
            the tile's weight_scale.
        groups: number of groups: 1, I (depthwise, with I = O), or a number between. Output channel o reads the input
            channels of group o // (O / groups).
        strides, dilations: (rows, columns).
        pads: (top, left, bottom, right) zeros; they may differ.
        tiles: see `Tile`. A depthwise convolution may also have several tiles.
        relu: whether negative results become 0, before pooling.
        pool: the pooling that follows; None means no pooling. With pooling, the output tensor is the pooled one.
        conv_shape: [1, O, rows, columns] before pooling.
        sources: names of the float model's nodes that this step replaces.
    """

    weights: Array
    bias: Array
    groups: int
    strides: Pair
    dilations: Pair
    pads: Pads
    tiles: tuple[Tile, ...] = ()
    relu: bool = False
    pool: Pool | None = None
    conv_shape: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def depthwise(self) -> bool:
        """Return whether each output channel reads only its own input channel."""
        # A convolution of one channel is both dense and depthwise; it counts as dense.
        return self.groups > 1 and self.groups == len(self.weights) and self.weights.shape[1] == 1


@dataclass(frozen=True)
class Fc(Unary):
    """Multiply the input, viewed as [rows, K], by a constant matrix. The result is [rows, O]. A 2-D tensor has one row
    per sample.

    After a Rearrange that only reshapes [1, C, H, W], K is in the order C, H, W. A runtime with NHWC activations has to
    permute the weights' columns.

    Attributes:
        weights: int8 [O, K].
        bias: int32 [O].
        tiles, relu, sources: as in `Conv`.
    """

    weights: Array
    bias: Array
    tiles: tuple[Tile, ...] = ()
    relu: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResidualAdd:
    """Add two tensors of one shape.

    The multipliers f32(input scale / output scale) are at most 1, so neither operand saturates. On an array that
    shifts, the multipliers are powers of two.
    """

    name: str
    left: str
    right: str
    output: str
    left_multiplier: float = 1.0
    right_multiplier: float = 1.0
    relu: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaxPool(Unary):
    """Compute max pooling on the core. Input and output share one scale.

    Windows may reach beyond the padded input, because the output's shape may have been rounded up. Values outside the
    input are never chosen.

    Attributes:
        kernel, strides, dilations: (rows, columns).
        pads: (top, left, bottom, right), as large as the output's shape requires.
    """

    kernel: Pair
    strides: Pair
    dilations: Pair
    pads: Pads
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class AveragePool(Unary):
    """Average over windows of the input with padding. The zeros of the padding are counted. The pooling is global if
    the kernel covers the input.

    Attributes:
        kernel, strides: (rows, columns).
        pads: (top, left, bottom, right) zeros.
        multiplier: f32(f32(input scale · f32(1 / window)) / output scale), window = kernel rows · columns.
    """

    kernel: Pair
    strides: Pair
    pads: Pads
    multiplier: float = 1.0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clamp(Unary):
    """Apply a Relu or Clip that was not fused into a layer: min(max(x, low), high).

    The bounds are integers in the common scale of input and output. In a network they are floats, and infinite if the
    operator has no bound on that side.
    """

    low: float
    high: float
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Concat:
    """Concatenate int8 tensors of the same scale along `axis`. The axis is at least 1: axis 0 is the batch."""

    name: str
    inputs: tuple[str, ...]
    output: str
    axis: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rearrange(Unary):
    """Move integers: Reshape, Flatten, Transpose, Slice, Pad with zeros, nearest Resize and similar operators.

    Attributes:
        index: int32; for each element of the flattened output sample, the position of its source in the flattened input
            sample; -1 means a zero. Samples are without the batch. None means a plain reshape: nothing moves.
        model: the same movement as a serialized ONNX model on int8 tensors of any batch, with the step's input and
            output names. In a network, the tensors are float32.
    """

    index: Int32s | None
    model: bytes
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Float:
    """Run nodes in float32 on the core: between a Dequantize and a Quantize, or at the ends of the graph.

    Attributes:
        model: serialized ONNX model; its inputs and outputs have the names of the program's tensors.
        reasons: for each node of the float model, by name, why it is not in int8.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model: bytes
    reasons: Mapping[str, str]
    sources: tuple[str, ...] = ()


# The layers that the array multiplies.
Weighted = Conv | Fc
Layer = Weighted | ResidualAdd | MaxPool | AveragePool | Clamp | Concat | Rearrange | Float
Step = Quantize | Dequantize | Layer
SAME_SCALE = (MaxPool, Clamp, Concat, Rearrange)
"""Steps that only pass integers on. Their inputs and outputs therefore share one scale."""


@dataclass(frozen=True)
class Network:
    """List layers in an order in which they can run, before scales are chosen.

    Attributes:
        inputs, outputs: the model's inputs and outputs.
        shapes: the shape of every tensor, with batch 1.
        dtypes: the numpy name of every tensor's dtype.
        shifted: tensors that are stored with 128 steps subtracted, each with the float model's tensor that it
            represents.
        channels: for each tensor with reordered channels, the original channel at each position.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    shifted: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def readers(self) -> Mapping[str, list[Layer]]:
        """Return the layers that read each tensor, in order. A tensor that no layer reads has an empty list."""
        return readers(self.layers)

    @property
    def integers(self) -> frozenset[str]:
        """Return the tensors that exist as integers: all that an int8 layer reads or writes."""
        layers = [layer for layer in self.layers if not isinstance(layer, Float)]
        return frozenset(name for layer in layers for name in (*step_inputs(layer), *step_outputs(layer)))


@dataclass(frozen=True)
class Program:
    """List steps in the order in which they can run.

    Attributes:
        inputs, outputs: names of the float model's inputs and outputs. They are entries of `tensors`, and are not int8.
        tensors: every tensor that a step reads or writes, by name.
        notes: remarks for the user, one sentence each.
    """

    name: str
    array: ArrayConfig
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


def readers(layers: Iterable[Layer]) -> Mapping[str, list[Layer]]:
    """Return the layers that read each tensor, in order. A tensor that no layer reads has an empty list."""
    layers_by_tensor: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        # x + x reads one tensor twice but is one reader.
        for name in dict.fromkeys(step_inputs(layer)):
            layers_by_tensor[name].append(layer)
    return layers_by_tensor


def step_inputs(step: Step) -> tuple[str, ...]:
    """Return the names of the tensors that a step reads."""
    if isinstance(step, ResidualAdd):
        return step.left, step.right
    if isinstance(step, Concat | Float):
        return step.inputs
    return (step.input,)


def step_outputs(step: Step) -> tuple[str, ...]:
    """Return the names of the tensors that a step writes."""
    return step.outputs if isinstance(step, Float) else (step.output,)


def tile_values(tiles: tuple[Tile, ...], field: str) -> NDArray[np.float32]:
    """Return `field` ("multiplier" or "weight_scale") for every output channel: float32 [O]."""
    counts = [tile.stop - tile.start for tile in tiles]
    return np.repeat(np.array([getattr(tile, field) for tile in tiles], np.float32), counts)
