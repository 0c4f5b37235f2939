"""Define the command line. A command's file is imported only when that command runs, so that `--help` is instant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from edgeq import __version__
from edgeq.errors import UsageError, suggest
from edgeq.util.process import begin, ends_in_one_line

# File → command → its one-line help. The help is here because `edgeq --help` does not import the files.
FILES = {
    "build": {
        "quantize": "Quantize a model for a machine or a target and prove the result.",
        "tune": "Find the best int8 model that keeps the accuracy on this machine.",
        "package": "Quantize for one or more targets and write a bundle to deploy.",
    },
    "calibrate": {"calibrate": "Run the float model once over samples and save the statistics."},
    "measure": {
        "verify": "Check a bundle's hashes, load it, and run its self-test.",
        "bench": "Measure latency and throughput of a model or a bundle.",
        "eval": "Measure accuracy of a model or a bundle on labelled data.",
    },
    "infer": {"infer": "Show what a model or a bundle finds in images, and draw it."},
    "compare": {
        "compare": "Compare two models or bundles: size, accuracy, speed, coverage.",
        "gate": "Fail a CI build if a model is worse than a baseline.",
    },
    "explain": {
        "inspect": "Show a model's operators, shapes and MACs, and what runs in int8.",
        "debug": "Find the layers that lose accuracy in a quantized model.",
        "report": "Write a bundle's report: one HTML file that opens offline.",
        "audit": "List the layers that saturate on CPUs without VNNI.",
    },
    "info": {
        "detect": "Show this machine and the profile that fits it.",
        "doctor": "Show what is installed and what works; with --gpu, test the GPU.",
        "toolkit": "List the vendors' toolkits that backends need, or install one.",
        "targets": "List deployment targets, or show one.",
        "profiles": "List hardware profiles, or show one with its reasons.",
        "preprocess": "List preprocessings, or show the arithmetic of one.",
        "extensions": "List calibration methods, decoders, steps, recoveries and backends.",
    },
    "device": {
        "device": "List boards, prepare one over SSH, and make emulated machines.",
        "emulate": "Make emulated machines that run other targets' kernels.",
    },
    "ship": {
        "sign": "Sign a bundle with a key, in the OpenSSF Model Signing format.",
        "push": "Upload a bundle to an OCI registry.",
        "pull": "Download a bundle from an OCI registry by its digest.",
    },
    "convert": {
        "retarget": "Rewrite a quantized model for another runtime.",
        "emit-c": "Write C from a model that was quantized for a systolic array.",
    },
    "demo": {"demo": "Quantize, prove, verify and time the built-in demo model."},
    "run": {"run": "Run a recipe: commands and their options in one TOML file."},
}
COMMANDS = {name: text for commands in FILES.values() for name, text in commands.items()}
GROUPS = {
    "explain": "Show a model's content and where it loses accuracy: inspect, debug, report, audit.",
    "info": "Show this machine, and the targets, data steps and plug-ins that edgeq knows.",
    "ship": "Sign a bundle, push it to a registry, or pull it from a registry.",
}
"""Group → its help. A group contains the commands of the file with the same name. They can also be typed without the
group.
"""
ALIASES = {"evaluate": "eval"}
"""Other name of a command, such as that of its Python function → name."""
SHOWN = {
    "Build": ("quantize", "tune", "package", "calibrate"),
    "Prove": ("infer", "verify", "bench", "eval", "compare", "explain"),
    "Machines and delivery": ("info", "device", "ship"),
}


def _print_skill(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Print the text of skill.md and end the command."""
    if wanted:
        click.echo((Path(__file__).parent.parent / "skill.md").read_text("utf-8"), nl=False)
        ctx.exit()


OPTIONS = {
    "info": click.Option(
        ["--skill"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_skill,
        help="Print instructions for coding agents: what to type, exit codes, JSON keys.",
    )
}
"""Group → its own option."""
_ALSO = "Start with `edgeq demo`. More commands: run RECIPE.toml, retarget, gate, emit-c. Every command has --help."


class _LazyGroup(click.Group):
    """Define a group that imports a command only when it runs.

    Args:
        sections: the commands that the group's help shows, by title.
        hidden: commands that can be typed but are not shown in the help.
    """

    def __init__(self, *, sections: Mapping[str, Iterable[str]], hidden: Iterable[str] = (), **attributes: Any) -> None:
        super().__init__(**attributes)
        self.sections = sections
        self.names = list(dict.fromkeys([*(name for names in sections.values() for name in names), *hidden]))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help, then the hidden commands. click would sort them by name."""
        return self.names

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the file of `cmd_name` and return its command, or None if there is no command of that name."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in self.names:
            return None
        if cmd_name in GROUPS:
            return _LazyGroup(
                name=cmd_name,
                help=GROUPS[cmd_name],
                sections={"Commands": FILES[cmd_name]},
                params=[option] if (option := OPTIONS.get(cmd_name)) else [],
            )
        file = next(file for file, commands in FILES.items() if cmd_name in commands)
        command = getattr(importlib.import_module(f"edgeq.cli.{file}"), f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' short help. The texts come from `FILES` and `GROUPS`, so `--help` imports no command."""
        width = max(len(name) for names in self.sections.values() for name in names)
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), COMMANDS.get(name) or GROUPS[name]) for name in names])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names. If no command has that name, the error suggests commands
        with similar names.
        """
        if args and not args[0].startswith("-") and ALIASES.get(args[0], args[0]) not in self.names:
            suggestion = suggest(args[0], self.names)
            raise UsageError(
                f"No such command {args[0]!r}", suggestion if "?" in suggestion else f"See `{ctx.command_path} --help`"
            )
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run one command and exit. Any failure prints at most one line."""
        with ends_in_one_line():
            code = super().main(*args, **{**options, "standalone_mode": False})
            sys.exit(code if isinstance(code, int) else 0)


@click.group(
    cls=_LazyGroup,
    sections=SHOWN,
    hidden=COMMANDS,
    epilog=_ALSO,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="edgeq")
def group() -> None:
    """Quantize ONNX models for the hardware they will run on, prove the result, and ship it as a bundle."""


def main() -> None:
    """Run the `edgeq` program."""
    with ends_in_one_line():
        group(prog_name="edgeq", obj=begin())
