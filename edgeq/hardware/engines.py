"""Engines on this machine, from package metadata: no plug-in is imported or loaded on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeq_device.engines import find_library, install_command, installed_version, this_platform
from edgeq_device.errors import DeviceError
from edgeq_device.version import parse_version
from edgeq_device.wrong import WrongKernels, wrong_here

from edgeq.engines import DEFAULT, Engine
from edgeq.hardware.machine import Machine


@dataclass(frozen=True)
class EngineState:
    """One engine here.

    Attributes:
        version: of the package that brings it; "" where none is installed.
        problem: why it cannot be used though it is installed, else "".
        precisions: those that this machine has instructions for.
        int8_pairs: types of activations and weights that it has integer kernels for.
        install: the command that installs it; "" where it is installed.
    """

    name: str
    title: str
    version: str
    problem: str
    precisions: tuple[str, ...]
    int8_pairs: tuple[str, ...]
    install: str

    @property
    def usable(self) -> bool:
        """Whether it is installed and nothing is known against it."""
        return bool(self.version) and not self.problem


def detect_engines(machine: Machine, engines: Mapping[str, Engine]) -> tuple[EngineState, ...]:
    """The engines that are installed, and those that are not and have hardware here: onnxruntime's own first."""
    states = []
    runtime = installed_version(engines[DEFAULT])
    for engine in sorted(engines.values(), key=lambda e: (bool(e.module), e.name)):
        version = installed_version(engine)
        if version or _would_run(engine, machine):
            states.append(
                EngineState(
                    name=engine.name,
                    title=engine.title,
                    version=version,
                    problem=_problem(engine, runtime) if version else "",
                    precisions=engine.fast_precisions(machine.features),
                    int8_pairs=engine.int8.pairs,
                    install="" if version else install_command(engine),
                )
            )
    return tuple(states)


def wrong_on(machine: Machine) -> tuple[WrongKernels, ...]:
    """What the onnxruntime that is installed here is known to compute wrongly on this machine."""
    installed = machine.onnxruntime
    return wrong_here(installed, machine.architecture, machine.features) if installed else ()


def _problem(engine: Engine, runtime: str) -> str:
    try:
        if engine.module:
            find_library(engine, runtime)
    except DeviceError as error:
        return str(error)
    return ""


def _would_run(engine: Engine, machine: Machine) -> bool:
    """Whether this machine is known to have what `engine` runs on."""
    here = this_platform()
    if engine.platforms and here not in engine.platforms:
        return False
    if engine.min_compute_capability:
        least = parse_version(engine.min_compute_capability)
        return any(gpu.compute_capability >= least for gpu in machine.gpus)
    return here in engine.present_on or engine.devices == ("CPU",)
