"""Run a session on one board: take the board's lock, send files that it does not have yet, and run programs on it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Self

import numpy as np
import onnx
from edgeq_device.bundle.package import MAIN
from edgeq_device.engines.catalog import EngineSpec, parse_version
from edgeq_device.engines.frames import FrameLimits, LargeFrameError, read_frame
from edgeq_device.engines.guest import GuestSession
from edgeq_device.model.tensors import TensorInfo
from edgeq_device.prepare.npz import write_npz
from edgeq_device.system.budget import VARIABLE, read_largest_sample
from edgeq_device.system.files import open_file
from edgeq_device.system.places import scratch_folder
from msgspec import Meta

from edgeq.bundle.verify import open_checked, read_contents
from edgeq.errors import BoardError
from edgeq.model.files import model_files
from edgeq.model.load import load_unchecked
from edgeq.remote import link as bounds
from edgeq.remote.devices import Board
from edgeq.run.draws import write_fixed_draws
from edgeq.run.session import (
    Array,
    EngineFiles,
    GuestProgram,
    SessionSettings,
    add_model_options,
    build_guest_environment,
    build_open_request,
)
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Progress
from edgeq.util.folders import shipped
from edgeq.util.marker import sha256
from edgeq.util.records import Count, parse

_SHORT = "/tmp"
# edgeq_device supports no older Python.
OLDEST_PYTHON = (3, 9)
KILLED = 128 + 9
"""Exit code of a command that the board killed, because the session ended or memory ran out."""
_LATEST = 253402300799  # the end of the year 9999, which is the last year that Python's dates support


@dataclass(frozen=True)
class Holder:
    """Name the user who has a board.

    Attributes:
        who: user and host.
        since: start time in seconds since the epoch, on the board's clock.
    """

    who: bounds.Line = ""
    since: Annotated[int, Meta(ge=0, le=_LATEST)] = 0


@dataclass(frozen=True)
class Hello:
    """Hold the first message of a board.

    Attributes:
        folder: the only directory on the board that edgeq writes to.
        busy: the user who has the board, if it is somebody else.
        token: token of the lock that this session holds.
        private: whether the board's Python is the one from `edgeq device setup`.
        free: number of free bytes for the folder.
        modules: versions of numpy and onnxruntime, if they are installed.
        paths: extra folders to search for modules.
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
    """Hold a board for one user. `open_board` makes this object."""

    def __init__(self, channel: bounds.Channel, hello: Hello) -> None:
        self.channel = channel
        self.link = channel.link
        self.board = channel.link.board
        self.hello = hello

    def require(self, *modules: str) -> None:
        """Refuse a board that lacks one of the modules.

        Raises:
            BoardError: a module is missing; the message explains how to install it.
        """
        lacks = [name for name in modules if name not in self.hello.modules]
        if lacks:
            raise BoardError(
                f"{self.board.name}: Python {self.hello.python} there has no {' and no '.join(lacks)}",
                f"Install it, or let edgeq do so: edgeq device setup {shlex.quote(self.board.name)}",
            )

    def ask(self, request: Mapping[str, Any], data: IO[bytes] | None = None) -> dict[str, Any]:
        """Send a request, followed by the bytes of `data`, and return the answer.

        Raises:
            BoardError: the link was cut, the board hangs, or it reports an error.
        """
        answer = self.channel.ask(request, data)
        if "error" in answer:
            # A full disk is the usual reason for an error, so the message shows the free space.
            free = parse(answer, _Answer, self.board.name, BoardError).free
            fix = f"{_format_size(free)} are free there. {self._clean()}" if "free" in answer else ""
            raise BoardError(f"{self.board.name}: {bounds.shorten(answer['error'])}", fix)
        return answer

    def send(
        self,
        files: Mapping[str, Path],
        *,
        keep: bool = True,
        digests: Mapping[str, str] | None = None,
        progress: Progress = SILENT,
    ) -> str:
        """Send `files` to a directory on the board, keeping their names, and return the directory's path.

        Files that the board already has are not sent again.

        Args:
            keep: whether to keep the files for later sessions. Otherwise, they are removed at the end of this session.
            digests: SHA-256 hashes that are already known, keyed like `files`.

        Raises:
            BoardError: there is no space for the files, or a request fails (see `ask`).
        """
        precomputed = digests or {}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        hashes = {name: precomputed.get(name) or sha256(path) for name, path in files.items()}
        listing = json.dumps({name: [hashes[name], sizes[name]] for name in sorted(files)})
        # One hash for the whole listing: if the board has all files, nothing else is sent.
        tree = {"do": "tree", "keep": keep, "digest": hashlib.sha256(listing.encode()).hexdigest()}
        if path := self._request_answer(tree).path:
            return path
        answer = self._request_answer({"do": "listing", "keep": keep, "listing": listing})
        sources = {hashes[name]: (path, sizes[name]) for name, path in files.items()}
        # The board's list is untrusted, so it can only ask for files that this call offers.
        missing = {sha: sources[sha] for sha in answer.missing if sha in sources}
        size = sum(length for _, length in missing.values())
        # The check comes first, because a disk that fills up in the middle harms other programs of the board.
        if size > answer.free:
            needed_space, free_space = _format_size(size), _format_size(answer.free)
            problem = f"{self.board.name}: {needed_space} must be sent, but only {free_space} are free there"
            raise BoardError(problem, self._clean())
        with progress.stage(f"sending to {self.board.name}", size) as advance:
            for sha, (source, length) in missing.items():
                with open_file(source) as stream:
                    self.ask({"do": "put", "keep": keep, "sha256": sha, "size": length}, stream)
                advance(length)
        path = self._request_answer(tree).path
        if not path:
            raise BoardError(
                f"{self.board.name}: files there changed or disappeared after they were sent", "Check its disk"
            )
        return path

    def send_model(self, model: Path, engine: EngineSpec | None = None, *, progress: Progress = SILENT) -> str:
        """Send `model` with its external data, and return its path on the board. The files stay there until the session
        ends.

        Args:
            engine: the engine that opens the model on the board. If the engine has its own file format, a file in that
                format is sent.

        Raises:
            BoardError: see `send`.
        """
        with scratch_folder("edgeq-converted-") as folder:
            # Conversion happens here, because a board may lack the tools and the memory for it.
            sent = EngineFiles(Path(folder)).convert_once(model, engine)
            files = {file.relative_to(sent.parent).as_posix(): file for file in model_files(sent)}
            # Give the file a fixed name, because its own name may contain any characters.
            name = f"model{engine.suffix if engine is not None and engine.suffix else '.onnx'}"
            files[name] = files.pop(sent.name)
            return f"{self.send(files, keep=False, progress=progress)}/{name}"

    def send_samples(self, samples: Sequence[Mapping[str, Any]], progress: Progress = SILENT) -> list[str]:
        """Send samples and return the path of each on the board. The files stay there until the session ends.

        Args:
            samples: inputs by name, for each sample.

        Raises:
            BoardError: see `send`.
        """
        with scratch_folder("edgeq-samples-") as folder, device_errors():
            files = {f"{index}.npz": Path(folder) / f"{index}.npz" for index in range(len(samples))}
            for file, sample in zip(files.values(), samples, strict=True):
                write_npz(file, sample)
            place = self.send(files, keep=False, progress=progress)
        return [f"{place}/{name}" for name in files]

    def send_bundle(self, bundle: Path, progress: Progress = SILENT) -> str:
        """Check `bundle` on this machine, send it, and return its path on the board.

        Raises:
            BundleError: the bundle is damaged.
            BoardError: see `send`.
        """
        with open_checked(bundle) as opened_bundle, scratch_folder("edgeq-") as folder:
            # The manifest already has the hashes, and hashing gigabytes again takes minutes.
            digests = {name: record.sha256 for name, record in opened_bundle.files.items()}
            files = {}
            for name, content in read_contents(opened_bundle).items():
                files[name] = content if isinstance(content, Path) else Path(folder) / name
                # The manifest and the signature are bytes, not files.
                if isinstance(content, bytes):
                    files[name].write_bytes(content)
            return self.send(files, digests=digests, progress=progress)

    def send_runtime(self) -> str:
        """Send edgeq's programs for devices, and return the path of their folder on the board."""
        root = shipped("targets") / "runtime"
        files = [root / "edgeq_guest.py", *sorted((root / "edgeq_device").rglob("*"))]
        sources = {f.relative_to(root).as_posix(): f for f in files if f.suffix in (".py", ".json")}
        return self.send(sources)

    @property
    def python(self) -> tuple[str, ...]:
        """Return the command that starts the board's interpreter."""
        return (f"{self.hello.folder}/venv/bin/python",) if self.hello.private else self.board.python

    def attached_command(self, *command: str) -> list[str]:
        """Return the command line that runs `command` on the board. The command ends when this session ends."""
        folder = self.hello.folder
        program = f"{folder}/board-{bounds.program_version()}.py"
        prefix = (*self.python, "-I", "-B", program, "attach", folder, self.hello.token, "--")
        return self.link.command('exec "$@"', *prefix, *command)

    def run(self, *command: str, limit_s: float) -> tuple[int, bytes, str]:
        """Run a command on the board.

        Returns:
            The command's exit code, its standard output, and the last line of its stderr.

        Raises:
            BoardError: the link was cut, or the command takes longer than `limit_s`.
        """
        ended = bounds.run_command(self.board, self.attached_command(*command), limit_s)
        if self.is_lost(ended.code):
            raise self.link_error(ended.errors)
        return ended.code, ended.out, bounds.shorten((bounds.split_lines(ended.errors) or [""])[-1])

    def is_lost(self, code: int) -> bool:
        """Return whether a command's exit code means that the command lost its link, or was killed at the end of the
        session.
        """
        return code == bounds.LINK_FAILED or code < 0 or (code == KILLED and self.channel.ends(bounds.EXIT_S))

    def link_error(self, errors: bytes) -> BoardError:
        """Return the error for a command that lost its link, made from the command's stderr.

        The command's stderr is empty if the shared connection of the session ended. The session's stderr then has the
        reason.
        """
        return self.link.explain_failure(bounds.LINK_FAILED, errors.strip() or self.channel.errors())

    def _request_answer(self, request: Mapping[str, Any]) -> _Answer:
        return parse(self.ask(request), _Answer, self.board.name, BoardError)

    def _clean(self) -> str:
        return f"Free some space; edgeq device clean {shlex.quote(self.board.name)} removes all files of edgeq"


@contextmanager
def open_board(board: Board) -> Iterator[BoardSession]:
    """Connect to a board and take its lock. After the `with` block, release the board. From then on, no program of
    edgeq runs on it.

    Raises:
        BoardError: the board cannot be reached, somebody else has it, or its Python is missing or too old.
    """
    with ExitStack() as stack:
        # The path of a socket must be short, and on some systems the path of the temporary folder is too long.
        place = Path(_SHORT) if Path(_SHORT).is_dir() else None
        sockets = stack.enter_context(scratch_folder("eq-", place))
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
        raise BoardError(f"{board.name} runs neither Linux nor macOS", "Run edgeq on the board itself")
    if hello.busy is not None:
        since = time.strftime("%H:%M:%S", time.localtime(hello.busy.since))
        raise BoardError(f"{board.name} is in use by {hello.busy.who or 'somebody'} since {since}", "Try again later")


def _format_size(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


_WITH_ARRAYS = ("run", "read", "race")
"""Requests whose answers contain arrays."""
SENSELESS = (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError)


_Tensor = tuple[bounds.Text, bounds.Line, tuple[Count | bounds.Text | None, ...]]


@dataclass(frozen=True)
class _Opened:
    """Describe an opened session: its number, the name, type and shape of each input and output, and its providers."""

    session: Count
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]
    providers: tuple[bounds.Line, ...]


class BoardGuest(GuestProgram):
    """Run edgeq's program for models on the board. `start_board_guest` makes this object."""

    session: BoardSession

    def exchange(
        self, request: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Send a request and return the answer. See `Guest.exchange`.

        Raises:
            BoardError: the link was cut, or the answer does not match the request.
            ValueError: the model refuses the inputs.
        """
        try:
            return super().exchange(request, arrays)
        except SENSELESS as error:
            raise senseless_answer_error(self.session) from error
        except ValueError as error:
            if request["do"] == "run":  # the model refused the inputs
                raise
            raise BoardError(f"{self.session.board.name}: {error}") from error

    def open_session(self, request: Mapping[str, Any]) -> GuestSession:
        """Open a model, check the board's answer, and return the model's session. See `Guest.open_session`."""
        reply, _ = self.exchange({"do": "open", **request})
        description = parse(reply, _Opened, self.session.board.name, BoardError)
        inputs, outputs = (
            tuple(TensorInfo(name, kind, list(shape)) for name, kind, shape in infos)
            for infos in (description.inputs, description.outputs)
        )
        return GuestSession(self, description.session, inputs, outputs, description.providers)

    def _receive(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array]] | None:
        assert self._process.stdout is not None
        total = read_largest_sample() // 2 if request["do"] in _WITH_ARRAYS else 0
        limits = FrameLimits(text=bounds.ANSWER_BYTES, values=bounds.VALUES, arrays=bounds.ARRAYS, total=total)
        try:
            frame = read_frame(self._process.stdout, limits)
        except LargeFrameError as error:
            problem = f"{self.session.board.name} answers with {error}, more than {limits.total}"
            raise BoardError(problem, f"If you trust the board, {VARIABLE}=sample=1GiB allows 512 MiB") from error
        except ValueError as error:
            raise senseless_answer_error(self.session) from error
        if frame is None:
            return None
        reply = bounds.strip_controls(frame[0])
        return ({**reply, "error": bounds.shorten(reply["error"])} if "error" in reply else reply), frame[1]

    def _describe_end(self) -> str:
        if self._late:
            raise bounds.timeout_error(self.session.board, self.request_s)
        try:
            code = self._process.wait(bounds.EXIT_S)  # ssh exits shortly after its output ends
        except subprocess.TimeoutExpired:  # the output has ended, but ssh still runs
            self._process.kill()
            code = bounds.LINK_FAILED
        if self.session.is_lost(code):
            raise self.session.link_error(self._errors.read_last())
        return super()._describe_end()


def senseless_answer_error(session: BoardSession) -> BoardError:
    """Return the error for an answer that none of edgeq's programs would give."""
    return BoardError(f"{session.board.name} sends an answer that is not from edgeq's program", "Check what runs there")


@contextmanager
def start_board_guest(session: BoardSession, *, request_s: float | None = None) -> Iterator[BoardGuest]:
    """Run edgeq's program for models on the board, and end it after the `with` block.

    Raises:
        BoardError: the board lacks numpy or onnxruntime.
    """
    session.require("numpy", "onnxruntime")
    runtime = session.send_runtime()
    folders = os.pathsep.join((runtime, *session.hello.paths))
    command = session.attached_command(*session.python, "-I", "-B", f"{runtime}/edgeq_guest.py", folders)
    guest = BoardGuest(
        command, build_guest_environment(os.environ), session.board.name, request_s=request_s or bounds.REQUEST_S
    )
    guest.session = session
    try:
        yield guest
        with suppress(BrokenPipeError):  # the link is already gone
            guest.finish(bounds.EXIT_S)
    finally:
        guest.end()


@dataclass(frozen=True, eq=False)
class _BoardModel(GuestSession):
    """Run a model in a session on a board. The outputs must have the dtypes that the model declares."""

    declared: Mapping[str, np.dtype[Any]] = field(default_factory=dict)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        """Run the model on the board. See `GuestSession.run`.

        Raises:
            BoardError: an output is missing or has another dtype, or the request fails (see `BoardGuest.exchange`).
        """
        names = list(output_names or [output.name for output in self.outputs])
        values = super().run(names, input_feed)
        for name, value in zip(names, values, strict=True):
            if name in self.declared and (value is None or value.dtype != self.declared[name]):
                assert isinstance(self.guest, BoardGuest)
                raise senseless_answer_error(self.guest.session)
        return values


class BoardModels:
    """Open models on a board, and end all programs after the `with` block.

    One program runs onnxruntime's own kernels, and another one runs for each plug-in engine. Each program starts when
    it is first needed.
    """

    def __init__(self, session: BoardSession, progress: Progress = SILENT) -> None:
        self._session = session
        self._progress = progress
        self._stack = ExitStack()
        self._running: dict[str, BoardGuest] = {}

    def open(self, model: Path, settings: SessionSettings) -> GuestSession:
        """Send the local file `model` to the board, open it there, and return its session.

        Raises:
            BoardError: the link was cut, or there is no space.
            RuntimeUnavailableError: the board's runtime refuses the model.
        """
        settings = add_model_options(model, settings)
        with scratch_folder("edgeq-draws-") as folder:
            # Random operators must draw the same numbers here and there, or the outputs could not be compared.
            copy = model if settings.draws else write_fixed_draws(model, Path(folder))
            place = self._session.send_model(copy, settings.engine, progress=self._progress)
        request = build_open_request(place, settings)
        engine = settings.engine.name if settings.engine and settings.engine.module else ""
        return self._open_model(self.guest(engine), request, model)

    def open_bundle(self, bundle: Path, variant: str | None, threads: int) -> tuple[str, GuestSession]:
        """Send a bundle and open one variant of it: the variant with the given name, or the one that the board's runner
        chooses.

        Returns:
            The variant's name and its session.

        Raises:
            BundleError: the bundle is damaged.
            RuntimeUnavailableError: no variant fits the board, or there is no variant of that name.
        """
        place = self._session.send_bundle(bundle, self._progress)
        request = {"bundle": place, "variant": variant, "threads": threads}
        with open_checked(bundle) as opened_bundle:
            models = {entry.name: entry.model for entry in opened_bundle.components[MAIN]}
            name = str(self.guest().exchange({"do": "choose", **request})[0].get("variant"))
            if (model := models.get(name)) is None:
                raise senseless_answer_error(self._session)
            return name, self._open_model(self.guest(), {**request, "variant": name}, model)

    def _open_model(self, guest: BoardGuest, request: Mapping[str, Any], model: Path) -> GuestSession:
        session = guest.open_session(request)
        # The board names the inputs and outputs, but only the file on this machine is trusted.
        graph = load_unchecked(model).graph
        outputs = [output.name for output in session.outputs]
        if outputs != [output.name for output in graph.output] or not (
            {tensor.name for tensor in session.inputs} <= {tensor.name for tensor in graph.input}
        ):
            raise senseless_answer_error(self._session)
        return _BoardModel(**vars(session), declared=_read_dtypes(graph.output))

    def guest(self, engine: str = "") -> BoardGuest:
        """Return the program for an engine. For "", return the program for onnxruntime's own kernels."""
        if engine not in self._running or self._running[engine].ended:
            self._running[engine] = self._stack.enter_context(start_board_guest(self._session))
        return self._running[engine]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _read_dtypes(outputs: Iterable[onnx.ValueInfoProto]) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each output that is an array of a numeric or boolean numpy type."""
    kinds = {
        output.name: output.type.tensor_type.elem_type for output in outputs if output.type.HasField("tensor_type")
    }
    dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items() if kind}
    return {name: dtype for name, dtype in dtypes.items() if dtype.kind in "biufc"}
