"""Implement `edgeq inspect`, which describes a model and predicts how targets will run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeq.backends.base import backend_for
from edgeq.hardware.target import AUTO, as_targets, resolve
from edgeq.model.inspect import ModelReport, inspect_model
from edgeq.util.display import SILENT, Progress
from edgeq.util.paths import path_of


def inspect(
    model: str | Path,
    targets: str | Path | Sequence[str | Path] = (AUTO,),
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    progress: Progress = SILENT,
) -> ModelReport:
    """Return a model's operators, shapes and multiply-accumulates, and a forecast of the nodes that run in int8 on each
    target. If the files of a target cannot express the model, the forecast names the nodes.

    Args:
        targets: one or several names of targets or profiles, or paths to TOML files; "auto" is this machine.
        shapes: sizes of inputs with open sizes, for counting multiply-accumulates.

    Raises:
        UsageError: `model` is not a path.
        ModelError: the file is not a model, or cannot be prepared for a forecast.
        HardwareError: a target is unknown.
    """
    resolved = [resolve(target) for target in as_targets(targets)]
    rows = [(target.name, target.backend, target.profile.scheme) for target in resolved]
    refusals = {target.name: backend_for(target).refusals for target in resolved}
    return inspect_model(path_of(model), rows, refusals=refusals, shapes=shapes, progress=progress)
