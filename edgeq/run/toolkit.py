"""Find, install and run a vendor's toolkit, which is a compiler in its own environment.

A toolkit needs other releases of Python and of packages than edgeq does, and its vendor has terms of use. So edgeq does
not depend on any toolkit, and no wheel or bundle contains one. Each job runs in its own process, in an empty folder,
with a time limit. edgeq keeps the job's stdout and stderr.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from edgeq_device.engines.catalog import read_platform
from edgeq_device.system.budget import VARIABLE, without_seconds
from edgeq_device.system.cache import describe_exposure
from edgeq_device.system.programs import bind_to_parent, build_child_environment, find_program

from edgeq.errors import BudgetError, EngineError, OutputError, RuntimeUnavailableError, UsageError, one_line
from edgeq.util.display import SILENT, Progress
from edgeq.util.folders import shipped, user_folder
from edgeq.util.outputs import is_full
from edgeq.util.process import endings

SECONDS = "EDGEQ_TOOLKIT_SECONDS"
"""Environment variable that overrides the time limit of a job, in seconds."""
# Seconds for a Python to start, perhaps from a slow network drive.
_PROBE_S = 60.0
# pip's errors may be long; one line of a message is not.
_LAST = 300
_POLL_S = 0.002
_OUT, _ERRORS = "stdout", "stderr"
# How Python, C++ and the system say that memory ran out.
_NO_MEMORY = re.compile(r"\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory")
# The reason is at the end of a long log.
_LAST_TEXT = 1 << 16


@dataclass(frozen=True)
class Toolkit:
    """Describe a toolkit.

    Attributes:
        name: the name that users write.
        title: name for people.
        package: the distribution whose version is the toolkit's version.
        version: the only release that edgeq was tested with.
        pythons: releases of Python that it supports, such as "3.11".
        platforms: platforms that it supports, such as "linux x86_64".
        lock: file in `targets/` that names every package to install, with its version and its hashes, for pip.
        megabytes: disk space of the environment, in megabytes.
        terms: one sentence on the terms of use.
        variable: environment variable that names a Python that has the toolkit.
        seconds: time limit of a job, in seconds.
        why, source: reasons for the values, and their sources.
    """

    name: str
    title: str
    package: str
    version: str
    pythons: tuple[str, ...]
    platforms: tuple[str, ...]
    lock: str
    megabytes: int
    terms: str
    variable: str
    seconds: float
    why: Mapping[str, str]
    source: Mapping[str, str]

    @property
    def needs(self) -> str:
        """Return the toolkit's package and version as one text."""
        return f"{self.package} {self.version}"

    @property
    def folder(self) -> Path:
        """Return the path of the toolkit's environment, which is in the user's cache.

        Raises:
            RuntimeUnavailableError: the user has no home folder.
        """
        cache = user_folder("cache")
        if cache is None:
            raise RuntimeUnavailableError("there is no home folder for toolkits", f"Set {self.variable}")
        return cache / "toolkits" / f"{self.name}-{self.version}"

    def plan(self) -> str:
        """Return one sentence that describes what an installation would add to the machine."""
        work = f"downloads and installs {self.needs}, with the packages, versions and hashes in {self.lock_file}"
        return f"{work}, into {self.folder}, about {self.megabytes} MB; {self.terms}"

    @property
    def lock_file(self) -> Path:
        """Return the path of the lock file."""
        return shipped("targets") / self.lock


@dataclass(frozen=True)
class Ran:
    """Describe an ended job: its exit status (negative for a signal), its stdout and its stderr."""

    code: int
    out: str
    errors: str

    @property
    def ending(self) -> str:
        """Return a few words that describe how the job ended."""
        if self.code >= 0:
            return f"ends with status {self.code}"
        with suppress(ValueError):
            return f"ends with {signal.Signals(-self.code).name}"
        return f"ends with signal {-self.code}"


def find_python(toolkit: Toolkit) -> Path:
    """Return the path of a Python that has the toolkit.

    Raises:
        RuntimeUnavailableError: there is no such Python, it has another release of the toolkit, or it is in a cache
            that others could have changed.
    """
    named = os.environ.get(toolkit.variable, "")
    place = Path(named) if named else toolkit.folder / "bin" / "python"
    fix = f"Run `edgeq toolkit {toolkit.name} ⟨install⟩`, or name a Python that has it in {toolkit.variable}"
    # A Python that the user names is the user's decision; a cache must be checked.
    if not named:
        _check_cache(toolkit, toolkit.folder)
    if named and place.is_dir():
        place = place / "bin" / "python"
    if not (place.is_file() and os.access(place, os.X_OK)):
        problem = f"{toolkit.variable} names {named}, which is not a Python" if named else "it is not installed"
        raise RuntimeUnavailableError(f"{toolkit.needs} is needed: {problem}", fix)
    version = _read_version(place, toolkit)
    if version != toolkit.version:
        has = f"has {toolkit.package} {version}" if version else f"has no {toolkit.package}"
        raise RuntimeUnavailableError(f"{toolkit.needs} is needed: {place} {has}", fix)
    return place


def _check_cache(toolkit: Toolkit, folder: Path) -> None:
    if problem := describe_exposure(folder):
        raise RuntimeUnavailableError(
            f"{toolkit.needs} is not run: {problem}",
            f"Remove {toolkit.folder}, set XDG_CACHE_HOME to a folder that only you can write, and run "
            f"`edgeq toolkit {toolkit.name} ⟨install⟩`",
        )


def describe_state(toolkit: Toolkit) -> str:
    """Return the path of the toolkit's Python, or the reason why there is none."""
    try:
        return f"{toolkit.needs}: {find_python(toolkit)}"
    except RuntimeUnavailableError as error:
        return error.text


def _read_version(python: Path, toolkit: Toolkit) -> str:
    """Return the release of the toolkit that a Python has, or "" if it has none."""
    code = f"from importlib.metadata import version; print(version({toolkit.package!r}))"
    try:
        process = subprocess.run(
            [python, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            env=build_child_environment(),
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def find_base(toolkit: Toolkit) -> Path:
    """Return a Python whose release the toolkit supports.

    Raises:
        RuntimeUnavailableError: this machine has no such Python, or the toolkit does not support the machine.
    """
    if read_platform() not in toolkit.platforms:
        raise RuntimeUnavailableError(
            f"there is no {toolkit.needs} for {read_platform()}", f"Compile on {' or '.join(toolkit.platforms)}"
        )
    # edgeq's own Python is certainly there.
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running in toolkit.pythons:
        return Path(sys.executable)
    for release in toolkit.pythons:
        if program := find_program(f"python{release}"):
            return Path(program)
    releases = " or ".join(toolkit.pythons)
    raise RuntimeUnavailableError(
        f"{toolkit.needs} needs Python {releases}; this is {running}", f"Install Python {toolkit.pythons[-1]}"
    )


def install(toolkit: Toolkit, *, progress: Progress = SILENT) -> Path:
    """Make the environment of a toolkit with pip, and return its Python. pip installs only the files whose hashes are
    in the toolkit's lock file, and runs no code from them.

    The environment gets its name when it is complete. If this fails, the unfinished environment is removed, or the next
    installation removes it.

    Raises:
        RuntimeUnavailableError: there is no suitable Python, others can write to the cache, or pip fails.
        OutputError: the folder contains something else, another process installs the toolkit, or the disk is full.
    """
    base, folder = find_base(toolkit), toolkit.folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_cache(toolkit, folder if folder.exists() else folder.parent)
    with _lock(folder.parent):
        if folder.exists():
            python = folder / "bin" / "python"
            if python.is_file() and _read_version(python, toolkit) == toolkit.version:
                return python
            raise OutputError(f"{folder} contains something else", "Remove it")
        # pip would fail after minutes, with half an environment.
        if shutil.disk_usage(folder.parent).free < toolkit.megabytes << 20:
            raise OutputError(
                f"{folder.parent} has less than {toolkit.megabytes} MB free", "Free some space, or set XDG_CACHE_HOME"
            )
        draft = folder.with_name(f"{folder.name}.partial")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            # With -I, Python does not search the working directory for `venv` and `pip`.
            python, options = draft / "bin" / "python", ("-I", "-m", "pip", "install", "--quiet")
            checked = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(toolkit.lock_file))
            with progress.stage(f"Installing {toolkit.needs}"):
                _succeed((str(base), "-I", "-m", "venv", str(draft)), toolkit)
                _succeed((str(python), *options, "--disable-pip-version-check", *checked), toolkit)
            # Scripts in the environment keep the draft's path; edgeq runs only its Python.
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return folder / "bin" / "python"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes from installing into `folder`."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # A lock on the folder itself needs no file that a kill would leave.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise OutputError(f"another process installs into {folder}", "Wait until it ends") from error
    finally:
        os.close(descriptor)


def _succeed(command: Sequence[str], toolkit: Toolkit) -> None:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = _start(command, env=build_child_environment(), text=True, errors="replace", **streams)
    try:
        _, errors = process.communicate()
    except BaseException:
        _end(process)
        raise
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
        reason = one_line(reason, most=_LAST)
        raise RuntimeUnavailableError(f"{toolkit.needs} cannot be installed: {reason}", "Try again")


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that ends with this one. The caller limits the time to wait for it, so the budget's limit on
    processor time between two steps of progress does not apply to it.
    """
    process = None
    try:
        with endings.delay(), without_seconds():
            process = subprocess.Popen(bind_to_parent(command), env=options.pop("env"), **options)
    except BaseException:
        if process is not None:
            _end(process)
        raise
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and wait for its end, so that it writes no more files."""
    process.kill()
    process.wait()


class ToolkitJob:
    """Run a script with the toolkit's Python until the `with` block ends or the time limit is reached.

    Args:
        folder: an empty folder in which the script runs. It is also the process's home folder and contains its
            temporary files.

    Raises:
        RuntimeUnavailableError: the toolkit is not installed.
        UsageError: the time limit in the environment is not a number.
    """

    def __init__(self, toolkit: Toolkit, script: Path, arguments: Sequence[str], folder: Path) -> None:
        self._toolkit, self._folder, self._limit = toolkit, folder, _read_limit(toolkit)
        python = find_python(toolkit)
        # Nothing else of the environment reaches the job, so that it is repeatable.
        environment = {k: v for k, v in build_child_environment().items() if k in ("PATH", "LD_LIBRARY_PATH")}
        with (folder / _OUT).open("wb") as stdout, (folder / _ERRORS).open("wb") as stderr:
            self._process = _start(
                (str(python), "-I", str(script), *arguments),
                cwd=folder,
                env={**environment, "LC_ALL": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)},
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self) -> ToolkitJob:
        return self

    def __exit__(self, *failure: object) -> None:
        self._kill()

    def ask(self, line: str, answer: Path) -> bool:
        """Write a line to the script's input, and wait for the file `answer`. Return False if the script ends first.

        Raises:
            EngineError: no answer comes in time.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        end = monotonic() + self._limit
        # The script's stdout belongs to the vendor's messages, so the answer is a file.
        while not answer.exists():
            # The answer may have come just before the end.
            if self._process.poll() is not None:
                return answer.exists()
            if monotonic() > end:
                raise self._build_timeout()
            sleep(_POLL_S)
        return True

    def finish(self) -> Ran:
        """Close the script's input and wait until the script ends.

        Raises:
            EngineError: the script does not end in time.
            BudgetError: the script needs more memory or processor time than a process may use here.
            OutputError: the disk is full.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(self._limit)
        except subprocess.TimeoutExpired:
            raise self._build_timeout() from None
        # A toolkit reports a full disk in its own words, or crashes.
        if code != 0 and is_full(self._folder):
            raise OutputError(
                f"no space left in {self._folder.parent} for work files", "Free some space, or set TMPDIR"
            )
        ran = Ran(code, _read_text(self._folder / _OUT), _read_text(self._folder / _ERRORS))
        if code == -signal.SIGXCPU:
            problem = f"{self._toolkit.needs} used all the processor time that a process may use here"
            raise BudgetError(problem, "Raise the limit of the shell (ulimit -t)")
        ending = ran.errors[-_LAST_TEXT:] + ran.out[-_LAST_TEXT:]
        # The system kills with this signal if memory runs out.
        if code == -signal.SIGKILL or (code != 0 and _NO_MEMORY.search(ending)):
            problem = f"{self._toolkit.needs} has not enough memory"
            raise BudgetError(problem, f"Compile a smaller model, or set {VARIABLE} as in memory=8GiB")
        return ran

    def _build_timeout(self) -> EngineError:
        return EngineError(
            f"{self._toolkit.needs} reached its time limit of {self._limit:g} s",
            f"Set {SECONDS} to more seconds, or export a simpler model",
        )

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            # Compilers start helpers, which must not outlive the job.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def _read_limit(toolkit: Toolkit) -> float:
    setting = os.environ.get(SECONDS, "")
    try:
        limit = float(setting) if setting else toolkit.seconds
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise UsageError(f"{SECONDS} is {setting!r}", "Set it to a number of seconds")
    return limit


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
