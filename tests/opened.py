"""A job that is ready to build, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeq.data.open_source import Data
from edgeq.prove.job import Job, Request, collect_statistics


def open_job(
    model: Path,
    data: Data | None,
    validation: Data | None,
    workdir: Path,
    *,
    statistics: Path | None = None,
    **options: Any,
) -> Job:
    """Prepare `model`, open its samples and, if anything static is to be built, calibrate."""
    request = Request(model, data, validation, statistics, None)
    return collect_statistics(request.prepare(workdir, **options), statistics)
