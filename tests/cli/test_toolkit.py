from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgeq.backends.rknn.data import toolkit
from edgeq.cli import group
from tests.backends.rknn.test_failures import stand_in


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(toolkit().variable, raising=False)
    return tmp_path


def test_a_toolkit_says_what_it_installs_and_under_whose_terms(cache: Path) -> None:
    shown = CliRunner().invoke(group, ["toolkit"]).output
    assert "rknn-toolkit2 2.5.0 is needed: it is not installed" in shown
    assert f"with the packages, versions and hashes in {toolkit().lock_file}" in shown
    assert str(cache) in shown
    assert "about 730 MB; its terms are Rockchip's" in shown
    assert not list(cache.iterdir()), "nothing is installed without --install"


def test_a_toolkit_that_is_there_is_shown_with_its_python(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolkit().variable, str(stand_in(cache, "exit 0")))
    found = json.loads(CliRunner().invoke(group, ["toolkit", "rknn", "--json"]).output)
    assert found["rknn"]["state"] == f"rknn-toolkit2 2.5.0: {cache / 'python'}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rkn"], "no toolkit is called 'rkn'"),
        (["--install"], "no toolkit is named to install"),
    ],
)
def test_wrong_names_are_one_line(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(group, ["toolkit", *arguments])
    assert result.exit_code == 2
    assert line in result.output
