"""Collects the C source of one program, and the place of each tensor in memory.

The order of elements in C's memory: images are NHWC there, NCHW in the program.

An order is an int array: place p of the C buffer (one sample) holds element order[p] of the flattened program tensor.

Which steps become C: everything between the quantized inputs and the last integers.

Float steps at the ends stay with the host: what comes before the first integers is done to the images that travel with
the bundle, what comes after the last ones is left to whoever reads the outputs. A float step between integers has no C.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.program import (
    ArrayConfig,
    Dequantize,
    Float,
    Program,
    Quantize,
    Step,
    Tensor,
    Tile,
    step_inputs,
    step_outputs,
)
from edgeq.errors import ModelError

Order = NDArray[np.int64]


def c_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample in C: [1, C, H, W] is H, W, C; other shapes lose the batch only."""
    if len(shape) == 4:
        return shape[2], shape[3], shape[1]
    return tuple(shape[1:])


def c_order(shape: tuple[int, ...]) -> Order:
    """The order in memory that goes with `c_shape`."""
    places = np.arange(math.prod(shape[1:]))
    if len(shape) == 4:
        return places.reshape(shape[1:]).transpose(1, 2, 0).ravel()
    return places


def c_axis(shape: tuple[int, ...], axis: int) -> int:
    """The axis of `c_shape` that is `axis` of `shape`, the batch counted in both."""
    return {1: 3, 2: 1, 3: 2}[axis] if len(shape) == 4 else axis


def moved(index: NDArray[np.int32], source: Order, target: Order) -> NDArray[np.int32]:
    """`index` (program places, -1: a zero) between C buffers: for each place of the target buffer its source place."""
    places = np.empty(source.size, np.int64)
    places[source] = np.arange(source.size)
    wanted = index[target]
    return np.where(wanted < 0, -1, places[np.maximum(wanted, 0)]).astype(np.int32)


def is_identity(index: NDArray[np.int32], source_size: int) -> bool:
    """Whether an index table copies all `source_size` elements of its source in their order."""
    return index.size == source_size and bool(np.array_equal(index, np.arange(source_size)))


@dataclass(frozen=True)
class Region:
    """The part of a program that C does.

    Attributes:
        inputs: int8 tensors that come from the host, in the order of the program.
        outputs: int8 tensors that go back to it.
        steps: what is done in between.
        before, after: the steps at the ends, which are the host's.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    before: tuple[Step, ...]
    after: tuple[Step, ...]


def c_region(program: Program) -> Region:
    """Split `program`.

    Raises:
        ModelError: a float step between integers, or no integers at all; names the node and why it is float.
    """
    before = _before(program)
    after = _after(program, {id(step) for step in before})
    ends = {id(step) for step in (*before, *after)}
    steps = tuple(step for step in program.steps if id(step) not in ends)
    for step in steps:
        if isinstance(step, Float):
            node, reason = next(iter(step.reasons.items()), (step.name, "it has no integer form"))
            raise ModelError(
                f"node {node!r} runs in float between integer layers ({reason}), which the C bundle cannot do",
                "Use the ONNX dialect file, or change the model so that float operators stand at its ends",
            )
    if not steps:
        raise ModelError("nothing of this model runs on integers", "A C bundle would be empty; see the reasons given")
    made = {name for step in steps for name in step_outputs(step)}
    read = [name for step in steps for name in step_inputs(step)]
    inputs = tuple(dict.fromkeys(name for name in read if name not in made))
    wanted = [name for step in after for name in step_inputs(step)]
    outputs = tuple(dict.fromkeys(name for name in (*wanted, *program.outputs) if name in made))
    return Region(inputs, outputs, steps, before, after)


def _before(program: Program) -> tuple[Step, ...]:
    """Float and Quantize steps that depend on no integer layer."""
    known, found = set(program.inputs), []
    for step in program.steps:
        if isinstance(step, Float | Quantize) and known.issuperset(step_inputs(step)):
            found.append(step)
            known.update(step_outputs(step))
    return tuple(found)


def _after(program: Program, before: set[int]) -> tuple[Step, ...]:
    """Float and Dequantize steps that no integer layer depends on."""
    needed: set[str] = set()
    found: list[Step] = []
    for step in reversed(program.steps):
        free = needed.isdisjoint(step_outputs(step))
        if isinstance(step, Float | Dequantize) and free and id(step) not in before:
            found.append(step)
        else:
            needed.update(step_inputs(step))
    return tuple(reversed(found))


_LINE = 110
_NAME_LENGTH = 60


def harmless(name: str) -> str:
    """A name from a model, fit for a comment: letters, digits, and _ . : - ; the rest becomes _, the end is cut."""
    kept = re.sub(r"[^A-Za-z0-9_.:-]", "_", name)
    return kept if len(kept) <= _NAME_LENGTH else kept[: _NAME_LENGTH - 3] + "..."


def float_literal(value: float) -> str:
    """The float32 as a C constant that reads back to the same bits: nine significant digits are enough for that.

    Raises:
        ValueError: it is not finite.
    """
    single = np.float32(value)
    if not np.isfinite(single):
        raise ValueError(f"{value} is not finite")
    text = f"{float(single):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def int_literal(value: int) -> str:
    """-2147483648 is no constant in C: its digits do not fit before the sign is looked at."""
    return "(-2147483647 - 1)" if value == -(2**31) else str(value)


def designated(fields: Mapping[str, str | int | bool]) -> str:
    """{.a = 1, .b = 2.5f}: an initialiser that does not depend on the order of a structure's fields."""
    texts = ((k, str(v).lower() if isinstance(v, bool) else str(v)) for k, v in fields.items())
    return "{" + ", ".join(f".{key} = {value}" for key, value in texts) + "}"


def dimensions(shape: Sequence[int]) -> str:
    """A shape as a C declarator has it: [2][3]."""
    return "".join(f"[{extent}]" for extent in shape)


def array(kind: str, name: str, values: NDArray[np.generic], align: str = "") -> str:
    """A constant array with the shape of `values`, one pair of braces a row."""
    aligned = f" {align}" if align else ""
    return f"static const {kind} {name}{dimensions(values.shape)}{aligned} = {_braced(values)};\n"


def _braced(values: NDArray[np.generic]) -> str:
    if values.ndim > 1:
        return "{\n" + ",\n".join(_braced(row) for row in values) + "\n}"
    return "{" + "\n".join(wrapped(int_literal(v) for v in values.tolist())) + "}"


def buffer(name: str, shape: Sequence[int]) -> str:
    """The declaration of a static elem_t array without values."""
    return f"static elem_t {name}{dimensions(shape)} row_align(1);\n"


def wrapped(items: Iterable[str]) -> Iterable[str]:
    """`items` with commas, in lines of a sane length."""
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
class Place:
    """The place of a tensor in memory: a pointer expression, and the order of a sample there."""

    pointer: str
    order: Order


@dataclass(frozen=True)
class CLayer:
    """A buffer that C fills with int8, in the order in which layers run.

    Attributes:
        label: of the layer, as in the C source.
        buffer: name of the C array.
        tensor: the program tensor that it holds.
        order: place p of a sample in C holds element order[p] of the flattened tensor.
    """

    label: str
    buffer: str
    tensor: str
    order: Order


@dataclass
class Builder:
    """The source so far.

    Attributes:
        declarations: of params.h; calls: of main.c; both in the order of the steps.
        places: the place of each tensor, by name.
        patches, unpooled: elements of the largest scratch buffers that a convolution needs; 0 patches: there is none.
    """

    program: Program
    generation: Generation
    batch: int
    declarations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    layers: list[CLayer] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    patches: int = 0
    unpooled: int = 1
    _labels: Counter[str] = field(default_factory=Counter)
    _permuted: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """The entry of the program's tensor table."""
        return self.program.tensors[name]

    def size(self, name: str) -> int:
        """Elements of one sample."""
        return math.prod(self.tensor(name).shape[1:])

    def label(self, kind: str) -> str:
        """conv_1, conv_2, add_1 …"""
        self._labels[kind] += 1
        return f"{kind}_{self._labels[kind]}"

    def call(self, label: str, names: tuple[str, ...], statement: str) -> None:
        """Add a statement to main.c, under a comment with the layer's label and the float model's node names."""
        listed = ", ".join(harmless(name) for name in names[:4]) + (" ..." if len(names) > 4 else "")
        self.calls.append(f"    /* {label}{': ' + listed if listed else ''} */\n    {statement}\n")

    def declare(self, *declarations: str) -> None:
        """Add declarations, complete lines of C, to params.h."""
        self.declarations.extend(declarations)

    def output(self, label: str, tensor: str, *, suffix: str = "_out", order: Order | None = None) -> str:
        """A buffer for `tensor`, which the layer `label` computes in `order` (as an image is in C); its pointer."""
        name = f"{label}{suffix}"
        shape = self.tensor(tensor).shape
        standard = c_order(shape)
        order = standard if order is None else order
        inner = c_shape(shape) if np.array_equal(order, standard) else (order.size,)
        self.declare(buffer(name, (self.batch, *inner)))
        self.layers.append(CLayer(label, name, tensor, order))
        pointer = f"(elem_t *){name}"
        self.places[tensor] = Place(pointer, order)
        return pointer

    def request(self, tensor: str, order: Order) -> str:
        """A pointer to `tensor` in `order`; where it has another, a layer that permutes it is inserted, once."""
        place, key = self.places[tensor], (tensor, order.tobytes())
        if np.array_equal(place.order, order):
            return place.pointer
        if key in self._permuted:
            return self._permuted[key]
        label = self.label("order")
        index = moved(np.arange(order.size, dtype=np.int32), place.order, order)
        self.declare(array("int32_t", f"{label}_index", index))
        self.declare(buffer(f"{label}_out", (self.batch, order.size)))
        self.layers.append(CLayer(label, f"{label}_out", tensor, order))
        pointer = self._permuted[key] = f"(elem_t *){label}_out"
        self.call(label, (), rearranged(place.pointer, order.size, pointer, label, index.size, self.batch))
        return pointer

    def require_image(self, tensor: str) -> str:
        """A pointer to `tensor` in the standard order of C, NHWC for images."""
        return self.request(tensor, c_order(self.tensor(tensor).shape))


def rearranged(source: str, source_size: int, target: str, label: str, size: int, batch: int) -> str:
    """The C statement that permutes each of `batch` samples by the table LABEL_index.

    Args:
        source, target: pointer expressions.
        source_size, size: elements of one sample there.
    """
    return f"eq_rearrange({source}, {source_size}, {target}, {size}, {label}_index, {batch});"


_MOST_SHIFT = 31


def output_scale(value: float, array: ArrayConfig, where: str) -> str:
    """An accumulator's multiplier as a C constant.

    Raises:
        ModelError: on an array that shifts, a multiplier that is no 1 / 2^n.
    """
    if array.output_scale == "float":
        return float_literal(value)
    mantissa, exponent = math.frexp(value)
    shift = 1 - exponent
    if mantissa != 0.5 or not 0 <= shift <= _MOST_SHIFT:
        raise ModelError(
            f"{where}: the output multiplier {value:.9g} is no right shift by 0 to {_MOST_SHIFT}",
            "Package for an array with a float output scale",
        )
    return str(shift)


def tile_array(label: str, tiles: Sequence[Tile], array: ArrayConfig) -> str:
    """LABEL_tiles: which output channels have which multiplier."""
    rows = ",\n".join(
        f"    {{{tile.start}, {tile.stop}, {output_scale(tile.multiplier, array, label)}}}" for tile in tiles
    )
    return f"static const struct eq_tile {label}_tiles[{len(tiles)}] = {{\n{rows}\n}};\n"
