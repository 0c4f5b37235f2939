"""Precedence over other processes while something is timed, where the system grants it.

On Linux a thread of niceness -20 that is ready to run gets a core before ordinary ones, nearly always at once: beside
busy processes its latencies are those of a machine that is its own. Only root, or who has CAP_SYS_NICE or a limit for
it, may ask for that; for all others nothing changes. Others wait for the seconds that the timing takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Dict, Optional

from edgeq_device.environment import ROOT
from edgeq_device.errors import UsageError

SETTING = "EDGEQ_NICE"
"""Environment variable: the niceness while something is timed, 0 to leave it alone."""
_MOST = -20


class Precedence:
    """Niceness of this process's threads. One that its user has made nicer than others stays so.

    Args:
        root: of the file system, for tests.
        get, give: niceness of a thread by its number, as `os.getpriority` and `os.setpriority` have it.

    Raises:
        UsageError: `EDGEQ_NICE` is no whole number from -20 to 0.
    """

    def __init__(
        self,
        *,
        root: Path = ROOT,
        get: Optional[Callable[[int], int]] = None,
        give: Optional[Callable[[int, int], None]] = None,
    ) -> None:
        self._tasks = root / "proc/self/task"
        self._nice = wanted_niceness()
        self._get = get or _get
        self._give = give or _give
        self._before: Dict[int, int] = {}
        self._possible = self._nice != 0 and hasattr(os, "setpriority")

    def take(self) -> None:
        """Change the threads that there are and have not been changed yet."""
        if not self._possible:
            return
        try:
            threads = sorted(int(task.name) for task in self._tasks.iterdir())
        except OSError:
            self._possible = False  # not Linux, or hidden
            return
        first = next(iter(self._before.values()), None)
        for thread in threads:
            if thread in self._before:
                continue
            try:
                before = self._get(thread)
                if first is not None and before == self._nice:  # started since, by a thread that has precedence
                    before = first
                if before <= 0:
                    self._give(thread, self._nice)
                    self._before[thread] = before
            except ProcessLookupError:
                continue  # it has ended
            except PermissionError:
                self._possible = False
                return

    def release(self) -> None:
        """Give every thread its own niceness back."""
        for thread, before in self._before.items():
            try:
                self._give(thread, before)
            except ProcessLookupError:
                continue
        self._before.clear()


def wanted_niceness() -> int:
    """What `EDGEQ_NICE` says, the utmost precedence where it says nothing.

    Raises:
        UsageError: it is no whole number from -20 to 0.
    """
    text = os.environ.get(SETTING, "").strip()
    try:
        nice = int(text or _MOST)
    except ValueError:
        nice = 1
    # A positive one could not be given back without the right to take precedence.
    if _MOST <= nice <= 0:
        return nice
    raise UsageError(f"{SETTING}={text} gives no precedence", f"Give a whole number from {_MOST} to 0, 0 for none")


def _get(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _give(thread: int, nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, nice)
