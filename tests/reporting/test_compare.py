"""Compare two models: the differences, the equal parts, and the names of what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.claim import Claim
from onnx import helper, numpy_helper

from edgeq import demo
from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group
from edgeq.errors import UsageError
from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import Agreement, OutputAgreement, SliceAgreement
from edgeq.measure.latency import Measurement
from edgeq.reporting.bundle import report_bundle
from edgeq.reporting.compare import Comparison, LossLimits, Side, compare
from edgeq.signature import Signature
from edgeq.util.records import plain
from tests.bundle.samples import linear, variant
from tests.graphs import proto


def scaled(place: Path, factor: float, *, name: str = "x", size: int | str = 4) -> Path:
    """Write a model y = factor · x."""
    shape = f"float[1, {size}]"
    body = f"scaled ({shape} {name}) => ({shape} y) {{ [mul] y = Mul({name}, k) }}"
    onnx.save(proto(body, {"k": np.float32(factor)}), place)
    return place


def test_a_bundle_against_its_float_model(bundle: Path) -> None:
    found = compare(demo.MODEL, bundle, demo.VALIDATION, task="classification", count=24, duration_s=0.05, threads=1)
    assert found.samples == 24
    assert found.b.variant
    assert found.a.bytes
    assert found.b.bytes
    assert found.b.bytes < found.a.bytes
    assert found.a.coverage is not None
    assert found.b.coverage is not None
    assert found.a.coverage["int8_mac_share"] == 0
    assert found.b.coverage["int8_mac_share"] > 0.9
    assert found.agreement is not None
    assert found.agreement.sqnr_db > 15
    assert found.measurement is not None
    assert found.measurement.ratio("B")["verdict"] in ("faster", "slower", "unsettled", "unknown")
    names = [row[0] for row in found.rows()]
    assert names[:3] == ["size", "MACs in int8, here", "top-1"]
    assert "latency p50" in names
    assert json.loads(json.dumps(plain(found)))["samples"] == 24


def test_the_same_model_twice(tmp_path: Path) -> None:
    model = scaled(tmp_path / "m.onnx", 2.0)
    found = compare(model, model)
    assert found.same
    assert found.verdict() == ("A and B are the same model.",)
    assert found.measurement is None  # a model is not timed against itself


def test_models_that_take_different_inputs(tmp_path: Path) -> None:
    a, b = scaled(tmp_path / "a.onnx", 2.0), scaled(tmp_path / "b.onnx", 2.0, name="z")
    found = compare(a, b)
    assert found.measurement is None
    assert found.agreement is None
    assert any("inputs differ" in note for note in found.notes)
    assert "Their inputs or outputs differ." in found.verdict()


def test_answers_are_compared_without_labels(tmp_path: Path) -> None:
    data = tmp_path / "x.npz"
    np.savez(data, x=np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))
    a, b = scaled(tmp_path / "a.onnx", 2.0), scaled(tmp_path / "b.onnx", 2.2)
    found = compare(a, b, data, timed=False)
    assert found.agreement is not None
    assert found.agreement.sqnr_db == pytest.approx(20.0, abs=0.01)
    assert any("20.0" in sentence for sentence in found.verdict())
    assert found.rows()[-1][:3] == ("output y", "", "")


def test_a_task_needs_data(tmp_path: Path) -> None:
    model = scaled(tmp_path / "m.onnx", 2.0)
    with pytest.raises(UsageError, match="needs samples"):
        compare(model, model, task="classification")


SIGNATURE = Signature((), ())


def compared(
    interval: tuple[float, float, float] | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
    accuracy: tuple[float, float] | None = None,
    *,
    higher: bool = True,
    same: bool = False,
    agreement: Agreement | None = None,
    limits: LossLimits | None = None,
) -> Comparison:
    """Return a comparison with a ratio of speeds (estimate, low, high), sizes in bytes, and top-1."""
    measurement = None
    if interval is not None:
        ratio = {**dict(zip(("estimate", "low", "high"), interval, strict=True)), "confidence": 0.96, "pairs": 9}
        models = {
            name: {"latency": dict.fromkeys(("p50_ms", "p90_ms", "p99_ms"), ms)}
            for name, ms in (("A", 2.0), ("B", 1.0))
        }
        scenarios = {"single-stream": {"models": models, "ratios": {"B": ratio}}}
        measurement = Measurement({}, {}, {}, {}, scenarios, (), {})
    measured = [Accuracy({"top1": value}, 8, "classification", "top1", higher) for value in accuracy or ()] or [
        None,
        None,
    ]
    a, b = (
        Side(Path(name), None, of_bytes, "digest" if same else name, SIGNATURE, None, top1)
        for name, of_bytes, top1 in zip("AB", sizes, measured, strict=True)
    )
    return Comparison(a, b, (), 8, agreement, measurement, (), limits or LossLimits())


def test_the_words_follow_the_interval() -> None:
    found = compared((2.0, 1.9, 2.1), (100, 250))
    assert found.verdict()[0].startswith("B runs at 2.00 times A's speed")
    assert found.verdict()[1] == "B is 2.50× A's size."
    assert found.rows()[1] == ("latency p50", "2.00\u202fms", "1.00\u202fms", "2.00× the speed (1.90 to 2.10)")
    assert "no difference in speed is settled" in compared((2.0, 0.9, 2.1)).verdict()[0]
    assert "SLOWER" in compared((0.5, 0.4, 0.6)).verdict()[0]


def test_the_words_name_what_is_worst_and_what_is_left_out() -> None:
    part = SliceAgreement(axis=1, first=4, last=11, sqnr_db=0.0, cosine=0.25, max_abs_error=1.0, peak=1.0)
    output = OutputAgreement("y", 96, 53.9, 1.0, 0.1, None, 0, mismatched=4, slices=(part,))
    assert compared(agreement=Agreement((output,), 16)).verdict() == (
        "B's outputs follow A's at 0.0\u202fdB SQNR, with a cosine of 0.25000.",
        "Output y has another size in 4 of 16 samples, which are left out.",
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (compared((1.7, 1.6, 1.8), accuracy=(0.9, 0.89), limits=LossLimits(0.011, 1.5)), []),
        (
            compared((1.7, 1.6, 1.8), accuracy=(0.9, 0.87), limits=LossLimits(0.01, 1.5)),
            ["B loses 3.00 pt of top-1, more than the 1.00"],
        ),
        (compared((1.7, 1.6, 1.8), accuracy=(0.9, 0.95), limits=LossLimits(0.0, 1.5)), []),
        (compared(accuracy=(0.9, 0.95), higher=False, limits=LossLimits(0.01)), ["B loses 5.00"]),
        (compared((1.3, 1.2, 1.4), limits=LossLimits(None, 1.5)), ["less than the 1.50× required"]),
        (compared((1.5, 1.2, 1.8), limits=LossLimits(None, 1.5)), ["was not shown"]),
        (compared(same=True, limits=LossLimits(0.0, 1.0)), []),
        (compared(same=True, limits=LossLimits(0.0, 1.01)), ["less than"]),
        (compared(limits=LossLimits(0.01, 1.0)), ["could not be measured", "was not shown"]),
        (compared(sizes=(100, 105), limits=LossLimits(max_growth=0.05)), []),
        (compared(sizes=(100, 106), limits=LossLimits(max_growth=0.05)), ["5.0 % is allowed"]),
        (compared(sizes=(100, 50), limits=LossLimits(max_growth=0.05)), []),
        (compared(sizes=(None, 5), limits=LossLimits(max_growth=0.05)), ["the size could not be compared"]),
    ],
)
def test_a_limit_holds_only_where_that_is_shown(found: Comparison, said: list[str]) -> None:
    sentences = found.missed()
    assert len(sentences) == len(said)
    for sentence, part in zip(sentences, said, strict=True):
        assert part in sentence


@pytest.mark.usefixtures("made_up_memory")
def test_limits_fail_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test does not depend on whether this machine is quiet enough for a claim.
    monkeypatch.setattr("edgeq_device.measure.bench.make_claim", lambda baseline, model: Claim(1.1, 1.0, 1.2, 0.96, 9))
    a, b = scaled(tmp_path / "a.onnx", 2.0), scaled(tmp_path / "b.onnx", 3.0)
    command = ["compare", str(a), str(b), "--duration", "0.02", "--json"]
    failed = CliRunner().invoke(group, [*command, "--min-speedup", "1000"])
    assert failed.exit_code == 10
    assert "1000× required" in failed.stderr
    assert json.loads(failed.stdout)["missed"]  # the figures are printed even if a limit is missed
    assert CliRunner().invoke(group, [*command, "--min-speedup", "0.00001"]).exit_code == 0
    assert CliRunner().invoke(group, [*command, "--max-drop", "1%"]).exit_code == 2
    assert CliRunner().invoke(group, [*command, "--no-timing", "--min-speedup", "2"]).exit_code == 2


def test_the_command(tmp_path: Path) -> None:
    a, b = scaled(tmp_path / "a.onnx", 2.0), scaled(tmp_path / "b.onnx", 3.0)
    result = CliRunner().invoke(group, ["compare", str(a), str(b), "--no-timing", "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert sorted(record) == [
        "a", "agreement", "b", "bench", "latency", "limits", "missed", "notes", "same", "samples",
        "signature_differences", "verdict",
    ]  # fmt: skip
    human = CliRunner().invoke(group, ["compare", str(a), str(b), "--no-timing"])
    assert "B against A" in human.output
    missing = CliRunner().invoke(group, ["compare", str(a), str(tmp_path / "none.onnx")])
    assert missing.exit_code == 3
    assert "Traceback" not in missing.output


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a float model, and the same model with a quantized input."""
    folder = tmp_path_factory.mktemp("pair")
    plain_model = scaled(folder / "float.onnx", 2.0)
    quantized = onnx.load(plain_model)
    for node in quantized.graph.node:
        node.input[:] = ["x_back" if name == "x" else name for name in node.input]
    for operator, ends in (("DequantizeLinear", ("x_int8", "x_back")), ("QuantizeLinear", ("x", "x_int8"))):
        quantized.graph.node.insert(0, helper.make_node(operator, [ends[0], "one_scale"], [ends[1]]))
    quantized.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "one_scale"))
    onnx.save(quantized, folder / "int8.onnx")
    return plain_model, folder / "int8.onnx"


@pytest.mark.parametrize(
    ("a", "b", "follows"),
    [(0, 1, True), (1, 0, True), (0, 0, False), (1, 1, False)],
    ids=["float first", "quantized first", "both float", "both quantized"],
)
def test_the_next_line_names_the_float_model_first(pair: tuple[Path, Path], a: int, b: int, follows: bool) -> None:
    shown = CliRunner().invoke(group, ["compare", str(pair[a]), str(pair[b]), "--no-timing"])
    assert shown.exit_code == 0, shown.output
    last = shown.stdout.splitlines()[-1]
    assert last == f"next: edgeq debug {pair[0]} {pair[1]} --data SAMPLES" if follows else "next:" not in shown.stdout


def test_weights_that_lie_elsewhere_in_a_bundle(tmp_path: Path) -> None:
    """Commands find weights that several models of a bundle share, although these are in a folder of their own."""
    models = [linear(tmp_path / str(bias) / "m.onnx", bias, external="weights.bin") for bias in (0.0, 1.0)]
    variants = tuple(variant(f"v{bias}", model, bias) for bias, model in enumerate(models))
    write_bundle(BundleSpec("two", variants), tmp_path / "b")
    found = compare(tmp_path / "b", models[0], duration_s=0.02, threads=1)
    assert found.a.bytes == found.b.bytes
    assert found.a.coverage is not None
    assert found.measurement is not None
    assert report_bundle(tmp_path / "b", measure=True, settings=BenchSettings(min_duration_s=0.02)).page.is_file()
    done = CliRunner().invoke(group, ["audit", str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
