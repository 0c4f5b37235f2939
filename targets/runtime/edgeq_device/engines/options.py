"""Decide which session and provider options a bundle may set, and to which values. The rules are the rows of
options.json, next to this file.

A bundle is untrusted input. ONNX Runtime's options open, write and load files and accept addresses of functions, and
each release adds more. So an option is refused unless it has a row. The row gives the form of its values and the reason
why it can do no harm. The table is part of the code that checks. It is never read from the bundle that is being
checked.

An ONNX file may also carry session options in its metadata, so that it gives correct results without a bundle. These
metadata are untrusted too. They may set the same options as a bundle, except options that refer to other files. ONNX
Runtime itself does not know this metadata entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Union

from edgeq_device.engines.catalog import engine_options, find_plugin
from edgeq_device.errors import BundleError
from edgeq_device.model.onnxfile import read_metadata
from edgeq_device.system.plainjson import parse_json
from edgeq_device.system.tables import read_table

MAX_KEY = 128
MAX_VALUE = 1024
"""ONNX Runtime's own limits on the length of keys and of values, in characters."""
TABLE_OPTION = ("TensorrtExecutionProvider", "trt_int8_calibration_table_name")
"""Provider and option that name the calibration table. The runner puts the table into the folder of the engines."""
_FIX = "The options that a bundle may set, and their values, are in edgeq_device/engines/options.json"
# As many as the largest 32-bit number has.
_SIZE_DIGITS = 10
_SHOWN = 60


@dataclass(frozen=True)
class OptionRule:
    """Describe one option that a bundle may set.

    Attributes:
        form: the form of the values, as described below.
        why: reason why the option can do no harm.
        source: where the option is documented.

    Forms:

    - {"one_of": [text, ...]}: one of these texts.
    - {"whole": [least, most]}: a decimal number without needless signs, spaces or zeros.
    - {"words": {"between", "also", "most", "ending"}}: words of ASCII letters, digits and the characters of "also". The
      words are separated by "between", have at most "most" characters in total, and end with "ending".
    - {"shapes": most}: inputs with their sizes, such as "x:1x3x224x224,y:1", with at most `most` characters.
    - {"place": "file" | "folder"}: a file of the bundle, or a folder that contains files of the bundle.
    """

    form: Mapping[str, Any]
    why: str
    source: str

    @property
    def place(self) -> str:
        """Return "file" or "folder" if the value refers to something in the bundle, else ""."""
        return str(self.form.get("place", ""))


@lru_cache
def load_rules(provider: str = "") -> Mapping[str, OptionRule]:
    """Return the rules for the options of an execution provider, keyed by option. Without a provider, return the rules
    for session options.
    """
    table = read_table("engines/options.json")
    rows = table["providers"].get(provider, {}) if provider else table["session"]
    # A form is given in full, or by the name of a form that several rows share.
    named = {key: row["form"] if isinstance(row["form"], str) else "" for key, row in rows.items()}
    return {
        key: OptionRule(table["forms"][named[key]] if named[key] else row["form"], row["why"], row["source"])
        for key, row in rows.items()
    }


def session_problem(key: str, value: str, *, references: bool = True) -> str:
    """Return why a bundle may not set session option `key` to `value`, as the rest of a sentence, or "" if it may.

    Args:
        references: True if an option may refer to files of the bundle. False for options that a user or a model gives,
            because only the writer of a bundle may set an option that refers to its files.
    """
    problem = _describe_problem(load_rules(), key, value, "is not one that a bundle may set")
    if not problem and not references and load_rules()[key].place:
        return "is one that the writer of the bundle sets itself"
    return problem


def provider_problem(ep: str, key: str, value: str) -> str:
    """Return why a bundle may not set option `key` of execution provider `ep` to `value`. The answer has the form of
    `session_problem`'s.
    """
    # These values come from edgeq's own table of engines, so they are harmless.
    if value in _read_engine_values(ep, key):
        return ""
    if not load_rules(ep):
        return f"is refused: a bundle may set none of {_quote(ep)}"
    return _describe_problem(load_rules(ep), key, value, f"is not one that a bundle may set of {ep}")


def read_session_options(
    options: Mapping[str, str], context: str, resolve: Callable[[str, str], str]
) -> Dict[str, str]:
    """Return the checked `options` of a bundle, with references replaced by paths.

    Args:
        resolve: function that takes a reference and its kind ("file" or "folder") and returns the path; it may raise
            BundleError.

    Raises:
        BundleError: a bundle may not set the option, or may not set it to that value.
    """
    resolved = {}
    for key, value in options.items():
        _refuse(session_problem(key, value), f"{context}: session option {_quote(key)}")
        place = load_rules()[key].place
        resolved[key] = resolve(value, place) if place else value
    return resolved


def read_provider_options(
    ep: str, options: Mapping[str, str], context: str, resolve: Callable[[str, str], str]
) -> Dict[str, str]:
    """Do the work of `read_session_options` for the options of execution provider `ep`."""
    resolved = {}
    for key, value in options.items():
        _refuse(provider_problem(ep, key, value), f"{context}: provider option {_quote(key)}")
        rule = load_rules(ep).get(key)
        resolved[key] = resolve(value, rule.place) if rule is not None and rule.place else value
    return resolved


def _read_engine_values(ep: str, key: str) -> List[str]:
    """Return the values that `key` has in the description of the plug-in engine with provider `ep`, one for each
    precision.

    ONNX Runtime's own reader of packages needs these values in the bundle. edgeq's runner takes them from the
    description.
    """
    engine = find_plugin(ep)
    if engine is None:
        return []
    return [options[key] for options in (engine_options(engine, name) for name in engine.precisions) if key in options]


def check_names(session: Iterable[str], ep: str, provider: Iterable[str]) -> None:
    """Refuse options whose names have no row. Their values were checked when the bundle was read.

    This is the last check before a session is opened. It also covers options that did not come from the reader of
    bundles.

    Raises:
        BundleError: a name has no row; the message contains the name.
    """
    for key in session:
        if key not in load_rules():
            raise BundleError(f"session option {_quote(key)} is not one that a bundle may set", _FIX)
    for key in provider:
        if key not in load_rules(ep) and not _read_engine_values(ep, key):
            raise BundleError(f"provider option {_quote(key)} is not one that a bundle may set of {ep}", _FIX)


def check_table_name(name: str, context: str) -> None:
    """Refuse a name that does not have the form of a calibration table's name, because the runner copies the table into
    the folder from which TensorRT reads engines.

    Raises:
        BundleError: the name does not have that form.
    """
    ep, key = TABLE_OPTION
    _refuse(provider_problem(ep, key, name), f"{context}: table {_quote(name)}")


def _refuse(problem: str, option: str) -> None:
    if problem:
        raise BundleError(f"{option} {problem}", _FIX)


def _describe_problem(rules_by_key: Mapping[str, OptionRule], key: str, value: str, unknown: str) -> str:
    if len(key) > MAX_KEY or not _is_printable(key):
        return f"is not a name of an option: printable ASCII, at most {MAX_KEY} characters"
    if key not in rules_by_key:
        return unknown
    if len(value) > MAX_VALUE or not _is_printable(value):
        return f"has a value that is not printable ASCII of at most {MAX_VALUE} characters"
    expected = _describe_mismatch(rules_by_key[key].form, value)
    return f"is {_quote(value)}; it can be {expected}" if expected else ""


def _describe_mismatch(form: Mapping[str, Any], value: str) -> str:
    """Return a description of the allowed values if `value` does not have `form`, else ""."""
    if "one_of" in form:
        return "" if value in form["one_of"] else ", ".join(form["one_of"])
    if "whole" in form:
        low, high = form["whole"]
        short = re.fullmatch("-?[0-9]+", value) is not None and len(value.lstrip("-")) <= len(str(high))
        # One spelling a number, so that this check and ONNX Runtime's parser cannot disagree.
        fits = short and str(int(value)) == value and low <= int(value) <= high
        return "" if fits else f"a whole number from {low} to {high}"
    if "words" in form:
        limits = form["words"]
        return "" if _are_words(value, limits) else _describe_words(limits)
    if "shapes" in form:
        high = form["shapes"]
        fits = len(value) <= high and all(map(_is_shape, value.split(",")))
        return "" if fits else f"NAME:SIZExSIZE, with commas between them, {high} characters at most"
    return "" if value else f"a {form['place']} of the bundle"


def _is_shape(text: str) -> bool:
    name, _, sizes = text.rpartition(":")
    is_plain = name != "" and all(character.isalnum() or character in "_.-/:" for character in name)
    return is_plain and all(size.isdigit() and len(size) <= _SIZE_DIGITS for size in sizes.split("x"))


def _are_words(value: str, limits: Mapping[str, Any]) -> bool:
    extra = limits["also"] + limits["between"]
    words = value.split(limits["between"]) if limits["between"] else [value]
    return (
        len(value) <= limits["most"]
        and all(character.isalnum() or character in extra for character in value)
        and all(words)
        and value.endswith(limits.get("ending", ""))
    )


def _describe_words(limits: Mapping[str, Any]) -> str:
    text = f"at most {limits['most']} letters, digits and {' '.join(limits['also'])}"
    if limits["between"]:
        text += f" in words with {limits['between']} between them"
    return f"{text}, ending in {limits['ending']}" if "ending" in limits else text


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _quote(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


KEY = "edgeq.session_options"
"""Key of the metadata entry. Its value is a JSON object whose values are texts."""


def read_model_options(model: Union[Path, bytes], context: str) -> Dict[str, str]:
    """Return the session options in the metadata of `model`, which is a path or the bytes of a file. Messages call the
    model `context`.

    Raises:
        BundleError: the entry has a wrong form, or sets an option or a value that a model may not set.
    """
    content = read_metadata(model, KEY, context)
    if content is None:
        return {}
    context = f"{context}: {KEY} in its metadata"
    options = parse_json(content, context)
    for key, value in options.items():
        problem = session_problem(key, value, references=False) if isinstance(value, str) else "is not a text"
        if problem:
            fix = "The options that a model may set, and their values, are in edgeq_device/engines/options.json"
            raise BundleError(f"{context}: session option {key[:60]!a} {problem}", fix)
    return options
