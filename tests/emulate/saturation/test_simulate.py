"""Test whole models: exact ones agree with sessions, saturating ones with the emulated CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.base import Artifact
from edgeq.emulate.audit import KernelSimulation, audit, count_samples
from edgeq.errors import UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.model.convert import to_bytes
from edgeq.model.parts import with_outputs
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from tests.backends.build import Bench, bench, mixed, residual
from tests.emulate.saturation.emulated_kernels import command, emulated

PRECISE = {"session.x64quantprecision": "1"}


@pytest.fixture
def net(tmp_path: Path) -> Bench:
    return bench(tmp_path, residual())


@pytest.fixture(scope="module")
def saturates_natively() -> bool:
    return match_profile(detect_machine(), load_profiles()).profile.saturates(Scheme())


def equal_to_a_session(net: Bench, artifact: Artifact, *, saturating: bool) -> None:
    session = open_session(artifact.model, artifact.settings())
    simulation = KernelSimulation(artifact.model, artifact.settings(), saturating=saturating)
    for sample in net.samples:
        (got,) = simulation.run(sample.inputs).outputs.values()
        np.testing.assert_array_equal(session.run(None, dict(sample.inputs))[0], got)


@pytest.mark.parametrize("scheme", [{}, {"format": "QOperator"}, {"activation_type": "int8"}, {"per_channel": False}])
def test_without_saturation_it_is_the_session(net: Bench, saturates_natively: bool, scheme: dict[str, object]) -> None:
    equal_to_a_session(net, net.build(**scheme), saturating=saturates_natively)


def test_dynamic_models_too(tmp_path: Path, saturates_natively: bool) -> None:
    net = bench(tmp_path, mixed())
    types = {"Conv": "uint8", "MatMul": "int8", "Gemm": "int8"}
    equal_to_a_session(net, net.build(mode="dynamic", dynamic_weight_types=types), saturating=saturates_natively)


def test_layers_that_can_saturate_are_found(net: Bench) -> None:
    artifact = net.build()
    simulation = KernelSimulation(artifact.model, artifact.settings())
    assert [layer.node.op_type for layer in simulation.layers] == ["QLinearConv", "QLinearConv", "QGemm"]
    found = audit(artifact.model, artifact.settings(), samples=net.samples, reference=open_session(net.prepared.path))
    assert not found.safe
    assert found.clipped > 0
    assert found.float_db is not None
    assert found.float_db[0] < found.float_db[1]
    assert found.samples == len(net.samples)
    assert "can saturate" in found.summary()


@pytest.mark.parametrize("scheme", [{"fit_pairs": True}, {"reduce_range": True}, {"weight_type": "uint8"}])
def test_mitigations_are_safe_whatever_the_input(net: Bench, scheme: dict[str, object]) -> None:
    artifact = net.build(**scheme)
    assert audit(artifact.model, artifact.settings(), samples=net.samples).safe
    inputs = next(iter(net.samples)).inputs
    (run,) = KernelSimulation(artifact.model).run(inputs).outputs.values()
    (exact,) = KernelSimulation(artifact.model, saturating=False).run(inputs).outputs.values()
    np.testing.assert_array_equal(run, exact)


def test_the_session_option_makes_it_exact(net: Bench) -> None:
    artifact = net.build(session_options=PRECISE)
    assert artifact.session_options == PRECISE
    assert KernelSimulation(artifact.model, artifact.settings()).layers == ()


def test_fitted_weights_are_nearer_than_seven_bits(net: Bench) -> None:
    schemes: dict[str, dict[str, bool]] = {"full": {}, "fitted": {"fit_pairs": True}, "seven": {"reduce_range": True}}
    sqnr = {name: exact_sqnr(net, net.build(f"{name}.onnx", **scheme)) for name, scheme in schemes.items()}
    assert sqnr["fitted"] > sqnr["seven"]
    assert sqnr["full"] - sqnr["fitted"] < 3


def exact_sqnr(net: Bench, artifact: Artifact) -> float:
    simulation = KernelSimulation(artifact.model, artifact.settings(), saturating=False)
    session = open_session(net.prepared.path)
    wanted = np.concatenate([session.run(None, dict(sample.inputs))[0] for sample in net.samples])
    got = np.concatenate([next(iter(simulation.run(sample.inputs).outputs.values())) for sample in net.samples])
    return float(10 * np.log10(np.sum(wanted**2) / np.sum((wanted - got) ** 2)))


@pytest.mark.parametrize(
    "scheme", [{"format": "QOperator"}, {"weight_type": "uint8"}, {"reduce_range": True}, {"mode": "dynamic"}]
)
def test_fitting_what_cannot_be_fitted_is_refused(net: Bench, scheme: dict[str, object]) -> None:
    types = {"dynamic_weight_types": {"MatMul": "int8"}} if scheme.get("mode") else {}
    with pytest.raises(UsageError, match="fit_pairs"):
        net.build(fit_pairs=True, **scheme, **types)


def test_larger_models_are_simulated_on_fewer_samples() -> None:
    assert [count_samples(macs) for macs in (0, 10**6, 10**9, 4 * 10**9, 10**12)] == [8, 8, 8, 2, 2]


@pytest.mark.slow
def test_every_layer_equals_the_emulated_cpu(net: Bench, tmp_path: Path) -> None:
    prefix = command()
    if not prefix:
        pytest.skip("no qemu-user for this machine's architecture")
    folder = tmp_path / "models"
    folder.mkdir()
    artifact = net.build()
    simulation = KernelSimulation(artifact.model, SessionSettings())
    names = [layer.node.outputs[0].name for layer in simulation.layers]
    sample = next(iter(net.samples))
    (folder / "net.onnx").write_bytes(to_bytes(with_outputs(simulation.graph.model, names)))
    np.savez(folder / "net.npz", **sample.inputs)
    found = emulated(folder, tmp_path / "out.npz", prefix)
    run = simulation.run(sample.inputs)
    for layer in simulation.layers:
        np.testing.assert_array_equal(
            found[f"net:{layer.node.outputs[0].name}"], run.layers[layer.name].output, layer.name
        )
    exact = KernelSimulation(artifact.model, saturating=False).run(sample.inputs)
    assert not all(np.array_equal(run.layers[name].output, exact.layers[name].output) for name in run.layers)
