"""Test the adapter that opens .ncnn files: its options with a stand-in for ncnn, and its answers in ncnn itself."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeq_device.engines import direct_ncnn
from edgeq_device.engines.catalog import engine_options
from edgeq_device.errors import RuntimeUnavailableError
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeq.errors import EngineError
from edgeq.prove.engine_check import check_engine
from edgeq.run.engines import load_engines
from edgeq.run.session import Engines, SessionSettings
from tests.backends.ncnn.archives import archive, convolution_file, needs_ncnn, port

NCNN = load_engines()["ncnn"]


def open_here(content: bytes, folder: Path, profile: str = "", **settings: str) -> Any:
    """Open a file in this process."""
    file = folder / "model.ncnn"
    file.write_bytes(content)
    options = SimpleNamespace(enable_profiling=bool(profile), profile_file_prefix=profile)
    return direct_ncnn.open_model(None, NCNN, str(file), options, settings)


def convolve(x: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """Return the exact convolution of one image [inputs, n, n], without padding."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
    return np.einsum("chwij,ocij->ohw", windows, weights.astype(np.float64))


class Option(SimpleNamespace):
    """Stand in for ncnn's options, with its defaults."""


class Net:
    """Stand in for ncnn's Net, and record the options with which the weights were loaded."""

    loaded: dict[str, Any]

    def __init__(self) -> None:
        self.opt = Option(
            use_fp16_storage=True, use_winograd43_convolution=True, num_threads=8, use_vulkan_compute=True
        )

    def load_param(self, path: str) -> int:
        assert Path(path).is_file()
        Net.loaded = dict(vars(self.opt))
        return 0

    def load_model(self, path: str) -> int:
        return int(not Path(path).is_file())


def test_options_are_set_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ncnn", SimpleNamespace(Net=Net))
    content = convolution_file(np.ones((1, 1, 3, 3)), np.zeros(1), 5, options={"use_winograd43_convolution": True})
    open_here(content, tmp_path, **engine_options(NCNN, "f32", 3))
    exact = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage", "use_vulkan_compute")
    assert {name: Net.loaded[name] for name in exact} == dict.fromkeys(exact, False)
    assert (Net.loaded["num_threads"], Net.loaded["use_winograd43_convolution"]) == (3, True)
    safe = convolution_file(np.ones((1, 1, 3, 3)), np.zeros(1), 5, options={"use_fp16_storage": False})
    open_here(safe, tmp_path, **engine_options(NCNN, "f16"))
    assert {Net.loaded[f"use_fp16_{part}"] for part in ("packed", "storage", "arithmetic")} == {True}
    assert (Net.loaded["num_threads"], Net.loaded["use_winograd43_convolution"]) == (1, False)


@needs_ncnn
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_float_convolution_follows_its_formula(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weights, bias = random.standard_normal((5, 3, 3, 3)), random.standard_normal(5)
    session = open_here(convolution_file(weights, bias, 6, batch="N"), tmp_path_factory.getbasetemp())
    x = random.standard_normal((count, 3, 6, 6)).astype(np.float32)
    (y,) = session.run(["y"], {"x": x})
    expected = np.stack([convolve(image, weights) for image in x]) + bias[:, None, None]
    np.testing.assert_allclose(y, expected, atol=1e-4)
    assert (y.dtype, session.get_providers()) == (np.float32, [NCNN.provider])


@needs_ncnn
@pytest.mark.parametrize("channels", [16, 64, 128])
def test_the_largest_integers_are_summed_exactly(channels: int, tmp_path: Path) -> None:
    # Int8 Winograd F(4,3), which is on by default in ncnn, wraps with such values from 64 channels on.
    random = np.random.default_rng(0)
    weights = random.choice([-127, 127], (16, channels, 3, 3))
    content = convolution_file(weights, np.zeros(16), 12, input_scale=1.0)
    x = random.choice([-127, 127], (1, channels, 12, 12)).astype(np.float32)
    (y,) = open_here(content, tmp_path, num_threads="1").run(None, {"x": x})
    np.testing.assert_array_equal(y[0], convolve(x[0], weights).astype(np.float32))


@needs_ncnn
def test_an_int8_convolution_rounds_half_away_from_zero_and_saturates(tmp_path: Path) -> None:
    weights = np.ones((16, 16, 3, 3))
    content = convolution_file(weights, np.full(16, 3.0), 5, input_scale=2.0, weight_scale=4.0)
    x = np.resize(np.array([0.25, -0.25, 0.75, -0.75, 100, -100], np.float32), (1, 16, 5, 5))
    (y,) = open_here(content, tmp_path).run(None, {"x": x})
    integers = np.clip(np.trunc(x[0] * 2 + np.copysign(0.5, x[0])), -127, 127)
    np.testing.assert_allclose(y[0], convolve(integers, weights) / 8 + 3, rtol=1e-6)


@needs_ncnn
def test_answers_do_not_depend_on_memory_that_was_freed(tmp_path: Path) -> None:
    session = open_here(convolution_file(np.ones((4, 4, 3, 3)), np.zeros(4), 34), tmp_path)
    answers = []
    for value in (1, 2, 3):
        answers += session.run(None, {"x": np.full((1, 4, 34, 34), value, np.float32)})
        gc.collect()
    del session
    gc.collect()
    assert [np.unique(answer).tolist() for answer in answers] == [[36.0], [72.0], [108.0]]


@needs_ncnn
@pytest.mark.parametrize(
    ("feed", "says"),
    [
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((1, 2, 5, 5))}, "float64"),
        ({"x": np.zeros((1, 3, 5, 5), np.float32)}, r"\[1, 3, 5, 5\], the model takes"),
        ({"x": np.zeros((2, 2, 5, 5), np.float32)}, r"\[2, 2, 5, 5\], the model takes"),
        ({"x": np.zeros((1, 2, 5, 5), np.float32), "z": np.zeros(1)}, "takes only x"),
    ],
)
def test_another_input_is_refused(feed: dict[str, Any], says: str, tmp_path: Path) -> None:
    session = open_here(convolution_file(np.ones((1, 2, 3, 3)), np.zeros(1), 5), tmp_path)
    with pytest.raises(ValueError, match=says):
        session.run(None, feed)


@needs_ncnn
def test_an_output_of_another_size_is_an_error(tmp_path: Path) -> None:
    signature = {"inputs": [port("x", "in", [1, 3])], "outputs": [port("y", "in", [1, 4])]}
    session = open_here(archive("7767517\n1 1\nInput in 0 1 in\n", b"", signature), tmp_path)
    with pytest.raises(RuntimeUnavailableError, match=r"output 'y' is \[3\] instead of \[4\]"):
        session.run(None, {"x": np.zeros((1, 3), np.float32)})


@needs_ncnn
def test_the_profile_lists_the_layers(tmp_path: Path) -> None:
    content = convolution_file(np.ones((2, 2, 3, 3)), np.zeros(2), 5, input_scale=1.0)
    session = open_here(content, tmp_path, profile=str(tmp_path / "profile"))
    (event,) = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    assert (event["name"], event["args"]["operator"], event["args"]["kernel"]) == (
        "conv",
        "Convolution",
        "Convolution_int8",
    )


@needs_ncnn
def test_the_engine_passes_the_check_of_engines() -> None:
    right, detail = check_engine(NCNN, ())
    assert right, detail


@needs_ncnn
def test_a_file_that_ncnn_cannot_load_ends_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.ncnn"
    signature = {"inputs": [port("x", "in", [1, 3])], "outputs": [port("y", "out", [1, 3])]}
    file.write_bytes(archive("7767517\n2 2\nInput in 0 1 in\nNoSuchLayer l 1 1 in out\n", b"", signature))
    with Engines() as engines, pytest.raises(EngineError, match=r"ncnn cannot load the model\.param"):
        engines.open(file, SessionSettings(engine=NCNN))
