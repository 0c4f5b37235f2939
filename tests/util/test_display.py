"""Test how results look in a Python session: `dir`, and a short line for each."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.bundle.package import Bundle
from edgeq_device.bundle.verify import Report, VariantReport

import edgeq
from edgeq import demo
from edgeq.data.samples import SourceSamples, Subset
from edgeq.jobs.quantize import Quantized
from edgeq.measure.agreement import Agreement
from edgeq.measure.coverage import Coverage
from edgeq.measure.latency import Measurement
from edgeq.measure.task import Task
from edgeq.measure.tasks.anomaly import Anomaly
from edgeq.measure.tasks.classification import Classification
from edgeq.measure.tasks.detection import Detection
from edgeq.measure.tasks.similarity import Similarity
from edgeq.prove.proof import Proof
from edgeq.prove.variants import ProvenVariant
from edgeq.util.display import Displayed

LIMIT = 400
HOSTILE = '</style><script>alert("x")</script>\u202e\x1b[2J'
LONG = HOSTILE * 3000
LARGE: tuple[Any, ...] = (
    LONG,
    Path(LONG),
    10**300,
    1e-300 / 3,
    None,
    (LONG,) * 3,
    [LONG] * 5000,
    {LONG + str(i): LONG for i in range(50)},
    frozenset({LONG}),
    range(10**9),
    np.zeros((7, 9, 1000), np.float32),
)


def returned() -> Iterator[type]:
    """Yield the classes that public functions return, and the public classes."""
    for name in edgeq.__all__:
        found = inspect.unwrap(getattr(edgeq, name))
        if not inspect.isfunction(found):
            kind = found
        else:
            kind = vars(sys.modules[found.__module__]).get(str(inspect.signature(found).return_annotation))
        if isinstance(kind, type) and not issubclass(kind, Exception) and kind not in (str, Any, edgeq.Samples, Task):
            yield kind


TASKS = (Anomaly, Classification, Detection, Similarity)  # the results of `make_task`
PARTS = (SourceSamples, Subset, Proof, Coverage, Agreement, ProvenVariant, *TASKS)
RESULTS = sorted({*returned(), *PARTS}, key=lambda kind: kind.__qualname__)


def holding(kind: type, value: Any) -> Any:
    """Return an instance whose fields all have the value `value`, whatever their types."""
    found = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(found, field.name, value)
    return found


def test_dir_shows_the_interface_alone() -> None:
    assert dir(edgeq) == sorted(edgeq.__all__)
    for name in ("inspect", "compare", "report"):
        assert callable(getattr(edgeq, name))
    importlib.import_module("edgeq.reporting.page")  # this sets the package as an attribute of edgeq
    assert callable(edgeq.report)


def test_all_result_types_are_found() -> None:
    names = {kind.__name__ for kind in RESULTS}
    assert names >= {
        "Accuracy", "Comparison", "Data", "Detected", "Diagnosis", "Measurement", "ModelReport", "Packaged",
        "Quantized", "Report", "WrittenReport", "Retargeted", "Sample", "Scheme", "Statistics", "Target", "Tuned",
    }  # fmt: skip


# Classes of the device side, which do not use edgeq's display.
OF_DEVICES = (Report, edgeq.BenchSettings)


@pytest.mark.parametrize("kind", [kind for kind in RESULTS if kind not in OF_DEVICES], ids=lambda kind: kind.__name__)
def test_the_line_is_short_whatever_it_holds(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(kind, Displayed)
    if "__brief__" in vars(kind):  # `__brief__` needs fields of the right types; only the lengths matter here
        names = [field.name for field in dataclasses.fields(kind)]
        for value in LARGE:
            monkeypatch.setattr(kind, "__brief__", lambda self, value=value: dict.fromkeys(names * 3, value))
            assert len(repr(holding(kind, value))) < LIMIT
        return
    for value in LARGE:
        line = repr(holding(kind, value))
        assert len(line) < LIMIT
        assert "\x1b" not in line
        assert "\n" not in line


def test_names_of_models_are_shown_as_text() -> None:
    figures = {"models": {LONG: {"latency": {"p50_ms": 1.0}}}}
    found = holding(Measurement, ())
    object.__setattr__(found, "scenarios", {"offline": figures})
    assert repr(found).startswith("Measurement(</style>")
    assert repr(found).isprintable()
    assert len(repr(found)) < LIMIT


def test_a_verification_with_many_variants() -> None:
    found = Report(holding(Bundle, LONG), None, (holding(VariantReport, "passed"),) * 500)  # type: ignore[arg-type]
    assert repr(found) == "Report(passed=True, variants: 500 passed)"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    place = tmp_path_factory.mktemp("display")
    return edgeq.quantize(demo.MODEL, edgeq.Data(demo.CALIBRATION, count=4), place / "int8.onnx", timed=False)


def test_a_quantization_says_what_matters(quantized: Quantized) -> None:
    line = repr(quantized)
    assert len(line) < LIMIT
    for text in ("int8.onnx", "scheme='static QDQ", "sqnr_db=", "int8_mac_share=", "samples=4"):
        assert text in line
    assert "30 % of A's space." in repr(edgeq.compare(demo.MODEL, quantized.output, timed=False))
    inspected = repr(edgeq.inspect(demo.MODEL))
    assert len(inspected) < LIMIT
    for text in ("macs=22390016", "inputs=['image: float32[N, 1, 16, 16]']", "int8 on this-machine="):
        assert text in inspected
    assert repr(quantized.proof.agreement).startswith("Agreement(sqnr_db=")
    assert repr(edgeq.Data(demo.CALIBRATION, count=4)).endswith("calibration.npz', count=4)")


def test_other_libraries_are_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = edgeq.Data(demo.CALIBRATION, count=2)
        edgeq.quantize(demo.MODEL, data, tmp_path / "d.onnx", overrides={"mode": "dynamic"}, timed=False)
    assert logging.root.manager.disable == logging.NOTSET
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
