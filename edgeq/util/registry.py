"""Find the extensions that ship with edgeq or that plug-ins add.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from edgeq.errors import DataError, EdgeqError, HardwareError, UsageError, suggest

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
        listed: edgeq's own extensions as name → "module:attribute", if they are not the modules of one package.
        error: class of the error for an unknown name.
        also: other things that users can give instead of a name, for messages.
        replaced: names of extensions that edgeq no longer has → names of their replacements.
    """

    title: str
    name: str
    package: str = ""
    attribute: str = ""
    listed: Mapping[str, str] = field(default_factory=dict, hash=False)
    error: type[EdgeqError] = UsageError
    also: str = ""
    replaced: Mapping[str, str] = field(default_factory=dict, hash=False)

    def names(self) -> tuple[str, ...]:
        """Return every registered name. edgeq's own names come first, then the plug-ins' names, both in alphabetical
        order.
        """
        # A name that is registered twice is listed once here, and `place` reports the conflict when the name is used.
        return tuple(dict.fromkeys((*self.builtin(), *sorted(point.name for point in self.plugins()))))

    def builtin(self) -> Mapping[str, str]:
        """Return where edgeq's own extensions are defined, as name → "module:attribute"."""
        return self.listed or _list_modules(self.package, self.attribute)

    def plugins(self) -> tuple[EntryPoint, ...]:
        """Return the entry points of installed distributions. An entry point that is on the search path twice counts
        once.
        """
        # The search path is part of the cache's key, because tests and notebooks change it.
        return _find_entry_points(self.name, tuple(sys.path))

    def place(self, name: str) -> tuple[str, str]:
        """Return where `name` is defined, as ("module:attribute", distribution). For edgeq's own extensions, the
        distribution is "".

        Raises:
            EdgeqError: no extension has that name. The exception is an instance of `error`.
            UsageError: two extensions have that name.
        """
        builtin = self.builtin().get(name)
        places = [(builtin, "")] if builtin else []
        places += [(point.value, distribution(point)) for point in self.plugins() if point.name == name]
        if not places:
            fix = f"Use {self.replaced[name]}" if name in self.replaced else suggest(name, self.names())
            # A suggestion of the nearest name is clearer without further alternatives.
            also = f", or {self.also}" if self.also and fix.startswith("Known") else ""
            raise self.error(f"unknown {self.title} {name!r}", fix + also)
        if len(places) > 1:
            owners = [owner or "edgeq" for _, owner in places]
            raise UsageError(
                f"the {self.title} {name!r} is registered by {' and by '.join(owners)}",
                f"Rename it in the entry points of {owners[-1].split()[0]}, or uninstall that",
            )
        return places[0]

    def check(self, name: str) -> None:
        """If nothing is registered as `name`, raise an instance of `error` that suggests the nearest name."""
        if name not in self.names():
            self.place(name)


# A module for each method: a new file is all that a new method of edgeq's own needs.
METHODS = ExtensionGroup("calibration method", "edgeq.calibration_methods", "edgeq.calibration.methods", "METHOD")
DECODERS = ExtensionGroup(
    "decoder",
    "edgeq.decoders",
    # The families whose task is to detect objects. Their modules are not imported here, so the names are listed.
    listed={
        name: f"edgeq_device.answers.families.{name.replace('-', '_')}:FAMILY"
        for name in (
            "centernet",
            "detections",
            "detr",
            "efficientdet",
            "mmdetection",
            "nanodet",
            "paddle-detection",
            "pairs",
            "ppyoloe",
            "rf-detr",
            "rtdetr",
            "rtdetr-official",
            "ssd",
            "ssd-raw",
            "tf-detection",
            "torchvision",
            "yolo-nas",
            "yolov3",
            "yolov3-nms",
            "yolov5",
            "yolov5-raw",
            "yolov7-end2end",
            "yolov8",
            "yolov8-raw",
            "yolox",
        )
    },
    also="path.py:function",
)
READERS = ExtensionGroup("reader of facts about models", "edgeq.readers", "edgeq.describe.readers", "READER")
TASKS = ExtensionGroup("task", "edgeq.tasks", "edgeq.measure.tasks", "TASK", also="path.py:factory")
STEPS = ExtensionGroup(
    "preprocessing step",
    "edgeq.preprocess_steps",
    listed={
        "add": "edgeq.data.steps.arithmetic:Add",
        "center": "edgeq.data.steps.arithmetic:Center",
        "channels": "edgeq.data.steps.image:Channels",
        "crop": "edgeq.data.steps.image:Crop",
        "divide": "edgeq.data.steps.arithmetic:Divide",
        "dtype": "edgeq.data.steps.arithmetic:Dtype",
        "expand": "edgeq.data.steps.shape:Expand",
        "layout": "edgeq.data.steps.layout:Layout",
        "letterbox": "edgeq.data.steps.image:Letterbox",
        "multiply": "edgeq.data.steps.arithmetic:Multiply",
        "pad": "edgeq.data.steps.pad:Pad",
        "reshape": "edgeq.data.steps.shape:Reshape",
        "resize": "edgeq.data.steps.image:Resize",
        "subtract": "edgeq.data.steps.arithmetic:Subtract",
        "window": "edgeq.data.steps.window:Window",
    },
    error=DataError,
)
RECOVERIES = ExtensionGroup(
    "recovery",
    "edgeq.recoveries",
    "edgeq.tuning.recover.methods",
    "RECOVERY",
    replaced={"bias-correction": "sequential-correction"},
)
BACKENDS = ExtensionGroup(
    "backend",
    "edgeq.backends",
    listed={
        "cpu": "edgeq.backends.cpu:CpuBackend",
        "espdl": "edgeq.backends.espdl.backend:EspdlBackend",
        "litert": "edgeq.backends.litert.backend:LitertBackend",
        "neural-art": "edgeq.backends.neural_art.backend:NeuralArtBackend",
        "ncnn": "edgeq.backends.ncnn.backend:NcnnBackend",
        "qnn": "edgeq.backends.qnn.backend:QnnBackend",
        "rknn": "edgeq.backends.rknn.backend:RknnBackend",
        "systolic": "edgeq.backends.systolic.compile:SystolicBackend",
        "tensorrt": "edgeq.backends.tensorrt:TensorrtBackend",
        "web": "edgeq.backends.web.backend:WebBackend",
    },
    error=HardwareError,
)
BACKEND_TABLES: Mapping[str, str] = {"systolic": "edgeq.backends.systolic.array:ArrayTable"}
"""The tables of a target's file that only one backend reads, as name → "module:record type". The backend defines the
keys of its table, so the schema of targets needs no change for a new one.
"""
RENDERERS = ExtensionGroup("renderer", "edgeq.renderers", listed={"html": "edgeq.reporting.page:draw"})
# Tuning times models on another machine through a clock. It knows none by name, because it is to work without any.
CLOCKS = ExtensionGroup("clock", "edgeq.clocks", listed={"boards": "edgeq.remote.clock:BoardClock"})
# The groups that `edgeq extensions` lists. Only edgeq's own renderers are in theirs.
GROUPS = (METHODS, DECODERS, TASKS, READERS, STEPS, RECOVERIES, BACKENDS)


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
            extension = importlib.import_module(module)
            for part in filter(None, attribute.split(".")):
                extension = getattr(extension, part)
            extension = self._make(extension)
        except Exception as error:
            # A failure in edgeq's own code is a fault of edgeq, so its traceback is kept.
            if not owner:
                raise
            raise self._broken_error(
                name, place, owner, f"fails: {' '.join(f'{type(error).__name__}: {error}'.split())}"
            ) from error
        if not self._accepts(extension):
            article = "an" if self._expected[0] in "aeiou" else "a"
            raise self._broken_error(name, place, owner, f"is not {article} {self._expected}")
        # Records would name an extension that nobody can select.
        if getattr(extension, "name", name) != name:
            raise self._broken_error(name, place, owner, f"calls itself {extension.name!r}")
        return cast(T, extension)

    def _broken_error(self, name: str, place: str, owner: str, problem: str) -> UsageError:
        return UsageError(
            f"the {self.group.title} {name!r} of {owner or 'edgeq'} ({place}) {problem}",
            "Correct that package, or uninstall it",
        )


def find_plugin(error: BaseException) -> str:
    """Return the name and version of the last plug-in that an exception's traceback passes through, or "" if there is
    none.
    """
    points = (point for group in GROUPS for point in group.plugins())
    owners = {re.split("[.:]", point.value)[0]: distribution(point) for point in points}
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    plugins = [owners[package] for module in modules if (package := module.partition(".")[0]) in owners]
    # The last one in the traceback is closest to the failure.
    return plugins[-1] if plugins else ""


def find_data_folders(name: str) -> tuple[Path, ...]:
    """Return the folders called `name` ("targets", "profiles", "targets/backends") in the packages that plug-ins
    register under `edgeq.data`.

    Raises:
        UsageError: an entry point names a package that cannot be found.
    """
    folders = []
    # Later folders override earlier ones, so the order must not depend on the installation.
    for point in sorted(_find_entry_points(DATA_GROUP, tuple(sys.path)), key=lambda p: (p.name, p.value)):
        try:
            spec = importlib.util.find_spec(point.value)
        except ImportError as error:
            raise _no_package_error(point) from error
        if spec is None or not spec.submodule_search_locations:
            raise _no_package_error(point)
        folders += [Path(place) / name for place in spec.submodule_search_locations]
    return tuple(folder for folder in folders if folder.is_dir())


def distribution(point: EntryPoint) -> str:
    """Return the name and version of the distribution to which an entry point belongs."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _no_package_error(point: EntryPoint) -> UsageError:
    return UsageError(
        f"the data folder {point.value!r} of {distribution(point)} is not a package that can be found",
        "Correct that package, or uninstall it",
    )


@lru_cache
def _list_modules(package: str, attribute: str) -> Mapping[str, str]:
    folder = Path(__file__).resolve().parent.parent.joinpath(*package.split(".")[1:])
    # Names are listed without importing a module, because some of them load slow libraries.
    public = sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.name.startswith("_"))
    return {stem.replace("_", "-"): f"{package}.{stem}:{attribute}" for stem in public}


@lru_cache
def _find_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of one group. `path` is the search path and serves only as a cache key."""
    del path
    points = {(point.name, point.value, distribution(point)): point for point in entry_points(group=group)}
    return tuple(points.values())
