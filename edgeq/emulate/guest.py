"""A process on other kernels, and sessions inside it that are used like onnxruntime's own."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from edgeq_device.frames import read_frame, write_frame
from numpy.typing import NDArray

from edgeq.device import device_errors
from edgeq.errors import RuntimeUnavailableError
from edgeq.resources import shipped
from edgeq.session import SessionSettings

Array = NDArray[Any]

# An emulated inference of a large model takes minutes; a program that hangs is ended after this.
_REQUEST_S = 3600.0
_EXIT_S = 60.0


@dataclass(frozen=True)
class Command:
    """How to start Python on other kernels.

    Attributes:
        interpreter: the command line up to the script; `arguments`: what follows the script.
        environment: of the process.
        folders: where modules are looked for first: Python runs isolated, so that PYTHONPATH does nothing.
    """

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folders: tuple[Path, ...] = ()


def guest_program() -> Path:
    """The script that serves requests in the guest, as shipped."""
    return shipped("targets") / "runtime" / "edgeq_guest.py"


@dataclass(frozen=True)
class TensorInfo:
    """As onnxruntime's NodeArg."""

    name: str
    type: str
    shape: list[int | str | None]


class Guest:
    """A running guest program; made by `start_guest`."""

    def __init__(self, process: subprocess.Popen[bytes], command_line: IO[bytes], title: str) -> None:
        self._process = process
        self._stderr = command_line
        self.title = title

    def exchange(
        self, request: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Send one request; gives the values and the arrays of the reply.

        Raises:
            RuntimeUnavailableError: the guest has ended, or the runtime in it refuses.
            ValueError: the runtime refuses the inputs, as it does in this process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(_REQUEST_S, self._process.kill)
        watchdog.start()
        try:
            with device_errors():
                write_frame(self._process.stdin, request, arrays or {})
            frame = read_frame(self._process.stdout)
        except (OSError, ValueError) as error:  # the pipe is closed, or a frame ends in its middle
            raise RuntimeUnavailableError(f"{self.title} ended: {self._last_error()}") from error
        finally:
            watchdog.cancel()
        if frame is None:
            raise RuntimeUnavailableError(f"{self.title} ended: {self._last_error()}")
        reply, results = frame
        if "error" in reply:
            if reply["kind"] in ("InvalidArgument", "ValueError"):
                raise ValueError(reply["error"])
            raise RuntimeUnavailableError(f"{self.title}: {reply['error']}")
        return reply, results

    def features(self, masked: Sequence[str] = (), *, runtime: bool = True) -> dict[str, Any]:
        """What the guest reports: "architecture", "features", "python", "numpy" and, with `runtime`, "onnxruntime" and
        "trapped" (how many CPUID instructions a mask has replaced the result of)."""
        return self.exchange({"do": "features", "masked": list(masked), "runtime": runtime})[0]

    def open(self, model: Path, settings: SessionSettings, name: str = "model") -> GuestSession:
        """A session of `model` in the guest."""
        request = {
            "do": "open",
            "name": name,
            "model": str(model.resolve()),
            "provider": settings.providers[0],
            "session_options": dict(settings.config),
            "provider_options": {},
            "optimization": settings.optimization,
            "threads": settings.intra_op_threads,
            "profile": [str(settings.profile_prefix), str(settings.save_optimized_to)] * bool(settings.profile_prefix),
        }
        reply, _ = self.exchange(request)
        return GuestSession(self, reply["session"], _infos(reply["inputs"]), _infos(reply["outputs"]))

    def _last_error(self) -> str:
        self._process.kill()
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {code}"


@dataclass(frozen=True)
class GuestSession:
    """The part of `onnxruntime.InferenceSession` that measuring needs."""

    guest: Guest
    number: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def get_inputs(self) -> Sequence[TensorInfo]:
        """As onnxruntime's."""
        return self.inputs

    def get_outputs(self) -> Sequence[TensorInfo]:
        """As onnxruntime's."""
        return self.outputs

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        """As onnxruntime's; None for an output that is no array."""
        names = list(output_names or [output.name for output in self.outputs])
        feeds = {name: np.asarray(value) for name, value in input_feed.items()}
        _, results = self.guest.exchange({"do": "run", "session": self.number, "outputs": names}, feeds)
        return [results.get(name) for name in names]

    def end_profiling(self) -> str:
        """As onnxruntime's: the profile of a session that was opened with `profile_prefix`."""
        return str(self.guest.exchange({"do": "end profiling", "session": self.number})[0]["profile"])

    def close(self) -> None:
        """Give the session's memory back."""
        self.guest.exchange({"do": "close", "session": self.number})


@contextmanager
def start_guest(command: Command, title: str) -> Iterator[Guest]:
    """Run the guest program and end it behind the block; `title` names it in messages.

    Raises:
        RuntimeUnavailableError: it cannot be started.
    """
    program = guest_program()
    path = os.pathsep.join(map(str, (program.parent, *command.folders)))
    command_line = [*command.interpreter, "-I", "-B", str(program), path, *command.arguments]
    with tempfile.TemporaryFile() as lines:
        try:
            process = subprocess.Popen(
                command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, env=dict(command.environment)
            )
        except OSError as error:
            raise RuntimeUnavailableError(f"{command_line[0]} cannot be started ({error.strerror})") from error
        with process:
            try:
                yield Guest(process, lines, title)
                # It ends by itself at the end of its input, so that what it keeps for later is written.
                assert process.stdin is not None
                process.stdin.close()
                _wait(process)
            finally:
                process.kill()


def _wait(process: subprocess.Popen[bytes]) -> None:
    watchdog = threading.Timer(_EXIT_S, process.kill)
    watchdog.start()
    try:
        process.wait()
    finally:
        watchdog.cancel()


def guest_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the settings that programs in the guest need."""
    return {**base, "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": tempfile.gettempdir()}


def _infos(listed: Sequence[Sequence[Any]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, kind, shape) for name, kind, shape in listed)
