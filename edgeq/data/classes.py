"""Map the names of folders or labels to the numbers of a model's scores.

Scores have numbers and data have names. A list of classes maps one to the other:

    FILE.txt    one name per line in the order of the scores; "n01440764 tench", "0 tench" and "tench,0" are also read
    FILE.json   {"tench": 0}, {"0": "tench"}, {"0": ["n01440764", "tench"]} or ["tench", …]; also below the key
                class_to_idx, label2id or id2label

Names match without regard to case, and words may be joined by spaces, "_" or "-".
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.data.limits import read_text
from edgeq.errors import DataError
from edgeq.signature import Signature

FORMS = 'one name per line in the order of the scores, or JSON: {"NAME": INDEX}'
# They are tried in this order, and the first file that names every folder decides.
LIST_NAMES = (
    "class_to_idx.json",
    "class_indices.json",
    "imagenet_class_index.json",
    "classes.json",
    "labels.json",
    "classes.txt",
    "class_names.txt",
    "labels.txt",
    "synset.txt",
    "synsets.txt",
    "synset_words.txt",
    "imagenet_classes.txt",
    "config.json",
)
"""Names that tools give to files with classes. edgeq looks for these files next to class folders and next to
the model.
"""
# A WordNet synset is the letter n and eight digits. A ninth digit means that it is another number.
_SYNSET = re.compile(r"n\d{8}(?!\d)")
_WORD = re.compile(r"[\s_\-]+")
_NUMBERED = re.compile(r"^\d+[\s_.\-:]+")
_JSON_KEYS = ("class_to_idx", "label2id", "id2label")
# "__background__" has the key " background ", because `_make_key` turns each run of underscores into a space.
_BACKGROUND = frozenset({"background", " background ", "dummy"})
_IMAGENET = 1000
# One entry with a huge number in an untrusted file must not allocate a tuple of that length.
_MOST_NAMES = 1_000_000


@dataclass(frozen=True)
class Classes:
    """Hold a list of classes.

    Attributes:
        source: the origin of the list, for messages.
        count: number of the model's scores that the list covers, including gaps and scores that are not a class.
        numbers: name in the form that `_make_key` returns → number, or None if two classes have that name.
        names: names of the classes for people, in the order of the scores; "" for a number that is not in the list.
    """

    source: str
    count: int
    numbers: Mapping[str, int | None]
    names: tuple[str, ...] = ()

    def find(self, name: str) -> int | None:
        """Return the number of a class by its name, or None. `name` may be the full name, a text that contains the
        class's synset, or a name after a number.
        """
        synset = _SYNSET.search(name)
        # The full name goes first, because a synset or number inside a name may belong to another class of the list.
        parts = (name, synset[0] if synset else name, _NUMBERED.sub("", name))
        return next((number for part in parts if (number := self.numbers.get(_make_key(part))) is not None), None)

    def number(self, name: str) -> int:
        """Return the number of a class by its name.

        Raises:
            DataError: the list contains no class of that name, or several.
        """
        number = self.find(name)
        if number is None:
            problem = "several classes" if _make_key(name) in self.numbers else "no class"
            raise DataError(
                f"{self.source} has {problem} named {name!r}", "Name every class once, with the names in the data"
            )
        return number


def _make_key(name: str) -> str:
    return _WORD.sub(" ", name.strip().strip("\"'")).casefold()


def _build_classes(source: str, pairs: Iterable[tuple[str, int]]) -> Classes:
    """Return the list of classes made from pairs of a name and a number. A line's full text has priority over the names
    in it.
    """
    numbers: dict[str, int | None] = {}
    parts: dict[str, int | None] = {}
    display_names: dict[int, str] = {}
    for text, number in pairs:
        synset = _SYNSET.match(text)
        name = text[synset.end() :].strip() if synset else text
        display_names[number] = display_names.get(number) or name
        for table, names in ((numbers, [text]), (parts, _split_names(text))):
            for key in {_make_key(name) for name in names}:
                # A name of two classes belongs to none: guessing would give wrong labels without an error.
                table[key] = number if table.get(key, number) == number else None
    count = max(display_names, default=-1) + 1
    ordered = tuple(display_names.get(i, "") for i in range(count)) if count <= _MOST_NAMES else ()
    return Classes(source, count, {**parts, **numbers}, ordered)


def _split_names(text: str) -> list[str]:
    """Return the names in a line: a synset, the text after it, and the parts between commas."""
    synset = _SYNSET.match(text)
    phrase = text[synset.end() :] if synset else text
    return [*([synset[0]] if synset else []), *filter(str.strip, [phrase, *phrase.split(",")])]


@functools.cache
def imagenet() -> Classes:
    """Return the classes of ImageNet-1k, by synset and by WordNet's names."""
    lines = Path(__file__).with_name("imagenet_classes.txt").read_text(encoding="utf-8").split("\n")
    names = [line for line in lines if line and not line.startswith("#")]
    # `strict` refuses a damaged file: one missing line would shift all later classes.
    return _build_classes("ImageNet-1k", zip(names, range(_IMAGENET), strict=True))


def drop_background(classes: Classes, scores: int | None) -> Classes:
    """Return the list without its first class, the background, if the model has one score fewer than the list has
    classes. Otherwise return `classes`.
    """
    first_names = {name for name, number in classes.numbers.items() if number == 0}
    # Both signs are needed. The count alone could be a list with an unused class.
    if scores is None or classes.count != scores + 1 or not first_names & _BACKGROUND:
        return classes
    numbers = {name: None if number is None else number - 1 for name, number in classes.numbers.items() if number != 0}
    return Classes(classes.source, scores, numbers, classes.names[1:])


def score_names(classes: Classes | None, folders: Mapping[str, int], scores: int | None) -> tuple[str, ...]:
    """Return the names of a model's scores, from `classes` or else from class folders. The result is empty if the names
    do not cover all scores.

    If the model has one score more than there are names, its first score is the background.

    Args:
        folders: folder → label.
        scores: number of the model's scores, or None if the number is not known.
    """
    names = classes.names if classes is not None else ()
    if classes is None and folders:
        imagenet_classes, ordered = imagenet(), sorted(folders, key=folders.__getitem__)
        # The folders may hold only some of ImageNet's classes, but the model still scores all of them.
        if all(imagenet_classes.find(name) == number for name, number in folders.items()):
            names = imagenet_classes.names
        elif [folders[name] for name in ordered] == list(range(len(ordered))):
            names = tuple(ordered)
    if scores is not None and len(names) + 1 == scores:
        return ("background", *names)
    return names if scores in (None, len(names)) else ()


def load_classes(source: Any) -> Classes:
    """Return the list of classes that `source` describes: a file, names in the order of the scores, or names with
    numbers.

    Raises:
        DataError: the list cannot be read, or has an unknown form.
    """
    if isinstance(source, Classes):
        return source
    if not isinstance(source, str | Path):
        return _build_classes("the list of classes", _parse_pairs(source, "the list of classes"))
    path = Path(source)
    if not path.is_file():
        raise DataError(f"classes: {path} is not a file", f"Give {FORMS}")
    text = read_text(path, "Keep only the names")
    if path.suffix.lower() == ".json":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}", "Correct the file") from error
        return _build_classes(str(path), _parse_pairs(value, str(path)))
    return _build_classes(str(path), _parse_lines(text, str(path)))


def _parse_pairs(value: Any, location: str) -> list[tuple[str, int]]:
    """Return names with numbers from plain data. The data may map names to numbers or numbers to names."""
    if isinstance(value, Mapping):
        # config.json files of transformers have many keys, and the classes are below one of these.
        value = next((value[key] for key in _JSON_KEYS if isinstance(value.get(key), Mapping | list)), value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(enumerate(value))
    pairs: list[tuple[str, int]] = []
    for key, content in value.items() if isinstance(value, Mapping) else ():
        if isinstance(content, int) and not isinstance(content, bool) and content >= 0:
            pairs.append((str(key), content))
        elif str(key).isascii() and str(key).isdigit():
            names = content if isinstance(content, list) else [content]
            pairs += [(name, int(key)) for name in names if isinstance(name, str)]
    # A list of fewer than two classes is most likely another file with a familiar name.
    if not pairs or len({number for _, number in pairs}) < 2:
        raise DataError(f"{location} lists no classes", f"Give {FORMS}")
    return pairs


def _parse_lines(text: str, location: str) -> list[tuple[str, int]]:
    """Return names with numbers from lines. If every line has a number before or after the name, that number is the
    class's number.
    """
    lines = [line.strip() for line in text.split("\n") if line.strip() and not line.startswith("#")]
    for pattern, number, name in (
        (re.compile(r"(\d{1,9})[\s,:]+(.+)"), 1, 2),
        (re.compile(r"(.*[^\s,:])[\s,:]+(\d{1,9})"), 2, 1),
    ):
        matches = [match for line in lines if (match := pattern.fullmatch(line))]
        # All lines must agree, and no number may occur twice. Otherwise, the numbers are part of the names.
        if len(matches) == len(lines) and len({int(match[number]) for match in matches}) == len(lines) > 1:
            return [(match[name], int(match[number])) for match in matches]
    if len(lines) < 2:
        raise DataError(f"{location} lists {len(lines)} classes", f"Give {FORMS}")
    return [(line, index) for index, line in enumerate(lines)]


def count_scores(signature: Signature) -> int | None:
    """Return the number of a model's class scores, from the shape [N, C] or [N, C, 1, 1] of its only float output.
    Return None if the number is not known.
    """
    shapes = [spec.shape for spec in signature.outputs if spec.dtype.kind == "f"]
    # With several float outputs, edgeq cannot tell which holds the scores.
    if len(shapes) != 1 or shapes[0] is None or len(shapes[0]) < 2 or any(size != 1 for size in shapes[0][2:]):
        return None
    size = shapes[0][1]
    return size if isinstance(size, int) and size > 1 else None


@dataclass(frozen=True)
class ClassFolders:
    """Hold the labels of class sub-folders.

    Attributes:
        numbers: folder → label; empty if the files are not in class folders.
        sorted_names: whether the numbers are only the positions of the folders in sorted order.
        notes: one sentence for each way in which the numbers were found.
    """

    numbers: Mapping[str, int]
    sorted_names: bool = False
    notes: tuple[str, ...] = ()


def number_folders(
    root: Path,
    files: Sequence[Path],
    *,
    classes: Classes | None = None,
    scores: int | None = None,
    model_folders: Sequence[Path] = (),
) -> ClassFolders:
    """Return the labels of sub-folders, if every file is in one of at least two folders below `root`.

    The numbers come from the first of these that applies:

    - `classes`, if given;
    - folder names that are numbers;
    - a list of classes that is stored in the data folder, above it, or in one of the folders `model_folders`, and that
      contains every folder's name;
    - the names of ImageNet, if the model has scores for all its classes;
    - the sorted order of the folders. Folders that contain none of `files` also count, so a class without samples keeps
      its number.

    Raises:
        DataError: `classes` has no number for a folder.
    """
    parts = [path.relative_to(root).parts for path in files]
    if not parts or min(map(len, parts)) < 2:
        return ClassFolders({})
    folders = sorted({part[0] for part in parts})
    # One folder is most likely the data set itself, not a class.
    if len(folders) < 2 and classes is None:
        return ClassFolders({})
    numbered = all(name.isascii() and name.isdigit() for name in folders) and len({int(n) for n in folders}) == len(
        folders
    )
    if classes is not None:
        classes = drop_background(classes, scores)
        listed = [name for name in folders if classes.find(name) is not None]
        # If names are numbers and the list does not know all of them, the numbers are labels by themselves.
        if len(listed) == len(folders) or not numbered:
            return ClassFolders({name: classes.number(name) for name in folders})
    if numbered:
        return ClassFolders({name: int(name) for name in folders})
    # A list next to the data describes the data, so it comes before one next to the model.
    for path in (folder / name for folder in (root, root.parent, *model_folders) for name in LIST_NAMES):
        numbers = _read_numbers(folders, path, scores)
        if numbers:
            return ClassFolders(numbers, notes=(f"labels: the class folders, numbered by {path}",))
    # Folders such as "tench" mean ImageNet only if the model can score it. Some models have an extra background score.
    if scores is None or scores >= _IMAGENET:
        numbers = _match_folders(folders, imagenet())
        if numbers and (all(_SYNSET.search(name) for name in folders) or scores in (_IMAGENET, _IMAGENET + 1)):
            return ClassFolders(numbers, notes=("labels: the class folders, numbered as ImageNet-1k's classes",))
    # A class without samples in this selection still takes a number, or all later classes would shift.
    empty = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    return ClassFolders({name: index for index, name in enumerate(sorted({*folders, *empty}))}, sorted_names=True)


def _read_numbers(folders: Sequence[str], path: Path, scores: int | None) -> Mapping[str, int]:
    """Return the numbers that the list of classes at `path` gives to the folders. Return nothing if the file is not a
    list of classes or if the list lacks a folder.
    """
    if not path.is_file():
        return {}
    try:
        return _match_folders(folders, drop_background(load_classes(path), scores))
    except DataError:  # a file of this name may list something else
        return {}


def _match_folders(folders: Sequence[str], classes: Classes) -> Mapping[str, int]:
    numbers = {name: number for name in folders if (number := classes.find(name)) is not None}
    # Two folders with one number would merge two classes.
    return numbers if len(numbers) == len(folders) == len(set(numbers.values())) else {}


def empty_class_note(root: Path, files: Sequence[Path], classes: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note on the class folders that contain none of the files. Return nothing if there are no such
    folders.
    """
    if not classes:
        return ()
    empty = sorted(set(classes) - {path.relative_to(root).parts[0] for path in files})
    if not empty:
        return ()
    some = ", ".join(empty[:3]) + (" …" if len(empty) > 3 else "")
    return (f"{root}: no samples of {len(empty)} of {len(classes)} class folders ({some}); they keep their numbers",)


def stray_note(root: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on stray files, or nothing if there are none. Stray files are next to folders that would be class
    folders if these files were not there.
    """
    stray_names = [path.name for path in files if path.parent == root]
    within = {path.relative_to(root).parts[0] for path in files if root not in (path, path.parent)}
    if not stray_names or len(within) < 2:
        return ()
    remainder = f" and {len(stray_names) - 1} more" if len(stray_names) > 1 else ""
    return (f"{root}: the sub-folders give no labels, because {stray_names[0]}{remainder} is in none of them",)
