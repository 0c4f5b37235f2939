"""Test a bundle on an emulated ARM64 device: with the device's own Python, as on a real device, and through edgeq."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.data.open_source import Data
from edgeq.emulate.check import VerifyRequest, verify_on
from edgeq.emulate.emulator import find_emulator
from edgeq.emulate.machine import QemuProgram, build_command
from edgeq.emulate.sysroot import Sysroot
from edgeq.errors import HardwareError
from edgeq.jobs.package import package
from tests.graphs import proto

pytestmark = pytest.mark.slow

A53, A76 = "cortex-a53", "cortex-a76"
TARGETS = ("raspberry-pi-4", "raspberry-pi-5", "haswell")
Ended = subprocess.CompletedProcess[str]
Run = Callable[..., Ended]
COMMANDS = {
    A53: (("info",), ("verify", "--json")),
    A76: (("info",), ("verify", "--json"), ("bench", "--duration", "0.2", "--queries", "3", "--json")),
}
# Run the program once for each command, forked from a process that has already done the imports, which are slow on an
# emulated CPU.
FORKS = """
import json, os, runpy, sys
import numpy, onnxruntime

folder, script, *commands = json.loads(sys.argv[1])
for number, words in enumerate(commands):
    child = os.fork()
    if not child:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = [script, *words]
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def device(arm64: tuple[QemuProgram, Sysroot]) -> Run:
    """Return a function that runs a bundle's own program on an ARM64 CPU."""

    def run(cpu: str, script: Path, *arguments: str, modules: str = "") -> subprocess.CompletedProcess[str]:
        command = build_command(find_emulator("arm64"), cpu)
        environment = {**command.environment, "PYTHONPATH": modules or str(arm64[1].site)}
        words = [*command.interpreter, "-X", f"pycache_prefix={command.compiled}", str(script), *arguments]
        return subprocess.run(words, capture_output=True, text=True, env=environment)

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small convolutional network and samples for it."""
    folder = tmp_path_factory.mktemp("arm64")
    random = np.random.default_rng(0)
    weights = {
        "w1": random.standard_normal((16, 3, 3, 3)) * 0.3,
        "w2": random.standard_normal((16, 16, 3, 3)) * 0.1,
        "w3": random.standard_normal((16, 10)) * 0.3,
    }
    body = """net (float[1, 3, 16, 16] x) => (float[1, 10] y) {
        [first] a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w1)
        [relu] b = Relu(a)
        [second] c = Conv<pads = [1, 1, 1, 1]>(b, w2)
        [pool] d = GlobalAveragePool(c)
        [flatten] e = Flatten(d)
        [last] y = MatMul(e, w3)
    }"""
    onnx.save(proto(body, {name: value.astype(np.float32) for name, value in weights.items()}), folder / "net.onnx")
    images = random.standard_normal((24, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "images.npz", x=images, label=np.arange(24) % 10)
    return folder


@pytest.fixture(scope="session")
def bundle(data: Path) -> Path:
    """Package for two ARM64 targets and one other. Tests must not change the bundle."""
    samples = Data(data / "images.npz", "key=x,label=label")
    package(data / "net.onnx", samples, data / "bundle", targets=TARGETS, timed=False, emulate=False)
    package(data / "net.onnx", samples, data / "only.edgeq", targets=("haswell",), timed=False, emulate=False)
    return data / "bundle"


@pytest.fixture(scope="module")
def ended(device: Run, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Ended]:
    """Return how a command of the bundle's own program ended on a CPU."""

    @cache
    def run(cpu: str) -> dict[str, Ended]:
        folder = tmp_path_factory.mktemp(cpu)
        (folder / "forks.py").write_text(FORKS)
        script = str(bundle / "edgeq_run.py")
        done = device(cpu, folder / "forks.py", json.dumps([str(folder), script, *COMMANDS[cpu]]))
        assert done.returncode == 0, done.stderr
        found = {}
        for number, (words, code) in enumerate(zip(COMMANDS[cpu], done.stdout.split(), strict=True)):
            out, err = ((folder / f"{number}.{name}").read_text() for name in ("out", "err"))
            found[words[0]] = Ended(words, int(code), out, err)
        return found

    return lambda cpu, command: run(cpu)[command]


@pytest.mark.parametrize(("cpu", "chosen"), [(A53, "raspberry-pi-4"), (A76, "raspberry-pi-5")])
def test_the_device_takes_the_best_variant_and_says_why(
    ended: Callable[[str, str], Ended], cpu: str, chosen: str
) -> None:
    ran = ended(cpu, "info")
    assert ran.returncode == 0, ran.stderr
    lines = dict(re.findall(r"model/(\S+): (.*)", ran.stdout))
    assert lines[chosen].startswith("chosen: ")
    assert lines["haswell"] == "not here: it is for x86_64, this device is arm64"
    if chosen == "raspberry-pi-4":
        assert lines["raspberry-pi-5"] == "not here: this device has no asimddp"
    else:
        assert "this device has asimddp" in lines[chosen]


@pytest.mark.parametrize("cpu", [A53, A76])
def test_the_self_test_holds_there(ended: Callable[[str, str], Ended], cpu: str) -> None:
    ran = ended(cpu, "verify")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["architecture"] == "arm64"
    ran_there = {v["variant"]: v["status"] for v in report["variants"]}
    dot = "passed" if cpu == A76 else "not run"
    assert ran_there == {"raspberry-pi-4": "passed", "raspberry-pi-5": dot, "haswell": "not run"}


def test_it_times_itself_there(ended: Callable[[str, str], Ended]) -> None:
    ran = ended(A76, "bench")
    assert ran.returncode == 0, ran.stderr
    assert "raspberry-pi-5" in ran.stdout


def test_a_bundle_for_other_devices_is_refused(device: Run, bundle: Path) -> None:
    ran = device(A76, bundle.parent / "only.edgeq", "verify")
    assert ran.returncode == 7
    assert "no variant runs on this device (haswell: it is for x86_64, this device is arm64)" in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("attack", ["changed", "truncated", "added"])
def test_a_bundle_that_was_touched_is_refused_before_it_is_loaded(
    device: Run, bundle: Path, tmp_path: Path, attack: str
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    model = next(path for path in sorted(copy.rglob("*.onnx")))
    content = bytearray(model.read_bytes())
    if attack == "changed":
        content[len(content) // 2] ^= 1
        model.write_bytes(content)
    elif attack == "truncated":
        model.write_bytes(content[:-100])
    else:
        model.with_name("more.onnx").write_bytes(content)
    # numpy and onnxruntime cannot be imported here. A program that needs them before it checks the hashes would end
    # otherwise.
    ran = device(A53, copy / "edgeq_run.py", "verify", modules="/no/such/folder")
    assert ran.returncode == 7, ran.stderr
    assert ran.stderr.startswith("edgeq_run: ")
    assert ran.stderr.count("\n") == 1
    assert not ran.stdout


def test_a_truncated_archive_is_refused(device: Run, bundle: Path, tmp_path: Path) -> None:
    whole = bundle.parent / "only.edgeq"
    cut = tmp_path / "cut.edgeq"
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(cut, "w") as fewer:
        for info in archive.infolist():
            content = archive.read(info)
            fewer.writestr(info, content[:-10] if info.filename.endswith(".onnx") else content)
    ran = device(A53, bundle / "edgeq_run.py", "verify", "--bundle", str(cut))
    assert ran.returncode == 7
    assert "cut.edgeq" in ran.stderr
    shutil.copy(whole, cut)
    cut.write_bytes(whole.read_bytes()[:-200])
    assert device(A53, bundle / "edgeq_run.py", "verify", "--bundle", str(cut)).returncode == 7


def test_edgeq_proves_the_kernels_and_the_answers(arm64: tuple[QemuProgram, Sysroot], bundle: Path, data: Path) -> None:
    found = verify_on(
        VerifyRequest(
            bundle, ("raspberry-pi-4", "raspberry-pi-5"), data=data / "images.npz", count=5, task="classification"
        )
    )
    found.check()
    four, five = found.checks
    assert (four.variant, four.how) == ("raspberry-pi-4", "qemu-aarch64 -cpu cortex-a72")
    assert (five.variant, five.how) == ("raspberry-pi-5", "qemu-aarch64 -cpu cortex-a76")
    for check in (four, five):
        assert (check.status, check.where, check.samples) == ("passed", "emulated", 5)
        assert check.drop is not None
        assert check.agreement is not None
        assert check.agreement.sqnr_db > 25
    assert four.kernels is not None
    assert four.kernels.instructions == ()
    assert five.kernels is not None
    assert five.kernels.instructions == ("dot product",)


def test_a_cpu_that_this_qemu_does_not_have(arm64: tuple[QemuProgram, Sysroot]) -> None:
    with pytest.raises(HardwareError, match=r"has no CPU 'cortex-z9'"):
        build_command(find_emulator("arm64"), "cortex-z9")
