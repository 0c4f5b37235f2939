from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.system import renaming

from edgeq.errors import ModelError, OutputError
from edgeq.model.parsing import parse_model
from edgeq.util import outputs, placement
from edgeq.util.outputs import check_apart, check_free, output_directory, output_file
from edgeq.util.placement import alone_in
from tests.crashes import killed_before


def anything(folder: Path) -> None:
    """Allow every directory to be replaced."""


@pytest.fixture(params=["", "no exchange", "no flags"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set which renames the system has: all of this one's (""), all but exchanges, or only plain ones ("no flags")."""
    real = renaming._try_rename

    def lacking(source: Path, place: Path, how: str) -> bool:
        return request.param == "no exchange" and how == "free" and real(source, place, how)

    if request.param:
        monkeypatch.setattr(renaming, "_try_rename", lacking)
    return str(request.param)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_file_appears_whole_and_its_parents_with_it(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "model.onnx"
    with output_file(target) as draft:
        draft.write_text("new")
        assert not target.exists()
    assert contents(tmp_path) == {"a/b/model.onnx": "new"}


def test_siblings_move_along(tmp_path: Path) -> None:
    with output_file(tmp_path / "model.onnx") as draft:
        draft.write_text("graph")
        (draft.parent / "model.onnx.data").write_text("weights")
    assert contents(tmp_path) == {"model.onnx": "graph", "model.onnx.data": "weights"}


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("old")

    def interrupted() -> None:
        with output_file(target, force=True) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert contents(tmp_path) == {"model.onnx": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("old")
    with pytest.raises(OutputError, match="exists already") as caught, output_file(target):
        pytest.fail("the writer must not run")
    assert "⟨force=True⟩" in caught.value.fix
    with output_file(target, force=True) as draft:
        draft.write_text("new")
    assert contents(tmp_path) == {"model.onnx": "new"}


def test_errors_about_other_files_do_not_name_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing file of weights is not reported as an existing output: onnx raises this error without a file name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match=r"exists in w\.data"), output_file(Path("m.onnx")):
        raise FileExistsError("External data file exists in w.data.")


def test_an_existing_sibling_needs_force_and_nothing_moves_before_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data.2").write_text("of another model")

    def write() -> None:
        with output_file(tmp_path / "model.onnx") as draft:
            draft.write_text("graph")
            for part in ("1", "2"):
                (draft.parent / f"model.onnx.data.{part}").write_text("weights")

    with pytest.raises(OutputError, match=r"model\.onnx\.data\.2 exists and does not belong to model\.onnx"):
        write()
    assert contents(tmp_path) == {"model.onnx.data.2": "of another model"}


def test_a_directory_in_the_place_of_a_file_is_refused_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="is a directory"), output_file(tmp_path / "out", force=True):
        pytest.fail("the writer must not run")


def test_a_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "stale").write_text("old")
    with output_directory(target, force=True, check=anything) as draft:
        (draft / "manifest.json").write_text("new")
        assert contents(target) == {"stale": "old"}
    assert contents(tmp_path) == {"bundle/manifest.json": "new"}


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "kept").write_text("old")

    def failing() -> None:
        with output_directory(target, force=True, check=anything) as draft:
            (draft / "manifest.json").write_text("half")
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        failing()
    assert contents(tmp_path) == {"bundle/kept": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def moved(raises: Callable[[Path, Path], BaseException | None], *, after: bool) -> Callable[[Path, Path], None]:
    """Return a `move_new` that raises the error of `raises` for a source and a place, before or after the move."""
    real = renaming.move_new

    def move(source: Path, place: Path) -> None:
        error = raises(source, place)
        if error is None or after:
            real(source, place)
        if error is not None:
            raise error

    return move


def test_the_old_directory_comes_back_when_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "kept").write_text("old")

    def refuse_the_draft(source: Path, place: Path) -> OSError | None:
        full = OSError(errno.ENOSPC, "No space left on device")
        return full if source.parent.name == placement.NEW and place == target else None

    monkeypatch.setattr(outputs, "exchange", lambda one, other: False)
    monkeypatch.setattr(placement, "move_new", moved(refuse_the_draft, after=False))
    with pytest.raises(OutputError, match="no space left"), output_directory(target, force=True, check=anything):
        pass
    assert contents(tmp_path) == {"bundle/kept": "old"}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EACCES, "cannot be written"),
        (errno.EROFS, "cannot be written"),
    ],
)
def test_errors_of_the_disk_are_output_errors(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(OutputError, match=words) as caught, output_file(tmp_path / "model.onnx"):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path / "model.onnx") in caught.value.problem
    assert list(tmp_path.iterdir()) == []


def test_another_os_error_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="loop"), output_file(tmp_path / "model.onnx"):
        raise OSError(errno.ELOOP, "loop")


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="not a directory"):
        check_free(tmp_path / "file" / "model.onnx", force=False)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_parent_is_refused_early(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(OutputError, match="not writable"):
        check_free(closed / "model.onnx", force=False)


def test_an_unwritable_parent_is_refused_early_whoever_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="not writable"):
        check_free(tmp_path / "model.onnx", force=False)


@pytest.mark.parametrize("name", ["-", ".", ""])
def test_standard_output_and_the_working_directory_are_no_outputs(name: str) -> None:
    with pytest.raises(OutputError, match="is not an output"):
        check_free(Path(name), force=True)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not UTF-8"):
        check_free(tmp_path / os.fsdecode(b"m\xff.onnx"), force=True)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: File name too long"):
        check_free(tmp_path / ("m" * 300), force=False)


def test_a_file_in_the_place_of_a_directory_is_refused_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="is a file"), output_directory(tmp_path / "out", force=True):
        pytest.fail("the writer must not run")
    assert contents(tmp_path) == {"out": "mine"}


def test_parents_of_an_output_that_did_not_come_go_again(tmp_path: Path) -> None:
    def failing() -> None:
        with output_file(tmp_path / "a" / "b" / "model.onnx"):
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        failing()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_between_siblings_and_file_the_old_ones_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.onnx").write_text("old, with model.onnx.data")
    (tmp_path / "model.onnx.data").write_text("old")

    def interrupt_the_file(source: Path, place: Path) -> KeyboardInterrupt | None:
        return KeyboardInterrupt() if (source.parent.name, place.name) == (placement.NEW, "model.onnx") else None

    monkeypatch.setattr(placement, "move_new", moved(interrupt_the_file, after=False))

    def write() -> None:
        with output_file(tmp_path / "model.onnx", force=True) as draft:
            draft.write_text("graph")
            for part in ("data", "more"):
                (draft.parent / f"model.onnx.{part}").write_text("weights")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert contents(tmp_path) == {"model.onnx": "old, with model.onnx.data", "model.onnx.data": "old"}
    assert len(list(tmp_path.iterdir())) == 2


def test_interrupted_between_the_old_directory_and_the_new_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "kept").write_text("old")

    def interrupt_after(source: Path, place: Path) -> KeyboardInterrupt | None:
        return KeyboardInterrupt() if source == target else None

    monkeypatch.setattr(outputs, "exchange", lambda one, other: False)
    monkeypatch.setattr(placement, "move_new", moved(interrupt_after, after=True))

    def write() -> None:
        with output_directory(target, force=True, check=anything):
            pass

    with pytest.raises(KeyboardInterrupt):
        write()
    assert contents(tmp_path) == {"bundle/kept": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_ctrl_c_while_cleaning_up_does_not_stop_the_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = outputs.shutil.rmtree, []

    def interrupted_once(path: Path, ignore_errors: bool) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(outputs.shutil, "rmtree", interrupted_once)

    def write() -> None:
        with output_file(tmp_path / "model.onnx") as draft:
            draft.write_text("new")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert contents(tmp_path) == {"model.onnx": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_an_error_about_an_input_is_not_attributed_to_the_output(tmp_path: Path) -> None:
    def read() -> None:
        with output_file(tmp_path / "out" / "model.onnx"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "data" / "a.png"))

    with pytest.raises(PermissionError):
        read()


def test_the_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(outputs.tempfile, "gettempdir", lambda: str(work))

    def write(full: Path) -> str:
        def usage(place: Path) -> object:
            return type("Usage", (), {"free": 0 if Path(place) == full else 1 << 30})

        monkeypatch.setattr(outputs.shutil, "disk_usage", usage)
        with pytest.raises(OutputError) as caught, output_file(tmp_path / "model.onnx"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return str(caught.value)

    assert write(tmp_path).startswith(f"no space left while writing {tmp_path / 'model.onnx'}. Free some space")
    assert write(work).startswith(f"no space left in {work} for the work files of {tmp_path / 'model.onnx'}. Free")


def test_an_output_that_is_an_input_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    model = data / "model.onnx"
    model.write_text("graph")
    (tmp_path / "link.onnx").symlink_to(model)
    for output in (model, data / ".." / "data" / "model.onnx", tmp_path / "link.onnx"):
        with pytest.raises(OutputError, match="is the input"):
            check_apart(output, [model])
    with pytest.raises(OutputError, match="contains the input"):
        check_apart(data, [tmp_path / "absent", model])
    check_apart(data / "int8.onnx", [model, data])


def test_a_directory_is_replaced_only_where_the_check_lets_it(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with output_directory(target, force=True) as draft:
        (draft / "new").write_text("new")
    with pytest.raises(OutputError, match="contains files"), output_directory(target, force=True):
        pytest.fail("the writer must not run")
    assert contents(tmp_path) == {"out/new": "new"}


@pytest.mark.parametrize("after", [False, True], ids=["while it is written", "at the move"])
@pytest.mark.usefixtures("system")
def test_keeps_files_that_appear_in_the_directory_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "ours").write_text("old")

    def check(folder: Path) -> None:
        if (folder / "notes.txt").exists():
            raise OutputError(f"{folder} holds notes.txt")

    exchange = renaming.exchange

    def late(one: Path, other: Path) -> bool:
        if not (target / "notes.txt").exists() and (one / "ours").read_text() == "new":
            (target / "notes.txt").write_text("mine")
        return exchange(one, other)

    def write() -> None:
        with output_directory(target, force=True, check=check) as draft:
            (draft / "ours").write_text("new")
            if after:
                monkeypatch.setattr(outputs, "exchange", late)
            else:
                (target / "notes.txt").write_text("mine")

    with pytest.raises(OutputError) as caught:
        write()
    assert caught.value.problem == f"{target} holds notes.txt"
    assert contents(tmp_path) == {"out/ours": "old", "out/notes.txt": "mine"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_outputs_that_appear_meanwhile_are_kept_without_force(tmp_path: Path) -> None:
    def write_file() -> None:
        with output_file(tmp_path / "model.onnx") as draft:
            draft.write_text("new")
            (tmp_path / "model.onnx").write_text("mine")

    def write_directory() -> None:
        with output_directory(tmp_path / "out") as draft:
            (draft / "new").write_text("new")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "notes.txt").write_text("mine")

    for write in (write_file, write_directory):
        with pytest.raises(OutputError, match="exists already"):
            write()
    assert contents(tmp_path) == {"model.onnx": "mine", "out/notes.txt": "mine"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_that_leads_nowhere_exists(tmp_path: Path) -> None:
    link = tmp_path / "model.onnx"
    link.symlink_to(tmp_path / "absent")
    with pytest.raises(OutputError, match="exists already"), output_file(link):
        pytest.fail("the writer must not run")
    assert link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("linked", [False, True])
def test_refuses_to_replace_pipes(tmp_path: Path, linked: bool) -> None:
    pipe, output = tmp_path / "pipe", tmp_path / ("link" if linked else "pipe")
    os.mkfifo(pipe)
    if linked:
        output.symlink_to(pipe)
    for force in (False, True):
        problem = pytest.raises(OutputError, match=r"is a device, a pipe or a socket\. Name a file")
        with problem, output_file(output, force=force):
            pytest.fail("the writer must not run")
    assert pipe.is_fifo()
    assert output.is_symlink() == linked


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_place_that_takes_no_new_names_is_one_line() -> None:
    place = Path("/proc/int8.onnx")
    with pytest.raises(OutputError, match=r"/proc.* (cannot be written: |is not writable)"), output_file(place):
        pytest.fail("the writer must not run")


def test_a_sibling_of_something_else_is_kept_with_force_too(tmp_path: Path) -> None:
    def write(**options: Any) -> None:
        with output_file(tmp_path / "model.onnx", force=True, **options) as draft:
            draft.write_text("model.onnx.data")
            (draft.parent / "model.onnx.data").write_text("weights")

    (tmp_path / "model.onnx").write_text("needs nothing")
    (tmp_path / "model.onnx.data").write_text("mine")
    with pytest.raises(OutputError, match=r"model\.onnx\.data exists and does not belong to model\.onnx"):
        write()
    (tmp_path / "model.onnx").unlink()
    with pytest.raises(OutputError, match="does not belong to"):
        write()
    assert contents(tmp_path) == {"model.onnx.data": "mine"}
    write(ours=lambda place: place.name == "model.onnx.data")
    (tmp_path / "model.onnx.data").write_text("old weights")
    write()
    assert contents(tmp_path) == {"model.onnx": "model.onnx.data", "model.onnx.data": "weights"}


# Concurrent writers and kills.


def write_file(target: Path, text: str, *, force: bool = False) -> None:
    with output_file(target, force=force) as draft:
        draft.write_text(text)


def write_pair(target: Path, text: str, *, force: bool = False) -> None:
    """Write a model that names its data. Both files contain `text`."""
    with output_file(target, force=force) as draft:
        draft.write_text(f"{text} of {target.name}.data")
        draft.with_name(f"{draft.name}.data").write_text(text)


def write_directory(target: Path, text: str, *, force: bool = False) -> None:
    with output_directory(target, force=force, check=anything) as draft:
        for name in ("one", "two"):
            (draft / name).write_text(text)


WRITERS = [write_file, write_pair, write_directory]


def held(target: Path) -> str:
    """Return the text of a complete output, "" if there is no output, or a description of an incomplete one."""
    if target.is_dir():
        found = contents(target)
        return found["one"] if set(found) == {"one", "two"} and len(set(found.values())) == 1 else f"half: {found}"
    if not target.exists():
        return ""
    text = target.read_text()
    if " of " not in text:
        return text
    data = target.with_name(f"{target.name}.data")
    return data.read_text() if data.exists() and text.startswith(data.read_text()) else f"half: {text}"


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@FORKS
@pytest.mark.parametrize("old", ["", "old"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_kill_before_any_change_loses_nothing(write: Any, old: str, tmp_path: Path, system: str) -> None:
    """After a kill at any moment, the whole old or the whole new output is there.

    If the system cannot exchange names, both may be missing for a moment. The next run repairs that before it does
    anything else.
    """
    for number in range(1, 100):
        target = tmp_path / str(number) / "out"
        target.parent.mkdir()
        if old:
            write(target, old)
        killed = killed_before(lambda: write(target, "new", force=bool(old)), target.parent, number)  # noqa: B023
        left = held(target)
        may_miss = old and (write is write_pair or (write is write_directory and system))
        assert left in ((old, "new", "") if may_miss else (old, "new")), number
        check_free(target, force=True)
        assert held(target) in (old, "new"), number
        write(target, "last", force=True)
        assert held(target) == "last", number
        assert list(target.parent.glob(".*")) == [], number
        if not killed:
            assert left == "new"
            return


@FORKS
@pytest.mark.parametrize("old", ["", "old"])
def test_a_kill_while_a_mount_point_is_filled_loses_nothing(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill loses nothing, although a mount point's files cannot be replaced in one step.

    The file that marks the folder as complete is written last.
    """
    monkeypatch.setattr(outputs, "_is_mount", Path.is_dir)
    monkeypatch.setattr(outputs, "_LAST", ("two",))
    for number in range(1, 100):
        target = tmp_path / str(number) / "out"
        target.mkdir(parents=True)
        if old:
            write_directory(target, old)
            (target / "gone").write_text(old)
        killed = killed_before(lambda: write_directory(target, "new", force=bool(old)), target.parent, number)  # noqa: B023
        left = {name: text for name, text in contents(target).items() if not name.startswith(".")}
        assert "two" not in left or left["one"] == left["two"], number
        assert ("gone" in left) <= (left.get("two", "old") == "old"), number
        check_free(target, force=True)
        found = contents(target)
        whole = ({"one": "new", "two": "new"}, dict.fromkeys(("one", "two", "gone"), "old"), *([] if old else [{}]))
        assert found in whole, number
        write_directory(target, "last", force=True)
        assert contents(target) == {"one": "last", "two": "last"}, number
        assert list(target.parent.glob(".*")) == [], number
        if not killed:
            assert left == {"one": "new", "two": "new"}
            return


MOUNTS = """
set -e
mkdir {0}/tmpfs {0}/again {0}/bound {0}/layers
mount -t tmpfs none {0}/tmpfs
mount --bind {0}/again {0}/bound
mount -t tmpfs none {0}/layers
mkdir -p {0}/layers/lower/out {0}/layers/upper {0}/layers/work {0}/layers/merged
touch {0}/layers/lower/out/old
mount -t overlay none -o lowerdir={0}/layers/lower,upperdir={0}/layers/upper,workdir={0}/layers/work {0}/layers/merged
touch {0}/file {0}/mounted
mount --bind {0}/file {0}/mounted
shift
exec "$@"
"""


def test_mount_points_and_layers(tmp_path: Path) -> None:
    """Outputs can be folders that cannot be renamed, as in containers."""
    mount = ["unshare", "-m", "bash", "-c", MOUNTS.format(tmp_path), "bash", ""]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    for made in tmp_path.iterdir():
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    script = """
import sys
from pathlib import Path
from edgeq.errors import OutputError
from tests.util.test_atomic import contents, output_file, write_directory
place = Path(sys.argv[1])
for folder in (place / "tmpfs", place / "bound"):
    write_directory(folder, "new")
    (folder / "old").write_text("")
    try:
        write_directory(folder, "newer")
    except OutputError as error:
        assert "exists already" in str(error)
    write_directory(folder, "newest", force=True)
    assert contents(folder) == {"one": "newest", "two": "newest"}, contents(folder)
layered = place / "layers" / "merged" / "out"
write_directory(layered, "new", force=True)
assert contents(layered) == {"one": "new", "two": "new"}
try:
    with output_file(place / "mounted", force=True) as draft:
        draft.write_text("new")
except OutputError as error:
    assert "is a mount point" in str(error)
print("done")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*mount, sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, env=env
    )
    assert done.stdout == "done\n", done.stderr


@FORKS
def test_recovery_keeps_files_in_its_way(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for number in range(1, 100):
        write_pair(target, "old", force=True)
        assert killed_before(lambda: write_pair(target, "new", force=True), tmp_path, number)
        if not target.exists():
            break
    with pytest.raises(ModelError, match="out is not there now"):
        parse_model(target)
    target.write_text("mine")
    with pytest.raises(
        OutputError, match=r"out is in the way: an interrupted run must put a file back there from .*old"
    ):
        check_free(target, force=True)
    assert target.read_text() == "mine"
    target.unlink()
    check_free(target, force=True)
    assert held(target) == "old"
    assert list(tmp_path.glob(".*/placing.json")) == []


@FORKS
@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("write", WRITERS)
def test_one_of_several_writers_succeeds(write: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    start, go = os.pipe()
    children = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            os.close(go)
            try:
                os.read(start, 1)  # returns when the parent closes its end
                write(target, str(number))
            except OutputError as error:
                os._exit(6 if "exists already" in error.problem else 1)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(start)
    os.close(go)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0, 6, 6, 6, 6, 6]
    assert held(target) == str(codes.index(0))


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("write", WRITERS)
def test_keeps_files_that_appear_after_the_last_check(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another program writes after the last check is kept: that program may ignore the lock."""
    target, checked = tmp_path / "out", outputs._check_free

    def late(path: Path, *, force: bool, kind: Any) -> None:
        checked(path, force=force, kind=kind)
        if path == target and any(tmp_path.glob(".out.*/new/*")):
            target.write_text("mine")

    monkeypatch.setattr(outputs, "_check_free", late)
    with pytest.raises(OutputError, match="out exists already"):
        write(target, "new")
    assert target.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_in_use(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(OutputError, match="busy here"), alone_in(tmp_path, busy="busy here"):
            pytest.fail("two are in it")
        with alone_in(tmp_path / "absent", busy="busy here"):
            pass
    with alone_in(tmp_path, busy="busy here"):
        pass
