"""Test Python objects as records that can be read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.helpers import IMAGE_MODEL, floats, save_image, signature, spec
from edgeq.data.open_source import Data
from edgeq.data.preprocess import register as register_preprocess
from edgeq.data.python_items import open_python, split_item
from edgeq.data.sample import Sample
from edgeq.data.samples import open_samples
from edgeq.errors import DataError, UsageError

TWO = signature(spec("a", "N", 2), spec("b", "N", 3))
ITEMS = [floats(1, 3, 8, 8, seed=i) for i in range(4)]


class Reader:
    """Imitate ONNX Runtime's CalibrationDataReader."""

    def __init__(self) -> None:
        self.left = list(ITEMS)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return {"x": self.left.pop(0)} if self.left else None


def generator() -> Iterator[np.ndarray]:
    yield from ITEMS


class Dataset:
    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(ITEMS)


@pytest.mark.parametrize(
    "make",
    [lambda: list(ITEMS), lambda: tuple(ITEMS), generator, lambda: generator, Dataset, Reader, lambda: np.stack(ITEMS)],
)
def test_everything_that_gives_samples_can_be_read_twice(make: Callable[[], Any]) -> None:
    items = open_python(make(), IMAGE_MODEL, prepared=True, input_name=None)
    assert len(items) == 4
    for indices in (range(4), range(1, 4, 2)):
        got = [record.raw["x"] for record in items.read_records(indices)]
        assert [np.array_equal(a, ITEMS[i]) for a, i in zip(got, indices, strict=True)] == [True] * len(indices)


def test_ragged_generators_keep_shapes_labels_and_text() -> None:
    def ragged() -> Iterator[Any]:
        for length in (3, 5):
            yield {"x": np.zeros((1, length), np.float16), "words": "text"}, length

    items = open_python(ragged(), IMAGE_MODEL, prepared=True, input_name=None)
    records = list(items.read_records(range(2)))
    assert [r.raw["x"].shape for r in records] == [(1, 3), (1, 5)]
    assert [r.label for r in records] == [3, 5]
    assert records[0].raw["words"] == "text"
    assert records[0].raw["x"].dtype == np.float16


def test_items() -> None:
    a, b = floats(1, 2), floats(1, 3)
    both = {"a": a, "b": b}
    for item in (both, (a, b), (both, 7), ((a, b), 7)):
        raw, label = split_item(item, TWO, "", "item 0")
        assert np.array_equal(raw["a"], a)
        assert np.array_equal(raw["b"], b)
        assert label in (None, 7)
    assert split_item((a, np.int64(3)), IMAGE_MODEL, "x", "")[1] == 3
    assert split_item((a,), IMAGE_MODEL, "x", "")[0]["x"] is a
    assert split_item([[1, 2]], IMAGE_MODEL, "x", "")[0]["x"].shape == (1, 2)
    with pytest.raises(DataError, match="item 0 has 3 arrays, the model takes 2"):
        split_item((a, b, a), TWO, "", "item 0")


@pytest.mark.parametrize("source", [3, None, b"bytes", {"x": 1}])
def test_refuses_objects_that_are_not_data(source: Any) -> None:
    with pytest.raises(DataError, match="is not data"):
        open_python(source, IMAGE_MODEL, prepared=True, input_name=None)


def test_objects_are_never_pickled() -> None:
    with pytest.raises(DataError, match="Python objects"):
        open_python(iter([np.array([object()])]), IMAGE_MODEL, prepared=True, input_name=None)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("given", [list, iter])
def test_paths_of_images_are_decoded(tmp_path: Path, kind: Any, given: Any) -> None:
    first, second = (save_image(tmp_path / name, seed=i) for i, name in enumerate(("a.png", "b.png")))
    paths = [kind(tmp_path / name) for name in ("a.png", "b.png")]
    samples = open_samples(given(paths), IMAGE_MODEL, preprocess="layout=NCHW", labels={"a.png": 4, "b": 5})
    got = list(samples)
    assert [(s.name, s.label, s.context["file"]) for s in got] == [
        (str(tmp_path / "a.png"), 4, "a.png"),
        (str(tmp_path / "b.png"), 5, "b.png"),
    ]
    for sample, pixels in zip(got, (first, second), strict=True):
        assert np.array_equal(sample.inputs["x"][0], pixels.transpose(2, 0, 1))
    before = samples.digest()
    save_image(tmp_path / "b.png", seed=9)
    assert samples.digest() != before
    missing = open_samples([kind(tmp_path / "c.png")], IMAGE_MODEL, preprocess="layout=NCHW")
    with pytest.raises(DataError, match=r"^\S+c.png cannot be decoded: No such file or directory"):
        list(missing)
    with pytest.raises(DataError, match=r"input 'x' is text or a path. Name the `preprocess`"):
        list(open_samples(given(paths), IMAGE_MODEL))


class Tensor:
    """Imitate PyTorch's tensors, which become an array on request unless they have a gradient."""

    def __init__(self, array: np.ndarray, gradient: bool = False) -> None:
        self.array, self.shape, self.gradient = array, array.shape, gradient

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        if self.gradient:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self.array


def test_lists_of_loaders_are_inputs_and_labels() -> None:
    images, labels = Tensor(floats(2, 3, 8, 8)), Tensor(np.array([4, 5]))
    (sample,) = open_samples([[images, labels]], IMAGE_MODEL)
    assert np.array_equal(sample.inputs["x"], images.array)
    assert np.asarray(sample.label).tolist() == [4, 5]
    a, b = floats(1, 2), floats(1, 3)
    for item in ([a, b], [(a, b), 7], [{"a": a, "b": b}, 7]):
        (two,) = open_samples([item], TWO)
        assert np.array_equal(two.inputs["b"], b)
    rows = [floats(3, 8, 8), floats(3, 8, 8, seed=1)]
    (stacked,) = open_samples([rows], IMAGE_MODEL)
    assert np.array_equal(stacked.inputs["x"], np.stack(rows))
    with pytest.raises(DataError, match="item 0"):
        list(open_samples([[{"x": floats(1, 3, 8, 8)}, {"x": floats(1, 3, 8, 8)}]], IMAGE_MODEL))
    with pytest.raises(DataError, match=r"item 0 is not an array .*requires grad"):
        list(open_samples([Tensor(floats(1, 3, 8, 8), gradient=True)], IMAGE_MODEL))


def test_a_function_without_samples_says_so() -> None:
    with pytest.raises(DataError, match=r"the function of the data gives NoneType\. Return or yield samples"):
        open_samples(lambda: None, IMAGE_MODEL)


@pytest.mark.parametrize("given", [list, iter])
def test_samples_keep_names_labels_and_contexts(given: Any) -> None:
    made = [Sample(f"s{i}", {"x": floats(1, 3, 8, 8, seed=i)}, i, {"scale": (i, i)}) for i in range(3)]
    got = list(open_samples(given(made), IMAGE_MODEL))
    assert [(s.name, s.label, s.context["scale"]) for s in got] == [(f"s{i}", i, (i, i)) for i in range(3)]
    assert all(np.array_equal(a.inputs["x"], b.inputs["x"]) for a, b in zip(got, made, strict=True))


def test_an_iterator_that_was_read_before_says_so() -> None:
    once = iter(ITEMS)
    assert len(open_samples(once, IMAGE_MODEL)) == 4
    with pytest.raises(DataError, match=r"holds no samples\. If it was read before, make a new one, or give a list"):
        open_samples(once, IMAGE_MODEL)


def test_samples_that_are_opened_take_no_other_labels_or_preprocessing() -> None:
    samples = open_samples(ITEMS, IMAGE_MODEL)
    for more in ({"labels": [1, 2, 3, 4]}, {"preprocess": "divide=2"}):
        with pytest.raises(UsageError, match="opened already"):
            open_samples(Data(samples, **more), IMAGE_MODEL)
    assert len(open_samples(Data(samples, count=2), IMAGE_MODEL)) == 2


def test_functions_that_read_paths_get_paths(tmp_path: Path) -> None:
    seen: list[Any] = []

    @register_preprocess("seen-paths", reads="path")
    def loaded(path: Any) -> np.ndarray:
        seen.append(path)
        return floats(3, 8, 8)

    list(open_samples([str(tmp_path), tmp_path], IMAGE_MODEL, preprocess="seen-paths"))
    list(open_samples(iter([str(tmp_path), tmp_path]), IMAGE_MODEL, preprocess="seen-paths"))
    assert seen == [tmp_path] * 4


def test_ragged_items_are_named() -> None:
    with pytest.raises(DataError, match="item 1 is not an array"):
        list(open_python([[1], [[1], [1, 2]]], IMAGE_MODEL, prepared=True, input_name=None).read_records(range(2)))


class Shrinks:
    """Yield four items, but only two when it is read again."""

    def __init__(self) -> None:
        self.count = 8

    def __iter__(self) -> Iterator[np.ndarray]:
        self.count //= 2
        return iter(ITEMS[: self.count])


def test_data_that_give_fewer_items_the_second_time_say_so() -> None:
    once = generator()
    for source, second in ((lambda: once, 0), (Shrinks(), 2)):
        items = open_python(source, IMAGE_MODEL, prepared=True, input_name=None)
        with pytest.raises(DataError, match=f"gave 4 items at first, but {second} when read again"):
            list(items.read_records(range(4)))
        assert len(list(items.read_records(range(0)))) == 0


def test_a_class_of_a_reader_and_a_reader_read_before_say_what_to_do() -> None:
    with pytest.raises(DataError, match=r"the class Reader is not data. Give an object of it, Reader"):
        open_python(Reader, IMAGE_MODEL, prepared=True, input_name=None)
    reader = Reader()
    open_python(reader, IMAGE_MODEL, prepared=True, input_name=None)

    class Arrays(Reader):
        def get_next(self) -> Any:
            """Return one array, which cannot be compared with None as a whole."""
            return self.left.pop(0) if self.left else None

    assert len(open_python(Arrays(), IMAGE_MODEL, prepared=True, input_name=None)) == 4
    with pytest.raises(DataError, match=r"gives no samples\. If it was read before, make a new one"):
        open_python(reader, IMAGE_MODEL, prepared=True, input_name=None)
