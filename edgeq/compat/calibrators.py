"""Calibrators of ONNX Runtime's documentation, 2021 to 2026: create_calibrator, collect_data, compute_data.

The built-in ones observe the model as it is, in edgeq's one pass; nothing is augmented. A user's own class
derives from `CalibraterBase`, augments the graph itself, and is given a session of what it wrote.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnx

from edgeq.calibrate.statistics import Statistics
from edgeq.compat.calibration import CalibratorOptions, Span, as_ranges, spans_of, statistics_of
from edgeq.compat.source import LOG, ModelInput, as_file, as_given, listed, member
from edgeq.errors import CalibrationError
from edgeq.model.edit import to_proto
from edgeq.model.load import load_model, read_model, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.quantize.quantizer import tensors_data
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.outputs import output_file

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
_OPTIONS = frozenset(field.name for field in fields(CalibratorOptions))
_NOT_NEEDED = frozenset({"averaging_constant", "max_intermediate_outputs", "scenario"})


class CalibraterBase:
    """What a calibrator has to have. Override `augment_graph`, `collect_data`, and `compute_data` or `compute_range`.

    Attributes:
        model: the model with shapes, to be augmented in place or copied.
        augmented_model_path: where `augment_graph` writes what `create_inference_session` opens.
        infer_session: the session, once there is one.
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
        self._folder = Path(tempfile.mkdtemp(prefix="edgeq-calibrater-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
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
        """Open the augmented model, with nothing fused away."""
        settings = SessionSettings(providers=tuple(self.execution_providers), optimization="none")
        self.infer_session = open_session(Path(self.augmented_model_path), settings)

    def select_tensors_to_calibrate(self, model: onnx.ModelProto) -> tuple[set[str], dict[str, onnx.ValueInfoProto]]:
        """Float inputs and outputs of nodes of the chosen types that are no weights; and what is known of values."""
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
        """The model as `augment_graph` left it."""
        return self.model

    def augment_graph(self) -> Any:
        """Make `model` give what `collect_data` needs, and write it to `augmented_model_path`."""
        raise NotImplementedError(f"{type(self).__name__}.augment_graph")

    def collect_data(self, data_reader: Any) -> None:
        """Run the session over the reader's data. May be called again with more."""
        raise NotImplementedError(f"{type(self).__name__}.collect_data")

    def compute_data(self) -> Any:
        """Ranges by tensor, as onnxruntime's `TensorsData`. Here: from what `compute_range` gives, its older form."""
        if type(self).compute_range is CalibraterBase.compute_range:
            raise NotImplementedError(f"{type(self).__name__}.compute_data")
        return tensors_data(as_ranges(self.compute_range()), "MinMax")

    def compute_range(self) -> dict[str, tuple[Any, Any]]:
        """Ranges by tensor, as pairs: the form of 2021 and 2022."""
        return {name: (r.low, r.high) for name, r in as_ranges(self.compute_data()).items()}


CalibratorBase = CalibraterBase


class EdgeqCalibrater(CalibraterBase):
    """A built-in calibrator: collects once, then derives ranges by any method, any number of times."""

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
        for name in sorted(set(options or {}) - _OPTIONS - _NOT_NEEDED):
            LOG.warning("unknown option %r of the calibrator is ignored", name)
        self.options = CalibratorOptions.read(options or {})
        self.symmetric, self.per_channel = bool(self.options.symmetric), self.options.per_channel
        self._prepared: PreparedModel = as_given(self.model_path, self._folder)
        self._statistics: Statistics | None = None

    def augment_graph(self) -> None:
        """Nothing to do: the model is observed as it is."""

    def create_inference_session(self) -> None:
        """Nothing to do: sessions are opened while collecting, on the CPU."""

    def collect_data(self, data_reader: Any) -> None:
        """Observe more samples. Raises DataError where the reader has none."""
        more = statistics_of(self._prepared, data_reader, per_channel=self.per_channel)
        if self._statistics is None:
            self._statistics = more
        elif more.data_digest not in self._statistics.data_digest.split("+"):  # else it is all known already
            self._statistics = self._statistics.merge(more)

    def compute_data(self) -> Any:
        """Ranges by tensor, as onnxruntime's `TensorsData`. Raises CalibrationError where nothing was collected."""
        from onnxruntime.quantization import TensorData, TensorsData

        spans = self._spans().items()
        data = {name: TensorData(lowest=low[()], highest=high[()]) for name, (low, high) in spans}
        return TensorsData(self.method, data)

    def compute_range(self) -> dict[str, tuple[Any, Any]]:
        """Ranges by tensor, as pairs of numbers, or of arrays where each channel has its own. Raises CalibrationError
        where nothing was collected."""
        return {
            name: (low.tolist(), high.tolist()) if not low.ndim else (low, high)
            for name, (low, high) in self._spans().items()
        }

    def _spans(self) -> dict[str, Span]:
        if self._statistics is None:
            raise CalibrationError("nothing was collected", "Call collect_data first")
        found = spans_of(self._statistics, self.method, self.options)
        wanted, _ = self.select_tensors_to_calibrate(to_proto(self._prepared.model))
        return {name: span for name, span in found.items() if name in wanted}


def create_calibrator(
    model: ModelInput,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | None = None,
    calibrate_method: Any = "MinMax",
    use_external_data_format: bool = False,
    providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> EdgeqCalibrater:
    """A calibrator, ready to collect.

    Args:
        calibrate_method: CalibrationMethod or its name.
        augmented_model_path: where readers open the model to see its inputs. It is copied there, if nothing is.
        use_external_data_format, providers: accepted.
        extra_options: those of `CalibratorOptions`. averaging_constant and max_intermediate_outputs are accepted: the
            result does not depend on how data is split over calls, nor memory on the samples.
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
    if augmented_model_path is not None and not Path(augmented_model_path).exists():
        with output_file(Path(augmented_model_path)) as draft:
            save_model(read_model(calibrater.model_path), draft)
    return calibrater
