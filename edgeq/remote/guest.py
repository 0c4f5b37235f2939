"""Models on a board, opened and run by the program that runs in emulated machines, and used like sessions here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from edgeq_device.budget import VARIABLE
from edgeq_device.frames import LargeFrameError, read_frame
from edgeq_device.guest import GuestSession, TensorInfo
from edgeq_device.package import MAIN

from edgeq.bundle.verify import opened
from edgeq.errors import BoardError
from edgeq.remote import link as bounds
from edgeq.remote.channel import without_controls
from edgeq.remote.link import LINK_FAILED, Line, Text, hangs
from edgeq.remote.session import KILLED, BoardSession
from edgeq.run.session import SessionSettings, with_carried
from edgeq.run.workers import Array, Guest, guest_environment, open_request
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Count, parse

_WITH_ARRAYS = ("run", "read", "race")
"""Requests whose answers have arrays."""
SENSELESS = (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError)


_Tensor = tuple[Text, Line, tuple[Count | Text | None, ...]]


@dataclass(frozen=True)
class _Opened:
    """A session: its number, names, types and shapes, and the providers that started."""

    session: Count
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]
    providers: tuple[Line, ...]


class BoardGuest(Guest):
    """The program, running; made by `start_board_guest`."""

    session: BoardSession

    def exchange(
        self, request: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """As elsewhere; a link that was cut is a BoardError, and so is what the board answers for no reason."""
        try:
            return super().exchange(request, arrays)
        except SENSELESS as error:
            raise senseless(self.session) from error
        except ValueError as error:
            if request["do"] == "run":  # the model refuses the inputs
                raise
            raise BoardError(f"{self.session.board.name}: {error}") from error

    def opened(self, request: Mapping[str, Any]) -> GuestSession:
        """As elsewhere, of an answer that is a session's."""
        reply, _ = self.exchange({"do": "open", **request})
        found = parse(reply, _Opened, self.session.board.name, BoardError)
        inputs, outputs = (
            tuple(TensorInfo(name, kind, list(shape)) for name, kind, shape in infos)
            for infos in (found.inputs, found.outputs)
        )
        return GuestSession(self, found.session, inputs, outputs, found.providers)

    def _receive(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array]] | None:
        assert self._process.stdout is not None
        limits = bounds.frame_limits(arrays=request["do"] in _WITH_ARRAYS)
        try:
            frame = read_frame(self._process.stdout, limits)
        except LargeFrameError as error:
            problem = f"{self.session.board.name} answers with {error}, more than {limits.total}"
            raise BoardError(problem, f"Where you trust the board: {VARIABLE}=sample=1GiB allows 512 MiB") from error
        except ValueError as error:
            raise senseless(self.session) from error
        if frame is None:
            return None
        reply = without_controls(frame[0])
        return ({**reply, "error": bounds.brief(reply["error"])} if "error" in reply else reply), frame[1]

    def _last_error(self) -> str:
        if self._late:
            raise hangs(self.session.board, self.request_s)
        try:
            code = self._process.wait(bounds.EXIT_S)  # ssh gives the exit code after the end of the output
        except subprocess.TimeoutExpired:  # its output has ended, and it goes on
            self._process.kill()
            code = LINK_FAILED
        if code == LINK_FAILED or code < 0 or (code == KILLED and self.session.ends(bounds.EXIT_S)):
            raise self.session.cut(self._errors.read())
        return super()._last_error()


def senseless(session: BoardSession) -> BoardError:
    """An answer that no program of edgeq gives."""
    return BoardError(f"{session.board.name} answers what edgeq's program does not", "Look at what runs there")


@contextmanager
def start_board_guest(session: BoardSession, *, request_s: float | None = None) -> Iterator[BoardGuest]:
    """Run the program on the board and end it behind the block.

    Raises:
        BoardError: the board lacks numpy or onnxruntime.
    """
    session.require("numpy", "onnxruntime")
    runtime = session.runtime()
    folders = os.pathsep.join((runtime, *session.hello.paths))
    command = session.attached(*session.python, "-I", "-B", f"{runtime}/edgeq_guest.py", folders)
    guest = BoardGuest(
        command, guest_environment(os.environ), session.board.name, request_s=request_s or bounds.REQUEST_S
    )
    guest.session = session
    try:
        yield guest
        with suppress(BrokenPipeError):  # the link is gone already
            guest.finish(bounds.EXIT_S)
    finally:
        guest.end()


@dataclass(frozen=True, eq=False)
class _BoardModel(GuestSession):
    """A session on a board. Outputs whose dtype the model declares here must come with it."""

    declared: Mapping[str, np.dtype[Any]] = field(default_factory=dict)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        """As elsewhere.

        Raises:
            BoardError: an output is missing, or of another dtype; or as `BoardGuest.exchange`.
        """
        names = list(output_names or [output.name for output in self.outputs])
        values = super().run(names, input_feed)
        for name, value in zip(names, values, strict=True):
            if name in self.declared and (value is None or value.dtype != self.declared[name]):
                assert isinstance(self.guest, BoardGuest)
                raise senseless(self.guest.session)
        return values


class BoardModels:
    """Opens models on a board: a program for onnxruntime's own kernels, another for each plug-in engine, each started
    when it is needed first. Ends them behind its `with` block."""

    def __init__(self, session: BoardSession, progress: Progress = SILENT) -> None:
        self._session = session
        self._progress = progress
        self._stack = ExitStack()
        self._running: dict[str, BoardGuest] = {}

    def open(self, model: Path, settings: SessionSettings) -> GuestSession:
        """A session of `model`, a file here, which is sent there.

        Raises:
            BoardError: the link was cut, or there is no space.
            RuntimeUnavailableError: the runtime there refuses it.
        """
        settings = with_carried(model, settings)
        request = open_request(self._session.send_model(model, self._progress), settings)
        engine = settings.engine.name if settings.engine and settings.engine.module else ""
        return self._model(self.guest(engine), request, model)

    def open_bundle(self, bundle: Path, variant: str | None, threads: int) -> tuple[str, GuestSession]:
        """The variant of a bundle that runs there (or that is named), and its session; the bundle is sent.

        Raises:
            BundleError: it is damaged.
            RuntimeUnavailableError: no variant fits the board, or there is none of that name.
        """
        place = self._session.send_bundle(bundle, self._progress)
        wanted = {"bundle": place, "variant": variant, "threads": threads}
        with opened(bundle) as found:
            known = {one.name: one.model for one in found.components[MAIN]}
            chosen = str(self.guest().exchange({"do": "choose", **wanted})[0].get("variant"))
            if (model := known.get(chosen)) is None:
                raise senseless(self._session)
            return chosen, self._model(self.guest(), {**wanted, "variant": chosen}, model)

    def _model(self, guest: BoardGuest, request: Mapping[str, Any], model: Path) -> GuestSession:
        session = guest.opened(request)
        graph = onnx.load(model, load_external_data=False).graph
        outputs = [output.name for output in session.outputs]
        if outputs != [output.name for output in graph.output] or not (
            {one.name for one in session.inputs} <= {one.name for one in graph.input}
        ):
            raise senseless(self._session)
        return _BoardModel(**vars(session), declared=_dtypes(graph.output))

    def guest(self, engine: str = "") -> BoardGuest:
        """The program for an engine; "": onnxruntime's own kernels."""
        if engine not in self._running or self._running[engine].ended:
            self._running[engine] = self._stack.enter_context(start_board_guest(self._session))
        return self._running[engine]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _dtypes(outputs: Iterable[onnx.ValueInfoProto]) -> dict[str, np.dtype[Any]]:
    """Return the dtypes of those outputs that come as arrays of numbers that numpy has."""
    kinds = {one.name: one.type.tensor_type.elem_type for one in outputs if one.type.HasField("tensor_type")}
    dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items() if kind}
    return {name: dtype for name, dtype in dtypes.items() if dtype.kind in "biufc"}
