"""Hold what files state about a model, each fact with its source, and merge the facts of several writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from edgeq.errors import EdgeqError, UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """Hold one stated value, and where it is stated, such as "names in the model's metadata".

    Attributes:
        stated: the value as it is stated.
        source: where it is stated.
        assumed: whether it is only usual for what the source states. A fact that a file states itself replaces it.
        problem: the error to raise when the fact is used, such as a contradiction of two files. A user who gives the
            fact does not use this one, and so does not meet the error.
    """

    stated: T
    source: str
    assumed: bool = False
    problem: EdgeqError | None = field(default=None, compare=False)

    @property
    def value(self) -> T:
        """Return the value.

        Raises:
            EdgeqError: two sources contradict each other, or the source leaves open what edgeq must know.
        """
        if self.problem is not None:
            raise self.problem
        return self.stated


@dataclass(frozen=True)
class ModelFacts:
    """Hold what files state about a model. None means that no file states it.

    Attributes:
        task: task of a family of heads, such as "segment"; see `edgeq_device.answers.family.Family`.
        families: names of families that the file allows, most likely first. Shapes and values must still confirm one.
        preprocess: a preprocessing in plain data, as `edgeq.data.preprocess.load_preprocess` takes it, or the name of
            one that ships with edgeq.
        labels: names of the classes, in the order of the scores.
        keypoints: (number of keypoints, values for each).
        keypoint_names: name of each keypoint.
        thresholds: threshold → number, such as {"confidence": 0.5}.
        hints: parameters of the family, such as {"blank": 0}, which take precedence over those that values show.
        notes: what a user should know, one sentence each, such as that a file names code which edgeq does not run.
    """

    task: Fact[str] | None = None
    families: Fact[tuple[str, ...]] | None = None
    preprocess: Fact[Mapping[str, Any] | str] | None = None
    labels: Fact[tuple[str, ...]] | None = None
    keypoints: Fact[tuple[int, int]] | None = None
    keypoint_names: Fact[tuple[str, ...]] | None = None
    thresholds: Fact[Mapping[str, float]] | None = None
    hints: Fact[Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def stated(self) -> dict[str, Fact[Any]]:
        """Return the facts that a file states, by name."""
        return {f.name: fact for f in fields(self) if isinstance(fact := getattr(self, f.name), Fact)}


@dataclass(frozen=True)
class Exported:
    """Hold what readers need of a model.

    Attributes:
        metadata: the model's metadata_props.
        path: the model's file. Files next to it may state facts.
        outputs: names of the model's outputs.
        size: (width, height) of the model's image input, or None if it fixes none.
        extensions: operators of onnxruntime-extensions in the graph.
        inner: the tensors between which a graph with such operators contains the network, or None.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    path: Path = Path("model.onnx")
    outputs: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    extensions: tuple[str, ...] = ()
    inner: tuple[str, str] | None = None


@dataclass(frozen=True)
class Reader:
    """Read the facts that one writer leaves.

    Attributes:
        name: name of the writer, such as "ultralytics".
        title: what the reader reads, in a few words.
        read: returns the facts of a model. ModelFacts() if the writer left none. It raises DataError if a file that is
            certainly the writer's is damaged.
    """

    name: str
    title: str
    read: Callable[[Exported], ModelFacts]


def merge(parts: Iterable[ModelFacts]) -> ModelFacts:
    """Return the facts of all parts. A stated fact replaces an assumed one. If two parts state different values, the
    fact has a problem that names both sources.
    """
    merged: dict[str, Fact[Any]] = {}
    notes: list[str] = []
    for part in parts:
        for name, fact in part.stated.items():
            merged[name] = _join(name, merged[name], fact) if name in merged else fact
        notes += part.notes
    return ModelFacts(notes=tuple(dict.fromkeys(notes)), **merged)


# The option with which a user gives a fact.
_OPTIONS = {"preprocess": "⟨preprocess⟩", "labels": "⟨classes⟩"}


def _join(name: str, a: Fact[Any], b: Fact[Any]) -> Fact[Any]:
    if a.assumed != b.assumed:
        return b if a.assumed else a
    if a.problem is not None or _comparable(a.stated) == _comparable(b.stated):
        return a
    if b.problem is not None:
        return b
    # Different entries complete each other.
    if name in ("thresholds", "hints") and all(a.stated[key] == b.stated[key] for key in a.stated.keys() & b.stated):
        return Fact({**a.stated, **b.stated}, f"{a.source}, {b.source}", a.assumed)
    text = f"{a.source} and {b.source} state different {name.replace('_', ' ')}{_difference(a.stated, b.stated)}"
    fix = f"Remove one of them, or give the right one with {_OPTIONS.get(name, '⟨head⟩')}"
    return replace(a, problem=UsageError(text, fix))


def _comparable(value: Any) -> Any:
    """Return a value in the form in which two writers agree on it. Only the letter case and the separators of names
    differ between writers.
    """
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return tuple(item.casefold().replace("_", " ").replace("-", " ").strip() or item for item in value)
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if key not in ("name", "title")}
    return value


def _difference(a: Any, b: Any) -> str:
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return f": {a!r} and {b!r}" if isinstance(a, str | float) and isinstance(b, str | float) else ""
    if len(a) != len(b):
        return f": {len(a)} and {len(b)}"
    number = next(i for i, pair in enumerate(zip(_comparable(a), _comparable(b), strict=True)) if pair[0] != pair[1])
    return f": number {number} is {str(a[number])[:40]!r} and {str(b[number])[:40]!r}"
