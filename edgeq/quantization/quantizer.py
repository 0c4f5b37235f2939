"""Quantize with onnxruntime's own quantizer if its formats are needed, and finish the output of any quantizer.

edgeq chooses the scale and zero point of a tensor in the same way as ONNX Runtime's quantizer:

    activations    scale = (high - low) / steps, zero point = round(smallest - low / scale)
    weights        scale = largest magnitude / largest integer, zero point 0, if they are symmetric

`settle` keeps float layers in float in every session, with or without session options. When a model is loaded, ONNX
Runtime's WeightBiasQuantization quantizes the weights of a float Conv or Gemm between integer tensors, with one scale
per tensor. A layer that was kept in float for accuracy then loses more accuracy than any other. A session option
prevents this, but it is lost if the file is used alone. The optimizer matches a layer only if the layer's input is
dequantized with one scale. So edgeq gives the layer its own DequantizeLinear, which repeats the same scale for each
channel. The numbers are the same, but the optimizer does not match this form.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.engines.catalog import parse_version
from edgeq_device.engines.options import KEY as CARRIED
from edgeq_device.system.places import scratch_folder
from numpy.typing import NDArray

from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError, ModelError, RuntimeUnavailableError, one_line
from edgeq.model.clean import clashing_names
from edgeq.model.edit import Editor, drop_unused_initializers
from edgeq.model.graph import computed_constants, constant, constant_tensor, is_op, name_of, node_input
from edgeq.model.int8_prediction import slow_fusions
from edgeq.model.load import model_bytes
from edgeq.model.prepare import PreparedModel
from edgeq.model.quant_params import LIMITS, QuantParams
from edgeq.model.tensors import is_external, iter_tensors, parse_model
from edgeq.run.session import onnxruntime
from edgeq.scheme import IntegerType, Scheme

# Smaller scales are subnormal float32 numbers, which processors may treat as zero.
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


def integer_type(name: IntegerType) -> ir.DataType:
    """Return the ONNX element type for "int8" or "uint8", the names that a scheme uses."""
    return ir.DataType[name.upper()]


def activation_params(found: Range, dtype: ir.DataType, *, symmetric: bool) -> QuantParams:
    """Return the parameters (float32 scale) of an activation whose values are in the range `found`.

    An empty range gets scale 1. Unless `symmetric`, its zero point is the smallest integer, which leaves all levels to
    positive values. If the samples showed only zeros, other values are more likely positive, as after a Relu that let
    nothing through.
    """
    low, high = np.float32(found.low), np.float32(found.high)
    narrow = symmetric and LIMITS[dtype][0] < 0
    made = QuantParams.from_range(float(low), float(high), dtype, symmetric=symmetric, narrow=narrow)
    if float(made.scale) >= _LEAST_SCALE:
        return replace(made, scale=made.scale.astype(np.float32))
    zero = made.zero_point if symmetric else np.asarray(LIMITS[dtype][0])
    return replace(made, scale=np.asarray(1, np.float32), zero_point=zero)


def spreads_thin(softmax: Range) -> bool:
    """Return whether a Softmax with this range has so many elements that a scale of 1/255 would leave it few levels.

    A Softmax over few elements can return any value up to 1, whatever the samples showed.
    """
    return softmax.high < 1 / 2


def scheme_params(found: Range, scheme: Scheme) -> QuantParams:
    """Return `activation_params` for the activation type and the symmetry of a scheme."""
    return activation_params(found, integer_type(scheme.activation_type), symmetric=scheme.activation_symmetric)


def weight_params(
    weight: NDArray[np.float32], axis: int | None, scheme: Scheme, bound: NDArray[np.floating] | None = None
) -> QuantParams:
    """Return the parameters (float32 scale) of a weight.

    Args:
        axis: axis of the channels if each channel has its own scale; None for one scale. Scales per channel are
            symmetric.
        bound: magnitude that the largest integer represents, for each channel or one for all. If it is None, the
            largest magnitude of the weight is used.
    """
    dtype = integer_type(scheme.weight_type)
    symmetric = axis is not None or scheme.weight_symmetric
    least, most = LIMITS[dtype]
    if scheme.reduce_range:
        least, most = (0, 127) if least == 0 else (-64, 64)
    elif symmetric and least < 0:
        least = -most
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    low = np.minimum(weight.min(axis=others, initial=0), 0).astype(np.float64)
    high = np.maximum(weight.max(axis=others, initial=0), 0).astype(np.float64)
    if symmetric or bound is not None:
        high = np.maximum(-low, high) if bound is None else np.asarray(bound, np.float64)
        low = -high
    scale = (high - low) / (most - least)
    scale = np.where(scale < _LEAST_SCALE, 1.0, scale)
    middle = np.full(scale.shape, np.rint((least + most) / 2))
    zero = middle if symmetric else np.clip(np.rint(least - low / scale), least, most)
    return QuantParams(
        scale.astype(np.float32), zero.astype(np.int64), dtype, axis=axis or 0, narrow=least == -LIMITS[dtype][1]
    )


@contextmanager
def quantizer_output(destination: Path, *, external: bool) -> Iterator[Path]:
    """Yield a path for the quantizer to write to. Afterwards, the model is at `destination`.

    External weights are in `<name>.data` next to the model. onnx refuses to write a data file if a file of the same
    name is in the *current* folder, wherever the model is written. The current folder often contains the model to be
    quantized, with its own data file. So the quantizer writes under a random name.

    Args:
        external: whether weights go into a separate file. If not, the path is `destination`.
    """
    if not external:
        yield destination
        return
    draft = destination.with_name(f"{secrets.token_hex(16)}.onnx")
    written, data = Path(f"{draft}.data"), Path(f"{destination}.data")
    yield draft
    model = onnx.load(draft, load_external_data=False)
    for tensor in iter_tensors(model):
        if is_external(tensor):
            place = next(entry for entry in tensor.external_data if entry.key == "location")
            place.value = data.name
    destination.write_bytes(model.SerializeToString(deterministic=True))
    draft.unlink()
    if written.exists():
        os.replace(written, data)


OLDEST = "1.27"
"""Oldest onnxruntime whose quantizer can read ranges from a file. pyproject.toml requires the same version."""
# Smallest width of a range. The scale of a narrower range cannot be represented in float32 with full accuracy.
_LEAST_WIDTH = 2.0**-100
# Protobuf refuses messages of 2 GiB or more. The quantized file is smaller, but intermediate files may be that large.
_EXTERNAL_DATA_FROM = 2**31 - 2**20
# The quantizer raises all of these for models and options that it cannot handle.
_REFUSALS = (ValueError, RuntimeError, TypeError, NotImplementedError, KeyError, IndexError, AttributeError)


def quant_type(name: IntegerType) -> Any:
    """Return onnxruntime's `QuantType` for an integer type."""
    from onnxruntime.quantization import QuantType

    return {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}[name]


class _Silence:
    """Switch Python's logging off while at least one thread needs silence. The switch is global to the process, and
    several threads may need silence at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._wanted:
                self._before = logging.root.manager.disable
                logging.disable(logging.ERROR)
            self._wanted += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                logging.disable(self._before)


_SILENCE = _Silence()


def quiet() -> _Silence:
    """Return a context manager that silences onnxruntime's tools. Otherwise, they would log a line for every node."""
    return _SILENCE


@contextmanager
def refusals(source: str | Path, fix: str, *, fix_ranges: str = "") -> Iterator[None]:
    """Silence the quantizer's log inside the `with`, and convert its exceptions to errors of edgeq.

    Args:
        source: the model, for the message.
        fix: solution to suggest if the quantizer refuses the model.
        fix_ranges: solution to suggest if a tensor has no range.

    Raises:
        ModelError: the quantizer refuses the model.
        CalibrationError: a tensor has no range.
    """
    try:
        with quiet():
            yield
    except _REFUSALS as error:
        if fix_ranges and "Quantization parameters are not specified" in str(error):
            raise CalibrationError(f"{source}: {one_line(error)}", fix_ranges) from error
        raise ModelError(f"{source}: onnxruntime's quantizer refuses it: {one_line(error)}", fix) from error


@contextmanager
def quantizer_files(
    source: Path, destination: Path, model: Path, fix: str, *, fix_ranges: str = "", external: bool = False
) -> Iterator[dict[str, Any]]:
    """Prepare a run of the quantizer from one file to another, inside `refusals`. Yield the quantizer's arguments that
    name the files.

    Args:
        model, fix, fix_ranges: see `refusals`.
        external: whether weights go into a separate file, even if one file can contain everything.
    """
    external = external or model_bytes(source) >= _EXTERNAL_DATA_FROM
    with refusals(model, fix, fix_ranges=fix_ranges), quantizer_output(destination, external=external) as written:
        yield {"model_input": source, "model_output": written, "use_external_data_format": external}


def check_clashes(prepared: PreparedModel, source: Path, written: Path) -> None:
    """Refuse the file that the quantizer wrote if a new tensor has the name of an input or output of the model.

    Other tensors cannot clash, because `edgeq.model.clean` renames them beforehand.

    Args:
        source: the file that the quantizer read.
        written: the file that the quantizer wrote.

    Raises:
        ModelError: names clash; the message contains both names and a solution.
    """
    clashes = clashing_names(name_of(value) for value in (*prepared.model.graph.inputs, *prepared.model.graph.outputs))
    if not clashes:
        return
    before, after = _definitions(source), _definitions(written)
    for name, other in clashes.items():
        if after[name] > before[name]:
            raise ModelError(
                f"{prepared.source}: quantization gives the name {name!r} to a tensor that it makes for {other!r}, but "
                "both are inputs or outputs",
                "Rename one of them in the model",
            )


def _definitions(file: Path) -> Counter[str]:
    """Count, for each name, the inputs, weights and node outputs with that name."""
    graph = parse_model(file).graph
    made = (name for node in graph.node for name in node.output)
    return Counter([*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer), *made])


def quantize_with_ranges(
    prepared: PreparedModel,
    destination: Path,
    ranges: Mapping[str, Range],
    *,
    float_nodes: Collection[str],
    fix: str,
    fix_ranges: str,
    use_external_data_format: bool = False,
    **arguments: Any,
) -> None:
    """Run onnxruntime's `quantize_static` with given ranges instead of samples.

    Args:
        float_nodes: names of nodes that are not quantized.
        fix: solution to suggest if the quantizer refuses the model.
        fix_ranges: solution to suggest if a range is missing.
        arguments: further arguments of `quantize_static`.

    Raises:
        CalibrationError: a tensor has no range.
        ModelError: the quantizer refuses the model, or a new tensor has the name of an input or output.
        RuntimeUnavailableError: onnxruntime is too old.
    """
    _check_version()
    from onnxruntime.quantization import QuantFormat, quantize_static, save_tensors_data

    pairs = arguments.get("quant_format", QuantFormat.QDQ) is QuantFormat.QDQ
    through = next((value.name for value in prepared.model.graph.outputs if value.is_graph_input()), None)
    if pairs and through is not None:
        # The quantizer would rename the output, and with it the input, to the name of a DequantizeLinear's output.
        raise ModelError(
            f"{prepared.source}: its output {through!r} is an unchanged input",
            "Export it without that output, or choose --format QOperator",
        )

    # The folder is private, because the quantizer leaves shape-inferred copies of big models next to the file that it
    # reads.
    with scratch_folder("edgeq-ranges-") as folder:
        cache = Path(folder) / "ranges.json"
        # quantize_static accepts given ranges only as "MinMax". It uses nothing but the two ends of each range, so the
        # method that derived them does not matter.
        save_tensors_data(tensors_data(ranges, "MinMax"), cache)
        files = quantizer_files(
            prepared.path, destination, prepared.source, fix, fix_ranges=fix_ranges, external=use_external_data_format
        )
        with files as named:
            quantize_static(
                **named,
                calibration_data_reader=None,
                nodes_to_exclude=sorted(float_nodes),
                calibration_cache_path=cache,
                **arguments,
            )
    check_clashes(prepared, prepared.path, destination)


def _check_version() -> None:
    """Refuse an onnxruntime that is older than edgeq requires.

    Raises:
        RuntimeUnavailableError: the quantizer of the installed onnxruntime cannot read ranges from a file.
    """
    here = str(onnxruntime().__version__)
    if parse_version(here) < parse_version(OLDEST):
        fix = f"Upgrade it: python -m pip install --upgrade 'onnxruntime>={OLDEST}'"
        raise RuntimeUnavailableError(f"quantization needs onnxruntime {OLDEST} or newer, but {here} is installed", fix)


def chosen_params(
    ranges: Mapping[str, Range], dtype: ir.DataType, *, symmetric: bool
) -> Callable[[ir.Value], QuantParams | None]:
    """Return a function from a tensor to the parameters that onnxruntime's quantizer derives from `ranges`.

    The function returns None for a tensor whose range is missing or empty; the quantizer gives such a tensor scale 1
    and zero point 0. It also returns None for integer types that `edgeq.model.quant_params` does not list.
    """

    def params_of(value: ir.Value) -> QuantParams | None:
        """Return the parameters of one tensor, or None."""
        found = ranges.get(name_of(value))
        if found is None or dtype not in LIMITS or found.high - found.low < _LEAST_WIDTH:
            return None
        return activation_params(found, dtype, symmetric=symmetric)

    return params_of


def tensors_data(ranges: Mapping[str, Range], method: str) -> Any:
    """Return ranges as onnxruntime's `TensorsData` (float32). `method` is the name of one of onnxruntime's calibration
    methods.
    """
    from onnxruntime.quantization import CalibrationMethod, TensorData, TensorsData

    data = {n: TensorData(lowest=np.float32(r.low), highest=np.float32(r.high)) for n, r in ranges.items()}
    return TensorsData(CalibrationMethod[method], data)


# Session option for layers that `guard_float_layers` cannot change.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
_REQUANTIZED_AT_LOAD = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_SUFFIX = "/kept_in_float"


def guard_float_layers(model: ir.Model, names: Collection[str]) -> int:
    """Give each named node that reads a dequantized tensor its own DequantizeLinear with per-channel scales, in place.

    Args:
        names: names of Conv, ConvTranspose, Gemm and MatMul nodes with constant weights.

    Returns:
        The number of nodes that were changed.
    """
    editor = Editor(model)
    changed = 0
    for node, maker in _behind_dequantize(model, names):
        restored, weight = maker.outputs[0], constant_tensor(node.inputs[1])
        if weight is None:
            continue
        parameters = {value.name: constant(value) for value in maker.inputs[1:] if value is not None}
        if not all(number is not None and not number.ndim for number in parameters.values()):
            continue
        axis, channels = _channels(node, tuple(weight.shape.numpy()))
        if channels == 1:  # With one channel, a scale per channel would again be a single scale.
            axis, channels = next(
                ((axis, n) for axis, n in enumerate(restored.shape or ()) if isinstance(n, int) and n > 1), (axis, 1)
            )
        if channels == 1:
            continue
        repeated = [
            editor.constant(f"{name}/{channels}_times", np.full(channels, number))
            for name, number in parameters.items()
        ]
        own = editor.node(
            "DequantizeLinear",
            [maker.inputs[0], *repeated],
            f"{node.name}{_SUFFIX}",
            before=node,
            attributes={"axis": axis},
        )
        node.replace_input_with(0, own)
        changed += 1
        if not restored.uses() and not restored.is_graph_output():
            model.graph.remove(maker, safe=True)
    return changed


def requantized_at_load(model: ir.Model, names: Collection[str]) -> tuple[str, ...]:
    """Return those of the named nodes whose weights ONNX Runtime may quantize when it loads the model.

    These nodes read a tensor that is dequantized with one scale, or with a scale that is not constant.
    """
    scales = [(node, constant(maker.inputs[1])) for node, maker in _behind_dequantize(model, names)]
    return tuple(str(node.name) for node, scale in scales if scale is None or scale.size == 1)


def _behind_dequantize(model: ir.Model, names: Collection[str]) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yield each named node that reads a dequantized tensor, together with the DequantizeLinear."""
    for node in model.graph:
        data = node.inputs[0] if node.name in names else None
        made = data.producer() if data is not None else None
        if made is not None and is_op(made, "DequantizeLinear"):
            yield node, made


def _channels(node: ir.Node, weight: tuple[int, ...]) -> tuple[int, int]:
    """Return the axis of a node's data along which the node sums over channels, and the number of these channels."""
    if node.op_type == "Conv":
        return 1, weight[1] * node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose":
        return 1, weight[0]
    if node.op_type == "Gemm":
        rows = weight[1] if node.attributes.get_int("transB", 0) else weight[0]
        return 0 if node.attributes.get_int("transA", 0) else 1, rows
    return -1, weight[-2] if len(weight) > 1 else weight[0]


def settle(
    built: ir.Model, given: Mapping[str, str] | None = None, *, guard: bool = True
) -> tuple[dict[str, str], tuple[str, ...], bool]:
    """Make a quantized model correct and fast on ONNX Runtime's CPU kernels, in place.

    If a change to the graph is enough, edgeq changes the graph (`guard_float_layers`). Otherwise it sets session
    options, which are stored in the model's metadata.

    Args:
        given: options that are already set; the result includes them.
        guard: whether the graph may be changed.

    Returns:
        The session options, the reason for each change, and whether the graph was changed.
    """
    options = dict(given or {})
    disabled = [name for name in options.get(_DISABLED, "").split(";") if name]
    notes = []
    kept = float_compute_nodes(built)
    guarded = guard_float_layers(built, kept) if guard else 0
    if guarded:
        notes.append(
            f"compute nodes that stay in float: {guarded}, in a form that ONNX Runtime does not quantize at load"
        )
    unfused = guard_products(built) if guard else 0
    at_risk = requantized_at_load(built, kept)
    if at_risk:
        disabled.append(_REQUANTIZER)
        notes.append(
            f"compute nodes that stay in float: {len(at_risk)}; the session option {_DISABLED} keeps ONNX Runtime from "
            "quantizing their weights at load"
        )
    for fusion in slow_fusions("cpu", built):
        disabled.append(fusion.optimizer)
        notes.append(f"without ONNX Runtime's {fusion.optimizer}: {fusion.reason}")
    if disabled:
        options[_DISABLED] = ";".join(dict.fromkeys(disabled))
    before = built.metadata_props.pop(CARRIED, None)
    if options:
        built.metadata_props[CARRIED] = json.dumps(options, sort_keys=True)
    return options, tuple(notes), guarded + unfused > 0 or before != built.metadata_props.get(CARRIED)


def guard_products(model: ir.Model) -> int:
    """Find the biases that are added after integer MatMuls of known sizes, and give each as many axes as the product,
    in place. Return how many were changed.

    When ONNX Runtime loads a model, its MatMulAddFusion turns a MatMul and an Add of a vector into a Gemm, even if the
    MatMul has integer weights. The vector is not an integer bias, so the Gemm computes in float. The fusion does not
    match a bias with more axes.
    """
    editor, guarded = Editor(model), 0
    for node in [node for node in model.graph if is_op(node, "Add")]:
        for product, bias in (node.inputs, node.inputs[::-1]):
            values = constant(bias)
            if product is None or bias is None or values is None or values.ndim > 1 or not _is_wide(product):
                continue
            sizes = (1,) * (len(product.shape or ()) - 1) + values.shape[-1:]
            wide = editor.constant(f"{name_of(bias)}/wide", values.reshape(sizes))
            node.replace_input_with(list(node.inputs).index(bias), wide)
            guarded += 1
            break
    if guarded:
        drop_unused_initializers(model.graph)
    return guarded


def _is_wide(product: ir.Value) -> bool:
    """Return whether a tensor is the result of a MatMul with integer weights and has at least three axes of known
    size.
    """
    node, shape = product.producer(), product.shape
    weight = node_input(node, 1) if node is not None and is_op(node, "MatMul") else None
    known = shape is not None and len(shape) > 2 and all(isinstance(size, int) for size in shape)
    return known and weight is not None and is_op(weight.producer(), "DequantizeLinear")


def float_compute_nodes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of Conv, ConvTranspose, Gemm and MatMul nodes with a constant float weight.

    Return an empty tuple if the graph has no QuantizeLinear nodes.
    """
    if not any(node.op_type == "QuantizeLinear" for node in model.graph):
        return ()
    constants = computed_constants(model.graph)
    found = []
    for node in model.graph:
        weight = node_input(node, 1) if node.op_type in _REQUANTIZED_AT_LOAD else None
        is_float = weight is not None and not is_op(weight.producer(), "DequantizeLinear")
        if is_float and name_of(weight) in constants:
            found.append(str(node.name))
    return tuple(found)
