"""Test class names: lists of classes in every form, and folders that these lists number."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.helpers import save_image
from edgeq.data.classes import drop_background, imagenet, load_classes, number_folders
from edgeq.data.labels import Labels
from edgeq.data.samples import open_samples, spread
from edgeq.errors import DataError
from edgeq.signature import Signature, TensorSpec

NAMES = ["tench", "great white shark", "crane"]


def scoring(classes: int) -> Signature:
    image = TensorSpec("x", np.dtype(np.float32), ("N", 3, 8, 8))
    return Signature((image,), (TensorSpec("y", np.dtype(np.float32), ("N", classes)),))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.txt", "tench\nGreat_White-Shark\ncrane\n"),
        ("labels.txt", "0 tench\n1 great white shark\n2 crane"),
        ("labels.txt", "crane,2\ntench,0\ngreat white shark,1"),
        ("synset_words.txt", "n01440764 tench, Tinca tinca\nn01484850 great white shark, white shark\nn02012849 crane"),
        ("map.json", json.dumps({name: number for number, name in enumerate(NAMES)})),
        ("map.json", json.dumps({str(number): [f"n0000000{number}", name] for number, name in enumerate(NAMES)})),
        ("map.json", json.dumps({"id2label": {str(number): name for number, name in enumerate(NAMES)}})),
        ("map.json", json.dumps(NAMES)),
    ],
)
def test_every_form_numbers_the_same_names(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    classes = load_classes(tmp_path / name)
    assert [classes.number(folder) for folder in ("Tench", "great_white_shark", "0002_crane")] == [0, 1, 2]
    with pytest.raises(DataError, match="no class named 'cat'"):
        classes.number("cat")


def test_refuses_files_without_classes(tmp_path: Path) -> None:
    for name, text in (("a.txt", ""), ("a.json", "[]"), ("a.json", "{"), ("a.json", '{"a": "b"}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=name):
            load_classes(tmp_path / name)
    with pytest.raises(DataError, match="is not a file"):
        load_classes(tmp_path / "none.txt")


def test_imagenet_is_known_by_synset_and_by_name() -> None:
    assert imagenet().count == 1000
    assert [imagenet().find(name) for name in ("n01440764", "n01440764_tench", "toilet_tissue", "crane")] == [
        0,
        0,
        999,
        None,  # "crane" is a bird and a machine
    ]


def test_a_background_class_is_left_out_where_the_model_has_none() -> None:
    listed = load_classes(["background", *NAMES])
    assert drop_background(listed, 4).number("tench") == 1
    assert drop_background(listed, 3).number("tench") == 0


def labels_of(folder: Path, classes: int, **options: object) -> list[object]:
    return [sample.label for sample in open_samples(folder, scoring(classes), preprocess="none", **options)]  # type: ignore[arg-type]


def test_folders_are_numbered_by_what_is_known(tmp_path: Path) -> None:
    for number, synset in enumerate(("n15075141", "n01440764")):
        save_image(tmp_path / "images" / synset / f"{number}.png")
    folder = tmp_path / "images"
    assert labels_of(folder, 1000) == labels_of(folder, 1001) == [0, 999]
    assert labels_of(folder, 2) == [0, 1]  # a model with only these two classes
    assert labels_of(folder, 2, labels=Labels(None, ["n15075141", "n01440764"])) == [1, 0]
    (tmp_path / "class_to_idx.json").write_text(json.dumps({"n01440764": 7, "n15075141": 3}))
    assert labels_of(folder, 10) == [7, 3]
    with pytest.raises(DataError, match="no class named 'n01440764'"):
        labels_of(folder, 2, labels=Labels(None, ["n15075141", "cat"]))


def test_labels_that_are_names_become_numbers(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_image(tmp_path / name)
    given = Labels({"a.png": "crane", "b.png": "tench"}, NAMES)
    assert labels_of(tmp_path, 3, labels=given) == [2, 0]


def test_sorted_numbers_are_marked(tmp_path: Path) -> None:
    found = [tmp_path / "b" / "1.png", tmp_path / "a" / "2.png"]
    for path in found:
        save_image(path)
    assert number_folders(tmp_path, found).sorted_names
    assert not number_folders(tmp_path, found, classes=load_classes(["b", "a"])).sorted_names


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 45))
def test_a_spread_is_as_even_as_the_groups_allow(groups: list[str], count: int) -> None:
    chosen = spread(len(groups), count, groups)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(groups))
    taken, there = Counter(groups[place] for place in chosen), Counter(groups)
    most = max(taken.values())
    assert all(taken[group] >= min(there[group], most - 1) for group in there)


def test_count_takes_samples_of_every_class(tmp_path: Path) -> None:
    for folder, images in (("0", 7), ("1", 2), ("2", 5)):
        for number in range(images):
            save_image(tmp_path / folder / f"{number}.png")
    assert labels_of(tmp_path, 3, count=6) == [0, 0, 1, 1, 2, 2]
    assert labels_of(tmp_path, 3, count=9) == [0] * 4 + [1] * 2 + [2] * 3
    assert labels_of(tmp_path, 3, count=3, stride=2) == [0, 1, 2]
    assert labels_of(tmp_path, 3, count=2, start=9) == [2, 2]
