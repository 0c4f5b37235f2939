from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edgeq.backends.systolic.emit_c.folder import C_FOLDER
from edgeq.bundle.write import BUNDLE
from edgeq.calibration.files import STATISTICS, save_statistics
from edgeq.calibration.statistics import Statistics
from edgeq.emulate.sysroot import SYSROOT
from edgeq.errors import OutputError
from edgeq.tuning.journal import Journal
from edgeq.tuning.run_folder import TUNING, claim_folder, clear
from edgeq.util import outputs
from edgeq.util.marker import MARKER, is_marker, read_marker, write_marker
from edgeq.util.ownership import Ownership, content, printable_path

KINDS = {"bundle": BUNDLE, "statistics": STATISTICS, "tuning": TUNING, "c": C_FOLDER, "sysroot": SYSROOT}
TWO = Ownership("pair", lambda folder: lambda name: name in ("a", "sub/b", "empty/"))


def fill(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "sub" / "b").write_text("b")


def statistics() -> Statistics:
    return Statistics("model", "data", 0, {})


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


class Notes:
    """Keep the notes of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "held",
    [
        {"notes.txt": "mine"},
        {"manifest.json": '{"name": "an app", "icons": [], "start_url": "."}'},
        {"manifest.json": "{}", "statistics.json": "{}", "statistics.npz": "", "lock.json": "{}"},
        {"manifest.json": "[" * 100_000},
        {".git/HEAD": "ref: refs/heads/main"},
        {MARKER: "{}"},
        {MARKER: '{"kind": "another", "schema": 1}', "statistics/photo.jpg": ""},
        {"journal.jsonl": "Dear diary"},
        {"statistics/statistics.json": '{"format": "of somebody"}'},
        {"folder/without/files/": ""},
    ],
    ids=["notes", "web app", "names alone", "deep", "repository", "marker", "other kind", "diary", "theirs", "empty"],
)
def test_never_removes_files_of_others(tmp_path: Path, kind: Ownership, held: dict[str, str]) -> None:
    place = tmp_path / "place"
    for name, text in held.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).mkdir(parents=True) if name.endswith("/") else (place / name).write_text(text)
    before = names(place)
    with pytest.raises(OutputError, match=r"contains .*(did not write|and is no)"):
        kind.check(place)
    kind.remove(place)
    assert names(place) == before


def test_nothing_and_an_empty_folder_are_fine(tmp_path: Path) -> None:
    TWO.check(tmp_path / "absent")
    (tmp_path / "new").mkdir()
    TWO.check(tmp_path / "new")


def test_the_first_foreign_file_is_named_on_one_line(tmp_path: Path) -> None:
    place = tmp_path / "place"
    fill(place)
    TWO.check(place)
    (place / "sub" / "two\nlines").write_text("")
    with pytest.raises(OutputError) as caught:
        TWO.check(place)
    assert caught.value.problem == f"{place} contains 'sub/two\\nlines', which edgeq did not write"
    assert printable_path(os.fsdecode(b"\xff")) == "'\\udcff'"


def test_links_are_foreign_and_not_followed(tmp_path: Path) -> None:
    place, mine = tmp_path / "place", tmp_path / "mine"
    fill(place)
    fill(mine)
    shutil.rmtree(place / "sub")
    (place / "sub").symlink_to(mine / "sub")
    with pytest.raises(OutputError, match="contains sub, which"):
        TWO.check(place)
    assert TWO.remove(place) == "sub"
    assert names(mine) == ["a", "sub", "sub/b"]
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(OutputError, match="link is a symbolic link"):
        TWO.check(tmp_path / "link")
    assert TWO.remove(tmp_path / "link") == "link"
    assert names(mine) == ["a", "sub", "sub/b"]


def test_the_working_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "place")
    for inside in ("place", "place/sub"):
        monkeypatch.chdir(tmp_path / inside)
        with pytest.raises(OutputError, match="contains the working directory"):
            TWO.check(tmp_path / "place")


def test_removal_leaves_what_is_foreign(tmp_path: Path) -> None:
    place = tmp_path / "place"
    fill(place)
    (place / "empty").mkdir()
    (place / "sub" / "mine").write_text("mine")
    assert TWO.remove(place) == "sub/mine"
    assert names(place) == ["sub", "sub/mine"]
    (place / "sub" / "mine").unlink()
    fill(tmp_path / "again")
    assert TWO.remove(tmp_path / "again") is None
    assert not (tmp_path / "again").exists()


def test_content_is_sorted_and_names_empty_folders(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "a0").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert list(content(tmp_path)) == [("a", True), ("pipe", False), ("a0/", True), ("sub/b", True)]
    assert list(content(tmp_path, ["sub"])) == [("a", True), ("pipe", False), ("a0/", True), ("sub/", True)]


def test_markers_are_of_one_kind(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("")  # as a kill leaves it
    write_marker(tmp_path, "one")
    write_marker(tmp_path, "two")
    assert read_marker(tmp_path, "one") is not None
    assert read_marker(tmp_path, "two") is None


def claim(folder: Path) -> None:
    with claim_folder(folder):
        assert is_marker(folder, "tuning")


def tuning(folder: Path, *, marked: bool = True) -> Journal:
    folder.mkdir()
    if marked:
        claim(folder)
    journal = Journal(folder / "journal.jsonl", {}, resume=False)
    journal.remember("k", lambda: 1)
    save_statistics(statistics(), folder / "statistics")
    return journal


@pytest.mark.parametrize("marked", [True, False], ids=["this version", "one without markers"])
def test_a_tuning_folder_is_used_and_removed(tmp_path: Path, marked: bool) -> None:
    folder = tmp_path / "t.tuning"
    tuning(folder, marked=marked)
    TUNING.check(folder)
    claim(folder)
    assert read_marker(folder, "tuning") is not None
    said = Notes()
    clear(folder, said)  # type: ignore[arg-type]
    assert not folder.exists()
    assert said.said == []


@pytest.mark.parametrize("name", ["notes.txt", "statistics/notes.txt", "old/journal.jsonl", ".hidden"])
def test_keeps_files_of_others_in_a_tuning_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "t.tuning"
    tuning(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    for _ in range(2):
        with pytest.raises(OutputError, match=f"contains {name}, which edgeq did not write"):
            claim(folder)
    said = Notes()
    clear(folder, said)  # type: ignore[arg-type]
    assert [p for p in names(folder) if (folder / p).is_file()] == [name]
    assert said.said == [f"{folder} stays: it contains {name}, which edgeq did not write"]


def test_replaces_the_rest_of_a_killed_tuning_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "t.tuning"
    tuning(folder)
    monkeypatch.setattr(outputs, "_remove", lambda folder, parents: None)
    save_statistics(statistics(), folder / "statistics", force=True)
    (folder / "journal.jsonl").write_text('{"format": "edgeq-tun')
    (folder / MARKER).write_text("")
    assert len([p for p in folder.iterdir() if p.name.endswith(".partial")]) == 1
    claim(folder)
    assert TUNING.remove(folder) is None
    assert not folder.exists()


def test_statistics_that_are_not_of_edgeq_s_form_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "cal"
    save_statistics(statistics(), place)
    save_statistics(statistics(), place, force=True)
    (place / "statistics.npz").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"contains statistics\.npz, which edgeq did not write"):
        save_statistics(statistics(), place, force=True)
    assert (place / "statistics.npz").read_bytes() == b"mine"
