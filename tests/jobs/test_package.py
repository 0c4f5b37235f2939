from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.prepare.arrays import read_arrays

from edgeq.bundle.verify import check_report, verify_bundle
from edgeq.data.open_source import Data
from edgeq.emulate.check import EmulatedCheck
from edgeq.errors import CheckFailedError, HardwareError, OutputError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.jobs.package import Packaged, package
from edgeq.measure.coverage import Coverage
from edgeq.prove.job import Built, Job
from edgeq.util.records import plain
from tests.opened import variant_info

NET = Path("net.onnx")
CALIB, VAL = Data("calib.npz"), Data("val.npz", "key=x,label=y")
BUNDLE = Path("bundle")


def packaged(output: Path = BUNDLE, **options: Any) -> Packaged:
    return package(NET, CALIB, output, **{"val": VAL, "timed": False, "emulate": False, "effort": None, **options})


def manifest(bundle: Path = BUNDLE) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return record


def variant(name: str) -> dict[str, Any]:
    return variant_info(BUNDLE, name)


@pytest.fixture
def native() -> str:
    return match_profile(detect_machine(), load_profiles()).profile.name


def test_a_bundle_that_verifies(place: Path, native: str) -> None:
    result = packaged()
    assert list(result.variants) == [native]
    assert result.variants[native].native
    report = verify_bundle(BUNDLE)
    check_report(report)
    assert plain(report)["passed"]
    with zipfile.ZipFile(BUNDLE / "calibration.zip") as tables:
        assert sorted(tables.namelist()) == [
            "calibration/calibration.cache", "calibration/calibration.flatbuffers", "calibration/calibration.json",
        ]  # fmt: skip
    assert len([p for p in BUNDLE.rglob("*") if p.is_file()]) <= 12
    assert not [p for p in place.iterdir() if p.name.startswith(".")]


def test_variants_stand_from_the_least_demanding_to_the_most(place: Path) -> None:
    result = packaged(targets=("cascade-lake", "raspberry-pi-4", "haswell"))
    assert list(result.variants) == ["raspberry-pi-4", "haswell", "cascade-lake"]
    assert {name: v.built.artifact.scheme.pair for name, v in result.variants.items()} == {
        "raspberry-pi-4": "S8S8",
        "haswell": "U8S8",
        "cascade-lake": "U8S8",
    }
    assert plain(verify_bundle(BUNDLE, variant="haswell"))["passed"]


def test_records_the_place_of_each_check(place: Path, native: str) -> None:
    packaged(targets=("this-machine", "raspberry-pi-4"))
    made = {name: {c["name"]: c["kind"] for c in variant(name)["checks"]} for name in (native, "raspberry-pi-4")}
    four = ("load", "coverage", "accuracy", "self-test")
    assert {made[native][name] for name in four} == {"native"}
    assert {made["raspberry-pi-4"][name] for name in four} == {"none"}
    assert made["raspberry-pi-4"]["runtime"] == "modelled"


def test_session_options_travel(place: Path, native: str) -> None:
    precise = {"session.x64quantprecision": "1"}
    result = packaged(overrides={"session_options": precise})
    assert result.variants[native].built.artifact.session_options == precise
    assert [p for p in (BUNDLE / "models").rglob("*.json") if "x64quantprecision" in p.read_text()]
    assert plain(verify_bundle(BUNDLE))["passed"]


def test_variants_describe_themselves(place: Path, native: str) -> None:
    result = packaged(task=None)
    metadata = variant(native)
    assert metadata["target"] == "this-machine"
    assert metadata["profile"] == native
    assert metadata["scheme"] == plain(result.variants[native].built.artifact.scheme)
    assert metadata["preprocessing"]["source"]["key"] == "x"
    assert metadata["coverage"] == {"int8_mac_share": 1.0, "basis": "native", "how": "this machine"}
    assert metadata["accuracy"]["samples"] == 3
    assert metadata["accuracy"]["held_out"] is True


def self_tests() -> list[Path]:
    with open_bundle(BUNDLE) as bundle:
        cases = bundle.components["model"][0].info["selftest"]["cases"]
    return [BUNDLE / case["inputs"] for case in cases]


def test_test_vectors_are_the_validation_samples(place: Path) -> None:
    packaged(selftest=2)
    inputs = self_tests()
    assert len(inputs) == 2
    with np.load("val.npz") as val:
        np.testing.assert_array_equal(read_arrays(inputs[0])["x"], val["x"][:1])


def test_more_test_vectors_than_samples_are_all_of_them(place: Path) -> None:
    packaged(selftest=50)
    assert len(self_tests()) == 3


def test_the_float_model_travels_on_request(place: Path) -> None:
    packaged()
    assert not (BUNDLE / "models" / "float32").exists()
    packaged(with_float=True, force=True)
    (model,) = (BUNDLE / "models" / "float32").rglob("*.onnx")
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(model).graph.node}


def test_an_archive_holds_what_the_directory_holds(place: Path) -> None:
    import zipfile

    packaged()
    packaged(Path("bundle.edgeq"))
    with zipfile.ZipFile("bundle.edgeq") as archive:
        for name in archive.namelist():
            assert archive.read(name) == (BUNDLE / name).read_bytes(), name
    assert plain(verify_bundle(Path("bundle.edgeq")))["passed"]


def test_records_the_source_of_the_bundle(place: Path) -> None:
    import hashlib

    packaged()
    metadata = manifest()["additional_metadata"]["edgeq"]
    assert metadata["source_model_sha256"] == hashlib.sha256(NET.read_bytes()).hexdigest()
    assert metadata["calibration_samples"] == 4
    assert len(metadata["calibration_sha256"]) == 64


def test_nothing_static_means_no_calibration_tables(place: Path) -> None:
    from tests.backends.build import mixed

    NET.write_bytes(mixed().SerializeToString())
    overrides = {"mode": "dynamic", "dynamic_weight_types": {"Conv": "uint8", "MatMul": "int8"}}
    package(NET, None, BUNDLE, val=VAL, timed=False, overrides=overrides)
    assert not (BUNDLE / "calibration.zip").exists()
    assert manifest()["additional_metadata"]["edgeq"]["calibration_samples"] == 0
    assert plain(verify_bundle(BUNDLE))["passed"]


def test_targets_with_one_need_share_one_model(place: Path) -> None:
    result = packaged(targets=("raspberry-pi-4", "raspberry-pi-5", "graviton3", "cascade-lake"))
    assert result.models == 2
    assert len({v.built.artifact.model for n, v in result.variants.items() if n != "cascade-lake"}) == 1
    assert {v.built.target.name for v in result.variants.values()} == set(result.variants)
    assert len(list(BUNDLE.rglob("model.onnx"))) == 2
    assert "failed" not in {report.status for report in verify_bundle(BUNDLE).variants}


@pytest.mark.parametrize("output", [BUNDLE, Path("bundle.edgeq")])
def test_weights_that_coincide_are_there_once(place: Path, output: Path) -> None:
    from tests.backends.build import residual

    NET.write_bytes(residual(width=64).SerializeToString())
    # Keep the full range of the weights. If this machine's kernels saturate, edgeq would otherwise reduce it.
    full = {"reduce_range": False}
    packaged(output, targets=("raspberry-pi-4", "auto"), overrides=full)
    packaged(Path("x"), targets=("raspberry-pi-4",))
    packaged(Path("y"), targets=("auto",), overrides=full)

    def held(bundle: Path) -> int:
        return sum(p.stat().st_size for folder in ("models", "shared_assets") for p in (bundle / folder).rglob("*.*"))

    report = verify_bundle(output)
    check_report(report)
    assert plain(report)["passed"]
    if output.is_dir():
        assert held(output) < 0.75 * (held(Path("x")) + held(Path("y")))


def test_a_changed_shared_weight_is_refused(place: Path) -> None:
    from edgeq.errors import BundleError
    from tests.backends.build import residual

    NET.write_bytes(residual(width=64).SerializeToString())
    packaged(targets=("raspberry-pi-4", "cascade-lake"))
    weight = max(BUNDLE.rglob("*.bin"), key=lambda p: p.stat().st_size)
    weight.write_bytes(bytes(len(weight.read_bytes())))
    with pytest.raises(BundleError, match="was changed"):
        verify_bundle(BUNDLE)


def test_one_bundle_for_each_target(place: Path) -> None:
    result = packaged(Path("dist"), targets=("raspberry-pi-4", "cascade-lake"), split=True)
    assert {name: path.name for name, path in result.bundles.items()} == {
        "raspberry-pi-4": "raspberry-pi-4.edgeq", "cascade-lake": "cascade-lake.edgeq",
    }  # fmt: skip
    for name, path in result.bundles.items():
        with open_bundle(path) as bundle:
            assert [held.name for held in bundle.components["model"]] == [name]
    with pytest.raises(OutputError, match="exists already"):
        packaged(Path("dist"), targets=("raspberry-pi-4",), split=True)
    with pytest.raises(UsageError, match="is one bundle"):
        packaged(Path("one.edgeq"), split=True)


def test_a_target_that_fails_leaves_the_bundles_of_the_others(place: Path) -> None:
    for name in ("old", "older"):
        Path(f"{name}.toml").write_text('title = "x"\nextends = "arm64-neon"\nruntime.onnxruntime = "1.10"\n')
    targets = ("old.toml", "haswell", "older.toml")
    with pytest.raises(CheckFailedError) as one:
        packaged(Path("one.edgeq"), targets=targets)
    assert one.value.problem.startswith("old: onnxruntime 1.10 is too old")
    assert not Path("one.edgeq").exists(), "without one of its variants it would look whole"
    with pytest.raises(CheckFailedError) as split:
        packaged(Path("dist"), targets=targets, split=True)
    first, second, written = split.value.problem.split("; ")
    assert (second.partition(":")[0], written) == ("older", "written: dist/haswell.edgeq")
    assert one.value.problem == f"{first}; one.edgeq, with the variant for old, is not written"
    assert [path.name for path in Path("dist").iterdir()] == ["haswell.edgeq"]
    with pytest.raises(CheckFailedError, match=r"older: .*; no bundle is written"):
        packaged(Path("none"), targets=("old.toml", "older.toml"), split=True)
    assert not Path("none").exists()


def test_saturation_is_dealt_with_and_reported(place: Path) -> None:
    result = packaged(targets=("haswell", "cascade-lake"))
    decision = result.variants["haswell"].decision
    assert decision is not None
    assert not decision.audit.safe
    assert decision.chosen.safe
    considered = {mitigation.name: mitigation for mitigation in decision.mitigations}
    assert list(considered)[:3] == ["full range", "fitted range", "7-bit weights"]
    assert "x64quantprecision" in considered, "it needs no build"
    assert "U8U8" not in considered, "it takes as long as x64quantprecision, which is exact"
    assert decision.exact_db - decision.chosen.sqnr_db <= 0.5
    cheaper = [r for r in decision.mitigations if r.safe and r.cost < decision.chosen.cost]
    assert all(decision.exact_db - r.sqnr_db > 0.5 for r in cheaper)
    assert result.variants["cascade-lake"].decision is None
    metadata = variant("haswell")["saturation"]
    assert metadata["chosen"] == decision.chosen.name
    assert {c["name"]: c["kind"] for c in variant("haswell")["checks"]}["saturation"] == "modelled"


def test_weights_that_cannot_saturate_are_left_alone(place: Path) -> None:
    from onnx import numpy_helper

    model = onnx.load(NET)
    for tensor in model.graph.initializer:
        weight = numpy_helper.to_array(tensor)
        if weight.ndim > 1:  # give neighbouring weights different signs
            signs = np.where(np.arange(weight.shape[1]) % 2, -1, 1).reshape(1, -1, *[1] * (weight.ndim - 2))
            tensor.CopyFrom(numpy_helper.from_array((np.abs(weight) * signs).astype(np.float32), tensor.name))
    onnx.save(model, NET)
    result = packaged(targets=("haswell", "cascade-lake"))
    decision = result.variants["haswell"].decision
    assert decision is not None
    assert decision.audit.safe
    assert [mitigation.name for mitigation in decision.mitigations] == ["full range"]
    assert result.models == 1
    assert not result.variants["haswell"].built.artifact.scheme.reduce_range


def test_a_user_who_has_decided_is_not_overruled(place: Path) -> None:
    result = packaged(targets=("haswell",), overrides={"reduce_range": False})
    assert result.variants["haswell"].decision is None
    checks = {check.name: check for check in result.variants["haswell"].checks}
    assert checks["saturation"].passed is False


def test_a_runtime_that_is_too_old_is_refused(place: Path) -> None:
    Path("old.toml").write_text('title = "old"\nextends = "arm64-neon"\n[runtime]\nonnxruntime = "1.15"\n')
    before = sorted(place.iterdir())
    with pytest.raises(CheckFailedError, match=r"onnxruntime 1\.15 is too old: .* needs 1\.16"):
        packaged(targets=("old.toml",))
    assert sorted(place.iterdir()) == before


@pytest.fixture
def _no_emulated_machines(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide emulated machines, so that coverage is always a forecast."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))


@pytest.mark.usefixtures("_no_emulated_machines")
def test_the_targets_own_kernels_decide(place: Path, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(job: Job, built: Built, coverage: Coverage, **options: Any) -> EmulatedCheck:
        asked.append((built.target.name, options["selftest"]))
        answers = tuple({"y": np.full((1, 3), 7.0, np.float32)} for _ in range(options["selftest"]))
        return EmulatedCheck(built.target.name, "", "emulated", "a test", "passed", answers=answers)

    monkeypatch.setattr("edgeq.jobs.package.check_built", check)
    result = packaged(targets=("raspberry-pi-4", "this-machine"), emulate=True)
    assert asked == [("raspberry-pi-4", 2)], "this machine's own kernels need no emulator"
    found = {name: {c.name: c.kind for c in v.checks} for name, v in result.variants.items()}
    assert found["raspberry-pi-4"]["self-test"] == "emulated"
    assert found[native]["self-test"] == "native"
    with open_bundle(BUNDLE) as bundle:
        pi = next(v for v in bundle.components["model"] if v.name == "raspberry-pi-4")
        assert (read_arrays(pi.cases[0].outputs)["y"] == 7.0).all(), "the self-test has the target's answers"


@pytest.mark.usefixtures("_no_emulated_machines")
def test_a_variant_that_fails_on_its_targets_kernels_stops_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(job: Job, built: Built, coverage: Coverage, **options: Any) -> EmulatedCheck:
        raise CheckFailedError("the model fails on raspberry-pi-4 (a test): y is off by 3")

    monkeypatch.setattr("edgeq.jobs.package.check_built", check)
    before = sorted(place.iterdir())
    with pytest.raises(CheckFailedError, match="y is off by 3"):
        packaged(targets=("raspberry-pi-4",), emulate=True)
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("targets", [("haswell", "haswell"), ("this-machine", "auto")])
def test_a_target_is_named_once(place: Path, targets: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="is named twice"):
        packaged(targets=targets)


def test_a_release_that_the_runner_would_not_take_is_refused(place: Path) -> None:
    """A release that supports the model's opset is refused if it is older than all that such models were tried with."""
    text = 'title = "old"\nextends = "x86-64-avx2"\n[runtime]\nonnxruntime = "1.17"\n'
    Path("old.toml").write_text(text, encoding="utf-8")
    with pytest.raises(CheckFailedError, match=r"old: onnxruntime 1.17 is older than 1.19, .* leave it out") as refused:
        packaged(targets=("old.toml",))
    assert "set min_onnxruntime in it" in refused.value.fix
    assert not BUNDLE.exists()
    Path("old.toml").write_text(f'min_onnxruntime = "1.17"\n{text}', encoding="utf-8")
    packaged(targets=("old.toml",))
    assert variant("old")["min_onnxruntime"] == "1.17"


@pytest.mark.parametrize("rank", ["", "rank = 1\n"])
def test_a_profile_by_path_that_requires_more_must_rank_higher(place: Path, rank: str) -> None:
    """A profile that requires more needs a higher rank. Otherwise a better device would choose a lesser variant."""
    own = Path("own.toml")
    own.write_text(f'title = "own"\nextends = "x86-64-avx2"\nrequires = ["avx512_vnni"]\n{rank}', encoding="utf-8")
    with pytest.raises(HardwareError, match=r"own.toml: rank \d+ is not above \d+ of x86-64-avx2, which requires less"):
        packaged(targets=(own, "haswell"))
    own.write_text(own.read_text("utf-8").replace(rank, "") + "rank = 21\n", encoding="utf-8")
    assert list(packaged(targets=(own, "haswell")).variants) == ["haswell", "own"]


def test_this_machine_and_its_own_profile_are_one(place: Path, native: str) -> None:
    with pytest.raises(UsageError, match=f"{native} is named twice"):
        packaged(targets=("this-machine", native))


def test_one_variant_that_fails_its_bar_leaves_nothing(place: Path) -> None:
    before = sorted(place.iterdir())
    with pytest.raises(CheckFailedError, match=r"less than the 100\.0% required"):
        packaged(targets=("this-machine",), require_coverage=1.0, overrides={"exclude": ("last",)})
    assert sorted(place.iterdir()) == before


def test_an_old_bundle_is_replaced_whole_and_only_with_force(place: Path) -> None:
    packaged(with_float=True)
    with pytest.raises(OutputError, match="exists already"):
        packaged()
    (BUNDLE / "models" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"bundle contains models/notes\.txt, which edgeq did not write"):
        packaged(force=True)
    assert (BUNDLE / "models" / "notes.txt").read_text() == "mine"
    (BUNDLE / "models" / "notes.txt").unlink()
    packaged(force=True)
    assert not (BUNDLE / "models" / "float32").exists()


def test_split_replaces_only_bundles(place: Path, native: str) -> None:
    packaged(Path("dist"), split=True)
    packaged(Path("dist"), split=True, force=True)
    mine = Path("dist") / f"{native}.edgeq"
    mine.write_text("mine")
    with pytest.raises(OutputError, match=r"\.edgeq is not a bundle that edgeq wrote"):
        packaged(Path("dist"), split=True, force=True)
    assert mine.read_text() == "mine"


def test_json_keys_are_those_documented(place: Path, native: str) -> None:
    record = plain(packaged())
    json.dumps(record, allow_nan=False)
    documented = (Path(__file__).parents[2] / "docs" / "package.md").read_text("utf-8").partition("`--json`")[2]
    assert [key for key in record if f"`{key}`" not in documented] == []
    proof = (
        (Path(__file__).parents[2] / "docs" / "reference" / "quantize.md").read_text("utf-8").partition("## JSON")[2]
    )
    assert [k for k in record["variants"][native] if f"`{k}`" not in documented + proof] == []
