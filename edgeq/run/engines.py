"""Describe the engines that execute a graph: ONNX Runtime's own CPU kernels, or its plug-ins.

Each file of `targets/engines/*.toml` describes one. `edgeq_device.engines.EngineSpec` has what is needed to find and
open an engine, because devices do the same. `Engine` adds what matters for building and choosing. Devices get the
content of `engines.json`, next to that module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgeq_device.engines import FLOAT, EngineSpec

from edgeq.errors import HardwareError, UsageError, suggest
from edgeq.util.records import parse, toml_table
from edgeq.util.registry import BACKENDS, Registry, data_folders, shipped

DEFAULT = "onnxruntime"
"""The engine that is available wherever edgeq runs."""
_CPU, _THREADS = "CPU", "{threads}"


@dataclass(frozen=True)
class Int8:
    """Describe how an engine handles quantized models.

    Attributes:
        pairs: types of activations and weights for which it has integer kernels, such as "U8S8".
        operators: types of operators that it runs on integers; empty if `backend` defines them.
        backend: the backend whose int8 rules define them.
        saturates_without: CPU features. Without any of them, its kernels add two products of U8S8 in 16 bits, which
            saturates. Empty if another file describes this, or if the kernels are exact everywhere.
        saturation: the file under targets/ that names the kernels that saturate.
        remedy_cost: mitigations against saturation, fields of `Scheme`, each with its time relative to no mitigation.
    """

    pairs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    backend: str = ""
    saturates_without: tuple[str, ...] = ()
    saturation: str = ""
    remedy_cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IsaLevel:
    """Describe a value that limits an engine to the instructions of CPUs with `features`."""

    value: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class IsaCap:
    """Describe how to keep an engine's process from using instructions that another CPU lacks.

    Attributes:
        variable: variable of the process's environment; "" if the engine has none.
        levels: its values, the lowest level first.
    """

    variable: str = ""
    levels: tuple[IsaLevel, ...] = ()

    def environment(self, features: frozenset[str]) -> dict[str, str]:
        """Return the environment that limits the kernels to those of a CPU with `features`. It is empty if no level
        fits.
        """
        found = [level.value for level in self.levels if features.issuperset(level.features)]
        return {self.variable: found[-1]} if found else {}


@dataclass(frozen=True)
class ExecutionGraph:
    """Describe how to read from onnxruntime's profile which layers an engine really executes.

    Attributes:
        options: provider options that make the engine enter its layers there.
        category: category of its events; "" if they have none.
        operator, kernel: keys of an event's arguments that contain the layer's type and the name of its kernel.
        merged: key of the argument that lists, separated by commas, the nodes from which a layer was made; "" if there
            is no such key.
        precisions: end of a kernel's name → what the kernel computes in, by the names of `precisions`, or "int8".
        conversions: types of layers that only change types or layouts.
        renamed: regular expression for the text that the engine adds to the name of a layer's node.
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
    """Describe one engine, by the content of its file.

    Attributes:
        title: name for people.
        verified: what was executed of this engine, and where; "never run: ..." if nothing was.
        int8: how it handles quantized models.
        cap: how to limit its kernels to those of older CPUs.
        graph: how to see what it executes.
        cache: provider options that make it keep compiled models in a folder, which they name as "{folder}"; empty if
            it cannot.
        present_on: platforms on which every machine has hardware for it; for a CPU engine these are all of `platforms`.
        boards: parts of the names of boards, as in their device trees, that have hardware for it.
        compute_capabilities: NVIDIA GPUs on which it runs, such as "8.6", or "12.0+" for 12.0 and all newer ones; empty
            if it needs no such GPU.
        why, source: the reason for a value and its source, by the value's key.
    """

    title: str
    verified: str
    int8: Int8 = field(default_factory=Int8)
    cap: IsaCap = field(default_factory=IsaCap)
    graph: ExecutionGraph = field(default_factory=ExecutionGraph)
    cache: Mapping[str, Any] = field(default_factory=dict)
    present_on: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)

    def __record__(self) -> str:
        return self.name

    @property
    def threaded(self) -> bool:
        """Return whether the number of its threads can be set."""
        return not self.module or _THREADS in str(self.options)

    def fast_precisions(self, features: frozenset[str]) -> tuple[str, ...]:
        """Return the precisions for which a CPU with these features has instructions."""
        return tuple(n for n, p in self.precisions.items() if not p.fast_on or features.intersection(p.fast_on))

    def watched(self) -> Engine:
        """Return the same engine with the options that make it enter its layers into a profile."""
        return replace(self, options=_merged(self.options, self.graph.options))

    def keeping(self, folder: Path) -> Engine:
        """Return the same engine with the options that make it store compiled models in `folder`."""
        return replace(self, options=_merged(self.options, _in_folder(self.cache, str(folder))))

    def saturates(self, pair: str, architecture: str, features: frozenset[str]) -> bool:
        """Return whether its kernels for the types `pair` add two products in 16 bits on such a CPU."""
        without = self.int8.saturates_without
        there = any(platform.split()[1] == architecture for platform in self.platforms)
        return bool(without) and there and pair in self.int8.pairs and not features.intersection(without)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `more`, merged table by table."""
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
    """Pair an engine with the precision of a model's float operators."""

    engine: Engine
    precision: str = FLOAT

    @property
    def name(self) -> str:
        """Return the name as users write it: "openvino", "openvino:bf16"."""
        return self.engine.name if self.precision == FLOAT else f"{self.engine.name}:{self.precision}"

    def __record__(self) -> str:
        return self.name


@cache
def load_engines(*folders: Path) -> Mapping[str, Engine]:
    """Return every engine by name: the shipped ones and those of plug-ins, or those in `folders`.

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
    """Return the full description of a plug-in that settings or a bundle name, or None if `spec` is not a plug-in.

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
    """Return the engine and precision of "NAME" or "NAME:PRECISION".

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
    """Return the engine and precision of `given`, which may also be "NAME" or "NAME:PRECISION".

    Raises:
        UsageError: there is no such engine or precision, or `given` has another type.
    """
    if isinstance(given, EngineChoice):
        return given
    if not isinstance(given, str):
        raise UsageError(f"an engine is given as {type(given).__name__}", 'Give its name, such as "onnxruntime"')
    return choose_engine(given)


def as_engines(given: EngineChoice | str | Sequence[EngineChoice | str]) -> tuple[EngineChoice, ...]:
    """Return `as_engine` of each choice. A single choice counts as a sequence of one."""
    return tuple(as_engine(choice) for choice in ((given,) if isinstance(given, (EngineChoice, str)) else given))


def engine_for(backend: str, options: Mapping[str, str]) -> Engine:
    """Return the engine that runs the artifacts of `backend`. The given provider options override its own.

    Raises:
        HardwareError: there is no such engine.
    """
    found = next(
        (engine for engine in load_engines().values() if engine.int8.backend == backend and engine.module), None
    )
    if found is None:
        raise HardwareError(f"no engine in targets/engines has int8.backend = {backend!r}", "Install edgeq again")
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
    """Return the plug-in engine that runs the artifacts of `backend`, and the float model, on any machine that has the
    engine.

    Return None if the artifacts run on onnxruntime's own kernels, or on hardware that may be missing here. Also return
    None for an engine with files of its own format, because it also runs the artifacts of other backends.
    """
    engines = (
        engine for engine in load_engines().values() if engine.module and _CPU in engine.devices and not engine.suffix
    )
    return next((engine for engine in engines if engine.int8.backend == backend != ""), None)


def device_table(engines: Mapping[str, Engine]) -> str:
    """Return the content of `edgeq_device/engines.json`: the descriptions of the engines for devices."""
    values: dict[str, Any] = {name: engine.to_dict() for name, engine in sorted(engines.items())}
    return json.dumps(values, indent=1) + "\n"
