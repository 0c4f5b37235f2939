"""What is usually typed after a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import click

NEXT = {
    "detect": "edgeq inspect MODEL.onnx",
    "inspect": "edgeq quantize {model} --data SAMPLES -o int8.onnx",
    "doctor": "edgeq detect",
    "demo": "edgeq report {output} --bench --open",
    "demo files": "edgeq inspect {files}/model.onnx",
    "quantize": "edgeq bench {output} --against {model} --data {data} ...",
    "quantize target": "edgeq package {model} -t {target} -o BUNDLE ...",
    "tune": "edgeq verify {output}",
    "tune target": "edgeq verify {output} --on all",
    "tune dry_run": "edgeq tune {model} -o {output} ...",
    "calibrate collect": "edgeq quantize {model} --calibration {output} -o int8.onnx ...",
    "calibrate merge": "edgeq calibrate show {output}",
    "calibrate show": "edgeq quantize MODEL.onnx --calibration {path} --data SAMPLES -o int8.onnx",
    "retarget": "edgeq bench {output} --against {model}",
    "run dry_run": "edgeq run {recipe} ...",
    "verify": "edgeq bench {bundle}",
    "verify on": "edgeq report {bundle} --open",
    "sign": "edgeq push {bundle} HOST/REPOSITORY:TAG",
    "push": "edgeq pull {reference} -o BUNDLE --trust {trust}",
    "bench": "edgeq eval {model} --data LABELLED --task classification",
    "eval": "edgeq compare {reference|FLOAT.onnx} {model} ...",
    "compare": "edgeq debug {a} {b} --data {data|SAMPLES} ...",
    "gate": "edgeq compare {baseline} {model} ...",
    "debug": "edgeq tune {float_model} -o BUNDLE ...",
    "audit": "edgeq debug {reference|FLOAT.onnx} {model} --data {data|SAMPLES} ...",
    "targets list": "edgeq targets show NAME --why",
    "targets show": "edgeq package MODEL.onnx -t {name} --data SAMPLES -o BUNDLE",
    "profiles list": "edgeq profiles show NAME --why",
    "profiles show": "edgeq quantize MODEL.onnx -t {name} --data SAMPLES -o int8.onnx",
    "device setup": "edgeq doctor --on {board}",
    "device list": "edgeq doctor --on {board}",
    "emulate setup": "edgeq verify BUNDLE --on all",
    "emulate status": "edgeq emulate setup",
    "emit-c": "make -C {output} check",
    "preprocess list": "edgeq preprocess show NAME",
    "preprocess show": "edgeq quantize MODEL.onnx --data IMAGES --preprocess {name} -o int8.onnx",
    "extensions": "edgeq quantize MODEL.onnx --data SAMPLES --method NAME -o int8.onnx",
}
"""Command, with its subcommand, action or an option that changes what it does → the line to type.

A parameter stands in braces, with what is written where it was not given behind a bar; an option without a value is
left out. "..." stands for the options that were typed and that the next command takes too.
"""

_HERE = ("auto", "this-machine")
_FOUND, _CHOSEN = "edgeq.next", "edgeq.next.line"
_CARRIED = "..."
_PARAMETER = re.compile(r"{(\w+)(?:\|([^}]+))?}")
_OPTION = re.compile(r" --[\w-]+ {(\w+)}")
_NOT_CARRIED = frozenset({"as_json", "quiet", "verbose", "print_recipe", "dry_run"})


def fill_next(**words: object) -> None:
    """Set words of the running command's next line, by name; where one that the line needs is None, none is printed."""
    click.get_current_context().meta[_FOUND] = words


def choose_next(line: Callable[[], str | None], **words: object) -> None:
    """Set the running command's next line, because of what was found, and words of it.

    Args:
        line: gives one as in `NEXT`, without "edgeq"; None prints none. Called where the line is printed alone.
    """
    fill_next(**words)
    click.get_current_context().meta[_CHOSEN] = line


def next_line(context: click.Context) -> str | None:
    """The line to type after the command of `context`, with its own arguments filled in; None where there is none."""
    if _CHOSEN in context.meta:
        chosen = context.meta[_CHOSEN]()
        line = f"edgeq {chosen}" if chosen else None
    else:
        line = next((NEXT[key] for key in _keys(context) if key in NEXT), None)
    if line is None:
        return None
    words = {**context.params, **context.meta.get(_FOUND, {})}
    given = {name: shlex.quote(str(value)) for name, value in words.items() if value is not None}
    line = _OPTION.sub(lambda option: option[0] if option[1] in given else "", line)
    if any(name not in given and not instead for name, instead in _PARAMETER.findall(line)):
        return None
    if line.endswith(_CARRIED):
        line = " ".join([line.removesuffix(f" {_CARRIED}"), *map(shlex.quote, _carried(context, line))])
    return _PARAMETER.sub(lambda parameter: given.get(parameter[1], parameter[2]), line)


def _keys(context: click.Context) -> Iterator[str]:
    """The keys of `NEXT` that fit the running command, the most particular first."""
    names = [str(context.info_name)]
    if context.parent is not None and context.parent.parent is not None:
        names.insert(0, str(context.parent.info_name))
    chosen = [str(context.params["action"])] if "action" in context.params else []
    chosen += [name for name in ("files", "dry_run", "on") if context.params.get(name)]
    targets = context.params.get("target") or ()
    chosen += ["target"] * any(name not in _HERE for name in ([targets] if isinstance(targets, str) else targets))
    return (" ".join([*names, *part]) for part in (chosen, *([word] for word in chosen), []))


def _carried(context: click.Context, line: str) -> Iterator[str]:
    """The options that were typed and that the command of `line` takes too, but for those that stand there."""
    there = line.split()
    group: Any = context.find_root().command
    taken = {option.name: option for option in group.get_command(context, there[1]).params}
    for option in context.command.params:
        typed = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        other = taken.get(option.name)
        if not typed or not isinstance(option, click.Option) or other is None or option.name in _NOT_CARRIED:
            continue
        if not set(other.opts).isdisjoint(there) or (
            option.name == "force" and other is not option and "-o {output}" not in line
        ):
            continue
        value = context.params[option.name or ""]
        name = next((name for name in other.opts if name.startswith("--")), other.opts[0])
        if option.is_flag:
            yield name if value else option.secondary_opts[0]
        else:
            for one in value if isinstance(value, tuple) else (value,):
                yield from (name, str(one))
