"""Find engines on this machine from package metadata, without importing or loading a plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeq_device.bundle.select import find_wrong_kernels
from edgeq_device.engines.catalog import (
    EngineSpec,
    WrongKernels,
    build_install_command,
    choose_form,
    describe_problem,
    describe_vendor_problem,
    parse_version,
    read_installed_version,
    read_platform,
)
from edgeq_device.system.gpus import Gpu, format_capability

from edgeq.hardware.detect import Machine
from edgeq.run.engines import DEFAULT, Engine


@dataclass(frozen=True)
class Installed:
    """Describe an engine on another machine. See `EngineState`.

    Attributes:
        version: the version of its package.
        problem: why it cannot be used on that machine; "" if it can.
    """

    version: str = ""
    problem: str = ""


@dataclass(frozen=True)
class EngineState:
    """Describe the state of one engine on this machine.

    Attributes:
        version: version of the package that contains the engine; "" if it is not installed.
        problem: why an installed engine cannot be used; "" if it can.
        precisions: precisions for which this machine has instructions.
        int8_pairs: pairs of activation and weight types for which the engine has integer kernels.
        install: the command that installs the engine; "" if the engine is already installed.
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
        """Return whether the engine is installed and has no known problem."""
        return bool(self.version) and not self.problem


def detect_engines(
    machine: Machine, engines: Mapping[str, Engine], elsewhere: Mapping[str, Installed] | None = None
) -> tuple[EngineState, ...]:
    """Return the installed engines, and the engines that could be installed for this hardware. onnxruntime's own engine
    comes first.

    Args:
        elsewhere: the engines of another machine, by name; `machine` then describes that machine.
    """
    states = []
    installed = _find_installed(engines) if elsewhere is None else elsewhere
    place = read_platform() if elsewhere is None else _name_platform(machine)
    # An engine without a module is onnxruntime's own, and False sorts first.
    for engine in sorted(engines.values(), key=lambda e: (bool(e.module), e.name)):
        package = installed.get(engine.name, Installed())
        version = package.version
        # The hardware's problem comes first: no new version of a package can solve it.
        problem = (version and hardware_problem(engine, machine, version)) or package.problem
        if version or _would_run(engine, machine, place):
            states.append(
                EngineState(
                    name=engine.name,
                    title=engine.title,
                    version=version,
                    problem=problem,
                    precisions=engine.fast_precisions(machine.features),
                    int8_pairs=engine.int8.pairs,
                    install=""
                    if version
                    else build_install_command(engine if elsewhere is None else _choose_form(engine, machine)),
                )
            )
    return tuple(states)


def simulates(engine: Engine, machine: Machine) -> bool:
    """Return whether the package of `engine` simulates its hardware on `machine`.

    If so, it is not an error that the engine itself cannot run on `machine`.
    """
    return _name_platform(machine) in engine.simulated_on


def _name_platform(machine: Machine) -> str:
    return f"{machine.os.lower().partition(' ')[0]} {machine.architecture}"


def list_wrong_kernels(machine: Machine) -> tuple[WrongKernels, ...]:
    """Return the operators or kernels that the installed onnxruntime is known to compute wrongly on this machine."""
    installed = machine.onnxruntime
    # Known faults belong to a release. Without an installed onnxruntime, there is nothing to warn of.
    return find_wrong_kernels(installed, machine.architecture, machine.features) if installed else ()


def _find_installed(engines: Mapping[str, Engine]) -> dict[str, Installed]:
    versions = {name: read_installed_version(engine) for name, engine in engines.items()}
    return {
        # onnxruntime's own engine has no module of its own that could fit badly.
        name: Installed(version, describe_problem(engines[name], versions[DEFAULT]) if engines[name].module else "")
        for name, version in versions.items()
        if version
    }


def hardware_problem(engine: Engine, machine: Machine, version: str) -> str:
    """Return why the hardware of `machine` cannot run this version of `engine`; "" if it may be able to.

    Such a problem is not an error of the engine or the machine.
    """
    return gpu_problem(engine, machine) or describe_vendor_problem(
        _choose_form(engine, machine), version, machine.vendor
    )


def _choose_form(engine: Engine, machine: Machine) -> EngineSpec:
    """Return the form in which `engine` is available on `machine`."""
    return choose_form(engine, _name_platform(machine), machine.vendor)


def gpu_problem(engine: Engine, machine: Machine) -> str:
    """Return why `engine` cannot run on any NVIDIA GPU of `machine`; "" if it can, or needs no GPU."""
    # One GPU that fits is enough, because the engine can be told which one to use.
    if not engine.compute_capabilities or any(_supports(engine, gpu) for gpu in machine.gpus):
        return ""
    required = ", ".join(engine.compute_capabilities).replace("+", " or newer")
    present = ", ".join(f"{gpu.name}: {format_capability(gpu.compute_capability)}" for gpu in machine.gpus)
    return f"it runs on NVIDIA GPUs of compute capability {required}; this machine has {present or 'none'}"


def _supports(engine: Engine, gpu: Gpu) -> bool:
    for text in engine.compute_capabilities:
        capability = parse_version(text.rstrip("+"))
        # Without "+", an engine was built for exactly one generation of GPUs.
        if gpu.compute_capability == capability or (text.endswith("+") and gpu.compute_capability > capability):
            return True
    return False


def _would_run(engine: Engine, machine: Machine, place: str) -> bool:
    """Return whether `machine` is known to have the hardware for `engine`.

    Args:
        place: the machine's platform, in the form of `read_platform`.
    """
    form = choose_form(engine, place, machine.vendor)
    if form.platforms and place not in form.platforms:
        return False
    # A machine that does not name its maker is not ruled out.
    if form.cpu_vendors and machine.vendor and machine.vendor not in form.cpu_vendors:
        return False
    if engine.compute_capabilities:
        return not gpu_problem(engine, machine)
    # A board's name settles what no feature shows, such as an accelerator on the same chip.
    if any(name in machine.board for name in engine.boards):
        return True
    return place in engine.present_on or engine.devices == ("CPU",)
