"""ONNX Runtime on the device: what it is, and a session with the options of the bundle."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator, List, Optional, Sequence

from edgeq_device.engines import EngineSpec, engines, open_engine, plugin_of, problem_of
from edgeq_device.errors import BudgetError, BundleError, RuntimeUnavailableError
from edgeq_device.gpu import read_gpus
from edgeq_device.gpu_sessions import GPU_PROVIDERS, open_on_gpu
from edgeq_device.options import check_names, ignore_options_in_models
from edgeq_device.places import temporary_folder
from edgeq_device.select import CPU, Device, precision_of
from edgeq_device.session_options import BRIEF_SPIN, LEVELS, MOST_THREADS, session_options
from edgeq_device.tensorrt import read_tensorrt
from edgeq_device.variants import EXTERNAL_FOLDER, Variant
from edgeq_device.version import parse_version

# Measured: up to 1.20 the folder option does nothing, 1.21 to 1.24 heed it for a model from bytes alone, 1.28 always.
_FOLDER_FROM_BYTES = (1, 21)


def onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        RuntimeUnavailableError: it is not installed, or cannot be loaded here.
    """
    try:
        import onnxruntime as module
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime cannot be imported ({error})", "Install it: python -m pip install onnxruntime"
        ) from error
    return module  # type: ignore[no-any-return]


def read_device() -> Device:
    """This device, read from the operating system and from onnxruntime."""
    from edgeq_device.features import read_features

    architecture, features = read_features()
    ort = onnxruntime()
    gpus, gpu_problem = read_gpus()
    tensorrt, tensorrt_problem = read_tensorrt(ort)
    return Device(
        architecture,
        features,
        str(ort.__version__),
        tuple(ort.get_available_providers()),
        gpus,
        gpu_problem,
        tensorrt,
        tensorrt_problem,
        {engine.provider: problem_of(engine, str(ort.__version__)) for engine in engines().values() if engine.module},
    )


def open_session(
    variant: Variant, threads: int = 0, engine: Optional[EngineSpec] = None, *, profile: Sequence[str] = ()
) -> Any:
    """An `onnxruntime.InferenceSession` for `variant` with the options that travel with it; for one that runs on a GPU,
    what keeps its inputs and outputs there, and whose provider has really started.

    Args:
        threads: threads inside an operator; 0 takes those that the variant was found to run best with, and where it
            names none leaves it to ONNX Runtime.
        engine: what executes it; None: what has the variant's provider.
        profile: path prefix of ONNX Runtime's own profile, if wanted, and where it writes its optimised graph, which a
            plug-in's is not.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing or refuses the model.
        BundleError: the variant has no model, or options that a bundle may not set.
    """
    check_names(variant.session_options, variant.ep, variant.provider_options)
    return open_unchecked(variant, threads, engine, profile=profile)


def open_unchecked(
    variant: Variant, threads: int = 0, engine: Optional[EngineSpec] = None, *, profile: Sequence[str] = ()
) -> Any:
    """`open_session` of what a session was opened of before, or of what no bundle holds."""
    if variant.model is None:
        raise BundleError(f"variant {variant.name} is not run by ONNX Runtime")
    ignore_options_in_models()
    ort = onnxruntime()
    level = variant.info.get("optimization", "all")
    if not isinstance(level, str) or level not in LEVELS:
        raise BundleError(f"variant {variant.name}: optimization is {level!r}; it can be {', '.join(LEVELS)}")
    config = {**BRIEF_SPIN, **variant.session_options}
    threads = threads or best_threads(variant)
    options = session_options(ort, config=config, threads=threads, optimization=level)
    plugin = engine or plugin_of(variant.ep)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile[0]
        if plugin is None or not plugin.module:
            options.optimized_model_filepath = profile[1]
    if plugin is not None:
        precision = precision_of(variant, plugin)
        return _open(variant, ort, lambda m: open_engine(ort, plugin, m, options, precision=precision, threads=threads))

    def open_with(providers: List[Any]) -> Any:
        return _open(variant, ort, lambda model: ort.InferenceSession(model, options, providers=providers))

    if variant.ep in GPU_PROVIDERS:
        return open_on_gpu(variant, ort, open_with)
    first = (variant.ep, dict(variant.provider_options))
    return open_with([first] if variant.ep == CPU else [first, CPU])


def _open(variant: Variant, ort: Any, open_it: Callable[[Any], Any]) -> Any:
    assert variant.model is not None
    try:
        session = _open_files(variant, ort, open_it)
        variant.check_unchanged()
        return session
    except (BundleError, RuntimeUnavailableError):
        raise
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, some of them bare Exception
        text = " ".join(str(error).split())
        if "pthread_create" in text:
            fix = "End some, or raise the limit (ulimit -u)"
            raise BudgetError("the system starts no more threads for this user", fix) from error
        raise RuntimeUnavailableError(
            f"onnxruntime {ort.__version__} refuses variant {variant.name}: {text}",
            f"Use onnxruntime {variant.min_onnxruntime} or newer" if variant.min_onnxruntime else "",
        ) from error


def _open_files(variant: Variant, ort: Any, open_it: Callable[[Any], Any]) -> Any:
    assert variant.model is not None
    if EXTERNAL_FOLDER not in variant.session_options:
        return open_it(str(variant.model))
    if parse_version(str(ort.__version__)) >= _FOLDER_FROM_BYTES:
        return open_it(variant.model.read_bytes())
    with _gathered(variant.model, Path(variant.session_options[EXTERNAL_FOLDER])) as model:
        return open_it(str(model))


def best_threads(variant: Variant) -> int:
    """The threads that the variant was found to run best with; 0 where it names none."""
    threads = variant.info.get("threads", 0)
    if not isinstance(threads, int) or isinstance(threads, bool) or not 0 <= threads <= MOST_THREADS:
        raise BundleError(f"variant {variant.name}: threads is {threads!r}; it can be 0 to {MOST_THREADS}")
    return threads


@contextmanager
def _gathered(model: Path, weights: Path) -> Iterator[Path]:
    """`model` beside its external weights, as runtimes need it that do not know the folder option; gone afterwards.

    Links where the system lets the user make them, else copies: newer runtimes refuse links that lead elsewhere. Hard
    links would move the times that `Variant.check_unchanged` compares.
    """
    folder, remove = temporary_folder("edgeq-session-", f"{model} cannot be opened")
    try:
        for file in [model, *(file for file in sorted(weights.rglob("*")) if file.is_file() and file != model)]:
            target = folder / (file.name if file == model else file.relative_to(weights))
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.symlink_to(file.absolute())
            except OSError:
                shutil.copyfile(file, target)
        yield folder / model.name
    finally:
        remove()
