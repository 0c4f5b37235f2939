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
from edgeq_device.answers.rows import SIZE_INPUTS
from edgeq_device.answers.sizes import fill

from edgeq.data.array_files import ArrayFiles
from edgeq.data.classes import Classes, count_scores, drop_background, imagenet, load_classes, score_names
from edgeq.data.files import ImageFiles
from edgeq.data.fit import check_shapes, count_rows, fit_inputs, fixed_batch
from edgeq.data.held_samples import HeldSamples
from edgeq.data.images import Array, Picture, find_frame
from edgeq.data.labels import LabelOf, Labels, load_labels_from
from edgeq.data.open_source import Data, OpenedSource, check_selection, open_source
from edgeq.data.preprocess import Preprocess
from edgeq.data.records import FileList, Record
from edgeq.data.sample import Sample, plain_label
from edgeq.data.source_options import SourceOptions
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
        rows = count_rows(sample.inputs)
        # Waiting rows go first, so that the order of the samples stays the order of the data.
        if rows == size:
            if waiting:
                yield _gather(waiting, size)
                waiting = []
            yield sample
            continue
        for row in range(rows):
            # A slice keeps the batch axis. Scalars have no row of their own and go to every row.
            inputs = {k: v[row : row + 1] if v.ndim else v for k, v in sample.inputs.items()}
            name = sample.name if rows == 1 else f"{sample.name} row {row}"
            # One batch has only one value of a scalar, so a row with another value begins a new batch.
            if waiting and any(not v.ndim and v != inputs[k] for k, v in waiting[0].inputs.items()):
                yield _gather(waiting, size)
                waiting = []
            waiting.append(replace(sample, name=name, inputs=inputs))
            if len(waiting) == size:
                yield _gather(waiting, size)
                waiting = []
    if waiting:
        yield _gather(waiting, size)


def count_batches(rows: int, size: int) -> int:
    """Return the number of batches of `size` rows that are needed for `rows` rows."""
    return -(-rows // size)


def _gather(rows: list[Sample], size: int) -> Sample:
    first_row = rows[0]
    if size == 1:
        return first_row
    # The last real row is repeated, because the model fixes the batch size and zeros could be values that it never saw.
    full = rows + [rows[-1]] * (size - len(rows))
    inputs = {k: np.concatenate([row.inputs[k] for row in full]) if v.ndim else v for k, v in first_row.inputs.items()}
    labels: tuple[Any, ...] = tuple(row.label for row in rows)
    name = first_row.name if len(rows) == 1 else f"{first_row.name} … {rows[-1].name}"
    context = {"rows": tuple(row.context for row in rows), "valid": len(rows)}
    return replace(first_row, name=name, inputs=inputs, label=labels, context=context)


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
        hold: a folder in which the inputs are held after the first pass, unless they are too many; None holds none.
        classes: list of classes that maps class names in labels to numbers, or None to keep the names.
        score_names: names of the model's scores from a list of classes or from class folders, or empty.
    """

    source: str
    signature: Signature
    opened_source: OpenedSource
    selection: Sequence[int]
    labels: LabelOf | None
    hold: Path | None = None
    classes: Classes | None = None
    score_names: tuple[str, ...] = ()

    @property
    def preprocess(self) -> Preprocess | None:
        """Return the preprocessing of raw items, or None if the data are already model inputs."""
        return self.opened_source.preprocess

    @property
    def notes(self) -> tuple[str, ...]:
        """Return one sentence for each decision and finding made when the samples were opened."""
        return self.opened_source.notes

    def __len__(self) -> int:
        per_sample = self._records_each
        return self._sample_count if per_sample is None else count_batches(len(self.selection), per_sample)

    @property
    def _records_each(self) -> int | None:
        """Return the number of records per sample, or None if this number is not known before reading."""
        size = fixed_batch(self.signature)
        rows = self.opened_source.records.rows
        # A step may make several rows of one record, such as windows over time, and then the count is known only after
        # it ran.
        if self.preprocess is not None and not self.opened_source.records.prepared:
            rows = "one" if self.preprocess.one_row and rows == "one" else "unknown"
        if size is None or rows == "exact" or (rows == "one" and size == 1):
            return 1
        # Rows with different scalars do not share a batch, so the number of batches depends on the values.
        scalars = any(spec.shape == () for spec in self.signature.inputs)
        return size if rows == "one" and not scalars else None

    @property
    def readable(self) -> bool:
        """Return whether another process can read any part of the samples. This is possible if the samples are files
        and it is known which records each sample consists of.
        """
        return self.opened_source.folder is not None and self._records_each is not None

    def part(self, start: int, stop: int) -> SourceSamples | None:
        """Return samples `start` to `stop` (exclusive), or None if it is not known which records they consist of."""
        per_sample = self._records_each
        return None if per_sample is None else self.records(range(start * per_sample, stop * per_sample))

    def select(self, places: Sequence[int]) -> SourceSamples | None:
        """Return the samples at `places`, which ascend, or None if it is not known which records they consist of."""
        # The cached samples are faster than reading a selection again, so the caller filters those instead.
        if self._records_each != 1 or self._cached_samples is not None:
            return None
        return replace(self, selection=[self.selection[place] for place in places])

    def without(self, files: Collection[Path]) -> SourceSamples:
        """Return the samples whose files are not in `files`."""
        of = self.opened_source.files()
        return replace(self, selection=[index for index in self.selection if of[index] not in files])

    def files(self) -> list[Path]:
        """Return the file of each chosen record, or an empty list if the records do not have one file each."""
        of = self.opened_source.files()
        return [of[index] for index in self.selection] if of else []

    def prepared_by(self, preprocess: Preprocess) -> SourceSamples | None:
        """Return the same images with another preprocessing, or None if it could choose other records."""
        if not isinstance(self.opened_source.records, ImageFiles) or preprocess.source != SourceOptions():
            return None
        return replace(self, opened_source=replace(self.opened_source, preprocess=preprocess))

    def records(self, span: range) -> SourceSamples:
        """Return the samples that consist of the records in the range `span`."""
        return replace(self, selection=self.selection[span.start : span.stop])

    @functools.cached_property
    def _sample_count(self) -> int:
        # If the model fixes the batch size, edgeq must read the records to find out how many rows they have.
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Sample]:
        return self._read_samples() if self._cached_samples is None else iter(self._cached_samples)

    def _read_samples(self) -> Iterator[Sample]:
        """Yield all samples. If they are small enough, they are held for the next pass."""
        size = fixed_batch(self.signature)
        records = self.opened_source.records.read_records(self.selection)
        samples = (self._make_sample(i, record) for i, record in zip(self.selection, records, strict=True))
        cache = HeldSamples(self.hold) if self.hold is not None else None
        for sample in samples if size is None else rebatch(samples, size):
            # Once a sample does not fit, no sample is held: a partial cache would help no pass.
            if cache is not None and not cache.add(sample):
                cache = None
            yield sample
        # The cache is complete only here, after the last sample. An iteration that stops early leaves no trace.
        if cache:
            # The dataclass is frozen, so the cache goes where cached_property keeps its value.
            self.__dict__["_cached_samples"] = cache

    @functools.cached_property
    def _cached_samples(self) -> HeldSamples | None:
        return None

    def __getstate__(self) -> dict[str, Any]:
        # Workers read the files themselves. Sending cached samples to them would copy the whole data set, and the
        # folder may be on another machine.
        return {key: value for key, value in self.__dict__.items() if key != "_cached_samples"} | {"hold": None}

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the files of the chosen samples, the selection, and the preprocessing."""
        digest = hashlib.sha256()
        self.opened_source.records.update(digest, self.selection)
        steps = plain(self.preprocess) if self.preprocess is not None else {}
        # The name and title of a preprocessing do not change the values, so renaming it must not invalidate statistics.
        steps = {key: value for key, value in steps.items() if key not in ("name", "title")}
        digest.update(json.dumps([steps, repr(self.selection)], sort_keys=True).encode())
        return digest.hexdigest()

    def _make_sample(self, index: int, record: Record) -> Sample:
        context = dict(record.context)
        try:
            inputs = self._prepare(record, context)
        except DataError as error:
            # The message already names the record if a check of the record raised it.
            if error.problem.startswith(record.name):
                raise
            raise DataError(f"{record.name}: {error.problem}", error.fix) from error
        label = self.labels(index, record) if self.labels is not None else record.label
        return Sample(record.name, inputs, self._number_label(plain_label(label)), context)

    def _number_label(self, label: Any) -> Any:
        """Return the class number of a label that is a name, and any other label unchanged."""
        if not isinstance(label, str) or self.classes is None:
            return label
        number = self.classes.find(label)
        return label if number is None else number

    def _prepare(self, record: Record, context: dict[str, Any]) -> Mapping[str, Array]:
        inputs: dict[str, Array] = {}
        specs = {spec.name: spec for spec in self.signature.inputs}
        prepared = self.preprocess is None or self.opened_source.records.prepared
        for name, raw in record.raw.items():
            if prepared or self.preprocess is None:
                inputs[name] = raw
                continue
            spec = specs.get(name)
            # The preprocessing names the one input that it is for. Other inputs and scalars pass as they are.
            untouched = self.preprocess.source.input not in (None, name)
            if untouched or (spec is not None and spec.shape == ()):
                inputs[name] = raw.pixels if isinstance(raw, Picture) else raw
                continue
            prepared_item = self.preprocess(raw, spec)
            context.update(prepared_item.context)
            if isinstance(prepared_item.array, Mapping):
                inputs.update(prepared_item.array)
            elif name:
                inputs[name] = prepared_item.array
            else:
                raise DataError(
                    f"the model takes {len(specs)} inputs and the preprocessing gives one",
                    f"Say which: input={next(iter(specs))}, or return a dict from a function",
                )
        frame = find_frame(context)
        for name, kind in SIZE_INPUTS.items():
            if frame is not None and name in specs and name not in inputs:
                inputs[name] = fill(kind, frame).astype(specs[name].dtype)
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
        numbers = self.selection if isinstance(self.selection, range) else frozenset(self.selection)
        # Readers go through the data in order, and the last selected sample ends the pass.
        return itertools.compress(self.samples, (number in numbers for number in range(self.selection[-1] + 1)))

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
    # A `Data` may hold another `Data`. The outer one already replaced the arguments that the inner one lacks.
    while isinstance(source, Data):
        if isinstance(source.source, Samples) and not (source.preprocess is None and source.labels is None):
            raise UsageError(
                "samples that are opened already keep their preprocessing and labels", "Name both when they are opened"
            )
        role = source.role
        source, preprocess, labels, count = source.over(preprocess, labels, count)
    check_selection(start, stride, count)
    if isinstance(source, Samples):
        # Samples that are used whole need no wrapper, so workers can still read them by their files.
        if (start, stride, count) == (0, 1, None):
            return source
        return Subset(source, _select(len(source), start, stride, count, source.source, ()))
    label_options = labels if isinstance(labels, Labels) else Labels(labels)
    classes = load_classes(label_options.classes) if label_options.classes is not None else None
    opened_source = open_source(
        source, signature, preprocess, Path(model) if model is not None else None, classes, role
    )
    total = len(opened_source.records)
    if total == 0:
        raise DataError(f"{opened_source.name} holds no samples", "Give at least one")
    lookup = _choose_labels(opened_source, label_options.source, total)
    selection = _select(total, start, stride, count, opened_source.name, opened_source.groups())
    folders = opened_source.records.classes if isinstance(opened_source.records, FileList | ArrayFiles) else {}
    samples = SourceSamples(
        opened_source.name,
        signature,
        opened_source,
        selection,
        lookup,
        classes=_choose_classes(classes, signature),
        score_names=score_names(classes, folders, count_scores(signature)),
    )
    for note in samples.notes:
        progress.note(note)
    size = fixed_batch(signature)
    # The user should learn that the last batch is padded, because its repeated rows cost time.
    if size is not None and size > 1 and opened_source.records.rows == "one":
        remaining = len(samples.selection) % size
        tail = f"; the last batch has {remaining} and is filled by repeating its last sample" if remaining else ""
        progress.note(f"{len(samples.selection)} samples in batches of {size}, as the model fixes it{tail}")
    return samples


def _choose_classes(classes: Classes | None, signature: Signature) -> Classes | None:
    """Return the classes that labels can name. These are the given classes, or else the classes of ImageNet if the
    model has scores for all of them.
    """
    scores = count_scores(signature)
    if classes is not None:
        return drop_background(classes, scores)
    return imagenet() if scores is not None and scores >= imagenet().count else None


def _choose_labels(opened_source: OpenedSource, labels: Any, total: int) -> LabelOf | None:
    if labels is None:
        named = opened_source.preprocess.source.labels if opened_source.preprocess is not None else None
        return (
            load_labels_from(named, opened_source.folder, total, inside=opened_source.sidecar)
            if named is not None
            else None
        )
    if isinstance(labels, np.ndarray) and labels.ndim != 1:
        raise DataError(f"the labels have shape {list(labels.shape)}", "Give one label per sample")
    return load_labels_from(labels, opened_source.folder, total)


def _select(total: int, start: int, stride: int, count: int | None, name: str, groups: Sequence[Any]) -> Sequence[int]:
    """Return the numbers of the chosen records, ascending. `groups` is empty or contains the class of each record."""
    candidates = range(start, total, stride)
    if not candidates:
        raise DataError(f"{name} holds {total} samples, none from {start} on", "Start earlier")
    if count is None or count >= len(candidates):
        return candidates
    return [
        candidates[place] for place in spread(len(candidates), count, [groups[i] for i in candidates] if groups else ())
    ]


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
    remaining, short = min(count, total), list(members)
    while remaining:
        # Places that full groups cannot take are shared again, until all are given away.
        share, remainder = divmod(remaining, len(short))
        # The remainder first goes to the groups that have the fewest places, so that no class gets two before another
        # gets one.
        least = min(shares[group] for group in short)
        smallest = [group for group in short if shares[group] == least]
        larger = [group for group in short if shares[group] > least]
        extra = {smallest[place] for place in places(len(smallest), min(remainder, len(smallest)))}
        extra |= {larger[place] for place in places(len(larger), remainder - len(extra))}
        for group in short:
            gain = min(share + (group in extra), len(members[group]) - shares[group])
            shares[group] += gain
            remaining -= gain
        # A group without places left drops out, so the loop ends.
        short = [group for group in short if shares[group] < len(members[group])]
    return sorted(
        group_places[place]
        for group, group_places in members.items()
        for place in places(len(group_places), shares[group])
    )


def places(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced places from 0 to `total` - 1, beginning with 0."""
    return [place * total // count for place in range(count)]


def take_first(samples: Samples, count: int) -> Samples:
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
    return select_samples(samples, places(len(samples), count))


def spread_places(samples: Samples, count: int) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of `spread_over`, each with its place among all samples."""
    total = len(samples)
    yield from zip(places(total, min(count, total)), spread_over(samples, count), strict=True)


def select_samples(samples: Samples, numbers: Sequence[int]) -> Samples:
    """Return the samples with these numbers, which ascend."""
    part = samples.select(numbers) if isinstance(samples, SourceSamples) else None
    return part if part is not None else Subset(samples, numbers)


# Make enough shards that workers do not wait long for the last one, but few enough that merging is cheap.
# `_LEAST` and `_MOST` bound the number of samples in a shard.
_SHARDS, _LEAST, _MOST = 16, 8, 512
# A streamed shard travels as one message, so its size is bounded in bytes as well (8 MiB).
_STREAMED_BYTES = 1 << 23


@dataclass(frozen=True)
class Shard:
    """Describe samples `start` to `stop` (exclusive). If the samples are streamed, the shard contains them."""

    start: int
    stop: int
    samples: tuple[Sample, ...] | None = None

    def __str__(self) -> str:
        return f"samples {self.start} to {self.stop - 1}"

    def read_samples(self, reference: SourceSamples | None) -> Iterator[Sample]:
        """Yield the samples in a worker. `reference` is the `reference` of the `Sharded` that made the shard."""
        if self.samples is not None:
            yield from self.samples
            return
        # Only the two numbers were sent. The worker opens the same files itself.
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
            # Another machine may have other files at the same path, so every worker compares a digest first.
            and workers.everywhere(reads_the_same, samples, fingerprint(samples))
        ):
            self.reference = samples

    def shards(self, skip: int = 0) -> Iterator[Shard]:
        """Yield the shards of all samples from `skip` on."""
        size = min(_MOST, max(_LEAST, -(-self.total // _SHARDS)))
        if self.reference is not None:
            for start in range(skip, self.total, size):
                yield Shard(start, min(start + size, self.total))
            return
        remaining = itertools.islice(iter(self._samples), skip, self.total)
        start = skip
        for sample in remaining:
            sample_bytes = sum(array.nbytes for array in sample.inputs.values())
            fitting = max(1, min(size, _STREAMED_BYTES // max(1, sample_bytes)))
            part = (sample, *itertools.islice(remaining, fitting - 1))
            yield Shard(start, start + len(part), part)
            start += len(part)


def fingerprint(samples: SourceSamples) -> str:
    """Return a digest of the files of the first, the middle and the last sample, and of the number of records."""
    total = len(samples.selection)
    # Three samples find a different order, selection or version of the data. Hashing all files would take as long as
    # reading them.
    parts = [samples.records(range(at, at + 1)).digest() for at in sorted({0, total // 2, total - 1})]
    return " ".join([str(len(samples.opened_source.records)), *parts])


def reads_the_same(samples: SourceSamples, expected: str) -> bool:
    """Return whether this worker process reads the same samples as the process that sent `samples`."""
    try:
        return fingerprint(samples) == expected
    except (DataError, OSError):
        return False
