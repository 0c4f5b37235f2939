"""Implement `edgeq detect`, `doctor`, `targets` and others, which show this machine and list what edgeq supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from edgeq.cli._common import Printer, command
from edgeq.cli._options import board_of, complete_target, on_board
from edgeq.errors import UsageError, suggest


@command("detect")
@on_board
def detect_command(printer: Printer, on: str | None) -> None:
    """Show this machine, the profile that fits it and the engines for it. With -v, also show every CPU feature.

    \b
    edgeq detect
    edgeq detect --on ssh://pi@10.0.0.5
    """
    from edgeq.hardware import show
    from edgeq.hardware.detect import detect_machine
    from edgeq.hardware.engines import detect_engines, list_wrong_kernels
    from edgeq.hardware.profile import load_profiles, match_profile
    from edgeq.run.engines import load_engines

    profiles = load_profiles()
    if on is None:
        machine, installed, state = detect_machine(), None, None
    else:
        from edgeq.remote.machine import detect_board

        board = detect_board(board_of(on))
        machine, installed, state = board.machine, board.engines, board.state
    match = match_profile(machine, profiles)
    engines = detect_engines(machine, load_engines(), installed)
    lines = show.describe_machine(machine, match, profiles, engines, every_feature=printer.verbose)
    record = {"machine": machine, "match": match, "engines": engines, "wrong_kernels": list_wrong_kernels(machine)}
    if state is not None:
        record["state"] = state
        lines.append(f"  now         {state.text()}")
    printer.lines(record, lines)


@command("doctor")
@click.option("--gpu", is_flag=True, help="Also build, run and time the demo model on the GPU. Takes minutes.")
@on_board
def doctor_command(printer: Printer, gpu: bool, on: str | None) -> None:
    """Show what is installed here and what works. With --gpu, also run the demo model on the GPU.

    \b
    edgeq doctor
    edgeq doctor --on ssh://pi@10.0.0.5
    edgeq doctor --gpu --json > gpu.json
    """
    if on is None:
        from edgeq.jobs.doctor import doctor

        checks = doctor(gpu=gpu, progress=printer.progress())
    else:
        from edgeq.remote.doctor import doctor_board

        if gpu:
            raise UsageError("--gpu tests only this machine's GPU", "Leave it out, or run edgeq doctor on the board")
        checks = doctor_board(board_of(on), progress=printer.progress())
    width = max(len(check.name) for check in checks.checks)
    printer.lines(checks, [f"{check.status:8} {check.name:{width}}  {check.detail}" for check in checks.checks])
    checks.check(gpu=gpu)


def _installs_toolkit(parameters: Mapping[str, Any]) -> str:
    from edgeq.backends.base import toolkits

    toolkit = toolkits().get(parameters["name"]) if parameters["wanted"] else None
    return toolkit.plan() if toolkit is not None else ""


@command("toolkit", installs=_installs_toolkit)
@click.argument("name", required=False)
@click.option(
    "--install", "wanted", is_flag=True, help="Install the toolkit with pip, into its own folder in your cache."
)
def toolkit_command(printer: Printer, name: str | None, wanted: bool) -> None:
    """List the toolkits that backends need and what each one installs, or install the toolkit NAME.

    \b
    edgeq toolkit
    edgeq toolkit rknn --install
    """
    from edgeq.backends.base import toolkits
    from edgeq.run.toolkit import describe_state, install

    toolkits_by_name = toolkits()
    if name is not None and name not in toolkits_by_name:
        raise UsageError(f"no toolkit is called {name!r}", suggest(name, toolkits_by_name))
    selection = [toolkits_by_name[name]] if name is not None else list(toolkits_by_name.values())
    if wanted:
        if name is None:
            raise UsageError("no toolkit is named to install", f"Name one: {', '.join(toolkits_by_name)}")
        printer.progress().note(toolkits_by_name[name].plan())
        install(toolkits_by_name[name], progress=printer.progress())
    states = {toolkit.name: describe_state(toolkit) for toolkit in selection}
    lines = [f"{t.name:<8} {text}" for t in selection for text in (t.title, states[t.name], f"--install {t.plan()}")]
    printer.lines({t.name: {"version": t.version, "state": states[t.name], "plan": t.plan()} for t in selection}, lines)


def _named(subject: str, action: str, name: str | None, why: bool) -> str | None:
    """Return the name that `targets` or `profiles` shows, or None to list all.

    Args:
        subject: "target" or "profile".

    Raises:
        UsageError: "show" has no name, or "list" has a name or --why.
    """
    if action == "show" and name is None:
        raise UsageError(f"no {subject} named", f"Give a name: `edgeq {subject}s` lists them")
    if action == "list" and (name is not None or why):
        raise UsageError(
            f"{name or '--why'} does not go with a list of all {subject}s",
            f"Leave it out, or type `edgeq {subject}s show {name or 'NAME'}`",
        )
    return name


ACTION = click.argument("action", type=click.Choice(["list", "show"]), default="list")
NAME = click.argument("name", required=False, shell_complete=complete_target)
WHY = click.option(
    "--why", is_flag=True, help="With show: print the reason for each default and the source of that reason."
)


@command("targets")
@ACTION
@NAME
@WHY
def targets_command(printer: Printer, why: bool, **given: Any) -> None:
    """List deployment targets, or show one. NAME can be the name of a target or a .toml file."""
    from edgeq.hardware import show
    from edgeq.hardware.target import load_targets, resolve

    if (named := _named("target", why=why, **given)) is None:
        record, lines = show.list_targets(load_targets())
    else:
        record, lines = show.describe_target(resolve(named), why=why or printer.verbose)
    printer.lines(record, lines)


@command("profiles")
@ACTION
@NAME
@WHY
def profiles_command(printer: Printer, why: bool, **given: Any) -> None:
    """List hardware profiles, or show one. NAME can be the name of a profile or a .toml file.

    If NAME is a target, the command shows the target's profile with the target's overrides.
    """
    from edgeq.hardware import show
    from edgeq.hardware.profile import load_profiles
    from edgeq.hardware.target import resolve

    named, profiles = _named("profile", why=why, **given), load_profiles()
    if named is None:
        record, lines = show.list_profiles(profiles)
    else:
        profile = profiles.get(named) or resolve(named).profile
        record, lines = show.describe_profile(profile, why=why or printer.verbose)
    printer.lines(record, lines)


@click.group("preprocess")
def preprocess_command() -> None:
    """List preprocessings, or show the arithmetic of one."""


@command("list", within=preprocess_command)
def list_preprocess(printer: Printer) -> None:
    """List the names, steps and source options that --preprocess accepts."""
    from edgeq.data.preprocess import list_preprocessings

    record = list_preprocessings()
    lines = [
        "Names:",
        *(f"  {entry['name']:<20}{entry['title']}" for entry in record["preprocessings"]),
        "Steps, applied in the order written, such as 'resize=short:256,crop=224,divide=255':",
        *(f"  {name:<20}{text}" for name, text in record["steps"].items()),
        f"  {record['filters']}",
        "Source options, among the steps or in the [source] table of a .toml file:",
        *(f"  {name:<20}{text}" for name, text in record["source"].items()),
    ]
    printer.lines(record, lines)


@command("show", within=preprocess_command)
@click.argument("name")
def show_preprocess(name: str, printer: Printer) -> None:
    """Show the exact arithmetic of a preprocessing pipeline.

    NAME can be a name, a .toml file, file.py:function, or steps.
    """
    from edgeq.data.preprocess import show_preprocessing

    record = show_preprocessing(name)
    lines = [
        f"{record['name']}: {record['title']}" if record["title"] else record["name"],
        *(f"  {number}. {line}" for number, line in enumerate(record["arithmetic"], 1)),
        *(f"  source.{key} = {value}" for key, value in record["spec"].get("source", {}).items()),
        "Integers become float32 before arithmetic; constants are rounded to the array's dtype.",
    ]
    printer.lines(record, lines)


@command("extensions")
def extensions_command(printer: Printer) -> None:
    """List the tasks, decoders, preprocessing steps, recoveries and backends, and the calibration methods with their
    options.

    The lists include the entries of installed plug-ins and name each plug-in's package (docs/extending.md).
    """
    from edgeq.backends import base
    from edgeq.calibration import methods
    from edgeq.data import steps
    from edgeq.measure import decoders, task
    from edgeq.tuning.recover import methods as recoveries

    record = {
        "calibration_methods": _rows(methods, lambda method: {"title": method.title, "options": _options(method)}),
        "tasks": _rows(task, lambda found: {"title": found.title, "takes": sorted(found.takes)}),
        "decoders": _rows(decoders, lambda decoder: {"title": decoder.title}),
        "preprocess_steps": _rows(steps, lambda step: {"title": step.help, "aliases": list(step.aliases)}),
        "recoveries": _rows(recoveries, lambda recovery: {"title": recovery.title, "stage": recovery.stage}),
        "backends": _rows(base, lambda backend: {"title": backend.title}),
    }
    printer.lines(record, _extension_lines(record))


def _rows(module: Any, describe: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    registry = module.REGISTRY
    return [{"name": name, **describe(extension), "from": registry.owner(name)} for name, extension in registry.items()]


def _options(method: Any) -> list[dict[str, Any]]:
    return [{"name": option.name, "default": option.default, "help": option.help} for option in method.options]


def _extension_lines(record: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    from edgeq.measure.task import argument_of

    for kind, rows in record.items():
        yield f"{kind.replace('_', ' ')}:"
        for row in rows:
            origin = "" if row["from"] == "edgeq" else f" ({row['from']})"
            yield f"  {row['name']:<26}{row['title']}{origin}"
            if takes := row.get("takes"):
                yield f"  {'':<26}takes {', '.join('--' + argument_of(option).replace('_', '-') for option in takes)}"
            for option in row.get("options", ()):
                yield f"  {'':<26}{option['name']}={option['default']:g}: {option['help']}"
