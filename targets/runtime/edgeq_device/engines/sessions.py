"""Open sessions of onnxruntime, of its providers and of other engines with the options of a variant."""

from __future__ import annotations

import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence

from edgeq_device.engines.catalog import (
    CPU,
    EngineSpec,
    choose_installed_form,
    describe_package,
    find_plugin,
    open_engine,
    parse_version,
)
from edgeq_device.engines.options import check_names
from edgeq_device.engines.runtime import onnxruntime
from edgeq_device.engines.session_options import (
    BRIEF_SPIN,
    LEVELS,
    MOST_THREADS,
    ignore_options_in_models,
    session_options,
)
from edgeq_device.engines.tensorrt import GPU_PROVIDERS, open_on_gpu
from edgeq_device.engines.variant import EXTERNAL_FOLDER, Variant, read_precision
from edgeq_device.errors import BudgetError, BundleError, RuntimeUnavailableError
from edgeq_device.system.files import read_file
from edgeq_device.system.places import make_temporary_folder

# Measured behaviour of the option for the folder of external data: up to onnxruntime 1.20 it has no effect, from 1.21
# to 1.24 it works only if the model is opened from bytes, and in 1.28 it always works.
_FOLDER_FROM_BYTES = (1, 21)


def open_session(
    variant: Variant, threads: int = 0, engine: Optional[EngineSpec] = None, *, profile: Sequence[str] = ()
) -> Any:
    """Return an `onnxruntime.InferenceSession` for `variant` with the options in its bundle.

    For a variant that runs on a GPU, the session keeps inputs and outputs in the GPU's memory, and its provider has
    really started.

    Args:
        threads: threads inside an operator; 0 uses the number with which the variant ran best. If the variant does not
            record one, ONNX Runtime chooses.
        engine: engine that runs the variant; None uses the one with the variant's provider.
        profile: path prefix of ONNX Runtime's own profile, and path for the optimised graph. A plug-in writes no such
            graph. If empty, nothing is profiled.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing or refuses the model.
        BundleError: the variant has no model, or has options that a bundle may not set.
    """
    check_names(variant.session_options, variant.ep, variant.provider_options)
    return open_unchecked(variant, threads, engine, profile=profile)


def open_unchecked(
    variant: Variant, threads: int = 0, engine: Optional[EngineSpec] = None, *, profile: Sequence[str] = ()
) -> Any:
    """Do the work of `open_session`, but do not check the options. Use this for a variant that was opened before, or
    that is not in a bundle.
    """
    if variant.model is None:
        raise BundleError(f"ONNX Runtime does not run variant {variant.name}")
    ignore_options_in_models()
    ort = onnxruntime()
    level = variant.info.get("optimization", "all")
    if not isinstance(level, str) or level not in LEVELS:
        raise BundleError(f"variant {variant.name}: optimization is {level!r}; it can be {', '.join(LEVELS)}")
    config = {**BRIEF_SPIN, **variant.session_options}
    # The caller decides; otherwise the number that was best when the variant was made.
    threads = threads or read_best_threads(variant)
    options = session_options(ort, config=config, threads=threads, optimization=level)
    plugin = engine or find_plugin(variant.ep)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile[0]
        if plugin is None or not plugin.module:
            options.optimized_model_filepath = profile[1]
    if plugin is not None:
        precision = read_precision(variant, plugin)
        return _open(
            variant,
            ort,
            lambda model: open_engine(ort, plugin, model, options, precision=precision, threads=threads),
            package=describe_package(plugin) if choose_installed_form(plugin).adapter else "",
        )

    def open_with(providers: List[Any]) -> Any:
        return _open(variant, ort, lambda model: ort.InferenceSession(model, options, providers=providers))

    if variant.ep in GPU_PROVIDERS:
        return open_on_gpu(variant, ort, open_with)
    provider = (variant.ep, dict(variant.provider_options))
    # Operators that the provider lacks run on the CPU.
    return open_with([provider] if variant.ep == CPU else [provider, CPU])


def _open(variant: Variant, ort: Any, open_it: Callable[[Any], Any], *, package: str = "") -> Any:
    """Call `open_it` with the model, and return the session. `package` names a package that opens models only from
    files; "" means onnxruntime.
    """
    assert variant.model is not None
    try:
        if EXTERNAL_FOLDER not in variant.session_options:
            session = open_it(str(variant.model))
        elif not package and parse_version(str(ort.__version__)) >= _FOLDER_FROM_BYTES:
            session = open_it(read_file(variant.model))
        else:
            with _gather_files(
                variant.model, Path(variant.session_options[EXTERNAL_FOLDER]), link=not package
            ) as model:
                session = open_it(str(model))
        variant.check_unchanged()
        return session
    except (BundleError, RuntimeUnavailableError):
        raise
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, some of them bare Exception
        text = " ".join(str(error).split())
        # The model is not to blame, so name the real cause.
        if "pthread_create" in text:
            fix = "End some processes, or raise the limit (ulimit -u)"
            raise BudgetError("the system starts no more threads for this user", fix) from error
        raise RuntimeUnavailableError(
            f"{package or f'onnxruntime {ort.__version__}'} refuses variant {variant.name}: {text}",
            f"Use onnxruntime {variant.min_onnxruntime} or newer" if variant.min_onnxruntime and not package else "",
        ) from error


def read_best_threads(variant: Variant) -> int:
    """Return the number of threads with which the variant ran best, or 0 if the variant does not record it."""
    threads = variant.info.get("threads", 0)
    if not isinstance(threads, int) or isinstance(threads, bool) or not 0 <= threads <= MOST_THREADS:
        raise BundleError(f"variant {variant.name}: threads is {threads!r}; it can be 0 to {MOST_THREADS}")
    return threads


@contextmanager
def _gather_files(model: Path, weights: Path, *, link: bool = True) -> Iterator[Path]:
    """Put `model` next to its external weights, in a folder that is removed after the block. Runtimes that do not know
    the folder option need this.

    The files are links if `link` is set and the system permits links. Otherwise they are copies. Newer runtimes need
    copies, because they refuse links that lead out of the folder. Hard links would change the times that
    `Variant.check_unchanged` compares.
    """
    folder, remove = make_temporary_folder("edgeq-session-", f"{model} cannot be opened")
    try:
        for file in [model, *(file for file in sorted(weights.rglob("*")) if file.is_file() and file != model)]:
            target = folder / (file.name if file == model else file.relative_to(weights))
            target.parent.mkdir(parents=True, exist_ok=True)
            if link:
                with suppress(OSError):
                    target.symlink_to(file.absolute())
            if not target.exists():
                shutil.copyfile(file, target)
        yield folder / model.name
    finally:
        remove()
