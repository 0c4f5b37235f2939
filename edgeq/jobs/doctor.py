"""Implement `edgeq doctor`, which checks the installation and shows what works. If requested, it also runs a model on
the GPU.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from edgeq_device.bundle.package import open_bundle
from edgeq_device.bundle.select import judge
from edgeq_device.bundle.selftest import run_selftest
from edgeq_device.engines.device import read_device
from edgeq_device.engines.sessions import open_session as open_on_device
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import DeviceError
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.system.gpus import read_gpus
from edgeq_device.system.places import scratch_folder

from edgeq import demo
from edgeq.backends.base import REGISTRY as BACKENDS
from edgeq.backends.base import DoctorCheck, Status
from edgeq.data.open_source import Data
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.engines import detect_engines, hardware_problem, simulates
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.jobs.package import package
from edgeq.prove.engine_check import EngineDiagnosis, check_engine
from edgeq.run.engines import load_engines
from edgeq.run.session import onnxruntime, open_session
from edgeq.util.display import SILENT, Progress

_TIMED_RUNS = 50


def doctor(*, gpu: bool = False, progress: Progress = SILENT) -> EngineDiagnosis:
    """Check this machine.

    Args:
        gpu: also build, run and time the demo model on the GPU. This takes minutes, because TensorRT builds an engine.
    """
    machine = detect_machine()
    checks = [
        *_software(machine),
        _runs_on_cpu(),
        *_engines(machine, progress),
        *(check for _, backend in BACKENDS.items() for check in backend.doctor(machine)),
    ]
    if gpu:
        checks += _on_gpu(progress)
    return EngineDiagnosis(tuple(checks))


def _software(machine: Machine) -> Iterator[DoctorCheck]:
    yield DoctorCheck("Python", "ok", platform.python_version())
    ort = onnxruntime()
    both = {"onnxruntime", "onnxruntime-gpu"} <= set(machine.runtimes)
    providers = ", ".join(ort.get_available_providers())
    if both:
        yield DoctorCheck(
            "onnxruntime", "failed", "it is installed next to onnxruntime-gpu: uninstall both, then install one"
        )
    else:
        yield DoctorCheck("onnxruntime", "ok", f"{ort.__version__} with {providers}")
    names = ("faster-coco-eval", "pycocotools")
    package = next((f"{name} {version}" for name in names if (version := _version(name))), "")
    detail = package or f"install one of {', '.join(names)} to use it"
    yield DoctorCheck("COCO evaluation", "ok" if package else "absent", detail)
    match = match_profile(machine, load_profiles())
    yield DoctorCheck("profile", "ok", f"{match.profile.name}: {match.profile.title}")


def _runs_on_cpu() -> DoctorCheck:
    session = open_session(demo.MODEL)
    return DoctorCheck("CPU kernels", "ok", f"the demo model loads and has {len(session.get_outputs())} output")


def _engines(machine: Machine, progress: Progress) -> Iterator[DoctorCheck]:
    """Check the plug-in engines, each in its own process. A plug-in that is not installed is not an error."""
    engines = load_engines()
    for state in detect_engines(machine, engines):
        name = f"engine {state.name}"
        if not engines[state.name].module:
            continue
        if not state.usable:
            fits = state.version and not hardware_problem(engines[state.name], machine, state.version)
            broken = fits and not simulates(engines[state.name], machine)
            status: Status = "failed" if broken else "ok" if fits else "absent"
            yield DoctorCheck(name, status, state.problem or f"{state.title}: {state.install}")
            continue
        with progress.stage(f"Loading {state.name}"):
            right, detail = check_engine(engines[state.name], state.precisions)
        yield DoctorCheck(name, "ok" if right else "failed", f"{state.version}: {detail}")


def _on_gpu(progress: Progress) -> Iterator[DoctorCheck]:
    gpus, problem = read_gpus()
    if not gpus:
        yield DoctorCheck("GPU run", "not run", problem)
        return
    # With several GPUs, the most capable one decides the profile.
    best = max(gpus, key=lambda gpu: gpu.compute_capability)
    fitting = [
        profile
        for profile in load_profiles().values()
        if profile.min_compute_capability is not None and profile.min_compute_capability <= best.compute_capability
    ]
    if not fitting:
        yield DoctorCheck("GPU run", "not run", f"there is no profile for {best.name}")
        return
    target = max(fitting, key=lambda profile: profile.rank).name
    with scratch_folder("edgeq-doctor-") as folder:
        bundle = Path(folder) / "bundle"
        package(demo.MODEL, Data(demo.CALIBRATION), bundle, targets=(target,), timed=False, progress=progress)
        with open_bundle(bundle) as content:
            device = read_device()
            for variant in itertools.chain.from_iterable(content.components.values()):
                verdict = judge(variant, device)
                if verdict.fits:
                    yield _run(variant)
                else:
                    yield DoctorCheck(f"run {variant.name}", "not run", "; ".join(verdict.reasons))


def _run(variant: Variant, clock: Callable[[], float] = time.perf_counter) -> DoctorCheck:
    """Open a variant, compare its outputs with those of the simulation, and time it."""
    name = f"run {variant.name}"
    try:
        start = clock()
        session = open_on_device(variant)
        opening_s = clock() - start
        result = run_selftest(variant, session)
    except DeviceError as error:
        return DoctorCheck(name, "failed", str(error))
    worst = max((check.max_abs_error / check.tolerance for check in result.outputs if check.tolerance), default=0.0)
    if not result.passed:
        return DoctorCheck(
            name, "failed", f"its outputs differ from the simulation's by {worst:.2g} times the tolerance"
        )
    # The self-test has warmed up the session, so the timed runs need no warm-up of their own.
    feeds = read_arrays(variant.cases[0].inputs)
    times = []
    for _ in range(_TIMED_RUNS):
        start = clock()
        session.run(None, feeds)
        times.append(clock() - start)
    notes = "".join(f"; {note}" for note in getattr(session, "notes", ()))
    p50 = statistics.median(times) * 1e3
    detail = f"p50 {p50:.3f} ms, {worst:.2g} times the tolerance from the simulation, {opening_s:.1f} s to open{notes}"
    return DoctorCheck(name, "ok", detail)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
