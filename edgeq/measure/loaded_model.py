"""A model that is measured: a file, or the variant of a bundle that this machine would run, opened the same way."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgeq_device.engines import FLOAT, plugin_of
from edgeq_device.select import precision_of
from edgeq_device.variants import EXTERNAL_FOLDER

from edgeq.errors import UsageError
from edgeq.measure.latency import Session
from edgeq.model.clean import is_named_bundle
from edgeq.run.session import SessionSettings, with_carried
from edgeq.run.workers import Engines
from edgeq.signature import Signature
from edgeq.util.resources import device_errors

if TYPE_CHECKING:
    import onnx_ir as ir
    from edgeq_device.package import Bundle
    from edgeq_device.variants import Variant


@dataclass(frozen=True)
class LoadedModel:
    """An open session and what is known about it.

    Attributes:
        path: as given.
        model: the ONNX file that runs: `path` itself, or one inside a bundle, there as long as the session is open.
        graph: the same in memory; external weights are read when they are used.
        variant: the bundle's variant; None for a model file.
        signature: inputs and outputs.
        settings: what the session was opened with.
        preprocess: the bundle's preprocessing; None where there is none.
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
        """Where the external weights of `model` lie."""
        return Path(self.settings.config.get(EXTERNAL_FOLDER, self.model.parent))

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.path) if self.variant is None else f"{self.path} ({self.variant})"


class Opener(Protocol):
    """Opens models where they are to run: here, or on a board."""

    def open(self, model: Path, settings: SessionSettings) -> Any:
        """A session of a model file."""

    def open_bundle(self, bundle: Path, variant: str | None, threads: int) -> tuple[str, Any]:
        """The name of the variant that runs there (or that is named), and its session."""


def is_bundle(path: Path) -> bool:
    """Whether `path` is meant as a bundle: a directory, a zip, or named .edgeq."""
    return path.is_dir() or is_named_bundle(path) or (path.is_file() and zipfile.is_zipfile(path))


def refuse_ignored(settings: SessionSettings, *paths: Path) -> None:
    """Refuse session options and an optimisation level where nothing takes them: where all `paths` are bundles, which
    bring their own.

    Raises:
        UsageError: naming the option.
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

    A bundle's variant brings its own provider, options and optimisation level, because they are part of the artifact;
    of `settings` only the thread count is taken then. A plug-in engine runs a model file in a process of its own.

    Args:
        opener: what opens it; None opens it on this machine.

    Raises:
        ModelError, BundleError, RuntimeUnavailableError: it cannot be opened.
        UsageError: `variant` with a model file, or an engine with a bundle.
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
    from edgeq.model.load import check_sizes, data_folder, in_memory, load_model, signature_of

    proto = load_model(path, external_data="none")
    check_sizes(proto, path.parent, path)
    settings = with_carried(path, settings)
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
    import onnx
    from edgeq_device.opening import open_best
    from edgeq_device.package import MAIN, open_bundle
    from edgeq_device.sessions import read_device

    from edgeq.model.load import in_memory, signature_of

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
        assert chosen.model is not None, "select() takes no variant that ONNX Runtime does not run"
        # The bundle's files were checked when it was opened. External weights may lie elsewhere in it.
        model = onnx.load(chosen.model, load_external_data=False)
        settings = variant_settings(chosen, settings)
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
    """Refuse a bundle in which a model makes much of little, before a session is opened.

    Raises:
        ModelError: as `edgeq.model.load.check_sizes`.
    """
    import onnx

    from edgeq.model.load import check_sizes

    variants = [variant for variants in bundle.components.values() for variant in variants]
    places = {v.model: Path(v.session_options.get(EXTERNAL_FOLDER, v.model.parent)) for v in variants if v.model}
    for model, folder in places.items():
        check_sizes(onnx.load(model, load_external_data=False), folder, bundle.source)


def variant_settings(variant: Variant, settings: SessionSettings | None = None) -> SessionSettings:
    """What a variant is opened with; of `settings` only the thread count is taken."""
    engine = plugin_of(variant.ep)
    return replace(
        settings or SessionSettings(),
        engine=engine,
        precision=precision_of(variant, engine) if engine is not None else FLOAT,
        providers=tuple(dict.fromkeys((variant.ep, "CPUExecutionProvider"))),
        config=dict(variant.session_options),
        optimization=variant.info.get("optimization", "all"),
    )


def variant_preprocessing(variant: Variant) -> Mapping[str, Any] | None:
    """A variant's preprocessing. A bundle is untrusted input: it must not name a file of labels on this machine."""
    plain = variant.info.get("preprocessing")
    if not isinstance(plain, Mapping):
        return None
    source = plain.get("source")
    if not isinstance(source, Mapping) or str(source.get("labels", "")).startswith("name:"):
        return plain
    return {**plain, "source": {key: value for key, value in source.items() if key != "labels"}}
