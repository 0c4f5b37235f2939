"""Limit the memory and the processor time of a command that reads untrusted files, and the sizes that such a file may
claim.

Workstation and device use the same limits. The program forks before it imports anything large. The child does the work
under limits that the operating system enforces, and the parent waits. So if a model crashes onnxruntime, takes all
memory or never ends, the user gets one line and an exit code. On systems without fork, only the checks in edgeq's
file readers apply.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Iterable, Iterator, Mapping, NoReturn, Optional, Tuple

from edgeq_device.errors import BudgetError, UsageError
from edgeq_device.system.relay import divert, open_pipe, prepare_output, relay

VARIABLE = "EDGEQ_BUDGET"
# Shifts to bytes.
_UNITS = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_FIX = f"Set {VARIABLE} as in memory=8GiB,seconds=900,sample=1GiB; 0 means no limit, and off keeps only sample"
_TERMINATES = ("SIGTERM", "SIGHUP")
_ENDS = ("SIGINT", *_TERMINATES)
_LIBRARY = 1
"""Exit code with which a library ends the process, for example if it has too little memory."""
_UNWINDING_S = 0.5
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


@dataclass(frozen=True)
class Budget:
    """Limit the memory, time and sizes that a command may use.

    Attributes:
        memory: maximum private memory (RLIMIT_DATA) of each process in bytes; 0: no limit; None: three quarters of the
            memory of the machine or the container.
        seconds: maximum seconds of processor time, summed over all threads, between two steps of progress; 0: no limit.
        sample: maximum number of bytes that one sample, table or text may take in addition to the bytes in its file.
        confined: True if `memory` and `seconds` are enforced.
    """

    memory: Optional[int] = None
    seconds: int = 300
    sample: int = 1 << 28
    confined: bool = True


def read_budget(environment: Mapping[str, str] = os.environ) -> Budget:
    """Return the budget that `EDGEQ_BUDGET` sets, with defaults for the limits that it leaves out.

    Raises:
        UsageError: the variable has another form.
    """
    budget = Budget()
    for part in filter(None, environment.get(VARIABLE, "").split(",")):
        name, _, text = part.strip().partition("=")
        if part.strip() == "off":
            budget = replace(budget, confined=False)
        elif name == "seconds" and text.isdecimal() and len(text) < 10:
            budget = replace(budget, seconds=int(text))
        elif name == "memory" and (size := _parse_bytes(text)) is not None:
            budget = replace(budget, memory=size)
        elif name == "sample" and (size := _parse_bytes(text)):
            budget = replace(budget, sample=size)
        else:
            raise UsageError(f"{VARIABLE} has {part[:60]!r}", _FIX)
    return budget


def read_largest_sample() -> int:
    """Return how many bytes one sample, table or text may take in addition to the bytes in its file.

    Raises:
        UsageError: for the same reason as `read_budget`.
    """
    return read_budget().sample


def confine(program: str) -> Optional[Budget]:
    """Fork a child process and continue in it under the limits of the budget. The parent waits for the child and then
    ends in the same way.

    Call this before the program starts threads. It returns only in the child. On systems without fork it returns in
    this process, without limits. The parent prints the text that libraries in the child write (see
    edgeq_device.system.relay).

    Args:
        program: name of the program, which begins the line that reports why the child was ended.

    Returns:
        The limits in force, or None if there are no limits.

    Raises:
        UsageError: for the same reason as `read_budget`.
    """
    budget = read_budget()
    if not hasattr(os, "fork"):
        return None
    prepare_output()
    parent = os.getpid()
    pipe = open_pipe()
    unwound = mmap.mmap(-1, 1)
    # Block signals until the parent can forward them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in (*_ENDS, "SIGCHLD")])
    child = os.fork()
    if child:
        _wait(child, program, budget, mask, pipe, unwound)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _die_with(parent)
    atexit.register(unwound.write, b"1")  # Python does not run this if a library ends the process, as OpenBLAS does
    divert(*pipe)
    return enforce(budget) if budget.confined else None


def enforce(budget: Budget) -> Budget:
    """Set the limits of `budget` for this process and its children. Return the budget with its memory in bytes."""
    import resource

    memory = _compute_three_quarters() if budget.memory is None else budget.memory
    if memory:
        _lower(resource.RLIMIT_DATA, memory)
    _lower(resource.RLIMIT_CORE, 0)
    budget = replace(budget, memory=memory)
    renew(budget)
    return budget


def renew(budget: Budget) -> None:
    """Restart the limit on processor time, because the process made progress."""
    if budget.seconds:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        # Add one second, because the system counts whole seconds.
        _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + budget.seconds + 1)


@contextmanager
def limit_step(memory: int) -> Iterator[None]:
    """Run the block under stricter limits: the process may take `memory` bytes more than it has now, and use a tenth of
    the seconds.

    Use it for a step that needs few resources for any honest file. It does nothing in a process without limits, that
    is, one that edgeq did not start.
    """
    if not hasattr(os, "fork"):
        yield
        return
    import resource

    kinds = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_DATA)}
    processor, private = (soft for soft, _ in kinds.values())
    if processor == resource.RLIM_INFINITY:
        yield
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    share = int(usage.ru_utime + usage.ru_stime) + read_budget().seconds // 10 + 1
    _lower(resource.RLIMIT_CPU, min(processor, share))
    private_now = _read_private_bytes()
    if private_now:
        _lower(
            resource.RLIMIT_DATA,
            private_now + memory if private == resource.RLIM_INFINITY else min(private, private_now + memory),
        )
    try:
        yield
    finally:
        for kind, limits in kinds.items():
            resource.setrlimit(kind, limits)


def _read_private_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts, or 0 if the system does not report them."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:  # noqa: PTH123  # as below
            line = next((line for line in stream if line.startswith("VmData:")), "")
    except OSError:
        return 0
    return int(line.split()[1]) << 10 if line else 0


def lift_seconds() -> None:
    """Remove the limit on processor time from this process. The caller instead limits how long it waits for the
    process.
    """
    if hasattr(os, "fork"):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


@contextmanager
def without_seconds() -> Iterator[None]:
    """Start child processes without the limit on processor time. The caller limits how long it waits for them."""
    if not hasattr(os, "fork"):
        yield
        return
    import resource

    limits = resource.getrlimit(resource.RLIMIT_CPU)
    lift_seconds()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, limits)


class Endings:
    """Handle the signals that end a program: unwind the stack, so that temporary files are removed.

    `number` is the signal that arrived, or 0. It is kept because the exception from a handler may not arrive. A library
    may raise its own error in its place, as an import does. Python discards it in `__del__` and in the callbacks of C
    code. So the signal is raised again after it was discarded, at the next `step`, and whenever another one arrives.
    """

    number = 0

    def __init__(self) -> None:
        self._unwinding_until = 0.0
        self._closing = self._holding = False
        self._report = sys.unraisablehook

    def interrupt(self, number: int, frame: Any) -> None:
        """Raise KeyboardInterrupt."""
        self._handle_signal(number, frame)

    def terminate(self, number: int, frame: Any) -> None:
        """End with the exit code that shells use for the signal."""
        self._handle_signal(number, frame)

    def step(self) -> None:
        """Raise the exception of the signal that arrived, if one did. Call this between two steps of the work."""
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number:
            sys.exit(128 + self.number)

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Delay signals until the end of the block, so that the result of a call, such as a started process, is not
        lost. The call must be short.
        """
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        self.step()

    def close(self) -> None:
        """Let the program end. One more signal does not interrupt its last steps, and a second one ends the process."""
        self._closing = True

    def unwind(self) -> None:
        """From now on, unwind the stack at Ctrl-C, at SIGTERM, or when the terminal is closed. Skip signals that this
        system does not have or that the caller ignores (nohup).
        """
        if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signal.SIGINT, self.interrupt)
        for name in _TERMINATES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self.terminate)
        if sys.unraisablehook != self._handle_discarded:
            self._report, sys.unraisablehook = sys.unraisablehook, self._handle_discarded

    def _handle_signal(self, number: int, frame: Any) -> None:
        if self._closing:
            signal.signal(number, signal.SIG_DFL)
            return
        if self._holding:
            self.number = number
            return
        # A terminal sends a signal to both processes, and the parent forwards its own to the child. A system that shuts
        # down sends SIGTERM and SIGHUP. The later ones must not interrupt the unwinding that the first one started.
        if monotonic() < self._unwinding_until:
            return
        self.number, self._unwinding_until = number, monotonic() + _UNWINDING_S
        caller = _find_caller_of_tempfile(frame)
        if caller is not None:
            self._raise_in(caller)
        else:
            self.step()

    def _handle_discarded(self, unraisable: Any) -> None:
        """Raise the exception of the signal again if Python has discarded it. Report any other exception as before."""
        if not self.number or not isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):
            self._report(unraisable)
        elif not self._closing:
            # Raise it at the next line of the function that was running when Python discarded it. If that is another
            # `__del__`, Python discards it once more, and the next function outwards follows.
            self._raise_in(sys._getframe().f_back)

    def _raise_in(self, frame: Any) -> None:
        """Raise the exception of the signal at the next line of the function that runs in `frame`."""
        if frame is not None:
            frame.f_trace = self._raise_on_line
            sys.settrace(lambda *event: None)

    def _raise_on_line(self, frame: Any, event: str, argument: Any) -> None:
        del event, argument
        frame.f_trace = None
        sys.settrace(None)
        self.step()


def _find_caller_of_tempfile(frame: Any) -> Any:
    """Return the frame that called a function of `tempfile`, or None if none of them runs. If a signal interrupted such
    a function, a new file or folder would stay, because its owner would not know its name.
    """
    caller = None
    while frame is not None:
        if frame.f_globals.get("__name__") == "tempfile":
            caller = frame.f_back
        frame = frame.f_back
    return caller


def _lower(kind: int, limit: int) -> None:
    """Set a soft limit, and keep it within the hard limit."""
    import resource

    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _wait(
    child: int, program: str, budget: Budget, mask: Iterable[int], pipe: Tuple[int, int], unwound: mmap.mmap
) -> NoReturn:
    def forward(number: int, frame: Any) -> None:
        """Forward a signal to the child, which does the work."""
        del frame
        os.kill(child, number)

    for name in _ENDS:
        # a signal that the caller ignores (nohup) stays ignored
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGCHLD})
    status = relay(child, *pipe)
    if os.WIFEXITED(status) and (os.WEXITSTATUS(status) != _LIBRARY or unwound[0]):
        os._exit(os.WEXITSTATUS(status))
    number = 0 if os.WIFEXITED(status) else os.WTERMSIG(status)
    if number in [getattr(signal, name) for name in (*_ENDS, "SIGPIPE")]:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    try:
        print(f"{program}: {_describe_end(number, budget)}", file=sys.stderr, flush=True)
    finally:
        os._exit(BudgetError.exit_code)


def _describe_end(number: int, budget: Budget) -> str:
    """Return why the signal `number` ended the child. 0 means that a library ended it."""
    if number == getattr(signal, "SIGXCPU", None):
        spent = (
            f"ended after {budget.seconds} s of processor time without progress, or a tenth of it in a model's shapes"
        )
        fix = f"If you trust the files, raise the limit: {VARIABLE}=seconds={4 * budget.seconds}"
        return str(BudgetError(f"{spent}; a file may be made to cause this", fix))
    name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
    cause = f"signal {name}" if number else "a library"
    problem = f"ended by {cause}: a file crashed a library, or needs more memory than there is"
    return str(BudgetError(problem, f"Do not trust the files; {VARIABLE} sets the limits (docs/security.md)"))


def _die_with(parent: int) -> None:
    """End this process when `parent` ends, if the system supports that (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended in the meantime
        os._exit(BudgetError.exit_code)


def _compute_three_quarters() -> int:
    """Return three quarters of the memory of the machine or the container, or 0 if neither can be read."""
    sizes = []
    with suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # "max" means no limit. This uses `open`, because pathlib is imported later.
    with suppress(ValueError, OSError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as stream:  # noqa: PTH123
        sizes.append(int(stream.read(32)))
    positive = [size for size in sizes if size > 0]
    return min(positive) // 4 * 3 if positive else 0


def _parse_bytes(text: str) -> Optional[int]:
    """Return a size such as "512MiB" in bytes, or None if the text is not a size."""
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :]
    if not (number.isdecimal() and len(number) < 18 and unit in _UNITS):
        return None
    return int(number) << _UNITS[unit]
