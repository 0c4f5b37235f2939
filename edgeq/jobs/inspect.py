"""Implement `edgeq inspect`, which describes a model and predicts how targets will run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.backends.base import backend_for
from edgeq.data.sample import Sample
from edgeq.describe.facts import Fact, ModelFacts
from edgeq.describe.read import describe_file, explain_extensions
from edgeq.errors import EdgeqError, ModelError
from edgeq.hardware.target import AUTO, as_targets, resolve
from edgeq.measure.find_head import fit_families, make_view
from edgeq.model.inspect import ModelReport, inspect_model
from edgeq.run.session import open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.paths import path_of

_SHOWN = 5
# A run of a larger model takes seconds, which a look at a model should not.
_MOST_MACS = 10**11


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
    backends = {target.name: backend_for(target) for target in resolved}
    refusals = {name: backend.refusals for name, backend in backends.items()}
    remarks = {name: backend.remarks for name, backend in backends.items()}
    path = path_of(model)
    try:
        report = inspect_model(path, rows, refusals=refusals, remarks=remarks, shapes=shapes, progress=progress)
    except ModelError as error:
        raise explain_extensions(path, error) from error.__cause__
    facts = describe_file(path)
    head, note = _guess_head(path, report, facts)
    stated = {name: {"value": _shorten(fact), "source": fact.source} for name, fact in facts.stated.items()}
    return replace(report, facts=stated, head=head, notes=(*report.notes, *facts.notes, *note))


def _shorten(fact: Fact[Any]) -> str:
    """Return a stated value in a few words, or the problem that its use would meet."""
    if fact.problem is not None:
        return f"unclear: {fact.problem.problem}"
    value = fact.stated
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return f"{len(value)} names: {', '.join(value[:_SHOWN])}{' …' if len(value) > _SHOWN else ''}"
    if isinstance(value, Mapping):
        return str(value.get("title") or ", ".join(f"{key} {item}" for key, item in value.items()))
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _guess_head(path: Path, report: ModelReport, facts: ModelFacts) -> tuple[Mapping[str, str] | None, tuple[str, ...]]:
    """Return the head that the outputs for a grey image fit, and a note if it is not certain.

    A grey image shows the shapes, but its values may be those of several heads.
    """
    image = next((spec for spec in report.signature.inputs if len(spec.shape or ()) == 4), None)
    if image is None or len(report.signature.inputs) > 1 or report.macs > _MOST_MACS:
        return None, ()
    shape = report.assumed.get(image.name) or tuple(size if isinstance(size, int) else 1 for size in image.shape or ())
    grey = Sample("a grey image", {image.name: np.full(shape, 0.5, image.dtype)})
    try:
        view = make_view(open_session(path), report.signature, grey, facts)
        fits = fit_families(view, facts)
    # A head is only a further remark: the outputs may need a real image, or two files may contradict each other.
    except EdgeqError as error:
        return None, (f"the head is not looked for: {error.problem}",)
    if len(fits) != 1:
        listed = ", ".join(fits)
        return None, ((f"by the shapes of the outputs, the head may be {listed}; an image decides",) if fits else ())
    ((family, _),) = fits.values()
    stated = facts.families or facts.task
    source = f"{stated.source} and the outputs' shapes" if stated is not None else "the outputs' shapes"
    return {"family": family.name, "task": family.task, "source": source}, ()
