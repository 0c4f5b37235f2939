"""Test the runner as a device has it: in its own process, inside the bundle, without edgeq."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.bundle.outputs import choose_output_path
from edgeq_device.bundle.package import open_bundle
from edgeq_device.cli import main
from edgeq_device.errors import OutputError

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from tests.cli.process import FAST_CLOCK, enable_signals

from .attacks import directories
from .samples import ELSEWHERE, INPUT, answer, linear, tree, variant


def run(*arguments: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if "bench" in arguments:
        path = FAST_CLOCK
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, (done.returncode, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_info(good: Path) -> None:
    report = result(run("edgeq_run.py", "info", "--json", cwd=good))
    assert report["chosen"] == "plain"
    reasons = {entry["variant"]: " ".join(entry["reasons"]) for entry in report["variants"]}
    assert "no telepathy" in reasons["better"]
    assert f"it is for {ELSEWHERE}" in reasons["elsewhere"]
    text = run("edgeq_run.py", "info", cwd=good)
    assert "plain: chosen" in text.stdout
    assert "no telepathy" in text.stdout


def test_verify(good: Path) -> None:
    report = result(run("edgeq_run.py", "verify", "--json", cwd=good))
    assert report["passed"] is True
    assert {entry["variant"]: entry["status"] for entry in report["variants"]} == {
        "plain": "passed",
        "better": "not run",
        "elsewhere": "not run",
        "float32": "loaded",
    }
    assert "y: max error" in run("edgeq_run.py", "verify", cwd=good).stdout


def test_a_zip_runs_as_it_is(good_zip: Path, tmp_path: Path) -> None:
    report = result(run(good_zip, "verify", "--json", cwd=tmp_path))
    assert report["passed"] is True
    assert report["bundle"] == str(good_zip)


def test_a_directory_runs_as_it_is_and_again(copy: Path, tmp_path: Path) -> None:
    """A directory runs twice and stays unchanged. The launcher deletes the file that Python compiles from __main__.py,
    because the next check would refuse it.
    """
    before = tree(copy)
    for _ in range(2):
        assert result(run(copy, "verify", "--json", cwd=tmp_path))["passed"] is True
    assert tree(copy) == before


def test_onnxruntime_reports_to_nobody(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime sends no telemetry. If it did, it would leave a file in the temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    result(run("edgeq_run.py", "verify", "--json", cwd=good))
    assert list(tmp_path.iterdir()) == []


def test_running_changes_nothing(copy: Path) -> None:
    before = tree(copy)
    few = ("--duration", "0.02", "--queries", "2")
    for command in (("info",), ("verify",), ("bench", *few)):
        result(run("edgeq_run.py", *command, "--json", cwd=copy))
    assert tree(copy) == before


def test_edgeq_is_not_needed(good: Path, tmp_path: Path) -> None:
    (tmp_path / "edgeq.py").write_text("raise SystemExit('the runner imported edgeq')")
    result(run("edgeq_run.py", "verify", "--json", cwd=good, path=tmp_path))


def test_bench(good: Path, good_zip: Path, tmp_path: Path) -> None:
    few = ("--duration", "0.02", "--queries", "2", "--json")
    for command in ((good / "edgeq_run.py", "bench"), (good_zip, "bench")):
        report = result(run(*command, *few, cwd=tmp_path))
        assert set(report["scenarios"]["single-stream"]["models"]) == {"float32", "plain"}
    assert "p50" in run(good / "edgeq_run.py", "bench", *few[:-1], cwd=tmp_path).stdout


def test_infer(good: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", INPUT)
    np.savez(tmp_path / "x.npz", x=INPUT)
    for number, given in enumerate(("x.npy", "x.npz", "x=x.npy")):
        out = tmp_path / f"out-{number}.npz"
        report = result(run(good / "edgeq_run.py", "infer", given, "-o", out, "--json", cwd=tmp_path))
        assert report["variant"] == "plain"
        assert report["outputs"] == {"y": {"dtype": "float32", "shape": list(INPUT.shape)}}
        with np.load(out, allow_pickle=False) as outputs:
            np.testing.assert_allclose(outputs["y"], answer(0.0), atol=1e-4)
    first, second = ((tmp_path / f"out-{number}.npz").read_bytes() for number in (0, 1))
    assert first == second


def test_infer_keeps_what_is_there(good: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", INPUT)
    (tmp_path / "out.npz").write_text("precious")
    command = (good / "edgeq_run.py", "infer", "x.npy", "-o", "out.npz")
    assert "exists already" in one_line(run(*command, cwd=tmp_path), 6)
    assert (tmp_path / "out.npz").read_text() == "precious"
    assert run(*command, "--force", cwd=tmp_path).returncode == 0
    assert "cannot be written" in one_line(run(*command[:-1], "no/out.npz", cwd=tmp_path), 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.npz", "x.npy"]


def test_infer_from_inside_writes_beside_the_bundle(copy: Path, tmp_path: Path) -> None:
    before = tree(copy)
    report = result(run("../edgeq_run.py", "infer", "../selftest.npz/inputs-0", "--json", cwd=copy / "models"))
    assert report["output"] == str(tmp_path / "bundle.outputs.npz")
    assert tree(copy) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "bundle.outputs.npz"]


def test_infer_leaves_the_bundle_readable(copy: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", INPUT)
    (copy / "model.sig").write_text("{}")
    (copy / "mine.npz").write_bytes(b"")
    before = tree(copy)
    with open_bundle(copy) as bundle:
        for name in (
            "model.sig",
            "Model.SIG",
            "MANIFEST.JSON",
            "out:1.npz",
            "aux.npz",
            "o.npz.",
            "Mine.npz",
            "new/o.npz",
        ):
            with pytest.raises(OutputError, match="is in the bundle"):
                choose_output_path(bundle, copy / name)
        for name in ("mine.npz", "other.npz"):
            assert choose_output_path(bundle, copy / name) == copy / name
    line = one_line(run("edgeq_run.py", "infer", "../x.npy", "-o", "model.sig", "--force", cwd=copy), 6)
    assert "model.sig is in the bundle" in line
    assert tree(copy) == before


@pytest.mark.parametrize("failing", ["mkdir", "open"])
def test_a_zip_that_finds_no_space(
    failing: str, good_zip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is reported in one line, whether it lacks bytes for files or inodes for folders."""

    real = getattr(Path, failing)

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent == tmp_path:  # the temporary folder itself
            return real(path, *arguments, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, failing, full)
    assert main(["verify", "--bundle", str(good_zip)]) == 6
    line = capsys.readouterr().err
    assert "cannot be unpacked into" in line
    assert "No space left on device). Free some space, or set TMPDIR to a larger place that can be written" in line
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_zip_without_a_temporary_folder(
    good_zip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert main(["verify", "--bundle", str(good_zip)]) == 6
    line = capsys.readouterr().err
    assert "linear.edgeq cannot be unpacked: no temporary folder can be made (" in line
    assert "set TMPDIR" in line


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("budget", ["", "off"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_removes_what_was_unpacked(number: str, budget: str, good_zip: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    running = subprocess.Popen(
        [sys.executable, str(good_zip), "bench", "--duration", "60"],
        env={**environment, "TMPDIR": str(tmp_path), "EDGEQ_BUDGET": budget},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enable_signals,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("edgeq-bundle-*/selftest.npz")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(getattr(signal, number))
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (128 + getattr(signal, number), "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_a_signal_while_the_archive_is_closed(good_zip: Path, tmp_path: Path) -> None:
    program = f"""
import os, runpy, signal, sys, zipfile
close = zipfile.ZipFile.close

def close_and_end(archive):
    close(archive)
    if os.listdir({str(tmp_path)!r}):
        os.kill(os.getpid(), signal.SIGTERM)

zipfile.ZipFile.close = close_and_end
sys.argv = [{str(good_zip)!r}, "info"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_the_runner(good: Path, tmp_path: Path) -> None:
    (tmp_path / "edgeq-run").symlink_to(good / "edgeq_run.py")
    report = result(run("edgeq-run", "info", "--json", cwd=tmp_path))
    assert report["bundle"] == str(good)


def test_a_link_to_the_bundle_keeps_its_name(good: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(good)
    np.save(tmp_path / "x.npy", INPUT)
    report = result(run("current/edgeq_run.py", "infer", "x.npy", "--json", cwd=tmp_path))
    assert report["output"] == str(tmp_path / "current.outputs.npz")


def test_infer_with_wrong_inputs(good: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((2, 7), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((2, 48)))
    np.savez(tmp_path / "other.npz", z=INPUT)
    (tmp_path / "text.npy").write_text("no array")
    for given, says in (
        ("wide.npy", "has shape [2, 7]"),
        ("double.npy", "is float64, the model takes float32"),
        ("other.npz", "no input 'z'"),
        ("text.npy", "is not an .npy array"),
        ("absent.npy", "cannot be read"),
    ):
        assert says in one_line(run(good / "edgeq_run.py", "infer", given, "-o", "o.npz", cwd=tmp_path), 4)
    assert not (tmp_path / "o.npz").exists()


@pytest.mark.parametrize("command", ["info", "verify", "bench"])
def test_a_changed_bundle_is_refused(command: str, copy: Path) -> None:
    directories.flipped_byte(copy)
    assert "was changed" in one_line(run("edgeq_run.py", command, cwd=copy), 7)


def test_a_bundle_for_elsewhere_is_refused(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx", 0.0)
    write_bundle(BundleSpec("x", (variant("v", model, 0.0, info={"architecture": ELSEWHERE}),)), tmp_path / "b")
    np.save(tmp_path / "x.npy", INPUT)
    for command in (("verify",), ("bench",), ("infer", "../x.npy", "-o", "../o.npz")):
        line = one_line(run("edgeq_run.py", *command, cwd=tmp_path / "b"), 7)
        assert f"it is for {ELSEWHERE}" in line
    shown = run("edgeq_run.py", "info", cwd=tmp_path / "b")
    assert shown.returncode == 0
    assert "not here" in shown.stdout


def test_a_failing_self_test_is_an_error(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx", 0.5)
    write_bundle(BundleSpec("x", (variant("v", model, 0.0),)), tmp_path / "b")
    done = run("edgeq_run.py", "verify", "--json", cwd=tmp_path / "b")
    assert "output y: error 0.5" in one_line(done, 10)
    report = json.loads(done.stdout)
    assert report["passed"] is False
    assert report["variants"][0]["outputs"]["y"]["max_abs_error"] == pytest.approx(0.5, abs=1e-4)


def test_a_named_variant(good: Path) -> None:
    report = result(run("edgeq_run.py", "verify", "--variant", "plain", "--json", cwd=good))
    assert [entry["variant"] for entry in report["variants"]] == ["plain"]
    assert "has no variant 'other'" in one_line(run("edgeq_run.py", "info", "--variant", "other", cwd=good), 7)
    assert "no telepathy" in one_line(run("edgeq_run.py", "info", "--variant", "better", cwd=good), 7)


def test_without_onnxruntime(good: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')")
    line = one_line(run("edgeq_run.py", "verify", cwd=good, path=tmp_path), 8)
    assert "onnxruntime cannot be imported" in line


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("damage", ["is missing", "was changed", "cut off"])
def test_a_runner_that_was_changed_does_not_run(damage: str, packed: bool, copy: Path, tmp_path: Path) -> None:
    """The runner's hash is compared before its first import, in a folder and in a zip."""
    file, planted = copy / "edgeq_device.zip", tmp_path / "RUN"
    content = file.read_bytes()
    file.unlink()
    if damage == "was changed":
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                new.writestr(name, f"open({str(planted)!r}, 'w')\n".encode() + old.read(name))
    elif damage == "cut off":
        file.write_bytes(content[:-100])
    program = Path(shutil.make_archive(str(copy), "zip", copy)) if packed else copy / "edgeq_run.py"
    line = one_line(run(program, "info", cwd=tmp_path), 7)
    assert f"edgeq_device.zip {'was changed' if damage == 'cut off' else damage}" in line
    done = run("-c", "from edgeq_run import open_bundle; open_bundle()", cwd=tmp_path, path=program if packed else copy)
    assert "ImportError: edgeq_device.zip" in done.stderr
    assert not planted.exists()


def shell(line: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line.replace('RUN', f'{sys.executable} edgeq_run.py')}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_nobody_takes(good: Path) -> None:
    assert shell("RUN info | true", good) == (141, "")
    assert shell("RUN info --json >&-", good) == (0, "")
    assert shell("RUN info >&- 2>&-", good) == (0, "")
    code, line = shell("RUN info > /dev/full", good)
    assert (code, line) == (
        6,
        "edgeq_run: standard output cannot be written (No space left on device). Send it elsewhere\n",
    )
    assert shell("PYTHONIOENCODING=ascii RUN info", good) == (0, "")


def test_wrong_usage(good: Path) -> None:
    assert run("edgeq_run.py", cwd=good).returncode == 2
    assert run("edgeq_run.py", "dance", cwd=good).returncode == 2
