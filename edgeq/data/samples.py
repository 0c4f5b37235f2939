"""Read samples for a model from files or Python objects, one at a time, and check each sample against the model.

samples = open_samples("calib/", signature, preprocess="imagenet", count=100)
for sample in samples:
    session.run(None, sample.inputs)

Samples can also be cut into shards for workers. If workers can read the data themselves, a shard only refers to the
samples. Otherwise it contains them. The boundaries of shards depend only on the samples, not on the number of workers.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np

from edgeq.data.array_files import ArrayFiles
from edgeq.data.classes import Classes, imagenet, load_classes, score_count, score_names, without_background
from edgeq.data.fit import check_shapes, fit_inputs, fixed_batch, rows_of
from edgeq.data.labels import LabelOf, Labels, load_labels_from
from edgeq.data.open_source import Data, OpenedSource, check_selection, open_source
from edgeq.data.preprocess import Preprocess
from edgeq.data.records import Array, FileList, Picture, Record, Sample, plain_label
from edgeq.distributed.workers import Workers
from edgeq.errors import DataError, UsageError
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.records import plain


def rebatch(samples: Iterable[Sample], size: int) -> Iterator[Sample]:
    """Yield samples of exactly `size` rows.

    A sample that has exactly `size` rows is yielded unchanged, after any rows that are still waiting. Other samples are
    cut into rows, which are gathered in order. The last batch repeats its last row until it is full; `context["valid"]`
    is the number of real rows. A batch has only one value of each scalar input, so only rows with equal scalars are
    gathered. A gathered sample (size above 1) has the tuple of its rows' labels as its label, and their contexts as
    `context["rows"]`.
    """
    waiting: list[Sample] = []
    for sample in samples:
        rows = rows_of(sample.inputs)
        if rows == size:
            if waiting:
                yield _gather(waiting, size)
                waiting = []
            yield sample
            continue
        for row in range(rows):
            inputs = {k: v[row : row + 1] if v.ndim else v for k, v in sample.inputs.items()}
            name = sample.name if rows == 1 else f"{sample.name} row {row}"
            if waiting and any(not v.ndim and v != inputs[k] for k, v in waiting[0].inputs.items()):
                yield _gather(waiting, size)
                waiting = []
            waiting.append(replace(sample, name=name, inputs=inputs))
            if len(waiting) == size:
                yield _gather(waiting, size)
                waiting = []
    if waiting:
        yield _gather(waiting, size)


def batches(rows: int, size: int) -> int:
    """Return the number of batches of `size` rows that are needed for `rows` rows."""
    return -(-rows // size)


def _gather(rows: list[Sample], size: int) -> Sample:
    first = rows[0]
    if size == 1:
        return first
    full = rows + [rows[-1]] * (size - len(rows))
    inputs = {k: np.concatenate([row.inputs[k] for row in full]) if v.ndim else v for k, v in first.inputs.items()}
    labels: tuple[Any, ...] = tuple(row.label for row in rows)
    name = first.name if len(rows) == 1 else f"{first.name} … {rows[-1].name}"
    context = {"rows": tuple(row.context for row in rows), "valid": len(rows)}
    return replace(first, name=name, inputs=inputs, label=labels, context=context)


__all__ = ["Sample", "Samples", "SourceSamples", "open_samples"]


@runtime_checkable
class Samples(Protocol):
    """Iterate over samples any number of times. Each sample is loaded when the iterator reaches it.

    Attributes:
        source: the origin of the samples, for people.
    """

    @property
    def source(self) -> str:
        """Return the origin of the samples, for people."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sample]: ...
    def digest(self) -> str:
        """Return the SHA-256 (hex) of the contents, the selection and the preprocessing."""


@dataclass(frozen=True)
class SourceSamples(Displayed):
    """Make samples from a reader's records.

    Attributes:
        notes: decisions and findings made when the samples were opened; the command line prints them.
        preprocess: the preprocessing, or None if the data are already model inputs.
        hold: largest total size of the inputs, in bytes, for which all samples stay in memory after the first pass.
            Decoding them again often takes longer than running the model.
        classes: list of classes that maps class names in labels to numbers, or None to keep the names.
        score_names: names of the model's scores from a list of classes or from class folders, or empty.
    """

    source: str
    signature: Signature
    opened: OpenedSource
    selection: Sequence[int]
    labels: LabelOf | None
    hold: int = 0
    classes: Classes | None = None
    score_names: tuple[str, ...] = ()

    @property
    def preprocess(self) -> Preprocess | None:
        """Return the preprocessing of raw items, or None if the data are already model inputs."""
        return self.opened.preprocess

    @property
    def notes(self) -> tuple[str, ...]:
        """Return one sentence for each decision and finding made when the samples were opened."""
        return self.opened.notes

    def __len__(self) -> int:
        taken = self._records_each
        return self._counted if taken is None else batches(len(self.selection), taken)

    @property
    def _records_each(self) -> int | None:
        """Return the number of records per sample, or None if this number is not known before reading."""
        size = fixed_batch(self.signature)
        rows = self.opened.records.rows
        if self.preprocess is not None and not self.opened.records.prepared:
            rows = "one" if self.preprocess.one_row and rows == "one" else "unknown"
        if size is None or rows == "exact" or (rows == "one" and size == 1):
            return 1
        scalars = any(spec.shape == () for spec in self.signature.inputs)
        return size if rows == "one" and not scalars else None

    @property
    def readable(self) -> bool:
        """Return whether another process can read any part of the samples. This is possible if the samples are files
        and it is known which records each sample consists of.
        """
        return self.opened.folder is not None and self._records_each is not None

    def part(self, start: int, stop: int) -> SourceSamples | None:
        """Return samples `start` to `stop` (exclusive), or None if it is not known which records they consist of."""
        taken = self._records_each
        return None if taken is None else self.records(range(start * taken, stop * taken))

    def chosen(self, places: Sequence[int]) -> SourceSamples | None:
        """Return the samples at `places`, which ascend, or None if it is not known which records they consist of."""
        if self._records_each != 1 or self._held is not None:
            return None
        return replace(self, selection=[self.selection[place] for place in places])

    def without(self, files: Collection[Path]) -> SourceSamples:
        """Return the samples whose files are not in `files`."""
        of = self.opened.files()
        return replace(self, selection=[index for index in self.selection if of[index] not in files])

    def files(self) -> list[Path]:
        """Return the file of each chosen record, or an empty list if the records do not have one file each."""
        of = self.opened.files()
        return [of[index] for index in self.selection] if of else []

    def records(self, chosen: range) -> SourceSamples:
        """Return the samples that consist of the records in the range `chosen`."""
        return replace(self, selection=self.selection[chosen.start : chosen.stop])

    @functools.cached_property
    def _counted(self) -> int:
        # If the model fixes the batch size, edgeq must read the records to find out how many rows they have.
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Sample]:
        return self._read() if self._held is None else iter(self._held)

    def _read(self) -> Iterator[Sample]:
        """Yield all samples. If they are small enough, they are kept for the next pass."""
        size = fixed_batch(self.signature)
        records = self.opened.records.read(self.selection)
        samples = (self._sample(i, record) for i, record in zip(self.selection, records, strict=True))
        held: list[Sample] = []
        left = self.hold
        for sample in samples if size is None else rebatch(samples, size):
            left -= sum(array.nbytes for array in sample.inputs.values())
            if left >= 0:
                held.append(sample)
            else:
                held.clear()
            yield sample
        if held:
            self.__dict__["_held"] = held

    @functools.cached_property
    def _held(self) -> list[Sample] | None:
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_held"}

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the files of the chosen samples, the selection, and the preprocessing."""
        digest = hashlib.sha256()
        self.opened.records.update(digest, self.selection)
        steps = plain(self.preprocess) if self.preprocess is not None else {}
        steps = {key: value for key, value in steps.items() if key not in ("name", "title")}
        digest.update(json.dumps([steps, repr(self.selection)], sort_keys=True).encode())
        return digest.hexdigest()

    def _sample(self, index: int, record: Record) -> Sample:
        context = dict(record.context)
        try:
            inputs = self._prepare(record, context)
        except DataError as error:
            if error.problem.startswith(record.name):
                raise
            raise DataError(f"{record.name}: {error.problem}", error.fix) from error
        label = self.labels(index, record) if self.labels is not None else record.label
        return Sample(record.name, inputs, self._numbered(plain_label(label)), context)

    def _numbered(self, label: Any) -> Any:
        """Return the class number of a label that is a name, and any other label unchanged."""
        if not isinstance(label, str) or self.classes is None:
            return label
        found = self.classes.find(label)
        return label if found is None else found

    def _prepare(self, record: Record, context: dict[str, Any]) -> Mapping[str, Array]:
        inputs: dict[str, Array] = {}
        specs = {spec.name: spec for spec in self.signature.inputs}
        prepared = self.preprocess is None or self.opened.records.prepared
        for name, raw in record.raw.items():
            if prepared or self.preprocess is None:
                inputs[name] = raw
                continue
            spec = specs.get(name)
            untouched = self.preprocess.source.input not in (None, name)
            if untouched or (spec is not None and spec.shape == ()):
                inputs[name] = raw.pixels if isinstance(raw, Picture) else raw
                continue
            done = self.preprocess(raw, spec)
            context.update(done.context)
            if isinstance(done.array, Mapping):
                inputs.update(done.array)
            elif name:
                inputs[name] = done.array
            else:
                raise DataError(
                    f"the model takes {len(specs)} inputs and the preprocessing gives one",
                    f"Say which: input={next(iter(specs))}, or return a dict from a function",
                )
        fitted = fit_inputs(record.name, inputs, self.signature, prepared=prepared)
        check_shapes(record.name, fitted, self.signature)
        return fitted


@dataclass(frozen=True)
class Subset(Displayed):
    """Hold a selection from other samples. `selection` contains the numbers of the selected samples in
    ascending order.
    """

    samples: Samples
    selection: Sequence[int]

    @property
    def source(self) -> str:
        """Return the origin of the samples, for people."""
        return self.samples.source

    @property
    def preprocess(self) -> Preprocess | None:
        """Return the preprocessing of raw items, or None if the data are already model inputs."""
        return getattr(self.samples, "preprocess", None)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Return the names of the model's scores, or an empty tuple if the names are not known."""
        return getattr(self.samples, "score_names", ())

    def __len__(self) -> int:
        return len(self.selection)

    def __iter__(self) -> Iterator[Sample]:
        chosen = self.selection if isinstance(self.selection, range) else frozenset(self.selection)
        return itertools.compress(self.samples, (number in chosen for number in range(self.selection[-1] + 1)))

    def digest(self) -> str:
        """Return the SHA-256 (hex) of two things: the digest of all samples, and the selection."""
        digest = hashlib.sha256()
        digest.update(f"{self.samples.digest()} {self.selection!r}".encode())
        return digest.hexdigest()


class SampleOptions(TypedDict, total=False):
    """List the arguments that choose among the samples of a source; see `open_samples`."""

    preprocess: Any
    count: int | None
    start: int
    stride: int


def open_samples(
    source: str | Path | Data | Samples | Iterable[Any] | Any,
    signature: Signature,
    *,
    preprocess: Preprocess | str | Path | Mapping[str, Any] | None = None,
    labels: Any = None,
    count: int | None = None,
    start: int = 0,
    stride: int = 1,
    model: str | Path | None = None,
    progress: Progress = SILENT,
) -> Samples:
    """Open data as samples of a model. Opening reads only headers and names.

    Args:
        source: a file, a folder, a pattern ("data/val_*.npz"), samples that are already open, an iterable, a function
            that returns an iterable, an object with `get_next()`, or `Data`. The items of an iterable are dicts of
            arrays, arrays, tuples of arrays, paths of images, or pairs (inputs, label). The preprocessing, labels and
            count in `Data` override the arguments of the same names.
        signature: signature of the model: `edgeq.inspect(MODEL).signature`.
        preprocess: a preprocessing, as in `load_preprocess`. With None, edgeq looks for `preprocess.toml` in the data
            folder, then next to the model. If there is no such file, arrays and protobufs are model inputs, and images
            are an error.
        labels: source of the labels; see `edgeq.data.labels`.
        count, start, stride: selection of records. edgeq takes every `stride`-th record from `start`. If these are more
            than `count`, it uses `count` of them, spread evenly over class folders and files.
        model: the model file; `preprocess.toml` may be next to it.
        progress: object that receives notes on findings and decisions.

    Raises:
        DataError: the data is missing, cannot be read or does not fit the model; the message names the file and the
            fix.
        UsageError: there is no signature, or a count, start or stride is not a whole number or is too small.
    """
    if not isinstance(signature, Signature):
        raise UsageError(
            f"the signature is given as {type(signature).__name__}",
            "Give the model's signature: inspect(MODEL).signature",
        )
    role = None
    while isinstance(source, Data):
        if isinstance(source.source, Samples) and not (source.preprocess is None and source.labels is None):
            raise UsageError(
                "samples that are opened already keep their preprocessing and labels", "Name both when they are opened"
            )
        role = source.role
        source, preprocess, labels, count = source.over(preprocess, labels, count)
    check_selection(start, stride, count)
    if isinstance(source, Samples):
        if (start, stride, count) == (0, 1, None):
            return source
        return Subset(source, _select(len(source), start, stride, count, source.source, ()))
    given = labels if isinstance(labels, Labels) else Labels(labels)
    classes = load_classes(given.classes) if given.classes is not None else None
    opened = open_source(source, signature, preprocess, Path(model) if model is not None else None, classes, role)
    total = len(opened.records)
    if total == 0:
        raise DataError(f"{opened.name} holds no samples", "Give at least one")
    lookup = _labels(opened, given.where, total)
    chosen = _select(total, start, stride, count, opened.name, opened.groups())
    folders = opened.records.classes if isinstance(opened.records, FileList | ArrayFiles) else {}
    samples = SourceSamples(
        opened.name,
        signature,
        opened,
        chosen,
        lookup,
        classes=_known_classes(classes, signature),
        score_names=score_names(classes, folders, score_count(signature)),
    )
    for note in samples.notes:
        progress.note(note)
    size = fixed_batch(signature)
    if size is not None and size > 1 and opened.records.rows == "one":
        remaining = len(samples.selection) % size
        tail = f"; the last batch has {remaining} and is filled by repeating its last sample" if remaining else ""
        progress.note(f"{len(samples.selection)} samples in batches of {size}, as the model fixes it{tail}")
    return samples


def _known_classes(classes: Classes | None, signature: Signature) -> Classes | None:
    """Return the classes that labels can name. These are the given classes, or else the classes of ImageNet if the
    model has scores for all of them.
    """
    scores = score_count(signature)
    if classes is not None:
        return without_background(classes, scores)
    return imagenet() if scores is not None and scores >= imagenet().count else None


def _labels(opened: OpenedSource, labels: Any, total: int) -> LabelOf | None:
    if labels is None:
        named = opened.preprocess.source.labels if opened.preprocess is not None else None
        return load_labels_from(named, opened.folder, total, inside=opened.sidecar) if named is not None else None
    if isinstance(labels, np.ndarray) and labels.ndim != 1:
        raise DataError(f"the labels have shape {list(labels.shape)}", "Give one label per sample")
    return load_labels_from(labels, opened.folder, total)


def _select(total: int, start: int, stride: int, count: int | None, name: str, groups: Sequence[Any]) -> Sequence[int]:
    """Return the numbers of the chosen records, ascending. `groups` is empty or contains the class of each record."""
    chosen = range(start, total, stride)
    if not chosen:
        raise DataError(f"{name} holds {total} samples, none from {start} on", "Start earlier")
    if count is None or count >= len(chosen):
        return chosen
    return [chosen[place] for place in spread(len(chosen), count, [groups[i] for i in chosen] if groups else ())]


def spread(total: int, count: int, groups: Sequence[Any] = ()) -> list[int]:
    """Return `count` of the places 0 to `total` - 1, in ascending order. They are spread evenly over the groups and
    within each group.

    If a group has fewer places than its share, all its places are used, and the other groups share the rest. If there
    are more groups than `count`, the groups that contribute a place are also spread evenly.

    Args:
        groups: the group of each place; if empty, all places are in one group.
    """
    members: dict[Any, list[int]] = {}
    for place in range(min(total, len(groups)) if groups else total):
        members.setdefault(groups[place] if groups else None, []).append(place)
    shares = dict.fromkeys(members, 0)
    left, short = min(count, total), list(members)
    while left:
        each, remainder = divmod(left, len(short))
        least = [group for group in short if shares[group] == min(shares[other] for other in short)]
        others = [group for group in short if group not in least]
        extra = {least[place] for place in places(len(least), min(remainder, len(least)))}
        extra |= {others[place] for place in places(len(others), remainder - len(extra))}
        for group in short:
            taken = min(each + (group in extra), len(members[group]) - shares[group])
            shares[group] += taken
            left -= taken
        short = [group for group in short if shares[group] < len(members[group])]
    return sorted(own[place] for group, own in members.items() for place in places(len(own), shares[group]))


def places(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced places from 0 to `total` - 1, beginning with 0."""
    return [place * total // count for place in range(count)]


def first(samples: Samples, count: int) -> Samples:
    """Return the samples of the first `count` records, for readers that go through the data in parts."""
    if isinstance(samples, SourceSamples):
        return samples.records(range(count))
    return Subset(samples, range(min(count, len(samples))))


def spread_over(samples: Samples, count: int) -> Samples:
    """Return `count` samples that are spread over all samples, because data are often sorted by class. If there are not
    more than `count`, return all.
    """
    if count >= len(samples):
        return samples
    return chosen_of(samples, places(len(samples), count))


def chosen_of(samples: Samples, numbers: Sequence[int]) -> Samples:
    """Return the samples with these numbers, which ascend."""
    part = samples.chosen(numbers) if isinstance(samples, SourceSamples) else None
    return part if part is not None else Subset(samples, numbers)


# Make enough shards that workers do not wait long for the last one, but few enough that merging is cheap.
_SHARDS, _LEAST, _MOST = 16, 8, 512
_STREAMED_BYTES = 1 << 23


@dataclass(frozen=True)
class Shard:
    """Describe samples `start` to `stop` (exclusive). If the samples are streamed, the shard contains them."""

    start: int
    stop: int
    samples: tuple[Sample, ...] | None = None

    def __str__(self) -> str:
        return f"samples {self.start} to {self.stop - 1}"

    def read(self, reference: SourceSamples | None) -> Iterator[Sample]:
        """Yield the samples in a worker. `reference` is the `reference` of the `Sharded` that made the shard."""
        if self.samples is not None:
            yield from self.samples
            return
        part = reference.part(self.start, self.stop) if reference is not None else None
        assert part is not None, "samples without a reference are streamed"
        yield from part


class Sharded:
    """Cut samples into shards for `workers`. If `count` is given, use at most that many samples.

    Attributes:
        total: number of samples.
        reference: the samples, which workers read themselves. It is None if the samples are sent to the workers
            instead, because they come from Python or because not all workers see the same files.
    """

    def __init__(self, samples: Samples, workers: Workers, count: int | None = None) -> None:
        self._samples = samples
        self.total = len(samples) if count is None else min(count, len(samples))
        self.reference: SourceSamples | None = None
        if (
            isinstance(samples, SourceSamples)
            and samples.readable
            and workers.everywhere(reads_the_same, samples, fingerprint(samples))
        ):
            self.reference = samples

    def shards(self, first: int = 0) -> Iterator[Shard]:
        """Yield the shards of all samples from `first` on."""
        size = min(_MOST, max(_LEAST, -(-self.total // _SHARDS)))
        if self.reference is not None:
            for start in range(first, self.total, size):
                yield Shard(start, min(start + size, self.total))
            return
        remaining = itertools.islice(iter(self._samples), first, self.total)
        start = first
        for sample in remaining:
            held = sum(array.nbytes for array in sample.inputs.values())
            fitting = max(1, min(size, _STREAMED_BYTES // max(1, held)))
            part = (sample, *itertools.islice(remaining, fitting - 1))
            yield Shard(start, start + len(part), part)
            start += len(part)


def fingerprint(samples: SourceSamples) -> str:
    """Return a digest of the files of the first, the middle and the last sample, and of the number of records."""
    total = len(samples.selection)
    parts = [samples.records(range(at, at + 1)).digest() for at in sorted({0, total // 2, total - 1})]
    return " ".join([str(len(samples.opened.records)), *parts])


def reads_the_same(samples: SourceSamples, expected: str) -> bool:
    """Return whether this worker process reads the same samples as the process that sent `samples`."""
    try:
        return fingerprint(samples) == expected
    except (DataError, OSError):
        return False
