from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgeq.cli._arguments import parse_bytes
from edgeq.cli.calibrate import calibrate_command
from edgeq.errors import CalibrationError, DataError, OutputError, UsageError
from edgeq.jobs.calibrate import calibrate, merge_to
from edgeq.model.prepare import prepare_model
from tests.calibration.models import images, small_cnn, write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_cnn(tmp_path / "model.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.concatenate([i["x"] for i in images(6)]))
    return path


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(calibrate_command, [str(a) for a in arguments])


def test_the_command_writes_the_same_bytes_each_time(model: Path, data: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = run(model, "--data", data, "-o", tmp_path / name, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["samples"] == 6
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_shards_merge_to_the_whole_and_show(model: Path, data: Path, tmp_path: Path) -> None:
    whole = calibrate(model, data, tmp_path / "whole")
    for i in range(2):
        assert run(model, "--data", data, "-o", tmp_path / f"s{i}", "--start", i, "--stride", 2).exit_code == 0
    result = run("merge", tmp_path / "s1", tmp_path / "s0", "-o", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "merged" / "statistics.npz").read_bytes() == (tmp_path / "whole" / "statistics.npz").read_bytes()
    shown = json.loads(run("show", tmp_path / "merged", "--json").stdout)
    assert len(shown["tensors"]) == len(whole.tensors)
    assert "minmax" in run("show", tmp_path / "merged").stdout
    result = run("show", tmp_path / "merged", "--tensor", "y", "--svg", tmp_path / "y.svg")
    assert result.exit_code == 0
    assert (tmp_path / "y.svg").exists()


def test_interrupted_and_resumed_gives_the_same_bytes(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.data.samples import SourceSamples

    calibrate(model, data, tmp_path / "whole")
    real = SourceSamples.__iter__

    def interrupted(self: SourceSamples):  # type: ignore[no-untyped-def]
        for index, sample in enumerate(real(self)):
            if index == 5:
                raise KeyboardInterrupt
            yield sample

    monkeypatch.setattr(SourceSamples, "__iter__", interrupted)
    result = run(model, "--data", data, "-o", tmp_path / "CAL")
    assert result.exit_code == 130
    assert f"the statistics so far are kept in {tmp_path / 'CAL'}: --resume continues from them" in result.output
    kept = json.loads((tmp_path / "CAL" / "statistics.json").read_text("utf-8"))
    assert 0 < kept["samples"] < kept["total"] == 6
    assert "unfinished" in run("show", tmp_path / "CAL").stdout
    monkeypatch.setattr(SourceSamples, "__iter__", real)
    assert run(model, "--data", data, "-o", tmp_path / "CAL").exit_code == OutputError.exit_code
    result = run(model, "--data", data, "-o", tmp_path / "CAL", "--resume")
    assert result.exit_code == 0, result.output
    assert content(tmp_path / "CAL") == content(tmp_path / "whole")


def test_interrupted_before_anything_is_counted_leaves_nothing(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.data.samples import SourceSamples

    def interrupted(self: SourceSamples):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt

    monkeypatch.setattr(SourceSamples, "__iter__", interrupted)
    result = run(model, "--data", data, "-o", tmp_path / "CAL")
    assert result.exit_code == 130
    assert "--resume" not in result.output
    assert not (tmp_path / "CAL").exists()


def test_resume_refuses_other_data_and_other_models(model: Path, data: Path, tmp_path: Path) -> None:
    calibrate(model, data, tmp_path / "CAL", count=3)
    before = content(tmp_path / "CAL")
    with pytest.raises(CalibrationError, match="other data"):
        calibrate(model, data, tmp_path / "CAL", resume=True)
    other = small_cnn(tmp_path / "other.onnx", channels=16)
    with pytest.raises(CalibrationError, match="another model"):
        calibrate(other, data, tmp_path / "CAL", count=3, resume=True)
    assert content(tmp_path / "CAL") == before


def test_bad_values_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    stack = np.concatenate([i["x"] for i in images(4)])
    stack[2, 0, 0, 0] = np.nan
    np.savez(tmp_path / "bad.npz", x=stack)
    result = run(model, "--data", tmp_path / "bad.npz", "-o", tmp_path / "CAL")
    assert result.exit_code in (CalibrationError.exit_code, DataError.exit_code)
    assert "bad.npz" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "CAL").exists()


def test_skipped_tensors_are_not_recorded(model: Path, data: Path, tmp_path: Path) -> None:
    statistics = calibrate(model, data, tmp_path / "CAL", skip=["y"], memory=100_000)
    assert "y" not in statistics.tensors
    assert "x" in statistics.tensors
    with pytest.raises(UsageError, match="'nowhere'"):
        calibrate(model, data, tmp_path / "other", skip=["nowhere"])


def test_merging_needs_parts_that_belong_together(model: Path, data: Path, tmp_path: Path) -> None:
    calibrate(model, data, tmp_path / "a")
    with pytest.raises(UsageError, match="two parts"):
        merge_to([tmp_path / "a"], tmp_path / "out")
    with pytest.raises(CalibrationError, match="same data"):
        merge_to([tmp_path / "a", tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("2 GiB", 2 << 30), ("1.5k", 1500), ("123", 123), ("1e6", 10**6)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1GB", "1XB", "1.2.3MB", "1e99", "0"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


def test_force_replaces_statistics_and_nothing_else(model: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "photos"
    other.mkdir()
    (other / "one.jpg").write_bytes(b"dear to somebody")
    with pytest.raises(OutputError, match="is not a calibration"):
        calibrate(model, data, other, force=True)
    assert (other / "one.jpg").read_bytes() == b"dear to somebody"
    calibrate(model, data, tmp_path / "cal")
    calibrate(model, data, tmp_path / "cal", force=True)
    with pytest.raises(OutputError, match="the input"):
        merge_to([tmp_path / "cal", tmp_path / "cal"], tmp_path / "cal", force=True)


def test_a_model_without_float_activations_is_refused(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "i.onnx", "g (int64[1] x) => (int64[1] y) { y = Abs(x) }")
    np.save(tmp_path / "i.npy", np.ones((1,), np.int64))
    with pytest.raises(CalibrationError, match="has no float activation"):
        calibrate(tmp_path / "i.onnx", tmp_path / "i.npy", tmp_path / "cal")
    assert not (tmp_path / "cal").exists()


def test_statistics_with_a_size_fixed_are_those_of_the_fixed_model(model: Path, data: Path, tmp_path: Path) -> None:
    result = run(model, "--data", data, "-o", tmp_path / "cal", "--fix", "N=1", "--json")
    assert result.exit_code == 0, result.output
    fixed = prepare_model(model, tmp_path / "work", fix={"N": 1})
    assert json.loads(result.stdout)["model"] == fixed.digest != prepare_model(model, tmp_path / "free").digest
