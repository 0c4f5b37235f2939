"""`edgeq calibrate` as functions: collect into a directory with checkpoints, merge directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeq.atomic import check_free
from edgeq.calibrate.collect import SamplesLike, collect
from edgeq.calibrate.files import load_statistics, save_statistics
from edgeq.calibrate.statistics import Statistics
from edgeq.errors import CalibrationError, UsageError
from edgeq.model.load import model_digest
from edgeq.progress import SILENT, Progress


def calibrate_to(
    model: Path,
    samples: SamplesLike,
    directory: Path,
    *,
    resume: bool = False,
    force: bool = False,
    skip: Sequence[str] = (),
    memory: int | None = None,
    workers: int | None = None,
    checkpoint_seconds: float = 30.0,
    progress: Progress = SILENT,
) -> Statistics:
    """Collect statistics into `directory`, saving now and then and when interrupted, so that nothing is lost.

    Args:
        resume: continue what an interrupted run left in `directory`; finished statistics are returned as they are.
        force: replace what is in `directory`.
        skip: names of tensors not to record.

    Raises:
        CalibrationError: a value is NaN or infinite; what is in `directory` belongs to other data or another model.
    """
    digest = model_digest(model)
    start = None
    if resume and directory.exists():
        start = load_statistics(directory)
    else:
        check_free(directory, force=force)
    tensors = None
    if skip:
        tensors = _without(model, skip)
    statistics = collect(
        model,
        samples,
        tensors,
        model_digest=digest,
        memory=memory,
        workers=workers,
        start=start,
        checkpoint=lambda partial: save_statistics(partial, directory, force=True),
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
    )
    save_statistics(statistics, directory, force=True)
    return statistics


def merge_to(parts: Sequence[Path], directory: Path, *, force: bool = False) -> Statistics:
    """Merge statistics directories, in any order, into a new one."""
    if len(parts) < 2:
        raise UsageError("merging needs at least two parts", "Name the directories of all shards")
    check_free(directory, force=force)
    whole = load_statistics(parts[0])
    for part in parts[1:]:
        try:
            whole = whole.merge(load_statistics(part))
        except CalibrationError as error:
            raise CalibrationError(f"{part} cannot be merged: {error.problem}", error.fix) from error
    save_statistics(whole, directory, force=force)
    return whole


def _without(model: Path, skip: Sequence[str]) -> tuple[str, ...]:
    from edgeq.calibrate.tensors import quantizable_tensors
    from edgeq.model.load import load_model

    names = quantizable_tensors(load_model(model, external_data="none"))
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise UsageError(
            f"{model} has no float activation {unknown[0]!r}", "Use names that `edgeq calibrate show` lists"
        )
    return tuple(name for name in names if name not in skip)
