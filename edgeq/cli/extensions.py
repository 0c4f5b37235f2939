"""`edgeq extensions`: what is registered, with options and the package that each comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Printer, common

if TYPE_CHECKING:
    from edgeq.util.registry import Registry


@click.command()
@common
def command(printer: Printer) -> None:
    """List calibration methods with their options, tasks, decoders, preprocessing steps, recoveries, improvements
    of poor results, and backends.

    Those of installed plug-ins are among them, with the package that each comes from: docs/extending.md.
    """
    from edgeq.backends.base import REGISTRY as BACKENDS
    from edgeq.calibrate.methods import REGISTRY as METHODS
    from edgeq.data.steps import REGISTRY as STEPS
    from edgeq.jobs.checks import REGISTRY as IMPROVEMENTS
    from edgeq.measure.decoders import REGISTRY as DECODERS
    from edgeq.measure.task import REGISTRY as TASKS
    from edgeq.tune.recover.methods import REGISTRY as RECOVERIES

    plain = {
        "calibration_methods": _rows(METHODS, lambda method: {"title": method.title, "options": _options(method)}),
        "tasks": _rows(TASKS, lambda task: {"title": task.title, "takes": sorted(task.takes)}),
        "decoders": _rows(DECODERS, lambda decoder: {"title": decoder.title}),
        "preprocess_steps": _rows(STEPS, lambda step: {"title": step.help, "aliases": list(step.aliases)}),
        "recoveries": _rows(RECOVERIES, lambda recovery: {"title": recovery.title, "stage": recovery.stage}),
        "improvements": _rows(IMPROVEMENTS, lambda improvement: {"title": improvement.title}),
        "backends": _rows(BACKENDS, lambda backend: {"title": backend.title}),
    }
    printer.lines(plain, _lines(plain))


def _rows(registry: Registry[Any], describe: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, **describe(found), "from": registry.owner(name)} for name, found in registry.items()]


def _options(method: Any) -> list[dict[str, Any]]:
    return [{"name": option.name, "default": option.default, "help": option.help} for option in method.options]


def _lines(plain: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    from edgeq.measure.task import option_of

    for kind, rows in plain.items():
        yield f"{kind.replace('_', ' ')}:"
        for row in rows:
            origin = "" if row["from"] == "edgeq" else f" ({row['from']})"
            yield f"  {row['name']:<26}{row['title']}{origin}"
            if takes := row.get("takes"):
                yield f"  {'':<26}takes {', '.join(map(option_of, takes))}"
            for option in row.get("options", ()):
                yield f"  {'':<26}{option['name']}={option['default']:g}: {option['help']}"
