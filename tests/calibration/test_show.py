from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.calibration.files import save_statistics
from edgeq.calibration.observer import Observer
from edgeq.calibration.ranges import Range
from edgeq.calibration.show import (
    RangeComparison,
    columns,
    compare_ranges,
    heights,
    open_calibration,
    sparkline,
    svg_plot,
    text_plot,
    write_svg,
)
from edgeq.calibration.statistics import Statistics, TensorStatistics, histogram_of
from edgeq.calibration.table import FLATBUFFERS, write_native, write_tables
from edgeq.cli import group
from edgeq.errors import OutputError, UsageError
from edgeq.util.records import plain
from edgeq.util.registry import METHODS


@pytest.fixture
def statistics() -> Statistics:
    tensors = {}
    for name, values in {
        "a<b>&": np.random.default_rng(0).normal(size=5000),
        "constant": np.full(9, 3.0),
        "empty": np.zeros(0),
        "zero": np.zeros(4),
    }.items():
        running = Observer(TensorStatistics())
        running.observe(values.astype(np.float32))
        tensors[name] = running.freeze()
    return Statistics("m", "d", 1, tensors)


def test_columns_count_every_value() -> None:
    counts = columns(histogram_of(np.float32([-1, -0.6, 0.6, 0.7, 1])), -1.0, 1.0, 4)
    assert counts.tolist() == [2, 0, 0, 3]
    assert heights(counts).max() == 1.0
    assert heights(np.zeros(3)).tolist() == [0, 0, 0]


def test_plain_values(statistics: Statistics, tmp_path: Path) -> None:
    save_statistics(statistics, tmp_path / "CAL")
    shown = open_calibration(tmp_path / "CAL")
    assert isinstance(shown, RangeComparison)
    record = plain(shown)
    assert record["kind"] == "statistics"
    assert [t["name"] for t in record["tensors"]] == ["a<b>&", "constant", "empty", "zero"]
    assert record["tensors"][1]["ranges"]["minmax"] == [0.0, 3.0]
    assert record["tensors"][2]["minimum"] is None
    assert all(set(t["ranges"]) == set(METHODS.names()) for t in record["tensors"])


def test_text(statistics: Statistics) -> None:
    shown = compare_ranges(statistics)
    lines = text_plot(shown, "a<b>&", width=40, height=4)
    assert len(lines) == 1 + 4 + len(METHODS.names())
    ruler = next(line for line in lines if " minmax " in line)
    assert "├" in ruler
    assert ruler.endswith(
        f"minmax {shown.ranges['minmax']['a<b>&'].low:.6g} to {shown.ranges['minmax']['a<b>&'].high:.6g}"
    )
    assert len(sparkline(shown, "a<b>&", 10)) == 10
    assert text_plot(shown, "empty") == ["empty  no values"]
    assert len(text_plot(shown, "zero")) > 1


def test_the_svg_is_well_formed_and_shows_every_threshold(statistics: Statistics, tmp_path: Path) -> None:
    shown = compare_ranges(statistics)
    write_svg(shown, tmp_path / "out.svg")
    root = ElementTree.fromstring((tmp_path / "out.svg").read_text("utf-8"))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * 2 * len(METHODS.names())
    assert "minmax 3" in titles
    assert svg_plot(shown) == svg_plot(compare_ranges(statistics))


def test_chosen_tensors(statistics: Statistics, tmp_path: Path) -> None:
    save_statistics(statistics, tmp_path / "CAL")
    shown = open_calibration(tmp_path / "CAL", ["zero"], "int8", symmetric=True)
    assert isinstance(shown, RangeComparison)
    assert list(shown.statistics.tensors) == ["zero"]
    with pytest.raises(UsageError, match="'nowhere'"):
        open_calibration(tmp_path / "CAL", ["nowhere"])


def test_tables(tmp_path: Path) -> None:
    ranges = {"b": Range(-2.0, 1.0), "a": Range(0.0, 3.0)}
    write_tables(tmp_path / "tables", ranges)
    write_native(tmp_path / "native", ranges)
    expected = {"kind": "table", "tensors": [{"name": "a", "magnitude": 3.0}, {"name": "b", "magnitude": 2.0}]}
    assert open_calibration(tmp_path / "tables") == expected
    assert open_calibration(tmp_path / "tables" / FLATBUFFERS) == expected
    native = open_calibration(tmp_path / "native", ["a"])
    assert isinstance(native, dict)
    assert native["tensors"][0]["magnitude"] == pytest.approx(3.0)
    with pytest.raises(UsageError, match="'c'"):
        open_calibration(tmp_path / "tables", ["c"])
    with pytest.raises(UsageError, match="no histograms"):
        write_svg(expected, tmp_path / "x.svg")


@pytest.mark.parametrize("inside", ["", "statistics.npz", "new.svg"])
def test_a_plot_is_not_written_over_the_statistics(inside: str, statistics: Statistics, tmp_path: Path) -> None:
    save_statistics(statistics, tmp_path / "CAL")
    before = sorted((file.name, file.read_bytes()) for file in (tmp_path / "CAL").iterdir())
    arguments = ["calibrate", "show", str(tmp_path / "CAL"), "--svg", str(tmp_path / "CAL" / inside), "--force"]
    assert CliRunner().invoke(group, arguments).exit_code == OutputError.exit_code
    assert sorted((file.name, file.read_bytes()) for file in (tmp_path / "CAL").iterdir()) == before
