"""Recoveries by themselves: what `edgeq quantize --recover` and `edgeq.recovering` build with."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from edgeq.errors import CheckFailedError, UsageError
from edgeq.hardware.target import Target
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.quantize import Builder
from edgeq.progress import Progress
from edgeq.registry import RECOVERIES
from edgeq.scheme import Scheme
from edgeq.tune.recover.closer import Search
from edgeq.tune.recover.no_worse import no_worse
from edgeq.tune.recover.run import Recoverer

_LISTED = 8


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
        """Build with the recoveries where they do no harm, and with layers in float until `min_sqnr_db` is met."""
        # Beside the prepared model, as an artifact may refer to files there for as long as the job lives.
        workdir = Path(tempfile.mkdtemp(prefix="recover-", dir=job.prepared.path.parent))
        recoverer = Recoverer(job, target, workdir)
        closer = scheme
        if min_sqnr_db is not None:
            if scheme.mode != "static":
                raise UsageError("--min-sqnr needs a static scheme", "Leave it out, or choose another scheme")
            closer = _closer(recoverer, job, scheme, names, min_sqnr_db, progress)
        recovered = recoverer.build(closer, names, destination, progress=progress)
        return no_worse(job, recovered, scheme, names, workdir, progress) if names else recovered

    return build


def _closer(
    recoverer: Recoverer, job: Job, scheme: Scheme, names: tuple[str, ...], min_sqnr_db: float, progress: Progress
) -> Scheme:
    """Return the scheme with as few layers in float as it takes, by cost."""
    search = Search(recoverer, job, scheme, names, progress=progress)
    found = search.reach(min_sqnr_db)
    if found is not None:
        return search.in_float(found)
    nodes, best = search.best
    if best == -math.inf:
        raise CheckFailedError(
            f"{job.source}: with no set of layers in float are the outputs finite",
            "Leave --min-sqnr out, and choose another scheme or `--exclude` nodes by hand",
        )
    shown = ", ".join(nodes[:_LISTED]) + (f" and {len(nodes) - _LISTED} more" if len(nodes) > _LISTED else "")
    kept = f"{len(nodes)} in float: {shown}" if nodes else "none in float"
    reached = math.floor(10 * best) / 10
    raise CheckFailedError(
        f"{job.source}: layers in float bring the outputs to {reached:.1f} dB, not to {min_sqnr_db:g} ({kept})",
        f"Type --min-sqnr {reached:.1f}, add --recover, or choose another scheme",
    )
