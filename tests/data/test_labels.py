"""Test labels from names, files and Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.data.labels import load_labels_from
from edgeq.data.records import Record
from edgeq.data.sample import plain_label
from edgeq.errors import DataError

CAT = Record("/data/pets/cat_01.jpg", {}, 5, {"file": "cat_01.jpg", "path": "pets/cat_01.jpg"})


def label(labels: Any, record: Record = CAT, index: int = 0, count: int = 1, folder: Path | None = None) -> Any:
    return load_labels_from(labels, folder, count)(index, record)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ("7", 7),
        (" 007 ", 7),
        ("-1", -1),
        ("2.5", 2.5),
        ("1.5e3", 1500.0),
        ("cat", "cat"),
        ("1e5", "1e5"),
        (np.uint8(3), 3),
    ],
)
def test_plain_labels(value: Any, plain: Any) -> None:
    assert plain_label(value) == plain
    assert type(plain_label(value)) is type(plain)


def test_folder_and_none() -> None:
    assert label("none") is None
    assert label("folder", Record("a/b.png", {}, 3, {"class": "a"})) == 3
    with pytest.raises(DataError, match="in no class folder"):
        label("folder")


@pytest.mark.parametrize(
    ("pattern", "file", "expected"),
    [
        ("name:{label}_*", "0042_n015_tench.jpg", 42),
        ("name:*_{label}", "img_7.png", 7),
        ("name:{label}_*", "dog_1_2.jpg", "dog"),
        ("name:a.{label}.*", "a.b.c.jpg", "b"),
    ],
)
def test_patterns(pattern: str, file: str, expected: Any) -> None:
    assert label(pattern, Record(file, {}, None, {"file": file})) == expected


@given(st.text("ab*", max_size=5), st.text("ab*", max_size=5), st.text("ab", max_size=9))
def test_patterns_are_the_regular_expressions_of_lazy_matches(before: str, after: str, name: str) -> None:
    lazy = (part.replace("*", ".*?") for part in (before, after))
    match = re.fullmatch("(.+?)".join(lazy), name)
    record = Record(name, {}, None, {"file": name})
    if match is None:
        with pytest.raises(DataError, match="does not match"):
            label(f"name:{before}{{label}}{after}", record)
    else:
        assert label(f"name:{before}{{label}}{after}", record) == match[1]


def test_a_pattern_does_not_backtrack() -> None:
    name = "a" * 250
    with pytest.raises(DataError, match="does not match"):
        label("name:" + "*a" * 90 + "{label}b", Record(name, {}, None, {"file": name}))


@pytest.mark.parametrize("pattern", ["name:{label}{label}", "name:*", "name:" + "*" * 300 + "{label}"])
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(DataError, match=r"Write \{label\} once"):
        label(pattern)


def test_a_name_that_does_not_match_is_named() -> None:
    with pytest.raises(DataError, match=r"cat_01.jpg does not match"):
        label("name:x{label}_*")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("l.csv", "name,label\ncat_01.jpg,3\n"),
        ("l.csv", '"pets/cat_01.jpg",3\n\n'),
        ("l.csv", "cat_01,3"),
        ("l.txt", "cat_01.jpg 3\nother.jpg 4\n"),
        ("l.txt", "cat_01.jpg,3\nother cat.jpg, 4\n"),
        ("l.txt", "name,label\ncat_01.jpg,3\n"),
        ("l.txt", "cat_01.jpg 3\nother,cat.jpg 4\n"),
        ("l.csv", "cat_01.jpg 3\nother.jpg 4\n"),
        ("l.csv", "name label\ncat_01.jpg 3\n"),
        ("L.CSV", "cat_01,3"),
        ("L.TSV", "cat_01\t3"),
        ("L.JSON", json.dumps({"cat_01.jpg": 3})),
        ("l.csv", "name,label,score\ncat_01.jpg,3,0.9\n"),
        ("l.csv", "name,split,label\ncat_01.jpg,7,3\n"),
        ("l.csv", "label,file_name\n3,cat_01.jpg\n"),
        ("l.csv", ",image,class\n0,cat_01.jpg,3\n"),
        ("l.csv", "cat_01.jpg,3,\ncat_01.jpg,3,\n"),
        ("l.tsv", "file\tlabel\ncat_01.jpg\t3\n"),
        ("l.json", json.dumps({"cat_01.jpg": 3})),
        ("l.json", json.dumps([{"name": "cat_01.jpg", "label": "3"}])),
        ("l.json", json.dumps([{"file": "pets/cat_01.jpg", "label": 3}])),
    ],
)
def test_files(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert label(tmp_path / name) == 3
    assert label(name, folder=tmp_path) == 3


@pytest.mark.parametrize(("name", "content"), [("l.txt", "3\n4\n"), ("l.csv", "label\n3\n4"), ("l.tsv", "3\n\n4\n")])
def test_numbers_alone_go_by_position(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert [label(tmp_path / name, index=index, count=2) for index in range(2)] == [3, 4]
    with pytest.raises(DataError, match="2 labels for 3 samples"):
        load_labels_from(tmp_path / name, None, 3)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("l.csv", "dog.jpg,3", "no label for pets/cat_01.jpg"),
        ("l.csv", "cat_01.jpg", "row 1 has no label"),
        ("l.csv", "a.jpg,3\ncat_01.jpg,7,3", "row 2 has 3 cells. Keep name,label, or call the column 'label' on top"),
        ("l.csv", "cat_01.jpg,3\ncat_01.jpg,4", "'cat_01.jpg' has two labels, 3 and 4"),
        ("l.json", '{"cat_01.jpg": 3, "cat_01.jpg": 4}', "'cat_01.jpg' has two labels, 3 and 4"),
        (
            "l.json",
            '[{"name": "cat_01", "label": 3}, {"name": "cat_01", "label": 4}]',
            "'cat_01' has two labels, 3 and 4",
        ),
        ("l.json", "{", "is not JSON"),
        ("l.json", "3", "another form"),
        ("l.json", '[{"label": 3}]', "another form"),
        ("l.json", '{"images": [], "annotations": []}', "COCO annotations"),
        ("l.xml", "<a/>", "no known kind"),
        ("l.npy", "text", "cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=says) as caught:
        label(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_by_position(tmp_path: Path) -> None:
    assert label([4, 5], index=1, count=2) == 5
    assert label(np.array([4, 5], np.uint8), index=1, count=2) == 5
    np.save(tmp_path / "y.npy", np.array([8, 9]))
    assert label(tmp_path / "y.npy", index=1, count=2) == 9
    with pytest.raises(DataError, match="2 labels for 3 samples"):
        label([4, 5], count=3)


def test_mappings() -> None:
    assert label({"cat_01": "tabby"}) == "tabby"


def test_missing_file() -> None:
    with pytest.raises(DataError, match="does not exist"):
        label("nothing.csv")


@pytest.mark.parametrize("path", ["../secret.csv", "/etc/hostname", "sub/../../secret.csv"])
def test_a_sidecar_cannot_point_outside(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.csv").write_text("cat_01,3")
    with pytest.raises(DataError, match="outside the data folder"):
        load_labels_from(path, folder, 1, inside=True)
    (folder / "l.csv").write_text("cat_01,3")
    inside = load_labels_from("l.csv", folder, 1, inside=True)
    assert inside is not None
    assert inside(0, CAT) == 3


def test_a_file_name_that_several_files_have_needs_their_paths() -> None:
    labels = load_labels_from({"a.jpg": 1, "two/b.jpg": 2}, None, 4)
    assert labels is not None
    records = [Record(path, {}, None, {"file": Path(path).name, "path": path}) for path in ("one/a.jpg", "two/a.jpg")]
    assert [labels(0, records[0]), labels(0, records[0])] == [1, 1]
    with pytest.raises(DataError, match=r"the label of 'a.jpg' can belong to one/a.jpg or to two/a.jpg"):
        labels(1, records[1])
    assert labels(2, Record("b", {}, None, {"file": "b.jpg", "path": "two/b.jpg"})) == 2
