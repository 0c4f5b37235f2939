"""Open a job that is ready to build, or read a variant's entry in a bundle, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeq_device.bundle.package import MAIN, open_bundle

from edgeq.data.open_source import Data
from edgeq.prove.job import Job
from edgeq.prove.prepare import collect_statistics, prepare
from edgeq.prove.request import Request


def open_job(
    model: Path,
    data: Data | None,
    validation: Data | None,
    workdir: Path,
    *,
    statistics: Path | None = None,
    **options: Any,
) -> Job:
    """Prepare `model`, open its samples, and calibrate if any build will be static."""
    request = Request(model, data, validation, statistics, fix=options.pop("fix", {}))
    return collect_statistics(prepare(request, workdir, **options), statistics)


def variant_info(bundle: Path, name: str) -> dict[str, Any]:
    """Return a bundle's entry for a variant of the model."""
    with open_bundle(bundle) as found:
        return dict(next(one.info for one in found.components[MAIN] if one.name == name))
