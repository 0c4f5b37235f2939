"""Test text files and paths as inputs of a user's own preprocessing."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.data.labels import Paths, open_text
from edgeq.errors import DataError


def test_rows_and_lines(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('"a, b",c,2.5\n\nd,e,3\n')
    text = open_text(tmp_path / "x.csv", "", "2")
    assert [(r.raw[""], r.label) for r in text.read_records(range(2))] == [
        (["a, b", "c", "2.5"], 2.5),
        (["d", "e", "3"], 3),
    ]
    (tmp_path / "X.TSV").write_text("a\tb\n")
    assert next(iter(open_text(tmp_path / "X.TSV", "", None).read_records(range(1)))).raw[""] == ["a", "b"]
    (tmp_path / "X.TXT").write_text("a,b\n")
    assert next(iter(open_text(tmp_path / "X.TXT", "", None).read_records(range(1)))).raw[""] == "a,b"
    (tmp_path / "x.txt").write_text("one line\nanother\n")
    lines = open_text(tmp_path / "x.txt", "ids", None)
    assert [r.raw["ids"] for r in lines.read_records(range(1, 2))] == ["another"]


def test_only_line_breaks_part_lines_and_quoted_cells_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\u2028b\x0cc\r\nd\x85e\n", newline="")
    lines = open_text(tmp_path / "x.txt", "", None)
    assert [r.raw[""] for r in lines.read_records(range(len(lines)))] == ["a\u2028b\x0cc", "d\x85e"]
    (tmp_path / "x.csv").write_text('"a\n\nb",1\nc\u2028d,2\n')
    rows = open_text(tmp_path / "x.csv", "", "1")
    assert [(r.raw[""][0], r.label) for r in rows.read_records(range(len(rows)))] == [("a\n\nb", 1), ("c\u2028d", 2)]


def test_the_header_above_the_labels_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,Label\na,1\n")
    for column in ("1", "-1"):
        rows = open_text(tmp_path / "x.csv", "", column)
        assert [(r.raw[""], r.label) for r in rows.read_records(range(len(rows)))] == [(["a", "1"], 1)]
    assert len(open_text(tmp_path / "x.csv", "", "0")) == 2


@pytest.mark.parametrize(
    ("content", "label", "says"),
    [
        ('a,1\n"b,2\n', None, "x.csv cannot be read"),
        ("a,b", "5", "no column 5"),
        ("a,b", "Y", "names no column"),
        ("\n\n", None, "is empty"),
    ],
)
def test_refuses_unreadable_tables(tmp_path: Path, content: str, label: str | None, says: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(DataError, match=says):
        list(open_text(tmp_path / "x.csv", "", label).read_records(range(1)))


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        open_text(tmp_path / "x.csv", "", None)


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    record = next(iter(Paths(tmp_path, (tmp_path / "a",), "x").read_records(range(1))))
    assert record.raw["x"] == tmp_path / "a"
    assert record.context == {"file": "a", "path": "a"}
