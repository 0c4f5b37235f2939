"""The folder beside the output in which `edgeq tune` keeps what it measured, until the bundle is there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from edgeq.atomic import alone_in, check_apart, recover
from edgeq.calibrate.files import STATISTICS
from edgeq.ownership import MARKER, Judge, Ownership, is_marker, shown, write_marker
from edgeq.progress import Progress
from edgeq.tune.journal import is_journal

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
