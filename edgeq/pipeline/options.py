"""From the command line's flat options to the arguments that `quantize`, `package` and `tune` take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeq.calibrate.methods import REGISTRY as METHODS
from edgeq.data.given import Data
from edgeq.errors import UsageError
from edgeq.measure.task import make_task, split_task_options
from edgeq.model.fixed_sizes import parse_sizes
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


# What says nothing where activations stay float in the file: dynamic quantization has its own form, blocks theirs.
_NOT_DYNAMIC = ("method", "activation_type", "activation_symmetric", "format", "fit_pairs")
_NOT_IN_BLOCKS = (*_NOT_DYNAMIC, "per_channel", "reduce_range", "weight_type")


def build_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that `quantize` and `package` have in common, from the options of `edgeq.cli._options`."""
    return {
        **_data_arguments(options),
        "overrides": _overrides(options),
        "max_drop": share("--max-drop", options["max_drop"]),
        "require_coverage": share("--require-coverage", options["require_coverage"]),
        "emulate": not options["no_emulate"],
        "timed": not options["no_timing"],
        "force": options["force"],
    }


def tune_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `edgeq.tune` but for its goal, and "max_drop" for that."""
    same = ("target", "with_float", "resume", "force")
    return {
        **_data_arguments(options),
        "max_drop": share("--max-drop", options["max_drop"]),
        **{name: options[name] for name in same},
        "memory": not options["no_memory"],
    }


def _data_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    task = None
    named, _ = split_task_options(options)
    if options["task"]:
        if not options["val"]:
            raise UsageError("--task needs labelled samples", "Give them with --val")
        task = make_task(options["task"], named)
    elif named.given():
        raise UsageError("task options without a task", "Give a --task")
    if options["labels"] and not options["val"]:
        raise UsageError("--labels says where the labels of --val are", "Give --val, or leave it out")
    if options["count"] is not None and not options["data"]:
        raise UsageError("--count is how many samples of --data are taken", "Give --data, or leave it out")
    preprocess = options["preprocess"]
    return {
        "data": Data(options["data"], preprocess, count=options["count"]) if options["data"] else None,
        "validation": Data(options["val"], preprocess, options["labels"]) if options["val"] else None,
        "statistics": options["calibration"],
        "task": task,
        "fix": parse_sizes(options["fixed"]),
        "workers": options["workers"],
    }


def _overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: options[name] for name in _SCHEME_FIELDS if options[name] is not None}
    given = [_setting(text) for text in options["method_options"]]
    if options["percentile"] is not None:
        if options["method"] != "percentile":
            raise UsageError("--percentile goes with --method percentile")
        given.append(("percentile", options["percentile"]))
    settings = dict(given)
    if len(settings) < len(given):
        raise UsageError("an option of the method is given twice", "Give --percentile, or --method-option, once")
    if settings:
        if options["method"] is None:
            raise UsageError("--method-option goes with --method", "Name the method that has this option")
        chosen["method_options"] = METHODS.load(options["method"]).settings(settings)
    if options["dynamic"]:
        chosen |= _dynamic(options)
    if options["weight_only"]:
        if options["dynamic"]:
            raise UsageError("--dynamic and --weight-only exclude each other", "Give one of them")
        _refuse_given(options, _NOT_IN_BLOCKS, "--weight-only", "Weights are in blocks, and nothing else is quantized")
        bits = int(options["weight_only"])
        chosen |= {"mode": "weight-only", "weight_bits": bits, "weight_symmetric": SYMMETRIC_BLOCKS[bits]}
        if options["block_compute"] == "float32" and bits != 4:
            raise UsageError(
                "--block-compute float32 goes with 4 bits: with 8, float is many times slower", "Leave it out"
            )
        if options["block_compute"]:
            chosen["float_compute"] = (ALL_NODES,) if options["block_compute"] == "float32" else ()
    if options["block_compute"] and not options["weight_only"]:
        raise UsageError("--block-compute goes with --weight-only", "Make it --weight-only 4")
    if options["op_types"]:
        chosen["op_types"] = options["op_types"]
    if options["eight_bit"] and options["weight_only"] != "4":
        raise UsageError("--eight-bit goes with --weight-only 4", "Make it that, or leave --eight-bit out")
    for name in ("exclude", "wide", "eight_bit"):
        if options[name]:
            chosen[name] = options[name]
    return chosen


def _setting(text: str) -> tuple[str, float]:
    """The name and value of "NAME=VALUE"."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UsageError(f"--method-option {text!r} is not NAME=NUMBER", "Write it as percentile=99.9") from None


def _dynamic(options: Mapping[str, Any]) -> dict[str, Any]:
    """What --dynamic sets. --weight-type counts for the types that --op-type names: each wants its own."""
    why = "Dynamic quantization takes unsigned activations and measures their ranges at run time"
    _refuse_given(options, _NOT_DYNAMIC, "--dynamic", why)
    if options["weight_type"] is None:
        return {"mode": "dynamic"}
    if not options["op_types"]:
        raise UsageError("dynamic weight types are per operator type", "Name it with --op-type")
    return {"mode": "dynamic", "dynamic_weight_types": dict.fromkeys(options["op_types"], options["weight_type"])}


def _refuse_given(options: Mapping[str, Any], names: Sequence[str], other: str, why: str) -> None:
    given = next((name for name in names if options[name] is not None), None)
    if given is not None:
        raise UsageError(f"--{given.replace('_', '-')} and {other} exclude each other", why)


def share(option: str, text: str | None) -> float | None:
    """A fraction from "0.01", "1%" or "1pt"."""
    if text is None:
        return None
    number, scale = text.strip(), 1.0
    for suffix in ("%", "pt"):
        if number.endswith(suffix):
            number, scale = number.removesuffix(suffix), 0.01
    try:
        value = float(number) * scale
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a number", "Write 0.01, 1% or 1pt") from None
    if not 0 <= value <= 1:
        raise UsageError(f"{option} {text!r} is not between 0 and 1", "Write 0.01, 1% or 1pt")
    return value
