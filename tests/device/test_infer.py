"""Test inputs from files, which are checked against the model before it runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from edgeq_device.bundle.opening import check_feeds, read_feeds, save_outputs
from edgeq_device.engines.sessions import infer
from edgeq_device.errors import DataError, OutputError, RuntimeUnavailableError

from .fakes import Session, Spec

X = np.ones((2, 3), np.float32)
TWO = Session(Spec("ids", "tensor(int64)", ["n", "t"]), Spec("mask", "tensor(int64)", ["n", "t"]))


def test_several_inputs_in_several_files(tmp_path: Path) -> None:
    ids = np.zeros((1, 5), np.int64)
    np.save(tmp_path / "ids.npy", ids)
    np.savez(tmp_path / "rest.npz", mask=ids)
    feeds = read_feeds(TWO, [f"ids={tmp_path / 'ids.npy'}", str(tmp_path / "rest.npz")])
    assert set(feeds) == {"ids", "mask"}


def test_a_nameless_array_among_several_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.zeros((1, 5), np.int64))
    with pytest.raises(DataError, match="with NAME one of ids, mask"):
        read_feeds(TWO, [str(tmp_path / "ids.npy")])


def test_an_input_twice(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(DataError, match="'x' is given twice"):
        read_feeds(Session(), [str(tmp_path / "x.npy")] * 2)


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({}, "input 'x' is missing"),
        ({"x": X, "z": X}, "no input 'z'"),
        ({"x": X.astype(np.float64)}, "is float64, the model takes float32"),
        ({"x": X[:, :2]}, r"has shape \[2, 2\], the model takes \['n', 3\]"),
        ({"x": X[0]}, r"has shape \[3\]"),
    ],
)
def test_refuses_inputs_that_do_not_fit(feeds: dict[str, np.ndarray], says: str) -> None:
    with pytest.raises(DataError, match=says):
        check_feeds(Session(), feeds)


def test_open_sizes_fit_anything() -> None:
    check_feeds(Session(Spec("x", "tensor(float)", [None, "c", 3])), {"x": np.ones((7, 1, 3), np.float32)})


def test_outputs_by_name() -> None:
    np.testing.assert_array_equal(infer(Session(), {"x": X})["y"], X * 2)


def test_a_failure_of_the_runtime_is_one_line() -> None:
    class Broken(Session):
        def run(self, names: object, feeds: object) -> list[object]:
            raise RuntimeError("index out\nof bounds")

    with pytest.raises(RuntimeUnavailableError, match=r"\(index out of bounds\)"):
        infer(Broken(), {"x": X})


def test_outputs_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "out.npz"
    with pytest.raises(Exception, match="Python objects"):
        save_outputs(place, {"y": np.array([{}], dtype=object)}, force=False)
    assert list(tmp_path.iterdir()) == []
    save_outputs(place, {"y": X}, force=False)
    with pytest.raises(OutputError, match="exists already"):
        save_outputs(place, {"y": X}, force=False)
    save_outputs(place, {"y": X}, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def test_an_input_of_unknown_rank_takes_any_shape() -> None:
    session = Session(Spec("x", "tensor(float)", []))
    for array in (X, X[0], np.float32(1)):
        check_feeds(session, {"x": np.asarray(array)})
    with pytest.raises(DataError, match="is float64"):
        check_feeds(session, {"x": X.astype(np.float64)})


@pytest.mark.skipif(os.name != "posix", reason="modes and pipes as POSIX has them")
def test_outputs_have_the_mode_of_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for force in (False, True):
            save_outputs(tmp_path / "out.npz", {"y": X}, force=force)
            assert stat.S_IMODE((tmp_path / "out.npz").stat().st_mode) == 0o640
    finally:
        os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="modes and pipes as POSIX has them")
def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for name in ("pipe", "link", "folder"):
        with pytest.raises(OutputError, match="is not a regular file"):
            save_outputs(tmp_path / name, {"y": X}, force=True)
    assert sorted(tmp_path.iterdir()) == before
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
