"""Run work in a process that ends at once, as if by `kill -9`, before a given change to the file system."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

KILLED = 99
CHANGES = frozenset({"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def killed_before(work: Callable[[], object], within: Path, number: int, events: Collection[str] = CHANGES) -> bool:
    """Run `work` in a process that is killed before its `number`-th change below `within`. Return whether it got there.

    Args:
        events: names of the audit events of Python that count as changes.
    """
    with warnings.catch_warnings():
        # Newer Pythons warn of a fork in a process with threads. The child uses none of the parent's threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(_ends(work, within, number, events))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), f"it ended with {code} before change {number}"
    return code == KILLED


def _ends(work: Callable[[], object], within: Path, number: int, events: Collection[str]) -> int:
    signal.alarm(120)
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in events and _changes(event, arguments, within):
            left -= 1
            if left == 0:
                os._exit(KILLED)

    sys.addaudithook(count)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _changes(event: str, arguments: tuple[Any, ...], within: Path) -> bool:
    if event == "open":
        name, _, flags = arguments
        return not isinstance(name, int) and bool(flags & _WRITES) and _below(name, within)
    # Only the removal of a folder uses names relative to an open folder.
    return any(isinstance(part, int) and part >= 0 for part in arguments[1:]) or _below(arguments[0], within)


def _below(name: Any, within: Path) -> bool:
    return within in Path(os.fsdecode(name)).absolute().parents
