"""Test the files for C++ and Android applications. The programs are compiled against a stand-in for ncnn's headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from edgeq_device.engines.ncnn_file import read_ncnn

from edgeq.backends.ncnn.companions import blob_sizes, make_header
from edgeq.data.open_source import Data
from edgeq.jobs.package import package
from edgeq.model.convert import bytes_of_text
from edgeq.run.engines import load_engines
from edgeq.run.session import Engines, SessionSettings
from tests.backends.ncnn.archives import needs_ncnn, port

STUB = Path(__file__).parent / "stub" / "net.h"
STRICT = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
NETWORK = """<ir_version: 8, opset_import: ["": 17]>
net (float[N, 3, 8, 8] x) => (float[N, 5] y) {
    c = Conv(x, w)
    r = Relu(c)
    k = Flatten(r)
    y = MatMul(k, f)
}"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Package a convolution and a product for a Raspberry Pi."""
    folder = tmp_path_factory.mktemp("application")
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(8, 3, 3, 3)).astype(np.float32) / 5,
        "f": random.normal(size=(8 * 36, 5)).astype(np.float32) / 17,
    }
    (folder / "net.onnx").write_bytes(bytes_of_text(NETWORK, weights))
    np.savez(folder / "data.npz", x=random.integers(0, 256, size=(12, 8, 8, 3), dtype=np.uint8))
    steps = "key=x,channels=RGB,subtract=[128,64,0],divide=[2,4,8],layout=NCHW"
    package(
        folder / "net.onnx",
        Data(folder / "data.npz", steps),
        folder / "b",
        targets="raspberry-pi-5-ncnn",
        effort=None,
        timed=False,
        emulate=False,
    )
    return folder / "b"


def files(bundle: Path) -> Path:
    return bundle / "files" / "raspberry-pi-5-ncnn" / "ncnn"


def test_the_files_are_those_of_the_archive(bundle: Path) -> None:
    (archive,) = bundle.glob("models/model/*/model.ncnn")
    content = read_ncnn(archive.read_bytes(), "archive")
    assert (files(bundle) / "model.param").read_bytes() == content.param
    assert (files(bundle) / "model.bin").read_bytes() == content.weights


def test_the_preprocessing_is_stated_as_constants(bundle: Path) -> None:
    text = (files(bundle) / "model.h").read_text()
    assert "kMean[3] = {128.0f, 64.0f, 0.0f};" in text
    assert "kFactor[3] = {0.5f, 0.25f, 0.125f};" in text
    readme = (files(bundle) / "README.md").read_text()
    assert re.search(r"@[A-Z]+@", readme) is None
    assert "`Mat::substract_mean_normalize`" in readme


@needs_ncnn
def test_the_self_test_has_the_answers_of_ncnn(bundle: Path, tmp_path: Path) -> None:
    # No layer of this network is one in which ncnn's kernels for x86-64 differ from those for ARM.
    (archive,) = bundle.glob("models/model/*/model.ncnn")
    values = np.fromfile(files(bundle) / "selftest.bin", "<f4").reshape(2, 3 * 64 + 5)
    with Engines() as engines:
        session = engines.open(archive, SessionSettings(engine=load_engines()["ncnn"]))
        for case in values:
            (y,) = session.run(None, {"x": case[:-5].reshape(1, 3, 8, 8)})
            np.testing.assert_array_equal(y[0], case[-5:])


@pytest.mark.parametrize(
    ("wrong", "says"), [(0, "PASS: 2 cases, largest difference 0"), (1, "FAIL: an output differs")]
)
def test_main_runs_the_self_test(bundle: Path, tmp_path: Path, wrong: int, says: str) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler: apt-get install g++")
    options = re.findall(r"options\.(use_\w+) = ", (files(bundle) / "model.h").read_text())
    assert "use_fp16_arithmetic" in options
    replaced = {
        "OPTIONS": "\n".join(f"  bool {name} = true;" for name in options),
        "INPUT": "x",
        "OUTPUT": re.findall(r'kOutputs\[\] = {{"([^"]+)"', (files(bundle) / "model.h").read_text())[0],
        "DIMS": "3",
        "SIZE": "5",
    }
    text = STUB.read_text()
    for name, value in replaced.items():
        text = text.replace(f"@{name}@", value)
    (tmp_path / "net.h").write_text(text)
    command = [compiler, *STRICT, f"-DWRONG_BY={wrong}", f"-I{tmp_path}", str(files(bundle) / "main.cpp")]
    subprocess.run([*command, "-o", tmp_path / "run"], check=True)
    process = subprocess.run([tmp_path / "run"], cwd=files(bundle), capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout.splitlines()[-1]) == (wrong, says)
    # The Android program needs only one more header.
    (tmp_path / "android").mkdir()
    (tmp_path / "android" / "asset_manager.h").write_text("struct AAssetManager;\n")
    subprocess.run([*command[:-1], str(files(bundle) / "android.cpp"), "-c", "-o", tmp_path / "android.o"], check=True)


def test_a_header_without_images_states_no_preprocessing() -> None:
    signature = {"inputs": [port("x", "x", [1, 4])], "outputs": [port("y", 'a"b', [1, 2])], "options": {"on": True}}
    text = make_header(signature, None, 1)
    assert "kMean" not in text
    assert 'kOutputs[] = {{"a\\"b", 1, {2}}};' in text
    assert "options.on = true;" in text


@pytest.mark.parametrize(("sizes", "blob"), [((1, 3, 4), (3, 4)), ((5, 4), (5, 4)), ((1,), (1,))])
def test_the_axis_of_samples_is_left_out(sizes: tuple[int, ...], blob: tuple[int, ...]) -> None:
    assert blob_sizes(sizes) == blob
