"""Check that the engines a user chose exist for the targets, and that the runner on devices supports them."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq_device.engines.catalog import find_library, find_plugin

from edgeq.backends.base import backend_named
from edgeq.errors import UsageError
from edgeq.hardware.target import Target, find_application_engine
from edgeq.run.engines import Engine, EngineChoice
from edgeq.run.session import onnxruntime
from edgeq.util.device_errors import device_errors


def check_engines(engines: Sequence[EngineChoice], targets: Sequence[Target]) -> tuple[EngineChoice, ...]:
    """Return the plug-ins among `engines` without duplicates. Leave out onnxruntime's own kernels, because every bundle
    contains a variant for them.

    Raises:
        UsageError: an engine supports none of `targets`, or the runner on devices does not support the engine.
        RuntimeUnavailableError: an engine cannot be used here. The error shows the command that helps.
    """
    plugins = tuple({choice.name: choice for choice in engines if choice.engine.module}.values())
    for choice in plugins:
        if find_plugin(choice.engine.provider) is None:
            raise UsageError(f"the runner on devices does not know the engine {choice.name}", "Leave ⟨engine⟩ out")
        if any(is_other_precision(choice, target) for target in targets):
            continue
        if not any(exists_for(choice.engine, target) for target in targets):
            named = ", ".join(target.name for target in targets)
            raise UsageError(f"there is no {choice.engine.name} for {named}", "Leave ⟨engine⟩ out")
        # Fail here and not after hours of builds.
        with device_errors():
            find_library(choice.engine, str(onnxruntime().__version__))
    return plugins


def is_other_precision(choice: EngineChoice, target: Target) -> bool:
    """Return whether `choice` is the engine that applications on `target` use, in a precision other than the engine's
    first one, for which the target's CPU has instructions.
    """
    engine = find_application_engine(target)
    if engine is None or engine.name != choice.engine.name or choice.precision == next(iter(engine.precisions)):
        return False
    return choice.precision in engine.fast_precisions(target.features)


def exists_for(engine: Engine, target: Target) -> bool:
    """Return whether `engine` supports the kind of processor and the architecture of `target`."""
    if not backend_named(target.backend).runs_engines:
        return False
    kind = "CPU" if target.profile.min_compute_capability is None else "GPU"
    # A platform is an operating system and an architecture.
    made_for = {platform.split()[1] for platform in engine.platforms}
    return kind in engine.devices and (not made_for or target.architecture in made_for)
