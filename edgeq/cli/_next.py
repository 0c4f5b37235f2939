"""What is usually typed after a command."""

from __future__ import annotations

import re
import shlex

import click

NEXT = {
    "detect": "edgeq inspect MODEL.onnx",
    "inspect": "edgeq quantize {model} --data SAMPLES -o int8.onnx",
    "doctor": "edgeq detect",
    "demo": "edgeq report {output} --bench --open",
    "demo files": "edgeq inspect {files}/model.onnx",
    "quantize": "edgeq bench {output} --against {model} --data {data}",
    "quantize target": "edgeq package {model} -t {target} --data {data} -o BUNDLE",
    "tune": "edgeq verify {output}",
    "tune dry_run": "the same without --dry-run",
    "package": "edgeq verify {output}",
    "package split": "edgeq verify {output}/NAME.edgeq --on all",
    "package target": "edgeq verify {output} --on all",
    "calibrate collect": "edgeq quantize {model} --calibration {output} --data {data} -o int8.onnx",
    "calibrate merge": "edgeq calibrate show {output}",
    "calibrate show": "edgeq quantize MODEL.onnx --calibration {path} --data SAMPLES -o int8.onnx",
    "retarget": "edgeq bench {output} --against {model}",
    "run dry_run": "edgeq run {recipe}",
    "verify": "edgeq bench {bundle}",
    "verify on": "edgeq report {bundle} --open",
    "sign": "edgeq push {bundle} HOST/REPOSITORY:TAG",
    "push": "edgeq pull HOST/REPOSITORY@DIGEST -o BUNDLE --trust KEY",
    "pull": "edgeq verify {output}",
    "bench": "edgeq eval {model} --data LABELLED --task classification",
    "eval": "edgeq compare FLOAT.onnx {model} --data {data}",
    "compare": "edgeq debug {a} {b} --data SAMPLES",
    "gate": "edgeq compare {baseline} {model}",
    "debug": "edgeq tune {float_model} --data SAMPLES -o BUNDLE",
    "audit": "edgeq debug FLOAT.onnx {model} --data SAMPLES",
    "report": "edgeq verify {bundle}",
    "targets list": "edgeq targets show NAME --why",
    "targets show": "edgeq package MODEL.onnx -t {name} --data SAMPLES -o BUNDLE",
    "profiles list": "edgeq profiles show NAME --why",
    "profiles show": "edgeq quantize MODEL.onnx -t {name} --data SAMPLES -o int8.onnx",
    "device setup": "edgeq doctor --on {board}",
    "device list": "edgeq doctor --on BOARD",
    "emulate setup": "edgeq verify BUNDLE --on all",
    "emulate status": "edgeq emulate setup",
    "emit-c": "make -C {output} check",
    "preprocess list": "edgeq preprocess show NAME",
    "preprocess show": "edgeq quantize MODEL.onnx --data IMAGES --preprocess {name} -o int8.onnx",
    "extensions": "edgeq quantize MODEL.onnx --data SAMPLES --method NAME -o int8.onnx",
}
"""Command, with its subcommand, action or an option that changes what it does → the line; parameters in braces."""

_HERE = ("auto", "this-machine")
_FOUND = "edgeq.next"


def fill_next(**words: object) -> None:
    """What the next line of the running command has in place of its arguments, by name, because of what was found;
    where one of its words is None, the line is left out."""
    click.get_current_context().meta[_FOUND] = words


def next_line(context: click.Context) -> str | None:
    """The line to type after the command of `context`, with its own arguments filled in; None where there is none."""
    names = [str(context.info_name)]
    if context.parent is not None and context.parent.parent is not None:
        names.insert(0, str(context.parent.info_name))
    chosen = [str(context.params["action"])] if "action" in context.params else []
    chosen += [name for name in ("files", "dry_run", "on", "split") if context.params.get(name)]
    targets = context.params.get("target") or context.params.get("targets") or ()
    chosen += ["target"] * any(name not in _HERE for name in ([targets] if isinstance(targets, str) else targets))
    keys = [" ".join([*names, *part]) for part in (chosen, *([word] for word in chosen), [])]
    line = next((NEXT[key] for key in keys if key in NEXT), None)
    if line is not None and context.params.get("preprocess") is not None:
        line = line.replace("--data {data}", "--data {data} --preprocess {preprocess}")
    if line is not None and "calibration" in context.params and context.params["data"] is None:
        line = line.replace(" --data {data}", "")
    words = {**context.params, **context.meta.get(_FOUND, {})}
    given = {name: shlex.quote(str(value)) for name, value in words.items() if value is not None}
    return None if line is None or set(re.findall(r"{(\w+)}", line)) - given.keys() else line.format(**given)
