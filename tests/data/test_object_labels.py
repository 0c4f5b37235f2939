"""Read objects in YOLO's and VOC's form, and label files beside images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edgeq.data.label_folders import label_by_files
from edgeq.data.label_maps import read_numbers_map
from edgeq.data.labels import load_labels_from
from edgeq.data.object_labels import load_object_labels
from edgeq.data.records import Record
from edgeq.errors import DataError

VOC = """<annotation><filename>a.jpg</filename><size><width>100</width><height>50</height></size>
<object><name>dog</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>10</xmax><ymax>20</ymax></bndbox></object>
<object><name>cat</name><difficult>1</difficult>
<bndbox><xmin>5</xmin><ymin>6</ymin><xmax>7</xmax><ymax>8</ymax></bndbox></object></annotation>"""


def make_yolo(folder: Path, label: str, yaml: str = "") -> Path:
    for place in ("images/val", "labels/val"):
        (folder / place).mkdir(parents=True)
    Image.new("RGB", (100, 50)).save(folder / "images/val/a.jpg")
    (folder / "labels/val/a.txt").write_text(label, "utf-8")
    if yaml:
        (folder / "data.yaml").write_text(yaml, "utf-8")
    return folder / "labels"


def test_boxes_and_names_of_yolo(tmp_path: Path) -> None:
    content = load_object_labels(
        make_yolo(tmp_path, "1 0.5 0.5 0.2 0.4\n", "path: x\nnames:\n  0: cat\n  1: 'dog'\nnc: 2\n")
    )
    assert content["images"] == [{"id": 1, "file_name": "val/a.jpg", "width": 100, "height": 50}]
    (entry,) = content["annotations"]
    assert entry["category_id"] == 1
    assert entry["bbox"] == pytest.approx([40, 15, 20, 20])
    assert [category["name"] for category in content["categories"]] == ["cat", "dog"]


@pytest.mark.parametrize("names", ["names: [cat, dog] # two", "names:\n- cat\n- dog", "names: {0: cat, 1: dog}"])
def test_names_in_the_forms_of_yaml(tmp_path: Path, names: str) -> None:
    content = load_object_labels(make_yolo(tmp_path, "", names))
    assert [category["name"] for category in content["categories"]] == ["cat", "dog"]


def test_polygons_and_keypoints_of_yolo(tmp_path: Path) -> None:
    (entry,) = load_object_labels(make_yolo(tmp_path / "a", "0 0.1 0.2 0.3 0.2 0.3 0.6 0.1 0.6"))["annotations"]
    assert entry["segmentation"][0] == pytest.approx([10, 10, 30, 10, 30, 30, 10, 30])
    assert entry["area"] == pytest.approx(400)
    label = "0 0.5 0.5 0.2 0.4 0.5 0.5 2 0 0 0"
    (entry,) = load_object_labels(make_yolo(tmp_path / "b", label, "kpt_shape: [2, 3]\n"))["annotations"]
    assert entry["keypoints"] == pytest.approx([50, 25, 2, 0, 0, 0])
    assert entry["num_keypoints"] == 1
    label = "0 0.5 0.5 0.2 0.4 0.5 0.5 1"
    (entry,) = load_object_labels(make_yolo(tmp_path / "c", label))["annotations"]
    assert entry["keypoints"] == pytest.approx([50, 25, 1])


def test_boxes_of_voc(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(VOC, "utf-8")
    content = load_object_labels(tmp_path)
    assert content["annotations"][0] == {"image_id": 1, "category_id": 1, "bbox": [0, 1, 10, 19], "iscrowd": 0}
    assert content["annotations"][1]["iscrowd"] == 1
    assert [category["name"] for category in content["categories"]] == ["cat", "dog"]


@pytest.mark.parametrize(
    "text", ["", "<a>", VOC.replace("100", "wide"), VOC.replace("<xmax>10", "<xmax>0"), VOC.replace("10<", "nan<"),
             "<!DOCTYPE a [<!ENTITY b 'c'>]>" + VOC, "<a>" * 100, "<annotation><text/><size/></annotation>"]
)  # fmt: skip
def test_refuses_hostile_xml(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.xml").write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"a\.xml"):
        load_object_labels(tmp_path)


@pytest.mark.parametrize(
    "line", ["x 1 2 3 4", "-1 0 0 0 0", "0 1 2 3", "0 nan 0 0 0", "0 1 2 3 4 5", "999999999 0 0 0 0"]
)
def test_refuses_strange_lines(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match="line 1"):
        load_object_labels(make_yolo(tmp_path, line))


def test_refuses_labels_without_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no labels"):
        load_object_labels(tmp_path)
    (tmp_path / "a.txt").write_text("0 0 0 0 0", "utf-8")
    with pytest.raises(DataError, match="has no image"):
        load_object_labels(tmp_path)


def record(file: str) -> Record:
    return Record(file, {}, context={"file": Path(file).name, "path": file})


def test_files_of_the_samples_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.png", "deep/b.png", "deep/a.png"):
        (tmp_path / name).write_bytes(b"")
    label_of = load_labels_from(str(tmp_path), None, 1)
    assert label_of(0, record("deep/b.jpg")) == label_of(0, record("b.jpg")) == tmp_path / "deep/b.png"
    assert label_of(0, record("deep/a.jpg")) == tmp_path / "deep/a.png"
    with pytest.raises(DataError, match="no file for c"):
        label_of(0, record("c.jpg"))
    with pytest.raises(DataError, match="2 files"):
        label_by_files(tmp_path)(0, record("x/a.jpg"))


def test_the_name_is_the_text() -> None:
    assert load_labels_from("name", None, 1)(0, record("plates/007.jpg")) == "007"


def test_palette_and_grey_maps(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    forms: dict[str, Any] = {
        "grey.png": Image.fromarray(values),
        "rgb.png": Image.fromarray(np.stack([values] * 3, axis=-1)),
    }
    forms["palette.png"] = Image.fromarray(values)
    forms["palette.png"].putpalette(list(range(255, -1, -1)) * 3)
    for name, image in forms.items():
        image.save(tmp_path / name)
        np.testing.assert_array_equal(read_numbers_map(tmp_path / name), values)
    Image.fromarray(values.astype(np.uint16) * 1000).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(read_numbers_map(tmp_path / "deep.png"), values.astype(int) * 1000)
    np.save(tmp_path / "a.npy", values)
    np.testing.assert_array_equal(read_numbers_map(tmp_path / "a.npy"), values)
    Image.fromarray(np.random.default_rng(0).integers(0, 9, (4, 4, 3)).astype(np.uint8)).save(tmp_path / "colour.png")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    for name in ("colour.png", "objects.npy", "broken.png", "absent.png"):
        with pytest.raises(DataError, match=name):
            read_numbers_map(tmp_path / name)
