"""Test the files for a microcontroller's project against TFLite Micro here: array, operators, arena and self-test.

main.cc is compiled against a stand-in for TFLite Micro's interface, because no package has the sources to link with.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.backends.base import ESTIMATE, Artifact
from edgeq.backends.litert.companions import with_sources
from edgeq.backends.litert.micro import ARENA, arena_bytes, resolver_method
from edgeq.cli import group
from edgeq.data.samples import open_samples
from edgeq.errors import EngineError, RuntimeUnavailableError
from edgeq.hardware.target import resolve
from edgeq.jobs.package import package
from edgeq.model.convert import bytes_of_text
from edgeq.model.load import model_signature
from edgeq.run.engines import load_engines
from edgeq.run.session import Engines, SessionSettings
from edgeq.scheme import Scheme
from tests.opened import variant_info
from tests.plugins import needs_plugin

needs_litert = [needs_plugin("litert"), needs_plugin("tflite-micro")]
STUB = Path(__file__).parent / "stub" / "tflm.h"
PAIRS = """<ir_version: 8, opset_import: ["": 17]>
pairs (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) <float one = {1.0}, int8 none = {0}> {
    q = QuantizeLinear(x, one, none)
    d = DequantizeLinear(q, one, none)
    f = DequantizeLinear(w, one, none)
    c = Conv(d, f)
    r = QuantizeLinear(c, one, none)
    y = DequantizeLinear(r, one, none)
}"""
HEADERS = ("micro_interpreter.h", "micro_log.h", "micro_mutable_op_resolver.h", "system_setup.h")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Package a convolution and a product for a Cortex-M with an NPU."""
    folder = tmp_path_factory.mktemp("micro")
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(8, 4, 3, 3)).astype(np.float32) / 6,
        "f": random.normal(size=(8 * 36, 5)).astype(np.float32) / 17,
    }
    model = folder / "net.onnx"
    model.write_bytes(
        bytes_of_text(
            """<ir_version: 8, opset_import: ["": 17]>
            net (float[N, 4, 8, 8] x) => (float[N, 5] y) {
                c = Conv(x, w)
                r = Relu(c)
                k = Flatten(r)
                y = MatMul(k, f)
            }""",
            weights,
        )
    )
    np.savez(folder / "data.npz", x=random.normal(size=(12, 4, 8, 8)).astype(np.float32))
    package(model, folder / "data.npz", folder / "b", targets="ethos-u55-128", effort=None, timed=False)
    return folder / "b"


def sources(bundle: Path) -> Path:
    return bundle / "files" / "ethos-u55-128" / "micro"


def test_methods_are_named_as_the_resolvers() -> None:
    kinds = ("CONV_2D", "RELU6", "RESIZE_NEAREST_NEIGHBOR", "BATCH_MATMUL", "PADV2", "ADD", "SPACE_TO_BATCH_ND")
    names = ("Conv2D", "Relu6", "ResizeNearestNeighbor", "BatchMatMul", "PadV2", "Add", "SpaceToBatchNd")
    assert tuple(map(resolver_method, kinds)) == tuple(f"Add{name}" for name in names)


class TestBundle:
    pytestmark = needs_litert

    def test_the_array_is_the_file(self, bundle: Path) -> None:
        (file,) = bundle.glob("models/model/*/model.tflite")
        text = (sources(bundle) / "model.cc").read_text()
        assert bytes(int(byte, 16) for byte in re.findall(r"0x([0-9a-f]{2})", text)) == file.read_bytes()
        assert "alignas(16) const unsigned char kEdgeqModel[]" in text

    def test_the_arena_is_the_least_that_is_enough(self, bundle: Path) -> None:
        (file,) = bundle.glob("models/model/*/model.tflite")
        engine = load_engines()["tflite-micro"]
        size = arena_bytes(file, engine)
        assert f"kEdgeqArenaBytes = {size};" in (sources(bundle) / "model.h").read_text()
        with Engines() as engines:
            options = {**engine.options, ARENA: str(size - 1024)}
            less = SessionSettings(engine=replace(engine, options=options))
            with pytest.raises((EngineError, RuntimeUnavailableError)):
                engines.open(file, less)

    @pytest.mark.parametrize("nested", [(), ("-DNESTED",)])
    @pytest.mark.parametrize(("wrong", "says"), [(0, "PASS: 2 cases"), (1, "FAIL: case 0, output 0 differs")])
    def test_main_runs_the_self_test(
        self, bundle: Path, tmp_path: Path, nested: tuple[str, ...], wrong: int, says: str
    ) -> None:
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("there is no C++ compiler: apt-get install g++")
        methods = re.findall(r"resolver\.(Add\w+)\(\)", (sources(bundle) / "operators.h").read_text())
        assert methods == ["AddConv2D", "AddFullyConnected", "AddReshape"]
        lines = "".join(f"  TfLiteStatus {name}() {{ return Add(); }}\n" for name in methods)
        (tmp_path / "tflm.h").write_text(STUB.read_text().replace("@METHODS@", lines))
        for header in (
            *(f"tensorflow/lite/micro/{name}" for name in HEADERS),
            "tensorflow/lite/schema/schema_generated.h",
        ):
            (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / header).write_text('#include "tflm.h"\n')
        files = [str(sources(bundle) / name) for name in ("main.cc", "model.cc", "selftest.cc")]
        folders = [f"-I{tmp_path}", f"-I{sources(bundle)}"]
        strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-DWRONG_BY={wrong}", *nested]
        subprocess.run([compiler, *strict, *folders, *files, "-o", tmp_path / "run"], check=True)
        process = subprocess.run([tmp_path / "run"], capture_output=True, text=True, check=False)
        assert (process.returncode, process.stdout.splitlines()[-1]) == (wrong, says)

    def test_the_target_can_be_named(self, bundle: Path) -> None:
        checked = CliRunner().invoke(group, ["verify", str(bundle), "--on", "ethos-u55-128", "--json"])
        assert checked.exit_code == 0, checked.output
        (check,) = json.loads(checked.stdout)["checks"]
        assert (check["status"], check["where"]) == ("passed", "modelled")

    def test_the_npu_has_its_file_and_an_estimate(self, bundle: Path) -> None:
        described = variant_info(bundle, "ethos-u55-128")
        compiled = bundle / "files" / "ethos-u55-128" / "ethos-u" / "model_vela.tflite"
        if ESTIMATE not in described:
            pytest.skip("vela is not installed: python -m pip install ethos-u-vela")
        assert compiled.read_bytes()[4:8] == b"TFL3"
        assert (described[ESTIMATE]["cpu_operators"], described[ESTIMATE]["on_cpu"]) == (0, [])
        assert described[ESTIMATE]["basis"].endswith("'s estimate")


class TestWithoutTools:
    pytestmark = needs_plugin("litert")

    def test_the_file_travels_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent(*given: object, **more: object) -> None:
            raise RuntimeUnavailableError("it is not installed", "Install it")

        monkeypatch.setattr("edgeq.backends.litert.ethosu.find_vela", absent)
        monkeypatch.setattr("edgeq.backends.litert.micro.arena_bytes", absent)
        monkeypatch.setattr("edgeq.backends.litert.micro._cases", absent)
        model = tmp_path / "m.onnx"
        weights = {"w": np.ones((2, 2, 1, 1), np.int8)}
        model.write_bytes(bytes_of_text(PAIRS, weights))
        engine = load_engines()["tflite-micro"]
        artifact = Artifact(model, Scheme(), "CPUExecutionProvider")
        x = np.zeros((1, 2, 4, 4), np.float32)
        samples = open_samples([x], model_signature(model))
        packed = with_sources(artifact, engine, resolve("ethos-u55-128"), samples, tmp_path / "c", count=1)
        assert (packed.files, packed.details) == ({}, {})
        assert packed.notes == (
            "not compiled for the NPU: it is not installed. Install it",
            "no sources for TFLite Micro: it is not installed. Install it",
        )
