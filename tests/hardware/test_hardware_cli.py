"""Test `edgeq detect`, `edgeq profiles` and `edgeq targets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgeq.cli import group
from edgeq.hardware import detect, target
from edgeq.hardware.detect import Machine
from tests.hardware.recorded import RECORDS, machine_of


@pytest.fixture(autouse=True)
def _config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use an empty folder of settings and a recorded machine."""
    monkeypatch.setattr("platformdirs.user_config_path", lambda app: tmp_path / app)
    recorded = machine_of(RECORDS["haswell"])

    def machine() -> Machine:
        return recorded

    monkeypatch.setattr(detect, "detect_machine", machine)
    monkeypatch.setattr(target, "detect_machine", machine)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, arguments)


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_detect() -> None:
    text = run("detect").stdout
    assert "Intel(R) Core(TM) i7-4770" in text
    assert "x86-64-avx2 fits: x86_64, avx2, fma, sse4_1" in text
    assert "not x86-64-avx-vnni: lacks avx_vnni" in text
    assert "pclmulqdq" not in text
    assert "pclmulqdq" in run("detect", "-v").stdout


def test_detect_json() -> None:
    plain = run_json("detect")
    assert set(plain) == {"machine", "match", "engines", "wrong_kernels"}
    assert plain["match"]["profile"] == "x86-64-avx2"
    assert {"profile": "x86-64-avx-vnni", "missing": ["avx_vnni"]} in plain["match"]["runner_ups"]
    assert plain["machine"]["cores"] == 2


@pytest.mark.parametrize("arguments", [("profiles",), ("profiles", "list")])
def test_profiles_alone_lists(arguments: tuple[str, ...]) -> None:
    assert "x86-64-amx-int8" in run(*arguments).stdout
    assert {"arm64-i8mm", "systolic-int8"} <= {profile["name"] for profile in run_json(*arguments)["profiles"]}


def test_profiles_show() -> None:
    short, long = run("profiles", "show", "x86-64-avx2").stdout, run("profiles", "show", "x86-64-avx2", "--why").stdout
    assert "VPMADDUBSW" not in short
    assert "VPMADDUBSW adds two U8S8 products in 16 bits" in long
    assert "[measured under emulation of a Haswell" in long
    assert run_json("profiles", "show", "x86-64-avx2")["scheme"]["reduce_range"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("profiles", "show", "x86-64-avx3"), 5, "unknown target or profile 'x86-64-avx3'. Did you mean x86-64-avx"),
        (("profiles", "show"), 2, "no profile named"),
        (("targets", "show", "rasberry-pi-4"), 5, "Did you mean raspberry-pi-4?"),
        (("targets", "show"), 2, "no target named"),
        (("targets", "list", "gemmini"), 2, "gemmini does not go with a list of all targets. Leave it out, or type"),
        (("profiles", "list", "x86-64"), 2, "or type `edgeq profiles show x86-64`"),
        (("profiles", "--why"), 2, "--why does not go with a list of all profiles"),
        (("targets", "show", "./ABSENT.TOML"), 5, "ABSENT.TOML cannot be read: No such file"),
    ],
)
def test_wrong_names_are_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_targets() -> None:
    assert "raspberry-pi-5" in run("targets").stdout
    assert {"this-machine", "gemmini"} <= {t["name"] for t in run_json("targets")["targets"]}
    assert "dim: 16" in run("targets", "show", "gemmini").stdout
    shown = run_json("targets", "show", "this-machine")
    assert shown["profile"]["name"] == "x86-64-avx2"


@pytest.mark.parametrize("file", ["board.toml", "BOARD.TOML"])
def test_a_file_stands_where_a_name_does(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.write_text('title = "Mine"\nextends = "arm64-neon"\nscheme.per_channel = false\n', encoding="utf-8")
    assert run_json("targets", "show", str(path))["name"] == path.stem
    shown = run_json("profiles", "show", str(path))
    assert (shown["name"], shown["scheme"]["per_channel"]) == ("arm64-neon", False), "the profile of that target"
    path.write_text('title = "Mine"\nextends = "arm64-neon"\nrank = 11\n', encoding="utf-8")
    assert run_json("profiles", "show", str(path))["name"] == path.stem
    assert run_json("targets", "show", str(path))["profile"]["rank"] == 11


def test_the_profile_of_a_target_is_shown_with_its_overrides() -> None:
    assert run_json("profiles", "show", "this-machine")["name"] == "x86-64-avx2"


def test_a_users_own_target_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "edgeq" / "targets"
    folder.mkdir(parents=True)
    (folder / "my-board.toml").write_text('title = "Mine"\nextends = "arm64-neon"\n', encoding="utf-8")
    assert "my-board" in run("targets").stdout
    (folder / "my-board.toml").write_text('title = "Mine"\nextends = "arm64-neon"\nbored = 1\n', encoding="utf-8")
    result = run("targets")
    assert result.exit_code == 5
    assert "my-board.toml: unknown key 'bored' at the top" in result.stderr
