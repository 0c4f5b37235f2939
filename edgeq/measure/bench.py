"""Open models for measuring, and run `edgeq bench` on model files or a bundle."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
from edgeq_device.bundle.bench_models import Shapes, build_bench_models, choose_variants, find_feeds
from edgeq_device.bundle.opening import open_best
from edgeq_device.bundle.package import MAIN, Bundle, open_bundle
from edgeq_device.engines.catalog import FLOAT, find_plugin
from edgeq_device.engines.device import read_device
from edgeq_device.engines.variant import EXTERNAL_FOLDER, Variant, read_precision
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.latency import Distribution, Runner, WarmUp, measure_interleaved
from edgeq_device.measure.scenarios import Feed, make_runner

from edgeq.data.open_source import Data, as_data
from edgeq.errors import BundleError, UsageError
from edgeq.measure.agreement import Session
from edgeq.measure.latency import Measurement, bench_model, measure_models, sessions_to_time
from edgeq.measure.preprocess_search import open_or_search
from edgeq.model.clean import is_named_bundle
from edgeq.model.load import (
    check_declared_sizes,
    data_folder,
    in_memory,
    load_runnable,
    model_signature,
    own_runnable,
    own_signature,
    path_of,
    signature_of,
)
from edgeq.run.draws import find_random_names
from edgeq.run.engines import EngineChoice, as_engines
from edgeq.run.session import Engines, SessionSettings, add_model_options, choose_file_engine, open_session
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.registry import device_errors


@dataclass(frozen=True)
class LoadedModel:
    """Hold an open session and the facts about its model.

    Attributes:
        path: path that the caller gave.
        model: the ONNX file that runs: `path` itself, or a file in the bundle that exists until the session closes.
        graph: the same model in memory. External weights are read when they are needed.
        variant: name of the bundle's variant; None for a model file.
        signature: inputs and outputs.
        settings: settings of the session.
        preprocess: the bundle's preprocessing; None if it has none.
    """

    path: Path
    model: Path
    graph: ir.Model
    variant: str | None
    signature: Signature
    settings: SessionSettings
    session: Session
    preprocess: Mapping[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """Return the folder with the external weights of `model`."""
        return Path(self.settings.config.get(EXTERNAL_FOLDER, self.model.parent))

    @property
    def name(self) -> str:
        """Return the path and the variant as a text for messages."""
        return str(self.path) if self.variant is None else f"{self.path} ({self.variant})"


class Opener(Protocol):
    """Open models on the machine that will run them: this machine or a board."""

    def open(self, model: Path, settings: SessionSettings) -> Any:
        """Return a session of a model file."""

    def open_bundle(self, bundle: Path, variant: str | None, threads: int) -> tuple[str, Any]:
        """Return the name and the session of the variant to run. If `variant` is None, choose the variant that fits the
        machine.
        """


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a bundle: a directory, a zip file, or a name that ends in .edgeq."""
    return path.is_dir() or is_named_bundle(path) or (path.is_file() and zipfile.is_zipfile(path))


def refuse_ignored(settings: SessionSettings, *paths: Path) -> None:
    """Refuse session options and an optimisation level if all `paths` are bundles.

    Bundles have their own session options and would ignore the given options.

    Raises:
        UsageError: a bundle would ignore an option; the message names the option.
    """
    other_level = settings.optimization != SessionSettings.optimization
    given = {"--session-option": bool(settings.config), "--optimization": other_level}
    option = next((name for name, wanted in given.items() if wanted), None)
    if option is not None and all(is_bundle(path) for path in paths):
        raise UsageError(
            f"{paths[0]} is a bundle, whose variants bring their session options and optimisation level",
            f"Leave {option} out",
        )


@contextmanager
def open_model(
    path: Path, settings: SessionSettings | None = None, *, variant: str | None = None, opener: Opener | None = None
) -> Iterator[LoadedModel]:
    """Open a model file or a bundle for measuring.

    A bundle's variant has its own provider, options and optimisation level, because they are part of the artifact. Of
    `settings`, only the thread count applies to the variant. A plug-in engine runs a model file in a separate process.

    Args:
        opener: object that opens the session; None opens it on this machine.

    Raises:
        ModelError, BundleError, RuntimeUnavailableError: the model cannot be opened.
        UsageError: `variant` was given for a model file, or an engine for a bundle.
    """
    settings = settings or SessionSettings()
    if is_bundle(path):
        if settings.engine is not None:
            raise UsageError(f"{path} is a bundle, whose variants bring their engine", "Leave --engine out")
        with _open_variant(path, settings, variant, opener) as loaded:
            yield loaded
        return
    if variant is not None:
        raise UsageError(f"{path} is a model, which has no variants", "Leave --variant out")
    proto = load_runnable(path)
    check_declared_sizes(proto, path.parent, path)
    settings = add_model_options(path, choose_file_engine(path, settings))
    with Engines() as engines:
        yield LoadedModel(
            path=path,
            model=path,
            graph=in_memory(proto, data_folder(proto, path), where=path),
            variant=None,
            signature=signature_of(proto, path),
            settings=settings,
            session=(opener or engines).open(path, settings),
        )


@contextmanager
def _open_variant(
    path: Path, settings: SessionSettings, name: str | None, opener: Opener | None
) -> Iterator[LoadedModel]:
    with device_errors():
        bundle = open_bundle(path)
    with bundle:
        check_models(bundle)
        if opener is None:
            with device_errors():
                found = open_best(bundle, read_device(), name=name, threads=settings.intra_op_threads)
            chosen, session = found.choice.variant, found.session
        else:
            taken, session = opener.open_bundle(path, name, settings.intra_op_threads)
            chosen = next(variant for variant in bundle.components[MAIN] if variant.name == taken)
        assert chosen.model is not None, "select() returns only variants that ONNX Runtime runs"
        # The bundle's files were checked when it was opened. External weights may be in another folder of the bundle.
        model = own_runnable(chosen.model)
        settings = variant_settings(chosen, settings)
        with Engines() as engines:
            if opener is None and find_random_names(chosen.model) and (settings.engine or not chosen.provider_options):
                session = engines.open(chosen.model, settings)
            yield LoadedModel(
                path=path,
                model=chosen.model,
                graph=in_memory(model, Path(settings.config.get(EXTERNAL_FOLDER, chosen.model.parent)), where=path),
                variant=chosen.name,
                signature=signature_of(model, path),
                settings=settings,
                session=session,
                preprocess=variant_preprocessing(chosen),
            )


def check_models(bundle: Bundle) -> None:
    """Refuse a bundle if one of its models declares tensors that are far too large for the size of the model. This
    check comes before a session opens the model.

    Raises:
        ModelError: for the same reasons as `edgeq.model.load.check_declared_sizes`.
    """
    variants = [variant for variants in bundle.components.values() for variant in variants]
    places = {v.model: Path(v.session_options.get(EXTERNAL_FOLDER, v.model.parent)) for v in variants if v.model}
    for model, folder in places.items():
        check_declared_sizes(own_runnable(model), folder, bundle.source)


def variant_settings(variant: Variant, settings: SessionSettings | None = None) -> SessionSettings:
    """Return the settings of a variant. From `settings`, only the thread count is used."""
    engine = find_plugin(variant.ep)
    return replace(
        settings or SessionSettings(),
        engine=engine,
        precision=read_precision(variant, engine) if engine is not None else FLOAT,
        providers=tuple(dict.fromkeys((variant.ep, "CPUExecutionProvider"))),
        config=dict(variant.session_options),
        optimization=variant.info.get("optimization", "all"),
    )


def variant_preprocessing(variant: Variant) -> Mapping[str, Any] | None:
    """Return a variant's preprocessing without a file of labels. Return None if the variant has no preprocessing.

    A bundle is untrusted input, so it must not name a file of labels on this machine.
    """
    plain = variant.info.get("preprocessing")
    if not isinstance(plain, Mapping):
        return None
    source = plain.get("source")
    if not isinstance(source, Mapping) or str(source.get("labels", "")).startswith("name:"):
        return plain
    return {**plain, "source": {key: value for key, value in source.items() if key != "labels"}}


SAMPLES = 32
"""Default number of samples from the data. The same few samples run over and over, as in MLPerf."""


@dataclass(frozen=True)
class BenchData(Displayed):
    """Describe the samples of a benchmark.

    Attributes:
        source: samples, in any form that `edgeq.data.samples.open_samples` accepts. None uses the inputs of a bundle's
            self-test, or made-up inputs.
        preprocess: preprocessing, in any form that `open_samples` accepts; None uses the bundle's.
        count: maximum number of samples.
        shapes: sizes of inputs with open sizes, for made-up inputs.
    """

    source: Any = None
    preprocess: Any = None
    count: int | None = None
    shapes: Shapes | None = None


@dataclass(frozen=True)
class Workload:
    """Hold the settings and samples with which models are timed.

    Attributes:
        samples: feeds of the models; None uses the inputs of a bundle's self-test, or made-up inputs.
        shapes: sizes of inputs with open sizes, for made-up inputs.
    """

    settings: BenchSettings
    samples: Sequence[Feed] | None = None
    shapes: Shapes | None = None


class BenchPlace(Protocol):
    """Run a benchmark on another machine."""

    def models(self, models: Mapping[str, tuple[Path, SessionSettings]], work: Workload) -> Measurement:
        """Measure model files side by side."""

    def bundle(self, bundle: Path, variant: str | None, work: Workload) -> Measurement:
        """Measure the variant `variant` of a bundle. With None, measure the variant that fits the machine."""


def bench(
    path: str | Path,
    *,
    against: str | Path | None = None,
    variant: str | None = None,
    engines: EngineChoice | str | Sequence[EngineChoice | str] = (),
    data: BenchData | Data | Any | None = None,
    settings: BenchSettings | None = None,
    session_options: Mapping[str, str] | None = None,
    place: BenchPlace | None = None,
    progress: Progress = SILENT,
) -> Measurement:
    """Measure an .onnx file or a bundle on this machine, or on another machine (`place`).

    Args:
        path: a model, or a bundle (a directory or an .edgeq file). If the bundle contains a float32 model, that model
            is measured too.
        against: another model to compare with.
        variant: variant of a bundle; None uses the best one for this machine.
        session_options: session options for model files, in addition to those in the files. A bundle has its own.
        data: samples, in any form that `edgeq.open_samples` accepts. A few of them run over and over. `BenchData` can
            also set the sizes of made-up inputs. None uses the inputs of a bundle's self-test, or made-up inputs.
        settings: settings of the timing; None uses the defaults.
        engines: names of one or several engines, which execute the model one after another. Plug-ins run in separate
            processes. `against` always runs on onnxruntime's own kernels, and so does `path` if no engine is named.
        place: machine that runs the benchmark; None is this machine.

    Raises:
        UsageError, DataError, ModelError, BundleError, RuntimeUnavailableError: the message names the cause.
    """
    path, engines = path_of(path), as_engines(engines)
    against = path_of(against) if against is not None else None
    if settings is not None and not isinstance(settings, BenchSettings):
        raise UsageError(f"the settings are given as {type(settings).__name__}", "Give edgeq.BenchSettings(...)")
    settings, data = settings or BenchSettings(), data if isinstance(data, BenchData) else BenchData(data)
    _refuse_unused(data)
    if is_bundle(path):
        if against is not None:
            raise UsageError("--against compares model files, but a bundle has its own float32 model", "Leave it out")
        if engines:
            raise UsageError(f"{path} is a bundle, whose variants bring their engine", "Leave --engine out")
        refuse_ignored(SessionSettings(config=session_options or {}), path)
        return _bench_bundle(path, variant, data, settings, place, progress)
    if variant is not None:
        raise UsageError(f"{path} is a model, which has no variants", "Leave --variant out")
    simulated = next((choice.name for choice in engines if choice.engine.simulated), "")
    if simulated:
        raise UsageError(
            f"{simulated} is a simulator here: its times mean nothing", "Run edgeq_run.py bench on a device"
        )
    signature = model_signature(path)
    plain = SessionSettings(config=session_options or {})
    name, models = path.name, {}
    if against is not None:
        model_signature(against)
        name, other = (path.name, against.name) if path.name != against.name else (str(path), str(against))
        if name == other and not engines:
            raise UsageError(f"{path} would be compared with itself", "Name another model")
        models[other] = (against, plain)
    in_engines = {f"{name}, {e.name}": replace(plain, engine=e.engine, precision=e.precision) for e in engines}
    models |= {label: (path, how) for label, how in (in_engines or {name: plain}).items()}
    models = {label: (file, choose_file_engine(file, how)) for label, (file, how) in models.items()}
    if against is not None or len(models) > 1:
        settings = replace(settings, baseline=next(iter(models)))
    samples = _samples(data, signature, path, progress) if data.source is not None else None
    if place is not None:
        return place.models(models, Workload(settings, samples, data.shapes))
    # A single model has no ratio, so its latencies come from one session.
    count = min(sessions_to_time(file) for file, _ in models.values()) if len(models) > 1 else 1
    with Engines() as processes:
        return measure_models(
            [
                bench_model(name, p, how, processes.open, engines=processes, sessions=count)
                for name, (p, how) in models.items()
            ],
            settings,
            feeds=None if samples is None else lambda session: samples,
            shapes=data.shapes,
            progress=progress,
        )


def _bench_bundle(
    path: Path,
    variant: str | None,
    data: BenchData,
    settings: BenchSettings,
    place: BenchPlace | None,
    progress: Progress,
) -> Measurement:
    with device_errors(), open_bundle(path) as bundle:
        check_models(bundle)
        if place is None:
            variants, notes = choose_variants(bundle, read_device(), variant)
        else:
            variants, notes = list(bundle.components[MAIN]), ()
        samples = None
        if data.source is not None:
            # All variants have the same inputs.
            chosen = next((v for v in reversed(variants) if v.model is not None), None)
            if chosen is None or chosen.model is None:
                raise BundleError(f"{path} has no variant that onnxruntime runs", "Leave --data out")
            # The model's external weights may be in another folder of the bundle, but only names and shapes are needed.
            signature = own_signature(chosen.model, path)
            if data.preprocess is None:
                data = replace(data, preprocess=variant_preprocessing(chosen))
            samples = _samples(data, signature, chosen.model, progress)
        if place is not None:
            return place.bundle(path, variant, Workload(settings, samples, data.shapes))
        own = None if data.shapes else find_feeds(variants)
        feeds = own if samples is None else lambda session: samples
        return measure_models(
            build_bench_models(variants), settings, feeds=feeds, shapes=data.shapes, notes=notes, progress=progress
        )


def _refuse_unused(data: BenchData) -> None:
    """Refuse options that have no effect. These are options for reading samples if there are no samples, and sizes of
    made-up inputs if there are samples.
    """
    if data.source is None and (data.preprocess is not None or data.count is not None):
        option = "--count" if data.preprocess is None else "--preprocess"
        raise UsageError(f"{option} is about samples", "Give them with --data, or leave it out")
    if data.source is not None and data.shapes:
        raise UsageError("--shape is only for made-up inputs, but --data gives samples", "Leave one of them out")


def _samples(data: BenchData, signature: Signature, model: Path, progress: Progress) -> Sequence[Feed]:
    samples = open_or_search(
        as_data(data.source) or Data(data.source),
        signature,
        session=lambda: open_session(model),
        preprocess=data.preprocess,
        count=data.count or SAMPLES,
        model=model,
        progress=progress,
    )
    return [sample.inputs for sample in samples]


_TIMED_SECONDS = 0.5
# The same duration for models that have several sessions. Less time is enough, because claims about such models compare
# pairs of sessions, and sessions differ more than the runs of one session do.
_TIMED_SECONDS_IN_SEVERAL = 0.25
# On a busy machine, timing continues for up to this many seconds until enough runs were undisturbed.
_PATIENCE_SECONDS = 8.0
# Minimum number of runs. It is the smallest number of pairs that gives a 95 % interval for their median. With a larger
# minimum, timing a model that takes seconds would take minutes.
_TIMED_RUNS = 6
# On a busy machine no latency is steady, so a longer warm-up would not help.
_WARM_UP = WarmUp(window=3, min_s=0.1, max_s=0.5)


def runners(sessions: Mapping[str, Sequence[Any]], feeds: Sequence[Mapping[str, Any]]) -> dict[str, list[Runner]]:
    """Return the runners for `race`. Each model has one or several sessions.

    Args:
        feeds: inputs of one query; a query runs all of them.
    """
    return {name: [make_runner(s, feeds, samples_per_query=len(feeds)) for s in own] for name, own in sessions.items()}


def race(models: Mapping[str, Sequence[Runner]], on_round: Callable[[], None]) -> Mapping[str, Distribution]:
    """Time models in turns, and return their latencies.

    Args:
        models: name → a runner for each session of the model.
        on_round: function to call between rounds.
    """
    several = all(len(own) > 1 for own in models.values())
    return measure_interleaved(
        models,
        min_duration_s=_TIMED_SECONDS_IN_SEVERAL if several else _TIMED_SECONDS,
        min_runs=_TIMED_RUNS,
        patience_s=_PATIENCE_SECONDS,
        warmup=_WARM_UP,
        on_progress=lambda share: on_round(),
    )
