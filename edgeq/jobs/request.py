"""What a job is given: a model with its data. It is checked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.backends.base import backend_for, check_names
from edgeq.bundle.write import BUNDLE
from edgeq.calibrate.ranges import Range, quantizable_tensors
from edgeq.data.open_source import Data, as_data, sample_paths
from edgeq.data.preprocess import NoPreprocessingError
from edgeq.data.samples import Samples, SourceSamples, open_samples
from edgeq.distributed.workers import Workers
from edgeq.errors import DataError, ModelError, OutputError, UsageError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import Target
from edgeq.jobs.job import Job
from edgeq.jobs.opening import check_preparation
from edgeq.measure.evaluation import propose
from edgeq.measure.task import Task, as_task
from edgeq.model.clean import check_bundle_name, is_named_bundle
from edgeq.model.load import data_beside, data_name, is_quantized, model_files, path_of, read_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.quantize.adopt import adopt
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart, check_free

# Of decoded samples that stay in memory from the calibration to the proof.
_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Request:
    """A model with its data, as `quantize`, `package` and `tune` are given them.

    Attributes:
        data: calibration samples; None with `statistics`, or where nothing static is built.
        validation: held-out samples for the proof; None proves on `data`.
        statistics: folder written by `edgeq calibrate`, instead of a calibration pass.
        task: what to measure by labels.
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
        """Return the request for what a user names.

        Raises:
            UsageError: an argument of another type, or an unknown task.
        """
        folder = path_of(statistics, "statistics") if statistics is not None else None
        return cls(path_of(model), as_data(data), as_data(validation), folder, as_task(task))

    def paths(self) -> list[Path]:
        """Return the files and folders that the job reads.

        Raises:
            ModelError: the model cannot be read.
        """
        folders = [self.statistics] if self.statistics is not None else []
        return [*model_files(self.model), *sample_paths((self.data, self.validation)), *folders]

    def check_output(self, output: Path, *, force: bool, bundle: bool = True) -> None:
        """Refuse an output that cannot be written, that is in the way, or that would replace something that is read.

        Args:
            bundle: whether it is a bundle, which is a directory or a file by its name, and not a model.

        Raises:
            OutputError: and ModelError where the model cannot be read.
        """
        is_file = not bundle or is_named_bundle(output)
        check_free(output, force=force, kind="file" if is_file else "directory")
        if force or (is_file and data_beside(output, self.model)):
            inputs = self.paths()
            check_apart(output, inputs)
            check_apart(output.with_name(data_name(output)), inputs)
        if not is_file:
            BUNDLE.check(output)
            for folder in sample_paths((self.data, self.validation)):
                if folder.is_dir() and folder.resolve() in output.resolve().parents:
                    raise OutputError(
                        f"{output} lies in the data folder {folder}",
                        "Choose an output outside: the bundle's test vectors would be read as samples next time",
                    )
        if bundle:
            check_bundle_name(output)

    def schemes(
        self, targets: Sequence[Target], overrides: Mapping[str, Any] | None = None, *, max_drop: float | None = None
    ) -> list[Scheme]:
        """Return each target's scheme with what the user has set instead.

        Raises:
            UsageError: no build could meet the request: a backend cannot build a scheme, the overrides are given as
                something else than fields of a scheme, or a bound on the accuracy has nothing that measures it.
            HardwareError: a backend is not there.
        """
        if overrides is not None and not isinstance(overrides, Mapping):
            raise UsageError(
                f"the overrides are given as {type(overrides).__name__}", 'Give a dict such as {"weight_type": "int8"}'
            )
        if max_drop is not None and self.task is None:
            raise UsageError("a bound on the accuracy drop needs a task", "Give --task and labelled --val data")
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
        """Prepare the model and open its samples: a job without statistics.

        Args:
            static: whether any scheme needs ranges.
            exclude: names of nodes to be kept in float, looked up before anything is calibrated.
            adopting: whether a model that is quantized already (Q/DQ pairs) is taken, with its parameters.
            fix: numbers for free sizes of the inputs, by name.
            workers: that the calibration samples, and those of proofs, are shared among.
            machine: this one; None makes no difference between its kernels and a target's.

        Raises:
            UsageError: samples are needed and were not given; `exclude` names a node that is not there.
            ModelError: the model has no input, or no float tensor to quantize.
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
            raise ModelError(f"{model} takes no inputs", "Give a model whose inputs are not built in")
        if static and not quantizable_tensors(prepared.graph):
            if any(value.dtype == ir.DataType.DOUBLE for value in prepared.model.graph.initializers.values()):
                raise ModelError(
                    f"{model} computes in float64, and quantization starts from float32",
                    "Export it in float32 (PyTorch: model.float())",
                )
            raise ModelError(f"{model} computes nothing in float: there is nothing to quantize", "Give a float32 model")
        check_names(prepared, exclude)
        calibration = _open(data, prepared, progress) if data is not None else None
        held_out = validation is not None and not (data is not None and _same_source(data.source, validation.source))
        proof_samples = _open(validation, prepared, progress) if validation is not None else calibration
        assert proof_samples is not None
        if not adopted:
            with progress.stage("Checking the preparation"):
                prepared = check_preparation(prepared, proof_samples)
        here = machine or detect_machine()
        return Job(
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
            task=self.task,
            progress=progress,
        )


def _same_source(one: Any, other: Any) -> bool:
    """Return whether two sources are one file or folder, or one object: both are read from their beginning."""
    if isinstance(one, str | Path) and isinstance(other, str | Path):
        return Path(one).absolute() == Path(other).absolute()
    return one is other


def _open(data: Data, prepared: PreparedModel, progress: Progress) -> Samples:
    try:
        opened = open_samples(data, prepared.signature, model=prepared.source, progress=progress)
    except NoPreprocessingError as error:
        raise DataError(error.problem, propose(prepared.path, data.source, progress=progress)) from error
    return replace(opened, hold=_HELD_BYTES) if isinstance(opened, SourceSamples) else opened
