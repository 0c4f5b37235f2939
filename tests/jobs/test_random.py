"""Test that models that draw random numbers are compared by the same numbers, and that the written files still draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.bundle.verify import verify_bundle
from edgeq.jobs.package import package
from edgeq.jobs.quantize import quantize
from edgeq.measure.agreement import Agreement
from edgeq.measure.debug import debug
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.run.session import SessionSettings, open_session
from tests.backends.build import random
from tests.graphs import proto

NOISE = {
    "normal": "noise = RandomNormalLike (a)",
    "seeded": "[noise] noise = RandomNormalLike <seed = 1.0> (a)",
    "dropout": "[noise] dropped, mask = Dropout (a, ratio, training) c = Cast <to = 1> (mask) noise = Mul (c, dropped)",
    "bernoulli": "[noise] coin = Bernoulli (half) noise = Mul (coin, a)",
}
SAMPLES = [{"x": random(1, 8, 8, 8, seed=seed)} for seed in range(8)]


def noisy(kind: str, *, batch: str = "1", calm: bool = False) -> onnx.ModelProto:
    """Return a network that adds noise between two layers. With `calm`, another output does not depend on the noise."""
    outputs, more = (
        (f", float[{batch}, 8, 8, 8] calm", "calm = Conv <pads = [1, 1, 1, 1]> (a, w)") if calm else ("", "")
    )
    made = proto(
        f"""g (float[{batch}, 8, 8, 8] x) => (float[{batch}, 8, 8, 8] y{outputs})
            <float[8, 8, 3, 3] w, float ratio = {{0.3}}, bool training = {{1}}>
            {{ b = Conv <pads = [1, 1, 1, 1]> (x, w) a = Relu (b) half = Sigmoid (a) {NOISE[kind]}
               s = Add (a, noise) y = Conv <pads = [1, 1, 1, 1]> (s, w) {more} }}"""
    )
    weights = np.random.default_rng(0).normal(0, 0.15, (8, 8, 3, 3)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return made


def draws(model: Path) -> bool:
    """Return whether two runs of the file have different outputs, where sessions may draw."""
    session = open_session(model, SessionSettings(draws=True))
    first, again = (session.run(["y"], SAMPLES[0])[0] for _ in range(2))
    return bool((first != again).any())


@pytest.mark.parametrize("target", ["generic-x86-64", "raspberry-pi-4", "jetson-orin", "gemmini"])
@pytest.mark.parametrize("kind", NOISE)
def test_both_models_have_the_same_numbers(kind: str, target: str, tmp_path: Path) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(noisy(kind), source)
    result = quantize(source, SAMPLES, output, target=target, timed=False, emulate=False)
    assert result.proof.agreement.sqnr_db > 20
    assert result.proof.repair is None
    assert any("draws random numbers" in note for note in result.notes)
    assert draws(output)


def test_the_same_model_gives_the_same_file(tmp_path: Path) -> None:
    source, outputs = tmp_path / "m.onnx", [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    onnx.save(noisy("normal"), source)
    for output in outputs:
        quantize(source, SAMPLES, output, timed=False, emulate=False)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_other_sizes_and_debug_use_the_same_numbers(tmp_path: Path) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(noisy("normal", batch="n"), source)
    quantize(source, SAMPLES, output, timed=False, emulate=False)
    found = debug(source, output, SAMPLES)
    assert min(found.optimised.sqnr_db, found.written.sqnr_db) > 25


def _agreements(source: Path, bundle: Path) -> list[Agreement]:
    """Return the agreement of a bundle with its source, as `edgeq eval` and `edgeq debug` measure it."""
    evaluated = run_evaluation(EvalRequest(bundle, SAMPLES, reference=source)).agreement
    diagnosis = debug(source, bundle, SAMPLES)
    assert evaluated is not None
    return [evaluated, diagnosis.optimised, diagnosis.written]


@pytest.mark.parametrize("calm", [False, True])
def test_the_self_test_of_a_bundle_leaves_out_outputs_that_draw(calm: bool, tmp_path: Path) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "dist"
    onnx.save(noisy("normal", calm=calm), source)
    options: dict[str, Any] = {"timed": False, "emulate": False}
    package(source, SAMPLES, output, **options)
    report = verify_bundle(output)
    (variant,) = report.variants
    assert report.passed
    assert min(agreement.sqnr_db for agreement in _agreements(source, output)) > 25
    assert variant.status == ("passed" if calm else "loaded")
    assert variant.reason == "not compared, because they depend on random numbers: y"
    assert [check.name for check in variant.selftest.outputs if variant.selftest] == ["calm"] if calm else True
