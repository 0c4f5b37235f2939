"""Test a bundle with a variant for a plug-in, on devices where the plug-in works, is missing, old or broken, or gives
wrong results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import edgeq_device.engines.catalog
import numpy as np
import pytest
from edgeq_device.bundle.select import judge
from edgeq_device.cli import main

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from tests import fake_engine
from tests.bundle.samples import INPUT, answer, linear, variant

from . import fakes

FAKE = "FakeExecutionProvider"


class Device:
    """Hold a bundle on a device and run its runner."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        np.save(root / "x.npy", INPUT)

    def run(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr."""
        code = main([command, *arguments, "--bundle", str(self.root / "b")])
        return (code, *self._capsys.readouterr())

    def infer(self, *arguments: str) -> dict[str, Any]:
        place = str(self.root / "out.npz")
        code, out, err = self.run("infer", str(self.root / "x.npy"), "--json", "--force", "-o", place, *arguments)
        assert (code, err) == (0, "")
        with np.load(place, allow_pickle=False) as outputs:
            np.testing.assert_allclose(outputs["y"], answer(0.0), atol=1e-3)
        found: dict[str, Any] = json.loads(out)
        return found

    def fallback(self) -> str:
        """Run the bundle, which must fall back to its own variant, and return the line that names the reason."""
        found = self.infer()
        assert found["variant"] == "own"
        (why,) = found["passed_over"]
        assert isinstance(why, str)
        assert why.startswith("not own-fake: ")
        assert "\n" not in why
        return why


@pytest.fixture
def device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Device:
    """Make a device. Its parameters are the plug-in's behaviour, its version, and whether it is a package that an
    adapter opens.
    """
    behaviour, version, *direct = getattr(request, "param", ("", "1.2.3"))
    (tmp_path / "plugin").mkdir()
    install = fake_engine.install_direct if direct else fake_engine.install
    engine = install(tmp_path / "plugin", monkeypatch, behaviour, version)
    known = {**edgeq_device.engines.catalog.engines(), "fake": engine}
    monkeypatch.setattr("edgeq_device.engines.catalog.engines", lambda: known)
    monkeypatch.setattr("edgeq_device.engines.device.engines", lambda: known)
    monkeypatch.setattr("edgeq_device.bundle.opening.ANSWER_S", 2.0 if behaviour == "hangs" else 60.0)
    # The weights are next to the bundle's models, as for large models. The plug-in gets the model as bytes.
    models = [linear(tmp_path / str(bias) / "m.onnx", float(bias), external="weights.bin") for bias in (0, 1)]
    specs = (
        variant("own", models[0], 0.0),
        variant("other", models[1], 1.0, info={"architecture": "any", "rank": -1}),
        variant("own-fake", models[0], 0.0, ep=FAKE, info={"rank": 1, "precision": "f32", "threads": 1}),
    )
    write_bundle(BundleSpec("linear", specs), tmp_path / "b")
    return Device(tmp_path, capsys)


def test_the_plugin_runs_where_it_is_right(device: Device) -> None:
    found = device.infer()
    assert (found["variant"], found["passed_over"]) == ("own-fake", [])
    options = json.loads((device.root / "plugin" / "options.json").read_text())
    assert options == {"config": '{"CPU":{"HINT":"single","THREADS":"1"}}', "streams": "1"}, "of its description"
    assert device.infer("--variant", "own")["variant"] == "own"
    code, out, _ = device.run("info")
    assert code == 0
    assert "engine fake: edgeq-fake-engine 1.2.3" in out
    assert "model/own-fake: chosen" in out


def test_verify_and_bench_run_it_too(device: Device) -> None:
    code, out, _ = device.run("verify", "--json")
    statuses = {entry["variant"]: entry["status"] for entry in json.loads(out)["variants"]}
    assert (code, set(statuses.values())) == (0, {"passed"})
    code, out, _ = device.run("bench", "--duration", "0.02", "--queries", "2", "--json")
    assert code == 0
    assert json.loads(out)["models"]["own-fake"]["providers"][0] == FAKE


BROKEN = [
    (("", ""), "needs the package edgeq-fake-engine, not installed here. Install it: python -m pip install"),
    (("", "1.1.9"), "edgeq-fake-engine 1.1.9 is older than 1.2"),
    (("crashes at load", "1.2.3"), "fake 1.2.3 ended: signal SIGSEGV"),
    (("does not load", "1.2.3"), "undefined symbol: fake. Update it: python -m pip install"),
    (("no device", "1.2.3"), "fake finds no CPU that it can use here. Install the driver of the fake"),
    (("crashes at run", "1.2.3"), "fake 1.2.3 ended: signal SIGSEGV"),
    (("crashes later", "1.2.3"), "fake 1.2.3 ended: signal SIGSEGV"),
    (("hangs", "1.2.3"), "fake 1.2.3 does not answer within 2 s"),
    (("answers wrong", "1.2.3"), "fake 1.2.3 gives wrong results here: output y: error"),
]


BROKEN_DIRECT = [
    (("", "", "direct"), "needs the package edgeq-fake-direct, not installed here. Install it: python -m pip install"),
    (("", "1.1.9", "direct"), "edgeq-fake-direct 1.1.9 is older than 1.2"),
    (("crashes at load", "1.2.3", "direct"), "fake 1.2.3 ended: signal SIGSEGV"),
    (
        ("refuses the model", "1.2.3", "direct"),
        "fake 1.2.3: FakeExecutionProvider cannot compile the model: Check 'false' failed at src/fake.cpp:1",
    ),
    (("crashes at compile", "1.2.3", "direct"), "fake 1.2.3 ended: signal SIGSEGV"),
    (("fails at import", "1.2.3", "direct"), "edgeq-fake-direct 1.2.3 cannot be imported: libfake.so: "),
    (("other outputs", "1.2.3", "direct"), "FakeExecutionProvider has other inputs or outputs than the file"),
    (("crashes at run", "1.2.3", "direct"), "fake 1.2.3 ended: signal SIGSEGV"),
    (("hangs", "1.2.3", "direct"), "fake 1.2.3 does not answer within 2 s"),
    (("answers wrong", "1.2.3", "direct"), "fake 1.2.3 gives wrong results here: output y: error"),
]


@pytest.mark.parametrize("device", [("", "1.2.3", "direct")], indirect=True)
def test_a_package_that_is_no_plugin_runs_with_the_options_of_the_description(device: Device) -> None:
    found = device.infer()
    assert (found["variant"], found["passed_over"]) == ("own-fake", [])
    compiled = [json.loads(line) for line in (device.root / "plugin" / "compiled.jsonl").read_text().splitlines()]
    assert compiled == [["CPU", {"HINT": "single", "THREADS": "1"}, {"0": list(INPUT.shape)}]], "once"
    code, out, _ = device.run("info")
    assert (code, "engine fake: edgeq-fake-direct 1.2.3" in out) == (0, True)
    assert device.run("verify")[0] == 0
    code, out, _ = device.run("bench", "--duration", "0.02", "--queries", "2", "--json")
    assert (code, json.loads(out)["models"]["own-fake"]["providers"]) == (0, [FAKE])


@pytest.mark.parametrize(
    ("device", "line"), [*BROKEN, *BROKEN_DIRECT], indirect=["device"], ids=lambda part: "-".join(part)[:20]
)
def test_the_fallback_runs_and_one_line_says_why(device: Device, line: str) -> None:
    assert line in device.fallback()


@pytest.mark.parametrize(
    ("device", "status", "named"),
    [
        (("", ""), "not run", 7),
        (("crashes at run", "1.2.3"), "not used", 10),
        (("answers wrong", "1.2.3"), "not used", 10),
    ],
    indirect=["device"],
)
def test_verify_holds_by_the_fallback_but_not_where_the_plugin_was_named(
    device: Device, status: str, named: int
) -> None:
    code, out, _ = device.run("verify", "--json")
    report = json.loads(out)
    (entry,) = (entry for entry in report["variants"] if entry["variant"] == "own-fake")
    assert (code, report["passed"], entry["status"]) == (0, True, status)
    code, _, err = device.run("verify", "--variant", "own-fake")
    assert (code, len(err.splitlines())) == (named, 1)


@pytest.mark.parametrize("device", [("", "")], indirect=True)
def test_info_says_what_would_help(device: Device) -> None:
    code, out, _ = device.run("info")
    assert code == 0
    assert "engine fake: fake needs the package edgeq-fake-engine, not installed here. Install it:" in out
    code, _, err = device.run("infer", str(device.root / "x.npy"), "--variant", "own-fake")
    assert code == 7
    assert "variant own-fake does not run here: fake needs the package" in err


def test_a_precision_that_is_slow_here_is_passed_over() -> None:
    provider = edgeq_device.engines.catalog.engines()["openvino"].provider
    brain = fakes.variant("v", ep=provider, info={"precision": "bf16"})
    usable = fakes.device("avx2", plugins={provider: ""})
    assert judge(brain, usable).reasons == ("bf16 is slow in openvino without amx_bf16 or avx512_bf16",)
    assert judge(brain, fakes.device("amx_bf16", plugins={provider: ""})).fits
