"""Engines in processes of their own: a plug-in that crashes or hangs takes nothing with it, and the thread pools of two
engines do not disturb each other's timings."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import edgeq_device.guest
from edgeq_device.engines import EngineSpec, find_library
from edgeq_device.guest import GuestSession, import_path
from numpy.typing import NDArray

from edgeq.errors import EngineError, RuntimeUnavailableError
from edgeq.run.engines import Engine
from edgeq.run.session import SessionSettings, onnxruntime, open_session, with_carried
from edgeq.util.resources import device_errors, shipped

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


ANSWER_S = 600.0
"""An engine that has not answered by then hangs: compiling a large model takes a minute or two."""
_KEPT_BYTES = 2**26
"""Of a model file; what is compiled from larger ones would fill the disk."""


@contextmanager
def start_engine(
    engine: EngineSpec, *, environment: Mapping[str, str] | None = None, answer_s: float = ANSWER_S
) -> Iterator[Guest]:
    """A process for `engine`; open models in it with `Guest.open`, whose settings name the engine.

    Args:
        environment: variables to set in it besides this process's.

    Raises:
        EngineError: the process cannot be started; the guest raises it too.
        RuntimeUnavailableError: the engine is not installed, or too old.
    """
    with device_errors():
        if engine.module:
            find_library(engine, str(onnxruntime().__version__))
    command = Command(
        (sys.executable,),
        (),
        guest_environment({**os.environ, **(environment or {})}),
        tuple(map(Path, import_path())),
    )
    with start_guest(command, f"the process of {engine.name}", request_s=answer_s, failure=EngineError) as guest:
        yield guest


class Engines:
    """Opens sessions: in this process, or in that of the plug-in engine that the settings name, which is started when
    the first one is opened. Ends them all behind its `with` block.

    Args:
        keep: whether what an engine has compiled is kept for the next session of the same file.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._stack = ExitStack()
        self._running: dict[str, Guest] = {}
        made = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeq-compiled-")) if keep else None
        self._folder = Path(made) if made is not None else None

    def open(self, model: Path, settings: SessionSettings) -> Any:
        """An `onnxruntime.InferenceSession`, or what is used like one.

        Raises:
            RuntimeUnavailableError: as `edgeq.run.session.open_session`; EngineError from an engine's process.
        """
        engine = settings.engine
        if engine is None or not engine.module:
            return open_session(model, settings)
        if self._folder is not None and isinstance(engine, Engine) and model.stat().st_size <= _KEPT_BYTES:
            settings = replace(settings, engine=engine.keeping(self._folder / f"{engine.name}-{settings.precision}"))
        return self._guest(engine).open(model, with_carried(model, settings))

    def assigned_nodes(self, engine: EngineSpec, model: Path) -> tuple[tuple[str, ...], ...]:
        """Names of the nodes of `model` that a plug-in takes: one tuple for each graph that it makes of them.

        Raises:
            RuntimeUnavailableError, EngineError: as `open`.
        """
        request = {"do": "assign", "model": str(model.resolve()), "engine": engine.to_dict()}
        graphs = self._guest(engine).exchange(request)[0]["graphs"]
        return tuple(tuple(nodes) for provider, nodes in graphs if provider == engine.provider)

    def compile(self, engine: EngineSpec, model: Path, output: Path) -> None:
        """Write `model` as a plug-in has compiled it, all of it in one file.

        Raises:
            RuntimeUnavailableError, EngineError: as `open`.
        """
        files = {"model": str(model.resolve()), "output": str(output.resolve())}
        self._guest(engine).exchange({"do": "compile", **files, "engine": engine.to_dict()})

    def _guest(self, engine: EngineSpec) -> Guest:
        if engine.name not in self._running or self._running[engine.name].ended:
            self._running[engine.name] = self._stack.enter_context(start_engine(engine))
        return self._running[engine.name]

    def ended(self) -> tuple[str, ...]:
        """Names of the engines whose process has ended by itself: `open` starts another one."""
        return tuple(name for name, guest in self._running.items() if guest.ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
