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
from edgeq.util.record_files import toml_table
from edgeq.util.records import parse
from edgeq.util.registry import BACKENDS, Registry, data_folders, shipped

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
        found = [level.value for level in self.levels if features.issuperset(level.features)]
        return {self.variable: found[-1]} if found else {}


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

    def __record__(self) -> str:
        return self.name

    @property
    def threaded(self) -> bool:
        """Return whether the number of threads that it uses can be set."""
        return not self.module or _THREADS in str(self.options)

    def fast_precisions(self, features: frozenset[str]) -> tuple[str, ...]:
        """Return the precisions in which a CPU with these features can compute with its own instructions."""
        return tuple(n for n, p in self.precisions.items() if not p.fast_on or features.intersection(p.fast_on))

    def watched(self) -> Engine:
        """Return the same engine with the options that make it write its layers to a profile."""
        return replace(self, options=_merged(self.options, self.graph.options))

    def keeping(self, folder: Path) -> Engine:
        """Return the same engine with the options that make it store compiled models in `folder`."""
        return replace(self, options=_merged(self.options, _in_folder(self.cache, str(folder))))

    def saturates(self, pair: str, architecture: str, features: frozenset[str]) -> bool:
        """Return whether the engine's kernels for the type pair `pair` add two products in 16 bits on a CPU with this
        architecture and these features.
        """
        without = self.int8.saturates_without
        there = any(platform.split()[1] == architecture for platform in self.platforms)
        return bool(without) and there and pair in self.int8.pairs and not features.intersection(without)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `more`. Nested tables are merged, not replaced."""
    tables = {key: _merged(base[key], value) for key, value in more.items() if isinstance(base.get(key), Mapping)}
    return {**base, **more, **tables}


def _in_folder(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return `options` with `folder` in place of "{folder}"."""
    return {
        key: _in_folder(value, folder) if isinstance(value, Mapping) else value.replace("{folder}", folder)
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
    found: dict[str, Engine] = {}
    for folder in folders or (shipped("targets") / "engines", *data_folders("targets/engines")):
        for path in sorted(folder.glob("*.toml")):
            if path.stem in found:
                raise HardwareError(f"{path}: there is an engine {path.stem} already", "Rename the file")
            content = toml_table(path, HardwareError, "Correct the file")
            found[path.stem] = parse({**content, "name": path.stem}, Engine, path, HardwareError, unknown_keys=False)
    return found


def described(spec: EngineSpec | None) -> Engine | None:
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
    known = load_engines()
    name, _, precision = text.partition(":")
    if name not in known:
        raise UsageError(f"unknown engine {name!r}", suggest(name, known))
    engine = known[name]
    precision = precision or next(iter(engine.precisions))
    if precision not in engine.precisions:
        raise UsageError(f"{name} has no precision {precision!r}", suggest(precision, engine.precisions))
    return EngineChoice(engine, precision)


def as_engine(given: EngineChoice | str) -> EngineChoice:
    """Return the engine and precision of `given`, which may also be a text "NAME" or "NAME:PRECISION".

    Raises:
        UsageError: there is no such engine or precision, or `given` has another type.
    """
    if isinstance(given, EngineChoice):
        return given
    if not isinstance(given, str):
        raise UsageError(f"an engine is given as {type(given).__name__}", 'Give its name, such as "onnxruntime"')
    return choose_engine(given)


def as_engines(given: EngineChoice | str | Sequence[EngineChoice | str]) -> tuple[EngineChoice, ...]:
    """Apply `as_engine` to each choice and return the results. A single choice counts as a sequence of one."""
    return tuple(as_engine(choice) for choice in ((given,) if isinstance(given, (EngineChoice, str)) else given))


def engine_for(backend: str, options: Mapping[str, str]) -> Engine:
    """Return the engine that runs the artifacts of `backend`. The provider options in `options` override the engine's
    own.

    Raises:
        HardwareError: there is no such engine, or `options` has one that a target may not set.
    """
    found = next(
        (engine for engine in load_engines().values() if engine.int8.backend == backend and engine.module), None
    )
    if found is None:
        raise HardwareError(f"no engine in targets/engines has int8.backend = {backend!r}", "Install edgeq again")
    refused = next((name for name in options if name not in found.target_options), None)
    if refused is not None:
        allowed = ", ".join(found.target_options) or "none"
        raise HardwareError(f"a target may not set {refused!r} in [device] engine_options", f"It may set: {allowed}")
    return replace(found, options={**found.options, **options})


_CONVERTERS: Registry[Any] = Registry(
    BACKENDS,
    lambda found: callable(getattr(found, "convert", None)),
    "backend with `convert`",
    make=lambda found: found() if isinstance(found, type) else found,
)


def converter_of(engine: EngineSpec) -> Callable[[Path, Path, Mapping[str, Any]], None]:
    """Return the function that converts an ONNX file to the format of `engine`. See
    `edgeq.backends.base.Backend.convert`.

    Raises:
        HardwareError: no backend converts to that format.
    """
    found: Any = _CONVERTERS.load(load_engines()[engine.name].int8.backend)
    convert: Callable[[Path, Path, Mapping[str, Any]], None] = found.convert
    return convert


def only_engine(backend: str) -> Engine | None:
    """Return the plug-in engine that runs both the artifacts of `backend` and the float model on any machine where it
    is installed.

    Return None if the artifacts run on onnxruntime's own kernels, or on hardware that this machine may not have. Also
    return None for an engine with its own file format, because it also runs the artifacts of other backends.
    """
    engines = (
        engine for engine in load_engines().values() if engine.module and _CPU in engine.devices and not engine.suffix
    )
    return next((engine for engine in engines if engine.int8.backend == backend != ""), None)


def device_table(engines: Mapping[str, Engine]) -> str:
    """Return the content of `edgeq_device/engines/engines.json`, the descriptions of the engines for devices."""
    values: dict[str, Any] = {name: engine.to_dict() for name, engine in sorted(engines.items())}
    return json.dumps(values, indent=1) + "\n"
