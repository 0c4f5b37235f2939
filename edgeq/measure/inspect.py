"""`edgeq.inspect`: what a model is, and what of it will run in int8 where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeq.hardware.target import AUTO, as_targets, resolve
from edgeq.model.inspect import ModelReport, inspect_model
from edgeq.model.load import path_of
from edgeq.util.display import SILENT, Progress


def inspect(
    model: str | Path,
    targets: str | Path | Sequence[str | Path] = (AUTO,),
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    progress: Progress = SILENT,
) -> ModelReport:
    """A model's operators, shapes and multiply-accumulates, and a forecast of what runs in int8 on each target.

    Args:
        targets: names of targets or profiles, or paths to TOML files, one or several; "auto" is this machine.
        shapes: sizes of inputs, where they are open, to count multiply-accumulates with.

    Raises:
        UsageError: `model` is no path.
        ModelError: not a model, or one that cannot be prepared for a forecast.
        HardwareError: an unknown target.
    """
    wanted = [(target.name, target.backend, target.profile.scheme) for target in map(resolve, as_targets(targets))]
    return inspect_model(path_of(model), wanted, shapes=shapes, progress=progress)
