"""Read lists of classes next to a model: data.yaml of YOLO data sets (names, nc, kpt_shape), and files of one name a
line (labels.txt, classes.txt, coco.names).
"""

from __future__ import annotations

from pathlib import Path

from edgeq.data.classes import LIST_NAMES, load_classes
from edgeq.describe.beside import check_names, find_text, find_yaml, read_names
from edgeq.describe.facts import Exported, Fact, ModelFacts, Reader, merge
from edgeq.errors import DataError

_NAMES = ("coco.names", "obj.names", "voc.names")
# The readers of their writers read these.
_OTHERS = frozenset({"config.json"})
_MOST_KEYPOINTS = 1000


def read(exported: Exported) -> ModelFacts:
    """Return the labels. A list with the model's own name replaces the lists for a folder."""
    path = exported.path
    parts = [_read_data(path.parent / name) for name in ("data.yaml", "data.yml")]
    parts += [_read_list(path.with_suffix(suffix)) for suffix in (".names", ".labels")]
    if not any(part.labels for part in parts):
        listed = [name for name in LIST_NAMES if name not in _OTHERS]
        parts += [_read_list(path.parent / name) for name in (*listed, *_NAMES)]
    return merge(parts)


def _read_data(path: Path) -> ModelFacts:
    table = find_yaml(path, "names:", "kpt_shape:")
    if table is None or not isinstance(table.get("names"), dict | list):
        return ModelFacts()
    names = read_names(table["names"], f"names in {path}")
    if type(count := table.get("nc", len(names))) is int and count != len(names):
        raise DataError(f"{path} has {len(names)} names, but nc is {str(count)[:20]}", "Correct the file")
    shape, keypoints = table.get("kpt_shape"), None
    if isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape):
        keypoints = (shape[0], shape[1]) if 1 <= shape[0] <= _MOST_KEYPOINTS and shape[1] in (2, 3) else None
    return ModelFacts(
        labels=Fact(names, f"names in {path}"),
        keypoints=Fact(keypoints, f"kpt_shape in {path}") if keypoints else None,
    )


def _read_list(path: Path) -> ModelFacts:
    """Return the names in a file. A file of a familiar name may list something else, and then states nothing."""
    try:
        text = find_text(path, [])
        if text is None:
            return ModelFacts()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # A model may have a single class.
        names = tuple(lines) if len(lines) == 1 and path.suffix != ".json" else load_classes(path).names
        names = check_names(names, str(path))
    except DataError:
        return ModelFacts()
    return ModelFacts(labels=Fact(names, str(path))) if names and all(names) else ModelFacts()


READER = Reader("class-lists", "data.yaml, labels.txt, classes.txt and .names files next to the model", read)
