"""The recoveries by name, and all stages of a build with some of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from edgeq.backends import backend_named
from edgeq.calibrate.collect import collect
from edgeq.calibrate.ranges import derive_ranges
from edgeq.errors import UsageError
from edgeq.hardware.target import Target
from edgeq.model.load import load_model, save_model
from edgeq.pipeline.job import Built, Job
from edgeq.progress import SILENT, Progress
from edgeq.scheme import Scheme
from edgeq.tune.recover.base import Recovery, State
from edgeq.tune.recover.bias import BiasCorrection
from edgeq.tune.recover.ranges import NonlinearRanges
from edgeq.tune.recover.rounding import WeightRounding

_ALL: tuple[Recovery, ...] = (NonlinearRanges(), WeightRounding(), BiasCorrection())

RECOVERIES: Mapping[str, Recovery] = MappingProxyType({recovery.name: recovery for recovery in _ALL})
"""All recoveries, in the order in which they are applied, whatever the order in which they are named."""

FREE: tuple[str, ...] = tuple(recovery.name for recovery in _ALL if recovery.free)
"""Those that cost no time on the device; all together are a good first try."""


def recoveries() -> Mapping[str, Recovery]:
    """All recoveries by name, in the order in which they are applied."""
    return RECOVERIES


def recover(
    job: Job,
    target: Target,
    scheme: Scheme,
    names: Sequence[str],
    destination: Path,
    *,
    progress: Progress = SILENT,
) -> Built:
    """Build the artifact for `target` by `scheme` at `destination`, with the recoveries `names` applied.

    Model recoveries come first, then statistics are collected anew if the model changed, then ranges, the build, and
    what edits the quantized file.

    Raises:
        UsageError: an unknown recovery, a scheme that is not static, or no calibration samples.
        EdgeqError: as the stages have it.
    """
    unknown = [name for name in names if name not in RECOVERIES]
    if unknown:
        raise UsageError(f"no recovery is called {unknown[0]!r}", f"There are {', '.join(RECOVERIES)}")
    if scheme.mode != "static" or job.statistics is None:
        raise UsageError("recoveries need a static scheme", "Choose one, or leave the recoveries out")
    if job.calibration is None:
        raise UsageError("recoveries need calibration samples", "Give them with --data")
    chosen = [recovery for name, recovery in RECOVERIES.items() if name in names]
    state = State(job.prepared, job.statistics, {}, scheme)
    with tempfile.TemporaryDirectory(prefix="edgeq-recover-") as folder:
        workdir = Path(folder)

        def apply(stage: str) -> None:
            nonlocal state
            for recovery in chosen:
                if recovery.stage == stage:
                    place = workdir / recovery.name
                    place.mkdir()
                    state = recovery.apply(state, job.calibration, place, progress)  # type: ignore[arg-type]

        apply("model")
        if state.prepared != job.prepared:
            prepared = state.prepared
            statistics = collect(prepared.path, job.calibration, model_digest=prepared.digest, progress=progress)
            state = state.replace(statistics=statistics)
        state = state.replace(
            ranges=derive_ranges(
                state.statistics,
                scheme.method,
                activation_type=scheme.activation_type,
                symmetric=scheme.activation_symmetric,
                options=scheme.method_options,
            )
        )
        apply("ranges")
        backend = backend_named(target.backend)
        state = state.replace(artifact=backend.build(state.prepared, state.ranges, state.scheme, destination))
        apply("artifact")
        artifact = state.artifact
        assert artifact is not None
        if artifact.model != destination:
            save_model(load_model(artifact.model, external_data="all"), destination)
    artifact = replace(artifact, model=destination, notes=(*artifact.notes, *state.notes))
    return Built(target, artifact, state.ranges)
