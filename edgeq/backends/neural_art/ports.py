"""Write a form of a Q/DQ model whose inputs and outputs are int8.

At a float input or output, the chip's CPU would quantize or dequantize in software.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgeq.model.edit import drop_unused_initializers
from edgeq.model.graph import constant_values, is_op, name_of, only_reader
from edgeq.model.load import read_unchecked, save_model

MODEL, README = "model_int8_io.onnx", "README.md"


@dataclass(frozen=True)
class IntegerPort:
    """Describe an int8 input or output: x = (q - zero) * scale."""

    shape: tuple[int | str, ...]
    scale: float
    zero: int


def write_integer_form(model: Path, folder: Path) -> tuple[Path, ...]:
    """Write the integer form of a model and a table of its scales into `folder`, and return both paths."""
    graph = read_unchecked(model)
    inputs, outputs = with_integer_ports(graph)
    save_model(graph, folder / MODEL)
    (folder / README).write_text(_readme(inputs, outputs), encoding="utf-8")
    return folder / MODEL, folder / README


def with_integer_ports(model: ir.Model) -> tuple[list[IntegerPort], list[IntegerPort]]:
    """Remove the QuantizeLinear behind each input and the DequantizeLinear in front of each output, in place.

    Returns:
        The inputs and the outputs that became int8. The others stay float, because float nodes read or write them.
    """
    inputs = [
        port for value in model.graph.inputs if not value.is_initializer() and (port := _open_input(model, value))
    ]
    outputs = [port for place in range(len(model.graph.outputs)) if (port := _open_output(model, place))]
    drop_unused_initializers(model.graph)
    return inputs, outputs


def _open_input(model: ir.Model, value: ir.Value) -> IntegerPort | None:
    quantize = only_reader(value)
    if quantize is None or not is_op(quantize, "QuantizeLinear"):
        return None
    integers = quantize.outputs[0]
    integers.replace_all_uses_with(value)
    value.type = ir.TensorType(ir.DataType.INT8)
    port = _port(value, quantize)
    model.graph.remove(quantize, safe=True)
    return port


def _open_output(model: ir.Model, place: int) -> IntegerPort | None:
    value = model.graph.outputs[place]
    dequantize = value.producer()
    # The model may read its own output, as floats.
    if dequantize is None or not is_op(dequantize, "DequantizeLinear") or value.uses():
        return None
    integers = dequantize.inputs[0]
    assert integers is not None
    name = name_of(value)
    port = _port(value, dequantize)
    model.graph.outputs[place] = integers
    model.graph.remove(dequantize, safe=True)
    integers.name, integers.shape = name, value.shape
    integers.type = ir.TensorType(ir.DataType.INT8)
    return port


def _port(value: ir.Value, pair: ir.Node) -> IntegerPort:
    scale, zero = (constant_values(v).reshape(()) for v in pair.inputs[1:3])
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape or ())
    return IntegerPort(shape, float(scale), int(zero))


def _readme(inputs: list[IntegerPort], outputs: list[IntegerPort]) -> str:
    rows = ["| | shape | scale | zero point |", "|---|---|---|---|"]
    for kind, ports in (("input", inputs), ("output", outputs)):
        # A name may contain anything, so the order of the ports stands for it.
        rows += [f"| {kind} {n} | {list(p.shape)} | {p.scale!r} | {p.zero} |" for n, p in enumerate(ports)]
    table = "\n".join(rows)
    return (
        "# The model for ST Edge AI, with int8 inputs and outputs\n\n"
        f"`{MODEL}` has the integers of the model next to it, and no conversion at its ends. A number is\n"
        f"(integer - zero point) * scale:\n\n{table}\n\n"
        "Give the file to ST Edge AI with the target stm32n6. Neither ST Edge AI nor a chip was run by edgeq.\n"
    )
