"""Define the interface of a backend, which turns a prepared model, ranges and a scheme into an artifact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import onnx_ir as ir
from edgeq_device.answers.head import Head
from edgeq_device.engines.catalog import engine_of_file
from numpy.typing import NDArray

from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import UsageError, closest
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage
from edgeq.measure.inference import Session
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.block_compute import DETAIL, BlockCompute
from edgeq.run.engines import EngineChoice
from edgeq.run.session import SessionSettings
from edgeq.run.toolkit import Toolkit
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.registry import BACKENDS, Registry


@dataclass(frozen=True)
class Artifact:
    """Describe an artifact that a backend built.

    Attributes:
        model: the file to deploy; external data is next to it.
        scheme: the scheme that was built. The backend may have added node exclusions or session options, each with a
            note.
        provider: ONNX Runtime execution provider that the artifact is for.
        session_options: session configuration entries that the artifact needs to be correct.
        provider_options: options of the execution provider.
        min_onnxruntime: the oldest onnxruntime that has every kernel that the model needs.
        notes: facts that the user should know, one sentence each.
        files: other files that ship with the model and are next to it, keyed by relative path.
        device: "cpu", "gpu" or "npu".
        requires: properties that a device must have; the runner uses them to choose a variant, see
            `edgeq_device.bundle.select`.
        simulation: a model that computes on a CPU what `model` computes on its target; set if `model` cannot run here.
        simulation_settings: session settings for `simulation`.
        proof_options: extra session options that make this machine's kernels compute what the target's kernels compute.
        coverage: the nodes that run on integers; set if a run on this machine cannot show which nodes these are.
        details: further data for reports: plain JSON values, or records.
        tables: calibration tables that must be next to the model on the machine that runs it.
        alternatives: other builds of the model, for devices of the target's kind that cannot run this artifact.
        engine: the engine that runs the model instead of the kernels of `provider`, and the precision of the float
            operators.
        head: how the outputs become answers; None if that is not known.
        title: name of the source model, for people; may be empty.
    """

    model: Path
    scheme: Scheme
    provider: str
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    min_onnxruntime: str = ""
    notes: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    device: str = "cpu"
    requires: Mapping[str, str] = field(default_factory=dict)
    simulation: Path | None = None
    simulation_settings: SessionSettings = field(default_factory=SessionSettings)
    proof_options: Mapping[str, str] = field(default_factory=dict)
    coverage: Coverage | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[Path, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    engine: EngineChoice | None = None
    head: Head | None = None
    title: str = ""

    def settings(self, *, threads: int = 0) -> SessionSettings:
        """Return the session settings that ship with this artifact."""
        session_settings = SessionSettings(
            providers=(self.provider,), config=self.session_options, intra_op_threads=threads
        )
        if self.engine is None:
            return session_settings
        return dataclasses.replace(session_settings, engine=self.engine.engine, precision=self.engine.precision)

    @property
    def in_simulator(self) -> bool:
        """Return whether the artifact's engine simulates its hardware on this machine, which is slow."""
        return self.simulation is None and self.plugin is not None and self.plugin.engine.simulated

    @property
    def plugin(self) -> EngineChoice | None:
        """Return `engine`, or None if the engine is built into onnxruntime."""
        return self.engine if self.engine is not None and self.engine.engine.module else None

    def in_engine(self, choice: EngineChoice) -> Artifact:
        """Return an artifact with the same model, but executed by `choice`.

        Raises:
            UsageError: the artifact is for another kind of hardware than the engine.
        """
        # An engine for another device, such as a microcontroller, may still run the artifacts that are built for it.
        if self.engine == choice:
            return self
        # A plug-in engine with a backend of its own gets files in a form for its hardware, so another engine cannot
        # take them over.
        bound = self.plugin is not None and self.plugin != choice and bool(self.plugin.engine.int8.backend)
        if bound or self.simulation is not None or self.device.upper() not in choice.engine.devices:
            runner = self.plugin.name if bound and self.plugin is not None else self.provider
            raise UsageError(f"{choice.name} cannot run models built for {runner}", "Leave ⟨engine⟩ out")
        return dataclasses.replace(self, engine=choice)

    @property
    def proof_model(self) -> Path:
        """Return the model that runs on this machine to show what the artifact computes."""
        return self.simulation or self.model

    def proof_settings(self, *, threads: int = 0) -> SessionSettings:
        """Return the session settings of `proof_model`."""
        if self.simulation is None:
            # The proof options come last: they only make this machine's kernels compute like the target's, and are
            # never shipped.
            shipped = self.settings(threads=threads)
            return dataclasses.replace(shipped, config={**shipped.config, **self.proof_options})
        return dataclasses.replace(self.simulation_settings, intra_op_threads=threads)


ONNX = ".onnx"
"""Suffix of the files of backends that have no format of their own."""
ESTIMATE = "estimate"
"""Key in an artifact's `details` for a record of the figures that the hardware's own tools estimate. No figure was
measured.
"""


@dataclass(frozen=True)
class Alternative:
    """Describe an artifact that can replace another one: its `name` and `title` for the bundle, its `rank` among the
    variants, and the `architecture` that it needs.
    """

    name: str
    title: str
    rank: int
    artifact: Artifact
    architecture: str = "any"


DeviceSimulator = Callable[[Target], AbstractContextManager[Callable[[Path, SessionSettings], Session]]]
"""Simulate the device of a target: open models as sessions that give the device's outputs."""


@dataclass(frozen=True)
class SerialLog:
    """Hold what a device without edgeq's runner printed about its check of a file.

    Attributes:
        file: SHA-256 of the file that the device checked.
        chip: the device's name.
        reason: why the check failed; "" if it passed.
        tensors: the tensors that the device compared, in order.
        microseconds: time of one run; None if the device printed none.
    """

    passed: bool
    file: str
    chip: str
    reason: str = ""
    tensors: tuple[str, ...] = ()
    microseconds: int | None = None


Status = Literal["ok", "absent", "failed", "not run"]


@dataclass(frozen=True)
class DoctorCheck:
    """Record one check of `edgeq doctor`. "absent" is not a failure, because not every machine has a GPU."""

    name: str
    status: Status
    detail: str


class Backend:
    """Build artifacts for one kind of hardware or runtime.

    A backend has a `name` and a `title`, and defines `check` and `build`. The defaults of all other members suit a
    backend whose artifacts run on onnxruntime's own kernels.

    Attributes:
        name: name of the backend in profiles and targets.
        title: short description of the hardware or runtime that it builds for.
        adopts_quantized: whether it accepts models that are already quantized (Q/DQ pairs) and keeps their scales and
            zero points.
        targeted: whether its artifacts depend not only on the scheme, but also on other properties of the target; see
            `configured`.
        simulated: whether `Artifact.proof_model` computes on any CPU what the artifact computes on its target.
        recoverable: whether its artifacts are Q/DQ models, which accuracy recoveries can edit.
        widens_weights: whether a node with 16-bit activations gets 16-bit weights too.
        runs_engines: whether plug-in engines can run its artifacts.
        modes: modes of a scheme (`edgeq.scheme`) that it builds and that searches may try.
        suffix: file name suffix that its targets' engine expects; "" for ONNX files.
    """

    name: str = ""
    title: str = ""
    suffix: str = ""
    adopts_quantized: bool = False
    targeted: bool = False
    simulated: bool = False
    recoverable: bool = True
    widens_weights: bool = False
    runs_engines: bool = True
    modes: tuple[str, ...] = ("static",)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that this backend cannot build, whatever the model is. edgeq calls this before any other
        work.

        Raises:
            UsageError: the backend cannot build the scheme; the message names the field that prevents it.
        """
        raise NotImplementedError

    def check_packages(self) -> None:
        """Refuse to build on a machine without the packages that every build needs. edgeq calls this before any other
        work.

        Raises:
            RuntimeUnavailableError: a package is not installed; the message shows the command that installs it.
        """

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the quantized model to `destination`, a path in an existing folder, and describe the artifact.

        Args:
            samples: calibration samples, for backends that use them to correct the shift that quantization causes. Pass
                them if there are any, because a build without samples gives a different model.

        Raises:
            CalibrationError: a range that the scheme needs is missing.
            ModelError: the model cannot be quantized this way; the message names the node and the rule.
        """
        raise NotImplementedError

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> Backend:
        """Return the backend for `target`.

        Args:
            observed: smallest and largest value of each tensor in calibration, not clipped.
            cut: share of each tensor's power that its range cuts off.
        """
        del target, observed, cut
        return self

    def fitting(self, reach: Mapping[str, NDArray[np.float64]]) -> Backend:
        """Return the backend with the data that `fit_seen` needs.

        Args:
            reach: one number for each output channel of a node, by node name. The number is the largest sum of two
                products that occurs on the samples if the weights use their full range, as a share of the largest
                16-bit number.

        Raises:
            UsageError: the backend cannot fit the ranges of weights to samples.
        """
        del reach
        raise UsageError(f"the {self.name} backend cannot build with fit_seen = True", "Use fit_pairs")

    def with_options(self, artifact: Artifact, scheme: Scheme, destination: Path) -> Artifact | None:
        """Return the artifact that `build` would give for `scheme`, without a full build.

        Args:
            artifact: an artifact whose scheme differs from `scheme` only in session options.

        Returns:
            The artifact, or None if a full build is needed.
        """
        del artifact, scheme, destination
        return None

    def convert(self, model: Path, destination: Path, options: Mapping[str, Any]) -> None:
        """Convert an ONNX model for an engine that cannot open ONNX files, and write the result to `destination`.

        The model is float or has Q/DQ pairs. The engine names this backend in its `[int8] backend`. A session of the
        converted file has the inputs and outputs of the model.

        Args:
            options: options of the engine.

        Raises:
            ModelError: the format cannot express the model; the message names the node.
        """
        del model, destination, options
        raise UsageError(f"the {self.name} backend cannot convert models", "Choose another engine")

    def write_file(self, model: Path, destination: Path) -> None:
        """Write a model with Q/DQ pairs in the format of its targets' files. Backends with a `suffix` define this.

        Raises:
            ModelError: the format cannot express the model, or the target's engine has no kernel for a node.
        """
        del model, destination
        raise UsageError(f"the {self.name} backend cannot convert models", "Choose another target")

    def refusals(self, model: ir.Model, source: Path) -> Mapping[str, str]:
        """Return the nodes of a prepared float model that `build` refuses in any scheme, each with the reason. The name
        "" stands for the whole model.

        Args:
            source: the model's file, for messages.
        """
        del model, source
        return {}

    def remarks(self, model: ir.Model, source: Path) -> tuple[str, ...]:
        """Return sentences about a prepared float model on the hardware, such as nodes that the maker's compiler leaves
        on the CPU.

        Args:
            source: the model's file, for messages.
        """
        del model, source
        return ()

    def estimated(self, artifact: Artifact) -> Artifact:
        """Return `artifact` with an estimate by the hardware's own tools in its notes and in its details (key
        `ESTIMATE`).
        """
        return artifact

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with additional files that it needs only as part of a bundle.

        Args:
            folder: private folder for the files; it does not exist yet.
            count: number of `samples` that the files may contain.
        """
        del samples, folder, count
        return artifact

    def finished(
        self,
        artifact: Artifact,
        prepared: PreparedModel,
        samples: Samples,
        folder: Path,
        *,
        progress: Progress = SILENT,
    ) -> Artifact:
        """Return `artifact` in its final form. edgeq calls this for the build that it chose. A backend with its own
        compiler compiles the model here.

        Args:
            prepared: the model that was quantized.
            samples: samples on which the compiled form is compared with the uncompiled file.
            folder: private, empty folder for the compiled form.

        Raises:
            EdgeqError: the model cannot be compiled, or the compiled form gives other answers.
        """
        del prepared, samples, folder, progress
        return artifact

    def edited(self, artifact: Artifact) -> Artifact:
        """Return an artifact whose model was edited, with its simulation made from the model as it is now. edgeq calls
        this if a recovery edited the Q/DQ model.
        """
        return artifact

    def owns(self, place: Path) -> bool:
        """Return whether this backend wrote the file `place`. Such a file accompanies a model or takes its place."""
        del place
        return False

    def read_log(self, text: str) -> SerialLog | None:
        """Return the check that a device without edgeq's runner printed; None if the text has none."""
        del text
        return None

    def simulator(self) -> DeviceSimulator | None:
        """Return the simulator of a target's device, or None if there is no simulator."""
        return None

    def toolkit(self) -> Toolkit | None:
        """Return the vendor's toolkit that the backend needs, or None if it needs none."""
        return None

    def doctor(self, machine: Machine) -> Iterator[DoctorCheck]:
        """Check the things that the backend needs on a machine, and yield one result for each."""
        del machine
        yield from ()


@dataclass(frozen=True)
class TargetBackend(Backend):
    """Build artifacts that depend on the target itself.

    Attributes:
        target: the target to build for; None before `configured`.
    """

    targeted = True
    target: Target | None = None

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> Self:
        """Return the backend for `target`. See `Backend.configured`."""
        del observed, cut
        return dataclasses.replace(self, target=target)


class _Adapted(Backend):
    """Wrap an object that has only the documented members of a backend. Every other member of the wrapper has its
    default.
    """

    def __init__(self, plugin: Any) -> None:
        # The documented interface is a list of members, not a base class, so a plug-in needs no import of edgeq.
        members = (name for name in dir(Backend) if not name.startswith("_") and hasattr(plugin, name))
        self.__dict__.update({name: getattr(plugin, name) for name in members})
        # A plug-in's object need not set these two flags, so derive missing flags from the members that it has.
        self.targeted = getattr(plugin, "targeted", hasattr(plugin, "configured"))
        self.recoverable = getattr(plugin, "recoverable", not self.targeted)


def as_backend(plugin: Any) -> Backend:
    """Turn a plug-in's class or object into a backend."""
    # An entry point may name the class or an object of it.
    plugin = plugin() if isinstance(plugin, type) else plugin
    return plugin if isinstance(plugin, Backend) else _Adapted(plugin)


def refuse_wide(scheme: Scheme, hardware: str) -> None:
    """Refuse 16-bit activations for hardware that has no kernels for them.

    Args:
        hardware: the hardware, for the message.

    Raises:
        UsageError: the scheme has 16-bit activations.
    """
    if scheme.wide:
        raise UsageError(f"{hardware} has no kernels for 16-bit activations", "Leave ⟨wide⟩ out")


FREE_SCALES: Mapping[str, Any] = {"scale": "any", "bias_bits": 32, "fused": ()}
"""Fields of a scheme that describe hardware which rescales by shifts, with the values for all other hardware."""


def require_fields(scheme: Scheme, required: Mapping[str, Any], backend: str, fix: str) -> None:
    """Refuse a scheme with a field value that `backend` does not support.

    Args:
        required: the only value that each field may have, by name of the field.

    Raises:
        UsageError: a field has another value; the message names the first such field.
    """
    for name, value in required.items():
        if getattr(scheme, name) != value:
            raise UsageError(f"the {backend} backend cannot build with {name} = {getattr(scheme, name)}", fix)


def with_compute(artifact: Artifact, compute: BlockCompute) -> Artifact:
    """Return an artifact whose scheme, details and notes state in which types its matrix products compute."""
    old_compute = artifact.details.get(DETAIL)
    # The artifact may have been described before, for another choice of types. Its old sentence would now be wrong.
    notes = [note for note in artifact.notes if old_compute is None or note != old_compute.note]
    return dataclasses.replace(
        artifact,
        scheme=artifact.scheme.replace(float_compute=compute.float_compute),
        details={**artifact.details, DETAIL: compute},
        notes=(*notes, compute.note),
    )


def check_names(prepared: PreparedModel, names: Sequence[str]) -> None:
    """Refuse names that match no node of the prepared model.

    Raises:
        UsageError: a name is unknown; suggests the nearest names.
    """
    node_names = {str(node.name) for node in prepared.model.graph}
    unknown = next((name for name in names if name not in node_names), None)
    if unknown is not None:
        hint = closest(unknown, node_names, "List the node names with `edgeq inspect -v`", most=3)
        raise UsageError(f"{prepared.source}: no node is named {unknown!r}", hint)


def _is_backend(backend: Backend) -> bool:
    # The two members without a default that works. A class that leaves one out would fail only in the middle of a job.
    inherited = (Backend.check, Backend.build)
    defined = (getattr(method, "__func__", method) not in inherited for method in (backend.check, backend.build))
    return bool(backend.name and backend.title) and all(defined)


def toolkits() -> dict[str, Toolkit]:
    """Return the toolkits of all backends, keyed by name."""
    candidates = (backend.toolkit() for _, backend in REGISTRY.items())
    return {toolkit.name: toolkit for toolkit in candidates if toolkit is not None}


REGISTRY: Registry[Backend] = Registry(BACKENDS, _is_backend, "edgeq.backends.base.Backend", make=as_backend)


def backend_named(name: str) -> Backend:
    """Return edgeq's own backend or a plug-in's backend by its name in profiles and targets.

    Raises:
        HardwareError: no backend has that name.
        UsageError: the plug-in that registers it is broken.
    """
    return REGISTRY.load(name)


def backend_for(
    target: Target, observed: Mapping[str, Range] | None = None, cut: Mapping[str, float] | None = None
) -> Backend:
    """Return the backend of `target`. If the backend's artifacts depend on more than the scheme, the backend is
    configured for `target`.

    Args:
        observed: smallest and largest value of each tensor in calibration, not clipped.
        cut: share of each tensor's power that its range cuts off (`edgeq.calibration.ranges`).
    """
    # A plug-in's `configured` may return an object that has only the documented members, so it is wrapped again.
    return as_backend(backend_named(target.backend).configured(target, observed or {}, cut or {}))


def file_suffix(target: Target) -> str:
    """Return the suffix of the model files that `target` runs."""
    return REGISTRY.load(target.backend).suffix or ONNX


def check_suffix(output: Path, target: Target | None, engine: EngineChoice | None = None) -> str:
    """Return the suffix of the file for a target. If `engine` is given, the file is for that engine on the target.

    Raises:
        UsageError: the name of the output has the suffix of another format.
    """
    target_suffix = REGISTRY.load(target.backend).suffix if target is not None else ""
    name = target.name if target is not None else "onnxruntime"
    runner, runs = (name, target_suffix) if target_suffix or engine is None else (engine.name, engine.engine.suffix)
    # A suffix that belongs to an engine states the format that the user expects in the file.
    named = engine_of_file(output.name)
    if (target_suffix and output.suffix != target_suffix) or (named is not None and named.suffix != runs):
        fix = f"Name the output {output.stem}{runs or ONNX}"
        raise UsageError(f"{runner} does not run {output.suffix or 'such'} files", fix)
    return ONNX if named is None else named.suffix


class _Simulators(Mapping[str, DeviceSimulator]):
    """Hold the simulators of all backends, keyed by the name in a profile's `[emulate] simulator`."""

    def __getitem__(self, name: str) -> DeviceSimulator:
        simulator = backend_named(name).simulator() if name in BACKENDS.names() else None
        # A mapping reports a missing key by KeyError, so that `get` and `in` work.
        if simulator is None:
            raise KeyError(name)
        return simulator

    def __iter__(self) -> Iterator[str]:
        return (name for name, backend in REGISTRY.items() if backend.simulator() is not None)

    def __len__(self) -> int:
        return len(tuple(iter(self)))


SIMULATORS: Mapping[str, DeviceSimulator] = _Simulators()
