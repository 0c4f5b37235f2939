"""Test that edgeq repairs a result that falls short before it writes the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from edgeq.cli import group
from edgeq.data.open_source import Data
from edgeq.errors import CheckFailedError, UsageError
from edgeq.jobs.package import package
from edgeq.jobs.quantize import Quantized, quantize
from edgeq.measure.agreement import HEALTHY_DB
from edgeq.prove.proof import INT8, NotFiniteError
from edgeq.util.records import plain
from tests.graphs import proto

# One channel of the first layer is a thousand times the others. One scale for the tensor rounds the others to zero.
NET = """
uneven (float[N, 8, 6, 6] x) => (float[N, 4] y) {
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [relu] b = Relu (a)
    [second] c = Conv <pads = [1, 1, 1, 1]> (b, w2)
    [pool] d = GlobalAveragePool (c)
    [flat] y = Flatten (d)
}
"""


def write(first: np.ndarray, second: np.ndarray) -> None:
    """Write `net.onnx`, `calib.npz`, and `val.npz` with the labels that the float model gives."""
    random = np.random.default_rng(0)
    model = proto(NET)
    for name, values in (("w1", first), ("w2", second)):
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, "net.onnx")
    np.savez("calib.npz", x=random.normal(size=(8, 8, 6, 6)).astype(np.float32))
    samples = random.normal(size=(48, 8, 6, 6)).astype(np.float32)
    (scores,) = onnxruntime.InferenceSession("net.onnx").run(None, {"x": samples})
    np.savez("val.npz", x=samples, label=scores.argmax(1))


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Enter an empty folder and return even weights of both layers, [8, 8, 3, 3] and [4, 8, 3, 3]."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    return random.normal(0, 0.1, (8, 8, 3, 3)), random.normal(0, 0.1, (4, 8, 3, 3))


@pytest.fixture
def uneven(weights: tuple[np.ndarray, np.ndarray]) -> None:
    first, second = weights
    first[0] *= 1000
    second[:, 0] /= 1000
    write(first, second)


def quantized(**options: Any) -> Quantized:
    given = {"timed": False, "emulate": False, "overrides": {"per_channel": False}, "force": True}
    return quantize("net.onnx", "calib.npz", "out.onnx", **{**given, **options})


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("target", ["auto", "raspberry-pi-5", "nvidia-t4", "gemmini"])
def test_without_labels_outputs_become_healthy(target: str) -> None:
    fix = {"N": 1} if target == "gemmini" else {}
    how: dict[str, Any] = {"target": target, "fix": fix}
    if target == "gemmini":
        how["overrides"] = {}
    poor = quantized(effort=None, **how).proof
    assert poor.repair is None
    assert poor.agreement.sqnr_db < HEALTHY_DB, "the case must be poor"
    proof = quantized(**how).proof
    assert proof.repair is not None
    assert proof.repair.met
    assert proof.repair.basis == "noise"
    assert proof.agreement.sqnr_db >= HEALTHY_DB - 0.5
    assert plain(proof)["repair"]["met"] is True


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("count", [1, 7, 8])
def test_few_samples_without_labels_repair_nothing(count: int) -> None:
    with np.load("val.npz") as labelled:
        np.savez("bare.npz", x=labelled["x"][:count])
    proof = quantized(val="bare.npz").proof
    few = count < 8
    assert (proof.repair is None) == few
    assert any("little about others" in warning for warning in proof.warnings()) == few
    assert any("nothing is repaired by fewer than 8 samples" in warning for warning in proof.warnings()) == few


LABELLED: dict[str, Any] = {"val": Data("val.npz", "key=x,label=label"), "task": "classification"}


@pytest.mark.usefixtures("uneven")
def test_with_labels_accuracy_is_kept() -> None:
    poor = quantized(effort=None, **LABELLED).proof
    assert poor.drop is not None
    assert poor.drop > 0.05, "the case must be poor"
    proof = quantized(max_drop=0.02, **LABELLED).proof
    assert proof.repair is not None
    assert proof.repair.basis == "labels"
    assert proof.accuracy[INT8].value >= 0.98


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("options", [LABELLED, {"val": Data("val.npz", "key=x")}], ids=["labels", "noise"])
def test_runs_the_float_model_once_for_each_validation_sample(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with np.load("val.npz") as labelled:
        samples = labelled["x"]
    counts, open_original = np.zeros(len(samples), int), onnxruntime.InferenceSession

    class Counting(open_original):  # type: ignore[misc, valid-type]
        """Count the runs of every model without quantized nodes that has only the float model's input and output. The
        check of saturation runs pieces of the quantized model.
        """

        def __init__(self, model: str | bytes, *args: Any, **kwargs: Any) -> None:
            super().__init__(model, *args, **kwargs)
            loaded = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)
            names = [value.name for value in (*loaded.graph.input, *loaded.graph.output)]
            self._counts = names == ["x", "y"] and not any("Quant" in node.op_type for node in loaded.graph.node)

        def run(self, names: Any, feed: dict[str, np.ndarray], *args: Any) -> Any:
            if self._counts:
                for row in feed["x"]:
                    counts[(samples == row).all((1, 2, 3))] += 1
            return super().run(names, feed, *args)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counting)
    proof = quantized(max_drop=0.02 if "task" in options else None, **options).proof
    assert proof.repair is not None, "the case must be poor"
    assert proof.samples == len(samples)
    # Some checks run a few samples in batches or in other forms of the model.
    assert (counts[8:] == 1).all()


@pytest.mark.parametrize(("effort", "builds"), [("quick", 1), ("default", 3), ("thorough", 8)])
def test_the_effort_limits_the_builds(weights: tuple[np.ndarray, np.ndarray], effort: Any, builds: int) -> None:
    first, second = weights
    second[1:] = second[0] * (1 + 1e-4 * second[1:])  # 8 bits cannot represent the differences that decide
    write(first, second)
    repair = quantized(effort=effort, **LABELLED).proof.repair
    assert repair is not None
    assert 1 <= len(repair.steps) <= builds
    assert repair.steps[0].int8_mac_share == 1.0, "the first build costs no speed"


def test_an_insufficient_repair_is_written_or_refused(weights: tuple[np.ndarray, np.ndarray]) -> None:
    first, second = weights
    second[1:] = second[0] * (1 + 1e-4 * second[1:])  # 8 bits cannot represent the differences that decide
    write(first, second)
    result = quantized(effort="quick", **LABELLED)
    assert result.proof.repair is not None
    assert not result.proof.repair.met
    assert "accuracy falls" in result.proof.warnings()[0]
    before = result.output.read_bytes()
    with pytest.raises(CheckFailedError, match="build compared"):
        quantized(effort="quick", max_drop=0.01, **LABELLED)
    assert result.output.read_bytes() == before


def test_leaves_good_builds_unchanged(weights: tuple[np.ndarray, np.ndarray]) -> None:
    write(*weights)
    plain_build = quantized(effort=None).output.read_bytes()
    result = quantized()
    assert result.proof.repair is None
    assert result.output.read_bytes() == plain_build


@pytest.mark.usefixtures("uneven")
def test_the_same_input_gives_the_same_file() -> None:
    first = quantized().output.read_bytes()
    assert quantized().output.read_bytes() == first


@pytest.mark.usefixtures("uneven")
def test_choices_of_the_user_stay() -> None:
    result = quantized(overrides={"per_channel": False, "method": "entropy", "exclude": ("second",)})
    assert result.scheme.method == "entropy"
    assert not result.scheme.per_channel
    assert "second" in result.scheme.exclude


@pytest.mark.usefixtures("uneven")
def test_a_bundle_is_repaired_for_each_target() -> None:
    packaged = package(
        "net.onnx",
        "calib.npz",
        "dist",
        targets=["raspberry-pi-5", "nvidia-t4"],
        overrides={"per_channel": False},
        timed=False,
        emulate=False,
    )
    for variant in packaged.variants.values():
        assert variant.proof.repair is not None
        assert variant.proof.agreement.sqnr_db >= HEALTHY_DB - 0.5
        assert plain(variant)["repair"]["chosen"]


@pytest.mark.usefixtures("uneven")
def test_the_command_says_what_it_did() -> None:
    line = ["quantize", "net.onnx", "--data", "calib.npz", "--no-per-channel", "--no-timing", "-o", "out.onnx"]
    shown = CliRunner().invoke(group, [*line, "-v"])
    assert shown.exit_code == 0, shown.output
    assert "repaired: " in shown.output
    assert "1 build compared" in shown.output
    found = CliRunner().invoke(group, [*line, "--force", "--json"])
    assert json.loads(found.stdout)["repair"]["steps"]
    as_is = CliRunner().invoke(group, [*line, "--force", "--as-is"])
    assert "`--effort thorough` without --as-is and --recover may repair it" in as_is.output.replace("\n", " ")


@pytest.mark.usefixtures("uneven")
def test_an_unknown_effort_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"effort is 'fast'\. It can be quick, default, thorough"):
        quantized(effort="fast")


@pytest.mark.usefixtures("uneven")
def test_builds_that_the_target_cannot_run_are_not_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise CheckFailedError("needs a newer onnxruntime")

    monkeypatch.setattr("edgeq.tuning.local.runtime_requirements", refuse)
    repair = quantized().proof.repair
    assert repair is not None
    assert repair.chosen == "the plain build"
    assert not repair.steps


# 8 bits may round 1 plus a positive value to less than 1, for which Acosh is NaN.
NOT_A_NUMBER = """
rounded (float[N, 8, 6, 6] x) => (float[N, 8, 6, 6] y) {
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [relu] b = Relu (a)
    [shift] c = Conv (b, same, one)
    [arch] y = Acosh (c)
}
"""


@pytest.fixture
def not_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `net.onnx`, whose plain build gives NaN, and `calib.npz`."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    model = proto(NOT_A_NUMBER)
    weights = {"w1": random.normal(0, 0.35, (8, 8, 3, 3)), "same": np.eye(8)[:, :, None, None], "one": np.ones(8)}
    for name, values in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, "net.onnx")
    np.savez("calib.npz", x=np.random.default_rng(1).normal(size=(32, 8, 6, 6)).astype(np.float32))


@pytest.mark.usefixtures("not_a_number")
@pytest.mark.parametrize("method", [None, "minmax"])
def test_outputs_that_are_not_finite_become_so(method: str | None) -> None:
    how: dict[str, Any] = {"overrides": {"method": method} if method else {}}
    with pytest.raises(NotFiniteError, match="output 'y' is not finite, but the float model's is"):
        quantized(effort=None, **how)
    proof = quantized(**how).proof
    assert proof.repair is not None
    assert proof.repair.met
    assert proof.agreement.sqnr_db >= HEALTHY_DB


@pytest.mark.usefixtures("not_a_number")
def test_outputs_that_stay_infinite_are_refused_with_what_was_tried() -> None:
    with pytest.raises(NotFiniteError, match=r"not finite, but the float model's is; no further build was better"):
        quantized(effort="quick", overrides={"method": "minmax", "exclude": ("relu",)})


def test_weights_in_blocks_are_repaired_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(2)
    model = proto("mlp (float[N, 64] x) => (float[N, 64] y) { [one] a = MatMul (x, w1) [two] y = MatMul (a, w2) }")
    for name in ("w1", "w2"):
        values = random.standard_t(3, (64, 64)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, "net.onnx")
    np.savez("calib.npz", x=random.normal(size=(64, 64)).astype(np.float32))
    blocks = {"overrides": {"mode": "weight-only", "weight_bits": 4}}
    assert quantized(effort=None, **blocks).proof.agreement.sqnr_db < HEALTHY_DB, "the case must be poor"
    proof = quantized(**blocks).proof
    assert proof.repair is not None
    assert proof.repair.met


def test_products_are_smoothed_for_targets_that_are_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    model = proto("""norm (float[N, 8, 32] x) => (float[N, 8, 32] y) {
        [norm] a = LayerNormalization (x, gain)
        [one] b = MatMul (a, w1)
        [relu] c = Relu (b)
        [two] y = MatMul (c, w2)
    }""")
    gain = np.ones(32)
    gain[:2] = 200  # these two leave only a few levels for the other channels
    first = random.normal(size=(32, 32))
    first[:2] /= 200
    for name, values in {"gain": gain, "w1": first, "w2": random.normal(size=(32, 32))}.items():
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, "net.onnx")
    np.savez("calib.npz", x=random.normal(size=(64, 8, 32)).astype(np.float32))
    assert quantized(target="nvidia-t4", effort=None, overrides={}).proof.agreement.sqnr_db < HEALTHY_DB
    repair = quantized(target="nvidia-t4", overrides={}).proof.repair
    assert repair is not None
    assert repair.met
    assert "smoothquant" in repair.chosen
    assert "in float" not in repair.chosen
