from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from rich.console import Console

from edgeq.backends.cpu import CpuBackend
from edgeq.bundle.spec import BundleSpec, VariantSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group
from edgeq.errors import DataError, ModelError, UsageError
from edgeq.measure import debug as module
from edgeq.measure.agreement import Agreement, OutputAgreement, SliceAgreement
from edgeq.measure.debug import debug, optimiser_warning
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme
from tests.graphs import proto
from tests.measure.fakes import linear_model
from tests.measure.quantized_models import SCHEMES, Quantized, float_model, quantize_all

pytestmark = pytest.mark.usefixtures("exact_kernels")

KEYS = {
    "float_model", "quantized_model", "variant", "data", "samples", "prepared", "outputs", "error_sources", "exclude",
    "answers", "engine", "exclusions", "verdict", "verdict_text", "weights", "activations", "notes", "warnings",
}  # fmt: skip


def command(*arguments: object) -> Any:
    return CliRunner().invoke(group, ["debug", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("form", SCHEMES)
def test_every_format_through_the_command(quantized: Quantized, form: str) -> None:
    result = command(quantized.source, quantized.models[form], "--data", quantized.data, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert set(record) == KEYS
    assert record["samples"] == 16
    assert record["warnings"] == []
    (output,) = record["outputs"]["as_written"]["outputs"]
    last_activation = record["activations"][-1]
    assert last_activation["name"] == "logits"
    assert last_activation["accumulated"]["sqnr_db"] == pytest.approx(output["sqnr_db"], abs=0.01)
    assert record["outputs"]["optimised"]["outputs"][0]["sqnr_db"] == pytest.approx(output["sqnr_db"], abs=3)


def test_for_people(quantized: Quantized) -> None:
    short = command(quantized.source, quantized.models["u8u8-per-tensor"], "--data", quantized.data, "--worst", 2)
    assert short.exit_code == 0, short.output
    assert "on the graph as written" in short.output
    assert "--exclude" in short.output
    assert "worst layers in execution order" in short.output
    assert "9 tensors were compared" not in short.output
    verbose = command(quantized.source, quantized.models["u8u8-per-tensor"], "--data", quantized.data, "-v")
    positions = [verbose.output.index(f"│ {name}") for name in ("stem_act", "pw_out", "features", "logits")]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("sqnr_db", "verdict"),
    [(math.inf, "healthy"), (32.0, "healthy"), (15.0, "noisy"), (3.0, "poor"), (math.nan, "poor")],
)
def test_a_verdict_comes_first(quantized: Quantized, sqnr_db: float, verdict: str) -> None:
    diagnosis = debug(quantized.source, quantized.models["u8s8"], quantized.data, count=2)
    assert diagnosis.verdict == "healthy"
    (output,) = diagnosis.optimised.outputs
    changed = Agreement((dataclasses.replace(output, sqnr_db=sqnr_db),), 2)
    assert dataclasses.replace(diagnosis, optimised=changed).verdict_text.startswith(f"{verdict}: the outputs ")


def test_the_verdict_is_that_of_the_worst_slice(quantized: Quantized) -> None:
    diagnosis = debug(quantized.source, quantized.models["u8s8"], quantized.data, count=2)
    (output,) = diagnosis.optimised.outputs
    part = SliceAgreement(1, 4, 11, 0.14, 0.0, 0.0, 0.14)
    changed = Agreement((dataclasses.replace(output, sqnr_db=53.9, slices=(part,)),), 2)
    text = dataclasses.replace(diagnosis, optimised=changed).verdict_text
    assert text.startswith("poor: ")
    assert "(0.0 dB SQNR in output 'logits', 4..11 on axis 1)" in text


def test_nothing_is_healthy_of_which_samples_could_not_be_compared(quantized: Quantized) -> None:
    diagnosis = debug(quantized.source, quantized.models["u8s8"], quantized.data, count=2)
    (output,) = diagnosis.optimised.outputs
    some = Agreement((dataclasses.replace(output, mismatched=1),), 2)
    assert dataclasses.replace(diagnosis, optimised=some).verdict == "noisy"
    none = Agreement((dataclasses.replace(output, elements=0, sqnr_db=-math.inf, mismatched=2),), 2)
    assert dataclasses.replace(diagnosis, optimised=none).verdict_text.endswith(
        "(output 'logits' could not be compared)"
    )


def test_a_healthy_model_is_called_so_and_names_are_cut_in_the_middle(
    quantized: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.cli.explain import draw_diagnosis

    diagnosis = debug(quantized.source, quantized.models["u8s8"], quantized.data, count=2)
    long = [dataclasses.replace(a, name=f"/model/backbone/blocks.{i}/Conv2d/weight_quantized_{i}_output")
            for i, a in enumerate(diagnosis.comparison.activations)]  # fmt: skip
    comparison = dataclasses.replace(diagnosis.comparison, activations=tuple(long))
    console = Console(width=140, file=io.StringIO(), record=True)
    monkeypatch.setenv("COLUMNS", "140")
    for line in draw_diagnosis(dataclasses.replace(diagnosis, comparison=comparison), verbose=True):
        console.print(line)
    text = console.export_text()
    assert "verdict: healthy: the outputs follow float32 closely" in text
    assert "layers that cause the error" not in text
    assert all(f"ed_{i}_output" in text for i in range(len(long))), "the ends, where names differ"


def test_a_model_with_batch_normalization_is_prepared_first(tmp_path: Path) -> None:
    quantized = quantize_all(tmp_path, float_model(batch_norm=True), ("u8s8",))
    diagnosis = debug(quantized.source, quantized.models["u8s8"], quantized.data)
    assert diagnosis.prepared
    assert "8 quantized weights match then, 7 without preparation" in diagnosis.notes[0]
    assert not any(weight.changed for weight in diagnosis.comparison.weights)
    assert diagnosis.warnings == ()
    as_prepared = debug(quantized.prepared.path, quantized.models["u8s8"], quantized.data)
    assert not as_prepared.prepared
    assert as_prepared.comparison == diagnosis.comparison


def test_a_model_that_was_changed_before_is_reported(quantized: Quantized, tmp_path: Path) -> None:
    changed_models = quantize_all(
        tmp_path, float_model(scales={"pointwise.weight": np.linspace(0.5, 2, 16)}), ("u8s8",)
    )
    diagnosis = debug(quantized.source, changed_models.models["u8s8"], quantized.data)
    assert "1 weights differ by more than rounding (pointwise.weight)" in diagnosis.warnings[0]


def test_unnamed_nodes_get_the_names_that_quantize_gives_them(tmp_path: Path) -> None:
    model = float_model()
    for node in model.graph.node:
        node.name = ""
    quantized = quantize_all(tmp_path, model, ("u8u8-per-tensor",))
    diagnosis = debug(quantized.source, quantized.models["u8u8-per-tensor"], quantized.data)
    prepared = {node.name for node in onnx.load(quantized.prepared.path).graph.node}
    assert diagnosis.prepared
    assert diagnosis.exclude
    assert set(diagnosis.exclude) <= prepared


def test_advice_names_the_nodes_that_quantize_knows(tmp_path: Path) -> None:
    """The advice names nodes of the prepared model, even if MatMul and Add became a Gemm with the MatMul's weights."""
    rng = np.random.default_rng(4)
    source, data = tmp_path / "float.onnx", tmp_path / "data.npz"
    net = proto("""g (float[2,3,16] x) => (float[2,3,8] y) {
        [first] a = MatMul(x, w1) [plus] b = Add(a, b1) [act] c = Tanh(b)
        [second] d = MatMul(c, w2) [end] y = Identity(d)
    }""")
    for name, shape in {"w1": (16, 16), "b1": (16,), "w2": (16, 8)}.items():
        net.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name))
    onnx.save(net, source)
    np.savez(data, x=rng.normal(0, 1, (8, 3, 16)).astype(np.float32))
    prepared = prepare_model(source, tmp_path / "prepared")
    scheme = Scheme(mode="dynamic", dynamic_weight_types={"MatMul": "int8", "Gemm": "int8"})
    CpuBackend().build(prepared, {}, scheme, tmp_path / "q.onnx")
    diagnosis = debug(source, tmp_path / "q.onnx", data)
    assert diagnosis.exclude
    assert set(diagnosis.exclude) <= {node.name for node in onnx.load(prepared.path).graph.node}


def test_a_bundle_brings_its_options(quantized: Quantized, tmp_path: Path) -> None:
    variant = VariantSpec("portable", quantized.models["u8s8"], session_options={"session.use_env_allocators": "1"})
    write_bundle(BundleSpec("small", (variant,)), tmp_path / "small.edgeq")
    diagnosis = debug(quantized.source, tmp_path / "small.edgeq", quantized.data)
    alone = debug(quantized.source, quantized.models["u8s8"], quantized.data)
    assert diagnosis.variant == "portable"
    assert diagnosis.comparison == alone.comparison


def test_a_bundle_whose_variants_share_weights(quantized: Quantized, tmp_path: Path) -> None:
    variants = tuple(VariantSpec(name, quantized.models["u8s8"]) for name in ("one", "two"))
    write_bundle(BundleSpec("small", variants), tmp_path / "bundle")
    diagnosis = debug(quantized.source, tmp_path / "bundle", quantized.data, variant="two")
    alone = debug(quantized.source, quantized.models["u8s8"], quantized.data)
    assert diagnosis.variant == "two"
    assert diagnosis.comparison == alone.comparison


def test_less_memory_gives_the_same(quantized: Quantized) -> None:
    arguments = (quantized.source, quantized.models["u8s8"], "--data", quantized.data, "--json")
    assert command(*arguments, "--memory", "1kB").stdout == command(*arguments).stdout


@pytest.mark.parametrize(
    ("float_model", "int8", "says"),
    [("u8s8", "u8s8", "is quantized"), ("float", "float", "contains no quantized operator")],
)
def test_models_in_the_wrong_place(quantized: Quantized, float_model: str, int8: str, says: str) -> None:
    paths = {**quantized.models, "float": quantized.source}
    with pytest.raises(UsageError, match=says):
        debug(paths[float_model], paths[int8], quantized.data)


def test_another_model(quantized: Quantized, tmp_path: Path) -> None:
    onnx.save(linear_model(width=8), tmp_path / "other.onnx")
    with pytest.raises(UsageError, match="no activation of"):
        debug(tmp_path / "other.onnx", quantized.models["u8s8"], quantized.data)
    renamed = onnx.compose.add_prefix(float_model(), "p_")
    onnx.save(renamed, tmp_path / "renamed.onnx")
    with pytest.raises(UsageError, match="has no input 'x'"):
        debug(tmp_path / "renamed.onnx", quantized.models["u8s8"], quantized.data)


def test_bad_input_is_one_line_and_a_code(quantized: Quantized, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    for arguments, error in (
        ((tmp_path / "bad.onnx", quantized.models["u8s8"], "--data", quantized.data), ModelError),
        ((quantized.source, quantized.models["u8s8"], "--data", tmp_path / "none"), DataError),
        ((quantized.source, quantized.models["u8s8"], "--data", quantized.data, "--session-option", "x"), UsageError),
    ):
        result = command(*arguments)
        assert result.exit_code == error.exit_code, result.output
        assert len(result.stderr.strip().splitlines()) == 1
        assert "Traceback" not in result.output


def test_options_reach_the_session_and_the_samples(quantized: Quantized, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[SessionSettings] = []
    sample_options: list[dict[str, Any]] = []
    samples, model = module.open_or_search, module.open_model
    monkeypatch.setattr(
        module, "open_model", lambda path, s, **options: settings.append(s) or model(path, s, **options)
    )
    monkeypatch.setattr(
        module,
        "open_or_search",
        lambda *arguments, **options: sample_options.append(options) or samples(*arguments, **options),
    )
    texts = ("session.disable_prepacking=1", "optimization.disable_specified_optimizers=A;B")
    flags = [word for text in texts for word in ("--session-option", text)]
    arguments = (quantized.source, quantized.models["u8s8"], "--data", quantized.data)
    assert command(*arguments, "--threads", "2", "--start", "3", *flags).exit_code == 0
    config = dict(text.split("=") for text in texts)
    assert settings == [SessionSettings(config=config, intra_op_threads=2)]
    assert (sample_options[0]["start"], sample_options[0]["stride"], sample_options[0]["count"]) == (3, 1, 32)


def agreement(sqnr_db: float) -> Agreement:
    return Agreement((OutputAgreement("y", 1, sqnr_db, 1.0, 0.1, None, 0, 0),), 1)


def test_an_optimiser_that_changes_the_answer_is_reported() -> None:
    assert optimiser_warning({"optimised": agreement(30), "written": agreement(32)}) is None
    warning = optimiser_warning({"optimised": agreement(3), "written": agreement(30), "without": agreement(31)})
    assert warning is not None
    assert "3.0 dB" in warning
    assert "30.0 dB" in warning
    assert "WeightBiasQuantization the outputs have 31.0 dB" in warning
