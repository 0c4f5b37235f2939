"""Suggest the command to type next, after a command has succeeded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from edgeq.arguments import as_options
from edgeq.cli._recipe import typed_names

NEXT = {
    "detect": "edgeq inspect MODEL.onnx",
    "inspect": "edgeq quantize {model} --data SAMPLES -o int8.onnx",
    "doctor": "edgeq detect",
    "toolkit": "edgeq targets",
    "demo": "edgeq report {output} --bench --open",
    "demo files": "edgeq inspect {files}/model.onnx",
    "quantize": "edgeq bench {output} --against {model} --data {data} ...",
    "quantize target": "edgeq package {model} -t {target} -o BUNDLE ...",
    "tune": "edgeq verify {output}",
    "tune target": "edgeq verify {output} --on all",
    "tune dry_run": "edgeq tune {model} -o {output} ...",
    "infer": "edgeq bench {model}",
    "calibrate collect": "edgeq quantize {model} --statistics {output} -o int8.onnx ...",
    "calibrate merge": "edgeq calibrate show {output}",
    "calibrate show": "edgeq quantize MODEL.onnx --statistics {path} --data SAMPLES -o int8.onnx",
    "retarget": "edgeq bench {output} --against {model}",
    "run dry_run": "edgeq run {recipe} ...",
    "verify": "edgeq bench {bundle} --variant {variant}",
    "verify on": "edgeq report {bundle} --variant {variant} --open",
    "sign": "edgeq push {bundle} HOST/REPOSITORY:TAG",
    "push": "edgeq pull {reference} -o BUNDLE --trust {trust}",
    "bench": "edgeq eval {model} --data LABELLED --task classification ...",
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
"""Command → the line to type next. The key may also contain the subcommand, the action, or an option that changes what
the command does.

Braces enclose a parameter's name, optionally followed by a bar and the text to use if the parameter was not given. An
option without a value is left out. "..." means the options that the user typed and that the next command also accepts.
"""

# With these targets, the model runs on this machine, so the next command can time it here.
_THIS_MACHINE = ("auto", "this-machine")
_WORDS, _PROPOSAL = "edgeq.next", "edgeq.next.line"
_CARRIED = "..."
_PARAMETER = re.compile(r"{(\w+)(?:\|([^}]+))?}")
_OPTION = re.compile(r" --[\w-]+ {(\w+)}")
# How a command prints its result says nothing about the next command.
_NOT_CARRIED = frozenset({"as_json", "quiet", "verbose", "print_recipe", "dry_run"})


def fill_next(**words: object) -> None:
    """Set the words that fill the placeholders in the running command's next line. If a needed word is None, no line is
    printed.
    """
    click.get_current_context().meta[_WORDS] = words


def choose_next(line: Callable[[], str | None], **words: object) -> None:
    """Replace the next line of the running command with one that depends on the result, and set the words that fill its
    placeholders.

    Args:
        line: function that returns the new line, written like a value of `NEXT` but without "edgeq". It returns None to
            print no line, and is called only if next lines are printed at all.
    """
    fill_next(**words)
    click.get_current_context().meta[_PROPOSAL] = line


def propose_check(bundle: Path, targets: Sequence[str] = ()) -> None:
    """Set the next line to the command that checks as much of `bundle` as this machine can run."""

    def line() -> str | None:
        """Return the command that checks the bundle's variants. The bundle is read only when the line is printed."""
        from edgeq.backends.base import SIMULATORS
        from edgeq.emulate.check import suggest_check

        return suggest_check(bundle, SIMULATORS, targets)

    choose_next(line, bundle=bundle)


def next_line(context: click.Context) -> str | None:
    """Return the line to type after the command of `context`, with its arguments filled in, or None."""
    if _PROPOSAL in context.meta:
        proposal = context.meta[_PROPOSAL]()
        line = as_options(f"edgeq {proposal}") if proposal else None
    else:
        line = next((NEXT[key] for key in _keys(context) if key in NEXT), None)
    if line is None:
        return None
    words = {**context.params, **context.meta.get(_WORDS, {})}
    texts = {name: shlex.quote(str(value)) for name, value in words.items() if value is not None}
    line = _OPTION.sub(lambda option: option[0] if option[1] in texts else "", line)
    if any(name not in texts and not instead for name, instead in _PARAMETER.findall(line)):
        return None
    compared = [texts[name] for name, _ in _PARAMETER.findall(line.partition(" --")[0]) if name in texts]
    if len(set(compared)) < len(compared):  # the line would compare a model with itself
        return None
    # What the user typed may contain braces itself, such as `name:{label}_*`.
    carried = map(shlex.quote, _carried(context, line)) if line.endswith(_CARRIED) else ()
    filled = _PARAMETER.sub(lambda parameter: texts.get(parameter[1], parameter[2]), line.removesuffix(f" {_CARRIED}"))
    return " ".join([filled, *carried])


def _keys(context: click.Context) -> Iterator[str]:
    """Yield the keys of `NEXT` that match the running command, most specific first."""
    names = typed_names(context)
    details = [str(context.params["action"])] if "action" in context.params else []
    details += [name for name in ("files", "dry_run", "on") if context.params.get(name)]
    targets = context.params.get("target") or ()
    details += ["target"] * any(
        name not in _THIS_MACHINE for name in ([targets] if isinstance(targets, str) else targets)
    )
    return (" ".join([*names, *part]) for part in (details, *([word] for word in details), []))


def _carried(context: click.Context, line: str) -> Iterator[str]:
    """Yield the options that the user typed and that the command of `line` accepts. Options that `line` already
    contains are left out.
    """
    line_words = line.split()
    group: Any = context.find_root().command
    accepted = {option.name: option for option in group.get_command(context, line_words[1]).params}
    for option in context.command.params:
        typed = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        counterpart = accepted.get(option.name)
        if not typed or not isinstance(option, click.Option) or counterpart is None or option.name in _NOT_CARRIED:
            continue
        if not set(counterpart.opts).isdisjoint(line_words) or (
            option.name == "force" and counterpart is not option and "-o {output}" not in line
        ):
            continue
        value = context.params[option.name or ""]
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > 1 and not counterpart.multiple:
            continue
        name = next((name for name in counterpart.opts if name.startswith("--")), counterpart.opts[0])
        if option.is_flag:
            yield name if value else option.secondary_opts[0]
        else:
            for item in values:
                yield from (name, str(item))
