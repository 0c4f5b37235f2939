"""Compare the emulation of ncnn's arithmetic with ncnn's own ARM kernels under qemu, value by value."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from edgeq.data.open_source import Data
from edgeq.emulate.check import VerifyRequest, verify_on
from edgeq.emulate.machine import QemuProgram
from edgeq.emulate.sysroot import Sysroot
from edgeq.jobs.package import Packaged, package
from tests.graphs import proto

pytestmark = pytest.mark.slow

PI4, PI5 = "raspberry-pi-4-ncnn", "raspberry-pi-5-ncnn"
HALF = f"{PI5}-ncnn-f16"


@pytest.fixture(scope="module")
def packaged(arm64: tuple[QemuProgram, Sysroot], tmp_path_factory: pytest.TempPathFactory) -> Packaged:
    """Package a network with pointwise, depthwise and strided convolutions for two CPUs, and in 16-bit floats."""
    if not arm64[1].has_wheel("ncnn"):
        pytest.skip("the emulated ARM64 machine has no ncnn: edgeq emulate setup arm64")
    folder = tmp_path_factory.mktemp("ncnn")
    random = np.random.default_rng(0)
    weights = {
        "w1": random.standard_normal((16, 3, 3, 3)) * 0.3,
        "w2": random.standard_normal((16, 1, 3, 3)) * 0.3,
        "w3": random.standard_normal((24, 16, 1, 1)) * 0.2,
        "w4": random.standard_normal((24, 24, 3, 3)) * 0.1,
        "w5": random.standard_normal((24, 10)) * 0.3,
        "b1": random.standard_normal(16),
        "b3": random.standard_normal(24),
    }
    body = """net (float[1, 3, 16, 16] x) => (float[1, 10] y) {
        [first] a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w1, b1)
        [relu] b = Relu(a)
        [depthwise] c = Conv<pads = [1, 1, 1, 1], group = 16>(b, w2)
        [pointwise] d = Conv(c, w3, b3)
        [second] e = Relu(d)
        [dense] f = Conv<pads = [1, 1, 1, 1]>(e, w4)
        [pool] g = GlobalAveragePool(f)
        [flatten] h = Flatten(g)
        [last] y = MatMul(h, w5)
    }"""
    onnx.save(proto(body, {name: value.astype(np.float32) for name, value in weights.items()}), folder / "net.onnx")
    images = random.standard_normal((24, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "images.npz", x=images)
    data = Data(folder / "images.npz", "key=x")
    return package(
        folder / "net.onnx", data, folder / "b", targets=(PI4, PI5), engines="ncnn:f16", effort=None, timed=False
    )


@pytest.mark.parametrize(("name", "instructions"), [(PI4, ()), (PI5, ("dot product",))])
def test_every_value_is_the_emulations(packaged: Packaged, name: str, instructions: tuple[str, ...]) -> None:
    check = packaged.variants[name].emulated
    assert check is not None
    assert check.status == "passed", check.reason
    assert (check.equal, check.difference) == (check.samples, 0)
    assert check.samples > 0
    assert all(output.max_abs_error == 0 for output in check.selftest)
    assert check.kernels is not None
    assert (check.kernels.pairs, check.kernels.instructions) == ("exact", instructions)


def test_16_bit_floats_are_proven_apart(packaged: Packaged) -> None:
    assert set(packaged.variants) == {PI4, PI5, HALF}
    variant = packaged.variants[HALF]
    check = variant.emulated
    assert check is not None
    assert check.status == "passed", check.reason
    assert check.agreement is not None
    assert check.difference > 0
    assert (variant.proof.engine, variant.proof.samples) == ("ncnn:f16", check.samples)
    assert variant.proof.agreement == check.agreement


def test_the_finished_file_gives_the_answers_of_the_bundle(packaged: Packaged) -> None:
    verified = verify_on(VerifyRequest(packaged.bundle, on=(PI4,)))
    (check,) = verified.checks
    assert check.status == "passed", check.reason
    assert all(output.max_abs_error == 0 for output in check.selftest)
