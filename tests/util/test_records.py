"""Test records: how they are written and read, and the messages of errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest

from edgeq.calibration.files import load_statistics
from edgeq.calibration.table import read_table
from edgeq.data.arrays import read_tensor
from edgeq.data.limits import read_text
from edgeq.errors import DataError, EdgeqError, HardwareError
from edgeq.measure.coco import load_annotations
from edgeq.util.record_files import read_json, toml_table
from edgeq.util.records import NOT_WRITTEN, NullIsInfinite, computed, parse, plain, round_floats, salvage, write_as


@dataclass(frozen=True)
class Part:
    low: float
    high: float | None = None

    @computed
    def width(self) -> float | None:
        return None if self.high is None else self.high - self.low


@dataclass(frozen=True)
class Whole:
    name: str
    kind: Literal["one", "two"] = "one"
    count: int = 0
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, Part] = field(default_factory=dict)
    options: Mapping[str, int | float] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    path: Path | None = None
    first: Part | None = None


def test_a_record_is_read_back_as_it_was() -> None:
    whole = Whole(
        "a", "two", 3, (Part(1.0, 2.5),), {"x": Part(0.0)}, {"p": 99.5}, frozenset("ba"), Path("f"), Part(2.0)
    )
    found = plain(whole)
    assert found["tags"] == ["a", "b"]
    assert found["parts"] == [{"low": 1.0, "high": 2.5, "width": 1.5}]
    assert list(found)[:3] == ["name", "kind", "count"]
    assert parse(json.loads(json.dumps(found, allow_nan=False)), Whole, "w.json") == whole


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["large", "small"])
def test_a_number_that_no_float_holds_is_refused_with_its_place(value: int) -> None:
    @dataclass(frozen=True)
    class Ratio:
        db: NullIsInfinite
        low: float = 0.0

    assert parse({"db": None}, Ratio, "r.json") == Ratio(NullIsInfinite(math.inf))
    with pytest.raises(EdgeqError, match=r"r\.json: db is .*out of range"):
        parse({"db": value}, Ratio, "r.json")
    assert salvage({"db": 1, "low": value}, Ratio) == Ratio(NullIsInfinite(1.0))


def test_metadata_of_fields_shape_the_record() -> None:
    @dataclass(frozen=True)
    class Outer:
        part: Part
        hidden: object = field(default=None, metadata=NOT_WRITTEN)
        seconds: float = field(default=1.23456, metadata=write_as(digits=2))

    assert plain(Outer(Part(1.0), object())) == {"part": {"low": 1.0, "high": None, "width": None}, "seconds": 1.23}


def test_values_that_json_does_not_have() -> None:
    values = {"a": math.inf, "b": math.nan, "c": np.float32(0.5), "d": np.int64(3), "e": MappingProxyType({1: {3, 2}})}
    assert plain(values) == {"a": None, "b": None, "c": 0.5, "d": 3, "e": {"1": [2, 3]}}
    with pytest.raises(TypeError, match="object is not a record"):
        plain([object()])


def test_rounding_keeps_significant_digits() -> None:
    assert round_floats({"a": [123456.7, 0.000123456, math.inf, 7, "x", None]}, 3) == {
        "a": [123000.0, 0.000123, None, 7, "x", None]
    }


@pytest.mark.parametrize(
    ("change", "problem", "fix"),
    [
        ({"count": "3"}, "f: count is '3'", "Make it a whole number"),
        ({"name": 3}, "f: name is 3", "Make it text"),
        ({"kind": "three"}, "f: kind is 'three'", "It can be one, two"),
        ({"parts": {}}, "f: parts is {}", "Make it a list"),
        ({"parts": [{"low": 1}, {"low": "x"}]}, "f: parts.1.low is 'x'", "Make it a number"),
        ({"by_name": {"good": {"low": 1}, "bad": {"low": []}}}, "f: by_name.bad.low is []", "Make it a number"),
        ({"options": {"a": 1, "b": True}}, "f: options.b is True", "Make it a number"),
        ({"first": 3}, "f: first is 3", "Make it a table: [first]"),
        ({"first": {}}, "f: first.low is missing", "Add it"),
        ({"parts": [{"low": 1, "high": "x" * 200}]}, "f: parts.0.high is 'xxxx", "Make it a number"),
        ({"nmae": "x"}, "f: unknown key 'nmae' at the top", "Did you mean name?"),
        ({"first": {"low": 1, "hihg": 2}}, "f: unknown key 'hihg' in [first]", "Did you mean high?"),
        ({"by_name": {"b": {"q": 1}}}, "f: unknown key 'q' in [by_name.b]", "Known: high, low"),
        ({"parts": [{"low": 1, "q": 1}]}, "f: unknown key 'q' in [parts.0]", "Known: high, low"),
    ],
)
def test_an_error_names_file_place_value_and_fix(change: dict[str, Any], problem: str, fix: str) -> None:
    with pytest.raises(HardwareError) as raised:
        parse({"name": "a", **change}, Whole, "f", HardwareError, unknown_keys=False)
    assert raised.value.problem.startswith(problem)
    assert len(raised.value.problem) < 120
    assert raised.value.fix == fix


def test_a_record_that_is_no_table() -> None:
    with pytest.raises(HardwareError, match=r"f: the content is \[1\]\. Make it a table"):
        parse([1], Whole, "f", HardwareError, unknown_keys=False)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[" * 100_000, "nested more than"),
        (b'{"name": "a", "name": "b"}', "appears twice"),
        (b'{"name": NaN}', "not a JSON number"),
        (b"[1]", "not a JSON object"),
        (b'{"name": "\\ud800"}', "half a character"),
        (b'{"name": ' + b"9" * 5000 + b"}", "too many digits"),
        (b" " * (16 * 1024 * 1024 + 1), "is larger than"),
        (b'{"name": 1}', "name is 1. Make it text"),
    ],
)
def test_json_files_are_bounded(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_json(tmp_path / "f.json", Whole, DataError, "Give another")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a = " + b"[" * 100_000, "is nested too deeply"),
        (b"a = ", "is not TOML"),
        (b"a = " + b"9" * 5000, "is not TOML"),
        (b"[" + b"a." * 900 + b"a]", "is nested too deeply"),
        (b"a." * 900 + b"a = 1", "is nested too deeply"),
        (b"a = '\xff'", "is not UTF-8 text"),
        (b" " * ((1 << 20) + 1), "is larger than 1 MiB"),
        (b".".join([b"a"] * 300_000) + b" = 1", "has a line of more than 1000 dots"),
    ],
)
def test_toml_files_are_bounded(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "f.toml").write_bytes(content)
    with pytest.raises(HardwareError, match=problem):
        toml_table(tmp_path / "f.toml", HardwareError, "Give a profile")


def test_a_byte_order_mark_is_no_part_of_toml(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('title = "x"\n', encoding="utf-8-sig")
    assert toml_table(tmp_path / "f.toml", HardwareError, "Give a profile") == {"title": "x"}


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    for read in (lambda p: read_json(p, Whole, DataError, "Fix"), lambda p: toml_table(p, DataError, "Fix")):
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no endless file")
@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_json(path, Part, DataError, ""),
        read_table,
        read_text,
        read_tensor,
        load_annotations,
        lambda path: load_statistics(path.parent),
    ],
)
def test_a_link_to_an_endless_file_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    link = tmp_path / "statistics.json"
    link.symlink_to("/dev/zero")
    with pytest.raises(EdgeqError, match=r"larger|too large"):
        read(link)
