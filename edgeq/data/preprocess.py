"""Turn a raw item into a model input. The preprocessing can be a name, a file, text, or a user's function.

A declarative preprocessing is a `Spec` of ordered steps and source options. It is read from TOML tables, dicts or one
line of text. A user's function is registered by name or named as `path/to/file.py:function`. It gets one raw item and
returns the model input or a dict of inputs.

Text:   "resize=short:256:bilinear,crop=224,divide=255,mean=[0.485,0.456,0.406],layout=NCHW"
TOML:   steps = [{op = "resize", size = 256, rule = "short"}, {op = "crop", size = 224}, ...]   (or the text)
        [source] key = "X", label = "Y", layout = "HWC"

Both forms give the same values. `edgeq.util.records.plain` writes these out in full, including defaults.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from edgeq_device.prepare.frame import Frame
from edgeq_device.system.files import read_file

from edgeq.data.axes import ItemState, assumed_axes
from edgeq.data.files import decode
from edgeq.data.images import Array, Picture, to_context
from edgeq.data.limits import check_size
from edgeq.data.source_options import SourceOptions
from edgeq.data.step import SEE_LIST, Step
from edgeq.data.steps import REGISTRY, build_step, is_step, parse_step
from edgeq.errors import DataError
from edgeq.signature import TensorSpec
from edgeq.util.record_files import is_toml, toml_table
from edgeq.util.records import plain
from edgeq.util.user_code import describe_error, load_function, names_function

# Other spellings of the preprocessing that changes nothing.
ALIASES = {"raw": "none", "None": "none"}


@cache
def _load_table() -> Mapping[str, dict[str, Any]]:
    return toml_table(Path(__file__).with_name("preprocessings.toml"), DataError, "Install edgeq again")


@cache
def shipped() -> Mapping[str, dict[str, Any]]:
    """Return the preprocessings that ship with edgeq by name, in the form that `parse_spec` reads."""
    about = ("legacy", "tasks", "answers")
    return {name: {key: v for key, v in spec.items() if key not in about} for name, spec in _load_table().items()}


def candidates(task: str | None = None) -> list[str]:
    """Return the names to try if the correct preprocessing is not known, most common first.

    These are the preprocessings that users registered and the shipped ones. Older names of shipped preprocessings are
    left out. With `task`, names that only other tasks use are left out, and names that only this task uses come first.
    """
    # A preprocessing without `tasks` is for any task, so it counts as one for the task that was asked for. One with
    # an empty list is for none: the family of a head names it.
    tasks_by_name = {name: spec.get("tasks", [task]) for name, spec in _load_table().items() if "legacy" not in spec}
    fitting = [name for name, tasks in tasks_by_name.items() if tasks and task in (None, *tasks)]
    return [*sorted(_REGISTERED), *sorted(fitting, key=lambda name: task is None or "tasks" not in _load_table()[name])]


def dedicated(task: str) -> list[str]:
    """Return the names of the shipped preprocessings that are only for heads whose families have this task."""
    return [name for name, spec in _load_table().items() if task in spec.get("answers", ())]


def parse_source(value: Mapping[str, Any]) -> SourceOptions:
    """Return the source options of a [source] table.

    Raises:
        DataError: a field is unknown, or its value is not valid.
    """
    names = {f.name for f in fields(SourceOptions)}
    for key in value:
        if key not in names:
            raise DataError(f"unknown field source.{key}", f"The fields are {', '.join(sorted(names))}")
    return SourceOptions(**value)


# A text of steps becomes part of messages and records. A longer one belongs in a file.
LONGEST_TEXT = 4096
"""Largest number of characters in a line of steps."""


@dataclass(frozen=True)
class Spec:
    """Describe a declarative preprocessing: a title, the steps in their order, and the source options."""

    steps: tuple[Step, ...]
    title: str = ""
    source: SourceOptions = field(default_factory=SourceOptions)

    def __record__(self) -> dict[str, Any]:
        """Return plain data from which `parse_spec` makes an equal value."""
        table: dict[str, Any] = {"steps": self.steps}
        if self.title:
            table["title"] = self.title
        if options := plain(self.source):
            table["source"] = options
        return table


def parse_spec(value: Mapping[str, Any], location: str) -> Spec:
    """Read a spec from plain data.

    Raises:
        DataError: the data is not a spec; the message names `location`, the step and the field.
    """
    try:
        unknown = sorted(set(value) - {"title", "steps", "source"})
        if unknown:
            raise DataError(f"unknown field {unknown[0]!r}", "The fields are title, steps and [source]")
        title, steps, source = value.get("title", ""), value.get("steps", []), value.get("source", {})
        if not isinstance(title, str) or not isinstance(source, Mapping):
            raise DataError("title must be a string and source a table", SEE_LIST)
        options = parse_source(source)
        if isinstance(steps, str):
            # The one-line form is also accepted inside TOML, because users copy it from a command line.
            text = parse_text(steps, location)
            if plain(text.source):
                raise DataError("source options are among the steps", "Put them in the [source] table")
            return Spec(text.steps, title, options)
        if not isinstance(steps, list | tuple):
            raise DataError("steps is neither a list nor text", SEE_LIST)
        return Spec(tuple(build_step(step) for step in steps), title, options)
    except DataError as error:
        raise DataError(f"{location}: {error.problem}", error.fix) from error


def parse_text(text: str, location: str = "⟨preprocess⟩") -> Spec:
    """Read a spec from "step=value,step=value". A value consists of parts joined by ":". Source options may appear
    between the steps.
    """
    if len(text) > LONGEST_TEXT:
        raise DataError(f"{location[:60]}… has {len(text)} characters, more than {LONGEST_TEXT}", "Give a .toml file")
    steps: list[Step] = []
    source: dict[str, Any] = {}
    # "layout" and "channels" are also names of steps, so as source options they need their prefix.
    names = {f.name for f in fields(SourceOptions)} - {"layout", "channels"}
    try:
        # A comma inside [0.1,0.2] does not end a step.
        for part in re.split(r",(?![^\[]*\])", text):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name.startswith("source."):
                source[name.removeprefix("source.")] = _parse_boolean(value)
            elif name in names:
                source[name] = _parse_boolean(value)
            else:
                steps.append(parse_step(name, value))
        return Spec(tuple(steps), "", parse_source(source))
    except DataError as error:
        raise DataError(f"{location}: {error.problem}", error.fix) from error


def _parse_boolean(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value, value)


UserFunction = Callable[[Any], "Array | Mapping[str, Array]"]
Reads = Literal["array", "path", "text"]


@dataclass(frozen=True)
class PreparedItem:
    """Hold the result of a preprocessing for one raw item.

    Attributes:
        array: the model input, or several model inputs keyed by name.
        context: the frame of an image (see `edgeq.data.images.to_context`). It is empty for other items.
    """

    array: Array | Mapping[str, Array]
    context: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preprocess:
    """Preprocess a raw item when called with it. `edgeq.util.records.plain` gives the form that bundles and digests
    store.

    Attributes:
        name: the value that was passed to `load_preprocess`.
        spec: the declarative form, or None for a user's function.
        function: the user's function, or None.
        reads: type of the function's argument: "array" (arrays, images as uint8 [H, W, 3] RGB), "path" or "text".
        identity: identification of the function across runs: its file and name, and the hash of its source file.
    """

    name: str
    source: SourceOptions
    title: str = ""
    spec: Spec | None = None
    function: UserFunction | None = None
    reads: Reads = "array"
    identity: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, raw: Any, spec: TensorSpec | None = None) -> PreparedItem:
        """Preprocess one raw item: a `Picture`, an array, the path of an image or, for functions only, text or any
        path.

        Args:
            raw: the item. If an array has more axes than `source.layout`, it is a batch of items.
            spec: the model input that the item feeds. A step's size or layout "model" is taken from this input.

        Raises:
            DataError: the item does not fit the steps, or the function failed.
        """
        if self.spec is None:
            return self._call_function(raw)
        if isinstance(raw, Path):
            raw = decode(raw, str(raw))
        if not isinstance(raw, Picture | np.ndarray):
            raise DataError(f"preprocessing {self.name} takes images and arrays", "Use a function of your own for text")
        if isinstance(raw, np.ndarray) and raw.dtype.kind not in "biuf":
            raise DataError(f"preprocessing {self.name} takes numbers, not {raw.dtype}", "Use a function of your own")
        items, batched = self._split_items(raw, spec)
        states: list[ItemState] = []
        for item in items:
            states.append(self._run(item, spec))
            # After each item, the size of the whole batch is known well enough to stop before memory runs out.
            check_size(len(items) * states[-1].array.nbytes, f"{len(items)} items", "Store fewer in one array")
        # A batch has no single frame, so only one image can map its boxes back.
        frame = states[0].frame if len(states) == 1 else None
        context = to_context(frame) if frame is not None else {}
        # An array that was stored as a batch keeps its batch axis, even with one item.
        if len(states) == 1 and not (batched and "N" not in states[0].axes):
            return PreparedItem(np.asarray(states[0].array, order="C"), context)
        rows = [state.array if "N" in state.axes else state.array[None] for state in states]
        if len({row.shape[1:] for row in rows}) > 1:
            raise DataError("the items of one array get different shapes", "Store one item per file")
        return PreparedItem(np.concatenate(rows), context)

    @property
    def one_row(self) -> bool:
        """Return whether one raw item always becomes one row of the batch."""
        return self.spec is not None and all(step.one_row for step in self.spec.steps)

    def __record__(self) -> dict[str, Any]:
        """Return plain data. `load_preprocess` reads a declarative preprocessing back from it. For a function, the data
        contain only its name.
        """
        if self.spec is not None:
            return {"name": self.name, **plain(self.spec)}
        return {"name": self.name, "function": self.identity, "source": self.source}

    def arithmetic(self) -> tuple[str, ...]:
        """Return the exact arithmetic, one line per step."""
        if self.spec is None:
            return (f"the function {self.identity.get('function', '?')}",)
        return tuple(step.describe() for step in self.spec.steps)

    def _call_function(self, raw: Any) -> PreparedItem:
        assert self.function is not None
        try:
            value = raw.pixels if isinstance(raw, Picture) else raw
            # Pass a copy, because functions may change their arguments. Decoded pixels are read-only, and a user's own
            # arrays are read again later.
            result = self.function(value.copy() if isinstance(value, np.ndarray) else value)
        except Exception as error:  # reports any error in a user's code as one line about that code
            text, fix = describe_error(error)
            raise DataError(f"preprocessing {self.name} failed: {text}", fix) from error
        # A function may feed several inputs, so the keys are names of inputs.
        if isinstance(result, Mapping):
            return PreparedItem({name: np.asarray(value) for name, value in result.items()})
        return PreparedItem(np.asarray(result))

    def _split_items(self, raw: Picture | Array, spec: TensorSpec | None) -> tuple[list[ItemState], bool]:
        if isinstance(raw, Picture):
            height, width = raw.pixels.shape[:2]
            return [ItemState(raw.pixels, "HWC", "RGB", Frame.of(width, height))], False
        axes = self.source.layout
        if axes is None:
            axes = assumed_axes(raw.shape, spec).removeprefix("N")
        # Without known axes, every axis belongs to the item.
        if not axes or raw.ndim == len(axes):
            return [self._start_state(raw, axes)], False
        if raw.ndim < len(axes):
            raise DataError(f"shape {list(raw.shape)} has fewer axes than the layout {axes}", "Correct source.layout")
        flat = raw.reshape((-1, *raw.shape[raw.ndim - len(axes) :]))
        if len(flat) == 0:
            raise DataError(f"shape {list(raw.shape)} holds no items", "Leave the file out")
        return [self._start_state(item, axes) for item in flat], True

    def _start_state(self, array: Array, axes: str) -> ItemState:
        # Only three channels have an order of colours. One channel is grey, and four have an alpha or something
        # unknown.
        colour = "C" in axes and array.shape[axes.index("C")] == 3
        frame = None
        if "H" in axes and "W" in axes:
            frame = Frame.of(array.shape[axes.index("W")], array.shape[axes.index("H")])
        return ItemState(array, axes, self.source.channels if colour else "", frame)

    def _run(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        assert self.spec is not None
        for step in self.spec.steps:
            state = step.apply(state, spec)
        return state


_REGISTERED: dict[str, Preprocess] = {}
"""Functions that users registered. This is the only mutable state of the module. It is needed because user code calls
`register` when it is imported.
"""


def register(
    name: str, *, title: str = "", reads: Reads = "array", source: Mapping[str, Any] | None = None
) -> Callable[[UserFunction], UserFunction]:
    """Decorate a function to make it available as the preprocessing `name`.

    The function gets one raw item and returns one array (with or without the batch axis) or a dict of input arrays.

    Args:
        name: the name for `preprocess`. Names of shipped preprocessings are refused.
        title: one line that `edgeq preprocess list` shows.
        reads: type of the function's argument: "array" for arrays and images (uint8 [H, W, 3], red first), "path" for
            the `pathlib.Path` of each file, "text" for a line (str) of a text file or a row (list of str) of a .csv
            file.
        source: source options, as in the [source] table.

    Raises:
        DataError: the name is missing or belongs to a shipped preprocessing, or an option is unknown.
    """
    if not isinstance(name, str):
        raise DataError("a preprocessing is registered without a name", "Write @register_preprocess(NAME)")
    if name in shipped() or name in ALIASES or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise DataError(f"a preprocessing cannot be registered as {name!r}", "Choose another name (letters, digits, _)")
    if reads not in ("array", "path", "text"):
        raise DataError(f"preprocessing {name}: reads is {reads!r}", "Use 'array', 'path' or 'text'")
    options = parse_source(source or {})

    def decorate(function: UserFunction) -> UserFunction:
        """Register `function` and return it unchanged."""
        _REGISTERED[name] = Preprocess(
            name, options, title, function=function, reads=reads, identity=_identify(function)
        )
        return function

    return decorate


def names() -> dict[str, str]:
    """Return name → title of every named preprocessing."""
    titles = {name: str(spec["title"]) for name, spec in shipped().items()}
    return {**titles, **{name: entry.title for name, entry in sorted(_REGISTERED.items())}}


def load_preprocess(value: Preprocess | Spec | str | Path | Mapping[str, Any]) -> Preprocess:
    """Return the preprocessing that `value` describes.

    Args:
        value: a name ("caffe"), a .toml file, "file.py:function", steps as text ("resize=256,crop=224,divide=255"), or
            plain data from `edgeq.util.records.plain`.

    Raises:
        DataError: the name is unknown (the message lists the names), the file cannot be read, or a step or field is
            unknown.
    """
    if isinstance(value, Preprocess):
        return value
    if isinstance(value, Spec):
        return _build_declared("steps", value)
    if isinstance(value, Mapping):
        table = dict(value)
        name = table.pop("name", "steps")
        if "function" in table:
            raise DataError(
                f"preprocessing {name} is a function, and plain data contains only its name",
                "Pass file.py:function again",
            )
        return _build_declared(str(name), parse_spec(table, f"preprocessing {name}"))
    # A bare function has no name, so a bundle could not record which preprocessing made the ranges.
    if callable(value):
        raise DataError(
            "a preprocessing is given as a function", "Name it with edgeq.register_preprocess, or as file.py:function"
        )
    text = str(value)
    # Names go before files: a file in the working directory must not change the meaning of a known name.
    if text in _REGISTERED:
        return _REGISTERED[text]
    if (name := ALIASES.get(text, text)) in shipped():
        return _build_declared(name, parse_spec(shipped()[name], name))
    if names_function(text):
        return _load_python(text)
    if is_toml(text):
        table = toml_table(Path(text), DataError, "Give the path of a preprocessing, a short TOML file")
        return _build_declared(Path(text).stem, parse_spec(table, text))
    if "=" in text or is_step(text):
        return _build_declared(text, parse_text(text, f"⟨preprocess⟩ {text}"))
    raise DataError(f"no preprocessing is called {text!r}", choices())


class NoPreprocessingError(DataError):
    """Report images for which no preprocessing is given, so edgeq cannot make model inputs from them."""


def choices() -> str:
    """Return a sentence, for messages, that lists the values of `preprocess`."""
    return (
        f"Pass ⟨preprocess⟩ with one of {', '.join(candidates())}, a .toml file, file.py:function, "
        "or steps such as 'resize=short:256,crop=224,divide=255'"
    )


def _build_declared(name: str, spec: Spec) -> Preprocess:
    return Preprocess(name, spec.source, spec.title, spec)


def _load_python(text: str) -> Preprocess:
    function = load_function(text, "preprocessing", DataError)
    path, _, name = text.rpartition(":")
    file = Path(path)
    registered = next((entry for entry in _REGISTERED.values() if entry.function is function), None)
    # This is the file name without its folder, because the stored identity must be the same on all machines.
    short = f"{file.name}:{name}"
    # A function may be registered by its own file when that file is loaded. Its options then apply.
    entry = registered or Preprocess(short, SourceOptions(), function=function)
    # The hash is part of the digest of the samples, so a changed function invalidates stored statistics.
    digest = hashlib.sha256(read_file(file)).hexdigest()
    return replace(entry, identity={"function": short, "sha256": digest})


def _identify(function: UserFunction) -> dict[str, str]:
    return {"function": f"{function.__module__}.{getattr(function, '__qualname__', repr(type(function)))}"}


FILTERS = "FILTER is nearest, box, bilinear (default), hamming, bicubic or lanczos; ROUNDING defaults to floor"

SOURCE = {
    "key": "the array of a .npz that contains the items",
    "encoded, offsets": "the arrays with concatenated image files and with the position of each",
    "label": "the array (or column) that contains the labels",
    "labels": "another source of labels: name:{label}_*, or a file",
    "input": "the model input that the items feed, if there are several",
    "source.layout": "the axes of one stored item, such as HWC, CHW, TF",
    "source.channels": "the order in stored arrays: RGB (default) or BGR",
    "stack": "true or false: whether the first axis of prepared arrays counts samples",
    "pattern": "which files to read, for functions that read paths",
}
"""Source option in the text form → the option's meaning."""


def steps() -> dict[str, str]:
    """Return, for every step, its names joined by ", " → the text after "NAME="."""
    return {", ".join((name, *step.aliases)): step.help for name, step in REGISTRY.items()}


def list_preprocessings() -> dict[str, Any]:
    """Return the names of preprocessings with their titles, the steps, and the source options."""
    return {
        "preprocessings": [{"name": name, "title": title} for name, title in names().items()],
        "steps": steps(),
        "filters": FILTERS,
        "source": dict(SOURCE),
    }


def show_preprocessing(name: str) -> dict[str, Any]:
    """Return the exact arithmetic of a preprocessing. `name` is a value that `load_preprocess` accepts."""
    loaded: Preprocess = load_preprocess(name)
    return {
        "name": loaded.name,
        "title": loaded.title,
        "arithmetic": list(loaded.arithmetic()),
        "spec": plain(loaded),
    }
