"""What `edgeq bench` measures: a model file, alone or against another, or a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.bench_models import Shapes
from edgeq_device.bench_settings import BenchSettings
from edgeq_device.scenarios import Feed

from edgeq.device import device_errors
from edgeq.engines import EngineChoice
from edgeq.errors import UsageError
from edgeq.measure.latency import Measurement, bench_model, measure_models
from edgeq.measure.loaded_model import is_bundle, variant_preprocessing
from edgeq.model.load import model_signature, signature_of
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings
from edgeq.signature import Signature
from edgeq.workers.engine import Engines

SAMPLES = 32
"""Samples taken from the data where no number is given: the same few over and over, as MLPerf does."""

Feeds = Callable[[Any], Sequence[Feed]]


@dataclass(frozen=True)
class BenchData:
    """Where the samples come from.

    Attributes:
        source: what `edgeq.data.samples.open_samples` takes; None makes inputs up, or takes a bundle's self-test's.
        preprocess: see there; None takes the bundle's.
        count: samples at most.
        shapes: of inputs with open sizes, where they are made up.
    """

    source: Any = None
    preprocess: Any = None
    count: int | None = None
    shapes: Shapes | None = None


def bench(
    path: str | Path,
    *,
    against: str | Path | None = None,
    variant: str | None = None,
    engines: Sequence[EngineChoice] = (),
    data: BenchData | None = None,
    settings: BenchSettings | None = None,
    session_options: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
) -> Measurement:
    """Measure an .onnx file or a bundle on this machine.

    Args:
        path: a model, or a bundle (a directory or an .edgeq file), whose float32 model, if it has one, is measured too.
        against: another model, to compare with.
        variant: of a bundle; None takes the best for this machine.
        session_options: to run model files with, over those that they carry; a bundle brings its own.
        engines: what executes the model, one after another where there are several; `against` runs in onnxruntime's own
            kernels, as all does where none is given. Plug-ins run in processes of their own.

    Raises:
        UsageError, DataError, ModelError, BundleError, RuntimeUnavailableError: as the message says.
    """
    path = Path(path)
    against = Path(against) if against is not None else None
    settings, data = settings or BenchSettings(), data or BenchData()
    if is_bundle(path):
        if against is not None:
            raise UsageError(
                "--against compares model files, and a bundle brings its own float32 model", "Leave it out"
            )
        if engines:
            raise UsageError(f"{path} is a bundle, whose variants bring their engine", "Leave --engine out")
        return _bench_bundle(path, variant, data, settings, progress)
    if variant is not None:
        raise UsageError(f"{path} is a model, which has no variants", "Leave --variant out")
    simulated = next((choice.name for choice in engines if choice.engine.simulated), "")
    if simulated:
        raise UsageError(
            f"{simulated} is a simulator here, whose times say nothing", "Run edgeq_run.py bench on a device"
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
    models |= _in_engines(name, path, engines, plain) or {name: (path, plain)}
    if against is not None or len(models) > 1:
        settings = replace(settings, baseline=next(iter(models)))
    with Engines() as processes:
        return measure_models(
            [bench_model(name, p, how, processes.open) for name, (p, how) in models.items()],
            settings,
            feeds=_feeds(data, signature, path, progress) if data.source is not None else None,
            shapes=data.shapes,
            progress=progress,
        )


def _in_engines(
    name: str, model: Path, engines: Sequence[EngineChoice], plain: SessionSettings
) -> dict[str, tuple[Path, SessionSettings]]:
    return {f"{name}, {e.name}": (model, replace(plain, engine=e.engine, precision=e.precision)) for e in engines}


def _bench_bundle(
    path: Path, variant: str | None, data: BenchData, settings: BenchSettings, progress: Progress
) -> Measurement:
    import onnx
    from edgeq_device.bench_bundle import bundle_feeds, bundle_models, bundle_variants
    from edgeq_device.package import open_bundle
    from edgeq_device.sessions import read_device

    with device_errors(), open_bundle(path) as bundle:
        variants = bundle_variants(bundle, read_device(), variant)
        chosen = variants[-1]
        assert chosen.model is not None, "select() takes no variant that onnxruntime does not run"
        feeds = None if data.shapes else bundle_feeds(variants)
        if data.source is not None:
            # Its external weights may lie elsewhere in the bundle, and only names and shapes are wanted.
            signature = signature_of(onnx.load(chosen.model, load_external_data=False), path)
            if data.preprocess is None:
                data = replace(data, preprocess=variant_preprocessing(chosen))
            feeds = _feeds(data, signature, chosen.model, progress)
        return measure_models(bundle_models(variants), settings, feeds=feeds, shapes=data.shapes, progress=progress)


def _feeds(data: BenchData, signature: Signature, model: Path, progress: Progress) -> Feeds:
    from edgeq.data.samples import open_samples

    samples = open_samples(
        data.source,
        signature,
        preprocess=data.preprocess,
        count=data.count or SAMPLES,
        model=model,
        progress=progress,
    )
    return lambda session: [sample.inputs for sample in samples]
