"""Run each recovery of `edgeq.tuning.recover.float_search` by itself, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edgeq
from edgeq.cli import group
from edgeq.cli.build import quantize_command
from edgeq.errors import CheckFailedError, UsageError
from edgeq.jobs.quantize import Quantized
from edgeq.model.convert import to_bytes
from edgeq.tuning.recover.methods import recoveries
from tests.tuning.recover.nets import few, two_gates, uneven

pytestmark = pytest.mark.usefixtures("exact_kernels")

SHAPE = [1, 3, 12, 12]


RECOVERIES = recoveries()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "m.onnx").write_bytes(to_bytes(two_gates(uneven)))
    np.savez(tmp_path / "x.npz", x=np.concatenate([s.inputs["x"] for s in few(8, SHAPE)])[:, None])
    return tmp_path


def _quantized(workspace: Path, **options: object) -> Quantized:
    return edgeq.quantize(
        workspace / "m.onnx", edgeq.Data(workspace / "x.npz"), workspace / "q.onnx", timed=False, force=True, **options
    )


@pytest.mark.parametrize("name", [name for name, recovery in RECOVERIES.items() if "static" in recovery.modes])
def test_each_from_python(workspace: Path, name: str) -> None:
    found = _quantized(workspace, builder=edgeq.recovering(name))
    # With the same range of weights: the mitigation of saturation may choose another scheme.
    plain = _quantized(workspace, overrides={"reduce_range": found.scheme.reduce_range})
    assert any(note.startswith(f"{name}: ") for note in found.notes)
    assert found.proof.agreement.sqnr_db > plain.proof.agreement.sqnr_db - 0.5


def test_several_from_the_command_line(workspace: Path) -> None:
    arguments = [
        "quantize",
        str(workspace / "m.onnx"),
        "--data",
        str(workspace / "x.npz"),
        "-o",
        str(workspace / "q.onnx"),
        "--no-timing",
    ]
    both = ["--recover", "sequential-correction", "--recover", "split-gates"]
    ran = CliRunner().invoke(group, [*arguments, *both, "--json"])
    assert ran.exit_code == 0, ran.output
    notes = [note.split(":")[0] for note in json.loads(ran.stdout)["notes"]]
    assert [note for note in notes if note in RECOVERIES] == ["split-gates", "sequential-correction"]


def test_layers_in_float_until_it_is_close_enough(workspace: Path) -> None:
    plain = _quantized(workspace)
    wanted = plain.proof.agreement.least_db + 1
    found = _quantized(workspace, builder=edgeq.recovering(min_sqnr_db=wanted))
    assert found.proof.agreement.least_db >= wanted - 0.2
    assert found.scheme.exclude
    assert 0 < found.proof.coverage.int8_mac_share < plain.proof.coverage.int8_mac_share
    same = _quantized(workspace, builder=edgeq.recovering(min_sqnr_db=wanted - 2))
    assert same.scheme.exclude == plain.scheme.exclude


def test_reports_the_reachable_decibels(workspace: Path) -> None:
    with pytest.raises(CheckFailedError, match=r"bring the outputs to \d+\.\d dB, not to 300"):
        _quantized(workspace, builder=edgeq.recovering(min_sqnr_db=300.0))


def test_unknown_names_are_refused_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match="unknown recovery 'magic'"):
        edgeq.recovering("sequential-correction", "magic")
    with pytest.raises(UsageError, match=r"a recovery is given as list\. Give names, one after the other"):
        edgeq.recovering(["sequential-correction"])  # type: ignore[arg-type]


def test_dynamic_has_nothing_to_recover(workspace: Path) -> None:
    with pytest.raises(UsageError, match="static"):
        _quantized(workspace, builder=edgeq.recovering("sequential-correction"), overrides={"mode": "dynamic"})


def test_help_and_documents_name_them_all() -> None:
    (option,) = [p for p in quantize_command.params if p.name == "recover"]
    page = (Path(__file__).resolve().parents[3] / "docs" / "recover.md").read_text("utf-8")
    for name in RECOVERIES:
        assert name in getattr(option, "help", "")
        assert f"`{name}`" in page
