"""Test the bytes and the text of the files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.ncnn.network import Blob, NcnnNetwork, ParamLayer
from edgeq.backends.ncnn.writer import DESCRIPTION, PARAM, WEIGHTS, members, param_text, weight_bytes
from edgeq.errors import ModelError
from tests.backends.ncnn.networks import ncnn, run_ncnn, write

BLOB = Blob("a", (3,))


def one(layer: ParamLayer) -> NcnnNetwork:
    """Return a network of one layer."""
    return NcnnNetwork((), (), (layer,))


def test_weights_have_a_tag_and_end_at_a_multiple_of_four() -> None:
    integers, floats = np.array([1, -2, 3, 4, 5], np.int8), np.array([1.5, -2], np.float32)
    layer = ParamLayer("InnerProduct", "n", (), (BLOB,), weights=(integers, floats), vectors=(floats,))
    assert weight_bytes(one(layer)) == b"".join(
        [bytes.fromhex("384b0d00"), integers.tobytes(), bytes(3), bytes(4), floats.tobytes(), floats.tobytes()]
    )


def test_floats_are_exact_and_look_like_floats() -> None:
    layer = ParamLayer("Clip", "n", (BLOB,), (BLOB,), {0: 1.0, 1: float(np.float32(0.1)), 9: (2, 3), 10: (0.5,)})
    text = param_text(one(layer))
    assert text.splitlines() == ["7767517", "1 1", "Clip n 1 1 a a 0=1.0 1=0.100000001 -23309=2,2,3 -23310=1,0.5"]


def test_the_file_is_a_zip_of_three_uncompressed_members(tmp_path: Path) -> None:
    _, file = write(
        tmp_path, "g (float[N,3] x) => (float[N,2] y) { [n] y = MatMul(x, w) }", {"w": np.eye(3, 2, dtype=np.float32)}
    )
    with zipfile.ZipFile(file) as archive:
        assert archive.namelist() == [PARAM, WEIGHTS, DESCRIPTION]
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    description = json.loads(members(file)[DESCRIPTION])
    (port,) = description["inputs"]
    # An open batch keeps its name.
    assert port == {"name": "x", "blob": "x", "type": "tensor(float)", "shape": ["N", 3], "sizes": [1, 3]}
    assert not any(value for name, value in description["options"].items() if "fp16" in name)


def test_a_second_name_of_a_weight_is_a_constant(tmp_path: Path) -> None:
    body = "g (float[1,3] x) => (float[1,3] y) { b2 = Identity(b) [a] h = Gemm(x, w, b) [c] y = Gemm(h, w, b2) }"
    _, file = write(tmp_path, body, {"w": np.eye(3, dtype=np.float32), "b": np.zeros(3, np.float32)})
    assert members(file)[PARAM].decode().count("InnerProduct") == 2


def test_a_blob_with_several_readers_gets_a_split(tmp_path: Path) -> None:
    _, file = write(tmp_path, "g (float[1,3] x) => (float[1,3] y) { [a] h = Abs(x) [b] y = Mul(h, h) }", {})
    lines = [line.split() for line in members(file)[PARAM].decode().splitlines()[2:]]
    assert [words[0] for words in lines] == ["Input", "UnaryOp", "Split", "BinaryOp"]
    reads = [name for words in lines for name in words[4 : 4 + int(words[2])]]
    assert len(reads) == len(set(reads))


@ncnn
def test_any_name_of_a_tensor_can_be_written(tmp_path: Path) -> None:
    text = 'g (float[1,3] "x 1") => (float[1,3] "y\\u00e9") { [a] h = Abs("x 1") [b] "y\\u00e9" = Neg(h) }'
    text = text.encode().decode("unicode_escape")
    _, file = write(tmp_path, text, {})
    answers = run_ncnn(file, {"x 1": np.array([[1, -2, 3]], np.float32)})
    assert answers["yé"].tolist() == [-1, -2, -3]


def test_an_input_of_integers_is_refused(tmp_path: Path) -> None:
    text = "g (int64[1,3] x) => (float[1,3] y) { [c] y = Cast<to=1>(x) }"
    with pytest.raises(ModelError, match=r"input 'x' is of type .*float32 input"):
        write(tmp_path, text, {})


def test_an_open_size_is_refused_with_the_option_that_fixes_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no fixed size on axis 2 \(H\).*H=SIZE"):
        write(tmp_path, "g (float[1,3,H,4] x) => (float[1,3,H,4] y) { [n] y = Abs(x) }", {})
