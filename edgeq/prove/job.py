"""Prepare one model and its data once for any number of targets, and build the artifact for one of them.

A `Request` is the input of a job, checked before any work is done. A `Job` is the prepared result.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.basis import EVERYTHING, Basis
from numpy.typing import NDArray

from edgeq.backends.base import Artifact, Backend, as_backend, backend_for, backend_named, check_names
from edgeq.bundle.write import BUNDLE
from edgeq.calibration.collect import FloatOutputs, collect
from edgeq.calibration.files import load_statistics
from edgeq.calibration.hazards import hazard_notes, hazards_behind_layers, with_hazards
from edgeq.calibration.methods import REGISTRY as METHODS
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range, clipped_power, derive_ranges, scheme_ranges
from edgeq.calibration.statistics import UNIT, Statistics
from edgeq.data.labels import Labels
from edgeq.data.open_source import Data, as_data, has_parts, in_role, sample_paths
from edgeq.data.parts import find_shared_files
from edgeq.data.preprocess import Preprocess
from edgeq.data.same_preparation import Figures, InputFigures, find_differences, measure_inputs, warn_of_unlike_images
from edgeq.data.samples import Samples, SourceSamples, select_samples
from edgeq.distributed.workers import Workers
from edgeq.emulate.audit import audit, find_largest_sums
from edgeq.errors import CalibrationError, ModelError, OutputError, RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import Profile, load_profiles, match_profile
from edgeq.hardware.target import Target
from edgeq.measure.basis import find_basis, sampled_basis
from edgeq.measure.find_task import find_annotations, find_classification, find_detection, infer_task_name
from edgeq.measure.node_runs import make_source_finder
from edgeq.measure.preprocess_search import open_or_search
from edgeq.measure.settle import check_skill, settle
from edgeq.measure.task import Task, as_task, make_task, split_task_options
from edgeq.model.files import data_name, data_names, model_files
from edgeq.model.load import is_quantized, read_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.model.saturation import exact_options
from edgeq.model.sizes import parse_sizes
from edgeq.prove.opening import check_preparation
from edgeq.quantization.adopt import adopt
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import ALL_NODES, SYMMETRIC_BLOCKS, Scheme
from edgeq.signature import Signature
from edgeq.util.bundle_names import check_bundle_name, is_named_bundle
from edgeq.util.display import SILENT, Progress
from edgeq.util.numbers import parse_drop, parse_share
from edgeq.util.outputs import check_apart, check_free
from edgeq.util.paths import path_of

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
    needed = runs_here and foreign
    if needed and (artifact.proof_options or _LEFT in artifact.notes):
        return artifact  # this was already done for another target
    exact = needed and exact_settings(artifact) is not None
    notes = tuple(note for note in artifact.notes if note != _LEFT)
    return replace(
        artifact,
        proof_options=exact_options() if exact else {},
        notes=(*notes, _LEFT) if needed and not exact else notes,
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
        float_outputs: the float model's outputs for each validation sample, if the model was calibrated on the same
            samples; otherwise empty.
        host: the profile of this machine, or None to ignore differences between the kernels of this machine and those
            of a target.
        static: True if any scheme needs ranges.
        machine: this machine.
        task: the task that measures accuracy by labels, or None to measure agreement with float32.
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
    float_outputs: Sequence[Mapping[str, NDArray[Any]]] = ()
    static: bool = True
    machine: Machine = field(default_factory=detect_machine)
    task: Task | None = None
    basis: Basis = EVERYTHING
    progress: Progress = SILENT
    doubts: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Return the private folder for intermediate files."""
        return self.prepared.path.parent


@dataclass(frozen=True)
class Built:
    """Hold an artifact together with its target and ranges."""

    target: Target
    artifact: Artifact
    ranges: Mapping[str, Range] = field(default_factory=dict)


Builder = Callable[[Job, Target, Scheme, Path, Progress], Built]
"""A function that builds the artifact for a scheme and writes it to a path."""


def collect_statistics(job: Job, statistics: Path | None = None) -> Job:
    """Return the job with the statistics of one float32 pass over the calibration samples, and with the basis of its
    figures. If no scheme is static, there are no statistics.

    Args:
        statistics: a folder that `edgeq calibrate` wrote, to read instead of running a pass.

    Raises:
        UsageError: there are no calibration samples.
        CalibrationError: `statistics` belong to another model or are not complete.
    """
    prepared, outputs = job.prepared, None
    if not job.static:
        return replace(job, basis=sampled_basis(prepared.graph, open_session(prepared.path), job.validation))
    if statistics is not None:
        collected = load_statistics(statistics)
        collected.check_model(prepared.digest, str(statistics))
        if not collected.complete:
            raise CalibrationError(f"{statistics} is unfinished", "Finish it with `edgeq calibrate --resume`")
        calibrated_on = _recorded_figures(collected, prepared.signature, str(statistics))
        job = _doubted(job, find_differences(calibrated_on, measure_inputs(job.validation)))
    else:
        if job.calibration is None:
            raise UsageError("static quantization needs calibration samples", "Give --data or --calibration")
        if job.validation is job.calibration:
            outputs = FloatOutputs(prepared.model, len(job.calibration))
        collected = collect(
            prepared.graph,
            job.calibration,
            model_digest=prepared.digest,
            workers=job.workers,
            outputs=outputs,
            progress=job.progress,
        )
    known = outputs.all() if outputs is not None else ()
    return replace(
        job,
        prepared=with_hazards(prepared, collected),
        statistics=collected,
        float_outputs=known,
        basis=find_basis(prepared.graph, collected),
    )


def _recorded_figures(collected: Statistics, signature: Signature, source: str) -> Figures:
    """Return the figures of the inputs that statistics were collected on: the means of the samples' extrema."""
    figures = {}
    for name in [spec.name for spec in signature.inputs if spec.name in collected.tensors]:
        tensor = collected.tensors[name]
        low, high = (
            np.array([float(total) * UNIT / max(1, tensor.nonempty)])
            for total in (tensor.minimum_sum, tensor.maximum_sum)
        )
        if low.any() or high.any():
            unknown = np.array([np.nan])
            figures[name] = {"": InputFigures(source, low, high, unknown, unknown, tensor.nonempty)}
    return figures


def _doubted(job: Job, doubts: Sequence[str]) -> Job:
    """Return the job with further doubts, which are shown at once."""
    for doubt in doubts:
        job.progress.note(f"warning: {doubt}")
    return replace(job, doubts=(*job.doubts, *doubts))


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
    before, job = job.prepared.hazards, replace(job, prepared=prepared_for(job.prepared, target))
    if scheme.fit_seen:
        backend = _fitting(job, backend, scheme, derived, destination)
    artifact = backend.build(job.prepared, derived.ranges, scheme, destination, samples=job.calibration)
    if scheme.mode == "static":
        kept = job.prepared.hazards
        lost = {name: reason for name, reason in before.items() if name not in kept}
        without = f"not kept in float, as {target.name} has none for layers"
        notes = (*hazard_notes(kept, "in float"), *hazard_notes(lost, without))
        artifact = replace(artifact, notes=(*notes, *artifact.notes))
    return Built(target, computed_as_there(artifact, target, job.host), derived.ranges)


def prepared_for(prepared: PreparedModel, target: Target) -> PreparedModel:
    """Return the model with the hazards that keep nodes in float on `target`. Where layers run only in integers, a
    hazard keeps no layer in float.
    """
    if not target.profile.integer_only:
        return prepared
    return replace(prepared, hazards=hazards_behind_layers(prepared.graph, prepared.hazards))


def _fitting(job: Job, backend: Backend, scheme: Scheme, derived: DerivedValues, beside: Path) -> Backend:
    """Find the largest sums of two products that occur in the model with full ranges, and return a backend that uses
    them.
    """
    if job.calibration is None:
        raise UsageError("fit_seen needs calibration samples", "Use fit_pairs")
    full = scheme.replace(fit_pairs=False, fit_seen=False)
    with tempfile.TemporaryDirectory(prefix="edgeq-full-", dir=beside.parent) as folder:
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
    return {**ranges, **{name: known for name, known in job.adopted.items() if name in ranges}}


def with_extrema(job: Job, target: Target, ranges: Mapping[str, Range]) -> DerivedValues:
    """Return `ranges` together with the other values that the target's backend needs from the job's statistics."""
    if job.statistics is None or not backend_named(target.backend).targeted:
        return DerivedValues(ranges)
    return DerivedValues(ranges, derive_ranges(job.statistics, "minmax"), clipped_power(job.statistics, ranges))


_SCHEME_FIELDS = (
    "method",
    "per_channel",
    "reduce_range",
    "fit_pairs",
    "format",
    "activation_type",
    "weight_type",
    "activation_symmetric",
    "rest",
)


# Options that have no meaning for dynamic quantization or for weights in blocks. Activations then stay float in the
# file, and its format is fixed.
_NOT_DYNAMIC = ("method", "activation_type", "activation_symmetric", "format", "fit_pairs")
_NOT_IN_BLOCKS = (*_NOT_DYNAMIC, "per_channel", "reduce_range", "weight_type")


def build_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options of `edgeq.cli._options` to the arguments that `quantize` and `package` share."""
    return {
        **_data_arguments(options),
        "overrides": _overrides(options),
        "max_drop": parse_drop(options["max_drop"]),
        "effort": None if options["as_is"] else options["effort"],
        "require_coverage": parse_share("--require-coverage", options["require_coverage"]),
        "emulate": not options["no_emulate"],
        "timed": not options["no_timing"],
        "force": options["force"],
    }


def tune_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `edgeq.tune` except the goal. Also return "max_drop", which is for the goal."""
    same = ("target", "with_float", "resume", "force")
    return {
        **_data_arguments(options),
        "max_drop": parse_drop(options["max_drop"]),
        **{name: options[name] for name in same},
        "memory": not options["no_memory"],
    }


def _data_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    task = None
    named, _ = split_task_options(options)
    if (name := infer_task_name(options["task"], named)) is not None:
        if not options["val"]:
            option = "--task" if options["task"] else "--annotations"
            raise UsageError(f"{option} needs labelled samples", "Give them with --val")
        if name == "detection" and named.annotations is None:
            named = replace(named, annotations=find_annotations(options["val"]))
        task = make_task(name, named)
    elif named.given():
        raise UsageError("task options without a task", "Give a --task")
    listed = isinstance(options["labels"], Labels) and options["labels"].source is None  # only --classes is given
    if options["labels"] and not options["val"] and not listed:
        raise UsageError("--labels needs --val, whose labels it names", "Give --val, or leave out --labels")
    if options["count"] is not None and not options["data"]:
        raise UsageError("--count needs --data, whose samples it limits", "Give --data, or leave out --count")
    preprocess, classes = options["preprocess"], options["labels"] if listed and not options["val"] else None
    return {
        "data": Data(options["data"], preprocess, classes, count=options["count"]) if options["data"] else None,
        "val": Data(options["val"], preprocess, options["labels"]) if options["val"] else None,
        "statistics": options["calibration"],
        "task": task,
        "fix": parse_sizes(options["fixed"]),
        "workers": options["workers"],
    }


def _overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: options[name] for name in _SCHEME_FIELDS if options[name] is not None}
    given = [_setting(text) for text in options["method_options"]]
    if options["percentile"] is not None:
        if options["method"] != "percentile":
            raise UsageError("--percentile needs --method percentile")
        given.append(("percentile", options["percentile"]))
    settings = dict(given)
    if len(settings) < len(given):
        raise UsageError("an option of the method is given twice", "Give --percentile, or --method-option, once")
    if settings:
        if options["method"] is None:
            raise UsageError("--method-option needs --method", "Name the method that has this option")
        chosen["method_options"] = METHODS.load(options["method"]).settings(settings)
    if options["dynamic"]:
        chosen |= _dynamic(options)
    if options["weight_only"]:
        if options["dynamic"]:
            raise UsageError("--dynamic and --weight-only exclude each other", "Give one of them")
        _refuse_given(options, _NOT_IN_BLOCKS, "--weight-only", "Weights are in blocks, and nothing else is quantized")
        bits = int(options["weight_only"])
        chosen |= {"mode": "weight-only", "weight_bits": bits, "weight_symmetric": SYMMETRIC_BLOCKS[bits]}
        if options["block_compute"] == "float32" and bits != 4:
            raise UsageError("--block-compute float32 needs 4 bits: with 8, float is many times slower", "Leave it out")
        if options["block_compute"]:
            chosen["float_compute"] = (ALL_NODES,) if options["block_compute"] == "float32" else ()
    if options["block_compute"] and not options["weight_only"]:
        raise UsageError("--block-compute needs --weight-only", "Add --weight-only 4")
    if options["op_types"]:
        chosen["op_types"] = options["op_types"]
    if options["eight_bit"] and options["weight_only"] != "4":
        raise UsageError("--eight-bit needs --weight-only 4", "Add --weight-only 4, or leave out --eight-bit")
    for name in ("exclude", "wide", "eight_bit"):
        if options[name]:
            chosen[name] = options[name]
    return chosen


def _setting(text: str) -> tuple[str, float]:
    """Return the name and value of "NAME=VALUE"."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UsageError(f"--method-option {text!r} is not NAME=NUMBER", "Write it as percentile=99.9") from None


def _dynamic(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheme fields that --dynamic sets. --weight-type applies only to the operator types that --op-type
    names, because the best weight type differs between operators.
    """
    why = "Dynamic quantization takes unsigned activations and measures their ranges at run time"
    _refuse_given(options, _NOT_DYNAMIC, "--dynamic", why)
    if options["weight_type"] is None:
        return {"mode": "dynamic"}
    if not options["op_types"]:
        raise UsageError("dynamic quantization sets weight types by operator type", "Name the types with --op-type")
    return {"mode": "dynamic", "dynamic_weight_types": dict.fromkeys(options["op_types"], options["weight_type"])}


def _refuse_given(options: Mapping[str, Any], names: Sequence[str], other: str, why: str) -> None:
    given = next((name for name in names if options[name] is not None), None)
    if given is not None:
        raise UsageError(f"--{given.replace('_', '-')} and {other} exclude each other", why)


# The maximum number of bytes of decoded samples that stay in memory from the calibration to the proof.
_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Request:
    """Hold a model and its data, which are the input of `quantize`, `package` and `tune`.

    Attributes:
        data: calibration samples; None if `statistics` is given or no scheme is static.
        validation: held-out samples for the proof. With None, the samples of the proof come from `data`. If `data` has
            64 samples or more, a quarter of them is used only for the proof and not for the calibration.
        statistics: a folder written by `edgeq calibrate`, instead of a calibration pass.
        task: the task that measures accuracy by labels.
    """

    model: Path
    data: Data | None
    validation: Data | None
    statistics: Path | None
    task: Task | None

    @classmethod
    def of(
        cls,
        model: str | Path,
        data: Data | Any | None,
        validation: Data | Any | None,
        statistics: str | Path | None,
        task: Task | str | None,
    ) -> Request:
        """Return the request that a user's arguments describe.

        Raises:
            UsageError: an argument has the wrong type, or the task is unknown.
        """
        folder = path_of(statistics, "statistics") if statistics is not None else None
        measured = as_task(task) if task is not None else None
        return cls(path_of(model), as_data(data), as_data(validation), folder, measured)

    def paths(self) -> list[Path]:
        """Return all the files and folders that the job reads.

        Raises:
            ModelError: the model cannot be read.
        """
        folders = [self.statistics] if self.statistics is not None else []
        return [*model_files(self.model), *sample_paths((self.data, self.validation)), *folders]

    def check_output(self, output: Path, *, force: bool, bundle: bool = True) -> None:
        """Refuse an output that cannot be written, already exists, or would replace an input.

        Args:
            bundle: True if the output is a bundle (its name decides whether it is a directory or a file), False if it
                is a model.

        Raises:
            OutputError: the output is refused.
            ModelError: the model cannot be read.
        """
        is_file = not bundle or is_named_bundle(output)
        check_free(output, force=force, kind="file" if is_file else "directory")
        if force or (is_file and data_names(output, self.model)):
            inputs = self.paths()
            check_apart(output, inputs)
            check_apart(output.with_name(data_name(output)), inputs)
        if not is_file:
            BUNDLE.check(output)
            for folder in sample_paths((self.data, self.validation)):
                if folder.is_dir() and folder.resolve() in output.resolve().parents:
                    raise OutputError(
                        f"{output} is in the data folder {folder}",
                        "Choose an output outside: the next run would read the bundle's test vectors as samples",
                    )
        if bundle:
            check_bundle_name(output)

    def schemes(
        self, targets: Sequence[Target], overrides: Mapping[str, Any] | None = None, *, max_drop: float | None = None
    ) -> list[Scheme]:
        """Return each target's scheme with the user's overrides.

        Raises:
            UsageError: no build could meet the request: a backend cannot build a scheme, the overrides are not a
                mapping of scheme fields, or there is a limit on accuracy but no task to measure it.
            HardwareError: a backend is not available.
        """
        if overrides is not None and not isinstance(overrides, Mapping):
            raise UsageError(
                f"the overrides are given as {type(overrides).__name__}", 'Give a dict such as {"weight_type": "int8"}'
            )
        if max_drop is not None and self.task is None and self.validation is None:
            fix = "Give labelled --val data: class folders, --labels FILE, or --annotations FILE for a detector"
            raise UsageError("a limit on the accuracy drop needs labels", fix)
        schemes = [target.profile.scheme.replace(**(overrides or {})) for target in targets]
        for target, scheme in zip(targets, schemes, strict=True):
            backend_for(target).check(scheme)
        return schemes

    def prepare(
        self,
        workdir: Path,
        *,
        static: bool = True,
        exclude: Sequence[str] = (),
        adopting: bool = False,
        fix: Mapping[str, int] | None = None,
        workers: Workers | None = None,
        machine: Machine | None = None,
        progress: Progress = SILENT,
    ) -> Job:
        """Prepare the model and open its samples. Return a job without statistics.

        Args:
            static: True if any scheme needs ranges.
            exclude: names of nodes to keep in float. edgeq looks these names up before the calibration.
            adopting: True to accept a model that is already quantized (Q/DQ pairs) and use its scales and zero points.
            fix: input size name → number, for sizes that the model leaves free.
            workers: the processes that share the samples of the calibration and the proofs.
            machine: this machine, or None to ignore differences between its kernels and those of a target.

        Raises:
            UsageError: samples are needed but were not given, or `exclude` names an unknown node.
            ModelError: the model has no input, or no float tensor to quantize.
            CheckFailedError: the float model is no better than chance on the labels.
            DataError: the inputs of `data` and `validation` cannot come from the same preparation.
        """
        model, data, validation = self.model, self.data, self.validation
        if data is None and validation is None:
            raise UsageError("there are no samples to prove the result on", "Give --data or --val")
        adopted: Mapping[str, Range] = {}
        if adopting and is_quantized(read_model(model)):
            adoption = adopt(model, workdir / "adopted.onnx")
            adopted = adoption.ranges
            prepared = prepare_model(adoption.model, workdir, fix=fix, progress=progress)
            prepared = replace(prepared, source=model, notes=(*prepared.notes, *adoption.notes))
        else:
            prepared = prepare_model(model, workdir, fix=fix, progress=progress)
        if not prepared.signature.inputs:
            raise ModelError(f"{model} has no inputs", "Give a model whose inputs are not constants")
        if static and not quantizable_tensors(prepared.graph):
            if any(value.dtype == ir.DataType.DOUBLE for value in prepared.model.graph.initializers.values()):
                raise ModelError(
                    f"{model} computes in float64, but quantization starts from float32",
                    "Export it in float32 (PyTorch: model.float())",
                )
            raise ModelError(f"{model} computes nothing in float: there is nothing to quantize", "Give a float32 model")
        check_names(prepared, exclude)
        if validation is None and data is not None and has_parts(data):
            validation = replace(data, count=None, role="validation")
        data = in_role(data, "calibration") if data is not None else None
        validation = in_role(validation, "validation") if validation is not None else None
        session = functools.cache(lambda: open_session(prepared.path))
        task = self.task
        if task is None and validation is not None:
            task = find_detection(validation, prepared.signature, session(), progress)
        judged = validation if validation is not None else data
        assert judged is not None

        def opened(data: Data, known: Preprocess | None = None) -> Samples:
            """Open samples. If no preprocessing is named for images, use `known` or else the preprocessing that gives
            the best accuracy on the labels.
            """
            samples = open_or_search(
                data,
                prepared.signature,
                session=session,
                labelled_data=judged,
                task=task,
                fallback=known,
                model=model,
                progress=progress,
            )
            return replace(samples, hold=_HELD_BYTES) if isinstance(samples, SourceSamples) else samples

        proof_samples = opened(judged)
        known = proof_samples.preprocess if isinstance(proof_samples, SourceSamples) else None
        calibration = proof_samples if judged is data else None
        if data is not None and calibration is None:
            calibration = opened(data, known)
        held_out = validation is not None
        if data is not None and validation is not None:
            apart = _apart(calibration, proof_samples, progress)
            calibration, held_out = apart or (calibration, not _same_source(data.source, validation.source))
        doubts = _input_doubts(calibration, proof_samples)
        if validation is None and self.statistics is None and len(proof_samples) >= _ENOUGH:
            calibration, proof_samples = _parted(proof_samples)
            held_out, every = True, len(calibration) + len(proof_samples)
            note = f"{len(proof_samples)} of the {every} samples are kept for the proof and left out of the calibration"
            prepared = replace(prepared, notes=(*prepared.notes, note))
        if not adopted:
            with progress.stage("Checking the preparation"):
                prepared = check_preparation(prepared, proof_samples)
        if task is None and validation is not None:
            task = find_classification(proof_samples, session(), progress)
        if task is not None and validation is not None:
            task = settle(task, session(), proof_samples, progress=progress)
            check_skill(task, session(), proof_samples, progress=progress)
        here = machine or detect_machine()
        job = Job(
            source=model,
            prepared=prepared,
            calibration=calibration,
            validation=proof_samples,
            held_out=held_out,
            statistics=None,
            adopted=adopted,
            workers=workers,
            host=match_profile(here, load_profiles()).profile if machine is not None else None,
            static=static,
            machine=here,
            task=task,
            progress=progress,
        )
        return _doubted(job, doubts)


def _input_doubts(calibration: Samples | None, proof: Samples) -> tuple[str, ...]:
    """Return reasons to doubt that the inputs of both sets are prepared alike, and as their preprocessing prepares
    images.

    Raises:
        DataError: the sets cannot come from the same preparation.
    """
    figures = measure_inputs(proof)
    doubts = warn_of_unlike_images(proof, figures)
    if calibration is None or calibration is proof:
        return doubts
    calibrated_on = measure_inputs(calibration)
    return (*find_differences(calibrated_on, figures), *warn_of_unlike_images(calibration, calibrated_on), *doubts)


# If there are _ENOUGH samples or more, every _PARTS-th sample is left out of the calibration.
_ENOUGH, _PARTS = 64, 4


def _parted(samples: Samples) -> tuple[Samples, Samples]:
    """Split samples into those for the calibration and those for the proof. The proof gets every fourth sample, and the
    calibration does not use any of these.
    """
    proof = range(_PARTS // 2, len(samples), _PARTS)
    others = [number for number in range(len(samples)) if number not in proof]
    return select_samples(samples, others), select_samples(samples, list(proof))


def _same_source(one: Any, other: Any) -> bool:
    """Return whether two sources are the same path or the same object, which means that both give the same first
    samples.
    """
    if isinstance(one, str | Path) and isinstance(other, str | Path):
        return Path(one).absolute() == Path(other).absolute()
    return one is other


def _apart(calibration: Samples | None, proof: Samples, progress: Progress) -> tuple[Samples, bool] | None:
    """Return the calibration samples without the files of the proof, and True. If no sample would be left, return all
    calibration samples, and False. Return None if the samples are not files.
    """
    if not isinstance(calibration, SourceSamples) or not isinstance(proof, SourceSamples):
        return None
    files = calibration.files()
    if not files or not proof.files():
        return None
    shared = find_shared_files(files, proof.files())
    if not shared:
        return calibration, True
    left = calibration.without(shared)
    if not left.selection:
        return calibration, False
    progress.note(
        f"{len(files) - len(left.selection)} of {len(files)} calibration samples are also validation samples, "
        f"so they are left out of the calibration: {min(shared).name}" + (" …" if len(shared) > 1 else "")
    )
    return left, True
