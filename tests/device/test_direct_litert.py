"""Test the adapter that opens .tflite files, with a stand-in for LiteRT's interpreter."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from edgeq_device.engines.direct_litert import LiteRtSession, read_signature
from edgeq_device.errors import BundleError
from hypothesis import given
from hypothesis import strategies as st

from edgeq.errors import ModelError
from edgeq.measure.loaded_model import open_model
from edgeq.model.files import model_bytes
from edgeq.model.load import load_runnable, signature_of

SCALE, ZERO = 0.5, -3
STATED = {
    "inputs": [{"name": "x", "order": [0, 2, 3, 1], "type": "tensor(float)", "shape": ["N", 2, 3, 4]}],
    "outputs": [{"name": "y", "order": [0, 2, 3, 1], "type": "tensor(float)", "shape": ["N", 2, 3, 4]}],
}


def tflite(metadata: dict[str, Any] | bytes | None) -> bytes:
    """Return a file that contains only its metadata."""
    builder = flatbuffers.Builder(64)
    content = json.dumps(metadata).encode() if isinstance(metadata, dict) else metadata or b""
    name, data = builder.CreateString("edgeq"), builder.CreateByteVector(content)
    builder.StartObject(3)  # Buffer
    builder.PrependUOffsetTRelativeSlot(0, data, 0)
    buffer = builder.EndObject()
    builder.StartObject(2)  # Metadata
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    entry = builder.EndObject()
    vectors = []
    for one in (buffer, entry):
        builder.StartVector(4, 1, 4)
        builder.PrependUOffsetTRelative(one)
        vectors.append(builder.EndVector())
    builder.StartObject(8)  # Model
    builder.PrependUOffsetTRelativeSlot(4, vectors[0], 0)
    if metadata is not None:
        builder.PrependUOffsetTRelativeSlot(6, vectors[1], 0)
    builder.Finish(builder.EndObject(), b"TFL3")
    return bytes(builder.Output())


class Interpreter:
    """Return each input plus one quantization step."""

    def __init__(self, shape: tuple[int, ...] = (1, 3, 4, 2), dtype: Any = np.int8) -> None:
        detail = {
            "shape": np.array(shape),
            "dtype": dtype,
            "quantization": (SCALE, ZERO) if dtype is np.int8 else (0.0, 0),
        }
        self.inputs, self.outputs = [{"name": "in", "index": 0, **detail}], [{"name": "out", "index": 1, **detail}]
        self.held: Any = None

    def get_input_details(self) -> list[dict[str, Any]]:
        return self.inputs

    def get_output_details(self) -> list[dict[str, Any]]:
        return self.outputs

    def set_tensor(self, index: int, array: Any) -> None:
        assert (index, array.dtype, array.flags.c_contiguous) == (0, self.inputs[0]["dtype"], True)
        assert array.shape == tuple(self.inputs[0]["shape"])
        self.held = array

    def invoke(self) -> None:
        self.held = self.held + self.inputs[0]["dtype"](1)

    def get_tensor(self, index: int) -> Any:
        assert index == 1
        return self.held


@given(st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_session_takes_and_gives_what_the_model_does(count: int, seed: int) -> None:
    session = LiteRtSession(Interpreter(), STATED, "P", "")
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [("x", "tensor(float)", ["N", 2, 3, 4])]
    x = np.random.default_rng(seed).uniform(-80, 80, (count, 2, 3, 4)).astype(np.float32)
    (y,) = session.run(["y"], {"x": x})
    steps = np.clip(np.rint(x / np.float32(SCALE)) + ZERO, -128, 127)
    np.testing.assert_array_equal(
        y, ((steps.astype(np.int8) + np.int8(1)).astype(np.float32) - ZERO) * np.float32(SCALE)
    )
    assert (y.dtype, y.shape, session.get_providers()) == (np.float32, x.shape, ["P"])


def test_a_file_that_states_nothing_has_its_own_inputs() -> None:
    session = LiteRtSession(Interpreter((1, 5), np.float32), {}, "P", "")
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [("in", "tensor(float)", [1, 5])]
    np.testing.assert_array_equal(session.run(None, {"in": np.zeros((1, 5), np.float32)})[0], np.ones((1, 5)))


@pytest.mark.parametrize(
    ("feed", "says"),
    [
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((1, 2, 3, 4))}, r"float64 \[1, 2, 3, 4\], the model takes float32"),
        ({"x": np.zeros((1, 3, 4, 2), np.float32)}, r"\[1, 3, 4, 2\], the model takes"),
        ({"x": np.zeros((0, 2, 3, 4), np.float32)}, "or none"),
        ({"x": np.zeros((1, 2, 3, 4), np.float32), "z": 0}, "the model takes only x"),
    ],
)
def test_another_input_is_refused(feed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LiteRtSession(Interpreter(), STATED, "P", "").run(None, feed)


@pytest.mark.parametrize(
    "change",
    [
        {"order": [0, 1, 2]},
        {"order": [0, 2, 3, 3]},
        {"order": "0231"},
        {"shape": [1, 2, 3, 5]},
        {"shape": [1, 2, 3]},
        {"type": "tensor(string)"},
        {"type": []},
        {"type": "tensor(bool)"},
        {"name": 5},
    ],
)
def test_metadata_that_do_not_fit_the_file_are_refused(change: dict[str, Any]) -> None:
    wrong = {**STATED, "inputs": [{**STATED["inputs"][0], **change}]}
    with pytest.raises(BundleError, match=r"in the file's metadata, inputs"):
        LiteRtSession(Interpreter(), wrong, "P", "")
    for inputs in ([], {}, [5], STATED["inputs"] * 2):
        with pytest.raises(BundleError, match="one entry for each"):
            LiteRtSession(Interpreter(), {**STATED, "inputs": inputs}, "P", "")


def test_metadata_are_read_without_the_runtime(tmp_path: Path) -> None:
    assert read_signature(tflite(STATED), "f") == STATED
    assert read_signature(tflite(None), "f") == {}
    file = tmp_path / "m.tflite"
    file.write_bytes(tflite(STATED))
    (spec,) = signature_of(load_runnable(file), file).inputs
    assert (spec.name, spec.dtype, spec.shape, model_bytes(file)) == (
        "x",
        np.float32,
        ("N", 2, 3, 4),
        file.stat().st_size,
    )


@given(st.data())
def test_a_damaged_file_is_refused_or_read(data: st.DataObject) -> None:
    whole = bytearray(tflite(STATED))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(BundleError):
        read_signature(cut, "f")


def test_a_file_without_what_is_needed_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "m.tflite"
    for content, says in (
        (tflite(None), "does not state its inputs and outputs"),
        (tflite({**STATED, "inputs": [{"name": "x"}]}), "states its inputs and outputs wrongly"),
        (tflite({**STATED, "inputs": [5]}), "states its inputs and outputs wrongly"),
        (tflite({**STATED, "inputs": 5}), "states its inputs and outputs wrongly"),
        (tflite({**STATED, "outputs": None}), "states its inputs and outputs wrongly"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=says), open_model(file):
            pass
