"""The same model as an engine compiles it for a target here, beside the one that the device compiles itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
from edgeq_device.engines import installed_version

from edgeq.backends import Alternative
from edgeq.emulate.check import COMPILED
from edgeq.errors import CheckFailedError
from edgeq.pipeline.job import Built, Job
from edgeq.progress import SILENT, Progress
from edgeq.workers.engine import Engines

_SAMPLES = 2


def with_compiled(job: Job, built: Built, folder: Path, *, progress: Progress = SILENT) -> Built:
    """`built` with its compiled form among its alternatives, where the engine simulates its hardware here and can
    compile for it: loaded again, its answers are those of the model that it was made from.

    Args:
        folder: a private one, which does not exist.

    Raises:
        EngineError: the engine refuses the model.
        CheckFailedError: the compiled form answers otherwise.
    """
    artifact, target = built.artifact, built.target
    plugin = artifact.plugin
    if plugin is None or not artifact.in_simulator:
        return built
    folder.mkdir()
    file = folder / "compiled.onnx"
    with progress.stage(f"Compiling for {target.name}"), Engines() as engines:
        engines.compile(plugin.engine, artifact.model, file)
        sessions = [engines.open(model, artifact.settings()) for model in (artifact.model, file)]
        for sample in itertools.islice(job.validation, _SAMPLES):
            online, compiled = (session.run(None, dict(sample.inputs)) for session in sessions)
            if not all(map(np.array_equal, online, compiled)):
                raise CheckFailedError(f"{target.name}: what was compiled here answers otherwise", "Report this model")
    maker = f"{plugin.engine.packages[0]} {installed_version(plugin.engine)}"
    built_for = {"target": target.name, "profile": target.profile.name}
    requires = {**artifact.requires, **built_for, COMPILED: maker, **target.device.get("engine_options", {})}
    compiled_artifact = replace(artifact, model=file, requires=requires, alternatives=(), coverage=None)
    rank = target.profile.rank + 1
    title = f"{target.title}, compiled by {maker}"
    alternative = Alternative(f"{target.name}-compiled", title, rank, compiled_artifact, target.architecture)
    return replace(built, artifact=replace(artifact, alternatives=(alternative, *artifact.alternatives)))
