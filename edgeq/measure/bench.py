"""Run `edgeq bench`: choose the engines, samples and sessions of models, and measure the models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from edgeq_device.bundle.bench_models import Shapes, build_bench_models, choose_variants, find_feeds
from edgeq_device.bundle.package import MAIN, open_bundle
from edgeq_device.engines.device import read_device
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.scenarios import Feed

from edgeq.data.open_source import Data, as_data
from edgeq.errors import BundleError, UsageError
from edgeq.measure.latency import Measurement, measure_models
from edgeq.measure.loaded_model import check_models, is_bundle, refuse_ignored, variant_preprocessing
from edgeq.measure.preprocess_search import open_or_search
from edgeq.measure.timed_model import bench_model, count_sessions
from edgeq.model.load import model_signature, unchecked_signature
from edgeq.run.engines import EngineChoice, as_engines
from edgeq.run.session import Engines, SessionSettings, choose_file_engine, open_session
from edgeq.signature import Signature
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Displayed, Progress
from edgeq.util.paths import path_of

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
    # An option without an effect is refused before minutes of measuring.
    _refuse_unused(data)
    if is_bundle(path):
        if against is not None:
            raise UsageError("⟨against⟩ compares model files, but a bundle has its own float32 model", "Leave it out")
        if engines:
            raise UsageError(f"{path} is a bundle, whose variants bring their engine", "Leave ⟨engine⟩ out")
        # The options of a variant are part of the artifact.
        refuse_ignored(SessionSettings(config=session_options or {}), path)
        return _bench_bundle(path, variant, data, settings, place, progress)
    if variant is not None:
        raise UsageError(f"{path} is a model, which has no variants", "Leave ⟨variant⟩ out")
    simulated = next((choice.name for choice in engines if choice.engine.simulated), "")
    if simulated:
        raise UsageError(
            f"{simulated} is a simulator here: its times mean nothing", "Run edgeq_run.py bench on a device"
        )
    signature = model_signature(path)
    base_settings = SessionSettings(config=session_options or {})
    name, models = path.name, {}
    if against is not None:
        model_signature(against)
        name, reference_name = (path.name, against.name) if path.name != against.name else (str(path), str(against))
        # With engines, the two differ by the engine's name in the label.
        if name == reference_name and not engines:
            raise UsageError(f"{path} would be compared with itself", "Name another model")
        models[reference_name] = (against, base_settings)
    in_engines = {f"{name}, {e.name}": replace(base_settings, engine=e.engine, precision=e.precision) for e in engines}
    for label, session_settings in (in_engines or {name: base_settings}).items():
        models[label] = (path, session_settings)
    models = {label: (file, choose_file_engine(file, base)) for label, (file, base) in models.items()}
    if against is not None or len(models) > 1:
        # `against` was added first. Without it, the first engine is the baseline of the others.
        settings = replace(settings, baseline=next(iter(models)))
    samples = _open_feeds(data, signature, path, progress) if data.source is not None else None
    if place is not None:
        return place.models(models, Workload(settings, samples, data.shapes))
    # A single model has no ratio, so its latencies come from one session.
    count = min(count_sessions(file) for file, _ in models.values()) if len(models) > 1 else 1
    with Engines() as processes:
        return measure_models(
            [
                bench_model(name, p, session_settings, processes.open, engines=processes, sessions=count)
                for name, (p, session_settings) in models.items()
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
        # A bundle is untrusted input: it is checked before a session opens one of its models.
        check_models(bundle)
        if place is None:
            variants, notes = choose_variants(bundle, read_device(), variant)
        else:
            # The other machine chooses among all variants itself.
            variants, notes = list(bundle.components[MAIN]), ()
        samples = None
        if data.source is not None:
            # All variants have the same inputs.
            runnable = next((v for v in reversed(variants) if v.model is not None), None)
            if runnable is None or runnable.model is None:
                raise BundleError(f"{path} has no variant that onnxruntime runs", "Leave ⟨data⟩ out")
            # The model's external weights may be in another folder of the bundle, but only names and shapes are needed.
            signature = unchecked_signature(runnable.model, path)
            if data.preprocess is None:
                data = replace(data, preprocess=variant_preprocessing(runnable))
            samples = _open_feeds(data, signature, runnable.model, progress)
        if place is not None:
            return place.bundle(path, variant, Workload(settings, samples, data.shapes))
        self_test_feeds = None if data.shapes else find_feeds(variants)
        feeds = self_test_feeds if samples is None else lambda session: samples
        return measure_models(
            build_bench_models(variants), settings, feeds=feeds, shapes=data.shapes, notes=notes, progress=progress
        )


def _refuse_unused(data: BenchData) -> None:
    """Refuse options that have no effect. These are options for reading samples if there are no samples, and sizes of
    made-up inputs if there are samples.
    """
    if data.source is None and (data.preprocess is not None or data.count is not None):
        option = "⟨count⟩" if data.preprocess is None else "⟨preprocess⟩"
        raise UsageError(f"{option} is about samples", "Give them with ⟨data⟩, or leave it out")
    if data.source is not None and data.shapes:
        raise UsageError("⟨shapes⟩ is only for made-up inputs, but ⟨data⟩ gives samples", "Leave one of them out")


def _open_feeds(data: BenchData, signature: Signature, model: Path, progress: Progress) -> Sequence[Feed]:
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
