"""`edgeq audit`: the saturation audit of a model file or of a bundle's variant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.data.samples import open_samples
from edgeq.emulate.saturation.audit import Audit, audit
from edgeq.errors import UsageError
from edgeq.measure.loaded_model import open_model
from edgeq.pipeline.job import Data
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.session import SessionSettings, open_session


@dataclass(frozen=True)
class Audited:
    """What was audited and what came out."""

    name: str
    audit: Audit

    def __record__(self) -> dict[str, Any]:
        return {"model": self.name, **plain(self.audit)}


def audit_saturation(
    path: Path,
    data: Data | None = None,
    *,
    reference: Path | None = None,
    variant: str | None = None,
    config: dict[str, str] | None = None,
    progress: Progress = SILENT,
) -> Audited:
    """Bound what can saturate in a quantized model by its weights and, with samples, measure what does.

    Args:
        path: a quantized model, or a bundle.
        data: samples to simulate it on.
        reference: the float model, to measure the loss by saturation against it; needs `data`.
        variant: of a bundle; None takes the one for this machine.
        config: session options that the model file is run with; a bundle's variant brings its own.

    Raises:
        UsageError: `reference` without `data`.
        EdgeqError: as loading, reading and running have it.
    """
    if reference is not None and data is None:
        raise UsageError("a float model is compared on samples", "Give --data")
    with open_model(path, SessionSettings(config=config or {}), variant=variant) as loaded:
        samples = None
        if data is not None:
            preprocess = data.preprocess if data.preprocess is not None else loaded.preprocess
            samples = open_samples(
                data.source, loaded.signature, preprocess=preprocess, labels=data.labels, progress=progress
            )
        found = audit(
            loaded.model,
            loaded.settings,
            samples=samples,
            reference=open_session(reference) if reference is not None else None,
            count=data.count if data is not None else None,
            progress=progress,
        )
        return Audited(loaded.name, found)
