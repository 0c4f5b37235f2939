"""Implement `edgeq.calibrate`: collect statistics of a user's model with checkpoints, and merge statistics from several
machines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from edgeq_device.system.places import scratch_folder

from edgeq.calibration.collect import Checkpoints, PassLimits, collect
from edgeq.calibration.files import check_directory, check_regular, load_statistics, save_statistics
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.statistics import Statistics
from edgeq.data.open_source import Data, in_role
from edgeq.data.samples import SampleOptions
from edgeq.distributed.workers import Workers, open_workers
from edgeq.errors import CalibrationError, UsageError
from edgeq.measure.preprocess_search import open_or_search
from edgeq.model.files import model_files
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.prove.request import Request
from edgeq.run.session import open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart, recover
from edgeq.util.paths import path_of


class PassOptions(SampleOptions, total=False):
    """List the arguments of `calibrate` that choose the samples and limit the pass."""

    memory: int | None
    threads: int
    every_element: bool
    checkpoint_seconds: float


def calibrate(
    model: str | Path,
    data: Data | Any,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    skip: Sequence[str] = (),
    workers: int | str | Workers | None = None,
    fix: Mapping[str, int] | None = None,
    progress: Progress = SILENT,
    **options: Unpack[PassOptions],
) -> Statistics:
    """Prepare a float32 model as `quantize` does, and run it once over samples to record the extrema and histogram of
    each tensor.

    Args:
        model: an .onnx file.
        data, preprocess, count, start, stride: the samples; see `edgeq.data.samples.open_samples`.
        output: folder for the statistics, which `quantize`, `package` and `tune` can use instead of samples. They are
            saved there at intervals and when the run is interrupted, so that no work is lost. With None, they stay in
            memory.
        resume: continue an interrupted run from its statistics in `output`, or start a new run if there are none. The
            result has the same bytes as that of an uninterrupted run.
        force: replace the statistics in `output`.
        skip: names of tensors not to record.
        workers: a number of processes that share the samples, the address of a Dask scheduler, or the result of
            `edgeq.distributed.workers.open_workers`. The result has the same bytes as without workers.
        memory: limit in bytes for observed activations. If a model needs more, edgeq makes several passes.
        threads: number of threads; 0 for one thread per core.
        every_element: count all elements of large tensors, not just a sample.
        checkpoint_seconds: interval at which the statistics are saved.
        fix: numbers for free sizes of the inputs, by name. `quantize` then needs the same numbers.

    Raises:
        CalibrationError: a value is NaN or infinite, or `output` contains statistics of different data or of a
            different model.
        OutputError: `output` contains links, or files that edgeq did not write.
        UsageError: an argument has the wrong type.
        DataError: the samples cannot be opened.
    """
    request = Request.of(model, data, fix=fix, force=force, workers=workers, progress=progress)
    return run_calibrate(request, output, resume=resume, skip=skip, **options)


def run_calibrate(
    request: Request,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    skip: Sequence[str] = (),
    **options: Unpack[PassOptions],
) -> Statistics:
    """Collect the statistics of a request's calibration samples.

    1. Open the folder for the statistics, and read those that a run continues.
    2. Prepare the model, and open its samples.
    3. Run the float model over the samples, and save the statistics from time to time.
    4. Save the complete statistics.

    Args and errors: see `calibrate`.
    """
    limits = PassLimits(options.get("memory"), options.get("threads", 0), options.get("every_element", False))
    model, progress = request.model, request.progress
    # 1. The folder is checked first, because the pass may take hours.
    store = _Store.open(path_of(output, "output") if output is not None else None, request, resume=resume)
    with scratch_folder("edgeq-calibrate-") as folder, open_workers(request.workers) as workers:
        # 2. The model is prepared as `quantize` prepares it, so that its digest is the same.
        prepared = prepare_model(model, Path(folder), fix=request.fix, progress=progress)
        samples = open_or_search(
            in_role(request.data or Data(None), "calibration"),
            prepared.signature,
            session=lambda: open_session(prepared.path),
            preprocess=options.get("preprocess"),
            count=options.get("count"),
            start=options.get("start", 0),
            stride=options.get("stride", 1),
            model=model,
            progress=progress,
        )
        # 3. An interrupt saves what was counted so far.
        began = time.monotonic()
        passes: list[tuple[float, float]] = []
        try:
            statistics = collect(
                prepared.model,
                samples,
                _recorded(prepared, model, skip),
                model_digest=prepared.digest,
                limits=limits,
                workers=workers,
                checkpoints=Checkpoints(store.earlier, store.save, options.get("checkpoint_seconds", 30.0)),
                timed=lambda running, counting: passes.append((running, counting)),
                progress=progress,
            )
        except KeyboardInterrupt:
            if store.filled:
                progress.note(f"the statistics so far are kept in {store.folder}: ⟨resume=True⟩ continues from them")
            raise
    # 4. The last save has all samples, even if an earlier one was minutes ago.
    progress.note(_pace(statistics.samples - store.count, time.monotonic() - began, passes))
    store.save(statistics)
    return statistics


@dataclass
class _Store:
    """Save statistics into a folder, or nowhere if there is none.

    Attributes:
        earlier: the statistics that the run continues, or None.
        replaces: whether the next save may replace what is in the folder. The first save of a new run may not, unless
            the user allows it. Each later save replaces the previous one.
        filled: whether the folder contains statistics of this run.
    """

    folder: Path | None
    earlier: Statistics | None
    replaces: bool
    filled: bool

    @classmethod
    def open(cls, folder: Path | None, request: Request, *, resume: bool) -> _Store:
        """Return the store for a run.

        Raises:
            OutputError: the folder cannot be written, or it contains something that must not be replaced.
            CalibrationError: the statistics to continue are damaged.
        """
        if folder is None:
            return cls(None, None, replaces=False, filled=False)
        recover(folder)
        earlier = None
        if resume and folder.exists():
            check_regular(folder)
            earlier = load_statistics(folder)
        replaces = request.force or earlier is not None
        check_directory(folder, force=replaces)
        check_apart(folder, [*model_files(request.model), *_existing(request.data)])
        return cls(folder, earlier, replaces, earlier is not None)

    @property
    def count(self) -> int:
        """Return the number of samples in the earlier statistics."""
        return self.earlier.samples if self.earlier is not None else 0

    def save(self, partial: Statistics) -> None:
        """Write the statistics so far, if any sample has been counted."""
        has_samples = partial.complete or any(tensor.samples for tensor in partial.tensors.values())
        if self.folder is not None and has_samples:
            save_statistics(partial, self.folder, force=self.replaces)
            self.replaces = self.filled = True


def _pace(count: int, seconds: float, passes: Sequence[tuple[float, float]]) -> str:
    """Describe how fast samples were counted. `passes` has the seconds of inference and of counting for each pass on
    this machine.
    """
    share = sum(counting for _, counting in passes) / (sum(map(sum, passes)) or 1.0)
    parts = f" (inference {1 - share:.0%}, counting {share:.0%})" if passes else ""
    return f"{count} samples in {seconds:.1f} s, {count / seconds:.1f} samples/s{parts}"


def merge_to(parts: Sequence[Path], directory: Path, *, force: bool = False) -> Statistics:
    """Merge folders of statistics into a new folder. The order of `parts` does not matter."""
    if len(parts) < 2:
        raise UsageError("merging needs at least two parts", "Name the folders of all shards")
    check_directory(directory, force=force)
    check_apart(directory, parts)
    merged = load_statistics(parts[0])
    for part in parts[1:]:
        try:
            merged = merged.merge(load_statistics(part))
        except CalibrationError as error:
            raise CalibrationError(f"{part} cannot be merged: {error.problem}", error.fix) from error
    save_statistics(merged, directory, force=force)
    return merged


def _existing(data: Data | None) -> tuple[Path, ...]:
    """Return the file or folder that `data` names. Return nothing if it is a pattern or an iterable."""
    source = data.source if data is not None else None
    return (Path(source),) if isinstance(source, (str, Path)) and Path(source).exists() else ()


def _recorded(prepared: PreparedModel, model: Path, skip: Sequence[str]) -> tuple[str, ...]:
    names = quantizable_tensors(prepared.graph)
    if not names:
        raise CalibrationError(f"{model} has no float activation", "There is nothing in it to calibrate")
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise UsageError(
            f"the prepared model has no float activation {unknown[0]!r}", "Look for it with `edgeq inspect`"
        )
    return tuple(name for name in names if name not in skip)
