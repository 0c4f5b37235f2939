"""Sessions of ONNX Runtime: settings as a value, sessions opened with them, failures as edgeq errors."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from edgeq_device.engines import FLOAT, EngineSpec, open_engine
from edgeq_device.options import (
    BRIEF_SPIN,
    ignore_options_in_models,
    model_options,
    rules,
    session_options,
    session_problem,
)
from numpy.typing import NDArray

from edgeq.errors import EdgeqError, RuntimeUnavailableError, UsageError, closest, no_threads
from edgeq.util.records import NOT_WRITTEN
from edgeq.util.resources import device_errors

OptimizationLevel = Literal["none", "basic", "extended", "all"]


@dataclass(frozen=True)
class SessionSettings:
    """Everything that decides how ONNX Runtime runs a model.

    Attributes:
        providers: execution providers in order of preference, where there is no `engine`.
        config: session configuration entries ("session.x64quantprecision" → "1"), over `BRIEF_SPIN`.
        intra_op_threads: threads inside an operator; 0 lets ONNX Runtime take all cores.
        optimization: graph optimisation level.
        save_optimized_to: where ONNX Runtime writes its optimised graph, if wanted.
        profile_prefix: path prefix of ONNX Runtime's own profile, if wanted.
        engine: what executes the graph; None leaves it to `providers`. Its record is its name.
        precision: what the engine computes in where the model is float, one of its precisions.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    config: Mapping[str, str] = field(default_factory=dict)
    intra_op_threads: int = 0
    optimization: OptimizationLevel = "all"
    save_optimized_to: Path | None = field(default=None, metadata=NOT_WRITTEN)
    profile_prefix: Path | None = field(default=None, metadata=NOT_WRITTEN)
    engine: EngineSpec | None = None
    precision: str = FLOAT

    def __post_init__(self) -> None:
        # In one order, so that equal settings give the same record.
        object.__setattr__(self, "config", dict(sorted(self.config.items())))


def onnxruntime() -> Any:
    """The onnxruntime module; a clear error where neither of its two packages is installed."""
    try:
        import onnxruntime as module
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime cannot be imported ({error})",
            "Install one of: pip install 'edgeq[cpu]' (CPU), pip install 'edgeq[gpu]' (NVIDIA); never both",
        ) from error
    return module


def open_session(
    model: Path | bytes,
    settings: SessionSettings | None = None,
    *,
    options: Any = None,
    weights: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> Any:
    """Open an `onnxruntime.InferenceSession` for a file (external data allowed) or serialized bytes.

    Session options that the model carries in its metadata are set, unless `settings` have others.

    Args:
        options: a caller's own `SessionOptions`; of `settings`, only the providers count then.
        weights: name → values of the initializers that `model` has as external data without a file.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model or the settings.
        BundleError: the model carries session options that it may not set.
        UsageError: a number of threads that cannot be.
        OSError: there is no space for the optimised graph.
    """
    settings = settings or SessionSettings()
    ort = onnxruntime()
    ignore_options_in_models()
    options = options or _options(ort, with_carried(model, settings))
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    source = model if isinstance(model, bytes) else os.fspath(model)
    if isinstance(source, str) and not _is_utf8(source):
        raise RuntimeUnavailableError(f"onnxruntime takes no path that is not UTF-8: {source!r}", "Rename it")
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
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, some of them bare Exception
        _check_space(model, sum(array.nbytes for array in weights.values()), settings.save_optimized_to)
        where = "the model" if isinstance(model, bytes) else str(model)
        text = " ".join(str(error).split())
        if "pthread_create" in text:
            raise no_threads() from error
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} refuses {where}: {text}",
            "Check the model with `edgeq inspect`, or use a newer onnxruntime",
        ) from error


def with_carried(model: Path | bytes, settings: SessionSettings) -> SessionSettings:
    """`settings` with the session options that a model carries in its metadata; those that are given count more.

    Raises:
        BundleError: an option that a model may not set.
    """
    with device_errors():
        carried = model_options(model, "the model" if isinstance(model, bytes) else str(model))
    return replace(settings, config={**carried, **settings.config}) if carried else settings


def given_options(texts: Iterable[str]) -> dict[str, str]:
    """Session options by name, from "KEY=VALUE" each.

    Raises:
        UsageError: no value, or an option or a value that is not in edgeq's table of options.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"--session-option {text!r} has no value", "Write KEY=VALUE")
        if key not in rules().session:
            hint = closest(key, rules().session, "They are listed in docs/bundle.md")
            raise UsageError(f"--session-option {key!r} is not one that edgeq sets", hint)
        problem = session_problem(key, value, references=False)
        if problem:
            raise UsageError(f"--session-option {key} {problem}")
        found[key] = value
    return found


def _options(ort: Any, settings: SessionSettings) -> Any:
    config = {**BRIEF_SPIN, **settings.config}
    threads, level = settings.intra_op_threads, settings.optimization
    with device_errors():
        options = session_options(ort, config=config, threads=threads, optimization=level)
    if settings.save_optimized_to is not None:
        options.optimized_model_filepath = os.fspath(settings.save_optimized_to)
    if settings.profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(settings.profile_prefix)
    return options


def _check_space(model: Path | bytes, more: int, written: Path | None) -> None:
    """Raise OSError where the disk is full: onnxruntime reports a graph that it could not write as invalid."""
    if written is None or not written.parent.is_dir():
        return
    size = len(model) if isinstance(model, bytes) else model.stat().st_size if model.is_file() else 0
    if shutil.disk_usage(written.parent).free < size + more:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(written))


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
