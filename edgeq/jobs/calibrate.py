"""Implement `edgeq.calibrate`: collect statistics of a user's model with checkpoints, and merge statistics from several
machines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.calibration.collect import collect
from edgeq.calibration.files import check_directory, check_regular, load_statistics, save_statistics
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.statistics import Statistics
from edgeq.data.open_source import Data, as_data, in_role
from edgeq.distributed.workers import Workers, open_workers
from edgeq.errors import CalibrationError, UsageError
from edgeq.measure.preprocess_search import open_or_search
from edgeq.model.files import model_files
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.session import open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart, recover
from edgeq.util.paths import path_of


def calibrate(
    model: str | Path,
    data: Data | Any,
    output: str | Path | None = None,
    *,
    preprocess: Any = None,
    count: int | None = None,
    start: int = 0,
    stride: int = 1,
    resume: bool = False,
    force: bool = False,
    skip: Sequence[str] = (),
    memory: int | None = None,
    threads: int = 0,
    workers: int | str | Workers | None = None,
    every_element: bool = False,
    fix: Mapping[str, int] | None = None,
    checkpoint_seconds: float = 30.0,
    progress: Progress = SILENT,
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
        memory, threads, every_element: see `collect`.
        fix: numbers for free sizes of the inputs, by name. `quantize` then needs the same numbers.

    Raises:
        CalibrationError: a value is NaN or infinite, or `output` contains statistics of different data or of a
            different model.
        OutputError: `output` contains links, or files that edgeq did not write.
        UsageError: an argument has the wrong type.
        DataError: the samples cannot be opened.
    """
    model, directory = path_of(model), path_of(output, "output") if output is not None else None
    if directory is not None:
        recover(directory)
    earlier = None
    if resume and directory is not None and directory.exists():
        check_regular(directory)
        earlier = load_statistics(directory)
    mine, kept = force or earlier is not None, earlier is not None

    def save(partial: Statistics) -> None:
        """Write the current statistics into `directory`, if there is one."""
        # Without `force`, the first save does not replace anything. Each later save replaces the previous one.
        nonlocal mine, kept
        counted = partial.complete or any(tensor.samples for tensor in partial.tensors.values())
        if directory is not None and counted:
            save_statistics(partial, directory, force=mine)
            mine = kept = True

    if directory is not None:
        check_directory(directory, force=mine)
        check_apart(directory, [*model_files(model), *_existing(data)])
    with scratch_folder("edgeq-calibrate-") as folder, open_workers(workers) as opened:
        prepared = prepare_model(model, Path(folder), fix=fix, progress=progress)
        samples = open_or_search(
            in_role(as_data(data) or Data(data), "calibration"),
            prepared.signature,
            session=lambda: open_session(prepared.path),
            preprocess=preprocess,
            count=count,
            start=start,
            stride=stride,
            model=model,
            progress=progress,
        )
        before = earlier.samples if earlier is not None else 0
        began = time.monotonic()
        passes: list[tuple[float, float]] = []
        try:
            statistics = collect(
                prepared.model,
                samples,
                _recorded(prepared, model, skip),
                model_digest=prepared.digest,
                memory=memory,
                threads=threads,
                workers=opened,
                every_element=every_element,
                start=earlier,
                checkpoint=save,
                checkpoint_seconds=checkpoint_seconds,
                timed=lambda running, counting: passes.append((running, counting)),
                progress=progress,
            )
        except KeyboardInterrupt:
            if kept:
                progress.note(f"the statistics so far are kept in {directory}: --resume continues from them")
            raise
    seconds = time.monotonic() - began
    done = statistics.samples - before
    share = sum(counting for _, counting in passes) / (sum(map(sum, passes)) or 1.0)
    parts = f" (inference {1 - share:.0%}, counting {share:.0%})" if passes else ""
    progress.note(f"{done} samples in {seconds:.1f} s, {done / seconds:.1f} samples/s{parts}")
    save(statistics)
    return statistics


def merge_to(parts: Sequence[Path], directory: Path, *, force: bool = False) -> Statistics:
    """Merge folders of statistics into a new folder. The order of `parts` does not matter."""
    if len(parts) < 2:
        raise UsageError("merging needs at least two parts", "Name the folders of all shards")
    check_directory(directory, force=force)
    check_apart(directory, parts)
    whole = load_statistics(parts[0])
    for part in parts[1:]:
        try:
            whole = whole.merge(load_statistics(part))
        except CalibrationError as error:
            raise CalibrationError(f"{part} cannot be merged: {error.problem}", error.fix) from error
    save_statistics(whole, directory, force=force)
    return whole


def _existing(data: Any) -> tuple[Path, ...]:
    """Return the file or folder that `data` names. Return nothing if `data` is a pattern or an iterable."""
    data = data.source if isinstance(data, Data) else data
    return (Path(data),) if isinstance(data, (str, Path)) and Path(data).exists() else ()


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


def parse_bytes(text: str) -> int:
    """Return the number of bytes in "500MB", "2 GiB", "1e9" or plain digits. Decimal prefixes are powers of ten, binary
    prefixes are powers of two.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?", text.lower().strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 1 <= number < 1e18:
        raise UsageError(f"--memory {text!r} is not a size", "Write 500MB or 2GB")
    power = " kmgt".index(match[2] or " ")
    return int(number * (1024 if match[3] else 1000) ** power)
