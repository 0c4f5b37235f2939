"""Find the files and extensions that ship with edgeq or that plug-ins add.

In a wheel, the shipped folders (`profiles/`, `targets/`) are inside the package. In a checkout or an editable install,
they are at the top of the repository.

Plug-ins can add calibration methods, tasks, decoders, steps, recoveries and backends. An `ExtensionGroup` knows the
names of one kind of extension without importing anything. edgeq's own extensions are the modules of one package: the
module `moving_average.py` is the extension "moving-average". Extensions of plug-ins are entry points of the group. A
`Registry` imports the object for a name when it is first needed, and checks it. Data files of plug-ins (targets,
profiles, int8 rules) are found through the entry points of the group `edgeq.data`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar, cast

import platformdirs
from edgeq_device.errors import DeviceError

from edgeq import errors
from edgeq.arguments import with_marks
from edgeq.errors import DataError, EdgeqError, HardwareError, UsageError, suggest

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """Return the path of the shipped folder `name` ("profiles" or "targets")."""
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def user_folder(kind: Literal["config", "cache", "state"]) -> Path | None:
    """Return edgeq's folder for the user's files of this kind, or None if the user has no home folder.

    That happens in containers, where HOME, the XDG variables and the user's entry in the list of users may all be
    missing.
    """
    try:
        found = Path(getattr(platformdirs, f"user_{kind}_path")("edgeq"))
    except (RuntimeError, KeyError):  # the error's type depends on the version of platformdirs or of Python
        return None
    return found if found.is_absolute() else None


# onnx_ir needs sympy for arithmetic with symbolic sizes. sympy takes half of the time of onnx_ir's import.
MODULES = frozenset({"sympy", "onnx_ir._symbolic_shapes"})


class _Deferring:
    """Find the same modules as Python's own finder, but delay the loading of modules in `MODULES` until their first
    use.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `MODULES`; see `importlib.abc.MetaPathFinder.find_spec`."""
        found = PathFinder.find_spec(fullname, path, target) if fullname in MODULES else None
        if found is not None and found.loader is not None:
            found.loader = LazyLoader(found.loader)
        return found


def defer_imports() -> None:
    """Delay the loading of `MODULES` until their first use. Only programs call this, because a library must not change
    its user's imports.
    """
    sys.meta_path.insert(0, _Deferring())


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise errors of edgeq_device as the edgeq errors of the same name, with marks for the options that they name."""
    try:
        yield
    except DeviceError as error:
        kind: type[EdgeqError] = getattr(errors, type(error).__name__, EdgeqError)
        raise kind(with_marks(error.problem), with_marks(error.fix)) from error


T = TypeVar("T")

DATA_GROUP = "edgeq.data"
"""Group of entry points that name packages with TOML files in `targets/`, `profiles/` or `targets/backends/`."""


@dataclass(frozen=True)
class ExtensionGroup:
    """Describe one kind of extension.

    Attributes:
        title: name of one extension in messages, such as "calibration method".
        name: name of the group of entry points.
        package: the package whose public modules are edgeq's own extensions. Each module has its object under
            `attribute`.
        attribute: name of the object in such a module.
        own: edgeq's own extensions as name → "module:attribute", if they are not the modules of one package.
        error: class of the error for an unknown name.
        also: other things that users can give instead of a name, for messages.
    """

    title: str
    name: str
    package: str = ""
    attribute: str = ""
    own: Mapping[str, str] = field(default_factory=dict, hash=False)
    error: type[EdgeqError] = UsageError
    also: str = ""

    def names(self) -> tuple[str, ...]:
        """Return every registered name. edgeq's own names come first, then the plug-ins' names, both in alphabetical
        order.
        """
        return tuple(dict.fromkeys((*self.builtin(), *sorted(point.name for point in self.plugins()))))

    def builtin(self) -> Mapping[str, str]:
        """Return where edgeq's own extensions are defined, as name → "module:attribute"."""
        return self.own or _modules(self.package, self.attribute)

    def plugins(self) -> tuple[EntryPoint, ...]:
        """Return the entry points of installed distributions. An entry point that is on the search path twice counts
        once.
        """
        return _entry_points(self.name, tuple(sys.path))

    def place(self, name: str) -> tuple[str, str]:
        """Return where `name` is defined, as ("module:attribute", distribution). For edgeq's own extensions, the
        distribution is "".

        Raises:
            EdgeqError: no extension has that name. The exception is an instance of `error`.
            UsageError: two extensions have that name.
        """
        builtin = self.builtin().get(name)
        found = [(builtin, "")] if builtin else []
        found += [(point.value, distribution(point)) for point in self.plugins() if point.name == name]
        if not found:
            fix = suggest(name, self.names())
            also = f", or {self.also}" if self.also and fix.startswith("Known") else ""
            raise self.error(f"unknown {self.title} {name!r}", fix + also)
        if len(found) > 1:
            owners = [owner or "edgeq" for _, owner in found]
            raise UsageError(
                f"the {self.title} {name!r} is registered by {' and by '.join(owners)}",
                f"Rename it in the entry points of {owners[-1].split()[0]}, or uninstall that",
            )
        return found[0]

    def check(self, name: str) -> None:
        """If nothing is registered as `name`, raise an instance of `error` that suggests the nearest name."""
        if name not in self.names():
            self.place(name)


METHODS = ExtensionGroup("calibration method", "edgeq.calibration_methods", "edgeq.calibration.methods", "METHOD")
DECODERS = ExtensionGroup(
    "decoder",
    "edgeq.decoders",
    own={
        "detections": "edgeq.measure.decoders:DETECTIONS",
        "nanodet": "edgeq.measure.decoders:NANODET",
        "ssd": "edgeq.measure.decoders:SSD",
        "yolov3": "edgeq.measure.decoders:YOLOV3",
        "yolov3-nms": "edgeq.measure.decoders:YOLOV3_NMS",
        "yolov5": "edgeq.measure.decoders:YOLOV5",
        "yolov8": "edgeq.measure.decoders:YOLOV8",
        "yolox": "edgeq.measure.decoders:YOLOX",
    },
    also="path.py:function",
)
TASKS = ExtensionGroup(
    "task",
    "edgeq.tasks",
    own={
        "anomaly": "edgeq.measure.tasks:ANOMALY",
        "classification": "edgeq.measure.tasks:CLASSIFICATION",
        "detection": "edgeq.measure.tasks:DETECTION",
        "similarity": "edgeq.measure.tasks:SIMILARITY",
    },
    also="path.py:factory",
)
STEPS = ExtensionGroup(
    "preprocessing step",
    "edgeq.preprocess_steps",
    own={
        "add": "edgeq.data.steps.arithmetic:Add",
        "center": "edgeq.data.steps.arithmetic:Center",
        "channels": "edgeq.data.steps.image:Channels",
        "crop": "edgeq.data.steps.image:Crop",
        "divide": "edgeq.data.steps.arithmetic:Divide",
        "dtype": "edgeq.data.steps.arithmetic:Dtype",
        "expand": "edgeq.data.steps.shape:Expand",
        "layout": "edgeq.data.steps.shape:Layout",
        "letterbox": "edgeq.data.steps.image:Letterbox",
        "multiply": "edgeq.data.steps.arithmetic:Multiply",
        "reshape": "edgeq.data.steps.shape:Reshape",
        "resize": "edgeq.data.steps.image:Resize",
        "subtract": "edgeq.data.steps.arithmetic:Subtract",
        "window": "edgeq.data.steps.shape:Window",
    },
    error=DataError,
)
RECOVERIES = ExtensionGroup("recovery", "edgeq.recoveries", "edgeq.tuning.recover.methods", "RECOVERY")
BACKENDS = ExtensionGroup(
    "backend",
    "edgeq.backends",
    own={
        "cpu": "edgeq.backends.cpu:CpuBackend",
        "litert": "edgeq.backends.litert.backend:LitertBackend",
        "qnn": "edgeq.backends.qnn.backend:QnnBackend",
        "rknn": "edgeq.backends.rknn.backend:RknnBackend",
        "systolic": "edgeq.backends.systolic.compile:SystolicBackend",
        "tensorrt": "edgeq.backends.tensorrt:TensorrtBackend",
        "web": "edgeq.backends.web.backend:WebBackend",
    },
    error=HardwareError,
)
RENDERERS = ExtensionGroup("renderer", "edgeq.renderers", own={"html": "edgeq.reporting.page:draw"})
GROUPS = (METHODS, DECODERS, TASKS, STEPS, RECOVERIES, BACKENDS)


class Registry(Generic[T]):
    """Hold the objects of one group. Each object is imported when it is first needed.

    Args:
        accepts: function that returns whether an object is of the group's kind.
        expected: description of a valid object, for messages.
        make: function that turns the target of an entry point into the object.
    """

    def __init__(
        self,
        group: ExtensionGroup,
        accepts: Callable[[Any], bool],
        expected: str,
        make: Callable[[Any], Any] = lambda o: o,
    ) -> None:
        self.group = group
        self._accepts = accepts
        self._expected = expected
        self._make = make
        self._loaded: dict[tuple[str, str], T] = {}

    def names(self) -> tuple[str, ...]:
        """Return every registered name, without importing anything."""
        return self.group.names()

    def owner(self, name: str) -> str:
        """Return the name and version of the distribution that registers `name`, or "edgeq" for edgeq's own extensions.

        Raises:
            EdgeqError: see `load`.
        """
        return self.group.place(name)[1] or "edgeq"

    def load(self, name: str) -> T:
        """Return the object registered as `name`.

        Raises:
            EdgeqError: the name is unknown. The exception is an instance of `ExtensionGroup.error`.
            UsageError: the name is registered twice, its plug-in cannot be imported, or its object is not of the
                group's kind. The message names the distribution.
        """
        place, owner = self.group.place(name)
        if (name, place) not in self._loaded:
            self._loaded[name, place] = self._import(name, place, owner)
        return self._loaded[name, place]

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield every name with its object, in the order of `names`.

        Raises:
            UsageError: see `load`.
        """
        for name in self.names():
            yield name, self.load(name)

    def _import(self, name: str, place: str, owner: str) -> T:
        module, _, attribute = place.partition(":")
        try:
            found = importlib.import_module(module)
            for part in filter(None, attribute.split(".")):
                found = getattr(found, part)
            found = self._make(found)
        except Exception as error:
            if not owner:
                raise
            raise self._broken(
                name, place, owner, f"fails: {' '.join(f'{type(error).__name__}: {error}'.split())}"
            ) from error
        if not self._accepts(found):
            article = "an" if self._expected[0] in "aeiou" else "a"
            raise self._broken(name, place, owner, f"is not {article} {self._expected}")
        if getattr(found, "name", name) != name:
            raise self._broken(name, place, owner, f"calls itself {found.name!r}")
        return cast(T, found)

    def _broken(self, name: str, place: str, owner: str, problem: str) -> UsageError:
        return UsageError(
            f"the {self.group.title} {name!r} of {owner or 'edgeq'} ({place}) {problem}",
            "Correct that package, or uninstall it",
        )


def plugin_in(error: BaseException) -> str:
    """Return the name and version of the last plug-in that an exception's traceback passes through, or "" if there is
    none.
    """
    points = (point for group in GROUPS for point in group.plugins())
    owners = {re.split("[.:]", point.value)[0]: distribution(point) for point in points}
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [owners[package] for module in modules if (package := module.partition(".")[0]) in owners]
    return found[-1] if found else ""


def data_folders(name: str) -> tuple[Path, ...]:
    """Return the folders called `name` ("targets", "profiles", "targets/backends") in the packages that plug-ins
    register under `edgeq.data`.

    Raises:
        UsageError: an entry point names a package that cannot be found.
    """
    folders = []
    for point in sorted(_entry_points(DATA_GROUP, tuple(sys.path)), key=lambda p: (p.name, p.value)):
        try:
            spec = importlib.util.find_spec(point.value)
        except ImportError as error:
            raise _no_package(point) from error
        if spec is None or not spec.submodule_search_locations:
            raise _no_package(point)
        folders += [Path(place) / name for place in spec.submodule_search_locations]
    return tuple(folder for folder in folders if folder.is_dir())


def distribution(point: EntryPoint) -> str:
    """Return the name and version of the distribution to which an entry point belongs."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _no_package(point: EntryPoint) -> UsageError:
    return UsageError(
        f"the data folder {point.value!r} of {distribution(point)} is not a package that can be found",
        "Correct that package, or uninstall it",
    )


@lru_cache
def _modules(package: str, attribute: str) -> Mapping[str, str]:
    folder = Path(__file__).resolve().parent.parent.joinpath(*package.split(".")[1:])
    public = sorted(found.name for found in pkgutil.iter_modules([str(folder)]) if not found.name.startswith("_"))
    return {stem.replace("_", "-"): f"{package}.{stem}:{attribute}" for stem in public}


@lru_cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of one group. `path` is the search path and serves only as a cache key."""
    del path
    found = {(point.name, point.value, distribution(point)): point for point in entry_points(group=group)}
    return tuple(found.values())


_PREFIX = "edgeq_user_"


def names_function(name: str) -> bool:
    """Return whether `name` has the form "path.py:function"."""
    return ".py:" in name


def load_function(name: str, what: str, error: type[EdgeqError]) -> Callable[..., Any]:
    """Return the function that `name` ("path.py:function") refers to. This runs the file, which is the user's own code.

    Args:
        what: the purpose of the function, for messages.

    Raises:
        EdgeqError: the file does not exist, fails when it runs, or has no such function. The exception is an instance
            of `error`.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"{path} does not exist", f"Give the {what} as path.py:function")
    function = getattr(_run(path, error), attribute, None)
    if not callable(function):
        raise error(f"{path} has no function {attribute!r}", f"Name the function that makes the {what}")
    found: Callable[..., Any] = function
    return found


def describe(error: BaseException) -> tuple[str, str]:
    """Return two texts for an error in a user's code: one line with the error and, if known, its file and line; and a
    fix.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    place = place_in(error)
    fix = f"Correct {place.partition(':')[0]}" if place else "Correct the file"
    if isinstance(error, ModuleNotFoundError):
        fix = f"Install {error.name} for the Python that runs edgeq"
    return f"{place}: {text}" if place else text, fix


def place_in(error: BaseException) -> str:
    """Return the last place in a user's file that an exception's traceback names, as "file.py:line", or "" if there is
    none.
    """
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(_PREFIX)
    ]
    return places[-1] if places else ""


def _run(path: Path, error: type[EdgeqError]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{_PREFIX}{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    # While a dataclass is being defined, it looks up its module by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as raised:  # the user's file can raise any exception
        text, fix = describe(raised)
        raise error(f"{path} cannot be imported: {text}", fix) from raised
    return module
