"""What a job is given: a model with its data. It is checked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.backends.base import backend_for, backend_named
from edgeq.bundle.write import BUNDLE
from edgeq.data.open_source import Data, as_data, sample_paths
from edgeq.distributed.workers import Workers
from edgeq.errors import OutputError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target
from edgeq.jobs.job import Job, prepare
from edgeq.measure.task import Task, as_task
from edgeq.model.clean import check_bundle_name, is_named_bundle
from edgeq.model.load import data_beside, data_name, model_files, path_of
from edgeq.scheme import Scheme
from edgeq.util.display import Progress
from edgeq.util.outputs import check_apart, check_free


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
        targets: Sequence[Target],
        schemes: Sequence[Scheme],
        machine: Machine,
        *,
        fix: Mapping[str, int] | None,
        workers: Workers | None,
        progress: Progress,
    ) -> Job:
        """Return the job for `targets`, to be built by `schemes`, without statistics.

        Raises:
            EdgeqError: as `edgeq.jobs.job.prepare` has it.
        """
        return prepare(
            self.model,
            self.data,
            self.validation,
            workdir,
            static=any(scheme.mode == "static" for scheme in schemes),
            exclude=sorted({name for scheme in schemes for name in scheme.exclude}),
            adopting=all(backend_named(target.backend).adopts_quantized for target in targets),
            fix=fix,
            task=self.task,
            workers=workers,
            machine=machine,
            progress=progress,
        )
