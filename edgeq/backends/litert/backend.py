"""Build int8 .tflite files for LiteRT and TFLite Micro.

The artifact is a Q/DQ model with the ranges that the .tflite kernels need. To open it in an engine that runs .tflite
files, edgeq first converts it with `LitertBackend.convert`. The proof therefore runs the
converted .tflite file, not the Q/DQ model, on the kernels of the target's engine.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import (
    FREE_SCALES,
    Artifact,
    DeviceSimulator,
    DoctorCheck,
    TargetBackend,
    check_names,
    refuse_wide,
    require_fields,
)
from edgeq.backends.litert import ethosu
from edgeq.backends.litert.companions import with_estimate, with_sources
from edgeq.backends.litert.convert import float_operators, lower, refusals
from edgeq.backends.litert.dialect import results, tied
from edgeq.backends.litert.gelu import parts_of_gelu
from edgeq.backends.litert.interface import with_model_interface, with_signature
from edgeq.backends.litert.network import TfliteNetwork
from edgeq.backends.litert.npus import find_compiler
from edgeq.backends.litert.rules import check, check_kernels
from edgeq.backends.litert.tasks import with_tasks_file
from edgeq.backends.litert.wide import write_widened
from edgeq.backends.litert.writer import schema, write
from edgeq.calibration.groups import share_ranges
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import EngineError, RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.inference import Session
from edgeq.measure.node_runs import NodeRun
from edgeq.model.graph import is_op, name_of
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs
from edgeq.model.pools import write_whole_pools
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.norms import norms_as_convolutions
from edgeq.quantization.params import is_spread_thin
from edgeq.quantization.qdq import write_qdq
from edgeq.run.engines import Engine, EngineChoice, load_engines
from edgeq.run.session import SessionSettings, open_simulator
from edgeq.scheme import ALL_NODES, Scheme

_SUFFIX = ".tflite"
_DEFAULT_ENGINE = "litert"
# The option of `convert` and its value for deployed files.
_INTERFACE, _INTEGERS = "interface", "integers"
# The specification of .tflite files fixes these: asymmetric int8 activations, symmetric int8 weights.
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "int8",
    "activation_symmetric": False,
    "weight_type": "int8",
    "weight_symmetric": True,
    "rest": "float32",
    "fit_pairs": False,
    **FREE_SCALES,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, int8 activations, symmetric int8 weights"


@dataclass(frozen=True)
class LitertBackend(TargetBackend):
    """Build int8 .tflite files.

    Attributes:
        target: the target to build for, whose `[device] engine` runs the file for the proof; None means LiteRT with
            XNNPACK.
    """

    name = "litert"
    title = "LiteRT and TFLite Micro (.tflite)"
    suffix = _SUFFIX
    simulated = True
    runs_engines = False

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that the .tflite kernels cannot run. See `Backend.check`."""
        require_fields(scheme, _FIELDS, self.name, _NEEDS)
        compiler = find_compiler(self._device)
        if compiler is None:
            return
        # 16 bits may be possible on some of these NPUs, but nothing here could prove it.
        refuse_wide(scheme, compiler.title)
        limit = compiler.rejected_cases.get("per-channel")
        if scheme.per_channel and limit is not None:
            problem = (
                f"{compiler.title} takes no weights with a scale for each channel: {limit.reason} ({limit.source})"
            )
            raise UsageError(problem, "Add ⟨per_channel=False⟩")

    def check_packages(self) -> None:
        """Refuse to build without the schema of .tflite files. See `Backend.check_packages`."""
        schema()

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write to `destination` the Q/DQ model from which the .tflite file is made. See `Backend.build`."""
        self.check(scheme)
        check_names(prepared, (*scheme.exclude, *(name for name in scheme.wide if name != ALL_NODES)))
        place = Path(tempfile.mkdtemp(prefix="litert-", dir=prepared.path.parent))
        prepared, ranges = norms_as_convolutions(prepared, ranges, place / "rewritten.onnx")
        # The prediction names the user's nodes, so it comes before the rewrites that add others.
        float_reasons = _float_nodes(prepared, ranges, scheme)
        model = prepared.model.clone()
        # A pool over the whole image becomes a mean, whose kernels accept another range for the output than for the
        # input.
        write_whole_pools(model)
        types = {op_type for op_type, rule in int8_rules(self.name).items() if rule.int8}
        quantized_types = types if scheme.op_types is None else types.intersection(scheme.op_types)
        nodes = {str(node.name) for node in model.graph if node.op_type in quantized_types} - float_reasons.keys()
        # The kernels of tied operators do not requantize, so their inputs and outputs need one range from the start. A
        # join that stays in float ties nothing: the range of boxes in pixels would leave no step to scores.
        float_nodes = {str(node.name) for node in model.graph} - nodes
        shared_ranges = share_ranges(model, ranges, tied(), float_nodes)
        source = model.clone()
        write_qdq(model, shared_ranges, scheme, nodes, source=prepared.source, results=results())
        engine = self.engine
        # The Q/DQ model is lowered at once, only to refuse here what the conversion would refuse later.
        widened = write_widened(model, source, scheme, destination, engine.name, prepared.source)
        network = widened.network
        # LiteRT and TFLite Micro have different kernels for one format.
        check_kernels(network, engine.name)
        compiler = find_compiler(self._device)
        limits = compiler.notes(network.operators) if compiler is not None else ()
        return Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            notes=(f"the answers come from {engine.title} on this machine", *widened.notes, *limits),
            details={"wide_share": widened.share} if scheme.wide else {},
            coverage=_coverage(prepared.model, network, float_reasons),
            engine=EngineChoice(engine),
        )

    @property
    def _device(self) -> Mapping[str, Any]:
        return self.target.device if self.target is not None else {}

    @property
    def engine(self) -> Engine:
        """Return the engine of the target, configured for files with integer inputs and outputs."""
        name = self._device.get("engine", _DEFAULT_ENGINE)
        engine = load_engines().get(name)
        if engine is None or engine.int8.backend != self.name:
            raise UsageError(f"{name} cannot run {_SUFFIX} files", "Correct [device] engine of the target's file")
        return dataclasses.replace(engine, options={**engine.options, _INTERFACE: _INTEGERS})

    def estimated(self, artifact: Artifact) -> Artifact:
        """If the target is a microcontroller, return `artifact` with a forecast of its memory; with an Ethos-U, this is
        vela's estimate. See `Backend.estimated`.
        """
        with scratch_folder("edgeq-estimate-") as folder:
            return with_estimate(artifact, self.engine, self.target, Path(folder))

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with sources if the target is a microcontroller, with vela's compiled file if the target
        has an Ethos-U, and with a file for MediaPipe Tasks if it has a CPU. See `Backend.with_companions`.
        """
        engine = self.engine
        # An application on a CPU loads the .tflite file itself and needs no sources. A file for MediaPipe Tasks has
        # float operators, which do not run on an NPU.
        if "CPU" in engine.devices:
            if find_compiler(self._device) is not None:
                return artifact
            return with_tasks_file(artifact, samples, folder)
        return with_sources(artifact, engine, self.target, samples, folder, count=count)

    def simulator(self) -> DeviceSimulator:
        """Return a simulator that runs models in the kernels of a target's engine."""
        return _simulated

    def doctor(self, machine: Machine) -> Iterator[DoctorCheck]:
        """Check whether vela is installed. See `Backend.doctor`."""
        del machine
        try:
            yield DoctorCheck("vela", "ok", f"{ethosu.version()}, which compiles for Ethos-U")
        except RuntimeUnavailableError as error:
            yield DoctorCheck("vela", "absent", error.text)
        except EngineError as error:
            yield DoctorCheck("vela", "failed", error.text)

    def write_file(self, model: Path, destination: Path) -> None:
        """Write the .tflite file of a model with Q/DQ pairs. See `Backend.write_file`."""
        engine = self.engine
        # Another target's model may have operators for which this target's engine has no kernel.
        check_kernels(lower(read_model(model), model), engine.name)
        self.convert(model, destination, engine.options)

    def refusals(self, model: ir.Model, source: Path) -> Mapping[str, str]:
        """Return the nodes that a .tflite file cannot express. See `Backend.refusals`."""
        return refusals(model, source, self.engine.name)

    def remarks(self, model: ir.Model, source: Path) -> tuple[str, ...]:
        """Return the operators that an NPU's compiler is known not to take. See `Backend.remarks`."""
        compiler = find_compiler(self._device)
        # The model is in float here, so only the operators and their sizes count.
        return compiler.notes(float_operators(model, source), floats=False) if compiler is not None else ()

    def convert(self, model: Path, destination: Path, options: Mapping[str, Any]) -> None:
        """Write a model as a .tflite file. See `Backend.convert`.

        Args:
            options: `interface` selects the inputs and outputs of the file. With "integers", which is the form for
                applications, they are int8 and their axes have the order that the operators use. Otherwise, the file
                has the inputs and outputs of the model.
        """
        source = read_model(model)
        network = with_signature(lower(source, model), source)
        model_interface = options.get(_INTERFACE) != _INTEGERS
        network = with_model_interface(network) if model_interface else network
        # The runtimes accept wrong scales silently, so the file is checked and not the run.
        check(network)
        destination.write_bytes(write(network, nodes=model_interface))


def _simulated(target: Target) -> AbstractContextManager[Callable[[Path, SessionSettings], Session]]:
    return open_simulator(LitertBackend(target).engine)


def _float_nodes(prepared: PreparedModel, ranges: Mapping[str, Range], scheme: Scheme) -> dict[str, str]:
    """Return the nodes that stay in float, each with the reason."""
    predicted = predict_int8(prepared.graph, int8_rules("litert"), scheme, hazards=prepared.hazards)
    reasons = {node.name: node.reason for node in predicted if node.verdict == "float"}
    reasons |= dict.fromkeys(parts_of_gelu(prepared.model), "it is part of a Gelu, which computes in float")
    for node in prepared.model.graph:
        span = ranges.get(name_of(node.outputs[0]))
        # The kernels of Softmax always use the scale 1/256.
        if is_op(node, "Softmax") and span is not None and is_spread_thin(span):
            reasons[str(node.name)] = "it is over so many elements that few steps of 1/256 would be left for each"
    return reasons


def _coverage(source: ir.Model, network: TfliteNetwork, float_reasons: Mapping[str, str]) -> Coverage:
    """Return which operators of the file run on integers."""
    floats = {
        operator.node
        for operator in network.operators
        if operator.kind != "DEQUANTIZE"
        and any(tensor is not None and tensor.type == "float32" for tensor in operator.inputs)
    }
    floats |= float_reasons.keys()
    # A QUANTIZE reads floats without computing on them.
    floats -= {operator.node for operator in network.operators if operator.kind == "QUANTIZE"}
    macs = node_macs(source)
    runs = [
        NodeRun(str(n.name), str(n.name), n.op_type, "float" if n.name in floats else "int8", macs.get(n.name or "", 0))
        for n in source.graph
    ]
    return coverage_of(
        runs,
        lambda run: float_reasons.get(run.name, "its inputs or outputs are not quantized"),
        basis="modelled",
        how="the operators of the .tflite file",
    )
