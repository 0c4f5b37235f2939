"""Run onnxruntime's own quantizer, for the formats that only it writes."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from edgeq_device.engines.catalog import parse_version
from edgeq_device.system.places import scratch_folder

from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError, ModelError, RuntimeUnavailableError, one_line
from edgeq.model.files import model_bytes
from edgeq.model.graph import name_of
from edgeq.model.names import clashing_names
from edgeq.model.parsing import parse_model
from edgeq.model.prepare import PreparedModel
from edgeq.model.tensors import is_external, iter_tensors
from edgeq.run.session import onnxruntime
from edgeq.scheme import IntegerType


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
    draft_data, data = Path(f"{draft}.data"), Path(f"{destination}.data")
    yield draft
    model = onnx.load(draft, load_external_data=False)
    for tensor in iter_tensors(model):
        if is_external(tensor):
            place = next(entry for entry in tensor.external_data if entry.key == "location")
            place.value = data.name
    destination.write_bytes(model.SerializeToString(deterministic=True))
    draft.unlink()
    if draft_data.exists():
        os.replace(draft_data, data)


OLDEST = "1.27"
"""Oldest onnxruntime whose quantizer can read ranges from a file. pyproject.toml requires the same version."""
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
        self._depth = self._outer_level = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._outer_level = logging.root.manager.disable
                logging.disable(logging.ERROR)
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                logging.disable(self._outer_level)


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
    with refusals(model, fix, fix_ranges=fix_ranges), quantizer_output(destination, external=external) as draft:
        yield {"model_input": source, "model_output": draft, "use_external_data_format": external}


def check_clashes(prepared: PreparedModel, source: Path, quantized: Path) -> None:
    """Refuse the file that the quantizer wrote if a new tensor has the name of an input or output of the model.

    Other tensors cannot clash, because `edgeq.model.names` renames them beforehand.

    Args:
        source: the file that the quantizer read.
        quantized: the file that the quantizer wrote.

    Raises:
        ModelError: names clash; the message contains both names and a solution.
    """
    clashes = clashing_names(name_of(value) for value in (*prepared.model.graph.inputs, *prepared.model.graph.outputs))
    if not clashes:
        return
    source_counts, quantized_counts = _definitions(source), _definitions(quantized)
    for name, origin in clashes.items():
        if quantized_counts[name] > source_counts[name]:
            raise ModelError(
                f"{prepared.source}: quantization gives the name {name!r} to a tensor that it makes for {origin!r}, "
                "but both are inputs or outputs",
                "Rename one of them in the model",
            )


def _definitions(file: Path) -> Counter[str]:
    """Count, for each name, the inputs, weights and node outputs with that name."""
    graph = parse_model(file).graph
    outputs = (name for node in graph.node for name in node.output)
    return Counter([*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer), *outputs])


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
            "Export it without that output, or choose ⟨format⟩ QOperator",
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
    installed = str(onnxruntime().__version__)
    if parse_version(installed) < parse_version(OLDEST):
        fix = f"Upgrade it: python -m pip install --upgrade 'onnxruntime>={OLDEST}'"
        raise RuntimeUnavailableError(
            f"quantization needs onnxruntime {OLDEST} or newer, but {installed} is installed", fix
        )


def tensors_data(ranges: Mapping[str, Range], method: str) -> Any:
    """Return ranges as onnxruntime's `TensorsData` (float32). `method` is the name of one of onnxruntime's calibration
    methods.
    """
    from onnxruntime.quantization import CalibrationMethod, TensorData, TensorsData

    data = {n: TensorData(lowest=np.float32(r.low), highest=np.float32(r.high)) for n, r in ranges.items()}
    return TensorsData(CalibrationMethod[method], data)
