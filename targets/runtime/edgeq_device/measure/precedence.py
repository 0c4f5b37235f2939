"""Give this process precedence over others during a timing, if the user asks for it and the system permits it.

On Linux, a ready thread of niceness -20 gets a core before ordinary threads do, nearly always immediately. Such a
niceness needs root, CAP_SYS_NICE or a limit that permits it; otherwise nothing changes. Other processes wait while the
timing lasts, so the figures of another measurement next to this one would be wrong: that is not the default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict

from edgeq_device.errors import UsageError
from edgeq_device.system.features import ROOT

SETTING = "EDGEQ_NICE"
"""Environment variable that sets the niceness during a timing. Without it, or with 0, the niceness does not change."""
_MOST = -20


class Precedence:
    """Set the niceness of this process's threads. Threads to which the user gave a positive niceness keep it.

    Args:
        root: root of the file system, for tests.

    Raises:
        UsageError: `EDGEQ_NICE` is not a whole number from -20 to 0.
    """

    def __init__(self, *, root: Path = ROOT) -> None:
        self._tasks = root / "proc/self/task"
        self._nice = read_niceness()
        self._niceness_by_thread: Dict[int, int] = {}
        self._possible = self._nice != 0 and hasattr(os, "setpriority")

    def take(self) -> None:
        """Set the niceness of all present threads that have not been changed yet."""
        if not self._possible:
            return
        try:
            threads = sorted(int(task.name) for task in self._tasks.iterdir())
        except OSError:
            self._possible = False  # the system is not Linux, or hides the file
            return
        original = next(iter(self._niceness_by_thread.values()), None)
        for thread in threads:
            if thread in self._niceness_by_thread:
                continue
            try:
                niceness = os.getpriority(os.PRIO_PROCESS, thread)
                # the thread started after an earlier call, and inherited precedence
                if original is not None and niceness == self._nice:
                    niceness = original
                if niceness <= 0:
                    os.setpriority(os.PRIO_PROCESS, thread, self._nice)
                    self._niceness_by_thread[thread] = niceness
            except ProcessLookupError:
                continue  # the thread has ended
            except PermissionError:
                self._possible = False
                return

    def release(self) -> None:
        """Restore the former niceness of every thread."""
        for thread, niceness in self._niceness_by_thread.items():
            try:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
            except ProcessLookupError:
                continue
        self._niceness_by_thread.clear()


def read_niceness() -> int:
    """Return the niceness in `EDGEQ_NICE`, or 0 if the variable is not set.

    Raises:
        UsageError: the value is not a whole number from -20 to 0.
    """
    text = os.environ.get(SETTING, "").strip()
    try:
        nice = int(text or 0)
    except ValueError:
        nice = 1
    # Refuse a positive niceness: a process that may not take precedence could not undo it.
    if _MOST <= nice <= 0:
        return nice
    raise UsageError(f"{SETTING}={text} gives no precedence", f"Give a whole number from {_MOST} to 0, 0 for none")
