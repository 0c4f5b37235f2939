"""Open ONNX Runtime sessions with the settings in a `SessionSettings`, and turn failures into edgeq errors."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from edgeq_device.engines.catalog import FLOAT, EngineSpec, engine_of_file, find_library, open_engine
from edgeq_device.engines.guest import Guest, GuestSession, list_import_path
from edgeq_device.engines.options import load_rules, read_model_options, session_problem
from edgeq_device.engines.session_options import BRIEF_SPIN, ignore_options_in_models, session_options
from edgeq_device.engines.variant import EXTERNAL_FOLDER
from edgeq_device.system.places import make_scratch, scratch_folder
from numpy.typing import NDArray

from edgeq.errors import EdgeqError, EngineError, RuntimeUnavailableError, UsageError, closest, no_threads
from edgeq.run.draws import fix_draws, write_fixed_draws
from edgeq.run.engines import DEFAULT, Engine, find_converter, find_only_engine, load_engines
from edgeq.util.device_errors import device_errors
from edgeq.util.folders import shipped
from edgeq.util.records import NOT_WRITTEN

OptimizationLevel = Literal["none", "basic", "extended", "all"]


@dataclass(frozen=True)
class SessionSettings:
    """Hold everything that decides how ONNX Runtime runs a model.

    Attributes:
        providers: execution providers in order of preference; ignored if `engine` is set.
        config: session configuration entries ("session.x64quantprecision" → "1"), which override `BRIEF_SPIN`.
        intra_op_threads: threads inside an operator; 0 lets ONNX Runtime use all cores.
        optimization: graph optimisation level.
        save_optimized_to: path to which ONNX Runtime writes its optimised graph; None writes none.
        profile_prefix: path prefix of ONNX Runtime's own profile; None writes no profile.
        engine: the engine that executes the graph; None uses `providers`. Records contain only the engine's name.
        precision: precision of the model's float operators in the engine.
        draws: whether random operators draw other numbers in each run, as they do on a device. Otherwise they have the
            same numbers in each session, so that outputs can be compared (`edgeq.run.draws`).
        arena: whether the session keeps the memory of a run for the next one. This saves time in repeated runs. A
            session that returns many tensors would keep a multiple of them.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    config: Mapping[str, str] = field(default_factory=dict)
    intra_op_threads: int = 0
    optimization: OptimizationLevel = "all"
    save_optimized_to: Path | None = field(default=None, metadata=NOT_WRITTEN)
    profile_prefix: Path | None = field(default=None, metadata=NOT_WRITTEN)
    engine: EngineSpec | None = None
    precision: str = FLOAT
    draws: bool = field(default=False, metadata=NOT_WRITTEN)
    arena: bool = field(default=True, metadata=NOT_WRITTEN)

    def __post_init__(self) -> None:
        # Sort the keys, so that equal settings give the same record.
        object.__setattr__(self, "config", dict(sorted(self.config.items())))


def build_float_settings(backend: str, threads: int = 0) -> SessionSettings:
    """Return the settings for running the float model that is compared with the artifacts of `backend`."""
    return SessionSettings(intra_op_threads=threads, engine=find_only_engine(backend))


def onnxruntime() -> Any:
    """Return the onnxruntime module.

    Raises:
        RuntimeUnavailableError: neither of the two packages that contain it is installed.
    """
    try:
        import onnxruntime as module
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime cannot be imported ({error})",
            "Install one of: pip install onnxruntime (CPU), pip install onnxruntime-gpu (NVIDIA); never both",
        ) from error
    return module


def open_session(
    model: Path | bytes,
    settings: SessionSettings | None = None,
    *,
    options: Any = None,
    weights: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> Any:
    """Open an `onnxruntime.InferenceSession` for a file, which may have external data, or for serialized bytes.

    Session options from the model's metadata are set, unless `settings` override them.

    Args:
        options: a caller's own `SessionOptions`. If given, `settings` supplies only the providers, or the engine with
            its precision and threads, and its other fields are ignored.
        weights: values by name, for the initializers that `model` declares as external data without a file.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model or the settings.
        BundleError: the model's metadata contain session options that a model may not set.
        UsageError: the number of threads is impossible.
        OSError: there is no space for the optimised graph.
    """
    settings = settings or SessionSettings()
    ort = onnxruntime()
    ignore_options_in_models()
    options = options or _build_options(ort, add_model_options(model, settings))
    source_model: Path | bytes = model
    if not settings.draws and _is_onnx(model) and (copy := fix_draws(model)) is not None:
        source_model = copy
        # The copy is opened from bytes, so onnxruntime does not know its folder.
        if isinstance(model, Path) and EXTERNAL_FOLDER not in settings.config:
            options.add_session_config_entry(EXTERNAL_FOLDER, str(model.parent.absolute()))
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    source = source_model if isinstance(source_model, bytes) else os.fspath(source_model)
    # Refuse it here, with the path and what to do about it.
    if isinstance(source, str) and not _is_utf8(source):
        raise RuntimeUnavailableError(f"onnxruntime cannot open a path that is not UTF-8: {source!r}", "Rename it")
    try:
        if settings.engine is None:
            return ort.InferenceSession(source, options, providers=list(settings.providers))
        with device_errors():
            return open_engine(
                ort,
                settings.engine,
                source,
                options,
                precision=settings.precision,
                threads=settings.intra_op_threads,
            )
    except EdgeqError:
        raise
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, and sometimes a bare Exception
        _check_space(model, sum(array.nbytes for array in weights.values()), settings.save_optimized_to)
        title = "the model" if isinstance(model, bytes) else str(model)
        text = " ".join(str(error).split())
        if "pthread_create" in text:
            raise no_threads() from error
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} refuses {title}: {text}",
            "Check the model with `edgeq inspect`, or use a newer onnxruntime",
        ) from error


def _is_onnx(model: Path | bytes) -> bool:
    """Return whether a model has no engine's own format, and exists if it is a file."""
    return isinstance(model, bytes) or (engine_of_file(model.name) is None and model.is_file())


def add_model_options(model: Path | bytes, settings: SessionSettings) -> SessionSettings:
    """Return `settings` with the session options from a model's metadata. Options in `settings` take precedence.

    Raises:
        BundleError: the metadata contains an option that a model may not set.
    """
    if isinstance(model, Path) and engine_of_file(model.name) is not None:
        return settings
    with device_errors():
        carried = read_model_options(model, "the model" if isinstance(model, bytes) else str(model))
    # The caller's settings come last, because they override the model's.
    return replace(settings, config={**carried, **settings.config}) if carried else settings


def choose_file_engine(model: Path, settings: SessionSettings) -> SessionSettings:
    """Return `settings`. If the model file has the format of an engine, set that engine in the result.

    Raises:
        UsageError: the settings name another engine.
    """
    file_engine = engine_of_file(model.name)
    if file_engine is None:
        return settings
    if settings.engine is not None and settings.engine.suffix == file_engine.suffix:
        return settings
    if settings.engine is not None:
        problem = f"{model} is a {file_engine.suffix} file, which {settings.engine.name} does not open"
        raise UsageError(problem, f"Give the ONNX model, or ⟨engine⟩ {file_engine.name}")
    return replace(settings, engine=load_engines()[file_engine.name])


def parse_session_options(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts of the form "KEY=VALUE" and return them as session options by name.

    Raises:
        UsageError: the value is missing, or edgeq's table of options does not contain the option or the value.
    """
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"⟨session_options⟩ {text!r} has no value", "Write KEY=VALUE")
        if key not in load_rules():
            hint = closest(key, load_rules(), "They are listed in docs/bundle.md")
            raise UsageError(f"⟨session_options⟩ {key!r} is not one that edgeq sets", hint)
        problem = session_problem(key, value, references=False)
        if problem:
            raise UsageError(f"⟨session_options⟩ {key} {problem}")
        options[key] = value
    return options


def _build_options(ort: Any, settings: SessionSettings) -> Any:
    config = {**BRIEF_SPIN, **settings.config}
    threads, level = settings.intra_op_threads, settings.optimization
    with device_errors():
        options = session_options(ort, config=config, threads=threads, optimization=level, arena=settings.arena)
    if settings.save_optimized_to is not None:
        options.optimized_model_filepath = os.fspath(settings.save_optimized_to)
    if settings.profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(settings.profile_prefix)
    return options


def _check_space(model: Path | bytes, more: int, output: Path | None) -> None:
    """Raise OSError if the disk is full. Without this check, onnxruntime would report an invalid graph if it could not
    write the graph.
    """
    if output is None or not output.parent.is_dir():
        return
    size = len(model) if isinstance(model, bytes) else model.stat().st_size if model.is_file() else 0
    if shutil.disk_usage(output.parent).free < size + more:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output))


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


Array = NDArray[Any]

REQUEST_S = 3600.0
"""Seconds that a program has to answer before it is ended. An emulated inference can take minutes."""
# Seconds for a guest to write its files before it is killed.
_EXIT_S = 60.0


@dataclass(frozen=True)
class PythonCommand:
    """Describe how to start a Python process that runs other kernels, such as those of another CPU.

    Attributes:
        interpreter: the command line up to the script.
        arguments: the arguments after the script.
        environment: environment of the process.
        folders: folders in which Python looks for modules first. Python runs isolated, so PYTHONPATH has no effect.
        compiled: folder that keeps compiled modules between starts. If it is None, Python writes no compiled modules
            and reads only those next to the source files.
    """

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folders: tuple[Path, ...] = ()
    compiled: Path | None = None

    @property
    def python(self) -> tuple[str, ...]:
        """Return the interpreter and its own options, which is the command line up to the script."""
        bytecode_options = ("-X", f"pycache_prefix={self.compiled}") if self.compiled is not None else ("-B",)
        return (*self.interpreter, "-I", *bytecode_options)


class GuestProgram(Guest):
    """Control a running guest program. `start_guest` makes this object."""

    _copies: tuple[Path, Callable[[], None]] | None = None

    def exchange(
        self, request: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Send a request to the guest and return its answer. Failures raise edgeq's errors."""
        with device_errors():
            return super().exchange(request, arrays)

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def features(self, masked: Sequence[str] = (), *, runtime: bool = True) -> dict[str, Any]:
        """Return the guest's report: "architecture", "features", "python" and "numpy".

        With `runtime`, the report also has "onnxruntime" and "trapped". "trapped" is the number of CPUID instructions
        whose result a mask replaced.
        """
        return self.exchange({"do": "features", "masked": list(masked), "runtime": runtime})[0]

    def open(self, model: Path, settings: SessionSettings, name: str = "model") -> GuestSession:
        """Return a session of `model` in the guest."""
        return self.open_session(build_open_request(str(self.file(model, settings).resolve()), settings, name))

    def file(self, model: Path, settings: SessionSettings) -> Path:
        """Return the file to open for `model`: a copy if it has random operators that must not draw."""
        if settings.draws or not _is_onnx(model):
            return model
        if self._copies is None:
            self._copies = make_scratch("edgeq-draws-")
        return write_fixed_draws(model, self._copies[0])

    def end(self) -> None:
        """Kill the program. A second call does nothing."""
        super().end()
        if self._copies is not None:
            self._copies[1]()


def build_open_request(model: str, settings: SessionSettings, name: str = "model") -> dict[str, Any]:
    """Return the request that opens the model at the path `model` in the guest."""
    plugin = settings.engine
    return {
        "name": name,
        "model": model,
        "provider": plugin.provider if plugin is not None and plugin.module else settings.providers[0],
        "session_options": dict(settings.config),
        "optimization": settings.optimization,
        "threads": settings.intra_op_threads,
        "profile": [str(settings.profile_prefix), str(settings.save_optimized_to)] * bool(settings.profile_prefix),
        "engine": plugin.to_dict() if plugin is not None else None,
        "precision": settings.precision,
    }


@contextmanager
def start_guest(
    command: PythonCommand,
    title: str,
    *,
    request_s: float = REQUEST_S,
    failure: type[RuntimeUnavailableError] = RuntimeUnavailableError,
) -> Iterator[GuestProgram]:
    """Start the guest program, and end it after the `with` block.

    Args:
        title: name of the program in messages.
        request_s: seconds to wait for an answer before the program is ended.
        failure: class of the error to raise if the guest, or the runtime in it, fails.

    Raises:
        RuntimeUnavailableError: the program cannot be started.
    """
    program = shipped("targets") / "runtime" / "edgeq_guest.py"
    path = os.pathsep.join(map(str, (program.parent, *command.folders)))
    line = [*command.python, str(program), path, *command.arguments]
    with device_errors():
        guest = GuestProgram(line, command.environment, title, request_s=request_s, failure=failure)
    try:
        yield guest
        # Only without an error: a guest that failed may never end by itself.
        guest.finish(_EXIT_S)
    finally:
        guest.end()


def build_guest_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `base` with the settings that programs in the guest need."""
    return {**base, "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": tempfile.gettempdir()}


class EngineFiles:
    """Convert model files to an engine's own format when the engine opens them. Each file is converted only once.

    Args:
        folder: a private folder for the converted files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._converted: dict[tuple[str, Path, tuple[int, int]], Path] = {}

    def convert_once(self, model: Path, engine: EngineSpec | None) -> Path:
        """Return the file to open for `model` in `engine`. This is `model` itself if it already has the engine's
        format.

        Raises:
            EdgeqError: the backend of the engine cannot convert the model.
        """
        if engine is None or not engine.suffix or model.suffix == engine.suffix:
            return model
        state = model.stat()
        # A file that was rewritten in place has another size or time.
        key = repr(engine), model.resolve(), (state.st_size, state.st_mtime_ns)
        if key not in self._converted:
            converted = self._folder / f"{len(self._converted)}-{engine.name}{engine.suffix}"
            find_converter(engine)(model, converted, engine.options)
            self._converted[key] = converted
        return self._converted[key]


ANSWER_S = 600.0
"""Seconds that an engine has to answer before it counts as hung. Compiling a large model takes a minute or two."""
_KEPT_BYTES = 2**26
"""Size of the largest model file whose compiled form is kept. Compiled forms of larger files would fill the disk."""


@contextmanager
def start_engine(
    engine: EngineSpec | None, *, environment: Mapping[str, str] | None = None, answer_s: float = ANSWER_S
) -> Iterator[GuestProgram]:
    """Start a process for `engine`, or for onnxruntime's own kernels. To open a model in it, call `GuestProgram.open`
    with settings that name the engine.

    Args:
        environment: variables to set in addition to those of this process.

    Raises:
        EngineError: the process cannot be started. The guest's methods also raise this error.
        RuntimeUnavailableError: the engine is not installed, or too old.
    """
    if engine is not None:
        _check_installed(engine)
    command = PythonCommand(
        (sys.executable,),
        (),
        build_guest_environment({**os.environ, **(environment or {})}),
        tuple(map(Path, list_import_path())),
    )
    with start_guest(
        command, f"the process of {_name_engine(engine)}", request_s=answer_s, failure=EngineError
    ) as guest:
        yield guest


def _check_installed(engine: EngineSpec) -> None:
    with device_errors():
        if engine.module:
            find_library(engine, str(onnxruntime().__version__))


def _name_engine(engine: EngineSpec | None) -> str:
    return DEFAULT if engine is None else engine.name


class Engines:
    """Open sessions in this process, or in a process of the plug-in engine that the settings name.

    The first session of an engine starts its process. All processes end after the `with` block.

    Args:
        keep: whether to keep an engine's compiled models and reuse them in the next session of the same file.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._stack = ExitStack()
        self._running: dict[tuple[str, int], GuestProgram] = {}
        compiled = self._stack.enter_context(scratch_folder("edgeq-compiled-")) if keep else None
        self._folder = Path(compiled) if compiled is not None else None
        self._files: EngineFiles | None = None

    def file(self, model: Path, engine: EngineSpec | None) -> Path:
        """Return the same path as `EngineFiles.convert_once`. The file exists until the `with` block ends."""
        if self._files is None:
            folder = self._stack.enter_context(scratch_folder("edgeq-converted-"))
            self._files = EngineFiles(Path(folder))
        return self._files.convert_once(model, engine)

    def open(self, model: Path, settings: SessionSettings, place: int = 0) -> Any:
        """Return an `onnxruntime.InferenceSession`, or an object with the same interface.

        Args:
            place: number of the process that opens the session. Number 0 is this process or, for a plug-in, its first
                process. Sessions in different processes differ as the sessions of different deployments do.

        Raises:
            RuntimeUnavailableError: see `edgeq.run.session.open_session`.
            EngineError: the process of an engine failed.
        """
        engine = settings.engine
        if place == 0 and (engine is None or not engine.module):
            return open_session(model, settings)
        model = self.file(model, engine)
        if self._folder is not None and isinstance(engine, Engine) and model.stat().st_size <= _KEPT_BYTES:
            folder = self._folder / f"{engine.name}-{settings.precision}"
            settings = replace(settings, engine=engine.with_cache_in(folder))
        return self._guest(engine, place).open(model, add_model_options(model, settings))

    def open_apart(self, model: Path, settings: SessionSettings, count: int) -> list[Any]:
        """Return `count` sessions, each in a process of its own (see `open`). The processes start at the same time."""
        # Start all processes before the first waits for its model.
        for place in range(1, count):
            self._guest(settings.engine, place)
        return [self.open(model, settings, place) for place in range(count)]

    def assigned_nodes(self, engine: EngineSpec, model: Path) -> tuple[tuple[str, ...], ...]:
        """Return the names of the nodes of `model` that a plug-in accepts, one tuple for each graph that the plug-in
        makes.

        Raises:
            RuntimeUnavailableError, EngineError: see `open`.
        """
        request = {"do": "assign", "model": str(model.resolve()), "engine": engine.to_dict()}
        graphs = self._guest(engine).exchange(request)[0]["graphs"]
        return tuple(tuple(nodes) for provider, nodes in graphs if provider == engine.provider)

    def compile(self, engine: EngineSpec, model: Path, output: Path) -> None:
        """Compile `model` with a plug-in, and write the result as one file.

        Raises:
            RuntimeUnavailableError, EngineError: see `open`.
        """
        files = {"model": str(model.resolve()), "output": str(output.resolve())}
        self._guest(engine).exchange({"do": "compile", **files, "engine": engine.to_dict()})

    def _guest(self, engine: EngineSpec | None, place: int = 0) -> GuestProgram:
        key = _name_engine(engine), place
        # An engine may have crashed with the last model, which says nothing about the next.
        if key not in self._running or self._running[key].ended:
            self._running[key] = self._stack.enter_context(start_engine(engine))
        return self._running[key]

    def ended(self) -> tuple[str, ...]:
        """Return the names of the engines of which a process ended unexpectedly. For these, `open` starts a new one."""
        return tuple(dict.fromkeys(name for (name, _), guest in self._running.items() if guest.ended))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@contextmanager
def open_simulator(engine: Engine) -> Iterator[Callable[[Path, SessionSettings], Any]]:
    """Yield a function that opens models in an engine that stands for a device. See `Backend.simulator`.

    Raises:
        RuntimeUnavailableError: the engine is not installed, or too old.
    """
    # A session opens late, and a list of simulators must not promise one that cannot start.
    _check_installed(engine)
    with Engines() as engines:
        yield lambda model, settings: engines.open(model, replace(settings, engine=engine))
