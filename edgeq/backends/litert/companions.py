"""Write the files that accompany a .tflite file for a microcontroller: C++ sources and an NPU version of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from edgeq.backends.base import ESTIMATE, Artifact
from edgeq.backends.litert import ethosu, micro
from edgeq.backends.litert.convert import lower
from edgeq.backends.litert.memory import MemoryForecast
from edgeq.backends.litert.npus import find_compiler
from edgeq.data.samples import Samples
from edgeq.errors import EngineError, RuntimeUnavailableError
from edgeq.hardware.target import Target
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
    target: Target | None,
    samples: Samples,
    folder: Path,
    *,
    count: int,
) -> Artifact:
    """Return `artifact` with the files that a microcontroller needs. If a tool is missing or fails, a note reports it.

    Args:
        engine: TFLite Micro, configured for files with integer inputs and outputs.
        target: the target, whose `[device] engine_options` are those of vela if it has an Ethos-U; None if the file is
            for no particular target.
        folder: private folder for the files; it does not exist yet.
        count: number of `samples` that become the self-test.
    """
    # The folder must be new, because every file in it becomes part of the bundle.
    folder.mkdir()
    file = EngineFiles(folder).convert_once(artifact.model, engine)
    # First, because the sources mention vela's file only if there is one.
    artifact = with_estimate(artifact, engine, target, folder)
    compiled = folder / _COMPILED.name
    files = {str(_COMPILED): compiled} if compiled.exists() else {}
    notes = artifact.notes
    try:
        network, twin = lower(read_unchecked(artifact.model), artifact.model), _TWIN if files else ""
        forecast = artifact.details.get(ESTIMATE)
        # The search for the arena takes seconds, so it runs once.
        arena = forecast.arena_bytes if isinstance(forecast, MemoryForecast) else micro.arena_bytes(file, engine)
        files |= micro.write_sources(
            artifact.model.stem,
            network,
            file,
            engine,
            samples,
            folder / micro.FOLDER,
            count=count,
            arena=arena,
            twin=twin,
        )
    # The .tflite file is complete without sources, so a missing tool must not cost the user the whole bundle.
    except (RuntimeUnavailableError, EngineError) as error:
        notes = (*notes, f"no sources for TFLite Micro: {error.text}")
    return replace(artifact, files={**artifact.files, **files}, notes=notes)


def with_estimate(artifact: Artifact, engine: Engine, target: Target | None, folder: Path) -> Artifact:
    """Return `artifact` with vela's estimate, and write vela's compiled file to `folder`. If the target is a
    microcontroller without an Ethos-U, return `artifact` with a forecast of its memories.

    If a tool is missing or fails, return `artifact` with a note. If the target is no microcontroller, return `artifact`
    unchanged.

    Args:
        engine, target: the same as in `with_sources`.
    """
    # A CPU has far more memory than these models need.
    if "CPU" in engine.devices or target is None:
        return artifact
    device = target.device
    options = device.get("engine_options", {})
    # The options of the targets with an Ethos-U are vela's.
    if not options or find_compiler(device) is not None:
        return _with_memories(artifact, engine, target, folder)
    try:
        file = EngineFiles(folder).convert_once(artifact.model, engine)
        estimate = ethosu.compile_for(file, options, folder / _COMPILED.name, device.get("memories", {}))
    except (RuntimeUnavailableError, EngineError) as error:
        return replace(artifact, notes=(*artifact.notes, f"not compiled for the NPU: {error.text}"))
    details = {**artifact.details, ESTIMATE: estimate}
    return replace(artifact, details=details, notes=(*artifact.notes, *estimate.notes()))


def _with_memories(artifact: Artifact, engine: Engine, target: Target, folder: Path) -> Artifact:
    try:
        file = EngineFiles(folder).convert_once(artifact.model, engine)
        arena = micro.arena_bytes(file, engine)
    except (RuntimeUnavailableError, EngineError) as error:
        return replace(artifact, notes=(*artifact.notes, f"no forecast of the memory: {error.text}"))
    forecast = MemoryForecast.of(arena, file.stat().st_size, target, engine.title)
    details = {**artifact.details, ESTIMATE: forecast}
    return replace(artifact, details=details, notes=(*artifact.notes, *forecast.notes()))
