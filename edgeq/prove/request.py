"""Describe what a job is asked for: a model, its data, the targets and the limits, checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

from edgeq.backends.base import backend_for
from edgeq.bundle.write import BUNDLE
from edgeq.data.open_source import Data, as_data, sample_paths
from edgeq.distributed.workers import Workers
from edgeq.errors import OutputError, UsageError, closest
from edgeq.hardware.target import Target, as_targets
from edgeq.measure.find_head import HeadChoice
from edgeq.measure.task import Task, as_task
from edgeq.model.files import data_name, data_names, model_files
from edgeq.scheme import Scheme
from edgeq.util.bundle_names import check_bundle_name, is_named_bundle
from edgeq.util.display import SILENT, Progress
from edgeq.util.numbers import parse_drop, parse_share
from edgeq.util.outputs import check_apart, check_free
from edgeq.util.paths import path_of

Effort = Literal["quick", "default", "thorough"]
"""How long the repair of a poor result may search."""


FLOAT_RECALL = "float-recall"
"""The threshold at which a model finds as much as the float model at the head's threshold."""


class RequestOptions(TypedDict, total=False):
    """List the arguments that jobs share, as users give them; see the attributes of `Request`."""

    val: Data | Any | None
    statistics: str | Path | None
    task: Task | str | None
    head: HeadChoice | str | None
    threshold: float | str | None
    cut_head: bool
    fix: Mapping[str, int] | None
    targets: str | Path | Sequence[str | Path]
    overrides: Mapping[str, Any] | None
    max_drop: float | str | None
    effort: Effort | None
    require_coverage: float | str | None
    timed: bool
    emulate: bool
    force: bool
    workers: int | str | Workers | None
    progress: Progress


@dataclass(frozen=True)
class Request:
    """Hold the arguments that `quantize`, `package`, `tune` and `calibrate` share. `Request.of` checks them.

    Attributes:
        data: calibration samples; None if `statistics` is given or no scheme is static.
        val: held-out samples for the proof. With None, the samples of the proof come from `data`. If `data` has 64
            samples or more, a quarter of them is used only for the proof and not for the calibration.
        statistics: a folder written by `edgeq calibrate`, instead of a calibration pass.
        task: the task that measures accuracy by labels.
        head: the head that says what the outputs mean; None finds it.
        threshold: the score from which an answer counts, or `FLOAT_RECALL`; None takes the head's.
        cut_head: whether the graph ends in front of joined rows or of the selection of boxes, which the runner does.
        fix: input size name → number, for sizes that the model leaves free.
        targets: names of targets or profiles, or paths to TOML files.
        overrides: fields of `Scheme` that the user has set. None values are ignored.
        max_drop: largest loss of accuracy, as a fraction; None means no limit.
        effort: effort of a repair, or None to repair nothing.
        require_coverage: share of the MACs that must run on integers; None means no limit.
        timed: whether to time results against float32 on this machine.
        emulate: whether to run other machines' kernels in emulators.
        force: whether to replace an existing output.
        workers: a number of processes that share the samples, the address of a Dask scheduler, or open workers.
    """

    model: Path
    data: Data | None = None
    val: Data | None = None
    statistics: Path | None = None
    task: Task | None = None
    head: HeadChoice | None = None
    threshold: float | str | None = None
    cut_head: bool = False
    fix: Mapping[str, int] = field(default_factory=dict)
    targets: tuple[str | Path, ...] = ("auto",)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    max_drop: float | None = None
    effort: Effort | None = "default"
    require_coverage: float | None = None
    timed: bool = True
    emulate: bool = True
    force: bool = False
    workers: int | str | Workers | None = None
    progress: Progress = SILENT

    @classmethod
    def of(cls, model: str | Path, data: Data | Any | None, **options: Unpack[RequestOptions]) -> Request:
        """Return the request that a user's arguments describe.

        Raises:
            UsageError: an argument has the wrong type, or the task, the effort or a field of the scheme is unknown.
        """
        # What is left in `arguments` at the end needs no conversion.
        arguments: dict[str, Any] = dict(options)
        statistics, task = arguments.pop("statistics", None), arguments.pop("task", None)
        head = arguments.pop("head", None)
        effort = arguments.get("effort")
        if effort is not None and effort not in get_args(Effort):
            fix = f"It can be {', '.join(get_args(Effort))}, or None for the plain build"
            raise UsageError(f"effort is {effort!r}", fix)
        return cls(
            path_of(model),
            as_data(data),
            as_data(arguments.pop("val", None)),
            path_of(statistics, "statistics") if statistics is not None else None,
            as_task(task) if task is not None else None,
            HeadChoice.parse(head) if isinstance(head, str) else head,
            _checked_threshold(arguments.pop("threshold", None)),
            bool(arguments.pop("cut_head", False)),
            arguments.pop("fix", None) or {},
            as_targets(arguments.pop("targets", cls.targets)),
            _checked_overrides(arguments.pop("overrides", None)),
            parse_drop(arguments.pop("max_drop", None)),
            require_coverage=parse_share("⟨require_coverage⟩", arguments.pop("require_coverage", None)),
            **arguments,
        )

    def only_target(self) -> str | Path:
        """Return the target of a job that takes only one.

        Raises:
            UsageError: several targets are given.
        """
        if len(self.targets) != 1:
            raise UsageError(f"{len(self.targets)} targets are given", "Give one, or use `package` for several")
        return self.targets[0]

    def paths(self) -> list[Path]:
        """Return all the files and folders that the job reads.

        Raises:
            ModelError: the model cannot be read.
        """
        folders = [self.statistics] if self.statistics is not None else []
        return [*model_files(self.model), *sample_paths((self.data, self.val)), *folders]

    def check_output(self, output: Path, *, bundle: bool = True) -> None:
        """Refuse an output that cannot be written, already exists, or would replace an input.

        Args:
            bundle: True if the output is a bundle (its name decides whether it is a directory or a file), False if it
                is a model.

        Raises:
            OutputError: the output is refused.
            ModelError: the model cannot be read.
        """
        is_file = not bundle or is_named_bundle(output)
        check_free(output, force=self.force, kind="file" if is_file else "directory")
        if self.force or (is_file and data_names(output, self.model)):
            inputs = self.paths()
            check_apart(output, inputs)
            check_apart(output.with_name(data_name(output)), inputs)
        if not is_file:
            BUNDLE.check(output)
            for folder in sample_paths((self.data, self.val)):
                if folder.is_dir() and folder.resolve() in output.resolve().parents:
                    raise OutputError(
                        f"{output} is in the data folder {folder}",
                        "Choose an output outside: the next run would read the bundle's test vectors as samples",
                    )
        if bundle:
            check_bundle_name(output)

    def schemes(self, targets: Sequence[Target]) -> list[Scheme]:
        """Return each target's scheme with the user's overrides.

        Raises:
            UsageError: a backend cannot build a scheme.
            HardwareError: a backend is not available.
            RuntimeUnavailableError: a package that a backend needs is not installed.
        """
        schemes = [target.profile.scheme.replace(**self.overrides) for target in targets]
        # A backend that cannot build a scheme says so here, before the model is read.
        for target, scheme in zip(targets, schemes, strict=True):
            backend = backend_for(target)
            backend.check(scheme)
            backend.check_packages()
        return schemes


def _checked_overrides(overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the overrides, or an empty mapping instead of None.

    Raises:
        UsageError: the overrides are not a mapping, or a key is not a field of `Scheme`.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise UsageError(
            f"the overrides are given as {type(overrides).__name__}", 'Give a dict such as {"weight_type": "int8"}'
        )
    names = [field.name for field in fields(Scheme)]
    unknown = next((key for key in overrides if key not in names), None)
    if unknown is not None:
        raise UsageError(f"overrides has no {unknown}", closest(str(unknown), names, f"It can have {', '.join(names)}"))
    return overrides


def _checked_threshold(threshold: float | str | None) -> float | str | None:
    """Return a threshold from 0 to 1, or `FLOAT_RECALL`."""
    if threshold is None or threshold == FLOAT_RECALL:
        return threshold
    try:
        value = float(threshold)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= 1:
        raise UsageError(f"⟨threshold⟩ is {threshold!r}", f"Give a score from 0 to 1, or {FLOAT_RECALL}")
    return value
