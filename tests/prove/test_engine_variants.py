"""Test bundles with variants for a plug-in, and with one that runs without it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import edgeq_device.engines.catalog
import pytest
from edgeq_device.prepare.arrays import read_arrays

from edgeq.bundle.verify import open_checked
from edgeq.data.open_source import Data
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import resolve
from edgeq.jobs.bundles import BundleContents, bundle_variants
from edgeq.jobs.package import package
from edgeq.prove.builds import Builds
from edgeq.prove.engine_choices import exists_for
from edgeq.prove.target_checks import prove_in_engine
from edgeq.prove.variants import ProvenVariant, with_fallback
from edgeq.run.engines import EngineChoice, load_engines
from tests import fake_engine
from tests.opened import open_job

NET, CALIB, BUNDLE = Path("net.onnx"), Data("calib.npz"), Path("bundle")
QUICK: dict[str, Any] = {"timed": False, "emulate": False, "targets": ("cpu-any",)}


def install(place: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str = "", version: str = "1.2.3") -> EngineChoice:
    """Install the fake engine so that the runner finds it too."""
    (place / "plugin").mkdir()
    engine = fake_engine.install(place / "plugin", monkeypatch, behaviour, version)
    known = {**edgeq_device.engines.catalog.engines(), "fake": engine}
    monkeypatch.setattr("edgeq_device.engines.catalog.engines", lambda: known)
    return EngineChoice(engine)


def test_each_engine_adds_a_variant_of_the_same_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # its outputs differ by a thousandth, which shows where they come from
    fake = install(place, monkeypatch, "answers wrong")
    engines = (fake, dataclasses.replace(fake, precision="bf16"))
    found = package(NET, CALIB, BUNDLE, engines=engines, with_float=True, **QUICK)
    assert list(found.variants) == ["cpu-any", "cpu-any-fake", "cpu-any-fake-bf16"]
    assert found.models == 1
    assert [v.proof.engine for v in found.variants.values()] == ["onnxruntime", "fake", "fake:bf16"]
    assert len(list(BUNDLE.rglob("model.onnx"))) == 2, "int8 and float32, once each"
    with open_checked(BUNDLE) as bundle:
        own, plain, brain = bundle.components["model"]
        assert [v.name for v in bundle.components["float32"]] == ["float32"]
        expected = {name: read_arrays(variant.cases[0].outputs) for name, variant in (("own", own), ("fake", plain))}
    assert (own.ep, plain.ep, brain.ep) == ("CPUExecutionProvider", "FakeExecutionProvider", "FakeExecutionProvider")
    assert own.rank < brain.rank < plain.rank, "the first that was named is the best"
    assert (plain.info["precision"], brain.info["precision"]) == ("f32", "bf16")
    assert json.loads(brain.provider_options["config"]) == {"CPU": {"HINT": "brain"}}
    ((name, right),) = expected["own"].items()
    assert expected["fake"][name] == pytest.approx(right * 1.001), "its vectors are its own answers"


def test_an_unquantized_model_can_stand_beside_its_fallback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, machine = install(place, monkeypatch), detect_machine()
    target = resolve("cpu-any", machine)
    scheme = target.profile.scheme
    (place / "work").mkdir()
    job = open_job(NET, CALIB, None, place / "work", static=True)
    builds = Builds(job, place / "work", timed=False, emulate=False)
    built = builds.build(target, scheme)
    fallback = ProvenVariant(built, builds.prove(built, scheme, native=True), True, 1, scheme)
    better = prove_in_engine(builds, fallback, fake)
    float_artifact = dataclasses.replace(better.built.artifact, model=job.prepared.path)
    better = dataclasses.replace(better, built=dataclasses.replace(built, artifact=float_artifact, ranges={}))
    variants = with_fallback("cpu-any", fallback, [better])
    bundle_variants(
        job, variants, BUNDLE, workdir=place / "work", command="x", contents=BundleContents(with_float=True)
    )
    with open_checked(BUNDLE) as bundle:
        assert [v.name for v in bundle.components["model"]] == ["cpu-any", "cpu-any-fake"]


@pytest.mark.parametrize(("version", "line"), [("", "not installed here.*Install"), ("1.0", "1.0 is older than 1.2")])
def test_an_engine_that_is_not_here_proves_nothing(
    version: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(place, monkeypatch, version=version)
    with pytest.raises(RuntimeUnavailableError, match=line):
        package(NET, CALIB, BUNDLE, engines=[fake], **QUICK)
    assert not BUNDLE.exists()


def test_an_engine_that_exists_for_no_target_is_refused(place: Path) -> None:
    openvino = load_engines()["openvino"]
    machine = detect_machine()
    assert exists_for(openvino, resolve("haswell", machine))
    assert not exists_for(openvino, resolve("jetson-orin", machine))
    with pytest.raises(UsageError, match="there is no openvino for raspberry-pi-4"):
        package(NET, CALIB, BUNDLE, engines=[EngineChoice(openvino)], **{**QUICK, "targets": ("raspberry-pi-4",)})
