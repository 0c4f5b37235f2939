"""Own the folder next to an output in which a run keeps its journal, its statistics and its record.

One run at a time may use it, and edgeq removes from it only what edgeq wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from edgeq_device.system.places import LOCK

from edgeq.calibration.files import STATISTICS
from edgeq.reporting.page import TUNING as TUNING_RECORD
from edgeq.tuning.journal import is_journal
from edgeq.util.display import Progress
from edgeq.util.marker import MARKER, is_marker, write_marker
from edgeq.util.outputs import check_apart, output_file, recover
from edgeq.util.ownership import Judge, Ownership, printable_path
from edgeq.util.placement import alone_in
from edgeq.util.records import plain

JOURNAL, COLLECTED = "journal.jsonl", "statistics"
_KIND = "tuning"
# Files that remain if the run was killed while it wrote statistics.
_REMAINS = re.compile(
    rf"\.{COLLECTED}\.[0-9a-f]+\.partial"
    rf"(?:{re.escape(LOCK)}"
    rf"|/(?:placing\.json(?:\.draft)?|proof/[0-9a-f]*|(?:new|old)/(?:{COLLECTED}/(?:statistics\.(?:json|npz))?)?)?)"
)


def folder_of(output: Path) -> Path:
    """Return the folder next to `output` in which a tuning run keeps its journal and statistics."""
    return output.with_name(f"{output.name}.tuning")


def check_folder(output: Path, inputs: Iterable[Path]) -> None:
    """Check the folder next to `output`.

    Raises:
        OutputError: the folder was not written by an earlier run, another run is using it, or it contains an input.
    """
    folder = folder_of(output)
    check_apart(folder, inputs)
    TUNING.check(folder)
    with _lock_run(folder):
        # Statistics that a killed run was placing are completed or undone before this run looks for them.
        recover(folder / COLLECTED)


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Create the folder or use an earlier run's, mark it as edgeq's, and keep other runs out.

    Raises:
        OutputError: the folder is not edgeq's, or another run is using it.
    """
    TUNING.check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another run has just written it
        write_marker(folder, _KIND)
    with _lock_run(folder):
        yield


def _lock_run(folder: Path) -> AbstractContextManager[None]:
    """Return the lock of a run. The lock is on the marker file, because the folder's own lock is held only while files
    are moved into the folder.
    """
    return alone_in(folder / MARKER, busy=f"another run is at work in {printable_path(folder)}")


def save_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Keep the record of a run next to its journal, for `edgeq report`."""
    with output_file(folder / TUNING_RECORD, force=True) as draft:
        draft.write_text(json.dumps(plain(record), indent=1, allow_nan=False) + "\n", "utf-8")


def remove_record(folder: Path) -> None:
    """Remove the record of an earlier run, because this run will write another."""
    (folder / TUNING_RECORD).unlink(missing_ok=True)


def clear(folder: Path, progress: Progress) -> None:
    """Remove the files that a finished run no longer needs. Files that edgeq did not write stay."""
    leftover = TUNING.remove(folder)
    if leftover is not None:
        progress.note(
            f"{printable_path(folder)} stays: it contains {printable_path(leftover)}, which edgeq did not write"
        )


def _recognise(folder: Path) -> Judge | None:
    marked = is_marker(folder, _KIND)
    journal = is_journal(folder / JOURNAL)
    statistics = STATISTICS.judge(folder / COLLECTED)
    # Nothing in the folder is edgeq's, so edgeq neither uses nor removes it.
    if not marked and not journal and statistics is None:
        return None

    def judge(name: str) -> bool:
        """Return whether edgeq wrote the file of that name."""
        if name == MARKER:
            return marked
        if name == JOURNAL:
            return journal
        if name == TUNING_RECORD:
            return marked
        top, _, inner = name.partition("/")
        if top == COLLECTED and statistics is not None:
            return statistics(inner)
        return _REMAINS.fullmatch(name) is not None

    return judge


TUNING = Ownership("folder of an earlier tuning run", _recognise)
"""The folder contains a marker, a journal and statistics, each in edgeq's form. Any one of them identifies it."""
