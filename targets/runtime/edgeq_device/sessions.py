"""ONNX Runtime on the device: what it is, and a session with the options of the bundle."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from edgeq_device.arrays import read_arrays
from edgeq_device.cuda import (
    CUDA,
    BoundSession,
    CapturedSession,
    OpenWith,
    load_libraries,
    open_cuda,
    read_gpus,
    started,
)
from edgeq_device.engines import EngineSpec, engine_options, engines, open_engine, plugin_of, problem_of
from edgeq_device.errors import BudgetError, BundleError, RuntimeUnavailableError
from edgeq_device.infer import infer
from edgeq_device.options import (
    BRIEF_SPIN,
    LEVELS,
    MOST_THREADS,
    check_names,
    ignore_options_in_models,
    session_options,
)
from edgeq_device.places import temporary_folder
from edgeq_device.relay import printable
from edgeq_device.select import CPU, Device, precision_of
from edgeq_device.tensorrt import (
    PROVIDER,
    Engine,
    describe_engine,
    plan_engine,
    read_tensorrt,
    static_shapes,
    trtexec_line,
)
from edgeq_device.variants import EXTERNAL_FOLDER, Variant
from edgeq_device.version import parse_version

GPU_PROVIDERS = (PROVIDER, CUDA)
_GRAPHS = "trt_cuda_graph_enable"
_CUDA_ENGINE = "cuda"


def open_on_gpu(variant: Variant, ort: Any, open_with: OpenWith) -> Union[BoundSession, CapturedSession]:
    """Open `variant`, build its engine if there is none yet, and run it once so that nothing is left to do later.

    Args:
        open_with: opens the session with a list of providers.

    Raises:
        RuntimeUnavailableError: the provider does not start. ONNX Runtime itself would go on on the CPU.
    """
    if variant.ep != PROVIDER:
        return open_cuda(ort, variant.provider_options, open_with)
    load_libraries(ort)
    tensorrt, problem = read_tensorrt(ort)
    if problem:
        raise RuntimeUnavailableError(f"variant {variant.name}: {problem}")
    gpus, _ = read_gpus()
    engine = plan_engine(variant, gpus, tensorrt)
    if not engine.cached:
        print(
            f"building a TensorRT engine for {gpus[0].name if gpus else 'this GPU'}: this takes minutes, once",
            file=sys.stderr,
            flush=True,
        )
    start = time.perf_counter()
    session = started(ort, PROVIDER, open_with(_providers(engine.options)))
    session = _with_graphs(open_with, session, engine.options)
    # One BoundSession for good: a captured CUDA graph goes on using its buffers.
    bound = BoundSession(session, ort, "cuda")
    shapes = _first_run(variant, bound)
    notes = _notes(variant, engine, tensorrt, shapes, time.perf_counter() - start)
    if not engine.cached:
        print(*map(printable, filter(None, (notes[0], engine.note))), sep="\n", file=sys.stderr, flush=True)
    bound.notes = tuple(notes)
    return bound


def _with_graphs(open_with: OpenWith, session: Any, options: Dict[str, str]) -> Any:
    """The session again with CUDA graphs, where all sizes are fixed: one launch then replays the whole model.

    The engine is in its cache by now. Where the provider refuses (the graph is split between providers), it is the
    session without.
    """
    if not (static_shapes(session.get_inputs()) and static_shapes(session.get_outputs())):
        return session
    try:
        captured = open_with(_providers({**options, _GRAPHS: "1"}))
    except RuntimeUnavailableError:
        return session
    return captured if PROVIDER in captured.get_providers() else session


def _providers(options: Dict[str, str]) -> List[Any]:
    """TensorRT with `options`; what it leaves to CUDA is computed in float32 where the file has float32."""
    return [(PROVIDER, options), (CUDA, engine_options(engines()[_CUDA_ENGINE])), CPU]


def _first_run(variant: Variant, session: BoundSession) -> Dict[str, Tuple[int, ...]]:
    """Run the first self-test input: with open sizes, the engine is built only then. Returns the shapes, if open."""
    if not variant.cases:
        return {}
    feeds = read_arrays(variant.cases[0].inputs)
    infer(session, feeds)
    return {} if static_shapes(session.get_inputs()) else {name: value.shape for name, value in feeds.items()}


def _notes(
    variant: Variant, engine: Engine, tensorrt: str, shapes: Dict[str, Tuple[int, ...]], seconds: float
) -> List[str]:
    found = [describe_engine(engine, seconds), f"with TensorRT's own tool: {trtexec_line(variant, tensorrt, shapes)}"]
    return [*found, engine.note] if engine.note else found


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
