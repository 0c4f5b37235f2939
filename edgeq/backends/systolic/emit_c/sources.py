"""The text of a bundle's files, from a program and what its simulation computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.emit_c import text
from edgeq.backends.systolic.emit_c.builder import Builder, CLayer, Generation, Place
from edgeq.backends.systolic.emit_c.layers import emit_step
from edgeq.backends.systolic.emit_c.layout import Order, c_order, c_shape
from edgeq.backends.systolic.emit_c.readme import readme
from edgeq.backends.systolic.emit_c.region import Region, c_region
from edgeq.backends.systolic.program import Program

C = Path(__file__).parent / "c"
Values = Mapping[str, NDArray[np.int8]]
MODES = ("os", "ws", "cpu")
"""In the order of gemmini.h's enumeration."""

_PRINTED = 64
_COPIED = (
    "layers.h",
    "portable/gemmini_portable.c",
    "portable/include/gemmini.h",
    "portable/include/gemmini_nn.h",
)


@dataclass(frozen=True)
class Sources:
    """The files by their place in the bundle, and where C keeps which tensor."""

    files: Mapping[str, str]
    layers: tuple[CLayer, ...]


def c_sources(program: Program, values: Mapping[str, Values], header: str, generation: Generation = "2023") -> Sources:
    """Everything that a bundle consists of.

    Args:
        values: by mode (`MODES`): int8 [batch, ...] of every int8 tensor of the program, by name.
        header: text of gemmini_params.h.

    Raises:
        ModelError: a step has no C form.
    """
    region = c_region(program)
    batch = len(values["ws"][region.inputs[0]])
    builder = Builder(program, generation, batch)
    images = _images(builder, region, values["ws"])
    for step in region.steps:
        emit_step(builder, step)
    outputs = [(name, c_order(program.tensors[name].shape)) for name in region.outputs]
    pointers = [builder.request(name, order) for name, order in outputs]
    files = {name: (C / name).read_text() for name in _COPIED}
    files["portable/include/gemmini_params.h"] = header
    makefile = (C / "Makefile").read_text().replace("@GENERATION@", generation)
    files["Makefile"] = makefile.replace("@SHARE@", "2" if program.array.dataflow == "WS" else "1")
    files["images.h"] = images
    files["params.h"] = _params(builder)
    files["expected.h"] = _expected(builder.layers, outputs, values)
    files["main.c"] = _main(builder, region, pointers)
    files["README.md"] = readme(program, region, builder)
    return Sources(dict(sorted(files.items())), tuple(builder.layers))


def in_c(values: NDArray[np.int8], order: Order) -> NDArray[np.int8]:
    """A tensor [batch, ...] as C keeps it: [batch, elements]."""
    return values.reshape(len(values), -1)[:, order]


def _images(builder: Builder, region: Region, values: Values) -> str:
    lines = ["/* The inputs, quantized: q = round(x / scale), clamped to -128..127. Images are NHWC. */\n"]
    for number, name in enumerate(region.inputs):
        tensor = builder.tensor(name)
        label = "images" if number == 0 else f"images_{number}"
        order = c_order(tensor.shape)
        shaped = in_c(values[name], order).reshape(builder.batch, *c_shape(tensor.shape))
        assert tensor.scale is not None, "the inputs of the region are integers"
        lines.append(f"\n/* {text.harmless(tensor.origin or name)}, scale {np.float32(tensor.scale):.9g} */\n")
        lines.append(text.array("elem_t", label, shaped, "row_align(1)"))
        builder.places[name] = Place(f"(elem_t *){label}", order)
    return "".join(lines)


def _params(builder: Builder) -> str:
    array = builder.program.array
    floating = array.output_scale == "float"
    head = [
        "/* Weights, biases, shapes and buffers of the layers. */\n",
        f'_Static_assert(DIM == {array.dim}, "gemmini_params.h is of an array with another DIM");\n',
        '_Static_assert(sizeof(elem_t) == 1 && (elem_t)-1 < 0, "gemmini_params.h: elem_t must be int8_t");\n',
        '_Static_assert(sizeof(acc_t) == 4 && (acc_t)-1 < 0, "gemmini_params.h: acc_t must be int32_t");\n',
        f"_Static_assert(((acc_scale_t)0.5 != 0) == {int(floating)}, "
        f'"gemmini_params.h: acc_scale_t must be {"a float" if floating else "a shift"}");\n',
        f"#define EDGEQ_BATCH {builder.batch}\n#define EDGEQ_PRINTED {_PRINTED}\n",
    ]
    if builder.patches:
        head.append(text.buffer("eq_patches", (builder.patches,)))
        head.append(text.buffer("eq_unpooled", (builder.unpooled,)))
    return "\n".join([*head, *builder.declarations])


def _expected(layers: Sequence[CLayer], outputs: Sequence[tuple[str, Order]], values: Mapping[str, Values]) -> str:
    """Outputs in full and fingerprints of all layers, by mode; a mode whose outputs are those of ws shares them."""
    lines = [
        "/* What the simulator computed; by mode (os, ws, cpu), outputs in full and fingerprints of all layers. */\n"
    ]
    table: dict[str, list[str]] = {mode: [] for mode in MODES}
    for number, (name, order) in enumerate(outputs):
        for mode in ("ws", "os", "cpu"):
            same = np.array_equal(values[mode][name], values["ws"][name])
            label = f"expected_{number}_{'ws' if same else mode}"
            if mode == "ws" or not same:
                lines.append(text.array("elem_t", label, in_c(values[mode][name], order)))
            table[mode].append(f"(const elem_t *){label}")
    rows = ",\n".join("    {" + ", ".join(table[mode]) + "}" for mode in MODES)
    lines.append(f"static const elem_t *const expected_outputs[3][{len(outputs)}] = {{\n{rows}\n}};\n")
    rows = ",\n".join(
        "    {"
        + "\n".join(text.wrapped(f"UINT64_C({fingerprint(in_c(values[m][k.tensor], k.order))})" for k in layers))
        + "}"
        for m in MODES
    )
    lines.append(f"static const uint64_t expected_layers[3][{len(layers)}] = {{\n{rows}\n}};\n")
    return "\n".join(lines)


def fingerprint(values: NDArray[np.int8]) -> int:
    """64 bits that no single changed value leaves as they are; main.c computes the same."""
    data = values.view(np.uint8).ravel().astype(np.uint64)
    factors = np.arange(data.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    return int(np.sum((data + np.uint64(1)) * factors, dtype=np.uint64))


def _main(builder: Builder, region: Region, pointers: Sequence[str]) -> str:
    layers = "".join(
        f'    {{"{layer.label}", (const elem_t *){layer.buffer}, sizeof({layer.buffer})}},\n'
        for layer in builder.layers
    )
    outputs = ""
    for name, pointer in zip(region.outputs, pointers, strict=True):
        tensor = builder.tensor(name)
        listed = text.harmless(tensor.origin or name)
        scale = f"{np.float32(tensor.scale):.9g}"
        outputs += f'    {{"{listed}", "{scale}", {pointer}, {builder.size(name)}}},\n'
    made = (C / "main.c").read_text()
    for mark, filled in (("@CALLS@", "\n".join(builder.calls)), ("@LAYERS@", layers), ("@OUTPUTS@", outputs)):
        made = made.replace(mark, filled)
    return made
