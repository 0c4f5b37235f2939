"""`edgeq audit`: the saturation audit of a model file or of a bundle's variant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.data.open_source import Data
from edgeq.data.samples import open_samples
from edgeq.emulate.audit import Audit, audit, graph_settings
from edgeq.errors import UsageError
from edgeq.hardware.target import Target
from edgeq.measure.bench import open_model, refuse_ignored
from edgeq.model.saturation import saturation_table
from edgeq.run.engines import DEFAULT, Engine, described
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import plain

_CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Audited:
    """What was audited, by whose kernels ("" for `target`: those of any CPU that they saturate on), and what came
    out."""

    name: str
    audit: Audit
    engine: str = DEFAULT
    target: str = ""

    def __record__(self) -> dict[str, Any]:
        return {"model": self.name, "engine": self.engine, "target": self.target, **plain(self.audit)}


def audit_saturation(
    path: Path,
    data: Data | None = None,
    *,
    reference: Path | None = None,
    variant: str | None = None,
    config: dict[str, str] | None = None,
    engine: Engine | None = None,
    target: Target | None = None,
    progress: Progress = SILENT,
) -> Audited:
    """Bound what can saturate in a quantized model by its weights and, with samples, measure what does.

    Args:
        path: a quantized model, or a bundle.
        data: samples to simulate it on.
        reference: the float model, to measure the loss by saturation against it; needs `data`.
        variant: of a bundle; None takes the one for this machine.
        config: session options that the model file is run with; a bundle's variant brings its own.
        engine: whose kernels; None takes those of the bundle's variant, else ONNX Runtime's own.
        target: where they run; nothing saturates on one with exact kernels. None: a CPU that they saturate on.

    Raises:
        UsageError: `reference` without `data`, or an engine of whose kernels there is no model.
        EdgeqError: as loading, reading and running have it.
    """
    if reference is not None and data is None:
        raise UsageError("a float model is compared on samples", "Give --data")
    settings = SessionSettings(config=config or {})
    refuse_ignored(settings, path)
    with open_model(path, settings, variant=variant) as loaded:
        plugin = engine if engine is not None and engine.module else described(loaded.settings.engine)
        name = plugin.name if plugin is not None else DEFAULT
        if plugin is not None and not plugin.int8.saturation:
            raise UsageError(f"nothing is known of how {name}'s kernels saturate", "Leave --engine out")
        if target is not None and not _saturates(target, plugin):
            return Audited(loaded.name, Audit(()), name, target.name)
        features = target.features if target is not None else frozenset[str]()
        samples = None
        if data is not None:
            samples = open_samples(data, loaded.signature, preprocess=loaded.preprocess, progress=progress)
        found = audit(
            loaded.model,
            graph_settings(loaded.settings) if plugin is not None else loaded.settings,
            samples=samples,
            reference=open_session(reference) if reference is not None else None,
            count=data.count if data is not None else None,
            table=saturation_table(plugin.int8.saturation, features) if plugin is not None else None,
            progress=progress,
        )
        return Audited(loaded.name, found, name, target.name if target is not None else "")


def _saturates(target: Target, plugin: Engine | None) -> bool:
    if plugin is None:
        return bool(target.profile.hazards.get("saturates_int16"))
    return any(plugin.saturates(pair, target.architecture, target.features) for pair in plugin.int8.pairs)
