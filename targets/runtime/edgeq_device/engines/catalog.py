"""Find, register and open engines. An engine executes a graph.

ONNX Runtime's own CPU kernels are one engine. Other engines come in packages. Some have a library that is registered
with the same onnxruntime at run time. Others run models by themselves, and an adapter opens them. The file engines.json
next to this one describes each engine. It is part of the code, never of a bundle.
"""

from __future__ import annotations

import json
import platform
import re
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Tuple

from edgeq_device.errors import RuntimeUnavailableError, UsageError
from edgeq_device.system.features import Evidence, gather, normalise_architecture, parse_identity
from edgeq_device.system.files import read_file
from edgeq_device.system.tables import read_table


def parse_version(text: str) -> Tuple[int, ...]:
    """Return "1.31.1" as (1, 31, 1). Text after the digits of a part ("1.20.0rc1") is ignored. "" sorts before all
    others.
    """
    # Limit the digits, because Python refuses to read thousands of them.
    numbers = (re.match(r"[0-9]{1,18}", part) for part in text.split("."))
    return tuple(int(number.group()) for number in numbers if number is not None)


_IDENTITY = (0, 0)


@lru_cache(maxsize=1)
def read_vendor() -> str:
    """Return the vendor of the CPU, such as "GenuineIntel" or "AuthenticAMD". Return "" if it is unknown, as on
    architectures other than x86-64.
    """
    return read_vendor_of(gather())


def read_vendor_of(evidence: Evidence) -> str:
    """Return the vendor that CPUID reports, because runtimes rely on it. Under an emulator, /proc/cpuinfo shows the
    host's vendor.
    """
    if evidence.cpuid is not None and _IDENTITY in evidence.cpuid.leaves:
        _, ebx, ecx, edx = evidence.cpuid.leaves[_IDENTITY]
        return struct.pack("<3I", ebx, edx, ecx).decode("ascii", "replace").strip("\0 ")
    return parse_identity(evidence.cpuinfo).get("vendor_id", "")


FLOAT = "f32"
"""Default precision: that of the model file."""
_PRECISION, _THREADS = "{precision}", "{threads}"


@dataclass(frozen=True)
class Precision:
    """Describe the precision in which an engine computes the float parts of a model.

    Attributes:
        value: value of the engine's option.
        fast_on: CPU features; any one of them makes the precision fast. If empty, the precision is fast on every CPU.
    """

    value: str
    fast_on: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Direct:
    """Describe a package that runs models without onnxruntime, on machines that an engine's plug-in does not support.

    Attributes:
        adapter: module of edgeq_device that opens models in the package: see `open_engine`.
        packages, module, libraries, oldest, platforms: values for this package, with the same meaning as in
            `EngineSpec`.
    """

    adapter: str
    packages: Tuple[str, ...]
    module: str
    libraries: Tuple[str, ...]
    oldest: str = ""
    platforms: Tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineSpec:
    """Describe how an engine is found and opened.

    Attributes:
        name: name that users write.
        provider: ONNX Runtime's execution provider.
        devices: kinds of hardware on which the engine is opened, best first: "CPU", "GPU", "NPU".
        packages: distributions that contain the engine. Any of them is enough; the first is the one to install.
        module: importable name of the package, whose folder contains the library; "" if the engine is built into
            onnxruntime.
        libraries: file names of the plug-in's library, one for each operating system.
        imported: True if the package must be imported first, to load the libraries that the plug-in links against.
        by_name: True if onnxruntime itself loads the library, given only the provider's name. Otherwise the library is
            registered.
        install: command that installs the package, if the package's name is not enough.
        oldest: oldest version of the package that is known to give correct results; "" if any version does.
        min_onnxruntime: oldest onnxruntime that the library can be registered with.
        platforms: platforms for which the package exists, such as "linux x86_64"; empty: all platforms.
        cpu_vendors: vendors of the CPUs that the package supports, as CPUID names them; empty: any vendor.
        cpu_vendors_until: last version of the package for which `cpu_vendors` is known to be right.
        driver: sentence about what to install or check if the engine finds no hardware of its kind.
        simulated_on: platforms on which the package simulates its hardware. Results are correct, but slow.
        compiled: True if a bundle may contain a model that this engine compiled. Its code must be inside the model's
            file.
        precisions: precisions by name; the first is the default.
        options: provider options. A table is passed as JSON. "{precision}" is replaced by the precision's value, and
            "{threads}" by the number of threads inside an operator. An entry with "{threads}" is left out if the number
            is not set.
        adapter: module of edgeq_device that opens models without onnxruntime; "" if onnxruntime opens them.
        suffix: suffix of the files that the engine opens, such as ".tflite"; "" for ONNX files.
        foreign: True if the package is not a Python package. The functions `package_version`, `package_folder` and
            `package_problem` of the adapter then find it.
        direct: package that runs models with the same options if the plug-in cannot; see `choose_installed_form`.
    """

    name: str
    provider: str
    devices: Tuple[str, ...] = ("CPU",)
    packages: Tuple[str, ...] = ()
    module: str = ""
    libraries: Tuple[str, ...] = ()
    imported: bool = False
    by_name: bool = False
    install: str = ""
    oldest: str = ""
    min_onnxruntime: str = ""
    platforms: Tuple[str, ...] = ()
    cpu_vendors: Tuple[str, ...] = ()
    cpu_vendors_until: str = ""
    driver: str = ""
    simulated_on: Tuple[str, ...] = ()
    compiled: bool = False
    precisions: Mapping[str, Precision] = field(default_factory=lambda: {FLOAT: Precision(FLOAT)})
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    suffix: str = ""
    foreign: bool = False
    direct: Optional[Direct] = None

    @property
    def simulated(self) -> bool:
        """Return whether the engine is a simulator on this machine. Timings of a simulator mean nothing."""
        return read_platform() in self.simulated_on

    def to_dict(self) -> Dict[str, Any]:
        """Return plain JSON values for `read_engine`."""
        fields = EngineSpec.__dataclass_fields__
        return {name: value for name, value in asdict(self).items() if name in fields}


def read_engine(values: Mapping[str, Any]) -> EngineSpec:
    """Return the engine that a dictionary of `EngineSpec.to_dict` describes. The values are trusted."""
    precisions = {name: Precision(p["value"], tuple(p["fast_on"])) for name, p in values["precisions"].items()}
    names = ("devices", "packages", "libraries", "platforms", "cpu_vendors", "simulated_on")
    lists = {name: tuple(values[name]) for name in names}
    direct_values: Dict[str, Any] = dict(values["direct"] or {})
    # JSON has lists where the dataclasses have tuples.
    direct_values = {
        key: tuple(value) if isinstance(value, (list, tuple)) else value for key, value in direct_values.items()
    }
    direct = Direct(**direct_values) if direct_values else None
    return EngineSpec(**{**values, **lists, "precisions": precisions, "direct": direct})


def list_forms(engine: EngineSpec) -> Tuple[EngineSpec, ...]:
    """Return the engine's plug-in form and, if there is one, the form that runs models without onnxruntime."""
    if engine.direct is None:
        return (engine,)
    plugin_form = replace(engine, direct=None)
    direct_values: Dict[str, Any] = {
        "min_onnxruntime": "",
        "cpu_vendors": (),
        "cpu_vendors_until": "",
        "imported": False,
    }
    direct_values.update(asdict(engine.direct))
    return plugin_form, replace(plugin_form, **direct_values)


def choose_form(engine: EngineSpec, place: str, vendor: str) -> EngineSpec:
    """Return the first form of `engine` that supports the platform `place` and a CPU by `vendor`. If no form does,
    return the first one.
    """

    def supports(form: EngineSpec) -> bool:
        on_platform = not form.platforms or place in form.platforms
        return on_platform and (not form.cpu_vendors or vendor in form.cpu_vendors)

    return next(filter(supports, list_forms(engine)), list_forms(engine)[0])


def choose_installed_form(engine: EngineSpec) -> EngineSpec:
    """Return the form of `engine` to use on this machine. It is the form for this platform and CPU, or another
    installed form if that one cannot be used.
    """
    if engine.direct is None:
        return engine
    best = choose_form(engine, read_platform(), read_vendor())
    usable = [form for form in list_forms(engine) if _find_package_problem(form) is None]
    return best if best in usable or not usable else usable[0]


@lru_cache(maxsize=1)
def engines() -> Mapping[str, EngineSpec]:
    """Return the engines that travel with this code, by name."""
    return {name: read_engine(values) for name, values in read_table("engines/engines.json").items()}


def find_plugin(provider: str) -> Optional[EngineSpec]:
    """Return the plug-in engine whose execution provider is `provider`, or None if the provider is one of onnxruntime's
    own.
    """
    registered = (engine for engine in engines().values() if engine.module and not engine.by_name)
    return next((engine for engine in registered if engine.provider == provider), None)


def engine_of_file(name: str) -> Optional[EngineSpec]:
    """Return the engine whose own file format has the suffix of `name`. Return None for an ONNX file or an unknown
    suffix.
    """
    with_suffix = (engine for engine in engines().values() if engine.suffix)
    return next((engine for engine in with_suffix if name.endswith(engine.suffix)), None)


def read_file_signature(model: Path) -> Optional[Dict[str, Any]]:
    """Return the "inputs" and "outputs" that an engine's own file states: lists of entries with "name", "type" and
    "shape". The file may contain anything there, so check the values. Return None if `model` is an ONNX file.

    Raises:
        BundleError: the file is damaged.
    """
    engine = engine_of_file(model.name)
    if engine is None:
        return None
    signature = import_module(f"{__package__}.{engine.adapter}").read_signature(read_file(model), str(model))
    return {key: signature.get(key, []) for key in ("inputs", "outputs")}


def read_platform() -> str:
    """Return this machine's platform, as in `EngineSpec`: "linux x86_64", "windows arm64", "darwin arm64" ..."""
    return f"{platform.system().lower()} {normalise_architecture(platform.machine())}"


def read_installed_versions(packages: Iterable[str]) -> Dict[str, str]:
    """Return the version of each installed package. The versions come from the packages' metadata, so nothing is
    imported.
    """
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def read_installed_version(engine: EngineSpec) -> str:
    """Return the version of the package that contains `engine`, or "" if it is not installed."""
    form = choose_installed_form(engine)
    if form.foreign:
        return str(_import_adapter(form).package_version(form))
    return next(iter(read_installed_versions(form.packages).values()), "")


def _import_adapter(engine: EngineSpec) -> Any:
    return import_module(f"{__package__}.{engine.adapter}")


def describe_package(engine: EngineSpec) -> str:
    """Return the name and version of the package that contains `engine`."""
    return f"{choose_installed_form(engine).packages[0]} {read_installed_version(engine)}"


def build_install_command(engine: EngineSpec) -> str:
    """Return the command that installs or updates `engine`."""
    engine = choose_installed_form(engine)
    if engine.install:
        return engine.install
    minimum = f">={engine.oldest}" if engine.oldest else ""
    return f"python -m pip install --upgrade '{engine.packages[0]}{minimum}'" if engine.packages else ""


def find_library(engine: EngineSpec, runtime: str) -> Path:
    """Return the path of the plug-in's library in its package. The package is not imported.

    Args:
        runtime: version of onnxruntime.

    Raises:
        RuntimeUnavailableError: the library cannot be used. The message gives the reason and a command that helps.
    """
    engine = choose_installed_form(engine)
    error = _find_package_problem(engine)
    if error is not None:
        raise error
    if parse_version(runtime) < parse_version(engine.min_onnxruntime):
        problem = f"{engine.name} needs onnxruntime {engine.min_onnxruntime}, but {runtime} is installed"
        raise RuntimeUnavailableError(problem, "Install a newer onnxruntime")
    if engine.foreign:
        folders = [Path(_import_adapter(engine).package_folder(engine))]
    else:
        # This imports nothing: a package may be broken, or slow to import.
        spec = PathFinder.find_spec(engine.module)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    libraries = [folder / name for folder in folders for name in engine.libraries if (folder / name).is_file()]
    if not libraries:
        problem = f"{describe_package(engine)} does not contain any of {', '.join(engine.libraries)}"
        raise RuntimeUnavailableError(problem, f"Install it: {build_install_command(engine)}")
    return libraries[0]


def _find_package_problem(engine: EngineSpec) -> Optional[RuntimeUnavailableError]:
    """Return why this form of the engine cannot be used here, or None if no problem is known."""
    alternative = "Choose another engine"
    # The platform comes first: where there is no package, no installation helps.
    if engine.platforms and read_platform() not in engine.platforms:
        return RuntimeUnavailableError(f"there is no {engine.name} for {read_platform()}", alternative)
    fix = f"Install it: {build_install_command(engine)}"
    version = read_installed_version(engine)
    problem = _import_adapter(engine).package_problem(engine) if engine.foreign else ""
    if problem:
        return RuntimeUnavailableError(problem, fix)
    if not version:
        return RuntimeUnavailableError(f"{engine.name} needs the package {engine.packages[0]}, not installed here", fix)
    if parse_version(version) < parse_version(engine.oldest):
        problem = f"{engine.packages[0]} {version} is older than {engine.oldest}, the oldest that is known to be right"
        return RuntimeUnavailableError(problem, fix)
    problem = describe_vendor_problem(engine, version, read_vendor() if engine.cpu_vendors else "")
    return RuntimeUnavailableError(problem, alternative) if problem else None


def describe_vendor_problem(engine: EngineSpec, version: str, vendor: str) -> str:
    """Return why `version` of a plug-in does not support CPUs by `vendor`. Return "" if it supports them, or if nothing
    is known.
    """
    # Nothing is known of newer versions, so they are tried.
    unknown = not vendor or parse_version(version) > parse_version(engine.cpu_vendors_until)
    if not engine.cpu_vendors or vendor in engine.cpu_vendors or unknown:
        return ""
    return f"{engine.packages[0]} {version} takes only CPUs by {' or '.join(engine.cpu_vendors)}; this one is {vendor}"


def describe_problem(engine: EngineSpec, runtime: str) -> str:
    """Return why a plug-in cannot be used here, and what to do about it, or "" if no problem is known. The answer comes
    from the metadata of the plug-in's package.
    """
    if engine.simulated:
        return f"{engine.name} on {read_platform()} is a simulator, and devices do not run models in simulators"
    try:
        find_library(engine, runtime)
    except RuntimeUnavailableError as error:
        return str(error)
    return ""


def engine_options(engine: EngineSpec, precision: str = FLOAT, threads: int = 0) -> Dict[str, str]:
    """Return the provider options that open `engine`.

    Raises:
        UsageError: the engine does not have that precision.
    """
    if precision not in engine.precisions:
        names = ", ".join(engine.precisions)
        raise UsageError(f"{engine.name} has no precision {precision!r}", f"Choose from {names}")
    filled = {_PRECISION: engine.precisions[precision].value, _THREADS: str(threads) if threads else None}

    def fill(value: Any) -> Any:
        """Return the value with its placeholders replaced. Entries whose replacement is None are left out."""
        if isinstance(value, Mapping):
            entries = {key: fill(item) for key, item in sorted(value.items())}
            return {key: item for key, item in entries.items() if item is not None}
        return filled.get(value, value)

    values = fill(engine.options)
    return {k: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for k, v in values.items()}


def open_engine(
    ort: Any, engine: EngineSpec, model: Any, options: Any, *, precision: str = FLOAT, threads: int = 0
) -> Any:
    """Return an `onnxruntime.InferenceSession` of `model` in `engine`. Operators that the engine does not support run
    on the CPU.

    Args:
        ort: the onnxruntime module.
        model: a path or serialized bytes. An adapter accepts only a path.
        options: an `onnxruntime.SessionOptions` that the caller does not use again.
        precision: a key of `engine.precisions`.
        threads: number of threads inside an operator; 0 leaves it to the engine.

    Raises:
        RuntimeUnavailableError: the engine is not installed, is too old, or does not start. ONNX Runtime itself would
            continue on the CPU.
        UsageError: the engine does not have that precision.
        Exception: any error that onnxruntime raises for the model.
    """
    if not engine.module or engine.by_name:
        engine_settings = engine_options(engine, precision, threads)

        def open_with(providers: List[Any]) -> Any:
            return ort.InferenceSession(model, options, providers=providers)

        if not engine.module:
            return open_with([(engine.provider, engine_settings)])
        # imported here, because `cuda` imports numpy, and nothing may load numpy before a bundle is checked
        from edgeq_device.engines.cuda import open_cuda

        find_library(engine, str(ort.__version__))
        return open_cuda(ort, engine_settings, open_with)
    form = choose_installed_form(engine)
    if form.adapter:
        find_library(form, str(ort.__version__))
        return _import_adapter(form).open_model(ort, form, model, options, engine_options(form, precision, threads))
    add_engine(ort, engine, options, precision=precision, threads=threads)
    session = ort.InferenceSession(model, options)
    # onnxruntime falls back to the CPU without an error.
    if engine.provider not in session.get_providers():
        raise RuntimeUnavailableError(f"onnxruntime {ort.__version__} does not start {engine.provider} here")
    return session


def add_engine(ort: Any, engine: EngineSpec, options: Any, *, precision: str = FLOAT, threads: int = 0) -> None:
    """Add a plug-in to `onnxruntime.SessionOptions`. Arguments and errors are those of `open_engine`."""
    options.add_provider_for_devices(_find_devices(ort, engine)[:1], engine_options(engine, precision, threads))


def _find_devices(ort: Any, engine: EngineSpec) -> List[Any]:
    """Return the devices of `engine`. The first call registers its library.

    Raises:
        RuntimeUnavailableError: the library cannot be registered, or this machine has no such device.
    """
    engine = choose_installed_form(engine)
    library = find_library(engine, str(ort.__version__))
    if engine.adapter:
        raise RuntimeUnavailableError(f"{engine.packages[0]} is not a plug-in of onnxruntime", "Choose another engine")
    # onnxruntime refuses to register a library twice.
    if not any(device.ep_name == engine.provider for device in ort.get_ep_devices()):
        try:
            if engine.imported:
                import_module(engine.module)
            ort.register_execution_provider_library(engine.provider, str(library))
        except Exception as error:  # onnxruntime's exceptions have no common base, and a package may raise any
            text = " ".join(str(error).split())
            problem = f"onnxruntime {ort.__version__} cannot load {library}: {text}"
            raise RuntimeUnavailableError(problem, f"Update it: {build_install_command(engine)}") from error
    all_devices = [device for device in ort.get_ep_devices() if device.ep_name == engine.provider]
    devices = [device for kind in engine.devices for device in all_devices if device.device.type.name == kind]
    devices = devices or (
        all_devices if engine.simulated else []
    )  # a simulator is listed under the hardware that it runs on
    if not devices:
        kinds = " or ".join(engine.devices)
        raise RuntimeUnavailableError(f"{engine.name} finds no {kinds} that it can use here", engine.driver)
    return devices


@dataclass(frozen=True)
class WrongKernels:
    """Describe one fault in a range of onnxruntime's releases.

    Attributes:
        provider: execution provider whose kernels have the fault.
        since: first release with the fault; "" if unknown.
        before: first later release without the fault; "" if there is none.
        architecture: architecture of the CPU.
        features: CPU features that must all be present for the fault to occur.
        without: CPU features that must all be absent.
        products: kinds of integer products that are computed wrongly.
        what: description of the fault, a clause.
        fix: what to do about it, a sentence without a full stop.
        state: the machine on which the fault was reproduced, or a remark that it is only reported.
        source: issue thread that reports the fault.
        weight_limit: largest magnitude of weights with which results are correct; 0 if smaller weights do not help.
    """

    provider: str
    since: str
    before: str
    architecture: str
    features: Tuple[str, ...]
    without: Tuple[str, ...]
    products: Tuple[str, ...]
    what: str
    fix: str
    state: str
    source: str
    weight_limit: int = 0

    def on(self, architecture: str, features: Collection[str]) -> bool:
        """Return whether a CPU with this architecture and these features has the fault."""
        has = frozenset(features)
        return self.architecture == architecture and has.issuperset(self.features) and has.isdisjoint(self.without)

    def in_release(self, version: str) -> bool:
        """Return whether a release such as "1.24.1" has the fault."""
        release = parse_version(version)
        return parse_version(self.since) <= release and not (self.before and release >= parse_version(self.before))

    def explain(self, version: str, products: Collection[str] = ()) -> str:
        """Return one line that describes the fault, its source, and what to do."""
        named = ", ".join(p for p in self.products if p in products) or ", ".join(self.products)
        return (
            f"onnxruntime {version} computes {named} wrongly on this hardware ({self.what}; {self.source}): {self.fix}"
        )


@lru_cache(maxsize=1)
def load_wrong_kernels() -> Tuple[WrongKernels, ...]:
    """Read known_wrong.json, which is next to this file. It is part of the code, never of a bundle."""
    lists = ("features", "without", "products")
    return tuple(
        WrongKernels(**{**row, **{key: tuple(row[key]) for key in lists}})
        for row in read_table("engines/known_wrong.json")
    )


CPU = "CPUExecutionProvider"
