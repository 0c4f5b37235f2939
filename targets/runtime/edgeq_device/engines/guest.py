"""Start a program that runs sessions in another process, and use these sessions like onnxruntime's own.

A `Guest` sends requests to the standard input of the program; `edgeq_device.engines.serve` is the other side.

`python -m` and PYTHONPATH would put folders with downloaded files first on the search path, so a `numpy.py` next to the
model would run. The child is therefore isolated (-I). It uses the search path of this process, without the working
directory, and takes edgeq_device from the same place as this process. If this process has read edgeq_device from a
bundle's zip, it writes a copy for the child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from edgeq_device.engines.frames import read_frame, write_frame
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.measure.latency import Burst, Bursts
from edgeq_device.model.tensors import TensorInfo
from edgeq_device.system.budget import without_seconds
from edgeq_device.system.places import make_temporary_folder
from edgeq_device.system.programs import build_child_environment
from edgeq_device.system.relay import Tail

# This code runs before edgeq_device can be imported. Until it has set the search path, it imports only `sys`. An import
# statement works with every kind of loader; the loader of zips has no exec_module before Python 3.10.
_BOOT = """
import sys
root, module, *path = sys.argv[1:]
sys.path = [root, *path]
import edgeq_device
del sys.path[0]
from importlib import import_module
sys.exit(import_module(module).main())
"""


def build_python_command(module: str) -> List[str]:
    """Return the command line that runs `main()` of a module of edgeq_device in a fresh isolated interpreter."""
    # Use -B, because a compiled file in a bundle would not be in the bundle's manifest.
    return [sys.executable, "-I", "-B", "-c", _BOOT, str(_find_root()), module, *list_import_path()]


@lru_cache(maxsize=1)
def _find_root() -> Path:
    """Return the folder or zip that contains edgeq_device. If the code came from a bundle's zip, return a copy of that
    zip.
    """
    content = getattr(getattr(__spec__, "loader", None), "content", None)
    if content is None:
        return Path(__file__).absolute().parents[2]
    folder, _ = make_temporary_folder("edgeq-runner-", "another process cannot be started")
    place = folder / "edgeq_device.zip"
    place.write_bytes(content)
    return place


def describe_exit(code: int) -> str:
    """Return a description of how a child ended, such as "exit code 3" or "signal SIGSEGV"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def list_import_path() -> List[str]:
    """Return the search path of this process for modules, without the working directory.

    The exception is a working directory from which numpy or onnxruntime was loaded: it is kept, because they are
    installed there.
    """
    try:
        working_folder: Optional[str] = os.path.realpath(Path.cwd())
    except OSError:  # the directory was removed, so nothing can be imported from it
        working_folder = None
    # A working directory may be the very place where numpy or onnxruntime are installed.
    package_folders = {_find_folder_of("numpy"), _find_folder_of("onnxruntime")}
    entries = [str(entry) for entry in sys.path]
    return [
        e
        for e in entries
        if Path(e).is_absolute() and (os.path.realpath(e) != working_folder or working_folder in package_folders)
    ]


def _find_folder_of(package: str) -> Optional[str]:
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.realpath(str(Path(file).parent.parent)) if file else None


Arrays = Dict[str, "np.ndarray[Any, Any]"]


class Guest:
    """Start a program that answers requests, and send it requests. Call `end` when the program is no longer needed.

    Args:
        title: name of the program in messages.
        request_s: seconds to wait for an answer. After that, the program is ended.
        failure: exception for errors of the program and of the runtime in it.

    Raises:
        RuntimeUnavailableError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        title: str,
        *,
        request_s: float,
        failure: Type[Exception] = RuntimeUnavailableError,
    ) -> None:
        self.title = title
        self.request_s = request_s
        self._failure = failure
        self._late = False
        pipe = subprocess.PIPE
        try:
            with without_seconds():  # each answer has its own limit
                self._process = subprocess.Popen(
                    list(command), stdin=pipe, stdout=pipe, stderr=pipe, env=build_child_environment(environment)
                )
        except OSError as error:
            raise RuntimeUnavailableError(f"{command[0]} cannot be started ({error.strerror})") from error
        self._errors = Tail(self._process)

    @property
    def process(self) -> int:
        """Return the process id of the program."""
        return self._process.pid

    def finish(self, within_s: float) -> None:
        """Close the input of the program and wait for it to end, so that it can write its files. Kill it after
        `within_s` seconds.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        watchdog = threading.Timer(within_s, self._process.kill)
        watchdog.start()
        try:
            self._process.wait()
        finally:
            watchdog.cancel()

    def end(self) -> None:
        """Kill the program. A second call does nothing."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # input that the program has not read is lost
            pass

    def exchange(
        self, request: Mapping[str, Any], arrays: Optional[Mapping[str, "np.ndarray[Any, Any]"]] = None
    ) -> Tuple[Dict[str, Any], Arrays]:
        """Send one request. Return the values and the arrays of the reply.

        Raises:
            RuntimeUnavailableError: the program has ended or does not answer, or the runtime in it refuses the request.
            ValueError: the runtime refuses the inputs, as it would in this process.
        """
        assert self._process.stdin is not None
        watchdog = threading.Timer(self.request_s, self._give_up)
        watchdog.start()
        try:
            write_frame(self._process.stdin, request, arrays or {})
            frame = self._receive(request)
        except (OSError, ValueError, EOFError) as error:  # the pipe is closed, or a frame is cut off
            raise self._failure(f"{self.title} {self._describe_end()}") from error
        finally:
            watchdog.cancel()
        if frame is None:
            raise self._failure(f"{self.title} {self._describe_end()}")
        reply, results = frame
        if "error" in reply:
            if reply["kind"] in ("InvalidArgument", "ValueError"):
                raise ValueError(reply["error"])
            raise self._failure(f"{self.title}: {reply['error']}")
        return reply, results

    def open_session(self, request: Mapping[str, Any]) -> GuestSession:
        """Open the session that a request describes."""
        reply, _ = self.exchange({"do": "open", **request})
        inputs, outputs = (tuple(TensorInfo(*spec) for spec in reply[key]) for key in ("inputs", "outputs"))
        return GuestSession(self, reply["session"], inputs, outputs, tuple(reply["providers"]))

    def _receive(self, request: Mapping[str, Any]) -> Optional[Tuple[Dict[str, Any], Arrays]]:
        """Return the answer to `request`, or None if the program has ended."""
        del request
        assert self._process.stdout is not None
        return read_frame(self._process.stdout)

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _describe_end(self) -> str:
        if self._late:
            return f"does not answer within {self.request_s:g} s"
        self._process.kill()
        code = self._process.wait()
        text = self._errors.read_last().decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # After a crash, the last line may have nothing to do with it. A process that was killed, perhaps by this one,
        # writes no last line.
        crashed = code < 0 and code != -signal.SIGKILL
        return f"ended: {'; '.join([describe_exit(code)] * (crashed or not lines) + lines[-1:])}"


@dataclass(frozen=True, eq=False)
class GuestSession:
    """Provide the part of `onnxruntime.InferenceSession` that measurements need. Like an `InferenceSession`, the object
    is equal only to itself.
    """

    guest: Guest
    number: int
    inputs: Tuple[TensorInfo, ...]
    outputs: Tuple[TensorInfo, ...]
    providers: Tuple[str, ...] = ()

    def get_inputs(self) -> Sequence[TensorInfo]:
        """Return the inputs in the same form as onnxruntime's session."""
        return self.inputs

    def get_outputs(self) -> Sequence[TensorInfo]:
        """Return the outputs in the same form as onnxruntime's session."""
        return self.outputs

    def get_providers(self) -> Sequence[str]:
        """Return the providers that have really started, in the same form as onnxruntime's session."""
        return self.providers

    def run(self, output_names: Optional[Sequence[str]], input_feed: Mapping[str, Any]) -> List[Any]:
        """Run the model like onnxruntime's session. An output that is not an array is None."""
        names = list(output_names or [output.name for output in self.outputs])
        feeds = {name: np.asarray(value) for name, value in input_feed.items()}
        _, results = self.guest.exchange({"do": "run", "session": self.number, "outputs": names}, feeds)
        return [results.get(name) for name in names]

    def end_profiling(self) -> str:
        """Return the path of the profile, like onnxruntime's session. The session must have been opened with a
        profile.
        """
        return str(self.guest.exchange({"do": "end profiling", "session": self.number})[0]["profile"])

    def query_runner(self, feeds: Sequence[Mapping[str, Any]], **queries: int) -> GuestRunner:
        """Return a runner that runs queries in the guest. `edgeq_device.measure.scenarios.make_runner` calls this. The
        samples are sent only once.
        """
        arrays = {f"{i} {name}": np.asarray(value) for i, feed in enumerate(feeds) for name, value in feed.items()}
        request = {"do": "prepare", "session": self.number, "samples": len(feeds), "queries": queries}
        reply, _ = self.guest.exchange(request, arrays)
        return GuestRunner(self, reply["runner"])

    def close(self) -> None:
        """Free the session's memory."""
        self.guest.exchange({"do": "close", "session": self.number})


@dataclass(frozen=True)
class GuestRunner:
    """Run queries in the guest: see `edgeq_device.measure.latency.Runner`."""

    session: GuestSession
    number: int

    def __call__(self) -> object:
        return self.burst(Bursts(0.0, 0.0), slow=True)

    def burst(self, bursts: Bursts, slow: bool) -> Burst:
        """Run a burst like `edgeq_device.measure.latency.run_burst`, but time it with the guest's clock."""
        turn = {"length_s": bursts.length_s, "lead_in_s": bursts.lead_in_s, "slow": slow}
        request = {"do": "burst", "session": self.session.number, "runner": self.number, **turn}
        reply, results = self.session.guest.exchange(request)
        return Burst(results["samples"].tolist(), reply["busy_s"], results["disturbed"], reply["cpu_s"])
