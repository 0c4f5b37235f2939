from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edgeq
from edgeq.data.open_source import Data
from edgeq.errors import CheckFailedError, ModelError, OutputError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import resolve, runs_natively
from edgeq.jobs.quantize import Quantized, quantize
from edgeq.measure.coverage import Explain
from edgeq.model.int8_prediction import int8_rules, predict_int8
from edgeq.model.load import model_bytes
from edgeq.prove.builds import explainer
from edgeq.prove.job import Built, Job, build
from edgeq.util.display import Silent
from edgeq.util.records import plain
from tests.backends.build import mixed
from tests.opened import open_job

NET, OUT = Path("net.onnx"), Path("int8.onnx")
CALIB, VAL = Data("calib.npz"), Data("val.npz", "key=x,label=y")


def quantized(**options: Any) -> Quantized:
    return quantize(NET, CALIB, OUT, **{"val": VAL, "timed": False, "emulate": False, "effort": None, **options})


def test_the_default_is_this_machines_profile(place: Path) -> None:
    result = quantized()
    match = match_profile(detect_machine(), load_profiles())
    assert result.target.profile.name == match.profile.name
    decided = result.decision.chosen.scheme if result.decision is not None else match.profile.scheme
    assert result.scheme == decided
    assert (result.decision is not None) == match.profile.saturates(match.profile.scheme)
    assert result.native
    assert result.proof.held_out
    assert (result.bytes_float, result.bytes_int8) == (NET.stat().st_size, OUT.stat().st_size)
    onnx.checker.check_model(onnx.load(OUT))
    assert not [p for p in place.iterdir() if p.name.startswith(".")]


def test_it_says_where_the_time_went(place: Path) -> None:
    seconds = quantized(timed=True).seconds
    first = ["Preparing the model", "Checking the preparation", "Quantizing", "What runs in int8"]
    steps = [*first, "Opening the models", "Evaluating and timing", "The optimiser's effect"]
    assert [title for title in seconds if title in steps] == steps
    assert list(seconds)[-1] == "everything else"
    assert all(taken >= 0 for taken in seconds.values())


def test_the_public_name_is_this_function() -> None:
    assert edgeq.quantize.__wrapped__ is quantize  # type: ignore[attr-defined]


def test_another_targets_kernels_are_reported_as_absent(place: Path) -> None:
    result = quantized(target="raspberry-pi-4")
    assert not result.native
    assert result.scheme.pair == "S8S8"
    assert result.notes[-1] == "answers were checked on this machine's kernels, which are not those of raspberry-pi-4"


def test_a_target_from_a_file(place: Path) -> None:
    (place / "board.toml").write_text('title = "A board"\nextends = "x86-64-avx2"\n[scheme]\nmethod = "mse"\n')
    result = quantized(target=Path("board.toml"))
    assert (result.target.name, result.scheme.method) == ("board", "mse")
    assert result.decision is not None  # its kernels saturate
    assert result.decision.chosen.safe
    assert result.scheme == result.decision.chosen.scheme


def test_only_the_fitting_profile_is_native() -> None:
    """Only the profile that fits this machine runs natively. A newer machine runs other kernels than an older one."""
    machine = detect_machine()
    fitting = match_profile(machine, load_profiles()).profile.name
    for profile in load_profiles():
        assert runs_natively(resolve(profile), machine) == (profile in (fitting, "wasm")), (
            "its engine is the same everywhere"
        )


def test_a_layer_in_float_needs_no_session_option(place: Path) -> None:
    result = quantized(overrides={"exclude": ("last",)})
    assert result.session_options == {}
    assert any("stay in float" in note for note in result.notes)
    left = [(n.name, n.reason) for n in result.proof.coverage.float_nodes if n.macs]
    assert left == [("last", "kept in float on request")]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"require_coverage": 1.0, "overrides": {"exclude": ("last",)}}, CheckFailedError),
        ({"max_drop": 0.1, "val": None}, UsageError),
        ({"overrides": {"exclude": ("lost",)}}, UsageError),
        ({"overrides": {"activation_type": "int8", "weight_type": "uint8"}}, UsageError),
    ],
)
def test_nothing_is_written_when_it_fails(place: Path, options: dict[str, Any], error: type[Exception]) -> None:
    before = sorted(place.iterdir())
    with pytest.raises(error):
        quantized(**options)
    assert sorted(place.iterdir()) == before


def test_an_old_output_is_replaced_only_with_force(place: Path) -> None:
    OUT.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        quantized()
    assert OUT.read_text() == "mine"
    quantized(force=True)
    onnx.load(OUT)


def test_dynamic_needs_no_calibration(place: Path) -> None:
    (place / "net.onnx").write_bytes(mixed().SerializeToString())
    types = {"Conv": "uint8", "MatMul": "int8"}
    result = quantize(NET, None, OUT, val=VAL, timed=False,
                      overrides={"mode": "dynamic", "dynamic_weight_types": types})  # fmt: skip
    assert result.scheme.title == "dynamic (Conv uint8, MatMul int8)"
    left = {n.name: n.reason for n in result.proof.coverage.float_nodes if n.macs}
    assert left == {"fc": "Gemm is not among the operator types that the scheme quantizes"}


def explained(job: Job, built: Built) -> Explain:
    return explainer(built, predict_int8(job.prepared.model, int8_rules("cpu"), built.artifact.scheme))


def test_reasons_are_the_schemes_or_the_backends(place: Path) -> None:
    job = open_job(NET, CALIB, None, place / "work")
    target = resolve("cpu-any")
    scheme = target.profile.scheme.replace(exclude=("last",), op_types=("Conv", "Add"))
    built = build(job, target, scheme, place / "int8.onnx")
    explain = explained(job, built)
    assert explain("last", "Conv") == "kept in float on request"
    assert explain("fc", "Gemm") == "Gemm is not among the operator types that the scheme quantizes"
    assert "not all of its neighbours are in int8" in explain("first", "Conv")
    free = explained(job, build(job, target, target.profile.scheme, place / "free.onnx"))
    assert free("fused_7", "Exp") == "ONNX Runtime's optimiser made it from nodes that are not all in int8"


@pytest.mark.parametrize("overrides", [{"mode": "dynamic"}, {"mode": "weight-only"}])
def test_almost_nothing_in_int8_and_a_file_no_smaller_is_refused(place: Path, overrides: dict[str, str]) -> None:
    """A result that is almost all in float and no smaller is refused. These modes do not quantize convolutions."""
    with pytest.raises(ModelError, match=r"quantization leaves 99\.\d+% .* in float .* no smaller; Conv \(") as no:
        quantized(overrides=overrides)
    assert "Quantize it statically" in no.value.fix
    assert not OUT.exists()


def test_size_counts_external_data(place: Path) -> None:
    onnx.save(onnx.load(NET), "big.onnx", save_as_external_data=True, location="big.data", size_threshold=0)
    assert model_bytes(Path("big.onnx")) == Path("big.onnx").stat().st_size + Path("big.data").stat().st_size


def test_external_data_of_the_output_lies_beside_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.model.load import save_model
    from tests.backends.build import residual

    NET.write_bytes(residual(width=32).SerializeToString())
    monkeypatch.setitem(save_model.__kwdefaults__, "inline_limit", 1)
    result = quantized()
    data = Path("int8.onnx.data")
    assert data.is_file()
    assert result.bytes_int8 == OUT.stat().st_size + data.stat().st_size
    with pytest.raises(OutputError, match="exists already"):
        quantized()


def test_progress_names_the_stages_and_notes_the_decisions(place: Path) -> None:
    class Listening(Silent):
        notes: tuple[str, ...] = ()

        def note(self, text: str) -> None:
            self.notes = (*self.notes, text)

    listening = Listening()
    quantized(progress=listening)
    assert any("preprocessing" in note for note in listening.notes)


def test_json_keys_are_those_documented(place: Path) -> None:
    record = plain(quantized(overrides={"exclude": ("last",)}))
    json.dumps(record, allow_nan=False)
    documented = (
        (Path(__file__).parents[2] / "docs" / "reference" / "quantize.md").read_text("utf-8").partition("## JSON")[2]
    )
    assert documented
    missing = [key for key in record if f"`{key}`" not in documented]
    assert missing == []


def test_outputs_agree_with_float(place: Path) -> None:
    from edgeq.run.session import SessionSettings, open_session

    result = quantized()
    feed = {"x": np.load("calib.npz")["x"][:1]}
    wanted = open_session(NET).run(None, feed)[0]
    got = open_session(OUT, SessionSettings(config=result.session_options)).run(None, feed)[0]
    assert np.abs(wanted - got).max() < 0.1 * np.abs(wanted).max()
