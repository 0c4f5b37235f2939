"""Test that .ncnn files are read within bounds, and that damaged files are refused before ncnn opens them."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeq_device.engines import direct_ncnn
from edgeq_device.engines.ncnn_file import list_layers, read_ncnn, read_signature
from edgeq_device.errors import BundleError, RuntimeUnavailableError
from hypothesis import given
from hypothesis import strategies as st

from edgeq.measure.loaded_model import is_bundle
from edgeq.model.load import load_runnable, signature_of
from edgeq.run.engines import load_engines
from tests.backends.ncnn.archives import archive, convolution_file, port

WEIGHTS, BIAS = np.ones((2, 3, 3, 3), np.float32), np.zeros(2, np.float32)
FILE = convolution_file(WEIGHTS, BIAS, 5, batch="N")
PARAM = "7767517\n1 1\nInput in 0 1 in\n"
SIGNATURE = {"inputs": [port("x", "in", [1, 3])], "outputs": [port("y", "in", [1, 3])], "options": {}}


def open_bytes(content: bytes, folder: Path) -> Any:
    """Open a file without a process of its own. A refused file does not reach ncnn."""
    file = folder / "model.ncnn"
    file.write_bytes(content)
    options = SimpleNamespace(enable_profiling=False)
    return direct_ncnn.open_model(None, load_engines()["ncnn"], str(file), options, {})


def test_a_file_states_its_inputs_without_ncnn(tmp_path: Path) -> None:
    file = tmp_path / "model.ncnn"
    file.write_bytes(FILE)
    signature = signature_of(load_runnable(file), file)
    assert [(spec.name, spec.dtype, spec.shape) for spec in signature.inputs] == [("x", np.float32, ("N", 3, 5, 5))]
    assert [spec.name for spec in signature.outputs] == ["y"]


def test_a_zip_of_an_engine_is_not_a_bundle(tmp_path: Path) -> None:
    for name, expected in (("model.ncnn", False), ("model.zip", True)):
        file = tmp_path / name
        file.write_bytes(FILE)
        assert is_bundle(file) == expected


def test_layers_are_listed_with_their_types() -> None:
    listed = list_layers(read_ncnn(FILE, "f"), "f")
    assert [(layer.type, layer.name, layer.int8) for layer in listed] == [
        ("Input", "in", False),
        ("Convolution", "conv", False),
    ]
    quantized = convolution_file(WEIGHTS, BIAS, 5, input_scale=2.0)
    assert [layer.int8 for layer in list_layers(read_ncnn(quantized, "f"), "f")] == [False, True]


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_a_signature_or_a_refusal(place: int, change: int) -> None:
    damaged = bytearray(FILE)
    damaged[place] ^= change
    # Any other exception would be a fault of the reader.
    with suppress(BundleError):
        file = read_ncnn(bytes(damaged), "f")
        assert list_layers(file, "f")
        assert {"inputs", "outputs"} <= file.signature.keys()


@given(st.integers(0, len(FILE) - 1))
def test_a_file_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(BundleError, match="f"):
        read_signature(FILE[:length], "f")


def test_other_members_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "other.zip"
    with zipfile.ZipFile(place, "w") as file:
        for name in ("model.param", "model.bin", "edgeq.json", "../model.bin"):
            file.writestr(name, "{}")
    with pytest.raises(BundleError, match="does not consist of"):
        read_ncnn(place.read_bytes(), "f")
    packed = archive(PARAM, bytes(4096), SIGNATURE, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(BundleError, match="compressed"):
        read_ncnn(packed, "f")


@pytest.mark.parametrize(
    ("param", "says"),
    [
        ("", "form"),
        ("7767518\n1 1\nInput in 0 1 in\n", "other numbers"),
        ("7767517\n2 1\nInput in 0 1 in\n", "other numbers"),
        ("7767517\n1 2\nInput in 0 1 in\n", "other numbers"),
        ("7767517\n1 1\nInput in 0 1\n", "form"),
        ("7767517\n1 1\nInput in 0 -1\n", "form"),
        ("7767517\n1 1\nInput in 0 1 " + "n" * 300 + "\n", "form"),
        ("7767517\n1 1\nInput in 0 1 in 0\n", "form"),
        ("7767517\n1 1\nInput in 0 1 \u00fc\n", "form"),
        ("7767517\n1 1\nConvolution c 0 1 in 0=1 6=5000\n", "more weights"),
        ("7767517\n1 1\nConvolution c 0 1 in 0=5000 6=1\n", "more weights"),
        ("7767517\n1 1\nInnerProduct c 0 1 in 2=-1\n", "more weights"),
        ("7767517\n1 1\nInnerProduct c 0 1 in 2=x\n", "more weights"),
    ],
)
def test_layers_without_ncnns_form_are_refused(param: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=says):
        open_bytes(archive(param, bytes(64), SIGNATURE), tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": []}, "1 to 64 entries"),
        ({"inputs": {}}, "not a list of tables"),
        ({"outputs": [port("y", "in", [1, 3])] * 65}, "1 to 64 entries"),
        ({"inputs": [5]}, "not a list of tables"),
        ({"inputs": [port("x", "in", [2, 3])]}, "do not match"),
        ({"inputs": [port("x", "in", [1, "W"])]}, "do not match"),
        ({"inputs": [port("x", "in", [1, True])]}, "do not match"),
        ({"inputs": [port("x", "in", [1] * 6)]}, "do not match"),
        ({"inputs": [{**port("x", "in", [1, 3]), "shape": [1, 4]}]}, "do not match"),
        ({"inputs": [{**port("x", "in", [1, 3]), "sizes": [3]}]}, "do not match"),
        ({"inputs": [{**port("x", "in", [1, 3]), "sizes": [1, 0]}]}, "do not match"),
        ({"inputs": [port("x", "in", [1, 3], "tensor(string)")]}, "has no name"),
        ({"inputs": [{**port("x", "in", [1, 3]), "blob": 5}]}, "has no name"),
        ({"options": {"num_threads": True}}, "may not set 'num_threads'"),
        ({"options": {"use_fp16_storage": 1}}, "true and false"),
        ({"options": []}, "true and false"),
    ],
)
def test_a_wrong_description_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=says):
        open_bytes(archive(PARAM, b"", {**SIGNATURE, **change}), tmp_path)


def test_a_description_that_is_too_large_is_refused() -> None:
    large = {**SIGNATURE, "note": "n" * (1 << 20)}
    assert len(json.dumps(large)) > 1 << 20
    with pytest.raises(BundleError, match="larger than"):
        read_signature(archive(PARAM, b"", large), "f")


def test_another_format_is_refused() -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"opens only \.ncnn files"):
        direct_ncnn.open_model(None, load_engines()["ncnn"], "m.onnx", None, {})
