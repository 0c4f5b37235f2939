"""Test a bundle with a .tflite variant, on devices where its package works, is missing, old or broken, or gives wrong
results.
"""

from __future__ import annotations

import json
from pathlib import Path

import edgeq_device.engines.catalog
import numpy as np
import pytest

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from edgeq.errors import BundleError
from edgeq.run.engines import load_engines
from tests.bundle.samples import INPUT, SIZE, WEIGHTS, linear, variant
from tests.device.test_direct_litert import tflite
from tests.device.test_plugin_variants import Device

_DESCRIPTION = """
title = "A stand-in of LiteRT"
provider = "FakeExecutionProvider"
packages = ["edgeq-fake-tflite"]
module = "edgeq_fake_tflite"
libraries = ["interpreter.py"]
oldest = "1.2"
adapter = "direct_litert"
suffix = ".tflite"
verified = "a test"
"""
# The part of LiteRT that the adapter uses: y = x · weights, sample by sample.
_PACKAGE = """
import os, signal, time
import numpy as np
behaviour, weights = {behaviour!r}, np.load({weights!r})
if behaviour == "crashes at import":
    os.kill(os.getpid(), signal.SIGSEGV)
if behaviour == "does not load":
    raise ImportError("numpy.core.multiarray failed to import")
class Interpreter:
    def __init__(self, model_content, num_threads):
        if behaviour == "refuses the file":
            raise ValueError("Op builtin_code out of range: 999.\\nAre you using an old TFLite binary?")
        self.threads = num_threads
    def allocate_tensors(self):
        pass
    def get_input_details(self):
        shape = np.array([1, len(weights)])
        return [dict(name="a", index=0, shape=shape, dtype=np.float32, quantization=(0.0, 0))]
    get_output_details = get_input_details
    def set_tensor(self, index, array):
        self.held = array @ weights
    def invoke(self):
        if behaviour == "crashes at run":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "hangs":
            time.sleep(600)
    def get_tensor(self, index):
        return self.held + (behaviour == "answers wrong")
"""
STATED = {
    key: [{"name": name, "order": [0, 1], "type": "tensor(float)", "shape": ["n", SIZE]}]
    for key, name in (("inputs", "x"), ("outputs", "y"))
}


@pytest.fixture
def device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Device:
    """Make a device. Its parameters are the package's behaviour and its version, "" for no package."""
    behaviour, version = getattr(request, "param", ("", "1.2.3"))
    place = tmp_path / "packages"
    (place / "engines").mkdir(parents=True)
    (place / "engines" / "fake.toml").write_text(_DESCRIPTION)
    if version:
        package, metadata = place / "edgeq_fake_tflite", place / f"edgeq_fake_tflite-{version}.dist-info"
        package.mkdir()
        metadata.mkdir()
        np.save(place / "weights.npy", WEIGHTS)
        (package / "__init__.py").write_text("")
        (package / "interpreter.py").write_text(
            _PACKAGE.format(behaviour=behaviour, weights=str(place / "weights.npy"))
        )
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: edgeq-fake-tflite\nVersion: {version}\n")
    monkeypatch.syspath_prepend(place)
    known = {**edgeq_device.engines.catalog.engines(), **load_engines(place / "engines")}
    monkeypatch.setattr("edgeq_device.engines.catalog.engines", lambda: known)
    monkeypatch.setattr("edgeq_device.engines.device.engines", lambda: known)
    monkeypatch.setattr("edgeq_device.bundle.opening.ANSWER_S", 2.0 if behaviour == "hangs" else 60.0)
    write_bundle(spec(tmp_path), tmp_path / "b")
    return Device(tmp_path, capsys)


def spec(folder: Path) -> BundleSpec:
    model, file = linear(folder / "m.onnx", 0.0), folder / "m.tflite"
    file.write_bytes(tflite(STATED))
    own = variant("own-fake", file, 0.0, ep="FakeExecutionProvider", info={"rank": 1, "precision": "f32", "threads": 2})
    return BundleSpec("linear", (variant("own", model, 0.0), own))


def test_the_file_runs_where_its_package_is_right(device: Device) -> None:
    found = device.infer()
    assert (found["variant"], found["passed_over"]) == ("own-fake", [])
    assert (device.root / "b" / "models" / "model" / "own-fake" / "model.tflite").is_file()
    code, out, _ = device.run("verify", "--json")
    assert (code, {entry["status"] for entry in json.loads(out)["variants"]}) == (0, {"passed"})
    code, out, _ = device.run("bench", "--duration", "0.02", "--queries", "2", "--json")
    assert (code, json.loads(out)["models"]["own-fake"]["providers"]) == (0, ["FakeExecutionProvider"])
    assert len(INPUT) > 1, "a batch, which runs sample by sample"


@pytest.mark.parametrize(
    ("device", "line"),
    [
        (("", ""), "fake needs the package edgeq-fake-tflite, not installed here. Install it: python -m pip install"),
        (("", "1.1"), "edgeq-fake-tflite 1.1 is older than 1.2"),
        (("crashes at import", "1.2"), "fake 1.2 ended: signal SIGSEGV"),
        (("does not load", "1.2"), "edgeq-fake-tflite 1.2 refuses variant own-fake: numpy.core.multiarray failed"),
        (("refuses the file", "1.2"), "refuses variant own-fake: Op builtin_code out of range: 999. Are you using"),
        (("crashes at run", "1.2"), "fake 1.2 ended: signal SIGSEGV"),
        (("hangs", "1.2"), "fake 1.2 does not answer within 2 s"),
        (("answers wrong", "1.2"), "fake 1.2 gives wrong results here: output y: error 1 is over"),
    ],
    indirect=["device"],
    ids=lambda part: "-".join(part)[:20],
)
def test_the_fallback_runs_and_one_line_says_why(device: Device, line: str) -> None:
    assert line in device.fallback()


def test_an_engine_is_given_no_file_of_another_name(device: Device) -> None:
    own = variant("own", linear(device.root / "o.onnx", 0.0), 0.0)
    wrong = variant("own-fake", device.root / "o.onnx", 0.0, ep="FakeExecutionProvider", info={"precision": "f32"})
    with pytest.raises(BundleError, match="does not have the suffix of fake"):
        write_bundle(BundleSpec("linear", (own, wrong)), device.root / "w")
