"""Provide the calibrators of ONNX Runtime's documentation of 2021 to 2026, and compute ranges for the older functions.

The built-in calibrators observe the unchanged model in edgeq's single pass. They work for any shapes, need constant
memory, and add no outputs to the graph. A user's own class derives from `CalibraterBase`. Such a class adds outputs to
the graph itself, and gets a session of the model that it wrote.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.system.places import make_scratch, scratch_folder
from numpy.typing import NDArray

from edgeq.calibration.collect import collect
from edgeq.calibration.methods.entropy import entropy_range
from edgeq.calibration.methods.percentile import percentile_range
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import Statistics, TensorStatistics, linear_of, mean_of_units
from edgeq.calibration.table import write_tables
from edgeq.compat._members import METHODS, member, name_of_member
from edgeq.compat.source import LOG, ModelInput, as_file, as_given, listed, warn_unknown_nodes
from edgeq.data.python_items import drain_reader
from edgeq.data.samples import open_samples
from edgeq.errors import CalibrationError, UsageError
from edgeq.model.convert import to_proto
from edgeq.model.graph import clamps, name_of
from edgeq.model.load import load_model, read_model, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.model.quant_params import dynamic_params
from edgeq.model.shapes import element_types
from edgeq.quantization.quantizer import tensors_data
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.outputs import output_file

Span = tuple[NDArray[np.float32], NDArray[np.float32]]
"""The lowest and highest value of a tensor, each float32[] or float32[channels]. Zero may be outside this range."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class CalibratorOptions:
    """Hold those options of onnxruntime's calibrators that determine ranges.

    Attributes:
        symmetric: whether ranges are symmetric. If so, MinMax uses the range -bound..bound, and Percentile applies its
            percentage to the magnitudes. None means the method's default, which is True for Percentile. Entropy always
            uses magnitudes.
        moving_average: for MinMax: whether to use the mean of the samples' extrema.
        percentile: the share of values that Percentile keeps, in percent.
        per_channel: for MinMax: whether each channel along axis 1 has its own range.
        num_bins, num_quantized_bins: for Entropy, which searches among the windows of at least `num_quantized_bins`
            bins. With the default, both are equal, and the only window is the whole range.
    """

    symmetric: bool | None = None
    moving_average: bool = False
    percentile: float = 99.999
    per_channel: bool = False
    num_bins: int = 128
    num_quantized_bins: int = 128

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> CalibratorOptions:
        """Read options by name. None means the default. The exception is `symmetric`: there, None means False, as in
        onnxruntime.

        Raises:
            UsageError: a value is not a number, or is out of its bounds.
        """
        # An absent flag keeps the default of the class, and a present None is False.
        flags = {
            name: bool(options[name]) for name in ("symmetric", "moving_average", "per_channel") if name in options
        }
        return cls(
            **flags,
            percentile=_percentile(options.get("percentile", cls.percentile)),
            num_bins=_bins("num_bins", options.get("num_bins", cls.num_bins)),
            num_quantized_bins=_bins("num_quantized_bins", options.get("num_quantized_bins", cls.num_quantized_bins)),
        )


def statistics_of(
    prepared: PreparedModel, reader: Any, *, stride: int | None = None, per_channel: bool = False
) -> Statistics:
    """Run the float model over a reader's samples and return the statistics of every float tensor.

    Args:
        reader: a CalibrationDataReader, or anything else that `edgeq.open_samples` accepts.
        stride: the number of samples per part, for a reader that has a length and `set_range`. It must divide the
            length.
        per_channel: True to also keep the extrema of each channel. Channels are along axis 1 of the tensors that are
            known to have that axis.
    """
    # The stride changes nothing in the result, but the option is checked as onnxruntime does.
    source = _in_parts(reader, stride) if stride else reader
    samples = open_samples(source, prepared.signature, model=prepared.source)
    names = activations(prepared.model)
    # Channel extrema multiply the memory of the statistics, so they are kept only on request.
    channels = dict.fromkeys(_with_channels(prepared.model, names), 1) if per_channel else {}
    return collect(prepared.model, samples, names, model_digest=prepared.digest, channels=channels)


def activations(model: ir.Model) -> tuple[str, ...]:
    """Return the names of the inputs and the node outputs that may contain floats. The list is complete, because the
    model keeps all its nodes.
    """
    types = element_types(model)
    produced = [value for node in model.graph for value in node.outputs]
    names = [v.name for v in (*model.graph.inputs, *produced) if v.name and not v.is_initializer()]
    return tuple(name for name in names if types.get(name, ir.DataType.FLOAT) in _FLOATS)


def _with_channels(model: ir.Model, names: tuple[str, ...]) -> list[str]:
    """Return the tensors that are known to have two axes or more."""
    produced = (value for node in model.graph for value in node.outputs)
    axes = {name_of(v): len(v.shape) for v in (*model.graph.inputs, *produced) if v.shape is not None}
    return [name for name in names if axes.get(name, 0) > 1]


def ranges_of(statistics: Statistics, method: Any, options: CalibratorOptions) -> dict[str, Range]:
    """Return the ranges of `spans_of`, widened to include zero because quantization needs that.

    Raises:
        UsageError: for the same reasons as in `spans_of`.
    """
    return as_ranges(spans_of(statistics, method, options))


def spans_of(statistics: Statistics, method: Any, options: CalibratorOptions) -> dict[str, Span]:
    """Return, for each tensor, the range that onnxruntime's calibrator computes in `compute_data`.

    Args:
        method: a CalibrationMethod or its name.

    Raises:
        UsageError: the method has no integer ranges, or the options exclude each other.
    """
    name = name_of_member(method)
    if name not in METHODS:
        raise UsageError(f"calibration method {name} gives no integer ranges", f"It can be {', '.join(METHODS)}")
    # The mean of the samples' extrema is kept only for whole tensors.
    if name == "MinMax" and options.per_channel and options.moving_average:
        raise UsageError("per_channel and moving_average cannot be combined", "Leave one of them out")
    return {tensor: _span(figures, name, options) for tensor, figures in statistics.tensors.items()}


def _span(tensor: TensorStatistics, method: str, options: CalibratorOptions) -> Span:
    # An empty tensor, such as a cache before the first step, has no values and needs no range.
    if not tensor.count:
        return _pair(0.0, 0.0)
    if method == "MinMax":
        low, high = _extrema(tensor, options)
        bound = np.maximum(np.abs(low), np.abs(high))
        return (-bound, bound) if options.symmetric else (low, high)
    ends = tensor.minimum, tensor.maximum
    if method == "Percentile":
        ends = percentile_range(tensor.histogram, options.percentile, symmetric=options.symmetric is not False)
    # With as many levels as bins, there is only one window, and the range is the extrema.
    elif options.num_bins // 2 > options.num_quantized_bins // 2:
        ends = entropy_range(linear_of(tensor.histogram), levels=options.num_quantized_bins, symmetric=True)
    # Both methods clip their ranges, including symmetric ones, to the extrema of the samples.
    return _pair(max(ends[0], tensor.minimum), min(ends[1], tensor.maximum))


def _extrema(tensor: TensorStatistics, options: CalibratorOptions) -> Span:
    if options.per_channel and tensor.channels is not None:
        return tensor.channels.minimum, tensor.channels.maximum
    if options.moving_average:
        return _pair(*(mean_of_units(total, tensor.nonempty) for total in (tensor.minimum_sum, tensor.maximum_sum)))
    return _pair(tensor.minimum, tensor.maximum)


def _pair(low: float, high: float) -> Span:
    return np.asarray(low, np.float32), np.asarray(high, np.float32)


def read_cache(path: Path, method: Any) -> dict[str, Range]:
    """Read the ranges of a `calibration_cache_path` that an earlier run of edgeq or of onnxruntime wrote.

    Raises:
        CalibrationError: the file cannot be read, or another method made it.
    """
    from onnxruntime.quantization import load_tensors_data

    try:
        data = load_tensors_data(path)
        ranges = {name: _range(value) for name, value in data.items()}
    # A damaged file raises whatever its values lead to.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"{path} is not a calibration cache: {error}", "Delete it, or name another file"
        ) from error
    expected = name_of_member(method)
    if data.calibration_method.name != expected:
        raise CalibrationError(
            f"{path} was made with {data.calibration_method.name}, not {expected}", "Delete it, or name another file"
        )
    return ranges


def as_ranges(data: Any) -> dict[str, Range]:
    """Return the ranges in a calibrator's result: `TensorsData`, or a dict of pairs, arrays or `TensorData`."""
    return {str(name): _range(value) for name, value in data.items()}


def _range(value: Any) -> Range:
    """Return the range of a tensor. If each channel has its own range, return one range that covers all the
    channels.
    """
    if hasattr(value, "range_value"):
        value = value.range_value
    low, high = (np.asarray(end, np.float64) for end in value)
    # Zero must be exact in every quantized tensor, because padding and Relu produce it.
    return Range(min(float(low.min()), 0.0), max(float(high.max()), 0.0))


def _percentile(value: Any) -> float:
    try:
        share = CalibratorOptions.percentile if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"CalibPercentile is {value!r}", "Give a number such as 99.999") from error
    if not 0 < share <= 100:
        raise UsageError(f"CalibPercentile is {value!r}", "Give a number above 0 and at most 100, such as 99.999")
    return share


def _bins(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or value < 2:
        raise UsageError(f"{name} is {value!r}", "Give a whole number of 2 or more, such as 2048")
    return int(value)


def _in_parts(reader: Any, size: Any) -> Iterator[Any]:
    if not isinstance(size, int):
        raise UsageError(f"CalibStridedMinMax is {size!r}", "Give a whole number")
    try:
        total = len(reader)
        remainder = total % size
        set_range = reader.set_range
        if not remainder:
            set_range(start_index=0, end_index=size)
    # onnxruntime's CalibrationDataReader has both methods, but they only raise an error.
    except (NotImplementedError, AttributeError, TypeError) as error:
        raise UsageError(
            f"CalibStridedMinMax is {size}, but {type(reader).__name__} has no length or no set_range",
            "Leave it out: memory does not grow with the samples",
        ) from error
    if remainder:
        raise UsageError(
            f"CalibStridedMinMax is {size}, but the reader has {total} samples", f"Give a divisor of {total}"
        )
    for start in range(0, total, size):
        set_range(start_index=start, end_index=start + size)
        yield from drain_reader(reader)


def write_calibration_table(calibration_cache: Mapping[str, Any], dir: str | Path = ".") -> None:
    """Write calibration.flatbuffers, calibration.json and calibration.cache, and replace existing files.

    For each tensor, the files contain its largest magnitude, which the TensorRT provider reads. onnxruntime's function
    writes the upper end of the range instead, so a tensor of negative numbers loses its scale.

    Args:
        calibration_cache: the result of compute_data or compute_range, or a dict of pairs or of magnitudes.

    Raises:
        CalibrationError: a range is not finite, or a name contains white space.
    """
    pairs = {
        # A single number is a magnitude, so it stands for a symmetric range.
        name: value if np.ndim(value) or hasattr(value, "range_value") else (-abs(float(value)), abs(float(value)))
        for name, value in calibration_cache.items()
    }
    write_tables(Path(dir), as_ranges(pairs))


def calibrate(
    model_path: ModelInput,
    data_reader: Any,
    op_types: Sequence[str] = ("Conv", "MatMul"),
    black_nodes: Sequence[str] = (),
    white_nodes: Sequence[str] = (),
    augmented_model_path: str = "augmented_model.onnx",
) -> dict[str, list[Any]]:
    """Return the scales and zero points of the inputs and outputs of the chosen operators. The result can be passed to
    `quantize` as `quantization_params`.

    Args:
        op_types: the operator types. Nodes in `white_nodes` are added, and nodes in `black_nodes` are left out.
        augmented_model_path: accepted but not used, because no augmented model is needed.

    Returns:
        {tensor: [zero point (uint8), scale (float32)]}, from minima and maxima. If only a Relu or Clip reads a tensor,
            the tensor gets the range of that node's output, so that the node can be dropped.
    """
    del augmented_model_path
    with scratch_folder("edgeq-calibrate-") as folder:
        prepared = as_given(model_path, Path(folder))
        graph = prepared.model.graph
        warn_unknown_nodes(prepared.model, black_nodes, white_nodes)
        ranges = ranges_of(statistics_of(prepared, data_reader), "MinMax", CalibratorOptions())
        # Backwards, so that the range of a chain's last clamp reaches its first input.
        clamp_nodes = reversed(list(clamps(prepared.model.graph)))
    for source, result in [(name_of(clamp.inputs[0]), name_of(clamp.outputs[0])) for clamp in clamp_nodes]:
        if result in ranges:
            ranges[source] = ranges[result]
    names = [
        name_of(value)
        for node in graph
        if (node.op_type in op_types or node.name in white_nodes) and node.name not in black_nodes
        for value in (*node.inputs, *node.outputs)
    ]
    selected = {name: ranges[name] for name in dict.fromkeys(names) if name in ranges}
    params = {name: dynamic_params(np.asarray([span.low, span.high])) for name, span in selected.items()}
    return {name: [np.uint8(param.zero_point), np.float32(param.scale)] for name, param in params.items()}


_OPTIONS = frozenset(field.name for field in fields(CalibratorOptions))
_NOT_NEEDED = frozenset({"averaging_constant", "max_intermediate_outputs", "scenario"})


class CalibraterBase:
    """Define the methods of a calibrator. Override `augment_graph`, `collect_data`, and `compute_data` or
    `compute_range`.

    Attributes:
        model: the model with shapes. `augment_graph` may change it in place or copy it.
        augmented_model_path: the file that `augment_graph` writes and `create_inference_session` opens.
        infer_session: the session, after `create_inference_session` opened it.
    """

    def __init__(
        self,
        model_path: ModelInput,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        per_channel: bool = False,
    ) -> None:
        # The folder must live as long as the object, because its session reads the files in it.
        self._folder, remove = make_scratch("edgeq-calibrater-")
        weakref.finalize(self, remove)
        self.model_path = as_file(model_path, self._folder)
        self.model: onnx.ModelProto = onnx.shape_inference.infer_shapes(load_model(self.model_path))
        self.op_types_to_calibrate = None if op_types_to_calibrate is None else listed(op_types_to_calibrate)
        self.augmented_model_path = augmented_model_path
        self.symmetric = symmetric
        self.use_external_data_format = use_external_data_format
        self.per_channel = per_channel
        self.infer_session: Any = None
        self.execution_providers: list[str] = ["CPUExecutionProvider"]

    def set_execution_providers(self, execution_providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:
        """Choose providers and open the session again."""
        self.execution_providers = list(execution_providers)
        self.create_inference_session()

    def create_inference_session(self) -> None:
        """Open the augmented model without graph optimisation, so that no tensor is fused away."""
        settings = SessionSettings(providers=tuple(self.execution_providers), optimization="none")
        self.infer_session = open_session(Path(self.augmented_model_path), settings)

    def select_tensors_to_calibrate(self, model: onnx.ModelProto) -> tuple[set[str], dict[str, onnx.ValueInfoProto]]:
        """Return the names of the float inputs and outputs of nodes of the chosen types, without weights. Also return
        the model's value infos by name.
        """
        graph = model.graph
        infos = {value.name: value for value in [*graph.value_info, *graph.output, *graph.input]}
        weights = {tensor.name for tensor in graph.initializer}
        types = self.op_types_to_calibrate
        names = itertools.chain.from_iterable(
            [*node.input, *node.output] for node in graph.node if not types or node.op_type in types
        )
        return {
            name
            for name in names
            if name in infos and infos[name].type.tensor_type.elem_type in _FLOATS and name not in weights
        }, infos

    def get_augment_model(self) -> onnx.ModelProto:
        """Return the model as it is after `augment_graph`."""
        return self.model

    def augment_graph(self) -> Any:
        """Add the outputs that `collect_data` needs to `model`, and write it to `augmented_model_path`."""
        raise NotImplementedError(f"{type(self).__name__}.augment_graph")

    def collect_data(self, data_reader: Any) -> None:
        """Run the session over the reader's data. More calls add more data."""
        raise NotImplementedError(f"{type(self).__name__}.collect_data")

    def compute_data(self) -> Any:
        """Return the range of each tensor as onnxruntime's `TensorsData`, made from the pairs that `compute_range`
        returns.
        """
        if type(self).compute_range is CalibraterBase.compute_range:
            raise NotImplementedError(f"{type(self).__name__}.compute_data")
        return tensors_data(as_ranges(self.compute_range()), "MinMax")

    def compute_range(self) -> dict[str, tuple[Any, Any]]:
        """Return the range of each tensor as a pair. This is the form of 2021 and 2022."""
        return {name: (r.low, r.high) for name, r in as_ranges(self.compute_data()).items()}


CalibratorBase = CalibraterBase


class EdgeqCalibrater(CalibraterBase):
    """Calibrate with a built-in method. Collect data once, then derive ranges any number of times, with any method."""

    def __init__(
        self,
        model_path: ModelInput,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: Any = "MinMax",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model_path, op_types_to_calibrate, augmented_model_path, use_external_data_format=use_external_data_format
        )
        self.method = member("CalibrationMethod", method)
        # A misspelt option would silently change the ranges.
        for name in sorted(set(options or {}) - _OPTIONS - _NOT_NEEDED):
            LOG.warning("unknown option %r of the calibrator is ignored", name)
        self.options = CalibratorOptions.parse(options or {})
        self.symmetric, self.per_channel = bool(self.options.symmetric), self.options.per_channel
        self._prepared: PreparedModel = as_given(self.model_path, self._folder)
        self._statistics: Statistics | None = None

    def augment_graph(self) -> None:
        """Do nothing, because the unchanged model is observed."""

    def create_inference_session(self) -> None:
        """Do nothing, because `collect_data` opens sessions on the CPU."""

    def collect_data(self, data_reader: Any) -> None:
        """Observe more samples. This raises DataError if the reader has no samples."""
        more = statistics_of(self._prepared, data_reader, per_channel=self.per_channel)
        if self._statistics is None:
            self._statistics = more
        # otherwise these data have already been counted
        elif more.data_digest not in self._statistics.data_digest.split("+"):
            self._statistics = self._statistics.merge(more)

    def compute_data(self) -> Any:
        """Return the range of each tensor as onnxruntime's `TensorsData`. This raises CalibrationError if no data was
        collected.
        """
        from onnxruntime.quantization import TensorData, TensorsData

        spans = self._spans().items()
        data = {name: TensorData(lowest=low[()], highest=high[()]) for name, (low, high) in spans}
        return TensorsData(self.method, data)

    def compute_range(self) -> dict[str, tuple[Any, Any]]:
        """Return the range of each tensor as a pair of numbers, or as a pair of arrays if each channel has its own
        range. This raises CalibrationError if no data was collected.
        """
        return {
            name: (low.tolist(), high.tolist()) if not low.ndim else (low, high)
            for name, (low, high) in self._spans().items()
        }

    def _spans(self) -> dict[str, Span]:
        if self._statistics is None:
            raise CalibrationError("no data was collected", "Call collect_data first")
        spans = spans_of(self._statistics, self.method, self.options)
        # All float tensors were observed, and only here are the operator types applied, so they can still change.
        names, _ = self.select_tensors_to_calibrate(to_proto(self._prepared.model))
        return {name: span for name, span in spans.items() if name in names}


def create_calibrator(
    model: ModelInput,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | None = None,
    calibrate_method: Any = "MinMax",
    use_external_data_format: bool = False,
    providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> EdgeqCalibrater:
    """Return a calibrator that is ready to collect data.

    Args:
        calibrate_method: a CalibrationMethod or its name.
        augmented_model_path: the file that readers open to see the model's inputs. If it does not exist, edgeq copies
            the model to it.
        use_external_data_format, providers: accepted but not used.
        extra_options: the options of `CalibratorOptions`. averaging_constant and max_intermediate_outputs are accepted
            but not used, because neither the result nor the memory depends on how the samples are divided.
    """
    del providers
    calibrater = EdgeqCalibrater(
        model,
        op_types_to_calibrate,
        augmented_model_path or "augmented_model.onnx",
        use_external_data_format,
        calibrate_method,
        extra_options,
    )
    # Readers of the older examples open this file to learn the names of the inputs.
    if augmented_model_path is not None and not Path(augmented_model_path).exists():
        with output_file(Path(augmented_model_path)) as draft:
            save_model(read_model(calibrater.model_path), draft)
    return calibrater
