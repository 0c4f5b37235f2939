"""A process of its own, on other kernels or not, and sessions inside it that are used like onnxruntime's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgeq_device.guest
from edgeq_device.guest import GuestSession
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
        compiled: folder that keeps compiled modules from one start to the next; None: nothing is written, and only what
            lies beside the modules is read.
    """

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folders: tuple[Path, ...] = ()
    compiled: Path | None = None

    @property
    def python(self) -> tuple[str, ...]:
        """The interpreter with its own options, up to the script."""
        kept = ("-X", f"pycache_prefix={self.compiled}") if self.compiled is not None else ("-B",)
        return (*self.interpreter, "-I", *kept)


def guest_program() -> Path:
    """The script that serves requests in the guest, as shipped."""
    return shipped("targets") / "runtime" / "edgeq_guest.py"


class Guest(edgeq_device.guest.Guest):
    """A running guest program; made by `start_guest`."""

    def exchange(
        self, request: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """As it is on a device, with edgeq's errors."""
        with device_errors():
            return super().exchange(request, arrays)

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def features(self, masked: Sequence[str] = (), *, runtime: bool = True) -> dict[str, Any]:
        """What the guest reports: "architecture", "features", "python", "numpy" and, with `runtime`, "onnxruntime" and
        "trapped" (how many CPUID instructions a mask has replaced the result of)."""
        return self.exchange({"do": "features", "masked": list(masked), "runtime": runtime})[0]

    def open(self, model: Path, settings: SessionSettings, name: str = "model") -> GuestSession:
        """A session of `model` in the guest."""
        return self.opened(open_request(str(model.resolve()), settings, name))


def open_request(model: str, settings: SessionSettings, name: str = "model") -> dict[str, Any]:
    """What opens the model at a path of the guest's."""
    return {
        "name": name,
        "model": model,
        "provider": settings.providers[0],
        "session_options": dict(settings.config),
        "optimization": settings.optimization,
        "threads": settings.intra_op_threads,
        "profile": [str(settings.profile_prefix), str(settings.save_optimized_to)] * bool(settings.profile_prefix),
        "engine": settings.engine.to_dict() if settings.engine is not None else None,
        "precision": settings.precision,
    }


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
    line = [*command.python, str(program), path, *command.arguments]
    with device_errors():
        guest = Guest(line, command.environment, title, request_s=request_s, failure=failure)
    try:
        yield guest
        guest.finish(_EXIT_S)
    finally:
        guest.end()


def guest_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the settings that programs in the guest need."""
    return {**base, "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": tempfile.gettempdir()}
