"""Test the choice between int8 and float compute for products with weights in blocks, by the outcome of a race."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeq_device.measure.latency import Distribution
from onnx import numpy_helper

from edgeq.data.open_source import Data
from edgeq.data.sample import Sample
from edgeq.jobs.quantize import Quantized, quantize
from edgeq.prove.block_race import raced_feeds
from edgeq.quantization.block_products import LEVEL
from edgeq.util.records import plain
from tests.graphs import proto
from tests.tuning.recover.nets import FewSamples

K = 64
NET = f"""g (float[B,{K}] x) => (float[B,{K}] y) <float[{K},{K}] w, float[{K},{K}] v> {{
    [first] a = MatMul(x, w) [relu] r = Relu(a) [second] y = MatMul(r, v)
}}"""
OUT = Path("q.onnx")
Race = Callable[..., None]


@pytest.fixture
def race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Race:
    """Return a function that makes float compute take `times` times as long as int8 in later races.

    0 makes all races immeasurable.
    """
    random = np.random.default_rng(0)
    model = proto(NET)
    for name in "wv":
        values = random.normal(size=(K, K)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "calib.npz", x=random.normal(size=(8, 4, K)).astype(np.float32))
    monkeypatch.chdir(tmp_path)

    def outcome(times: float, busy: bool = False) -> None:
        def raced(models: Mapping[str, Any], on_round: object) -> Mapping[str, Distribution]:
            assert list(models) == ["int8", "float32"]
            for runner, *_ in models.values():
                runner()
            taken = {"int8": 1.0, "float32": times or 1.0}
            return {
                name: Distribution(np.full(12 if times else 2, ms), disturbed=np.full(12 if times else 2, busy))
                for name, ms in taken.items()
            }

        monkeypatch.setattr("edgeq.prove.block_race.race", raced)

    return outcome


def quantized(**overrides: Any) -> Quantized:
    chosen = {"mode": "weight-only", "weight_bits": 4, "weight_symmetric": False, **overrides}
    return quantize(
        "net.onnx", Data("calib.npz", "none"), OUT, overrides=chosen, force=True, emulate=False, effort=None
    )


def levels() -> list[int]:
    return [a.i for node in onnx.load(OUT).graph.node for a in node.attribute if a.name == LEVEL]


@pytest.mark.parametrize(
    ("times", "level", "chosen", "why"),
    [
        (0.8, 1, ("*",), "float, which is more accurate: float compute runs at 1.25 times int8's speed"),
        (
            1.0,
            1,
            ("*",),
            "float, which is more accurate: float compute against int8: no difference in speed is settled",
        ),
        (1.5, 4, (), "less noise than weights of 4 bits do; float compute is SLOWER than int8: 0.67 times its speed"),
        (0.0, 4, (), "float compute against int8: the speed is not measurable here"),
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_the_more_accurate_unless_it_is_slower(
    race: Race, times: float, level: int, chosen: tuple[str, ...], why: str, busy: bool
) -> None:
    race(times, busy)
    if busy and times:  # then edgeq claims nothing and keeps the choice that it made by noise
        why = f"float compute runs at about {1 / times:.2f} times int8's speed (estimated, "
        times, level, chosen = 0.0, 4, ()
    result = quantized()
    assert levels() == [level] * 2
    assert result.scheme.float_compute == chosen
    assert result.block_compute is not None
    assert why in result.block_compute.why
    assert [note for note in result.notes if "weights in blocks" in note] == [result.block_compute.note]
    (kind,) = result.block_compute.kinds
    assert (kind.bits, kind.compute, kind.count) == (4, "int8" if level == 4 else "float32", 2)
    assert "2 of 4 bits in" in kind.summary()
    record = plain(result)["block_compute"]
    assert (record["race"]["estimate"] is None) == (times == 0)
    assert record["kinds"][0]["activations_db"] < record["kinds"][0]["weights_db"]


def test_blocks_expanded_to_float_count_as_float(race: Race) -> None:
    race(0.5)
    coverage = quantized().proof.coverage
    assert (coverage.int8_macs, coverage.float_macs) == (0, 4 * 2 * K * K)
    reasons = {node.name: node.reason for node in coverage.float_nodes if node.macs}
    assert reasons == dict.fromkeys(("first", "second"), "it expands its weights in blocks to float")
    race(2.0)
    assert quantized().proof.coverage.int8_mac_share == 1.0


@pytest.mark.parametrize(("given", "level"), [((), 4), (("*",), 1)])
def test_given_levels_are_not_raced(
    race: Race, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], level: int
) -> None:
    monkeypatch.delattr("edgeq.prove.block_race.race")
    assert quantized(float_compute=given).block_compute.why.endswith("as given")  # type: ignore[union-attr]
    assert levels() == [level] * 2
    assert quantized(weight_bits=8, weight_symmetric=True).scheme.float_compute == ()


def test_the_samples_of_a_race_are_of_every_size() -> None:
    lengths = [4] * 10 + [64] * 10 + [16] * 4
    samples = FewSamples(tuple(Sample(str(n), {"x": np.zeros((1, n), np.float32)}) for n in lengths))
    assert [feed["x"].shape[1] for feed in raced_feeds(samples)] == [4, 16, 64]
    (only,) = raced_feeds(FewSamples(samples.samples[:10]))
    assert only["x"].shape == (1, 4)
