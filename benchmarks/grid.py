"""Build, measure and time a model with every setting of ONNX Runtime's own quantizer, as an expert would do without
edgeq.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from edgeq.data.samples import Samples
from edgeq.measure.accuracy import evaluate
from edgeq.measure.task import Task
from edgeq.run.session import open_session

PAIRS = {
    "U8S8": (QuantType.QUInt8, QuantType.QInt8),
    "U8U8": (QuantType.QUInt8, QuantType.QUInt8),
    "S8S8": (QuantType.QInt8, QuantType.QInt8),
}
TIMED_S = 1.0


@dataclass(frozen=True)
class Setting:
    """Describe one setting of the grid."""

    method: str
    pair: str
    format: str
    per_channel: bool
    reduce_range: bool

    def __str__(self) -> str:
        words = [self.pair, "per-channel" if self.per_channel else "per-tensor", self.method]
        if self.format != "QDQ":
            words.insert(0, self.format)
        return " ".join([*words, "reduce_range"] if self.reduce_range else words)


@dataclass(frozen=True)
class Point:
    """Hold the results of a setting. They are None if the setting could not be built or run."""

    setting: Setting
    model: Path
    seconds: float
    value: float | None = None
    p50_ms: float | None = None


SIMPLE = Setting("MinMax", "U8S8", "QDQ", per_channel=True, reduce_range=False)
"""The setting that most users would choose, with every operator in integers and one scale per channel."""


def settings() -> list[Setting]:
    """Return the 72 settings: three calibration methods, three pairs of types, both formats, weights per channel or per
    tensor, full or reduced range.
    """
    axes = (("MinMax", "Percentile", "Entropy"), PAIRS, ("QDQ", "QOperator"), (True, False), (False, True))
    return [Setting(*choice) for choice in itertools.product(*axes)]


def run_grid(
    model: Path, calibration: Samples, validation: Samples, task: Task, workdir: Path, chosen: Sequence[Setting]
) -> list[Point]:
    """Build, evaluate and time the model of each setting separately, as a script would do."""
    workdir.mkdir(parents=True, exist_ok=True)
    prepared = workdir / "prepared.onnx"
    with _quiet():
        quant_pre_process(model, prepared)
    inputs = [dict(sample.inputs) for sample in calibration]
    return [
        _point(prepared, setting, inputs, validation, task, workdir / f"{i}.onnx") for i, setting in enumerate(chosen)
    ]


def _point(
    prepared: Path,
    setting: Setting,
    inputs: Sequence[Mapping[str, Any]],
    validation: Samples,
    task: Task,
    output: Path,
) -> Point:
    start = time.perf_counter()
    activation, weight = PAIRS[setting.pair]
    try:
        with _quiet():
            quantize_static(
                prepared,
                output,
                _Reader(inputs),
                quant_format=QuantFormat[setting.format],
                activation_type=activation,
                weight_type=weight,
                per_channel=setting.per_channel,
                reduce_range=setting.reduce_range,
                calibrate_method=CalibrationMethod[setting.method],
            )
        session = open_session(output)
        value = evaluate(session, validation, task).value
        p50 = _p50(session, inputs[0])
    # the quantizer raises exceptions of many types, and a failed setting becomes a row of the table
    except Exception as error:
        print(f"    {setting}: {type(error).__name__}: {str(error)[:100]}")
        return Point(setting, output, time.perf_counter() - start)
    return Point(setting, output, time.perf_counter() - start, value, p50)


def _p50(session: Any, feed: Mapping[str, Any]) -> float:
    taken: list[float] = []
    end = time.perf_counter() + TIMED_S
    while time.perf_counter() < end or len(taken) < 10:
        before = time.perf_counter()
        session.run(None, feed)
        taken.append(time.perf_counter() - before)
    return 1e3 * sorted(taken)[len(taken) // 2]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        self._rest = iter(inputs)

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self._rest, None)
