"""Test that samples prepared in different ways are refused or doubted, and that unusual samples are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.data.open_source import Data
from edgeq.data.same_preparation import find_differences, measure_inputs
from edgeq.errors import DataError
from edgeq.jobs.calibrate import calibrate
from edgeq.jobs.quantize import quantize
from tests.graphs import proto
from tests.measure.fakes import FakeSample, FakeSamples

SHAPE = (1, 3, 8, 8)


def images(count: int, seed: int = 0) -> np.ndarray:
    """Return images of different brightness and contrast, as bytes: [count, 3, 8, 8] from 0 to 255."""
    random = np.random.default_rng(seed)
    bright = random.uniform(0.3, 1.0, (count, 1, 1, 1))
    return np.floor(255 * bright * random.random((count, *SHAPE[1:]))).astype(np.float32)


def samples(values: np.ndarray) -> FakeSamples:
    return FakeSamples([FakeSample(f"{n}", {"x": value[None]}) for n, value in enumerate(values)])


def compared(one: np.ndarray, other: np.ndarray) -> tuple[str, ...]:
    return find_differences(measure_inputs(samples(one)), measure_inputs(samples(other)))


UNIT = images(16, 1) / 255
NORMAL = (UNIT - 0.45) / 0.22
DIFFERENT: dict[str, np.ndarray] = {"divided": UNIT, "normalised": NORMAL, "divided twice": UNIT / 255}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("swapped", [False, True])
def test_another_scale_is_refused(name: str, *, swapped: bool) -> None:
    pair = (DIFFERENT[name], images(16)) if swapped else (images(16), DIFFERENT[name])
    with pytest.raises(DataError, match=r"prepared differently: input 'x' is .* to .* in fake") as raised:
        compared(*pair)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (UNIT * 30, "times as much"),
        (images(16, 1) - 128, "negative values"),
        (images(2, 1) / 255, "times as much"),
        (images(16, 1) + 1000, "times as much"),
        (images(16, 1) * np.float32([0.01, 1, 1]).reshape(3, 1, 1), "channel 0"),
    ],
)
def test_suspicious_values_give_a_warning(other: np.ndarray, text: str) -> None:
    (found,) = compared(images(16), other)
    assert text in found
    assert "⟨preprocess⟩" in found


def legitimate() -> dict[str, np.ndarray]:
    dark = images(8, 2)
    dark[0] = np.floor(dark[0] / 250)
    black = images(8, 2)
    black[0] = 0
    return {
        "other images": images(16, 3),
        "less contrast": 100 + images(16, 3) / 5,
        "dimmed": images(16, 3) / 2,
        "one dark image": dark,
        "one black image": black,
        "only black": np.zeros((4, *SHAPE[1:]), np.float32),
        "one image": images(1, 5),
    }


@pytest.mark.parametrize("name", legitimate())
@pytest.mark.parametrize("swapped", [False, True])
def test_unusual_samples_are_not_doubted(name: str, *, swapped: bool) -> None:
    other = legitimate()[name]
    assert compared(*((other, images(16)) if swapped else (images(16), other))) == ()


def test_one_dark_image_alone_is_not_refused() -> None:
    (found,) = compared(images(16), images(1, 4) / 250)
    assert "seem to be" in found


def test_a_single_number_is_never_refused() -> None:
    late, early = (np.full((8, 1), value, np.float32) for value in (1000.0, 1.0))
    (found,) = compared(late, early)
    assert "1000 times" in found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    body = (
        "g (float[n, 3, 8, 8] x) => (float[n, 4] y) { a = Conv (x, w) \n b = GlobalAveragePool (a) \n y = Flatten (b) }"
    )
    onnx.save(proto(body, {"w": random.normal(size=(4, 3, 3, 3)).astype(np.float32)}), "m.onnx")
    np.savez("bytes.npz", x=images(16))
    np.savez("unit.npz", x=UNIT)
    np.savez("centred.npz", x=images(16, 1) - 128)
    return tmp_path


PLAIN: dict[str, Any] = {"timed": False, "emulate": False, "force": True}


def test_quantize_names_both_sources(folder: Path) -> None:
    with pytest.raises(DataError, match=r"bytes\.npz.*unit\.npz"):
        quantize("m.onnx", "bytes.npz", "q.onnx", val="unit.npz", **PLAIN)
    assert not (folder / "q.onnx").exists()


@pytest.mark.usefixtures("folder")
def test_quantize_compares_with_collected_statistics() -> None:
    calibrate("m.onnx", Data("bytes.npz"), "stats")
    with pytest.raises(DataError, match=r"stats.*unit\.npz"):
        quantize("m.onnx", None, "q.onnx", val="unit.npz", statistics="stats", **PLAIN)


@pytest.mark.usefixtures("folder")
def test_a_suspicion_is_a_warning_of_the_proof() -> None:
    proof = quantize("m.onnx", "bytes.npz", "q.onnx", val="centred.npz", **PLAIN).proof
    assert "only one of them has negative values" in proof.warnings()[0]


@pytest.mark.usefixtures("folder")
def test_arrays_that_were_already_prepared_are_doubted() -> None:
    again = Data("unit.npz", "divide=255,mean=0.45,std=0.22")
    proof = quantize("m.onnx", again, "q.onnx", **PLAIN).proof
    assert "may already be prepared" in proof.warnings()[0]
