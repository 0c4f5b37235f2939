"""What can be refused before any work is done: outputs, bars and schemes that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq.atomic import Kind, check_apart, check_free
from edgeq.backends import backend_for
from edgeq.bundle.owned import BUNDLE
from edgeq.data.given import Data
from edgeq.errors import OutputError, UsageError
from edgeq.hardware.target import Target
from edgeq.measure.task import Task
from edgeq.model.load import data_beside, data_name, model_files
from edgeq.pipeline.job import scheme_for


def check_output(
    output: Path,
    *,
    kind: Kind,
    force: bool,
    model: Path,
    samples: Sequence[Data | None],
    statistics: Path | None,
) -> None:
    """Refuse an output that cannot be written, that is in the way, or that would replace something that is read.

    Raises:
        OutputError: and ModelError where `model` cannot be read.
    """
    check_free(output, force=force, kind=kind)
    if force or (kind == "file" and data_beside(output, model)):
        inputs = read_paths(model, samples, statistics)
        check_apart(output, inputs)
        check_apart(output.with_name(data_name(output)), inputs)
    if kind == "directory":
        BUNDLE.check(output)
        for folder in sample_paths(samples):
            if folder.is_dir() and folder.resolve() in output.resolve().parents:
                raise OutputError(
                    f"{output} lies in the data folder {folder}",
                    "Choose an output outside: the bundle's test vectors would be read as samples next time",
                )


def read_paths(model: Path, samples: Sequence[Data | None], statistics: Path | None) -> list[Path]:
    """Files and folders that a run reads.

    Raises:
        ModelError: `model` cannot be read.
    """
    return [*model_files(model), *sample_paths(samples), *([statistics] if statistics is not None else [])]


def as_overrides(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of the scheme by name.

    Raises:
        UsageError: they are given as something else.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(
            f"the overrides are given as {type(given).__name__}", 'Give a dict such as {"weight_type": "int8"}'
        )
    return dict(given or {})


def check_request(
    targets: Sequence[Target], overrides: Mapping[str, Any], *, task: Task | None, max_drop: float | None
) -> None:
    """Refuse what no build could meet: a backend that is not there, a scheme that it cannot build, a bound on the
    accuracy without anything that measures it."""
    if max_drop is not None and task is None:
        raise UsageError("a bound on the accuracy drop needs a task", "Give --task and labelled --val data")
    for target in targets:
        backend_for(target).check(scheme_for(target, overrides))


def sample_paths(samples: Sequence[Data | None]) -> Iterator[Path]:
    """Files and folders that the samples name. Text that names none (a pattern, a preprocessing) is left out."""
    for data in samples:
        for value in (data.source, data.preprocess, data.labels) if data is not None else ():
            if isinstance(value, (str, Path)) and _exists(Path(value)):
                yield Path(value)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that cannot be entered, or a text too long to be a name
        return False
