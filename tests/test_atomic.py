from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edgeq import atomic
from edgeq.atomic import check_free, output_directory, output_file
from edgeq.errors import OutputError


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
    assert "--force" in caught.value.fix
    with output_file(target, force=True) as draft:
        draft.write_text("new")
    assert contents(tmp_path) == {"model.onnx": "new"}


def test_an_existing_sibling_needs_force_and_nothing_moves_before_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data.2").write_text("of another model")

    def write() -> None:
        with output_file(tmp_path / "model.onnx") as draft:
            draft.write_text("graph")
            for part in ("1", "2"):
                (draft.parent / f"model.onnx.data.{part}").write_text("weights")

    with pytest.raises(OutputError, match=r"model\.onnx\.data\.2 exists already"):
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
    with output_directory(target, force=True) as draft:
        (draft / "manifest.json").write_text("new")
        assert contents(target) == {"stale": "old"}
    assert contents(tmp_path) == {"bundle/manifest.json": "new"}


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "kept").write_text("old")

    def failing() -> None:
        with output_directory(target, force=True) as draft:
            (draft / "manifest.json").write_text("half")
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        failing()
    assert contents(tmp_path) == {"bundle/kept": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_the_old_directory_comes_back_when_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "kept").write_text("old")
    real = os.replace

    def refuse_the_draft(source: Path, destination: Path) -> None:
        if Path(source).name == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, destination)

    monkeypatch.setattr(atomic.os, "replace", refuse_the_draft)
    with pytest.raises(OutputError, match="no space left"), output_directory(target, force=True):
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
def test_what_the_disk_refuses_is_an_output_error(tmp_path: Path, number: int, words: str) -> None:
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
    monkeypatch.setattr(atomic.os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="not writable"):
        check_free(tmp_path / "model.onnx", force=False)
