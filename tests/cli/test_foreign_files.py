"""Test outputs over files that edgeq did not write: it refuses with exit code 6, names the file, and loses nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import numpy as np
import pytest

import edgeq
from edgeq.cli import COMMANDS, group
from edgeq.errors import OutputError
from tests.cli.workspace import Workspace

OUTPUT = OutputError.exit_code
GOOD = ("net.onnx", "--data", "x.npz")
TUNE = ("tune", *GOOD, "--budget", "3s")
CALIBRATE = ("calibrate", *GOOD)
# Every command that writes to a path of the user's choice, with the arguments that it needs.
DIRECTORIES = {
    "package": ("package", *GOOD, "--no-timing"),
    "tune": TUNE,
    "calibrate": CALIBRATE,
    "calibrate merge": ("calibrate", "merge", "cal-0", "cal-1"),
    "emit-c": ("emit-c", "int8.program.npz", "--data", "x.npz"),
    "demo": ("demo",),
    "pull": ("pull", f"127.0.0.1:9/net@sha256:{0:064}"),
}
FILES = {
    "quantize": ("quantize", *GOOD, "--no-timing"),
    "retarget": ("retarget", "net.onnx"),
    "report": ("report", "absent.edgeq"),
    "device report": ("device", "report", "ssh://nobody@127.0.0.1:9"),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of emit-c and merge, once."""
    from edgeq.backends.systolic.save import save_program
    from edgeq.calibration.files import save_statistics
    from edgeq.calibration.statistics import Statistics
    from edgeq.demo import CALIBRATION, MODEL
    from tests.backends.systolic.emit_c.programs import program_of

    place = tmp_path_factory.mktemp("programs")
    save_program(program_of(MODEL, str(CALIBRATION), count=1)[0], place / "int8.program.npz")
    for part in range(2):
        save_statistics(Statistics("m", str(part), 0, {}), place / f"cal-{part}")
    return place


@pytest.fixture
def full(workspace: Workspace, programs: Path) -> Workspace:
    shutil.copytree(programs, workspace.path, dirs_exist_ok=True)
    return workspace


def outputs(command: click.Command, name: str) -> list[str]:
    """Return the name of the command if it has -o, or the names of all such commands in a group."""
    found = [name] if any("-o" in parameter.opts for parameter in command.params) else []
    if isinstance(command, click.Group):
        inner = command.commands.items()
        found += [each for word, child in inner for each in outputs(child, f"{name} {word}")]
    return [" ".join(each.split()) for each in found]


def test_every_command_with_an_output_is_here() -> None:
    context = click.Context(group)
    found = []
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        found += outputs(command, name)
    assert {name.removesuffix(" collect") for name in found} == {*DIRECTORIES, *FILES}


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "--force"])
@pytest.mark.parametrize("arguments", [*DIRECTORIES.values(), *FILES.values()], ids=[*DIRECTORIES, *FILES])
@pytest.mark.parametrize("held", ["manifest.json", "notes.txt", ".git", "statistics.json", ".edgeq"])
def test_a_folder_of_the_user_survives(
    full: Workspace, arguments: tuple[str, ...], held: str, force: tuple[str, ...]
) -> None:
    place = full.path / "out"
    place.mkdir()
    (place / held).write_text('{"name": "a web app", "icons": []}')
    full.refused(OUTPUT, *arguments, "-o", "out", *force, says="out ")
    (full.path / "link").symlink_to(place)
    full.refused(OUTPUT, *arguments, "-o", "link", *force, says="link ")
    if force:
        full.refused(OUTPUT, *arguments, "-o", full.path, *force, says=str(full.path))


@pytest.mark.parametrize("arguments", [DIRECTORIES["package"], TUNE, ("demo",)], ids=["package", "tune", "demo"])
def test_a_bundle_with_a_file_of_the_user_survives(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    assert workspace.run(*DIRECTORIES["package"], "-o", "out").code == 0
    notes = workspace.path / "out" / "models" / "notes.txt"
    notes.write_text("mine")
    says = "out contains models/notes.txt, which edgeq did not write. Move it, or choose another output"
    workspace.refused(OUTPUT, *arguments, "-o", "out", "--force", says=says)
    notes.unlink()
    runner = workspace.path / "out" / "edgeq_run.py"
    kept = runner.read_bytes()
    runner.write_bytes(kept + b"# a change of mine\n")
    workspace.refused(
        OUTPUT, *arguments, "-o", "out", "--force", says="out contains edgeq_run.py, which edgeq did not write"
    )
    runner.write_bytes(kept)
    # Python's caches and missing files do not prevent a replacement.
    (workspace.path / "out" / "__pycache__").mkdir()
    (workspace.path / "out" / "__pycache__" / "edgeq_run.cpython-311.pyc").write_bytes(b"")
    (workspace.path / "out" / "__main__.py").unlink()
    assert workspace.run(*DIRECTORIES["package"], "-o", "out", "--force").code == 0
    assert not (workspace.path / "out" / "__pycache__").exists()


def test_the_working_directory_survives(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace.run(*DIRECTORIES["package"], "-o", "out").code == 0
    monkeypatch.chdir(workspace.path / "out")
    arguments = ("package", "../net.onnx", "--data", "../x.npz", "--no-timing", "-o", "../out", "--force")
    workspace.refused(OUTPUT, *arguments, says="../out contains the working directory")


@pytest.mark.parametrize("options", [(), ("--force",), ("--resume",)], ids=["", "--force", "--resume"])
def test_a_folder_with_the_name_of_the_tuning_folder_survives(workspace: Workspace, options: tuple[str, ...]) -> None:
    mine = workspace.path / "out.tuning"
    mine.mkdir()
    (mine / "piano.txt").write_text("a = 442 Hz")
    workspace.refused(
        OUTPUT, *TUNE, "-o", "out", *options, says="out.tuning contains files and is not a folder of an earlier"
    )
    (mine / "journal.jsonl").write_text("Dear diary\n")
    (mine / "statistics").mkdir()
    (mine / "statistics" / "statistics.json").write_text('{"of": "the piano"}')
    workspace.refused(OUTPUT, *TUNE, "-o", "out", *options, says="out.tuning contains files")
    (mine / "journal.jsonl").write_text('{"format": "edgeq-tuning-journal/2", "settings": {}}\n')
    workspace.refused(
        OUTPUT, *TUNE, "-o", "out", *options, says="out.tuning contains piano.txt, which edgeq did not write"
    )
    shutil.rmtree(mine)
    mine.write_text("mine")
    workspace.refused(OUTPUT, *TUNE, "-o", "out", *options, says="out.tuning is a file")
    mine.unlink()
    (workspace.path / "elsewhere").mkdir()
    mine.symlink_to(workspace.path / "elsewhere")
    workspace.refused(OUTPUT, *TUNE, "-o", "out", *options, says="out.tuning is a symbolic link")


@pytest.mark.parametrize("options", [(), ("--force",), ("--resume",)], ids=["", "--force", "--resume"])
def test_inputs_in_the_tuning_folder_survive(workspace: Workspace, options: tuple[str, ...]) -> None:
    shutil.copytree(workspace.path / "images", workspace.path / "out.tuning")
    data = ("--data", "out.tuning", "--preprocess", "divide=255,layout=NCHW", "--budget", "3s")
    says = "out.tuning is the input out.tuning"
    workspace.refused(OUTPUT, "tune", "net.onnx", *data, "-o", "out", *options, says=says)
    says = "contains the input out.tuning/x.npz"
    shutil.copy(workspace.path / "x.npz", workspace.path / "out.tuning")
    workspace.refused(OUTPUT, "tune", "net.onnx", "--data", "out.tuning/x.npz", "-o", "out", *options, says=says)
    from edgeq.jobs.calibrate import calibrate

    shutil.rmtree(workspace.path / "out.tuning")
    calibrate(workspace.path / "net.onnx", workspace.path / "x.npz", workspace.path / "out.tuning" / "statistics")
    kept = workspace.contents()
    with pytest.raises(OutputError, match=r"contains the input out\.tuning/statistics"):
        edgeq.tune(Path("net.onnx"), None, Path("out"), statistics=Path("out.tuning/statistics"))
    assert workspace.contents() == kept


def test_a_foreign_file_in_a_calibration_survives(workspace: Workspace) -> None:
    assert workspace.run(*CALIBRATE, "-o", "cal").code == 0
    before = workspace.contents()
    for options in (("--resume",), ("--force",), ("--resume", "--force")):
        (workspace.path / "cal" / "notes.txt").write_text("mine")
        says = "cal contains notes.txt, which edgeq did not write"
        workspace.refused(OUTPUT, *CALIBRATE, "-o", "cal", *options, says=says)
        (workspace.path / "cal" / "notes.txt").unlink()
        assert workspace.run(*CALIBRATE, "-o", "cal", *options).code == 0
        assert workspace.contents() == before
    home = workspace.path / "home"
    (home / "photos").mkdir(parents=True)
    (home / "photos" / "one.jpg").write_bytes(b"dear to somebody")
    workspace.refused(9, *CALIBRATE, "-o", "home", "--resume", says="contains no calibration statistics")
    for file in (workspace.path / "cal").iterdir():
        shutil.copy(file, home)
    workspace.refused(
        OUTPUT, *CALIBRATE, "-o", "home", "--resume", says="home contains photos/one.jpg, which edgeq did not"
    )
    (workspace.path / "link").symlink_to("cal")
    workspace.refused(OUTPUT, *CALIBRATE, "-o", "link", "--resume", says="link is a symbolic link")


def test_a_file_that_comes_while_calibrating_survives(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.jobs import calibrate as run

    assert workspace.run(*CALIBRATE, "-o", "cal").code == 0
    real = run.collect

    def slow(*arguments: object, **options: object) -> object:
        done = real(*arguments, **options)  # type: ignore[arg-type]
        (workspace.path / "cal" / "notes.txt").write_text("mine")
        return done

    monkeypatch.setattr(run, "collect", slow)
    ran = workspace.run(*CALIBRATE, "-o", "cal", "--force")
    assert (ran.code, ran.line.startswith("edgeq: cal contains notes.txt")) == (OUTPUT, True), ran.err
    assert {k: v for k, v in ran.after.items() if k != "cal/notes.txt"} == ran.before


def test_the_c_of_a_program_is_replaced_and_nothing_else(full: Workspace) -> None:
    np.savez(full.path / "digits.npz", image=np.zeros((2, 1, 28, 28), np.float32))
    from edgeq.demo import CALIBRATION

    emit = ("emit-c", "int8.program.npz", "--data", CALIBRATION, "-o", "c")
    assert full.run(*emit).code == 0
    assert full.run(*emit, "--force").code == 0
    for name in ("main.c", "notes.txt", "net-host"):
        kept = (full.path / "c" / name).read_bytes() if name == "main.c" else None
        (full.path / "c" / name).write_text("// mine")
        full.refused(OUTPUT, *emit, "--force", says=f"c contains {name}, which edgeq did not write")
        (full.path / "c" / name).unlink() if kept is None else (full.path / "c" / name).write_bytes(kept)
    (full.path / "c" / ".edgeq").unlink()
    full.refused(OUTPUT, *emit, "--force", says="c contains files and is not a C bundle with edgeq's marker")


def test_results_and_tables_of_older_tools_replace_only_their_like(tmp_path: Path) -> None:
    from edgeq.calibration.ranges import Range
    from edgeq.calibration.table import write_tables
    from edgeq.compat.mlperf import _check_results

    ranges = {"x": Range(-1.0, 1.0)}
    write_tables(tmp_path, ranges)
    write_tables(tmp_path, ranges)
    for name in ("calibration.json", "calibration.cache", "calibration.flatbuffers"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text("three little words")
        with pytest.raises(OutputError, match=f"{name} is not a calibration table"):
            write_tables(tmp_path, ranges)
        assert (tmp_path / name).read_text() == "three little words"
        (tmp_path / name).write_bytes(kept)
    results = tmp_path / "results.json"
    _check_results(results)
    results.write_text(json.dumps({"model": "m", "dataset": "d", "scenario": "s"}))
    _check_results(results)
    results.write_text("{}")
    with pytest.raises(OutputError, match="does not contain earlier results"):
        _check_results(results)


def test_files_beside_a_model_are_replaced_only_by_their_like(workspace: Workspace) -> None:
    array = ("quantize", *GOOD, "--no-timing", "-t", "gemmini", "-o", "array.onnx", "--force")
    assert workspace.run(*array).code == 0
    assert workspace.run(*array).code == 0
    (workspace.path / "array.program.npz").write_text("mine")
    workspace.refused(OUTPUT, *array, says="array.dialect.onnx exists and does not belong to array.onnx")
    (workspace.path / "array.dialect.onnx").unlink()
    workspace.refused(OUTPUT, *array, says="array.program.npz exists and does not belong to array.onnx")
