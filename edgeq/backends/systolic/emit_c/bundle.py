"""Write the files of a C bundle from a program and the results of its simulation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from edgeq_device.system.files import open_file
from numpy.typing import NDArray

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.emit_c import layout
from edgeq.backends.systolic.emit_c import text as c_text
from edgeq.backends.systolic.emit_c.builder import Builder, CLayer, Generation, TensorLocation
from edgeq.backends.systolic.emit_c.operators import emit_step
from edgeq.backends.systolic.emit_c.region import Region, c_region
from edgeq.backends.systolic.program import Float, Program, step_outputs
from edgeq.backends.systolic.simulate import simulate
from edgeq.errors import DataError, HardwareError, UsageError

C = Path(__file__).parent / "c"
# Far more than any generated header has; a longer file is something else.
_LIMIT = 1 << 20
_BANKS = 4


def own_header(array: ArrayConfig) -> str:
    """Return the text of a gemmini_params.h with the parameters of `array`."""
    text = (C / "portable" / "include" / "gemmini_params.h").read_text()
    numbers = {
        "DIM": array.dim,
        "BANK_NUM": _BANKS,
        "BANK_ROWS": array.scratchpad_rows // _BANKS,
        "ACC_ROWS": array.accumulator_rows,
        "MAX_BYTES": array.max_bytes,
    }
    for name, value in numbers.items():
        # The portable header is the template, so that both are used by the same code.
        text = re.sub(rf"(?m)^#define {name} .*$", f"#define {name} {value}", text)
    if array.output_scale == "shift":
        text = text.replace("typedef float acc_scale_t;", "typedef int32_t acc_scale_t; /* shifts right */")
        text = text.replace("#define ACC_SCALE_T_IS_FLOAT\n", "")
        text = text.replace("#define ACC_SCALE_IDENTITY 1.0", "#define ACC_SCALE_IDENTITY 0")
    return text


def read_header(path: Path, array: ArrayConfig) -> tuple[str, ArrayConfig, tuple[str, ...]]:
    """Read a chip's generated gemmini_params.h and check it against the target.

    Returns:
        The header's text, the target's array with the memory sizes of the header, and notes on sizes that differ.

    Raises:
        HardwareError: the file cannot be read, is not a gemmini_params.h, or describes another array. In the last case,
            the message names the definition that differs.
    """
    try:
        with open_file(path) as file:
            raw = file.read(_LIMIT + 1)
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}", "Pass the gemmini_params.h of your chip") from error
    if len(raw) > _LIMIT or b"\0" in raw:
        raise HardwareError(f"{path} is not a C header", "Pass the gemmini_params.h of your chip")
    text = raw.decode("utf-8", "replace")
    # Comments go first: they may contain old definitions.
    code = re.sub(r"/\*.*?(?:\*/|\Z)|//[^\n]*", " ", text, flags=re.DOTALL)
    dim = _number(code, "DIM")
    if dim is None:
        raise HardwareError(f"{path} does not define DIM", "Pass the gemmini_params.h of your chip")
    # Weights are cut into tiles of this size, so the program is wrong for any other array.
    if dim != array.dim:
        raise HardwareError(
            f"{path}: DIM is {dim}, the target's is {array.dim}",
            "Package for a target whose [systolic] dim is the chip's",
        )
    for name, c_type in (("elem_t", "int8_t"), ("acc_t", "int32_t")):
        declared = _type(code, name)
        if declared != c_type:
            raise HardwareError(
                f"{path}: {name} is {declared or 'not defined'}, the program's is {c_type}",
                "Only arrays of int8 elements and int32 accumulators can run it",
            )
    scale = "float" if _type(code, "acc_scale_t") == "float" else "shift"
    if scale != array.output_scale:
        kinds = {"float": "float32", "shift": "shift"}
        raise HardwareError(
            f"{path}: the output scale (acc_scale_t) is a {kinds[scale]}, the target's a {kinds[array.output_scale]}",
            f'Package for a target with [systolic] scale_type = "{kinds[scale]}"',
        )
    banks, rows, accumulator = (_number(code, name) for name in ("BANK_NUM", "BANK_ROWS", "ACC_ROWS"))
    # Sizes of memories only decide how a product is cut, so the chip's replace the target's.
    merged = replace(
        array,
        scratchpad_rows=array.scratchpad_rows if banks is None or rows is None else banks * rows,
        accumulator_rows=array.accumulator_rows if accumulator is None else accumulator,
    )
    notes = tuple(
        f"{path.name} has {getattr(merged, name)} {name.replace('_', ' ')}, the target {getattr(array, name)}; "
        "the header's count is used"
        for name in ("scratchpad_rows", "accumulator_rows")
        if getattr(merged, name) != getattr(array, name)
    )
    return text, merged, notes


def _number(code: str, name: str) -> int | None:
    match = re.search(rf"(?m)^[ \t]*#[ \t]*define[ \t]+{name}[ \t]+\(?(\d{{1,9}})\)?[ \t]*\r?$", code)
    return int(match[1]) if match else None


def _type(code: str, name: str) -> str | None:
    for statement in code.split(";"):
        # An empty statement has no words.
        *words, declared_name = statement.split() or [""]
        if declared_name == name and "typedef" in words:
            return " ".join(words[len(words) - words[::-1].index("typedef") :])
    return None


def readme(program: Program, region: Region, builder: Builder) -> str:
    """Return a README in Markdown: the array, the shapes and scales of inputs and outputs, and the steps left to the
    host.
    """
    floats = [
        f"- {moment}: " + ", ".join(f"`{c_text.harmless(name)}`" for name in step.sources)
        for moment, ends in (("before the inputs", region.leading), ("after the outputs", region.trailing))
        for step in ends
        if isinstance(step, Float)
    ]
    host = "\n## Left to the host, in float\n\n" + "\n".join(floats) + "\n" if floats else ""
    filled = {
        "@DIM@": str(program.array.dim),
        "@SCALE@": "float" if program.array.output_scale == "float" else "right shift as",
        "@GENERATION@": builder.generation,
        "@INPUTS@": _tensors(program, region.inputs, builder.batch),
        "@OUTPUTS@": _tensors(program, region.outputs, builder.batch),
        "@HOST@": host,
    }
    return _filled("README.md", filled)


def _filled(name: str, marks: Mapping[str, str]) -> str:
    """Return the text of a file of the `c` folder, with its @MARKS@ replaced."""
    text = (C / name).read_text()
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _tensors(program: Program, names: tuple[str, ...], batch: int) -> str:
    rows = []
    for name in names:
        tensor = program.tensors[name]
        shape = " x ".join(str(extent) for extent in (batch, *layout.c_shape(tensor.shape)))
        axes = ", NHWC" if len(tensor.shape) == 4 else ""
        rows.append(
            f"- `{c_text.harmless(tensor.origin or name)}`: int8 {shape}{axes}, scale {np.float32(tensor.scale):.9g}"
        )
    return "\n".join(rows)


Values = Mapping[str, NDArray[np.int8]]
MODES = ("os", "ws", "cpu")
"""The modes, in the order of gemmini.h's enumeration."""

# Values that `net` prints of a long output.
_PRINTED = 64
_COPIED = (
    "layers.h",
    "portable/gemmini_portable.c",
    "portable/include/gemmini.h",
    "portable/include/gemmini_nn.h",
)


def in_c(values: NDArray[np.int8], order: layout.Order) -> NDArray[np.int8]:
    """Return a tensor [batch, ...] in C's layout: [batch, elements]."""
    return values.reshape(len(values), -1)[:, order]


def _images(builder: Builder, region: Region, values: Values) -> str:
    lines = ["/* The inputs, quantized: q = round(x / scale), clamped to -128..127. Images are NHWC. */\n"]
    for number, name in enumerate(region.inputs):
        tensor = builder.tensor(name)
        label = "images" if number == 0 else f"images_{number}"
        order = layout.c_order(tensor.shape)
        shaped = in_c(values[name], order).reshape(builder.batch, *layout.c_shape(tensor.shape))
        assert tensor.scale is not None, "the inputs of the region are integers"
        lines.append(f"\n/* {c_text.harmless(tensor.origin or name)}, scale {np.float32(tensor.scale):.9g} */\n")
        lines.append(c_text.array("elem_t", label, shaped, "row_align(1)"))
        builder.places[name] = TensorLocation(f"(elem_t *){label}", order)
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
        head.append(c_text.buffer("eq_patches", (builder.patches,)))
        head.append(c_text.buffer("eq_unpooled", (builder.unpooled,)))
    return "\n".join([*head, *builder.declarations])


def _expected(
    layers: Sequence[CLayer], outputs: Sequence[tuple[str, layout.Order]], values: Mapping[str, Values]
) -> str:
    """Return the C source of expected.h: for each mode, the full outputs and the fingerprints of all layers.

    A mode with the same outputs as ws uses the arrays of ws.
    """
    lines = [
        "/* What the simulator computed; by mode (os, ws, cpu), outputs in full and fingerprints of all layers. */\n"
    ]
    table: dict[str, list[str]] = {mode: [] for mode in MODES}
    for number, (name, order) in enumerate(outputs):
        # ws first, because the other modes refer to its arrays.
        for mode in ("ws", "os", "cpu"):
            is_equal = np.array_equal(values[mode][name], values["ws"][name])
            label = f"expected_{number}_{'ws' if is_equal else mode}"
            if mode == "ws" or not is_equal:
                lines.append(c_text.array("elem_t", label, in_c(values[mode][name], order)))
            table[mode].append(f"(const elem_t *){label}")
    rows = ",\n".join("    {" + ", ".join(table[mode]) + "}" for mode in MODES)
    lines.append(f"static const elem_t *const expected_outputs[3][{len(outputs)}] = {{\n{rows}\n}};\n")
    rows = ",\n".join(
        "    {"
        + "\n".join(c_text.wrapped(f"UINT64_C({fingerprint(in_c(values[m][k.tensor], k.order))})" for k in layers))
        + "}"
        for m in MODES
    )
    lines.append(f"static const uint64_t expected_layers[3][{len(layers)}] = {{\n{rows}\n}};\n")
    return "\n".join(lines)


def fingerprint(values: NDArray[np.int8]) -> int:
    """Return a 64-bit fingerprint that changes if any single value changes. main.c computes the same fingerprint."""
    # Odd factors: multiplication by them is invertible modulo 2^64, so no single change is lost.
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
        listed = c_text.harmless(tensor.origin or name)
        scale = f"{np.float32(tensor.scale):.9g}"
        outputs += f'    {{"{listed}", "{scale}", {pointer}, {builder.size(name)}}},\n'
    return _filled("main.c", {"@CALLS@": "\n".join(builder.calls), "@LAYERS@": layers, "@OUTPUTS@": outputs})


@dataclass(frozen=True)
class CBundle:
    """List the files that were written.

    Attributes:
        files: paths in the bundle's folder, sorted.
        layers: the buffers that `net dump` writes, in the order in which it writes them.
        inputs, outputs: the int8 tensors that the host provides and receives.
        notes: remarks for the user.
    """

    directory: Path
    files: tuple[str, ...]
    layers: tuple[CLayer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]


def write_c_bundle(
    program: Program,
    inputs: Mapping[str, NDArray[Any]],
    directory: Path,
    *,
    generation: Generation = "2023",
    params_header: Path | None = None,
) -> CBundle:
    """Write C code that computes the integers of `program`. The `inputs` are quantized and become its test images.

    Args:
        inputs: float samples [N, ...] by the program's input names. N becomes the batch size of the C code.
        directory: folder for the files; it is created if necessary, and files in it are replaced.
        generation: the generation of gemmini.h: "2021" (square images; no slices of channels) or "2023".
        params_header: the chip's gemmini_params.h; None writes one for the program's array.

    Raises:
        UsageError: the generation is unknown.
        HardwareError: the header describes another array.
        ModelError: a float operator is between integer layers, or the array cannot express a scale.
        DataError: the samples do not fit the program.
    """
    if generation not in get_args(Generation):
        generations = ", ".join(get_args(Generation))
        raise UsageError(f"gemmini.h has no generation {generation!r}", f"Known are {generations}")
    header, notes = own_header(program.array), tuple[str, ...]()
    if params_header is not None:
        header, array, notes = read_header(params_header, program.array)
        program = dataclasses.replace(program, array=array)
    region = c_region(program)
    if not all(len(values) for values in inputs.values()):
        raise DataError("there are no samples for the C bundle", "Give at least one")
    keep = (*region.inputs, *(name for step in region.steps for name in step_outputs(step)))
    # The three modes of gemmini.h round and cut differently, so each has its own expected values.
    modes: dict[str, Values] = {
        "ws": simulate(program, inputs, keep=keep).tensors,
        "os": simulate(program, inputs, keep=keep, dataflow="OS").tensors,
        "cpu": simulate(program, inputs, keep=keep, rounding="header").tensors,
    }
    batch = len(modes["ws"][region.inputs[0]])
    builder = Builder(program, generation, batch)
    # The inputs come from the simulator, so that the C code starts from the same integers in every mode.
    images = _images(builder, region, modes["ws"])
    for step in region.steps:
        emit_step(builder, step)
    outputs = [(name, layout.c_order(program.tensors[name].shape)) for name in region.outputs]
    # The outputs are requested in the standard order, which may add a last permutation.
    pointers = [builder.request(name, order) for name, order in outputs]
    files = {name: (C / name).read_text() for name in _COPIED}
    files["portable/include/gemmini_params.h"] = header
    share = "2" if program.array.dataflow == "WS" else "1"
    files["Makefile"] = _filled("Makefile", {"@GENERATION@": generation, "@SHARE@": share})
    files["images.h"] = images
    files["params.h"] = _params(builder)
    files["expected.h"] = _expected(builder.layers, outputs, modes)
    files["main.c"] = _main(builder, region, pointers)
    files["README.md"] = readme(program, region, builder)
    for name, content in files.items():
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        # The same bytes on every system: the marker lists hashes.
        place.write_text(content, encoding="utf-8", newline="\n")
    return CBundle(directory, tuple(sorted(files)), tuple(builder.layers), region.inputs, region.outputs, notes)
