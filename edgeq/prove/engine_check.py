"""Check whether an installed engine computes exactly in integers, and whether its float32 is really float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from edgeq_device.engines.catalog import FLOAT
from edgeq_device.system.places import scratch_folder

from edgeq import demo
from edgeq.backends.base import DoctorCheck
from edgeq.emulate.probe import build_integer_model
from edgeq.errors import CheckFailedError, EdgeqError
from edgeq.measure.power_ratios import decibels
from edgeq.model.convert import bytes_of_text
from edgeq.run.engines import Engine
from edgeq.run.session import EngineFiles, GuestProgram, SessionSettings, open_session, start_engine

LEAST_DB = 90.0
"""Minimum SQNR in dB of an engine's f32 against ONNX Runtime's float32. A different order of roundings stays above this
limit, but bf16 does not.
"""


_PRODUCTS = 256


_CPU = "CPU"


# The SQNR in dB that remains if some values on 256 levels differ by one step.
_LEAST_PAIRS_DB = 30.0


_PAIRS = """<ir_version: 8, opset_import: ["": 17]>
pairs (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] y)
<float fine = {0.03}, uint8 middle = {128}, float small = {0.01}, int8 none = {0}, float coarse = {0.25}> {
    q = QuantizeLinear(x, fine, middle)
    d = DequantizeLinear(q, fine, middle)
    f = DequantizeLinear(w, small, none)
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(d, f)
    LAST
}"""
# Some engines return the floats of a layer, and do not round them for a pair behind it.
_ROUNDED = "r = QuantizeLinear(c, coarse, middle) y = DequantizeLinear(r, coarse, middle)"
_UNROUNDED = "y = Identity(c)"


# The largest weights of two kinds of test. With weights up to _SMALL (7 bits), the sum of two products with 8-bit
# activations fits into 16 bits. With weights up to _LARGE (8 bits), the sum may not fit.
_SMALL, _LARGE = 63, 127


def check_engine(engine: Engine, precisions: tuple[str, ...]) -> tuple[bool, str]:
    """Return whether the outputs of an installed plug-in are correct, and the findings in one line.

    Args:
        precisions: the precisions to test besides f32.
    """
    if _CPU not in engine.devices or engine.suffix:
        return _check_elsewhere(engine, precisions)
    try:
        with start_engine(engine) as guest, scratch_folder("edgeq-doctor-") as folder:
            exact = {largest: _measure_error(guest, engine, Path(folder), largest) for largest in (_SMALL, _LARGE)}
            db = {name: _measure_agreement(guest, engine, name) for name in dict.fromkeys((FLOAT, *precisions))}
    except EdgeqError as error:
        return False, error.text
    faults = []
    if exact[_SMALL]:
        faults.append(f"int8 outputs are wrong by up to {exact[_SMALL]:.2g} of the largest")
    if db[FLOAT] < LEAST_DB:
        faults.append(_not_float32(db[FLOAT]))
    if faults:
        return False, "; ".join(faults)
    # Saturation with 8-bit weights is a property that edgeq can avoid, so it is not a fault.
    limit = f"8-bit weights saturate, by up to {exact[_LARGE]:.2g} of the largest output" if exact[_LARGE] else "exact"
    figures = ", ".join(f"{name} {value:.1f} dB" for name, value in db.items())
    return True, f"int8 {limit}; against onnxruntime's float32: {figures}"


def _check_elsewhere(engine: Engine, precisions: tuple[str, ...]) -> tuple[bool, str]:
    """Check an engine for other hardware, or an engine with its own file format. Such an engine need not round the way
    CPUs do.

    The check runs a convolution between Q/DQ pairs and compares the outputs with those of ONNX Runtime's kernels. It
    does the same with the float demo model, unless the engine runs only models that a backend built for it.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 16, 8, 8)).astype(np.float32)
    weights = {"w": random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)}
    models = [bytes_of_text(_PAIRS.replace("LAST", last), weights) for last in (_ROUNDED, _UNROUNDED)]
    try:
        with start_engine(engine) as guest, scratch_folder("edgeq-doctor-") as folder:
            file = Path(folder) / "pairs.onnx"
            file.write_bytes(models[0])
            session = guest.open(EngineFiles(Path(folder)).convert_once(file, engine), SessionSettings(engine=engine))
            outputs = session.run(None, {"x": x})[0]
            references = [open_session(model).run(None, {"x": x})[0].astype(np.float64) for model in models]
            floats = () if engine.int8.backend else dict.fromkeys((FLOAT, *precisions))
            db = {name: _measure_agreement(guest, engine, name) for name in floats}
    except EdgeqError as error:
        return False, error.text
    if db and db[FLOAT] < LEAST_DB:
        return False, _not_float32(db[FLOAT])
    pairs = max(decibels(float((y**2).sum()), float(((outputs - y) ** 2).sum())) for y in references)
    kind = "its simulator" if engine.simulated else "it"
    figures = "".join(f", {name} {value:.1f} dB" for name, value in db.items())
    detail = f"a Q/DQ convolution in {kind}: {pairs:.1f} dB against onnxruntime's CPU kernels{figures}"
    return pairs >= _LEAST_PAIRS_DB, detail


def _not_float32(db: float) -> str:
    return f"f32 is not float32: {db:.1f} dB against ONNX Runtime's, at least {LEAST_DB:g} needed"


def _measure_error(guest: GuestProgram, engine: Engine, folder: Path, largest: int) -> float:
    """Return the largest error of an integer Conv and MatMul with weights up to ±`largest`, as a share of the largest
    output.
    """
    random = np.random.default_rng(largest)
    weights = random.integers(-largest, largest + 1, (16, _PRODUCTS)).astype(np.int8)
    # The worst case: the largest weights meet the largest activations, all of one sign.
    weights[0] = largest
    samples = random.integers(0, 256, (4, _PRODUCTS)).astype(np.float32)
    samples[0] = 255
    file = folder / f"integers-{largest}.onnx"
    file.write_bytes(build_integer_model(weights))
    session = guest.open(file, SessionSettings(engine=engine))
    right = samples.astype(np.int64) @ weights.T.astype(np.int64)
    outputs = session.run(["conv", "product"], {"x": samples[:, :, None, None]})
    worst = max(np.abs(values.reshape(right.shape) - right).max() for values in outputs)
    return float(worst / np.abs(right).max())


def _measure_agreement(guest: GuestProgram, engine: Engine, precision: str) -> float:
    """Return the SQNR in dB of the demo model in `engine` against ONNX Runtime's float32."""
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:8]}
    right = open_session(demo.MODEL).run(None, feed)[0].astype(np.float64)
    outputs = guest.open(demo.MODEL, SessionSettings(engine=engine, precision=precision)).run(None, feed)[0]
    return decibels(float((right**2).sum()), float(((outputs - right) ** 2).sum()))


@dataclass(frozen=True)
class EngineDiagnosis:
    """Hold all the checks, in order."""

    checks: tuple[DoctorCheck, ...]

    def check(self, *, gpu: bool) -> None:
        """Raise CheckFailedError if a check failed, or if the GPU check is required and did not run."""
        bad = [c for c in self.checks if c.status == "failed" or (gpu and c.status == "not run")]
        if bad:
            raise CheckFailedError(f"{bad[0].name}: {bad[0].detail}", "See the checks above")
