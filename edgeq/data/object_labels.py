"""Read a folder of object labels in YOLO's or Pascal VOC's form, and return them in COCO's form.

    YOLO    one .txt for each image, one object a line: class, then centre x, centre y, width, height (boxes), or these
            and x, y or x, y, visibility of each keypoint, or the corners of a polygon or of a rotated box. All are
            shares of the image's size. data.yaml or classes.txt in the folder or above names the classes.
    VOC     one .xml for each image: size, and objects with name, bndbox (and difficult, which counts as crowd)

The images are next to the labels, or in a folder "images" (JPEGImages) in the place of "labels" (Annotations) in the
path.
"""

from __future__ import annotations

import math
import re
import warnings
import xml.parsers.expat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from edgeq.data.limits import MAX_FILES, read_text
from edgeq.errors import DataError

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_FOLDERS = {"labels": "images", "Annotations": "JPEGImages", "annotations": "images"}
# Files in a folder of labels that are no labels.
_NO_LABELS = ("classes.txt", "labels.txt", "train.txt", "val.txt", "test.txt")
# Far more than data sets have. Each becomes a Python object.
_MOST_OBJECTS, _MOST_CLASSES, _MOST_ELEMENTS, _DEEPEST = 5_000_000, 100_000, 1_000_000, 32


def load_object_labels(folder: Path) -> Mapping[str, Any]:
    """Return the labels of a folder in COCO's form: images, annotations and categories. Category ids are YOLO's class
    numbers, or the positions of VOC's class names in sorted order.

    Raises:
        DataError: the folder has no labels, or a file has another form.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".txt", ".xml")]
    files = [path for path in files if path.name not in _NO_LABELS]
    if not files or len(files) > MAX_FILES:
        raise DataError(f"{folder} has no labels", "Give a COCO file, or a folder of YOLO .txt or VOC .xml files")
    voc = files[0].suffix.lower() == ".xml"
    names = [] if voc else _read_names(folder)
    keypoints = None if voc else _read_keypoint_shape(folder)
    images, annotations = [], []
    for number, path in enumerate(files, 1):
        if voc:
            file, size, objects = _parse_voc(read_text(path), path)
        else:
            picture = _find_image(path, folder)
            file, size = picture.name, _read_size(picture)
            objects = _parse_yolo(read_text(path), path, size, keypoints)
        below = (path.parent.relative_to(folder) / file).as_posix()
        images.append({"id": number, "file_name": below, "width": size[0], "height": size[1]})
        annotations += [{"image_id": number, **entry} for entry in objects]
        if len(annotations) > _MOST_OBJECTS:
            raise DataError(f"{folder} has more than {_MOST_OBJECTS} objects", "Give a part of it")
    if voc:
        names = sorted({entry["category_id"] for entry in annotations})
        numbers = {name: number for number, name in enumerate(names)}
        annotations = [{**entry, "category_id": numbers[entry["category_id"]]} for entry in annotations]
    count = max((entry["category_id"] + 1 for entry in annotations), default=0)
    names = names + [str(number) for number in range(len(names), count)]
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _parse_yolo(
    text: str, path: Path, size: tuple[int, int], keypoints: tuple[int, int] | None
) -> list[dict[str, Any]]:
    objects = []
    for number, line in enumerate(text.split("\n"), 1):
        cells = line.split()
        if not cells:
            continue
        try:
            category, values = int(cells[0]), [float(cell) for cell in cells[1:]]
        except ValueError:
            category, values = -1, []
        width, height = size
        if not 0 <= category < _MOST_CLASSES or len(values) < 4 or not all(map(math.isfinite, values)):
            raise DataError(f"{path}: line {number} is not a class and numbers", "Write class x y width height")
        shape = keypoints
        # A polygon has an even number of values, so an odd one is a box and keypoints with their visibility.
        if shape is None and len(values) % 2 and (len(values) - 4) % 3 == 0:
            shape = (len(values) - 4) // 3, 3
        if len(values) == 4 or shape is not None:
            x, y, w, h = values[:4]
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            entry: dict[str, Any] = {"category_id": category, "bbox": box}
            if shape is not None:
                entry.update(_parse_points(values[4:], shape, size, f"{path}: line {number}"))
        elif len(values) % 2 == 0 and len(values) >= 6:
            points = [value * size[place % 2] for place, value in enumerate(values)]
            xs, ys = points[::2], points[1::2]
            box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
            entry = {"category_id": category, "bbox": box, "segmentation": [points], "area": _area(xs, ys)}
        else:
            raise DataError(
                f"{path}: line {number} has {len(values)} numbers", "Give a box or the corners of a polygon"
            )
        objects.append(entry)
    return objects


def _parse_points(values: list[float], shape: tuple[int, int], size: tuple[int, int], location: str) -> dict[str, Any]:
    count, each = shape
    if len(values) != count * each:
        raise DataError(
            f"{location} has {len(values)} numbers after the box", f"kpt_shape in data.yaml is {list(shape)}"
        )
    points: list[float] = []
    for place in range(0, len(values), each):
        x, y = values[place] * size[0], values[place + 1] * size[1]
        # Without a visibility, points at the origin are not labelled.
        visible = values[place + 2] if each == 3 else 2.0 * bool(x or y)
        points += [x, y, float(int(visible))]
    return {"keypoints": points, "num_keypoints": sum(v > 0 for v in points[2::3])}


def _area(xs: list[float], ys: list[float]) -> float:
    following = zip(xs[1:] + xs[:1], ys[1:] + ys[:1], strict=True)
    return abs(sum(x * b - a * y for x, y, (a, b) in zip(xs, ys, following, strict=True))) / 2


def _find_image(path: Path, folder: Path) -> Path:
    """Return the image of a label file."""
    places = [path.with_suffix("")]
    parts = path.parts
    for place in range(len(parts) - 1, -1, -1):
        if parts[place] in _FOLDERS:
            places.append(Path(*parts[:place], _FOLDERS[parts[place]], *parts[place + 1 :]).with_suffix(""))
            break
    for stem in places:
        for suffix in _IMAGES:
            for picture in (stem.with_name(stem.name + suffix), stem.with_name(stem.name + suffix.upper())):
                if picture.is_file():
                    return picture
    raise DataError(f"{path} has no image", f"Put it next to {folder.name}/ or into images/ beside it")


def _read_size(path: Path) -> tuple[int, int]:
    """Return the width and height of an image, from its header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Only the header is read.
            with Image.open(path) as image:
                return image.width, image.height
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not an image that can be read", "Replace or remove the file") from error


def _read_names(folder: Path) -> list[str]:
    """Return the class names of data.yaml or classes.txt; [] without such a file."""
    for place in (folder, *folder.parents[:2]):
        if (place / "classes.txt").is_file():
            return [line.strip() for line in read_text(place / "classes.txt").split("\n") if line.strip()]
        if (place / "data.yaml").is_file():
            names = _parse_names(read_text(place / "data.yaml"))
            if len(names) > _MOST_CLASSES:
                raise DataError(f"{place / 'data.yaml'} has more than {_MOST_CLASSES} names", "Correct the file")
            return names
    return []


def _parse_names(text: str) -> list[str]:
    """Return the names in data.yaml: names: [a, b], or one a line as "- a" or "0: a"."""
    match = re.search(r"^names:[ \t]*(.*)$", text, re.MULTILINE)
    if match is None:
        return []
    inline = match[1].split("#")[0].strip()
    if inline.startswith(("[", "{")):
        body = text[match.start(1) :].partition("]" if inline[0] == "[" else "}")[0][1:]
        cells = [cell for cell in body.replace("\n", " ").split(",") if cell.strip()]
    else:
        cells = []
        for line in text[match.end() :].split("\n")[1:]:
            if line.strip() and not re.match(r"[ \t]+\S|-[ \t]", line):
                break
            if line.split("#")[0].strip():
                cells.append(line.split("#")[0].strip().removeprefix("-"))
    return [re.sub(r"^\s*\d+\s*:\s*", "", cell).strip().strip("'\"") for cell in cells]


def _read_keypoint_shape(folder: Path) -> tuple[int, int] | None:
    for place in (folder, *folder.parents[:2]):
        if (place / "data.yaml").is_file():
            match = re.search(
                r"^kpt_shape:[ \t]*\[[ \t]*(\d{1,4})[ \t]*,[ \t]*([23])[ \t]*\]",
                read_text(place / "data.yaml"),
                re.MULTILINE,
            )
            return (int(match[1]), int(match[2])) if match else None
    return None


def _parse_voc(text: str, path: Path) -> tuple[str, tuple[int, int], list[dict[str, Any]]]:
    """Return the image's file name and size, and its objects, whose category ids are names."""
    fix = "Give Pascal VOC's form: annotation with filename, size and object"
    tree = _parse_xml(text, path)
    try:
        size = int(tree["size"][0]["width"][0]["text"]), int(tree["size"][0]["height"][0]["text"])
        objects = []
        for entry in tree.get("object", ()):
            box = entry["bndbox"][0]
            x1, y1, x2, y2 = (float(box[key][0]["text"]) for key in ("xmin", "ymin", "xmax", "ymax"))
            if not all(map(math.isfinite, (x1, y1, x2, y2))) or x2 < x1 or y2 < y1:
                raise ValueError(f"a box of {x1}, {y1}, {x2}, {y2}")
            difficult = int(entry["difficult"][0]["text"] or 0) if "difficult" in entry else 0
            # VOC counts pixels from 1, and its boxes contain both edges.
            box_coco = [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1]
            objects.append({"category_id": entry["name"][0]["text"], "bbox": box_coco, "iscrowd": int(difficult > 0)})
        file = tree["filename"][0]["text"] if "filename" in tree else ""
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a VOC annotation: {type(error).__name__} {error}", fix) from error
    return Path(file.replace("\\", "/")).name or f"{path.stem}.jpg", size, objects


def _parse_xml(text: str, path: Path) -> dict[str, Any]:
    """Return the elements below the root: name → list of elements, each the same, with its text under "text".

    Entities and document types are refused, because they can make a small file huge, or read other files.
    """
    root: dict[str, Any] = {}
    stack: list[dict[str, Any]] = []
    count = 0

    def start(name: str, attributes: Mapping[str, str]) -> None:
        nonlocal count
        del attributes
        count += 1
        if count > _MOST_ELEMENTS or len(stack) >= _DEEPEST:
            raise DataError(f"{path} has too many elements", "Give one file for each image")
        element: dict[str, Any] = {"text": ""} if stack else root
        if stack:
            children = stack[-1].setdefault(name, [])
            # The name "text" is that of the element's own text.
            if isinstance(children, list):
                children.append(element)
        stack.append(element)

    def end(name: str) -> None:
        del name
        element = stack.pop()
        element["text"] = element.get("text", "").strip() if isinstance(element.get("text", ""), str) else ""

    def add_text(data: str) -> None:
        if stack and isinstance(stack[-1].get("text", ""), str):
            stack[-1]["text"] = stack[-1].get("text", "") + data

    def refuse(*arguments: Any) -> None:
        del arguments
        raise DataError(f"{path} declares a document type or an entity", "Remove the declaration")

    parser = xml.parsers.expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, add_text
    # Entities can only be declared in a document type.
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except xml.parsers.expat.ExpatError as error:
        raise DataError(f"{path} is not XML: {error}", "Correct the file") from error
    return root
