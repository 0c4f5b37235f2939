"""Engines in processes of their own: a plug-in that crashes or hangs takes nothing with it, and the thread pools of two
engines do not disturb each other's timings."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from edgeq_device.children import import_path
from edgeq_device.engines import EngineSpec, find_library

from edgeq.device import device_errors
from edgeq.engines import Engine
from edgeq.errors import EngineError
from edgeq.session import SessionSettings, onnxruntime, open_session, with_carried
from edgeq.workers.guest import Command, Guest, guest_environment, start_guest

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
            RuntimeUnavailableError: as `edgeq.session.open_session`; EngineError from an engine's process.
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
