"""Describe the engines that execute a graph: ONNX Runtime's own CPU kernels, or its plug-ins.

Each file of `targets/engines/*.toml` describes one engine. `edgeq_device.engines.catalog.EngineSpec` has the fields
that are needed to find and open an engine, because devices do this too. `Engine` adds the fields that matter for
building and choosing. Devices get the contents of `engines.json`, which is next to that module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgeq_device.engines.catalog import FLOAT, EngineSpec

from edgeq.errors import HardwareError, UsageError, suggest
from edgeq.util.folders import shipped
from edgeq.util.record_files import toml_table
from edgeq.util.records import parse
from edgeq.util.registry import BACKENDS, Registry, find_data_folders

DEFAULT = "onnxruntime"
"""The engine that is available wherever edgeq runs."""
_CPU, _THREADS = "CPU", "{threads}"


@dataclass(frozen=True)
class Int8:
    """Describe how an engine handles quantized models.

    Attributes:
        pairs: pairs of activation and weight types for which it has integer kernels, such as "U8S8".
        operators: operator types that it runs on integers; empty if `backend` defines them.
        backend: the backend whose int8 rules define the operators.
        saturates_without: CPU features. If a CPU has none of them, the engine's kernels add two U8S8 products in 16
            bits, which saturates. Empty if another file describes this, or if the kernels are exact everywhere.
        saturation: the file under targets/ that names the kernels that saturate.
        remedy_cost: latency with each mitigation against saturation, relative to no mitigation. The keys are fields of
            `Scheme`.
    """

    pairs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    backend: str = ""
    saturates_without: tuple[str, ...] = ()
    saturation: str = ""
    remedy_cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IsaLevel:
    """Describe a setting that limits an engine to the instructions of CPUs with `features`."""

    value: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class IsaCap:
    """Describe how to keep an engine's process from using instructions that another CPU lacks.

    Attributes:
        variable: environment variable that sets the limit; "" if the engine has none.
        levels: values of the variable, lowest level first.
    """

    variable: str = ""
    levels: tuple[IsaLevel, ...] = ()

    def environment(self, features: frozenset[str]) -> dict[str, str]:
        """Return the environment variables that limit the kernels to the instructions of a CPU with `features`. The
        result is empty if no level fits.
        """
        values = [level.value for level in self.levels if features.issuperset(level.features)]
        # Levels are listed upwards, so the last that fits is the highest.
        return {self.variable: values[-1]} if values else {}


@dataclass(frozen=True)
class ExecutionGraph:
    """Describe how to read from onnxruntime's profile which layers an engine really executes.

    Attributes:
        options: provider options that make the engine write its layers to the profile.
        category: category of the engine's events; "" if they have none.
        operator, kernel: argument keys of an event that contain the layer's type and the name of its kernel.
        merged: argument key of the comma-separated list of nodes from which a layer was made; "" if there is no such
            key.
        precisions: for each ending of a kernel's name, the precision in which the kernel computes: "int8" or a name in
            the engine's `precisions`.
        conversions: types of layers that only change types or layouts.
        renamed: regular expression for the text that the engine adds to a node's name to form the name of the layer.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    category: str = ""
    operator: str = ""
    kernel: str = ""
    merged: str = ""
    precisions: Mapping[str, str] = field(default_factory=dict)
    conversions: tuple[str, ...] = ()
    renamed: str = ""


@dataclass(frozen=True, kw_only=True)
class Engine(EngineSpec):
    """Describe one engine by the content of its file.

    Attributes:
        title: name for people.
        verified: the parts of this engine that were executed, and where; "never run: ..." if no part was executed.
        int8: how it handles quantized models.
        cap: how to limit its kernels to those of older CPUs.
        graph: how to see what it executes.
        cache: provider options that make it keep compiled models in a folder, which the options name as "{folder}";
            empty if it cannot keep them.
        target_options: provider options that the file of a target may set. Others may name a library to load, and a
            target's file may be untrusted.
        present_on: platforms on which every machine has hardware for it; for a CPU engine these are all of `platforms`.
        boards: texts that occur in board names, as device trees state them. A board whose name contains one of these
            texts has hardware for the engine.
        compute_capabilities: compute capabilities of the NVIDIA GPUs on which it runs, such as "8.6", or "12.0+" for
            12.0 and above; empty if it needs no NVIDIA GPU.
        why, source: the reason for a value and its source, by the value's key.
    """

    title: str
    verified: str
    int8: Int8 = field(default_factory=Int8)
    cap: IsaCap = field(default_factory=IsaCap)
    graph: ExecutionGraph = field(default_factory=ExecutionGraph)
    cache: Mapping[str, Any] = field(default_factory=dict)
    target_options: tuple[str, ...] = ()
    present_on: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)

    # Records name an engine; its description stays in its file.
    def __record__(self) -> str:
        return self.name

    @property
    def threaded(self) -> bool:
        """Return whether the number of threads that it uses can be set."""
        return not self.module or _THREADS in str(self.options)

    def fast_precisions(self, features: frozenset[str]) -> tuple[str, ...]:
        """Return the precisions in which a CPU with these features can compute with its own instructions."""
        return tuple(n for n, p in self.precisions.items() if not p.fast_on or features.intersection(p.fast_on))

    def with_layer_profile(self) -> Engine:
        """Return the same engine with the options that make it write its layers to a profile."""
        return replace(self, options=_merge(self.options, self.graph.options))

    def with_cache_in(self, folder: Path) -> Engine:
        """Return the same engine with the options that make it store compiled models in `folder`."""
        return replace(self, options=_merge(self.options, _fill_folder(self.cache, str(folder))))

    def has_saturating_kernels(self, pair: str, architecture: str, features: frozenset[str]) -> bool:
        """Return whether the engine's kernels for the type pair `pair` add two products in 16 bits on a CPU with this
        architecture and these features.
        """
        without = self.int8.saturates_without
        # Platforms are "SYSTEM ARCHITECTURE".
        runs_here = any(platform.split()[1] == architecture for platform in self.platforms)
        return bool(without) and runs_here and pair in self.int8.pairs and not features.intersection(without)


def _merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `more`. Nested tables are merged, not replaced."""
    tables = {key: _merge(base[key], value) for key, value in more.items() if isinstance(base.get(key), Mapping)}
    return {**base, **more, **tables}


def _fill_folder(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return `options` with `folder` in place of "{folder}"."""
    return {
        key: _fill_folder(value, folder) if isinstance(value, Mapping) else value.replace("{folder}", folder)
        for key, value in options.items()
    }


@dataclass(frozen=True)
class EngineChoice:
    """Describe a choice of an engine and of the precision of a model's float operators."""

    engine: Engine
    precision: str = FLOAT

    @property
    def name(self) -> str:
        """Return the name in the form that users write: "openvino" or "openvino:bf16"."""
        return self.engine.name if self.precision == FLOAT else f"{self.engine.name}:{self.precision}"

    def __record__(self) -> str:
        return self.name


@cache
def load_engines(*folders: Path) -> Mapping[str, Engine]:
    """Return every engine by name. If `folders` are given, these are the engines in them, and otherwise those of edgeq
    and of plug-ins.

    Raises:
        HardwareError: a file is malformed, or two files describe the same name.
    """
    engines: dict[str, Engine] = {}
    for folder in folders or (shipped("targets") / "engines", *find_data_folders("targets/engines")):
        for path in sorted(folder.glob("*.toml")):
            # A plug-in must not replace an engine silently.
            if path.stem in engines:
                raise HardwareError(f"{path}: there is an engine {path.stem} already", "Rename the file")
            content = toml_table(path, HardwareError, "Correct the file")
            # A misspelled key must not leave a default unnoticed.
            engines[path.stem] = parse({**content, "name": path.stem}, Engine, path, HardwareError, unknown_keys=False)
    return engines


def find_description(spec: EngineSpec | None) -> Engine | None:
    """Return the full description of the plug-in engine `spec`, or None if `spec` is not a plug-in. Settings and
    bundles contain only an `EngineSpec`.

    Raises:
        HardwareError: no file describes it.
    """
    if spec is None or not spec.module:
        return None
    if isinstance(spec, Engine):
        return spec
    if spec.name not in load_engines():
        raise HardwareError(f"nothing describes the engine {spec.name}", "Add targets/engines/NAME.toml")
    return load_engines()[spec.name]


def choose_engine(text: str) -> EngineChoice:
    """Return the engine and precision that "NAME" or "NAME:PRECISION" selects.

    Raises:
        UsageError: there is no such engine or precision; suggests the nearest name.
    """
    engines = load_engines()
    name, _, precision = text.partition(":")
    if name not in engines:
        raise UsageError(f"unknown engine {name!r}", suggest(name, engines))
    engine = engines[name]
    precision = precision or next(iter(engine.precisions))
    if precision not in engine.precisions:
        raise UsageError(f"{name} has no precision {precision!r}", suggest(precision, engine.precisions))
    return EngineChoice(engine, precision)


def as_engine(choice: EngineChoice | str) -> EngineChoice:
    """Return the engine and precision of `choice`, which may also be a text "NAME" or "NAME:PRECISION".

    Raises:
        UsageError: there is no such engine or precision, or `choice` has another type.
    """
    if isinstance(choice, EngineChoice):
        return choice
    if not isinstance(choice, str):
        raise UsageError(f"an engine is given as {type(choice).__name__}", 'Give its name, such as "onnxruntime"')
    return choose_engine(choice)


def as_engines(choices: EngineChoice | str | Sequence[EngineChoice | str]) -> tuple[EngineChoice, ...]:
    """Apply `as_engine` to each choice and return the results. A single choice counts as a sequence of one."""
    return tuple(as_engine(choice) for choice in ((choices,) if isinstance(choices, (EngineChoice, str)) else choices))


def find_backend_engine(backend: str, options: Mapping[str, str]) -> Engine:
    """Return the engine that runs the artifacts of `backend`. The provider options in `options` override the engine's
    own.

    Raises:
        HardwareError: there is no such engine, or `options` has one that a target may not set.
    """
    engine = next(
        (engine for engine in load_engines().values() if engine.int8.backend == backend and engine.module), None
    )
    if engine is None:
        raise HardwareError(f"no engine in targets/engines has int8.backend = {backend!r}", "Install edgeq again")
    # A target's file may come from anybody, and an option may load a library.
    refused = next((name for name in options if name not in engine.target_options), None)
    if refused is not None:
        allowed = ", ".join(engine.target_options) or "none"
        raise HardwareError(f"a target may not set {refused!r} in [device] engine_options", f"It may set: {allowed}")
    return replace(engine, options={**engine.options, **options})


_CONVERTERS: Registry[Any] = Registry(
    BACKENDS,
    lambda backend: callable(getattr(backend, "convert", None)),
    "backend with `convert`",
    make=lambda backend: backend() if isinstance(backend, type) else backend,
)


def find_converter(engine: EngineSpec) -> Callable[[Path, Path, Mapping[str, Any]], None]:
    """Return the function that converts an ONNX file to the format of `engine`. See
    `edgeq.backends.base.Backend.convert`.

    Raises:
        HardwareError: no backend converts to that format.
    """
    backend: Any = _CONVERTERS.load(load_engines()[engine.name].int8.backend)
    convert: Callable[[Path, Path, Mapping[str, Any]], None] = backend.convert
    return convert


def find_only_engine(backend: str) -> Engine | None:
    """Return the plug-in engine that runs both the artifacts of `backend` and the float model on any machine where it
    is installed.

    Return None if the artifacts run on onnxruntime's own kernels, or on hardware that this machine may not have. Also
    return None for an engine with its own file format, because it also runs the artifacts of other backends.
    """
    engines = (
        engine for engine in load_engines().values() if engine.module and _CPU in engine.devices and not engine.suffix
    )
    return next((engine for engine in engines if engine.int8.backend == backend != ""), None)


def build_device_table(engines: Mapping[str, Engine]) -> str:
    """Return the content of `edgeq_device/engines/engines.json`, the descriptions of the engines for devices."""
    values: dict[str, Any] = {name: engine.to_dict() for name, engine in sorted(engines.items())}
    return json.dumps(values, indent=1) + "\n"
