"""Hold what files state about a model, each fact with its source, and merge the facts of several writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from edgeq.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """Hold one stated value, and where it is stated, such as "names in the model's metadata"."""

    value: T
    source: str


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
class Reader:
    """Read the facts that one writer leaves.

    Attributes:
        name: name of the writer, such as "ultralytics".
        title: what the reader reads, in a few words.
        read: returns the facts of a model, from its metadata (key → text) and its path. ModelFacts() if the writer left
            none. It raises DataError if a file that is certainly the writer's is damaged.
    """

    name: str
    title: str
    read: Callable[[Mapping[str, str], Path], ModelFacts]


def merge(parts: Iterable[ModelFacts]) -> ModelFacts:
    """Return the facts of all parts.

    Raises:
        UsageError: two parts state different values for one fact; the message names both sources.
    """
    merged: dict[str, Fact[Any]] = {}
    notes: list[str] = []
    for part in parts:
        for name, fact in part.stated.items():
            other = merged.get(name)
            if other is not None and other.value != fact.value:
                raise UsageError(
                    f"{other.source} and {fact.source} state different {name.replace('_', ' ')}",
                    "Remove one of them, or give the right one yourself",
                )
            merged[name] = other or fact
        notes += part.notes
    return ModelFacts(notes=tuple(notes), **merged)
