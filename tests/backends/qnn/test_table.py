"""Execute lines of targets/qnn/htp.toml if the simulator is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from edgeq.backends.qnn.backend import dialect
from edgeq.errors import HardwareError
from edgeq.model.int8_rules import int8_rules
from edgeq.run.engines import find_backend_engine
from edgeq.run.session import Engines
from edgeq.util.folders import shipped
from tests.backends.qnn.test_qnn import simulator

TABLE: list[dict[str, Any]] = tomllib.loads((shipped("targets") / "qnn" / "htp.toml").read_text("utf-8"))["line"]
# One line that is right and one that is wrong. All lines would take minutes.
EXECUTED = (("Conv", "3x3", 8, "int8"), ("BatchNormalization", "variances of several magnitudes", 8, "uint8"))


@simulator
def test_lines_are_as_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    import probe_qnn

    cases = {(case.operator, case.form): case for case in probe_qnn.read_cases()}
    rows = {(row["operator"], row["form"], row["bits"], row["weights"]): row for row in TABLE}
    with Engines() as engines:
        for number, key in enumerate(EXECUTED):
            row = rows[key]
            arch = row["taken_by"][0]
            (tmp_path / str(number)).mkdir()
            engine = find_backend_engine("qnn", {"htp_arch": arch})
            more = probe_qnn.UINT8 if key[3] == "uint8" else {}
            found = probe_qnn.ask(cases[key[:2]], key[2], engine, engines, tmp_path / str(number), **more)
            assert found.taken, key
            assert found.right == row["right"], (key, found)
            assert found.db == pytest.approx(row["db"], abs=3), key


def test_every_case_has_its_lines_and_every_operator_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    import probe_qnn

    cases = {(case.operator, case.form, bits) for case in probe_qnn.read_cases() for bits in (8, 16)}
    assert cases == {(row["operator"], row["form"], row["bits"]) for row in TABLE}
    assert {row.operator for row in dialect()} == {operator for operator, *_ in cases}
    assert {operator for operator, *_ in cases} <= int8_rules("qnn").keys()
    assert all(row["taken_by"] or row["problem"] for row in TABLE)


@pytest.mark.parametrize("name", ["backend_path", "qnn_saver_path", "profiling_file_path"])
def test_a_target_cannot_name_a_library_to_load(name: str) -> None:
    """The provider loads the library that some options name, and the file of a target may be untrusted."""
    with pytest.raises(HardwareError, match=f"a target may not set '{name}' in .* It may set: htp_arch, soc_model"):
        find_backend_engine("qnn", {"htp_arch": "75", name: "./libevil.so"})
