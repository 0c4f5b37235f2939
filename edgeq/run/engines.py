"""Describe what executes a graph: ONNX Runtime's own CPU kernels, or a plug-in of it. `targets/engines/*.toml`, one
file each.

How an engine is found and opened is `edgeq_device.engines.EngineSpec`, because devices do the same; `Engine` adds what
matters for building and choosing. `engines.json` next to that module is what devices get to know.
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
"""The engine that runs wherever edgeq does."""
_CPU, _THREADS = "CPU", "{threads}"


@dataclass(frozen=True)
class Int8:
    """Describe what an engine does with quantized models.

    Attributes:
        pairs: types of activations and weights that it has integer kernels for, as "U8S8".
        operators: types of operators that it runs on integers, or
        backend: the backend whose int8 rules say so.
        saturates_without: CPU features without any of which its kernels add two products of U8S8 in 16 bits, which
            saturates; none: another file has it, or they are exact everywhere.
        saturation: the file under targets/ that says which kernels do.
        remedy_cost: mitigations against it, fields of `Scheme`, with the time that each takes relative to none.
    """

    pairs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    backend: str = ""
    saturates_without: tuple[str, ...] = ()
    saturation: str = ""
    remedy_cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IsaLevel:
    """Describe a value that limits an engine to the instructions of CPUs with these features."""

    value: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class IsaCap:
    """Describe how to stop an engine's process from using instructions that another CPU lacks.

    Attributes:
        variable: of its environment; "" where there is no such thing.
        levels: the least first.
    """

    variable: str = ""
    levels: tuple[IsaLevel, ...] = ()

    def environment(self, features: frozenset[str]) -> dict[str, str]:
        """Return what makes its kernels those of a CPU with `features`; empty where none of the levels does."""
        found = [level.value for level in self.levels if features.issuperset(level.features)]
        return {self.variable: found[-1]} if found else {}


@dataclass(frozen=True)
class ExecutionGraph:
    """Describe how to read the layers that an engine really executes from onnxruntime's profile.

    Attributes:
        options: provider options by which it enters them there.
        category: of its events; "" where it has none.
        operator, kernel: keys among an event's arguments that have the layer's type and its kernel's name.
        merged: the key that has the names of the nodes that a layer was made of, with commas between them; "" where
            nothing has.
        precisions: how a kernel's name ends → what it computes in, by the names of `precisions`, or "int8".
        conversions: types of layers that only change types or layouts.
        renamed: regular expression of what it adds to the name of the node that a layer was made of.
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
    """Describe one engine, as its file does.

    Attributes:
        title: for people.
        verified: what of this was executed, and on what; "never run: ..." where nothing was.
        cap: how it runs its kernels for lesser CPUs.
        graph: how what it executes is seen.
        cache: provider options by which it keeps what it has compiled in a folder, "{folder}" in them; none: it does
            not.
        present_on: platforms of which every machine has hardware for it; a CPU engine's are all of `platforms`.
        boards: parts of the names of boards, by their device trees, that have hardware for it.
        compute_capabilities: of the NVIDIA GPUs that it runs on, as "8.6", or "12.0+" for it and all newer ones; none:
            it needs no such GPU.
        why, source: the reason for a value and where it is known from, by its key.
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
        """Return whether it can be given a number of threads."""
        return not self.module or _THREADS in str(self.options)

    def fast_precisions(self, features: frozenset[str]) -> tuple[str, ...]:
        """Return the precisions that a CPU with these features has instructions for."""
        return tuple(n for n, p in self.precisions.items() if not p.fast_on or features.intersection(p.fast_on))

    def watched(self) -> Engine:
        """Return the same, with the options by which it enters its layers into a profile."""
        return replace(self, options=_merged(self.options, self.graph.options))

    def keeping(self, folder: Path) -> Engine:
        """Return the same, with the options by which it stores what it has compiled in `folder`."""
        return replace(self, options=_merged(self.options, _in_folder(self.cache, str(folder))))

    def saturates(self, pair: str, architecture: str, features: frozenset[str]) -> bool:
        """Return whether its kernels for such types add two products in 16 bits on such a CPU."""
        without = self.int8.saturates_without
        there = any(platform.split()[1] == architecture for platform in self.platforms)
        return bool(without) and there and pair in self.int8.pairs and not features.intersection(without)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `more`, table by table."""
    tables = {key: _merged(base[key], value) for key, value in more.items() if isinstance(base.get(key), Mapping)}
    return {**base, **more, **tables}


def _in_folder(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """`options` with `folder` for "{folder}"."""
    return {
        key: _in_folder(value, folder) if isinstance(value, Mapping) else value.replace("{folder}", folder)
        for key, value in options.items()
    }


@dataclass(frozen=True)
class EngineChoice:
    """Pair an engine with the precision of what is float in a model."""

    engine: Engine
    precision: str = FLOAT

    @property
    def name(self) -> str:
        """As it is written: "openvino", "openvino:bf16"."""
        return self.engine.name if self.precision == FLOAT else f"{self.engine.name}:{self.precision}"

    def __record__(self) -> str:
        return self.name


@cache
def load_engines(*folders: Path) -> Mapping[str, Engine]:
    """Return every engine by name: the shipped ones and those of plug-ins, or those of `folders`.

    Raises:
        HardwareError: a file is malformed, or two have one name.
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
    """Return all that is known of a plug-in that settings or a bundle name; None where it is not a plug-in.

    Raises:
        HardwareError: nothing describes it.
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
        UsageError: there is no such engine or precision; with the nearest name.
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
    """Return `given` as an engine and its precision: it may be "NAME" or "NAME:PRECISION".

    Raises:
        UsageError: as `choose_engine`; or something else.
    """
    if isinstance(given, EngineChoice):
        return given
    if not isinstance(given, str):
        raise UsageError(f"an engine is given as {type(given).__name__}", 'Give its name, such as "onnxruntime"')
    return choose_engine(given)


def as_engines(given: EngineChoice | str | Sequence[EngineChoice | str]) -> tuple[EngineChoice, ...]:
    """Return `as_engine` of each; one alone may replace a sequence of one."""
    return tuple(as_engine(choice) for choice in ((given,) if isinstance(given, (EngineChoice, str)) else given))


def engine_for(backend: str, options: Mapping[str, str]) -> Engine:
    """Return the engine that runs what `backend` builds, with these provider options over its own.

    Raises:
        HardwareError: there is none.
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
    """Return what makes a file of the format of `engine` of an ONNX file: see `edgeq.backends.base.Backend.convert`.

    Raises:
        HardwareError: no backend does.
    """
    found: Any = _CONVERTERS.load(load_engines()[engine.name].int8.backend)
    convert: Callable[[Path, Path, Mapping[str, Any]], None] = found.convert
    return convert


def only_engine(backend: str) -> Engine | None:
    """Return the engine that runs what `backend` builds, and the float model next to it, wherever that is installed;
    None where onnxruntime's own kernels do, hardware that may not be here, or an engine with files of its own format,
    which also runs what other backends build."""
    engines = (
        engine for engine in load_engines().values() if engine.module and _CPU in engine.devices and not engine.suffix
    )
    return next((engine for engine in engines if engine.int8.backend == backend != ""), None)


def device_table(engines: Mapping[str, Engine]) -> str:
    """Return the content of `edgeq_device/engines.json`: what devices get to know of the engines."""
    values: dict[str, Any] = {name: engine.to_dict() for name, engine in sorted(engines.items())}
    return json.dumps(values, indent=1) + "\n"
