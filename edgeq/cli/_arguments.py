"""Turn the options of a command, as click parses them, into the arguments of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgeq.calibration.methods import REGISTRY as METHODS
from edgeq.data.labels import Labels
from edgeq.data.open_source import Data
from edgeq.errors import UsageError
from edgeq.measure.find_task import ANNOTATED, find_annotations, infer_task_name
from edgeq.measure.task import make_task, split_task_options
from edgeq.scheme import ALL_NODES, SYMMETRIC_BLOCKS

_SCHEME_FIELDS = (
    "method",
    "per_channel",
    "reduce_range",
    "fit_pairs",
    "format",
    "activation_type",
    "weight_type",
    "activation_symmetric",
    "rest",
)


# Options that have no meaning for dynamic quantization or for weights in blocks. Activations then stay float in the
# file, and its format is fixed.
_NOT_DYNAMIC = ("method", "activation_type", "activation_symmetric", "format", "fit_pairs")
_NOT_IN_BLOCKS = (*_NOT_DYNAMIC, "per_channel", "reduce_range", "weight_type")


def build_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options of `edgeq.cli._options.build_options` to arguments of `Request.of`.

    Raises:
        UsageError: options exclude each other, or an option lacks another one that it needs.
    """
    return {
        **data_arguments(options),
        "overrides": _overrides(options),
        "max_drop": options["max_drop"],
        "effort": None if options["as_is"] else options["effort"],
        "require_coverage": options["require_coverage"],
        "emulate": not options["no_emulate"],
        "timed": not options["no_timing"],
        "force": options["force"],
    }


def data_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options of `edgeq.cli._options.data_options` to arguments of `Request.of`.

    Raises:
        UsageError: an option lacks another one that it needs.
    """
    task = None
    named, _ = split_task_options(options)
    if (name := infer_task_name(options["task"], named)) is not None:
        if not options["val"]:
            option = "--task" if options["task"] else "--annotations"
            raise UsageError(f"{option} needs labelled samples", "Give them with --val")
        if name in ANNOTATED and named.annotations is None:
            named = replace(named, annotations=find_annotations(options["val"]))
        task = make_task(name, named)
    elif named.given():
        raise UsageError("task options without a task", "Give a --task")
    listed = isinstance(options["labels"], Labels) and options["labels"].source is None  # only --classes is given
    if options["labels"] and not options["val"] and not listed:
        raise UsageError("--labels needs --val, whose labels it names", "Give --val, or leave out --labels")
    if options["count"] is not None and not options["data"]:
        raise UsageError("--count needs --data, whose samples it limits", "Give --data, or leave out --count")
    preprocess, classes = options["preprocess"], options["labels"] if listed and not options["val"] else None
    return {
        "data": Data(options["data"], preprocess, classes, count=options["count"]) if options["data"] else None,
        "val": Data(options["val"], preprocess, options["labels"]) if options["val"] else None,
        "statistics": options["statistics"],
        "task": task,
        "head": options["head"],
        "threshold": options["threshold"],
        "cut_head": options["cut_head"],
        "fix": parse_sizes(options["fixed"]),
        "workers": options["workers"],
    }


def _overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    overrides = {name: options[name] for name in _SCHEME_FIELDS if options[name] is not None}
    method_settings = [_setting(text) for text in options["method_options"]]
    if options["percentile"] is not None:
        if options["method"] != "percentile":
            raise UsageError("--percentile needs --method percentile")
        method_settings.append(("percentile", options["percentile"]))
    settings = dict(method_settings)
    if len(settings) < len(method_settings):
        raise UsageError("an option of the method is given twice", "Give --percentile, or --method-option, once")
    if settings:
        if options["method"] is None:
            raise UsageError("--method-option needs --method", "Name the method that has this option")
        overrides["method_options"] = METHODS.load(options["method"]).settings(settings)
    if options["dynamic"]:
        overrides |= _dynamic(options)
    if options["weight_only"]:
        if options["dynamic"]:
            raise UsageError("--dynamic and --weight-only exclude each other", "Give one of them")
        _refuse_given(options, _NOT_IN_BLOCKS, "--weight-only", "Weights are in blocks, and nothing else is quantized")
        bits = int(options["weight_only"])
        overrides |= {"mode": "weight-only", "weight_bits": bits, "weight_symmetric": SYMMETRIC_BLOCKS[bits]}
        if options["block_compute"] == "float32" and bits != 4:
            raise UsageError("--block-compute float32 needs 4 bits: with 8, float is many times slower", "Leave it out")
        if options["block_compute"]:
            overrides["float_compute"] = (ALL_NODES,) if options["block_compute"] == "float32" else ()
    if options["block_compute"] and not options["weight_only"]:
        raise UsageError("--block-compute needs --weight-only", "Add --weight-only 4")
    if options["op_types"]:
        overrides["op_types"] = options["op_types"]
    if options["eight_bit"] and options["weight_only"] != "4":
        raise UsageError("--eight-bit needs --weight-only 4", "Add --weight-only 4, or leave out --eight-bit")
    for name in ("exclude", "wide", "eight_bit"):
        if options[name]:
            overrides[name] = options[name]
    return overrides


def _setting(text: str) -> tuple[str, float]:
    """Return the name and value of "NAME=VALUE"."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UsageError(f"--method-option {text!r} is not NAME=NUMBER", "Write it as percentile=99.9") from None


def _dynamic(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheme fields that --dynamic sets. --weight-type applies only to the operator types that --op-type
    names, because the best weight type differs between operators.
    """
    why = "Dynamic quantization takes unsigned activations and measures their ranges at run time"
    _refuse_given(options, _NOT_DYNAMIC, "--dynamic", why)
    if options["weight_type"] is None:
        return {"mode": "dynamic"}
    if not options["op_types"]:
        raise UsageError("dynamic quantization sets weight types by operator type", "Name the types with --op-type")
    return {"mode": "dynamic", "dynamic_weight_types": dict.fromkeys(options["op_types"], options["weight_type"])}


def _refuse_given(options: Mapping[str, Any], names: Sequence[str], mode: str, why: str) -> None:
    refused = next((name for name in names if options[name] is not None), None)
    if refused is not None:
        raise UsageError(f"--{refused.replace('_', '-')} and {mode} exclude each other", why)


# At most 18 digits after leading zeros, so that a size fits into 64 bits.
_SIZE = re.compile("0*[1-9][0-9]{0,17}")


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """Return sizes by name from texts such as "N=1".

    Raises:
        UsageError: a text has another form.
    """
    sizes = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not _SIZE.fullmatch(size):
            raise UsageError(f"--fix {text!r} is not NAME=SIZE", "Write it as N=1")
        sizes[name.strip()] = int(size)
    return sizes


def parse_bytes(text: str) -> int:
    """Return the number of bytes in "500MB", "2 GiB", "1e9" or plain digits. Decimal prefixes are powers of ten, binary
    prefixes are powers of two.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?", text.lower().strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 1 <= number < 1e18:
        raise UsageError(f"--memory {text!r} is not a size", "Write 500MB or 2GB")
    power = " kmgt".index(match[2] or " ")
    return int(number * (1024 if match[3] else 1000) ** power)
