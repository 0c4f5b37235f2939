"""Keep a journal of measurements, so that an interrupted run can resume where it stopped.

The journal is one file of JSON lines: a header that describes the run, then one line for each measurement. A resumed
run makes the same decisions from the same figures, so the journal does not record decisions.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgeq_device.errors import DeviceError
from edgeq_device.measure.claim import UNKNOWN
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.plainjson import parse_json

from edgeq.errors import BoardError, EdgeqError, OutputError
from edgeq.tuning.evaluator import CandidateEvaluator, Race, Runner
from edgeq.tuning.measurements import Assessment, Screening
from edgeq.tuning.space import Candidate
from edgeq.util.marker import is_plain
from edgeq.util.records import fingerprint, parse, plain

T = TypeVar("T")
FORMAT = "edgeq-tuning-journal/2"
_MAX_BYTES = 1 << 26
# The beginning of the header line in every version.
_HEAD = b'{"format": "edgeq-tuning-journal/'


@dataclass(frozen=True)
class _Header:
    format: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class _JournalEntry:
    key: str
    value: Any


@dataclass(frozen=True)
class _Built:
    """Record the result of building a candidate: its screening, or the reason why it cannot be built."""

    found: Screening | None = None
    error: str = ""


class Journal:
    """Hold measurements by key, and write each one to the file as soon as it is made."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool, force: bool = False) -> None:
        """Open the journal at `path`: with `resume` an existing one, otherwise a new one.

        Args:
            settings: the plain values that the measurements depend on; a journal with other settings is refused.
            force: whether to replace an existing journal.

        Raises:
            OutputError: the journal has other settings, the file is not a journal, or the journal exists and neither
                `resume` nor `force` is set.
        """
        self.path = path
        self._measurements: dict[str, Any] = {}
        self._header = _Header(FORMAT, dict(settings))
        self._begun = False
        if path.exists() and resume:
            self._load()
        elif is_journal(path) and force:
            path.unlink()
        elif path.exists() and force:
            raise OutputError(f"{path} is not a journal of edgeq's", "Move it, or choose another output")
        elif path.exists():
            raise OutputError(
                f"{path} exists from an earlier run", "Continue with ⟨resume=True⟩, or start again with ⟨force=True⟩"
            )

    @property
    def count(self) -> int:
        """Return the number of measurements in the journal."""
        return len(self._measurements)

    def __contains__(self, key: str) -> bool:
        return key in self._measurements

    def __getitem__(self, key: str) -> Any:
        return self._measurements[key]

    def remember(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the measurement under `key`. If it is not in the journal yet, call `measure` and add its result, which
        must be plain JSON values.
        """
        if key not in self._measurements:
            value = measure()
            # Write the header only with the first measurement, so that a run that fails early leaves no journal.
            if not self._begun:
                self._append(self._header)
                self._begun = True
            self._append(_JournalEntry(key, value))
            self._measurements[key] = value
        return self._measurements[key]

    def _append(self, line: _Header | _JournalEntry) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            # JSON has no NaN. A journal with one could be written but never read again.
            stream.write(json.dumps(plain(line), allow_nan=False) + "\n")

    def _load(self) -> None:
        # A journal may come from anywhere, so its size is checked before its content is read.
        if self.path.stat().st_size > _MAX_BYTES:
            raise OutputError(f"{self.path} is too large for a journal", "Remove it, or start without ⟨resume=True⟩")
        if not is_journal(self.path):
            raise OutputError(f"{self.path} is not a journal of edgeq's", "Move it, or choose another output")
        content = read_file(self.path)
        # If the run was killed while it wrote a line, that line has no line break.
        complete_lines = content[: content.rfind(b"\n") + 1]
        try:
            records = [parse_json(line, "a line of it") for line in complete_lines.split(b"\n")[:-1]]
            header = parse(records[0], _Header, self.path, OutputError) if records else self._header
            if header.format != FORMAT:
                raise OutputError(f"format {header.format!r}")
            entries = [parse(line, _JournalEntry, self.path, OutputError) for line in records[1:]]
        except (DeviceError, OutputError) as error:
            raise OutputError(
                f"{self.path} is not a journal of this version ({error.problem})",
                "Remove it, or start without ⟨resume=True⟩",
            ) from error
        mine, settings = self._header.settings, header.settings
        different = sorted(k for k in {*settings, *mine} if settings.get(k) != mine.get(k))
        if different:
            raise OutputError(
                f"{self.path} was written with another {different[0].replace('_', ' ')}",
                "Give the same model, data and settings, or remove the journal and start again",
            )
        self._measurements = {entry.key: entry.value for entry in entries}
        self._begun = bool(records)
        # Remove the incomplete line, because the next measurement is appended right after it.
        os.truncate(self.path, len(complete_lines))


def is_journal(path: Path) -> bool:
    """Return whether `path` is a journal of any version, or the beginning of a journal whose run was killed while
    writing it.
    """
    if not is_plain(path):
        return False
    with open_file(path) as stream:
        head = stream.read(len(_HEAD))
    return head == _HEAD[: len(head)]


class JournaledEvaluator:
    """Make only the measurements that are not in the journal yet. Rankings of layers are always measured again."""

    def __init__(self, evaluator: CandidateEvaluator, journal: Journal) -> None:
        self._evaluator = evaluator
        self._journal = journal
        self.total = evaluator.total
        self.counts = evaluator.counts
        self.recovery_groups = evaluator.recovery_groups
        self.rank = evaluator.rank

    def build(self, candidate: Candidate) -> Screening:
        """See `Evaluator.build`. If a candidate cannot be built, the journal records that as well."""

        def measure() -> dict[str, Any]:
            """Return the screening of the candidate, or why it cannot be built. If a board fails, raise the error,
            because the candidate did not cause it.
            """
            try:
                return {"found": plain(self._evaluator.build(candidate))}
            except BoardError:
                raise
            except EdgeqError as error:
                return {"error": error.problem}

        built = self._parse(self._journal.remember(f"screen {digest(candidate)}", measure), _Built)
        if built.found is not None:
            return built.found
        if not built.error:
            raise OutputError(f"{self._journal.path} contains a build without a result", "Remove it, and start again")
        raise EdgeqError(built.error)

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        """See `Evaluator.assess`. The candidates that are not in the journal yet are assessed together."""
        keys = {candidate.name: f"assess {samples} {digest(candidate)}" for candidate in candidates}
        # Assess them in one call, because the evaluator shares work among candidates.
        lacking = [candidate for candidate in candidates if keys[candidate.name] not in self._journal]
        for name, measured in self._evaluator.assess(lacking, samples).items() if lacking else ():
            self._journal.remember(keys[name], functools.partial(plain, measured))
        return {name: self._parse(self._journal[key], Assessment) for name, key in keys.items()}

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> Assessment | None:
        """See `Evaluator.simulate`. The key consists of the candidate and the allowed loss."""
        key = f"simulate {max_drop:g} {digest(candidate)}"
        kind: Any = Assessment | None
        assessment: Assessment | None = self._remember(
            key, kind, lambda: self._evaluator.simulate(candidate, max_drop, seconds)
        )
        return assessment

    def time(self, runners: Mapping[str, Runner], baseline: str, *, tie: float, seconds: float, rough: bool) -> Race:
        """See `Evaluator.time`. The key consists of the names of the runners, what they run, `tie` and `rough`. If the
        machine was too busy for a result, the race is not recorded, so a resumed run repeats it.
        """
        raced = {name: [candidate and digest(candidate), threads] for name, (candidate, threads) in runners.items()}
        key = "race " + fingerprint([raced, baseline, tie, rough])
        if key in self._journal:
            return self._parse(self._journal[key], Race)
        race = self._evaluator.time(runners, baseline, tie=tie, seconds=seconds, rough=rough)
        if all(timing.verdict != UNKNOWN for timing in race.timings.values() if timing.speedup is not None):
            self._journal.remember(key, lambda: plain(race))
        return race

    def slow_layers(self, candidate: Candidate, float_threads: int) -> tuple[str, ...]:
        """See `Evaluator.slow_layers`. The key consists of the candidate and both numbers of threads."""
        key = f"slow layers {candidate.threads} {float_threads} {digest(candidate)}"
        return self._remember(key, tuple[str, ...], lambda: self._evaluator.slow_layers(candidate, float_threads))

    def memory(self, candidate: Candidate | None, threads: int) -> int:
        """See `Evaluator.memory`. The key consists of the candidate and the threads."""
        key = f"memory {threads} {candidate and digest(candidate)}"
        return self._remember(key, int, lambda: self._evaluator.memory(candidate, threads))

    def _remember(self, key: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Return the journal's value under `key`. If there is none yet, add the result of `measure` first."""
        return self._parse(self._journal.remember(key, lambda: plain(measure())), kind)

    def _parse(self, value: Any, kind: type[T]) -> T:
        return parse(value, kind, self._journal.path, OutputError)


def digest(candidate: Candidate) -> str:
    """Return the key of a candidate's measurements. The key leaves out the threads, which change neither content nor
    accuracy.
    """
    content = plain(candidate)
    # Each run chooses the threads again, and another number must not repeat all measurements.
    del content["threads"]
    return fingerprint(content)
