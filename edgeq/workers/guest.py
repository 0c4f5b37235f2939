"""A process of its own, on other kernels or not, and sessions inside it that are used like onnxruntime's own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from edgeq_device.children import describe_exit
from edgeq_device.frames import read_frame, write_frame
from edgeq_device.latency import Burst, Bursts
from numpy.typing import NDArray

from edgeq.device import device_errors
from edgeq.errors import RuntimeUnavailableError
from edgeq.resources import shipped
from edgeq.session import SessionSettings

Array = NDArray[Any]

REQUEST_S = 3600.0
"""A program that has not answered by then is ended. An emulated inference of a large model takes minutes."""
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

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stderr: IO[bytes],
        title: str,
        request_s: float = REQUEST_S,
        failure: type[RuntimeUnavailableError] = RuntimeUnavailableError,
    ) -> None:
        self._process = process
        self._stderr = stderr
        self.title = title
        self._request_s = request_s
        self._failure = failure
        self._late = False

    def exchange(
        self, request: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Send one request; gives the values and the arrays of the reply.

        Raises:
            RuntimeUnavailableError: the guest has ended or does not answer, or the runtime in it refuses.
            ValueError: the runtime refuses the inputs, as it does in this process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._request_s, self._give_up)
        watchdog.start()
        try:
            with device_errors():
                write_frame(self._process.stdin, request, arrays or {})
            frame = read_frame(self._process.stdout)
        except (OSError, ValueError) as error:  # the pipe is closed, or a frame ends in its middle
            raise self._failure(f"{self.title} {self._last_error()}") from error
        finally:
            watchdog.cancel()
        if frame is None:
            raise self._failure(f"{self.title} {self._last_error()}")
        reply, results = frame
        if "error" in reply:
            if reply["kind"] in ("InvalidArgument", "ValueError"):
                raise ValueError(reply["error"])
            raise self._failure(f"{self.title}: {reply['error']}")
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
            "engine": settings.engine.to_dict() if settings.engine is not None else None,
            "precision": settings.precision,
        }
        reply, _ = self.exchange(request)
        inputs, outputs = _infos(reply["inputs"]), _infos(reply["outputs"])
        return GuestSession(self, reply["session"], inputs, outputs, tuple(reply["providers"]))

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _last_error(self) -> str:
        if self._late:
            return f"does not answer within {self._request_s:g} s"
        self._process.kill()
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
        # After a crash the last line may be about anything; a process that was killed, by this one too, writes none.
        crashed = code < 0 and code != -signal.SIGKILL
        return f"ended: {'; '.join([describe_exit(code)] * (crashed or not lines) + lines[-1:])}"


@dataclass(frozen=True)
class GuestSession:
    """The part of `onnxruntime.InferenceSession` that measuring needs."""

    guest: Guest
    number: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    providers: tuple[str, ...] = ()

    def get_inputs(self) -> Sequence[TensorInfo]:
        """As onnxruntime's."""
        return self.inputs

    def get_outputs(self) -> Sequence[TensorInfo]:
        """As onnxruntime's."""
        return self.outputs

    def get_providers(self) -> Sequence[str]:
        """As onnxruntime's: those that really started."""
        return self.providers

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        """As onnxruntime's; None for an output that is no array."""
        names = list(output_names or [output.name for output in self.outputs])
        feeds = {name: np.asarray(value) for name, value in input_feed.items()}
        _, results = self.guest.exchange({"do": "run", "session": self.number, "outputs": names}, feeds)
        return [results.get(name) for name in names]

    def end_profiling(self) -> str:
        """As onnxruntime's: the profile of a session that was opened with `profile_prefix`."""
        return str(self.guest.exchange({"do": "end profiling", "session": self.number})[0]["profile"])

    def query_runner(self, feeds: Sequence[Mapping[str, Any]], **queries: int) -> GuestRunner:
        """As `edgeq_device.scenarios.query_runner`, which calls this: the samples are sent once."""
        arrays = {f"{i} {name}": np.asarray(value) for i, feed in enumerate(feeds) for name, value in feed.items()}
        request = {"do": "prepare", "session": self.number, "samples": len(feeds), "queries": queries}
        reply, _ = self.guest.exchange(request, arrays)
        return GuestRunner(self, reply["runner"])

    def close(self) -> None:
        """Give the session's memory back."""
        self.guest.exchange({"do": "close", "session": self.number})


@dataclass(frozen=True)
class GuestRunner:
    """Queries that run in the guest: see `edgeq_device.latency.Runner`."""

    session: GuestSession
    number: int

    def __call__(self) -> object:
        return self.burst(Bursts(0.0, 0.0), slow=True)

    def burst(self, bursts: Bursts, slow: bool) -> Burst:
        """As `edgeq_device.latency.burst`, on the guest's clock."""
        turn = {"length_s": bursts.length_s, "lead_in_s": bursts.lead_in_s, "slow": slow}
        request = {"do": "burst", "session": self.session.number, "runner": self.number, **turn}
        reply, results = self.session.guest.exchange(request)
        return Burst(results["samples"].tolist(), reply["busy_s"], results["disturbed"], reply["cpu_s"])


@contextmanager
def start_guest(
    command: Command,
    title: str,
    *,
    request_s: float = REQUEST_S,
    failure: type[RuntimeUnavailableError] = RuntimeUnavailableError,
) -> Iterator[Guest]:
    """Run the guest program and end it behind the block.

    Args:
        title: names it in messages.
        request_s: seconds after which a request without an answer ends it.
        failure: what is raised for the guest and for the runtime in it.

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
                yield Guest(process, lines, title, request_s, failure)
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
