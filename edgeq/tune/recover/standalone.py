"""Recoveries by themselves: what `edgeq quantize --recover` and `edgeq.recovering` build with."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from edgeq.errors import CheckFailedError, UsageError
from edgeq.hardware.target import Target
from edgeq.measure.agreement import compare_sessions
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.quantize import Builder
from edgeq.progress import Progress
from edgeq.registry import RECOVERIES
from edgeq.scheme import Scheme
from edgeq.session import open_session
from edgeq.tune.float_layers import select_float_layers
from edgeq.tune.recover.exclude import rank_static
from edgeq.tune.recover.run import Recoverer

_SAMPLES = 16


def recovering(*names: str, min_sqnr_db: float | None = None) -> Builder:
    """Builds with the recoveries `names`, in whatever order they are named: `edgeq.quantize(..., builder=this)`.

    Args:
        min_sqnr_db: keep layers in float until the outputs follow the float model's that closely (worst output, on
            calibration samples): the fewest microseconds that do it, by the runtime's own profile.

    Raises:
        UsageError: an unknown recovery, or a bound that is no finite number.
    """
    if min_sqnr_db is not None and not math.isfinite(min_sqnr_db):
        raise UsageError(f"--min-sqnr {min_sqnr_db} is no number of decibels", "Write one such as 20")
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"a recovery is given as {type(name).__name__}", "Give names, one after the other")
        RECOVERIES.check(name)

    def build(job: Job, target: Target, scheme: Scheme, destination: Path, progress: Progress) -> Built:
        """Build with the recoveries, and with layers in float until `min_sqnr_db` is met."""
        with tempfile.TemporaryDirectory(prefix="edgeq-recover-") as folder:
            recoverer = Recoverer(job, target, Path(folder))
            if min_sqnr_db is not None:
                if scheme.mode != "static":
                    raise UsageError("--min-sqnr needs a static scheme", "Leave it out, or choose another scheme")
                scheme = _closer(recoverer, job, scheme, names, min_sqnr_db, progress)
            return recoverer.build(scheme, names, destination, progress=progress)

    return build


def _closer(
    recoverer: Recoverer, job: Job, scheme: Scheme, names: tuple[str, ...], min_sqnr_db: float, progress: Progress
) -> Scheme:
    """The scheme with as few layers in float as it takes, by cost."""
    reference = open_session(job.prepared.path)
    best = -float("inf")

    def loss(tried: Scheme) -> float:
        """Negated SQNR in dB of the outputs under a scheme, against float32, so that less is better."""
        nonlocal best
        artifact = recoverer.state(tried, names, recoverer.place() / "tried.onnx").artifact
        assert artifact is not None
        assert job.calibration is not None
        session = open_session(artifact.model, artifact.settings())
        found = compare_sessions(reference, session, job.calibration, count=_SAMPLES).sqnr_db
        best = max(best, found)
        progress.note(f"{len(tried.exclude)} nodes in float: {found:.1f} dB")
        return -found

    def in_float(nodes: tuple[str, ...]) -> Scheme:
        """The scheme with `nodes` excluded, too."""
        return scheme.replace(exclude=(*scheme.exclude, *nodes))

    if loss(scheme) <= -min_sqnr_db:
        return scheme
    ranking = rank_static(recoverer, job, scheme, names, progress=progress)
    found = select_float_layers(ranking, lambda nodes: loss(in_float(nodes)), -min_sqnr_db, lambda: False)
    if not found:
        raise CheckFailedError(
            f"{job.source}: layers in float bring the outputs to {best:.1f} dB, not to {min_sqnr_db:g}",
            "Ask for less, add --recover, or choose another scheme",
        )
    return in_float(found[-1])
