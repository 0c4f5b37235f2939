"""Test forged folders that look like those of a killed run: they move none of the user's files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.system.places import LOCK, PrivateFolder, name_stage, scratch_folder

from edgeq.errors import OutputError
from edgeq.util import placement
from edgeq.util.outputs import check_free, output_directory, output_file
from tests.cli.workspace import Workspace, contents, fill
from tests.crashes import killed_before

NAMES = [".ssh", "Documents", "out"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a user's files, and below them somebody else's folder that contains a leftover of the output `out`."""
    for name in NAMES[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "private").write_text(name)
    stage = plant(tmp_path / "downloads" / "theirs" / "out", dict.fromkeys(NAMES))
    (stage / "old").mkdir()
    return tmp_path


def plant(output: Path, record: object) -> Path:
    """Make the private folder of a killed run to `output`, with `record` and without a folder `old`."""
    stage = output.with_name(f".{output.name}.{'0' * 16}.partial")
    (stage / "new").mkdir(parents=True)
    stage.chmod(0o700)
    (stage / "placing.json").write_text(json.dumps(record))
    return stage


def stage_in(home: Path) -> Path:
    return next((home / "downloads" / "theirs").iterdir())


def linked_old(stage: Path) -> None:
    (stage / "old").rmdir()
    (stage / "old").symlink_to("../../../..")


def linked_new(stage: Path) -> None:
    (stage / "new").rmdir()
    (stage / "new").symlink_to("../../../..")


def linked_stage(stage: Path) -> None:
    linked_old(stage)
    stage.rename(stage.parent.parent / "elsewhere")
    stage.symlink_to(stage.parent.parent / "elsewhere")


def linked_record(stage: Path) -> None:
    (stage / "placing.json").rename(stage.parent.parent / "record")
    (stage / "placing.json").symlink_to("../../record")


def piped_record(stage: Path) -> None:
    (stage / "placing.json").unlink()
    os.mkfifo(stage / "placing.json")


def foreign_names(stage: Path) -> None:
    (stage / "old" / ".ssh").mkdir()


def foreign_file(stage: Path) -> None:
    (stage / "placing.json").write_text(json.dumps({".bashrc": None, "out": None}))
    (stage / "old" / ".bashrc").write_text("theirs")
    (stage / "old" / "out").write_text("names .bashrc")


def folder_as_companion(stage: Path) -> None:
    (stage / "placing.json").write_text(json.dumps({"out.data": None, "out": None}))
    (stage / "old" / "out.data").mkdir()


def upward(stage: Path) -> None:
    (stage / "placing.json").write_text(json.dumps({"..": None, "out": None}))


def shared(stage: Path) -> None:
    (stage / "placing.json").write_text(json.dumps({"out": None}))
    stage.chmod(0o770)


def damaged(stage: Path) -> None:
    (stage / "placing.json").write_text("{")


FORGERIES = [linked_old, linked_new, linked_stage, linked_record, piped_record, foreign_names, foreign_file,
             folder_as_companion, upward, shared, damaged]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="links and modes of POSIX")
@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_leftover_is_refused_and_nothing_moves(home: Path, forge: Callable[[Path], None]) -> None:
    forge(stage_in(home))
    before = {str(p) for p in home.rglob("*")}
    for force in (False, True):
        with pytest.raises(OutputError, match=r"\.partial is named like the folder of an interrupted run"):
            check_free(home / "downloads" / "theirs" / "out", force=force)
    assert {str(p) for p in home.rglob("*")} == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("part", [".", "old", "placing.json"])
def test_refuses_leftovers_of_another_user(home: Path, part: str) -> None:
    stage = stage_in(home)
    (stage / "placing.json").write_text(json.dumps({"out": None}))
    os.chown(stage / part, 12345, -1)
    with pytest.raises(OutputError, match="belongs to another user"):
        check_free(home / "downloads" / "theirs" / "out", force=False)


def test_the_leftover_of_a_filled_folder_is_forged(home: Path) -> None:
    """A forged leftover inside the output is refused. Mount points have their leftovers there."""
    out = home / "downloads" / "theirs" / "out"
    shutil.rmtree(stage_in(home))
    linked = plant(out / "out", {".ssh": None, "manifest.json": None})
    (linked / "old").symlink_to("../../../..")
    with pytest.raises(OutputError, match="old is a link"):
        check_free(out, force=True)
    # A leftover is not used either if the output is a link to its folder.
    out.rename(out.with_name("real"))
    out.symlink_to("real")
    with pytest.raises(OutputError, match="exists already"):
        check_free(out, force=False)
    assert (home / ".ssh" / "private").read_text() == ".ssh"


COMMANDS = {
    "quantize": ("quantize", "net.onnx", "--data", "x.npz", "--no-timing", "-o", "theirs/out.onnx"),
    "package": ("package", "net.onnx", "--data", "x.npz", "--no-timing", "-o", "theirs/out"),
    "package to a file": ("package", "net.onnx", "--data", "x.npz", "--no-timing", "-o", "theirs/out.edgeq"),
    "calibrate": ("calibrate", "net.onnx", "--data", "x.npz", "-o", "theirs/out"),
    "calibrate --resume": ("calibrate", "net.onnx", "--data", "x.npz", "--resume", "-o", "theirs/out"),
    "report": ("report", "bundle.edgeq", "-o", "theirs/out.html"),
    "retarget": ("retarget", "net.onnx", "-o", "theirs/out.onnx"),
    "tune": ("tune", "net.onnx", "--data", "x.npz", "--budget", "3s", "-o", "theirs/out"),
    "tune, its statistics": ("tune", "net.onnx", "--data", "x.npz", "--budget", "3s", "-o", "theirs/tuned"),
    "demo": ("demo", "-o", "theirs/out"),
    "pull": ("pull", f"127.0.0.1:9/net@sha256:{0:064}", "-o", "theirs/out"),
}


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_believes_a_forged_leftover(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text("private")
    output = tmp_path / command[-1]
    if output.name == "tuned":
        output = tmp_path / "theirs" / "tuned.tuning" / "statistics"
        output.parent.mkdir(parents=True)
        marker = {"kind": "tuning", "schema": 1, "edgeq": "1"}
        (output.parent / ".edgeq").write_text(json.dumps(marker))
    stage = plant(output, {".ssh": None, output.name: None})
    (stage / "old").symlink_to(os.path.relpath(tmp_path, stage))
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path / ".ssh")
    ran = Workspace(tmp_path / "theirs").run(*command)
    assert ran.code == OutputError.exit_code, ran.err
    assert f".{output.name}.{'0' * 16}.partial" in ran.line
    assert ran.after == ran.before
    assert contents(tmp_path / ".ssh") == before


def killed_while_placing(output: Path, *, folder: bool) -> None:
    """Leave the files of a run that was killed after it had moved the old output and a companion file away."""
    stage = output.with_name(name_stage(output))
    (stage / "new").mkdir(mode=0o700, parents=True)
    stage.chmod(0o700)
    names = [output.name] if folder else [f"{output.stem}.program.npz", "weights.bin", output.name]
    for place in (output.parent, stage / "new"):
        for name in names:
            if folder:
                (place / name).mkdir()
            (place / name / "file" if folder else place / name).write_text(f"{place.name}, weights.bin")

    def move() -> None:
        placement.place(stage, output.parent, names, force=True)

    for number in range(1, 100):
        assert killed_before(move, output.parent, number), "the output was never away"
        if not output.exists():
            return
        for part in ("placing.json", "placing.json.draft"):
            (stage / part).unlink(missing_ok=True)
        for part in ("old", "proof"):
            shutil.rmtree(stage / part, ignore_errors=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("name", ["quantize", "package", "package to a file", "calibrate", "report"])
def test_every_command_puts_back_what_a_killed_run_moved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    command, folder = COMMANDS[name], name in ("package", "calibrate")
    output = tmp_path / command[-1]
    killed_while_placing(output, folder=folder)
    monkeypatch.chdir(tmp_path)
    ran = Workspace(output.parent).run(*command)
    assert "exists already" in ran.line
    kept = ["out"] if folder else sorted([f"{output.stem}.program.npz", "weights.bin", output.name])
    assert sorted(p.name for p in output.parent.iterdir()) == kept
    assert (output / "file" if folder else output).read_text() == "theirs, weights.bin"


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
@pytest.mark.parametrize("name", ["statistics.json", "statistics.npz"])
def test_resuming_follows_no_link(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    (tmp_path / "theirs" / "out").mkdir(parents=True)
    (tmp_path / "theirs" / "out" / "statistics.json").write_text('{"format": "edgeq-statistics"}')
    (tmp_path / "theirs" / "out" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "theirs" / "out" / name).symlink_to(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    Workspace(tmp_path / "theirs" / "out").refused(6, *COMMANDS["calibrate --resume"], says=f"{name} is a link")


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a child process, and return its exit code, which is negative if a signal ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # newer Pythons warn of threads, which the child does not use
        child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@FORKS
@pytest.mark.parametrize("write", [output_file, output_directory])
def test_the_next_run_removes_what_a_killed_run_left(tmp_path: Path, write: Any) -> None:
    def killed() -> None:
        with write(tmp_path / "out") as draft:
            (draft.parent / "half").write_text("half")
            kill_here()

    for _ in range(3):
        assert in_child(killed) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".out.*.partial"))) == 1, "each run removes what the last one left"
    check_free(tmp_path / "other", force=False)
    assert len(list(tmp_path.glob(".out.*.partial"))) == 1, "another output"
    check_free(tmp_path / "out", force=False)
    assert list(tmp_path.iterdir()) == []


@FORKS
def test_keeps_folders_of_running_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def other() -> None:
        check_free(tmp_path / "out", force=True)
        with scratch_folder("edgeq-"):
            pass

    with output_file(tmp_path / "out") as draft, scratch_folder("edgeq-") as scratch:
        draft.write_text("new")
        (scratch / "file").write_text("kept")
        for _ in range(2):
            assert in_child(other) == 0
        assert (scratch / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@FORKS
def test_temporary_folders_of_killed_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def killed() -> None:
        with scratch_folder("edgeq-a-") as folder:
            (folder / "big").write_text("big")
            kill_here()

    (tmp_path / "edgeq-mine").mkdir()
    assert in_child(killed) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3
    with scratch_folder("edgeq-b-"):
        assert list(tmp_path.glob("edgeq-a-*")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["edgeq-mine"]


@FORKS
@pytest.mark.parametrize("number", range(1, 12))
def test_a_kill_at_any_moment_of_a_private_folder_leaves_nothing(tmp_path: Path, number: int) -> None:
    def work() -> None:
        folder = PrivateFolder(tmp_path / name_stage(tmp_path / "out"))
        folder.create()
        (folder.path / "deep").mkdir()
        (folder.path / "deep" / "file").write_text("")
        folder.remove()

    killed_before(work, tmp_path, number)
    check_free(tmp_path / "out", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
@pytest.mark.parametrize("kind", ["linked folder", "linked lock", "no lock", "pipe", "named otherwise"])
def test_removes_only_folders_as_edgeq_leaves_them(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    stage = tmp_path / f".out.{'0' * 16}.partial"
    lock = stage.with_name(f"{stage.name}{LOCK}")
    if kind == "linked folder":
        stage.symlink_to("mine")
        lock.touch()
    else:
        if kind == "named otherwise":
            stage, lock = (place.with_name(place.name.replace("out", "other")) for place in (stage, lock))
        stage.mkdir()
        (stage / "link").symlink_to("../mine")
        if kind == "linked lock":
            lock.symlink_to("mine/file")
        elif kind == "pipe":
            os.mkfifo(lock)
        elif kind != "no lock":
            lock.touch()
    check_free(tmp_path / "out", force=False)
    assert (tmp_path / "mine" / "file").read_text() == "mine"
    assert os.path.lexists(stage)
