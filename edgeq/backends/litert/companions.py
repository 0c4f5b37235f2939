"""Write the files that accompany a .tflite file for a microcontroller: C++ sources and an NPU version of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from edgeq.backends.base import ESTIMATE, Artifact
from edgeq.backends.litert import ethosu, micro
from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.npus import find_compiler
from edgeq.data.samples import Samples
from edgeq.errors import EngineError, RuntimeUnavailableError
from edgeq.model.load import read_unchecked
from edgeq.run.engines import Engine
from edgeq.run.session import EngineFiles

_COMPILED = PurePosixPath("ethos-u/model_vela.tflite")
_TWIN = (
    "`../ethos-u/model_vela.tflite` is the same model, compiled by vela: register `resolver.AddEthosU()` and the "
    "operators that stay on the CPU, and use its bytes in place of `model.cc`. edgeq cannot run it: only vela ensures "
    "that its answers are those of the uncompiled file."
)


def with_sources(
    artifact: Artifact,
    engine: Engine,
    device: Mapping[str, Any],
    samples: Samples,
    folder: Path,
    *,
    count: int,
) -> Artifact:
    """Return `artifact` with the files that a microcontroller needs. If a tool is missing or fails, a note reports it.

    Args:
        engine: TFLite Micro, configured for files with integer inputs and outputs.
        device: the target's [device] table. Its "engine_options" are those of vela; a target without an Ethos-U has
            none.
        folder: private folder for the files; it does not exist yet.
        count: number of `samples` that become the self-test.
    """
    # The folder must be new, because every file in it becomes part of the bundle.
    folder.mkdir()
    file = EngineFiles(folder).convert_once(artifact.model, engine)
    # First, because the sources mention vela's file only if there is one.
    artifact = with_estimate(artifact, engine, device, folder)
    compiled = folder / _COMPILED.name
    files = {str(_COMPILED): compiled} if compiled.exists() else {}
    notes = artifact.notes
    try:
        network, twin = lower(read_unchecked(artifact.model), artifact.model), _TWIN if files else ""
        files |= micro.write_sources(
            artifact.model.stem, network, file, engine, samples, folder / micro.FOLDER, count=count, twin=twin
        )
    # The .tflite file is complete without sources, so a missing tool must not cost the user the whole bundle.
    except (RuntimeUnavailableError, EngineError) as error:
        notes = (*notes, f"no sources for TFLite Micro: {error.text}")
    return replace(artifact, files={**artifact.files, **files}, notes=notes)


def with_estimate(artifact: Artifact, engine: Engine, device: Mapping[str, Any], folder: Path) -> Artifact:
    """Return `artifact` with vela's estimate, and write vela's compiled file to `folder`.

    If vela is missing or fails, return `artifact` with a note. If the target has no Ethos-U, return `artifact`
    unchanged.

    Args:
        engine, device: the same as in `with_sources`.
    """
    options = device.get("engine_options", {})
    # The options of the targets with an Ethos-U are vela's.
    if not options or find_compiler(device) is not None:
        return artifact
    try:
        file = EngineFiles(folder).convert_once(artifact.model, engine)
        estimate = ethosu.compile_for(file, options, folder / _COMPILED.name, device.get("memories", {}))
    except (RuntimeUnavailableError, EngineError) as error:
        return replace(artifact, notes=(*artifact.notes, f"not compiled for the NPU: {error.text}"))
    details = {**artifact.details, ESTIMATE: estimate}
    return replace(artifact, details=details, notes=(*artifact.notes, *estimate.notes()))
