"""Open a model file or a bundle for measuring, and describe what was opened."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
from edgeq_device.answers.head import Head, parse_head
from edgeq_device.bundle.opening import open_best
from edgeq_device.bundle.package import MAIN, Bundle, open_bundle
from edgeq_device.engines.catalog import FLOAT, engine_of_file, find_plugin
from edgeq_device.engines.device import read_device
from edgeq_device.engines.variant import EXTERNAL_FOLDER, Variant, read_precision
from edgeq_device.program import read_labels

from edgeq.errors import UsageError
from edgeq.measure.inference import Session
from edgeq.model.load import check_declared_sizes, data_folder, load_runnable, load_unchecked, signature_of, to_memory
from edgeq.run.draws import find_random_names
from edgeq.run.session import Engines, SessionSettings, add_model_options, choose_file_engine
from edgeq.signature import Signature
from edgeq.util.bundle_names import is_named_bundle
from edgeq.util.device_errors import device_errors


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
        head: the head that the bundle records; None if it records none.
    """

    path: Path
    model: Path
    graph: ir.Model
    variant: str | None
    signature: Signature
    settings: SessionSettings
    session: Session
    preprocess: Mapping[str, Any] | None = None
    head: Head | None = None

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
    if path.is_dir() or is_named_bundle(path):
        return True
    # Files in the formats of some engines are zip files too.
    return path.is_file() and engine_of_file(path.name) is None and zipfile.is_zipfile(path)


def refuse_ignored(settings: SessionSettings, *paths: Path) -> None:
    """Refuse session options and an optimisation level if all `paths` are bundles.

    Bundles have their own session options and would ignore the given options.

    Raises:
        UsageError: a bundle would ignore an option; the message names the option.
    """
    other_level = settings.optimization != SessionSettings.optimization
    ignored_options = {"⟨session_options⟩": bool(settings.config), "⟨optimization⟩": other_level}
    option = next((name for name, is_set in ignored_options.items() if is_set), None)
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
            raise UsageError(f"{path} is a bundle, whose variants bring their engine", "Leave ⟨engine⟩ out")
        with _open_variant(path, settings, variant, opener) as loaded:
            yield loaded
        return
    if variant is not None:
        raise UsageError(f"{path} is a model, which has no variants", "Leave ⟨variant⟩ out")
    proto = load_runnable(path)
    # A small file can declare tensors that fill the memory when a session opens it.
    check_declared_sizes(proto, path.parent, path)
    # A file can carry session options that it needs, and a compiled file runs only in its own engine.
    settings = add_model_options(path, choose_file_engine(path, settings))
    with Engines() as engines:
        yield LoadedModel(
            path=path,
            model=path,
            graph=to_memory(proto, data_folder(proto, path), label=path),
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
                opening = open_best(bundle, read_device(), name=name, threads=settings.intra_op_threads)
            best_variant, session = opening.choice.variant, opening.session
        else:
            variant_name, session = opener.open_bundle(path, name, settings.intra_op_threads)
            best_variant = next(variant for variant in bundle.components[MAIN] if variant.name == variant_name)
        assert best_variant.model is not None, "select() returns only variants that ONNX Runtime runs"
        # The bundle's files were checked when it was opened. External weights may be in another folder of the bundle.
        model = load_unchecked(best_variant.model)
        settings = variant_settings(best_variant, settings)
        with Engines() as engines:
            # Outputs can be compared only if random operators give the same numbers in each session.
            is_random = opener is None and bool(find_random_names(best_variant.model))
            if is_random and (settings.engine or not best_variant.provider_options):
                session = engines.open(best_variant.model, settings)
            yield LoadedModel(
                path=path,
                model=best_variant.model,
                graph=to_memory(
                    model, Path(settings.config.get(EXTERNAL_FOLDER, best_variant.model.parent)), label=path
                ),
                variant=best_variant.name,
                signature=signature_of(model, path),
                settings=settings,
                session=session,
                preprocess=variant_preprocessing(best_variant),
                head=_read_head(bundle, best_variant),
            )


def _read_head(bundle: Bundle, variant: Variant) -> Head | None:
    record = variant.info.get("head")
    with device_errors():
        return parse_head(record, read_labels(bundle)) if record is not None else None


def check_models(bundle: Bundle) -> None:
    """Refuse a bundle if one of its models declares tensors that are far too large for the size of the model. This
    check comes before a session opens the model.

    Raises:
        ModelError: for the same reasons as `edgeq.model.load.check_declared_sizes`.
    """
    variants = [variant for variants in bundle.components.values() for variant in variants]
    # Several variants may share a model file, which is checked once.
    places = {v.model: Path(v.session_options.get(EXTERNAL_FOLDER, v.model.parent)) for v in variants if v.model}
    for model, folder in places.items():
        check_declared_sizes(load_unchecked(model), folder, bundle.source)


def variant_settings(variant: Variant, settings: SessionSettings | None = None) -> SessionSettings:
    """Return the settings of a variant. From `settings`, only the thread count is used."""
    engine = find_plugin(variant.ep)
    return replace(
        settings or SessionSettings(),
        engine=engine,
        precision=read_precision(variant, engine) if engine is not None else FLOAT,
        # The CPU runs the nodes that the provider refuses. For a CPU variant, the two are the same.
        providers=tuple(dict.fromkeys((variant.ep, "CPUExecutionProvider"))),
        config=dict(variant.session_options),
        optimization=variant.info.get("optimization", "all"),
    )


def variant_preprocessing(variant: Variant) -> Mapping[str, Any] | None:
    """Return a variant's preprocessing without a file of labels. Return None if the variant has no preprocessing.

    A bundle is untrusted input, so it must not name a file of labels on this machine.
    """
    preprocessing = variant.info.get("preprocessing")
    if not isinstance(preprocessing, Mapping):
        return None
    source = preprocessing.get("source")
    # Labels in the names of the samples read no other file.
    if not isinstance(source, Mapping) or str(source.get("labels", "")).startswith("name:"):
        return preprocessing
    return {**preprocessing, "source": {key: value for key, value in source.items() if key != "labels"}}
