"""Test impossible outputs and outputs that would replace something: edgeq refuses them and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeq.errors import DataError, ModelError, OutputError
from tests.cli import process
from tests.cli.workspace import Workspace, contents

OUTPUT = OutputError.exit_code
GOOD = ("net.onnx", "--data", "x.npz", "--no-timing")
IMAGES = ("net.onnx", "--data", "images", "--preprocess", "divide=255,layout=NCHW", "--no-timing")


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("-", "'-' is not an output"),
        ("", "'.' is not an output"),
        ("notes.txt/int8.onnx", "notes.txt is not a directory"),
        ("n" * 300, "File name too long"),
        (os.fsdecode(b"m\xff.onnx"), "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "package"])
def test_refuses_impossible_output_paths(
    workspace: Workspace, command: str, output: str, says: str, force: tuple[str, ...]
) -> None:
    workspace.refused(OUTPUT, command, *GOOD, "-o", output, *force, says=says)


@pytest.mark.parametrize("command", ["quantize", "package"])
def test_keeps_existing_outputs_without_force(workspace: Workspace, command: str) -> None:
    kept = workspace.path / ("kept.onnx" if command == "quantize" else "kept.edgeq")
    kept.write_text("mine")
    workspace.refused(OUTPUT, command, *GOOD, "-o", kept.name, says=f"{kept.name} exists already. Pass --force")
    assert workspace.run(command, *GOOD, "-o", kept.name, "--force").code == 0
    assert kept.read_bytes() != b"mine"


def test_a_failure_with_force_leaves_the_old_output(workspace: Workspace) -> None:
    (workspace.path / "kept.onnx").write_text("mine")
    options = ("--exclude", "conv", "--require-coverage", "95%", "--force")
    workspace.refused(10, "quantize", *GOOD, "-o", "kept.onnx", *options, says="less than the 95.0%")


@pytest.mark.parametrize("command", ["quantize", "package"])
@pytest.mark.parametrize("output", ["net.onnx", "x.npz", "images/../net.onnx"])
def test_inputs_are_never_replaced(workspace: Workspace, command: str, output: str) -> None:
    ran = workspace.refused(OUTPUT, command, *GOOD, "-o", output, "--force", says="")
    assert "is the input" in ran.line or "is a file, not a directory" in ran.line


def test_folders_that_hold_an_input_are_never_replaced(workspace: Workspace) -> None:
    (workspace.path / "images" / "manifest.json").write_text("{}")
    workspace.refused(OUTPUT, "package", *IMAGES, "-o", "images", "--force", says="images is the input images")
    shutil.copytree(workspace.path / "images", workspace.path / "all" / "images")
    (workspace.path / "all" / "manifest.json").write_text("{}")
    says = "all contains the input all/images"
    options = ("net.onnx", "--data", "all/images", "--preprocess", "divide=255,layout=NCHW")
    workspace.refused(OUTPUT, "package", *options, "-o", "all", "--force", says=says)


def test_external_data_of_the_input_is_never_replaced(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    from edgeq.model import files

    big = onnx.load(workspace.path / "net.onnx")
    onnx.save(big, workspace.path / "big.onnx", save_as_external_data=True, location="int8.onnx.data", size_threshold=0)
    says = "int8.onnx.data is the input int8.onnx.data"
    options = ("--data", "x.npz", "--no-timing")
    workspace.refused(OUTPUT, "quantize", "big.onnx", *options, "-o", "int8.onnx", "--force", says=says)
    monkeypatch.setattr(files, "INLINE_LIMIT", 0)
    workspace.refused(OUTPUT, "quantize", "big.onnx", *options, "-o", "int8.onnx", says=says)


def test_models_and_bundles_are_named_as_what_they_are(workspace: Workspace) -> None:
    assert workspace.run("quantize", *GOOD, "-o", "int8.onnx").code == 0
    for command in (("quantize", *GOOD), ("retarget", "int8.onnx")):
        says = "out.EDGEQ has the suffix of a bundle, but this command writes a model"
        workspace.refused(OUTPUT, *command, "-o", "out.EDGEQ", says=says)
    reference = f"127.0.0.1:9/net@sha256:{0:064}"
    for command in (("package", *GOOD), ("tune", *GOOD[:3]), ("pull", reference)):
        says = "out.onnx has the suffix of a model, but this command writes a bundle"
        workspace.refused(OUTPUT, *command, "-o", "out.onnx", says=says)
    assert workspace.run("package", *GOOD, "-o", "out.EDGEQ").code == 0
    assert (workspace.path / "out.EDGEQ").is_file()
    assert workspace.run("verify", "out.EDGEQ").code == 0


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "--force"])
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
@pytest.mark.parametrize("command", ["quantize", "retarget"])
def test_the_place_of_a_large_models_weights_is_looked_at_first(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, command: str, kind: str, force: tuple[str, ...]
) -> None:
    """A file at the path of the weights is refused at the start. The check at the end would come hours later."""
    from edgeq.model import files

    given = ("net.onnx", "--data", "x.npz", "--no-timing")
    if command == "retarget":
        assert workspace.run("quantize", *given, "-o", "qdq.onnx").code == 0
        given = ("qdq.onnx",)
    place = workspace.path / "out.onnx.data"
    if kind == "file":
        place.write_text("of another model")
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    monkeypatch.setattr(files, "INLINE_LIMIT", 0)
    says = "out.onnx.data is a directory" if kind == "directory" else "out.onnx.data exists"
    workspace.refused(OUTPUT, command, *given, "-o", "out.onnx", *force, says=says)


def test_weights_of_the_input_are_never_replaced_by_retarget(workspace: Workspace) -> None:
    import onnx

    assert workspace.run("quantize", *GOOD, "-o", "small.onnx").code == 0
    model = onnx.load(workspace.path / "small.onnx")
    data = "out.onnx.data"
    onnx.save(model, workspace.path / "qdq.onnx", save_as_external_data=True, location=data, size_threshold=0)
    shutil.copyfile(workspace.path / "qdq.onnx", workspace.path / "out.onnx")
    workspace.refused(OUTPUT, "retarget", "qdq.onnx", "-o", "out.onnx", "--force", says=f"{data} is the input {data}")


def test_a_bundle_does_not_go_into_the_data(workspace: Workspace) -> None:
    """A bundle in the data folder is refused, because its test vectors would be samples in the next run."""
    workspace.refused(
        OUTPUT, "package", *IMAGES, "-o", "images/bundle", says="images/bundle is in the data folder images"
    )
    assert workspace.run("package", *IMAGES, "-o", "images/bundle.edgeq").code == 0
    assert workspace.run("quantize", *IMAGES, "-o", "images/int8.onnx").code == 0
    assert workspace.run("quantize", *IMAGES, "-o", "images/again.onnx").code == 0


def test_a_folder_that_is_no_bundle_is_never_replaced(workspace: Workspace) -> None:
    says = "bad_images contains files and is not a bundle"
    workspace.refused(OUTPUT, "package", *GOOD, "-o", "bad_images", "--force", says=says)
    workspace.refused(OUTPUT, "demo", "-o", "bad_images", "--force", says=says)
    assert workspace.run("package", *GOOD, "-o", "empty", "--force").code == 0


def test_a_missing_folder_is_made_and_goes_again_on_failure(workspace: Workspace) -> None:
    assert workspace.run("quantize", *GOOD, "-o", "new/deep/int8").code == 0
    assert (workspace.path / "new" / "deep" / "int8").is_file()
    workspace.refused(
        DataError.exit_code, "quantize", "net.onnx", "--data", "nan.npz", "-o", "newer/int8.onnx", says="NaN"
    )


def test_paths_are_relative_to_the_working_directory(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = workspace.path / "else where"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    ran = workspace.run("quantize", "../net.onnx", "--data", "../x.npz", "--no-timing", "-o", "int8.onnx")
    assert ran.code == 0, ran.err
    assert set(ran.after) - set(ran.before) == {"else where/int8.onnx"}


needs_permissions = pytest.mark.skipif(
    os.name != "posix" or process.without_root_powers() is None, reason="file permissions cannot be enforced here"
)


@pytest.fixture
def closed(workspace: Workspace) -> Iterator[Path]:
    """Make a folder that nobody may enter."""
    folder = workspace.path / "closed"
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


# Runs all commands in one process: a command is quick, but its imports are slow.
COMMANDS = """
import contextlib, io, json, sys
from edgeq.cli import group

ends = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            group.main(words, prog_name="edgeq")
        except SystemExit as end:
            ends.append((end.code, out.getvalue(), err.getvalue()))
print(json.dumps(ends))
"""


@needs_permissions
def test_permissions(workspace: Workspace, closed: Path) -> None:
    prefix = process.without_root_powers()
    assert prefix is not None
    for name in ("locked.onnx", "locked.npz"):
        shutil.copy(workspace.path / ("net.onnx" if name.endswith("onnx") else "x.npz"), workspace.path / name)
        (workspace.path / name).chmod(0)
    (workspace.path / "read_only").mkdir(mode=0o500)
    cases: list[tuple[int, str, tuple[str, ...]]] = [
        (ModelError.exit_code, "locked.onnx cannot be read: Permission denied", ("locked.onnx", "--data", "x.npz")),
        (DataError.exit_code, "locked.npz cannot be read: Permission denied", ("net.onnx", "--data", "locked.npz")),
        (DataError.exit_code, "closed cannot be read: Permission denied", ("net.onnx", "--data", "closed")),
        (OUTPUT, "read_only is not writable", (*GOOD, "-o", "read_only/int8.onnx")),
        (OUTPUT, "closed/int8.onnx cannot be written: Permission denied", (*GOOD, "-o", "closed/int8.onnx")),
    ]
    output = ("-o", "int8.onnx")
    lines = [("quantize", *words, *(() if "-o" in words else output)) for _, _, words in cases]
    ran = subprocess.run(
        [*prefix, sys.executable, "-P", "-c", COMMANDS],
        cwd=workspace.path,
        env=process.environment(),
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    for (code, says, words), (ended, out, err) in zip(cases, json.loads(ran.stdout), strict=True):
        assert (ended, out) == (code, ""), (words, err)
        assert err.splitlines()[-1].startswith("edgeq: ")
        assert says in err.splitlines()[-1]
        assert "Traceback" not in err
    assert not (workspace.path / "int8.onnx").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(workspace: Workspace, small_disk: Path) -> None:
    for name in ("bundle", "bundle.edgeq"):
        says = f"no space left while writing {small_disk / name}. Free some space"
        workspace.refused(OUTPUT, "package", *GOOD, "-o", small_disk / name, says=says)
        assert list(small_disk.iterdir()) == []
    old = small_disk / "int8.onnx"
    old.write_bytes(b"mine" * 16_384)
    says = f"no space left while writing {old}"
    workspace.refused(OUTPUT, "quantize", *GOOD, "-o", old, "--force", says=says)
    assert contents(small_disk).keys() == {"int8.onnx"}
    assert old.read_bytes() == b"mine" * 16_384


def test_a_full_disk_for_work_files(workspace: Workspace, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    (small_disk / "filling").write_bytes(b"0" * 65_536)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    says = (
        f"no space left in {small_disk} for the work files of int8.onnx. Free some space and run again, or set TMPDIR"
    )
    workspace.refused(OUTPUT, "quantize", *GOOD, "-o", "int8.onnx", says=says)
    assert contents(small_disk).keys() == {"filling"}


def test_a_read_only_file_system(workspace: Workspace, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    workspace.refused(OUTPUT, "quantize", *GOOD, "-o", small_disk / "int8.onnx", says="is not writable")
