"""Hold a prepared model with its samples and statistics (`Job`), and build the artifact for one target from them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeq_device.answers.head import Head
from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.backends.base import Artifact, Backend, as_backend, backend_for, backend_named
from edgeq.calibration.hazards import hazard_notes, hazards_behind_layers
from edgeq.calibration.ranges import Range, clipped_power, derive_ranges, scheme_ranges
from edgeq.calibration.statistics import Statistics
from edgeq.data.array_store import ArrayStore
from edgeq.data.samples import Samples, places, spread_over
from edgeq.distributed.workers import Workers
from edgeq.emulate.audit import audit, find_largest_sums
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import Profile
from edgeq.hardware.target import Target
from edgeq.measure.node_runs import make_source_finder
from edgeq.measure.task import Task
from edgeq.model.prepare import PreparedModel
from edgeq.model.saturation import exact_options
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress

_LEFT = (
    "outputs were checked on this machine's kernels, which can saturate although the target's do not: onnxruntime has "
    "no exact kernels for this model here"
)


def on_exact_kernels(settings: SessionSettings) -> SessionSettings:
    """Return `settings` with the additional options that make onnxruntime's own kernels exact on any x86-64 CPU."""
    return replace(settings, config={**settings.config, **exact_options()})


def exact_settings(artifact: Artifact) -> SessionSettings | None:
    """Return settings with which onnxruntime computes `artifact` without saturation on any x86-64 CPU. Return None if
    no settings do this. Either an operator has no exact kernel, or onnxruntime rejects the graph that its option for
    exact kernels produces. The latter happens if two layers share a weight, and for S8S8 in the QOperator format.
    """
    exact = on_exact_kernels(artifact.settings())
    try:
        return None if audit(artifact.model, exact).layers else exact
    except RuntimeUnavailableError:
        return None


def computed_as_there(artifact: Artifact, target: Target, host: Profile | None) -> Artifact:
    """Return `artifact` with the options that its proof needs on this machine (`host`).

    If this machine's kernels saturate and differ from the target's, the added options select exact kernels. If there
    are no exact kernels, a note states this instead. If this machine's kernels do not saturate, or are the target's, no
    options are added.

    Sums that saturate here would prove nothing for a target with exact kernels. For a target whose own kernels
    saturate, the audit measures the effect.
    """
    runs_here = artifact.device == "cpu" and artifact.simulation is None and artifact.plugin is None
    foreign = host is not None and host.name != target.profile.name and _saturates(host, artifact.scheme)
    differs = runs_here and foreign
    if differs and (artifact.proof_options or _LEFT in artifact.notes):
        return artifact  # this was already done for another target
    exact = differs and exact_settings(artifact) is not None
    notes = tuple(note for note in artifact.notes if note != _LEFT)
    return replace(
        artifact,
        proof_options=exact_options() if exact else {},
        notes=(*notes, _LEFT) if differs and not exact else notes,
    )


def _saturates(host: Profile, scheme: Scheme) -> bool:
    """Return whether this machine's kernels saturate for a scheme. The kernels for a dynamic scheme multiply the same
    types as the kernels for a static scheme.
    """
    return host.saturates(scheme) or (scheme.mode == "dynamic" and bool(host.hazards.get("saturates_int16")))


@dataclass(frozen=True)
class Job:
    """Hold a prepared model, its samples, and the statistics of one float32 pass over them.

    Attributes:
        source: the user's model.
        calibration: samples from which ranges are derived; None if statistics were given or no scheme is static.
        validation: samples for the proof.
        held_out: True if the validation samples are not among the calibration samples.
        statistics: the statistics of the calibration samples; None if no scheme is static.
        adopted: ranges from a model that was already quantized. They take precedence over the statistics.
        workers: the processes that share all work that is not timed.
        float_outputs: the float model's outputs by the place of the validation sample. Whoever runs the float model on
            these samples adds its outputs, so that it runs each sample once. None stores no outputs.
        host: the profile of this machine, or None to ignore differences between the kernels of this machine and those
            of a target.
        static: True if any scheme needs ranges.
        machine: this machine.
        task: the task that measures accuracy by labels, or None to measure agreement with float32.
        head: how the outputs become answers; None if their meaning is not known.
        float_recall: whether a variant's head gets the threshold that gives the float model's recall back.
        basis: what the figures of the float model's tensors are taken over. `collect_statistics` determines it.
        doubts: reasons to doubt the samples, found before anything is built. Each is a sentence.
    """

    source: Path
    prepared: PreparedModel
    calibration: Samples | None
    validation: Samples
    held_out: bool
    statistics: Statistics | None
    adopted: Mapping[str, Range] = field(default_factory=dict)
    workers: Workers | None = None
    host: Profile | None = None
    float_outputs: ArrayStore | None = None
    static: bool = True
    machine: Machine = field(default_factory=detect_machine)
    head: Head | None = None
    float_recall: bool = False
    task: Task | None = None
    basis: Basis = EVERYTHING
    progress: Progress = SILENT
    doubts: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Return the private folder for intermediate files."""
        return self.prepared.path.parent

    def with_validation(self, count: int) -> Job:
        """Return the job with `count` validation samples, spread over all of them; with all if there are no more."""
        if count >= len(self.validation):
            return self
        known = self.float_outputs
        selected = known.select(places(len(self.validation), count)) if known is not None else None
        return replace(self, validation=spread_over(self.validation, count), float_outputs=selected)


@dataclass(frozen=True)
class Built:
    """Hold an artifact together with its target and ranges."""

    target: Target
    artifact: Artifact
    ranges: Mapping[str, Range] = field(default_factory=dict)


Builder = Callable[[Job, Target, Scheme, Path, Progress], Built]
"""A function that builds the artifact for a scheme and writes it to a path."""


@dataclass(frozen=True)
class DerivedValues:
    """Hold the values that a scheme derives from statistics.

    Attributes:
        ranges: the ranges by tensor.
        observed: the unclipped ranges, for backends that need them.
        cut: the share of each tensor's power that the range cuts off, for backends that need it.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    observed: Mapping[str, Range] = field(default_factory=dict)
    cut: Mapping[str, float] = field(default_factory=dict)


def build(job: Job, target: Target, scheme: Scheme, destination: Path) -> Built:
    """Build the artifact for `target` with `scheme`, and write it to `destination`."""
    return build_derived(job, target, scheme, derive(job, target, scheme), destination)


def build_derived(job: Job, target: Target, scheme: Scheme, derived: DerivedValues, destination: Path) -> Built:
    """Do what `build` does, but with values that were derived earlier. These values depend only on the scheme's
    calibration method and types.
    """
    backend = backend_for(target, derived.observed, derived.cut)
    all_hazards, job = job.prepared.hazards, replace(job, prepared=prepared_for(job.prepared, target))
    if scheme.fit_seen:
        backend = _fitting(job, backend, scheme, derived, destination)
    artifact = backend.build(job.prepared, derived.ranges, scheme, destination, samples=job.calibration)
    if scheme.mode == "static":
        hazards = job.prepared.hazards
        lost = {name: reason for name, reason in all_hazards.items() if name not in hazards}
        without = f"not kept in float, as {target.name} has none for layers"
        notes = (*hazard_notes(hazards, "in float"), *hazard_notes(lost, without))
        artifact = replace(artifact, notes=(*notes, *artifact.notes))
    return Built(target, computed_as_there(artifact, target, job.host), derived.ranges)


def prepared_for(prepared: PreparedModel, target: Target) -> PreparedModel:
    """Return the model with the hazards that keep nodes in float on `target`. Where layers run only in integers, a
    hazard keeps no layer in float.
    """
    if not target.profile.integer_only:
        return prepared
    return replace(prepared, hazards=hazards_behind_layers(prepared.graph, prepared.hazards))


def _fitting(job: Job, backend: Backend, scheme: Scheme, derived: DerivedValues, destination: Path) -> Backend:
    """Find the largest sums of two products that occur in the model with full ranges, and return a backend that uses
    them.
    """
    if job.calibration is None:
        raise UsageError("fit_seen needs calibration samples", "Use fit_pairs")
    full = scheme.replace(fit_pairs=False, fit_seen=False)
    with tempfile.TemporaryDirectory(prefix="edgeq-full-", dir=destination.parent) as folder:
        place = Path(folder) / "model.onnx"
        artifact = backend.build(job.prepared, derived.ranges, full, place, samples=job.calibration)
        source = make_source_finder(job.prepared.model)
        return as_backend(
            backend.fitting(find_largest_sums(artifact.model, artifact.settings(), job.calibration, source))
        )


def derive(job: Job, target: Target, scheme: Scheme) -> DerivedValues:
    """Derive the values for `scheme` from the job's statistics. The result is empty if the scheme is not static."""
    if scheme.mode != "static":
        return DerivedValues()
    return with_extrema(job, target, job_ranges(job, scheme))


def job_ranges(job: Job, scheme: Scheme) -> dict[str, Range]:
    """Return the ranges of a static scheme, derived from the job's statistics. Ranges that the model itself contains
    take precedence.
    """
    assert job.statistics is not None
    ranges = scheme_ranges(job.statistics, scheme)
    return {**ranges, **{name: adopted for name, adopted in job.adopted.items() if name in ranges}}


def with_extrema(job: Job, target: Target, ranges: Mapping[str, Range]) -> DerivedValues:
    """Return `ranges` together with the other values that the target's backend needs from the job's statistics."""
    if job.statistics is None or not backend_named(target.backend).targeted:
        return DerivedValues(ranges)
    return DerivedValues(ranges, derive_ranges(job.statistics, "minmax"), clipped_power(job.statistics, ranges))
