"""A journal of what was measured, so that an interrupted run can go on where it stopped.

One file of JSON lines: a header that says what the run was about, then one line a measurement. A resumed run makes the
same decisions from the same figures, so it need not remember anything but the figures.

Samples read once and kept: in memory up to a limit, on disk beyond it, in an order that any prefix stands for all.

Data folders are often sorted by class, so the first tenth would be one class. The order is a shuffle with a fixed seed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from edgeq_device.claim import UNKNOWN
from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import parse_json

from edgeq.calibrate.files import STATISTICS
from edgeq.data.records import Sample
from edgeq.data.samples import Samples
from edgeq.errors import BoardError, DataError, EdgeqError, OutputError
from edgeq.report.tuning_record import Assessment, Screening
from edgeq.tune.evaluator import Evaluator, Race, Runner
from edgeq.tune.space import Candidate
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart, recover
from edgeq.util.ownership import MARKER, Judge, Ownership, is_marker, is_plain, shown, write_marker
from edgeq.util.placement import alone_in
from edgeq.util.records import fingerprint, parse, plain

T = TypeVar("T")

FORMAT = "edgeq-tuning-journal/2"
_MOST_BYTES = 1 << 26
# How the header line of every version begins.
_HEAD = b'{"format": "edgeq-tuning-journal/'


@dataclass(frozen=True)
class _Header:
    format: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class _Entry:
    key: str
    value: Any


@dataclass(frozen=True)
class _Built:
    """What a candidate's build gave: what was seen of it, or why it cannot be built."""

    found: Screening | None = None
    error: str = ""


class Journal:
    """Measurements by key, each written down as soon as it is there."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool, force: bool = False) -> None:
        """Open the journal at `path`: a new one, or with `resume` the one that is there.

        Args:
            settings: what the measurements depend on, plain values; a journal with others is refused.
            force: start anew over a journal that is there.

        Raises:
            OutputError: it was written for something else, or is no journal; or one is there without `resume`.
        """
        self.path = path
        self._known: dict[str, Any] = {}
        self._header = _Header(FORMAT, dict(settings))
        self._begun = False
        if path.exists() and resume:
            self._read()
        elif is_journal(path) and force:
            path.unlink()
        elif path.exists() and force:
            raise OutputError(f"{path} is no journal of edgeq's", "Move it, or choose another output")
        elif path.exists():
            raise OutputError(f"{path} is there from an earlier run", "Go on with --resume, or start anew with --force")

    @property
    def known(self) -> int:
        """Measurements that it holds."""
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def remember(self, key: str, measure: Callable[[], Any]) -> Any:
        """The measurement under `key`: what the journal has, else what `measure` gives (plain JSON values)."""
        if key not in self._known:
            value = measure()
            if not self._begun:
                self._append(self._header)
                self._begun = True
            self._append(_Entry(key, value))
            self._known[key] = value
        return self._known[key]

    def _append(self, line: _Header | _Entry) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(plain(line), allow_nan=False) + "\n")

    def _read(self) -> None:
        if self.path.stat().st_size > _MOST_BYTES:
            raise OutputError(f"{self.path} is too large for a journal", "Remove it, or start without --resume")
        if not is_journal(self.path):
            raise OutputError(f"{self.path} is no journal of edgeq's", "Move it, or choose another output")
        content = self.path.read_bytes()
        # A line that was being written when the run was killed has no end.
        whole = content[: content.rfind(b"\n") + 1]
        try:
            found = [parse_json(line, "a line of it") for line in whole.split(b"\n")[:-1]]
            header = parse(found[0], _Header, self.path, OutputError) if found else self._header
            if header.format != FORMAT:
                raise OutputError(f"format {header.format!r}")
            entries = [parse(line, _Entry, self.path, OutputError) for line in found[1:]]
        except (DeviceError, OutputError) as error:
            raise OutputError(
                f"{self.path} is no journal of this version ({error.problem})", "Remove it, or start without --resume"
            ) from error
        mine, settings = self._header.settings, header.settings
        different = sorted(k for k in {*settings, *mine} if settings.get(k) != mine.get(k))
        if different:
            raise OutputError(
                f"{self.path} was written with another {different[0].replace('_', ' ')}",
                "Give the same model, data and settings, or remove the journal and start anew",
            )
        self._known = {entry.key: entry.value for entry in entries}
        self._begun = bool(found)
        os.truncate(self.path, len(whole))


def is_journal(path: Path) -> bool:
    """Whether `path` is a journal, of any version, or the beginning of one that a kill cut off."""
    if not is_plain(path):
        return False
    with path.open("rb") as stream:
        head = stream.read(len(_HEAD))
    return head == _HEAD[: len(head)]


class JournaledEvaluator:
    """An evaluator that measures only what the journal does not hold. Rankings of layers are measured again."""

    def __init__(self, evaluator: Evaluator, journal: Journal) -> None:
        self._evaluator = evaluator
        self._journal = journal
        self.total = evaluator.total
        self.timed = evaluator.timed
        self.recovery_groups = evaluator.recovery_groups
        self.rank = evaluator.rank

    def build(self, candidate: Candidate) -> Screening:
        """See `Evaluator.build`; that a candidate cannot be built is remembered, too."""

        def measure() -> dict[str, Any]:
            """What building it shows, or why it cannot be built; a board that fails says nothing of a candidate."""
            try:
                return {"found": plain(self._evaluator.build(candidate))}
            except BoardError:
                raise
            except EdgeqError as error:
                return {"error": error.problem}

        built = self._read(self._journal.remember(f"screen {digest(candidate)}", measure), _Built)
        if built.found is not None:
            return built.found
        if not built.error:
            raise OutputError(f"{self._journal.path} holds a build without a result", "Remove it, and start anew")
        raise EdgeqError(built.error)

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        """See `Evaluator.assess`; those that the journal lacks are assessed together."""
        keys = {candidate.name: f"assess {samples} {digest(candidate)}" for candidate in candidates}
        lacking = [candidate for candidate in candidates if keys[candidate.name] not in self._journal]
        for name, measured in self._evaluator.assess(lacking, samples).items() if lacking else ():
            self._journal.remember(keys[name], functools.partial(plain, measured))
        return {name: self._read(self._journal[key], Assessment) for name, key in keys.items()}

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> Assessment | None:
        """See `Evaluator.simulate`; by candidate and the loss that is allowed."""
        key = f"simulate {max_drop:g} {digest(candidate)}"
        kind: Any = Assessment | None
        found: Assessment | None = self._kept(key, kind, lambda: self._evaluator.simulate(candidate, max_drop, seconds))
        return found

    def time(self, runners: Mapping[str, Runner], baseline: str, *, tie: float, seconds: float) -> Race:
        """See `Evaluator.time`; by the names of the runners, what they run, and `tie`. A race on a machine that was too
        busy to tell anything is run again the next time."""
        raced = {name: [candidate and digest(candidate), threads] for name, (candidate, threads) in runners.items()}
        key = "race " + fingerprint([raced, baseline, tie])
        time = self._evaluator.time
        if key in self._journal:
            return self._read(self._journal[key], Race)
        race = time(runners, baseline, tie=tie, seconds=seconds)
        if all(timing.verdict != UNKNOWN for timing in race.timings.values() if timing.speedup is not None):
            self._journal.remember(key, lambda: plain(race))
        return race

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        """See `Evaluator.slow_layers`; by candidate and threads."""
        key = f"slow layers {candidate.threads} {float_threads} {digest(candidate)}"
        return self._kept(key, tuple[str, ...], lambda: self._evaluator.slow_layers(candidate, float_threads))

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        """See `Evaluator.memory`; by candidate and threads."""
        key = f"memory {threads} {candidate and digest(candidate)}"
        return self._kept(key, int, lambda: self._evaluator.memory(candidate, threads))

    def _kept(self, key: str, kind: type[T], measure: Callable[[], T]) -> T:
        """What the journal has under `key`, else what `measure` gives, remembered."""
        return self._read(self._journal.remember(key, lambda: plain(measure())), kind)

    def _read(self, value: Any, kind: type[T]) -> T:
        return parse(value, kind, self._journal.path, OutputError)


def digest(candidate: Candidate) -> str:
    """What a candidate's measurements are filed under; threads decide neither its content nor its accuracy."""
    content = plain(candidate)
    del content["threads"]
    return fingerprint(content)


JOURNAL, COLLECTED = "journal.jsonl", "statistics"
_KIND = "tuning"
# What a kill left of statistics that were being written.
_LEFT = re.compile(
    rf"\.{COLLECTED}\.[0-9a-f]+\.partial/"
    rf"(?:placing\.json(?:\.draft)?|(?:new|old)/(?:{COLLECTED}/(?:statistics\.(?:json|npz))?)?)?"
)


def folder_of(output: Path) -> Path:
    """The folder beside `output` in which a tuning run keeps its journal and statistics."""
    return output.with_name(f"{output.name}.tuning")


def check_folder(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse where the folder beside `output` is not what an earlier run left, is in use, or holds an input.

    Raises:
        OutputError: as it says.
    """
    folder = folder_of(output)
    check_apart(folder, inputs)
    TUNING.check(folder)
    with _only_run(folder):
        recover(folder / COLLECTED)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder, or take that of an earlier run, mark it as edgeq's, and keep other runs out.

    Raises:
        OutputError: it is not edgeq's, or another run is at work in it.
    """
    TUNING.check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another run has just written it
        write_marker(folder, _KIND)
    with _only_run(folder):
        yield


def _only_run(folder: Path) -> AbstractContextManager[None]:
    """The lock of a run. It is the marker's: that of the folder is for moments in which files are moved in it."""
    return alone_in(folder / MARKER, busy=f"another run is at work in {shown(folder)}")


def clear(folder: Path, progress: Progress) -> None:
    """Remove what a finished run needs no more, and nothing that edgeq did not write."""
    kept = TUNING.remove(folder)
    if kept is not None:
        progress.note(f"{shown(folder)} stays: it holds {shown(kept)}, which edgeq did not write")


def _judge(folder: Path) -> Judge | None:
    marked = is_marker(folder, _KIND)
    journal = is_journal(folder / JOURNAL)
    statistics = STATISTICS.judge(folder / COLLECTED)
    if not marked and not journal and statistics is None:
        return None

    def judge(name: str) -> bool:
        """Whether edgeq wrote the file of that name."""
        if name == MARKER:
            return marked
        if name == JOURNAL:
            return journal
        first, _, rest = name.partition("/")
        if first == COLLECTED and statistics is not None:
            return statistics(rest)
        return _LEFT.fullmatch(name) is not None

    return judge


TUNING = Ownership("folder of an earlier tuning run", _judge)
"""A marker, a journal and statistics, each of edgeq's form. Without a marker, the others suffice."""


MEMORY = 1 << 30
_SEED = 0
_MOST_OF_DISK = 0.8
Arrays = Mapping[str, np.ndarray[Any, Any]]


class ArrayStore:
    """Dicts of arrays under integer keys.

    Args:
        folder: is made; for what exceeds `memory` bytes.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        self._left = memory
        self._held: dict[int, Arrays] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: int) -> bool:
        return key in self._held or self._file(key).exists()

    def put(self, key: int, arrays: Arrays) -> None:
        """Keep the arrays, which must not be changed afterwards."""
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._left:
            self._left -= size
            self._held[key] = arrays
            return
        # Names of tensors may hold anything; numpy makes file names of them.
        names = list(arrays)
        numbered = {f"a{i}": arrays[name] for i, name in enumerate(names)}
        np.savez(self._file(key), allow_pickle=False, names=np.array(names), **numbered)

    def get(self, key: int) -> Arrays:
        """The arrays under `key`, which must be there."""
        if key in self._held:
            return self._held[key]
        with np.load(self._file(key), allow_pickle=False) as archive:
            return {str(name): archive[f"a{i}"] for i, name in enumerate(archive["names"])}

    def _file(self, key: int) -> Path:
        return self._folder / f"{key}.npz"


class SampleStore:
    """Samples by position in the shuffled order."""

    def __init__(self, samples: Samples, folder: Path, *, memory: int = MEMORY, progress: Progress = SILENT) -> None:
        self.source = samples.source
        self._arrays = ArrayStore(folder, memory)
        self._bare: list[Sample] = []
        with progress.stage("reading samples", len(samples)) as advance:
            for index, sample in enumerate(samples):
                if index == 0:
                    _check_disk_space(sample, len(samples), memory, folder, self.source)
                self._arrays.put(index, sample.inputs)
                self._bare.append(dataclasses.replace(sample, inputs={}))
                advance(1)
        if not self._bare:
            raise DataError(f"{samples.source} holds no samples", "Give at least one")
        self._order = list(range(len(self._bare)))
        random.Random(_SEED).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def first(self, count: int) -> tuple[int, ...]:
        """Which samples of the source come first here, ascending."""
        return tuple(sorted(self._order[:count]))

    def __getitem__(self, position: int) -> Sample:
        index = self._order[position]
        return dataclasses.replace(self._bare[index], inputs=self._arrays.get(index))


def _check_disk_space(sample: Sample, count: int, memory: int, folder: Path, source: str) -> None:
    """Refuse before the disk is full: samples are taken to be as large as the first."""
    needed = sum(array.nbytes for array in sample.inputs.values()) * count - memory
    free = shutil.disk_usage(folder).free
    if needed > _MOST_OF_DISK * free:
        raise DataError(
            f"{source}: {count} samples take {needed / 1e9:.1f} GB of temporary space, of {free / 1e9:.1f} GB free",
            "Give fewer validation samples, or set TMPDIR to a larger disk",
        )
