"""Test the output of commands: only JSON on stdout, silence with -q, exit codes, output that nobody reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import WarmUp

from edgeq import errors
from edgeq.errors import EdgeqError
from edgeq.jobs import demo
from edgeq.util import process as ending
from tests.cli import process
from tests.cli.workspace import Workspace

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = ("--duration", "0", "--queries", "2")
LABELLED = ("labelled.npz", "--preprocess", "key=x,label=y")
COMMANDS: list[tuple[tuple[str, ...], set[str]]] = [
    (("detect",), {"machine", "match"}),
    (("profiles",), {"profiles"}),
    (("profiles", "show", "x86-64-avx2", "--why"), {"name", "scheme", "why", "source"}),
    (("targets",), {"targets"}),
    (("targets", "show", "raspberry-pi-4"), {"name", "profile"}),
    (("preprocess", "list"), {"preprocessings"}),
    (("inspect", "net.onnx"), {"model", "operators", "targets"}),
    (("inspect", "unsupported.onnx"), {"model", "operators", "targets"}),
    (("calibrate", "net.onnx", "--data", "x.npz", "-o", "stats"), {"output", "samples", "tensors"}),
    (("quantize", "net.onnx", "--data", "x.npz", "-o", "int8.onnx", "--no-timing"), {"output", "scheme", "speed"}),
    (("quantize", "matmul.onnx", "--data", "rows.npz", "-o", "i.onnx", "--dynamic", "--no-timing"), {"output"}),
    (("package", "net.onnx", "--data", "x.npz", "-o", "new", "--no-timing"), {"bundle", "variants", "notes"}),
    (("verify", "bundle"), {"bundle", "passed", "variants"}),
    (("bench", "net.onnx", *QUICK), {"schema", "models", "machine"}),
    (("bench", "bundle", *QUICK), {"schema", "models", "machine"}),
    (("eval", "net.onnx", "--data", *LABELLED, "--task", "classification"), {"model", "reference"}),
    (("eval", "bundle", "--data", "x.npz", "--reference", "net.onnx"), {"model", "reference"}),
]


@pytest.fixture(scope="module")
def bundle(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundle") / "bundle"
    data = ("--data", filled / "x.npz")
    made = Workspace(filled).run("package", filled / "net.onnx", *data, "--with-float", "--no-timing", "-o", place)
    assert made.code == 0, made.err
    return place


@pytest.fixture
def bundled(workspace: Workspace, bundle: Path) -> Workspace:
    shutil.copytree(bundle, workspace.path / "bundle")
    return workspace


@pytest.mark.parametrize(("command", "keys"), COMMANDS, ids=[" ".join(c[:2]) for c, _ in COMMANDS])
def test_json_is_all_that_is_on_stdout(bundled: Workspace, command: tuple[str, ...], keys: set[str]) -> None:
    ran = bundled.run(*command, "--json")
    assert ran.code == 0, ran.err

    def strict(constant: str) -> Any:
        pytest.fail(f"{constant} is not a JSON")

    found = json.loads(ran.out, parse_constant=strict)
    assert keys <= found.keys()


@pytest.mark.parametrize(("command", "keys"), COMMANDS, ids=[" ".join(c[:2]) for c, _ in COMMANDS])
def test_quiet_leaves_stderr_alone(bundled: Workspace, command: tuple[str, ...], keys: set[str]) -> None:
    del keys
    ran = bundled.run(*command, "-q")
    assert (ran.code, ran.err) == (0, "")
    assert bool(ran.out) is ("-o" not in command)  # a command that writes a file prints nothing


def test_the_demo_speaks_json(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = WarmUp(min_s=0.0, max_s=0.1)
    short = BenchSettings(min_duration_s=0.05, min_queries=5, warm_up=warm_up)
    monkeypatch.setattr(demo, "BenchSettings", lambda: short)
    ran = workspace.run("demo", "-o", "demo", "--json")
    assert ran.code == 0, ran.err
    assert {"machine", "match", "package", "verify", "bench", "table", "bundle"} <= ran.json().keys()


def test_the_documented_exit_codes_are_these() -> None:
    text = (REPOSITORY / "docs" / "errors.md").read_text("utf-8")
    rows = {(int(code), name) for code, name in re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\|", text, re.MULTILINE)}
    tree = {
        (c.exit_code, c.__name__) for c in vars(errors).values() if isinstance(c, type) and issubclass(c, EdgeqError)
    }
    shells = {(ending.INTERRUPTED, ""), (ending.READER_GONE, ""), (ending.TERMINATED, ""), (ending.TERMINAL_GONE, "")}
    assert rows == {(0, ""), *tree, *shells}


def test_the_documented_reasons_are_those_of_the_tree() -> None:
    """The page and the module name the same reasons for the exit codes."""
    text = (REPOSITORY / "docs" / "errors.md").read_text("utf-8")
    documented = dict(re.findall(r"^\| \d+ \| `(\w+)` \| (\w+)", text, re.MULTILINE))
    drawn = dict(re.findall(r"(\w+Error) +\d+ +(\w+)", errors.__doc__ or ""))
    assert drawn.items() <= documented.items()


def test_a_name_that_is_no_text_is_shown_escaped(workspace: Workspace) -> None:
    name = os.fsdecode(b"n\xff.onnx")
    (workspace.path / "net.onnx").rename(workspace.path / name)
    ran = workspace.run("inspect", name)
    assert ran.code == 0, ran.err
    assert "n\\udcff.onnx" in ran.out
    assert workspace.run("inspect", name, "--json").json()["model"] == name
    made = workspace.run("package", name, "--data", "x.npz", "--no-timing", "-o", "bundle")
    assert made.code == 0, made.err
    workspace.refused(8, "bench", name, *QUICK, says="onnxruntime cannot open a path that is not UTF-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [("profiles",), ("profiles", "--json"), ("--help",)])
def test_a_full_standard_output(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*process.COMMAND, *arguments],
            cwd=tmp_path,
            env=process.environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == errors.OutputError.exit_code
    assert done.stderr.startswith("edgeq: standard output")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="pipes and shells as POSIX has them")
@pytest.mark.parametrize(
    ("redirection", "code"), [("| (exec true)", ending.READER_GONE), (">&-", 0)], ids=["reader gone", "closed"]
)
def test_nobody_reads(redirection: str, code: int, tmp_path: Path) -> None:
    """A command ends without a message if the reader has left or stdout is closed.

    `true` exits before edgeq has started, so the reader leaves before edgeq writes anything.
    """
    script = f'set -o pipefail; "$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *process.COMMAND, "profiles", "show", "x86-64-avx2", "--why"],
        cwd=tmp_path,
        env=process.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_python_m_and_the_console_script_are_the_same_program() -> None:
    scripts = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    assert 'edgeq = "edgeq.__main__:main"' in scripts
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from edgeq.__main__ import main; main()", "--version"],
        env=process.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("edgeq, version")


def test_onnxruntime_reports_to_nobody_and_nothing_stays_in_the_temporary_folder(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    options = ("net.onnx", "--data", "x.npz", "--no-timing", "-o", "int8.onnx")
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    done = process.run("quantize", *options, cwd=workspace.path, env={"TMPDIR": str(work)})
    assert done.returncode == 0, done.stderr
    assert list(work.iterdir()) == []


def test_no_command_shows_the_help(workspace: Workspace) -> None:
    ran = workspace.run()
    assert ran.code == 2
    assert ran.err.startswith("Usage: edgeq")
    assert ran.out == ""
