"""`edgeq doctor`: what is installed here, what works, and, with a GPU, the real thing."""

from __future__ import annotations

import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from edgeq_device.arrays import read_arrays
from edgeq_device.cuda import read_gpus
from edgeq_device.engines import FLOAT
from edgeq_device.errors import DeviceError
from edgeq_device.opening import run_selftest
from edgeq_device.package import open_bundle
from edgeq_device.select import judge
from edgeq_device.sessions import open_session as open_on_device
from edgeq_device.sessions import read_device
from edgeq_device.variants import Variant

from edgeq import demo
from edgeq.backends.base import REGISTRY as BACKENDS
from edgeq.backends.base import Check, Status
from edgeq.data.open_source import Data
from edgeq.emulate.emulator import integer_model
from edgeq.errors import CheckFailedError, EdgeqError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.engines import detect_engines, hardware_problem, simulates
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.jobs.package import package
from edgeq.measure.comparison import decibels
from edgeq.model.edit import bytes_of_text
from edgeq.run.engines import Engine, load_engines
from edgeq.run.session import Guest, SessionSettings, onnxruntime, open_session, start_engine
from edgeq.util.display import SILENT, Progress

_TIMED_RUNS = 50


LEAST_DB = 90.0
"""How close f32 must come to ONNX Runtime's float32: what rounding in another order leaves, and bf16 does not."""
_PRODUCTS = 256
_CPU = "CPU"
# What one step of difference in some of 256 leaves.
_LEAST_PAIRS_DB = 30.0
_PAIRS = """<ir_version: 8, opset_import: ["": 17]>
pairs (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] y)
<float fine = {0.03}, uint8 middle = {128}, float small = {0.01}, int8 none = {0}, float coarse = {0.25}> {
    q = QuantizeLinear(x, fine, middle)
    d = DequantizeLinear(q, fine, middle)
    f = DequantizeLinear(w, small, none)
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(d, f)
    r = QuantizeLinear(c, coarse, middle)
    y = DequantizeLinear(r, coarse, middle)
}"""
# Products of two weights of 7 bits and two activations of 8 bits fit into 16 bits.
_SMALL, _LARGE = 63, 127


def check_engine(engine: Engine, precisions: tuple[str, ...]) -> tuple[bool, str]:
    """Return whether the answers of an installed plug-in are right, and what was found, in one line.

    Args:
        precisions: those to try besides f32.
    """
    if _CPU not in engine.devices:
        return _check_elsewhere(engine, precisions)
    try:
        with start_engine(engine) as guest, tempfile.TemporaryDirectory(prefix="edgeq-doctor-") as folder:
            exact = {largest: _wrong_by(guest, engine, Path(folder), largest) for largest in (_SMALL, _LARGE)}
            db = {name: _agreement(guest, engine, name) for name in dict.fromkeys((FLOAT, *precisions))}
    except EdgeqError as error:
        return False, str(error)
    faults = []
    if exact[_SMALL]:
        faults.append(f"int8 answers are wrong by up to {exact[_SMALL]:.2g} of the largest")
    if db[FLOAT] < LEAST_DB:
        faults.append(_not_float32(db[FLOAT]))
    if faults:
        return False, "; ".join(faults)
    limit = f"8-bit weights saturate, by up to {exact[_LARGE]:.2g} of the largest answer" if exact[_LARGE] else "exact"
    figures = ", ".join(f"{name} {value:.1f} dB" for name, value in db.items())
    return True, f"int8 {limit}; to onnxruntime's float32: {figures}"


def _check_elsewhere(engine: Engine, precisions: tuple[str, ...]) -> tuple[bool, str]:
    """Check an engine for other hardware, which need not round as CPUs do: a convolution between Q/DQ pairs, held
    against ONNX Runtime's kernels, and the float demo model, unless the engine runs only what a backend has built for
    it."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 16, 8, 8)).astype(np.float32)
    model = bytes_of_text(_PAIRS, {"w": random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)})
    try:
        with start_engine(engine) as guest, tempfile.TemporaryDirectory(prefix="edgeq-doctor-") as folder:
            file = Path(folder) / "pairs.onnx"
            file.write_bytes(model)
            found = guest.open(file, SessionSettings(engine=engine)).run(None, {"x": x})[0]
            right = open_session(file).run(None, {"x": x})[0].astype(np.float64)
            floats = () if engine.int8.backend else dict.fromkeys((FLOAT, *precisions))
            db = {name: _agreement(guest, engine, name) for name in floats}
    except EdgeqError as error:
        return False, str(error)
    if db and db[FLOAT] < LEAST_DB:
        return False, _not_float32(db[FLOAT])
    pairs = decibels(float((right**2).sum()), float(((found - right) ** 2).sum()))
    kind = "its simulator" if engine.simulated else "it"
    figures = "".join(f", {name} {value:.1f} dB" for name, value in db.items())
    what = f"a Q/DQ convolution in {kind}: {pairs:.1f} dB to onnxruntime's CPU kernels{figures}"
    return pairs >= _LEAST_PAIRS_DB, what


def _not_float32(db: float) -> str:
    return f"f32 is not float32: {db:.1f} dB to ONNX Runtime's, {LEAST_DB:g} at least"


def _wrong_by(guest: Guest, engine: Engine, folder: Path, largest: int) -> float:
    """Return the largest error of an integer Conv and MatMul with weights up to ±`largest`, as a share of the largest
    answer."""
    random = np.random.default_rng(largest)
    weights = random.integers(-largest, largest + 1, (16, _PRODUCTS)).astype(np.int8)
    weights[0] = largest
    samples = random.integers(0, 256, (4, _PRODUCTS)).astype(np.float32)
    samples[0] = 255
    file = folder / f"integers-{largest}.onnx"
    file.write_bytes(integer_model(weights))
    session = guest.open(file, SessionSettings(engine=engine))
    right = samples.astype(np.int64) @ weights.T.astype(np.int64)
    found = session.run(["conv", "product"], {"x": samples[:, :, None, None]})
    worst = max(np.abs(values.reshape(right.shape) - right).max() for values in found)
    return float(worst / np.abs(right).max())


def _agreement(guest: Guest, engine: Engine, precision: str) -> float:
    """SQNR in dB of the demo model in `engine` to ONNX Runtime's float32."""
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:8]}
    right = open_session(demo.MODEL).run(None, feed)[0].astype(np.float64)
    found = guest.open(demo.MODEL, SessionSettings(engine=engine, precision=precision)).run(None, feed)[0]
    return decibels(float((right**2).sum()), float(((found - right) ** 2).sum()))


@dataclass(frozen=True)
class Diagnosis:
    """All checks, in order."""

    checks: tuple[Check, ...]

    def check(self, *, gpu: bool) -> None:
        """Raise CheckFailedError where something failed, or where required GPU checks did not run."""
        bad = [c for c in self.checks if c.status == "failed" or (gpu and c.status == "not run")]
        if bad:
            raise CheckFailedError(f"{bad[0].name}: {bad[0].detail}", "See the checks above")


def doctor(*, gpu: bool = False, progress: Progress = SILENT) -> Diagnosis:
    """Check this machine.

    Args:
        gpu: also build, run and time the demo model on the GPU. Takes minutes: TensorRT builds an engine.
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
    return Diagnosis(tuple(checks))


def _software(machine: Machine) -> Iterator[Check]:
    yield Check("Python", "ok", platform.python_version())
    ort = onnxruntime()
    both = {"onnxruntime", "onnxruntime-gpu"} <= set(machine.runtimes)
    providers = ", ".join(ort.get_available_providers())
    if both:
        yield Check("onnxruntime", "failed", "it is installed beside onnxruntime-gpu: uninstall both, then install one")
    else:
        yield Check("onnxruntime", "ok", f"{ort.__version__} with {providers}")
    names = ("faster-coco-eval", "pycocotools")
    found = next((f"{name} {version}" for name in names if (version := _version(name))), "")
    detail = found or f"install one of {', '.join(names)} to have it"
    yield Check("COCO evaluation", "ok" if found else "absent", detail)
    match = match_profile(machine, load_profiles())
    yield Check("profile", "ok", f"{match.profile.name}: {match.profile.title}")


def _runs_on_cpu() -> Check:
    session = open_session(demo.MODEL)
    return Check("CPU kernels", "ok", f"the demo model loads and has {len(session.get_outputs())} output")


def _engines(machine: Machine, progress: Progress) -> Iterator[Check]:
    """Check the plug-in engines, each in a process of its own. Nothing is wrong where one is not installed."""
    known = load_engines()
    for state in detect_engines(machine, known):
        name = f"engine {state.name}"
        if not known[state.name].module:
            continue
        if not state.usable:
            there = state.version and not hardware_problem(known[state.name], machine, state.version)
            broken = there and not simulates(known[state.name], machine)
            status: Status = "failed" if broken else "ok" if there else "absent"
            yield Check(name, status, state.problem or f"{state.title}: {state.install}")
            continue
        with progress.stage(f"Loading {state.name}"):
            right, found = check_engine(known[state.name], state.precisions)
        yield Check(name, "ok" if right else "failed", f"{state.version}: {found}")


def _on_gpu(progress: Progress) -> Iterator[Check]:
    gpus, problem = read_gpus()
    if not gpus:
        yield Check("GPU run", "not run", problem)
        return
    best = max(gpus, key=lambda gpu: gpu.compute_capability)
    fitting = [
        profile
        for profile in load_profiles().values()
        if profile.min_compute_capability is not None and profile.min_compute_capability <= best.compute_capability
    ]
    if not fitting:
        yield Check("GPU run", "not run", f"no profile is for {best.name}")
        return
    target = max(fitting, key=lambda profile: profile.rank).name
    with tempfile.TemporaryDirectory(prefix="edgeq-doctor-") as folder:
        bundle = Path(folder) / "bundle"
        package(demo.MODEL, Data(demo.CALIBRATION), bundle, targets=(target,), timed=False, progress=progress)
        with open_bundle(bundle) as opened:
            device = read_device()
            for variant in itertools.chain.from_iterable(opened.components.values()):
                verdict = judge(variant, device)
                if verdict.fits:
                    yield _run(variant)
                else:
                    yield Check(f"run {variant.name}", "not run", "; ".join(verdict.reasons))


def _run(variant: Variant, clock: Callable[[], float] = time.perf_counter) -> Check:
    """Open a variant, compare it with the simulation, and time it."""
    name = f"run {variant.name}"
    try:
        start = clock()
        session = open_on_device(variant)
        opened = clock() - start
        result = run_selftest(variant, session)
    except DeviceError as error:
        return Check(name, "failed", str(error))
    worst = max((check.max_error / check.tolerance for check in result.outputs if check.tolerance), default=0.0)
    if not result.passed:
        return Check(name, "failed", f"its outputs are {worst:.2g} tolerances from the simulation's")
    feeds = read_arrays(variant.cases[0].inputs)
    times = []
    for _ in range(_TIMED_RUNS):
        start = clock()
        session.run(None, feeds)
        times.append(clock() - start)
    notes = "".join(f"; {note}" for note in getattr(session, "notes", ()))
    p50 = statistics.median(times) * 1e3
    detail = f"p50 {p50:.3f} ms, {worst:.2g} tolerances from the simulation, {opened:.1f} s to open{notes}"
    return Check(name, "ok", detail)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
