"""Define the backend interface: a function from a prepared model, ranges and a scheme to an artifact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import UsageError, closest
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.measure.agreement import Session
from edgeq.measure.coverage import Coverage
from edgeq.model.prepare import PreparedModel
from edgeq.quantize.block_weights import DETAIL, BlockCompute
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
        scheme: what was actually built (a backend may add node exclusions or session options, each with a note).
        provider: ONNX Runtime execution provider that the artifact is for.
        session_options: session configuration entries that the artifact needs to be correct.
        provider_options: options of the execution provider.
        min_onnxruntime: the oldest onnxruntime that has every kernel.
        notes: what a reader should know, one sentence each.
        files: other files that travel with the model, by relative path; they are next to it.
        device: "cpu", "gpu" or "npu".
        requires: what a device must have; the runner uses it to choose a variant, see `edgeq_device.select`.
        simulation: a model that computes on a CPU what `model` computes on its target; set if `model` cannot run here.
        simulation_settings: session settings for `simulation`.
        proof_options: extra session options with which this machine's kernels compute what the target's kernels do.
        coverage: what runs on integers; set if a run on this machine cannot show it.
        details: more for reports: plain JSON values, or records.
        tables: calibration tables that must be next to the model where it runs.
        alternatives: the same model for devices of the target's kind that cannot run this artifact.
        engine: the engine that runs the model in place of the kernels of `provider`, with the precision of the float
            operators.
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

    def settings(self, *, threads: int = 0) -> SessionSettings:
        """Return the session settings that ship with this artifact."""
        plain = SessionSettings(providers=(self.provider,), config=self.session_options, intra_op_threads=threads)
        if self.engine is None:
            return plain
        return dataclasses.replace(plain, engine=self.engine.engine, precision=self.engine.precision)

    @property
    def in_simulator(self) -> bool:
        """Return whether the engine of the artifact simulates its hardware on this machine, which is slow."""
        return self.simulation is None and self.plugin is not None and self.plugin.engine.simulated

    @property
    def plugin(self) -> EngineChoice | None:
        """Return `engine`, or None if the engine is built into onnxruntime."""
        return self.engine if self.engine is not None and self.engine.engine.module else None

    def in_engine(self, choice: EngineChoice) -> Artifact:
        """Return the same model, executed by `choice`.

        Raises:
            UsageError: the artifact is for another kind of hardware than the engine.
        """
        bound = self.plugin is not None and self.plugin != choice and bool(self.plugin.engine.int8.backend)
        if bound or self.simulation is not None or self.device.upper() not in choice.engine.devices:
            runner = self.plugin.name if bound and self.plugin is not None else self.provider
            raise UsageError(f"{choice.name} cannot run models built for {runner}", "Leave --engine out")
        return dataclasses.replace(self, engine=choice)

    @property
    def proof_model(self) -> Path:
        """Return the model that runs on this machine to show what the artifact computes."""
        return self.simulation or self.model

    def proof_settings(self, *, threads: int = 0) -> SessionSettings:
        """Return the session settings of `proof_model`."""
        if self.simulation is None:
            shipped = self.settings(threads=threads)
            return dataclasses.replace(shipped, config={**shipped.config, **self.proof_options})
        return dataclasses.replace(self.simulation_settings, intra_op_threads=threads)


ESTIMATE = "estimate"
"""Key in an artifact's `details` for the estimate of the hardware's own tools, a record. No part of it was measured."""


@dataclass(frozen=True)
class Alternative:
    """Describe an artifact that can replace another: `name` and `title` for the bundle, `rank` among its variants,
    and the `architecture` that it needs.
    """

    name: str
    title: str
    rank: int
    artifact: Artifact
    architecture: str = "any"


DeviceSimulator = Callable[[Target], AbstractContextManager[Callable[[Path, SessionSettings], Session]]]
"""Simulates the device of a target: opens models as sessions that give the outputs of the device."""

Status = Literal["ok", "absent", "failed", "not run"]


@dataclass(frozen=True)
class Check:
    """Record one check of `edgeq doctor`. "absent" is not a failure: not every machine has a GPU."""

    name: str
    status: Status
    detail: str


class Backend:
    """Build artifacts for one kind of hardware or runtime.

    A backend has a `name` and a `title`, and defines `check` and `build`. All other members have defaults for a backend
    whose artifacts run on onnxruntime's own kernels.

    Attributes:
        name: name of the backend in profiles and targets.
        title: what it builds for, in a few words.
        adopts_quantized: whether it accepts models that are already quantized (Q/DQ pairs), with their parameters.
        targeted: whether its artifacts depend on more of the target than the scheme: see `configured`.
        simulated: whether `Artifact.proof_model` computes on any CPU what the artifact computes on its target.
        recoverable: whether its file is a Q/DQ model, which accuracy recoveries can edit.
        runs_engines: whether plug-in engines can run its artifacts.
        modes: modes of a scheme (`edgeq.scheme`) that it builds and that searches may try.
        suffix: file name suffix of the files that its targets' engine runs; "" for ONNX files.
    """

    name: str = ""
    title: str = ""
    suffix: str = ""
    adopts_quantized: bool = False
    targeted: bool = False
    simulated: bool = False
    recoverable: bool = True
    runs_engines: bool = True
    modes: tuple[str, ...] = ("static",)

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that cannot be built for any model, before any work is done.

        Raises:
            UsageError: names the field.
        """
        raise NotImplementedError

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write the quantized model to `destination` (a path in an existing folder) and describe it.

        Args:
            samples: calibration samples, for backends that correct the shift of quantization. Pass them if there are
                any, because a build without them gives another model.

        Raises:
            CalibrationError: a range that the scheme needs is missing.
            ModelError: the model cannot be quantized this way; names the node and the rule.
        """
        raise NotImplementedError

    def configured(self, target: Target, observed: Mapping[str, Range], cut: Mapping[str, float]) -> Backend:
        """Return the backend for `target`.

        Args:
            observed: extrema that calibration saw, by tensor, unclipped.
            cut: share of each tensor's power that its range cuts off.
        """
        del target, observed, cut
        return self

    def fitting(self, reach: Mapping[str, NDArray[np.float64]]) -> Backend:
        """Return the backend with data that `fit_seen` needs.

        Args:
            reach: by node name, the largest sum of two products on the samples for each output channel, as a share of
                the 16-bit range, with weights of the full range.

        Raises:
            UsageError: the backend cannot fit the ranges of weights to samples.
        """
        del reach
        raise UsageError(f"the {self.name} backend cannot build with fit_seen = True", "Use fit_pairs")

    def with_options(self, artifact: Artifact, scheme: Scheme, destination: Path) -> Artifact | None:
        """Return the artifact that `build` would give for `scheme`, made from `artifact`, whose scheme differs only in
        session options. Return None if it has to be built.
        """
        del artifact, scheme, destination
        return None

    def convert(self, model: Path, destination: Path, options: Mapping[str, Any]) -> None:
        """Write an ONNX model, float or with Q/DQ pairs, to `destination` in the format of an engine that opens no ONNX
        files.

        The engine names this backend in its `[int8] backend`. A session of the file has the inputs and outputs of the
        model.

        Args:
            options: options of the engine.

        Raises:
            ModelError: the format cannot express the model; names the node.
        """
        del model, destination, options
        raise UsageError(f"the {self.name} backend cannot convert models", "Choose another engine")

    def estimated(self, artifact: Artifact) -> Artifact:
        """Return `artifact` with the estimate of the hardware's own tools in its notes and in its details, under
        `ESTIMATE`.
        """
        return artifact

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with the files that accompany it only in a bundle.

        Args:
            folder: where to write them; private, and does not exist yet.
            count: how many of `samples` they may contain.
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
        """Return `artifact` as it ships, after edgeq chose it among the builds. A backend with its own compiler
        compiles it.

        Args:
            prepared: the model that was quantized.
            samples: samples on which the compiled form is compared with the file.
            folder: where to write the compiled form; private and empty.

        Raises:
            EdgeqError: the model cannot be compiled, or the compiled form gives other answers.
        """
        del prepared, samples, folder, progress
        return artifact

    def owns(self, place: Path) -> bool:
        """Return whether `place` is a file that this backend wrote, next to a model or instead of it."""
        del place
        return False

    def simulator(self) -> DeviceSimulator | None:
        """Return the simulator of a target's device, or None if there is no simulator."""
        return None

    def toolkit(self) -> Toolkit | None:
        """Return the vendor's toolkit that the backend needs, or None if it needs none."""
        return None

    def doctor(self, machine: Machine) -> Iterator[Check]:
        """Yield a check for each thing that the backend needs on a machine."""
        del machine
        yield from ()


class _Adapted(Backend):
    """Wrap an object that has only the documented members of a backend. All other members have their defaults."""

    def __init__(self, plain: Any) -> None:
        members = (name for name in dir(Backend) if not name.startswith("_") and hasattr(plain, name))
        self.__dict__.update({name: getattr(plain, name) for name in members})
        # Only the members of such an object show what it can do.
        self.targeted = getattr(plain, "targeted", hasattr(plain, "configured"))
        self.recoverable = getattr(plain, "recoverable", not self.targeted)


def as_backend(found: Any) -> Backend:
    """Return a plug-in's class or object as a backend."""
    found = found() if isinstance(found, type) else found
    return found if isinstance(found, Backend) else _Adapted(found)


def refuse_wide(scheme: Scheme, where: str) -> None:
    """Refuse 16-bit activations for hardware that has no kernels for them.

    Raises:
        UsageError: `where` names the hardware.
    """
    if scheme.wide:
        raise UsageError(f"{where} has no kernels for 16-bit activations", "Leave --wide out")


def require_fields(scheme: Scheme, needed: Mapping[str, Any], backend: str, fix: str) -> None:
    """Refuse a scheme with a field that `backend` cannot build with.

    Args:
        needed: the only value that each field may have, by name of the field.

    Raises:
        UsageError: names the first field with another value.
    """
    for name, value in needed.items():
        if getattr(scheme, name) != value:
            raise UsageError(f"the {backend} backend cannot build with {name} = {getattr(scheme, name)}", fix)


def described(artifact: Artifact, compute: BlockCompute) -> Artifact:
    """Return an artifact whose scheme, details and notes record what its matrix products compute in."""
    before = artifact.details.get(DETAIL)
    kept = [note for note in artifact.notes if before is None or note != before.note]
    return dataclasses.replace(
        artifact,
        scheme=artifact.scheme.replace(float_compute=compute.float_compute),
        details={**artifact.details, DETAIL: compute},
        notes=(*kept, compute.note),
    )


def check_names(prepared: PreparedModel, names: Sequence[str]) -> None:
    """Refuse names that no node of the prepared model has.

    Raises:
        UsageError: a name is unknown; suggests the nearest names.
    """
    known = {str(node.name) for node in prepared.model.graph}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        hint = closest(unknown, known, "List the node names with `edgeq inspect -v`", most=3)
        raise UsageError(f"{prepared.source}: no node is named {unknown!r}", hint)


def _is_backend(found: Backend) -> bool:
    inherited = (Backend.check, Backend.build)
    defined = (getattr(method, "__func__", method) not in inherited for method in (found.check, found.build))
    return bool(found.name and found.title) and all(defined)


def toolkits() -> dict[str, Toolkit]:
    """Return the toolkits of all backends, by their names."""
    found = (backend.toolkit() for _, backend in REGISTRY.items())
    return {toolkit.name: toolkit for toolkit in found if toolkit is not None}


REGISTRY: Registry[Backend] = Registry(BACKENDS, _is_backend, "edgeq.backends.base.Backend", make=as_backend)


def backend_named(name: str) -> Backend:
    """Return the backend with this name in profiles and targets: edgeq's own, or one of a plug-in.

    Raises:
        HardwareError: no backend has that name.
        UsageError: the plug-in that registers it is broken.
    """
    return REGISTRY.load(name)


def backend_for(
    target: Target, observed: Mapping[str, Range] | None = None, cut: Mapping[str, float] | None = None
) -> Backend:
    """Return the backend of `target`, configured for it if its artifacts depend on more than the scheme.

    Args:
        observed: extrema that calibration saw, by tensor, unclipped.
        cut: share of each tensor's power that its range cuts off (`edgeq.calibrate.ranges`).
    """
    return as_backend(backend_named(target.backend).configured(target, observed or {}, cut or {}))


class _Simulators(Mapping[str, DeviceSimulator]):
    """Hold the simulators of all backends, by the name in a profile's `[emulate] simulator`."""

    def __getitem__(self, name: str) -> DeviceSimulator:
        found = backend_named(name).simulator() if name in BACKENDS.names() else None
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, backend in REGISTRY.items() if backend.simulator() is not None)

    def __len__(self) -> int:
        return len(tuple(iter(self)))


SIMULATORS: Mapping[str, DeviceSimulator] = _Simulators()
