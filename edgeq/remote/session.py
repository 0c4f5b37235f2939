"""Run a session on one board: its lock is taken, files are sent by their hashes, and programs run there."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Self

import numpy as np
import onnx
from edgeq_device.arrays import FrameLimits, LargeFrameError, read_frame, write_npz
from edgeq_device.budget import VARIABLE, largest_sample
from edgeq_device.engines import EngineSpec, parse_version
from edgeq_device.package import MAIN
from edgeq_device.serve import GuestSession, TensorInfo
from msgspec import Meta

from edgeq.bundle.verify import contents, opened
from edgeq.errors import BoardError
from edgeq.model.load import model_files, own_runnable
from edgeq.remote import link as bounds
from edgeq.remote.devices import Board
from edgeq.run.session import (
    Array,
    EngineFiles,
    Guest,
    SessionSettings,
    guest_environment,
    open_request,
    with_carried,
)
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import sha256
from edgeq.util.records import Count, parse
from edgeq.util.registry import device_errors, shipped

_SHORT = "/tmp"
OLDEST_PYTHON = (3, 9)
KILLED = 128 + 9
"""Exit code of a command that was killed there: at the end of the session, or because memory ran out."""
_LATEST = 253402300799  # the end of the year 9999, behind which there are no dates


@dataclass(frozen=True)
class Holder:
    """Name who uses a board: user and host, and since when (seconds of the epoch, on the board's clock)."""

    who: bounds.Line = ""
    since: Annotated[int, Meta(ge=0, le=_LATEST)] = 0


@dataclass(frozen=True)
class Hello:
    """Hold what a board says first.

    Attributes:
        folder: the one directory that is written to.
        busy: who has it, where somebody has.
        token: of the lock that is now held.
        private: whether its Python is the one that `edgeq device setup` made.
        free: bytes there.
        modules: versions of numpy and onnxruntime, as far as they are installed.
        paths: where they are looked for besides Python's own places.
    """

    python: bounds.Line
    system: bounds.Line
    folder: bounds.Text
    busy: Holder | None = None
    token: bounds.Line = ""
    private: bool = False
    free: Count = 0
    modules: Mapping[bounds.Line, bounds.Line] = field(default_factory=dict)
    paths: Annotated[tuple[bounds.Text, ...], Meta(max_length=8)] = ()


@dataclass(frozen=True)
class _Answer:
    path: bounds.Text = ""
    missing: tuple[str, ...] = ()
    free: Count = 0


class BoardSession:
    """Hold a board for one user; made by `open_board`."""

    def __init__(self, channel: bounds.Channel, hello: Hello) -> None:
        self.channel = channel
        self.link = channel.link
        self.board = channel.link.board
        self.hello = hello

    def require(self, *modules: str) -> None:
        """Refuse a board that lacks one of the modules.

        Raises:
            BoardError: it does, and what to do.
        """
        lacks = [name for name in modules if name not in self.hello.modules]
        if lacks:
            raise BoardError(
                f"{self.board.name}: Python {self.hello.python} there has no {' and no '.join(lacks)}",
                f"Install it, or let edgeq do so: edgeq device setup {shlex.quote(self.board.name)}",
            )

    def ask(self, request: Mapping[str, Any], data: IO[bytes] | None = None) -> dict[str, Any]:
        """Return the answer to one request; the bytes of `data` follow it.

        Raises:
            BoardError: the link was cut, the board hangs, or it reports an error.
        """
        answer = self.channel.ask(request, data)
        if "error" in answer:
            free = parse(answer, _Answer, self.board.name, BoardError).free
            fix = f"{_mb(free)} are free there. {self._clean()}" if "free" in answer else ""
            raise BoardError(f"{self.board.name}: {bounds.brief(answer['error'])}", fix)
        return answer

    def send(
        self,
        files: Mapping[str, Path],
        *,
        keep: bool = True,
        digests: Mapping[str, str] | None = None,
        progress: Progress = SILENT,
    ) -> str:
        """Return the path on the board of a directory with `files`, by their names in it. Files already there are not
        sent again.

        Args:
            keep: for the next time, too; else it is gone with the session.
            digests: SHA-256 of those files for which it is known.

        Raises:
            BoardError: no space for them; or as `ask`.
        """
        known = digests or {}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        hashes = {name: known.get(name) or sha256(path) for name, path in files.items()}
        listing = json.dumps({name: [hashes[name], sizes[name]] for name in sorted(files)})
        tree = {"do": "tree", "keep": keep, "digest": hashlib.sha256(listing.encode()).hexdigest()}
        if path := self._asked(tree).path:
            return path
        answer = self._asked({"do": "listing", "keep": keep, "listing": listing})
        sources = {hashes[name]: (path, sizes[name]) for name, path in files.items()}
        missing = {sha: sources[sha] for sha in answer.missing if sha in sources}
        size = sum(length for _, length in missing.values())
        if size > answer.free:
            problem = f"{self.board.name}: {_mb(size)} are to be sent, {_mb(answer.free)} are free there"
            raise BoardError(problem, self._clean())
        with progress.stage(f"sending to {self.board.name}", size) as advance:
            for sha, (source, length) in missing.items():
                with source.open("rb") as stream:
                    self.ask({"do": "put", "keep": keep, "sha256": sha, "size": length}, stream)
                advance(length)
        path = self._asked(tree).path
        if not path:
            raise BoardError(f"{self.board.name}: files do not stay there as they were sent", "Check its disk")
        return path

    def send_model(self, model: Path, engine: EngineSpec | None = None, *, progress: Progress = SILENT) -> str:
        """Return the path on the board of `model`, which is sent with its external data for as long as the session
        lasts.

        Args:
            engine: what opens it there; a file in its own format is sent.

        Raises:
            BoardError: as `send`.
        """
        with tempfile.TemporaryDirectory(prefix="edgeq-converted-") as folder:
            sent = EngineFiles(Path(folder)).file(model, engine)
            files = {file.relative_to(sent.parent).as_posix(): file for file in model_files(sent)}
            # Its own name may be anything.
            name = f"model{engine.suffix if engine is not None and engine.suffix else '.onnx'}"
            files[name] = files.pop(sent.name)
            return f"{self.send(files, keep=False, progress=progress)}/{name}"

    def send_samples(self, samples: Sequence[Mapping[str, Any]], progress: Progress = SILENT) -> list[str]:
        """Send samples, inputs by name, for as long as the session lasts, and return the path of each on the board.

        Raises:
            BoardError: as `send`.
        """
        with tempfile.TemporaryDirectory(prefix="edgeq-samples-") as folder, device_errors():
            files = {f"{index}.npz": Path(folder) / f"{index}.npz" for index in range(len(samples))}
            for file, sample in zip(files.values(), samples, strict=True):
                write_npz(file, sample)
            place = self.send(files, keep=False, progress=progress)
        return [f"{place}/{name}" for name in files]

    def send_bundle(self, bundle: Path, progress: Progress = SILENT) -> str:
        """Return the path on the board of `bundle`, checked here before it is sent.

        Raises:
            BundleError: it is damaged.
            BoardError: as `send`.
        """
        with opened(bundle) as found, tempfile.TemporaryDirectory() as folder:
            digests = {name: record.sha256 for name, record in found.files.items()}
            files = {}
            for name, content in contents(found).items():
                files[name] = content if isinstance(content, Path) else Path(folder) / name
                if isinstance(content, bytes):  # manifest and signature, which are not unpacked from a zip
                    files[name].write_bytes(content)
            return self.send(files, digests=digests, progress=progress)

    def runtime(self) -> str:
        """Return the path on the board of edgeq's programs for devices."""
        root = shipped("targets") / "runtime"
        files = [root / "edgeq_guest.py", *sorted((root / "edgeq_device").iterdir())]
        taken = {f.relative_to(root).as_posix(): f for f in files if f.suffix in (".py", ".json")}
        return self.send(taken)

    @property
    def python(self) -> tuple[str, ...]:
        """Return the interpreter that is used there, as a command."""
        return (f"{self.hello.folder}/venv/bin/python",) if self.hello.private else self.board.python

    def attached(self, *command: str) -> list[str]:
        """Return the command line that runs a command on the board, for as long as this session lasts."""
        folder = self.hello.folder
        program = f"{folder}/board-{bounds.program_version()}.py"
        held = (*self.python, "-I", "-B", program, "attach", folder, self.hello.token, "--")
        return self.link.command('exec "$@"', *held, *command)

    def run(self, *command: str, limit_s: float) -> tuple[int, bytes, str]:
        """Run a command on the board: exit code, standard output, and the last line of its errors.

        Raises:
            BoardError: the link was cut, or it takes longer than `limit_s`.
        """
        done = bounds.finished(self.board, self.attached(*command), limit_s)
        if self.lost(done.code):
            raise self.cut(done.errors)
        return done.code, done.out, bounds.brief((bounds.lines_of(done.errors) or [""])[-1])

    def lost(self, code: int) -> bool:
        """Tell whether a command that ended with `code` lost its link, or was killed as the session ended there."""
        return code == bounds.LINK_FAILED or code < 0 or (code == KILLED and self.channel.ends(bounds.EXIT_S))

    def cut(self, errors: bytes) -> BoardError:
        """Return why a command lost its link, by what it wrote on stderr. That is empty where the session's
        connection, which it shares, ended: the reason is on that one's stderr.
        """
        return self.link.failed(bounds.LINK_FAILED, errors.strip() or self.channel.errors())

    def _asked(self, request: Mapping[str, Any]) -> _Answer:
        return parse(self.ask(request), _Answer, self.board.name, BoardError)

    def _clean(self) -> str:
        return f"Free some; edgeq device clean {shlex.quote(self.board.name)} removes all that edgeq keeps there"


@contextmanager
def open_board(board: Board) -> Iterator[BoardSession]:
    """Reach a board, take its lock, and let it go behind the block: nothing of edgeq's runs there then.

    Raises:
        BoardError: it cannot be reached, somebody else has it, or its Python is missing or too old.
    """
    with ExitStack() as stack:
        # A socket's path is short: the temporary folders of some systems alone would fill one.
        place = _SHORT if Path(_SHORT).is_dir() else None
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="eq-", dir=place))
        channel, said = stack.enter_context(bounds.open_channel(bounds.Link(board, Path(sockets))))
        hello = parse(said, Hello, board.name, BoardError)
        _check(board, hello)
        yield BoardSession(channel, hello)


def _check(board: Board, hello: Hello) -> None:
    if parse_version(hello.python)[:2] < OLDEST_PYTHON:
        raise BoardError(
            f"{board.name}: Python {hello.python} there is older than 3.9",
            "Install a newer one next to it, and name it as python in devices.toml",
        )
    if hello.system != "posix":
        raise BoardError(f"{board.name} runs neither Linux nor macOS", "Run edgeq on it itself")
    if hello.busy is not None:
        since = time.strftime("%H:%M:%S", time.localtime(hello.busy.since))
        raise BoardError(f"{board.name} is in use by {hello.busy.who or 'somebody'} since {since}", "Try again later")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


_WITH_ARRAYS = ("run", "read", "race")
"""Requests whose answers have arrays."""
SENSELESS = (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError)


_Tensor = tuple[bounds.Text, bounds.Line, tuple[Count | bounds.Text | None, ...]]


@dataclass(frozen=True)
class _Opened:
    """A session: its number, names, types and shapes, and the providers that started."""

    session: Count
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]
    providers: tuple[bounds.Line, ...]


class BoardGuest(Guest):
    """Run the program on the board; made by `start_board_guest`."""

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
        total = largest_sample() // 2 if request["do"] in _WITH_ARRAYS else 0
        limits = FrameLimits(text=bounds.ANSWER_BYTES, values=bounds.VALUES, arrays=bounds.ARRAYS, total=total)
        try:
            frame = read_frame(self._process.stdout, limits)
        except LargeFrameError as error:
            problem = f"{self.session.board.name} answers with {error}, more than {limits.total}"
            raise BoardError(problem, f"Where you trust the board: {VARIABLE}=sample=1GiB allows 512 MiB") from error
        except ValueError as error:
            raise senseless(self.session) from error
        if frame is None:
            return None
        reply = bounds.without_controls(frame[0])
        return ({**reply, "error": bounds.brief(reply["error"])} if "error" in reply else reply), frame[1]

    def _last_error(self) -> str:
        if self._late:
            raise bounds.hangs(self.session.board, self.request_s)
        try:
            code = self._process.wait(bounds.EXIT_S)  # ssh gives the exit code after the end of the output
        except subprocess.TimeoutExpired:  # its output has ended, and it goes on
            self._process.kill()
            code = bounds.LINK_FAILED
        if self.session.lost(code):
            raise self.session.cut(self._errors.read())
        return super()._last_error()


def senseless(session: BoardSession) -> BoardError:
    """Return the error for an answer that no program of edgeq gives."""
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
    """Open models on a board: a program for onnxruntime's own kernels, another for each plug-in engine, each started
    when first needed. Ends them after its `with` block.
    """

    def __init__(self, session: BoardSession, progress: Progress = SILENT) -> None:
        self._session = session
        self._progress = progress
        self._stack = ExitStack()
        self._running: dict[str, BoardGuest] = {}

    def open(self, model: Path, settings: SessionSettings) -> GuestSession:
        """Return a session of `model`, a file here, which is sent there.

        Raises:
            BoardError: the link was cut, or there is no space.
            RuntimeUnavailableError: the runtime there refuses it.
        """
        settings = with_carried(model, settings)
        request = open_request(self._session.send_model(model, settings.engine, progress=self._progress), settings)
        engine = settings.engine.name if settings.engine and settings.engine.module else ""
        return self._model(self.guest(engine), request, model)

    def open_bundle(self, bundle: Path, variant: str | None, threads: int) -> tuple[str, GuestSession]:
        """Return the variant of a bundle that runs there (or that is named), and its session; the bundle is sent.

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
        graph = own_runnable(model).graph
        outputs = [output.name for output in session.outputs]
        if outputs != [output.name for output in graph.output] or not (
            {one.name for one in session.inputs} <= {one.name for one in graph.input}
        ):
            raise senseless(self._session)
        return _BoardModel(**vars(session), declared=_dtypes(graph.output))

    def guest(self, engine: str = "") -> BoardGuest:
        """Return the program for an engine; "": onnxruntime's own kernels."""
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
