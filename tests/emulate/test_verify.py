"""Test `edgeq verify --on` and `edgeq emulate status` on bundles for this machine and for others."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from edgeq_device.prepare.arrays import read_arrays

from edgeq.backends.base import SIMULATORS
from edgeq.bundle.verify import open_checked
from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.emulate.check import VerifyRequest, suggest_check, verify_on
from edgeq.errors import BundleError, HardwareError, RuntimeUnavailableError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import resolve
from edgeq.jobs.package import package
from edgeq.util.records import plain
from tests.graphs import proto


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    random = np.random.default_rng(0)
    body = "net (float[1, 32] x) => (float[1, 8] y) { [product] y = MatMul(x, w) }"
    onnx.save(proto(body, {"w": random.standard_normal((32, 8)).astype(np.float32)}), folder / "net.onnx")
    np.savez(folder / "x.npz", x=random.standard_normal((12, 32)).astype(np.float32), label=np.arange(12) % 8)
    return folder


@pytest.fixture(scope="module")
def bundle(data: Path) -> Path:
    """Package for this machine and for a board of another architecture. Tests must not change the bundle."""
    board = "raspberry-pi-4" if detect_machine().architecture != "arm64" else "haswell"
    samples = Data(data / "x.npz", "key=x,label=label")
    package(data / "net.onnx", samples, data / "b", targets=("auto", board), timed=False, emulate=False)
    return data / "b"


@pytest.fixture
def bare(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a machine without emulators, compilers and apt."""
    monkeypatch.setenv("PATH", "")


def test_each_variant_on_its_target(bundle: Path, data: Path, bare: None) -> None:
    found = verify_on(VerifyRequest(bundle, ("all",), data=data / "x.npz", count=7, task="classification"))
    states = {check.variant: check.status for check in found.checks}
    native = resolve("auto").profile.name
    assert states.pop(native) == "passed"
    assert set(states.values()) == {"not run"}
    (here,) = (check for check in found.checks if check.variant == native)
    assert (here.where, here.samples, here.drop) == ("natively", 7, 0)
    found.check()
    assert json.loads(json.dumps(plain(found), allow_nan=False))["checks"]


def test_a_board_of_the_user_s_own_is_checked_on_its_profile(data: Path, tmp_path: Path, bare: None) -> None:
    native = resolve("auto").profile.name
    board, profile = tmp_path / "board.toml", tmp_path / "kind.toml"
    board.write_text(f'title = "x"\nextends = "{native}"\n', encoding="utf-8")
    profile.write_text(f'title = "x"\nextends = "{native}"\nrank = 1000\n', encoding="utf-8")
    samples = Data(data / "x.npz", "key=x,label=label")
    for file in (board, profile):
        package(data / "net.onnx", samples, tmp_path / file.stem, targets=(file,), timed=False, emulate=False)
    (check,) = verify_on(VerifyRequest(tmp_path / "board", ("all",))).checks
    assert (check.variant, check.target, check.status) == ("board", native, "passed")
    with pytest.raises(HardwareError, match=r"'kind', but neither is known here. Give the file .*`on` FILE.toml"):
        verify_on(VerifyRequest(tmp_path / "kind", ("all",)))
    (check,) = verify_on(VerifyRequest(tmp_path / "kind", (str(profile),))).checks
    assert check.variant == "kind"


# If its simulator is installed, the backend also compiles for its hardware.
SIMULATED = find_spec("onnxruntime_qnn") is not None
HEXAGON = {"hexagon-v73": "passed", "hexagon-v73-compiled": "passed"} if SIMULATED else {"hexagon-v73": "not run"}


@pytest.mark.parametrize(
    ("targets", "states", "line"),
    [
        (
            ("nvidia-t4",),
            {"nvidia-t4": "not run", "cuda-float16": "not run", "cpu-float32": "passed"},
            "verify {bundle} ⟨on⟩ all",
        ),
        (
            ("hexagon-v73", "gemmini"),
            {**HEXAGON, "hexagon-v73-cpu": "passed", "gemmini": "passed"},
            "verify {bundle} ⟨on⟩ all",
        ),
        (("auto",), {resolve("auto").profile.name: "passed"}, "verify {bundle}"),
    ],
)
def test_replacement_variants_are_checked_on_this_machine(
    targets: tuple[str, ...], states: dict[str, str], line: str, data: Path, tmp_path: Path, bare: None
) -> None:
    """Replacement variants are checked on this machine if the accelerator and its engine are missing, as on most
    machines that make bundles.
    """
    if {"CUDAExecutionProvider", "QNNExecutionProvider"} & set(onnxruntime.get_available_providers()):
        pytest.skip("an accelerator's provider is installed")
    samples = Data(data / "x.npz", "key=x,label=label")
    package(data / "net.onnx", samples, tmp_path / "b", targets=targets, timed=False, emulate=False)
    found = verify_on(VerifyRequest(tmp_path / "b", ("all",)), simulators=SIMULATORS)
    assert {check.variant: check.status for check in found.checks} == states
    found.check()
    assert suggest_check(tmp_path / "b", SIMULATORS) == line


def test_the_next_check_of_what_nothing_here_can_run(data: Path, tmp_path: Path, bare: None) -> None:
    board = "raspberry-pi-4" if detect_machine().architecture != "arm64" else "haswell"
    samples = Data(data / "x.npz", "key=x,label=label")
    package(data / "net.onnx", samples, tmp_path / "b", targets=(board,), timed=False, emulate=False)
    assert suggest_check(tmp_path / "b", SIMULATORS) == ("emulate setup" if board == "raspberry-pi-4" else None)


def test_a_target_takes_what_its_runner_would(bundle: Path) -> None:
    (check,) = verify_on(VerifyRequest(bundle, ("this-machine",))).checks
    assert check.variant == resolve("auto").profile.name
    with open_checked(bundle) as content:
        elsewhere = next(v for v in content.components["model"] if v.name != check.variant)
    with pytest.raises(BundleError, match=rf"variant {elsewhere.name} does not run here"):
        verify_on(VerifyRequest(bundle, ("this-machine",), variant=elsewhere.name))


def test_nothing_that_could_be_run_is_an_error(bundle: Path, bare: None) -> None:
    with open_checked(bundle) as content:
        native = resolve("auto").profile.name
        elsewhere = next(v.name for v in content.components["model"] if v.name != native)
    found = verify_on(VerifyRequest(bundle, (elsewhere,)))
    with pytest.raises(RuntimeUnavailableError, match=r"nothing could be checked \(.* is not installed"):
        found.check()


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"on": ("rasberry-pi-4",)}, HardwareError, "Did you mean raspberry-pi-4"),
        ({"on": ("all",), "variant": "none"}, BundleError, "has no variant 'none'"),
        ({"on": ("all",), "count": 3}, UsageError, "there are no samples"),
    ],
)
def test_requests_that_make_no_sense(bundle: Path, asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        verify_on(VerifyRequest(bundle, **asked))


def test_the_command(bundle: Path, data: Path, bare: None) -> None:
    words = ["verify", str(bundle), "--on", "this-machine", "--data", str(data / "x.npz"), "--count", "4"]
    ran = CliRunner().invoke(group, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    (check,) = json.loads(ran.stdout)["checks"]
    assert (check["status"], check["where"], check["samples"]) == ("passed", "natively", 4)
    assert "passed, natively" in CliRunner().invoke(group, words).stdout
    ran = CliRunner().invoke(group, ["verify", str(bundle), "--count", "4"])
    assert ran.exit_code == 2
    assert "--count is for checks on another target's kernels. Name the target with --on" in ran.stderr


def test_status_says_what_is_missing(bare: None) -> None:
    ran = CliRunner().invoke(group, ["emulate", "status", "--json"])
    assert ran.exit_code == 0, ran.output
    record = json.loads(ran.stdout)
    assert record["machines"]["arm64"] == {"qemu": None, "root": None}
    assert record["targets"]["this-machine"]["where"] == "natively"
    assert record["targets"]["gemmini"]["where"] == "modelled"
    # The toolkit has a folder of its own, which is empty here.
    rockchip = record["targets"]["rk3588"]
    assert (rockchip["where"], "edgeq toolkit rknn" in rockchip["reason"]) == ("not run", True)
    for name in ("this-machine", "gemmini"):
        assert name in CliRunner().invoke(group, ["emulate", "status"]).stdout


def test_setup_says_what_to_install(bare: None) -> None:
    ran = CliRunner().invoke(group, ["emulate", "setup", "arm64"])
    assert ran.exit_code == 8
    assert "apt-get is not installed" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert CliRunner().invoke(group, ["emulate", "setup", "vax"]).exit_code == 2


def test_answers_that_the_target_did_not_give_may_differ_by_what_quantization_changed(bundle: Path, data: Path) -> None:
    """If the target did not compute the reference outputs, the tolerance covers what quantization changed. On this
    machine it is a share of the largest value.
    """
    float_session = onnxruntime.InferenceSession(data / "net.onnx", providers=["CPUExecutionProvider"])
    native = resolve("auto").profile.name
    with open_checked(bundle) as content:
        for variant in content.components["model"]:
            cases = [(read_arrays(case.inputs), read_arrays(case.outputs)) for case in variant.cases]
            largest = 0.025 * max(np.abs(outputs["y"]).max() for _, outputs in cases)
            changed = max(np.abs(float_session.run(None, feed)[0] - outputs["y"]).max() for feed, outputs in cases)
            expected = largest if variant.name == native else max(largest, changed)
            assert variant.tolerance["y"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_package_is_checked_on_its_target_s_kernels(maskable: None, data: Path, tmp_path: Path) -> None:
    samples = Data(data / "x.npz", "key=x,label=label")
    made = package(data / "net.onnx", samples, tmp_path / "b", targets=("haswell",), timed=False)
    check = made.variants["haswell"].emulated
    assert check is not None
    assert (check.status, check.where, check.samples) == ("passed", "emulated", 12)
    assert check.kernels is not None
    assert check.kernels.pairs == "saturated"
    with open_checked(tmp_path / "b") as bundle:
        (variant,) = bundle.components["model"]
    checks = {check["name"]: check for check in variant.info["checks"]}
    for name in ("self-test", "load", "accuracy", "coverage"):
        assert (checks[name]["kind"], checks[name]["where"]) == ("emulated", check.how)
